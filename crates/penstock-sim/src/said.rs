//! Translates frames of a client to the broker's nouns, and to and from bytes.

use bytes::{Bytes, BytesMut};
use penstock_message::{Consume, Durability, Key, Lease, MessageId, Op, SessionId, Tx};
use penstock_wire::proto::{self, ToBroker};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, PROTOCOL_VERSION, WireError, convert, encode_frame};

use crate::words;

/// Content of a frame.
#[derive(Clone, Debug, Default)]
pub struct Said {
    pub hello: Option<Hello>,
    /// Whole transactions, or the last part of one.
    pub commits: Vec<Commit>,
    /// Earlier parts of a transaction; they do not count until the last.
    pub parts: Vec<(u64, Durability, Tx)>,
    pub consumers: Vec<Consumer>,
    pub watch: Vec<Key>,
    /// Job that waits for these keys, if any.
    pub waiter: Option<MessageId>,
    /// Keys that `waiter` no longer waits for, and keys that nobody watches any more.
    pub wait_over: Vec<Key>,
    pub unwatch: Vec<Key>,
    pub ping: bool,
    pub goodbye: bool,
}

#[derive(Clone, Debug)]
pub struct Hello {
    pub session: SessionId,
    pub heartbeat_ms: u64,
    pub last_seq: u64,
    pub leases: Vec<Lease>,
}

#[derive(Clone, Debug)]
pub struct Commit {
    pub first_seq: u64,
    pub durability: Durability,
    pub txs: Vec<Tx>,
    /// Operations of the last part, if it was sent in parts.
    pub last_part: Option<Tx>,
}

#[derive(Clone, Debug, Default)]
pub struct Consumer {
    pub wish: Consume,
    /// Whether its credit becomes zero; the rest of the request is then ignored.
    pub stop: bool,
}

impl Consumer {
    fn in_words(&self) -> String {
        let Consume {
            consumer,
            queues,
            tasks,
            add_credit,
            held_by,
            ..
        } = &self.wish;
        let held = held_by.as_ref().map(|jobs| format!(", held by {jobs:?}"));
        let held = held.unwrap_or_default();
        match self.stop {
            true => format!("consumer {consumer} takes no more"),
            false => {
                format!("consumer {consumer} takes {add_credit} of {queues:?} and {tasks:?}{held}")
            }
        }
    }
}

impl From<Consume> for Consumer {
    fn from(wish: Consume) -> Self {
        Self { wish, stop: false }
    }
}

impl From<Consumer> for proto::Consumer {
    fn from(consumer: Consumer) -> Self {
        Self {
            stop: consumer.stop,
            ..consumer.wish.into()
        }
    }
}

impl From<proto::Consumer> for Consumer {
    fn from(wire: proto::Consumer) -> Self {
        Self {
            stop: wire.stop,
            wish: wire.into(),
        }
    }
}

impl Said {
    pub fn goodbye() -> Self {
        Self {
            goodbye: true,
            ..Self::default()
        }
    }

    /// Describes it for people who read the trace.
    pub fn in_words(&self) -> String {
        let mut words = Vec::new();
        if let Some(hello) = &self.hello {
            words.push(format!("hello, {} leases", hello.leases.len()));
        }
        words.extend(
            self.parts
                .iter()
                .map(|(seq, _, tx)| format!("a part of {seq}: {} ops", tx.ops.len())),
        );
        for commit in &self.commits {
            let (seq, durability, txs) = (commit.first_seq, commit.durability, &commit.txs);
            for (seq, tx) in (seq..).zip(txs) {
                words.push(format!("{seq} for {durability:?}: {}", words::tx(tx)));
            }
        }
        words.extend(self.consumers.iter().map(Consumer::in_words));
        if !self.watch.is_empty() {
            let keys: Vec<String> = self.watch.iter().map(words::key).collect();
            words.push(format!("watch {}", keys.join(", ")));
        }
        words.extend(self.ping.then(|| "ping".to_string()));
        words.extend(self.goodbye.then(|| "goodbye".to_string()));
        words.join(", ")
    }

    pub fn encode(&self) -> BytesMut {
        let part = |seq: u64, durability: Durability, tx: &Tx, part: proto::Part| proto::Commit {
            first_seq: seq,
            durability: proto::Durability::from(durability).into(),
            txs: vec![convert::encode_tx(tx.clone())],
            part: part.into(),
        };
        let parts = self
            .parts
            .iter()
            .map(|(seq, durability, tx)| part(*seq, *durability, tx, proto::Part::More));
        let commits = self.commits.iter().map(|commit| match &commit.last_part {
            Some(last) => part(commit.first_seq, commit.durability, last, proto::Part::Last),
            None => proto::Commit {
                first_seq: commit.first_seq,
                durability: proto::Durability::from(commit.durability).into(),
                txs: commit.txs.iter().cloned().map(convert::encode_tx).collect(),
                part: proto::Part::Whole.into(),
            },
        });
        let frame = ToBroker {
            hello: self.hello.as_ref().map(|hello| proto::Hello {
                protocol_version: PROTOCOL_VERSION,
                session: Bytes::copy_from_slice(&hello.session.0),
                name: "simulated".to_string(),
                heartbeat_ms: hello.heartbeat_ms,
                last_seq: hello.last_seq,
                leases: hello.leases.iter().copied().map(Into::into).collect(),
                ..proto::Hello::default()
            }),
            commits: parts.chain(commits).collect(),
            consumers: self.consumers.iter().cloned().map(Into::into).collect(),
            watch: (!self.watch.is_empty()).then(|| proto::Watch {
                keys: self.watch.iter().cloned().map(Into::into).collect(),
                ..proto::Watch::default()
            }),
            ping: self.ping,
            goodbye: self.goodbye,
            ..ToBroker::default()
        };
        let mut bytes = BytesMut::new();
        encode_frame(&frame, &mut bytes);
        bytes
    }
}

/// Reads the bytes that one connection carries to the broker, from any client.
pub struct Hearing {
    decoder: Decoder<ToBroker>,
    /// Hello that still lacks some of its leases.
    greeting: Option<Hello>,
    /// Operations of a transaction that has not arrived completely.
    staged: Vec<Op>,
}

impl Default for Hearing {
    fn default() -> Self {
        Self {
            decoder: Decoder::new(MAX_FRAME_BYTES),
            greeting: None,
            staged: Vec::new(),
        }
    }
}

impl Hearing {
    pub fn extend(&mut self, bytes: &[u8]) {
        self.decoder.extend(bytes);
    }

    /// Returns the next complete frame: a hello or a transaction counts once its last part has arrived.
    pub fn next_said(&mut self) -> Result<Option<Said>, WireError> {
        let Some(frame) = self.decoder.next_message()? else {
            return Ok(None);
        };
        let mut said = Said {
            ping: frame.ping,
            goodbye: frame.goodbye,
            ..Said::default()
        };
        if let Some(hello) = frame.hello {
            let leases: Vec<Lease> = convert::all(hello.leases)?;
            let greeting = match self.greeting.take() {
                Some(mut begun) => {
                    begun.leases.extend(leases);
                    begun
                }
                None => Hello {
                    session: convert::session_id(&hello.session)?,
                    heartbeat_ms: hello.heartbeat_ms,
                    last_seq: hello.last_seq,
                    leases,
                },
            };
            match hello.continued {
                true => self.greeting = Some(greeting),
                false => said.hello = Some(greeting),
            }
        }
        for commit in frame.commits {
            let durability = convert::durability(commit.durability)?;
            let mut txs = convert::decode_txs(commit.txs)?;
            let first_seq = commit.first_seq;
            let mut last_part = None;
            match proto::Part::try_from(commit.part) {
                Ok(proto::Part::More) => {
                    let tx = txs.pop().unwrap_or_default();
                    self.staged.extend(tx.ops.iter().cloned());
                    said.parts.push((first_seq, durability, tx));
                    continue;
                }
                Ok(proto::Part::Last) => {
                    last_part = txs.pop();
                    let mut ops = std::mem::take(&mut self.staged);
                    ops.extend(last_part.iter().flat_map(|tx| tx.ops.iter().cloned()));
                    txs = vec![ops.into()];
                }
                _ => {}
            }
            said.commits.push(Commit {
                first_seq,
                durability,
                txs,
                last_part,
            });
        }
        said.consumers = frame.consumers.into_iter().map(Consumer::from).collect();
        if let Some(watch) = frame.watch {
            said.watch = convert::all(watch.keys)?;
            said.wait_over = convert::all(watch.wait_over)?;
            said.unwatch = convert::all(watch.unwatch)?;
            if !watch.waiter.is_empty() {
                said.waiter = Some(convert::message_id(&watch.waiter)?);
            }
        }
        Ok(Some(said))
    }
}
