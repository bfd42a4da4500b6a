//! Turns the frames of clients into inputs of the core, or ends the connection.

use bytes::Bytes;
use penstock_broker::{Answer, ConnId, Input, Query};
use penstock_message::{Lease, Space};
use penstock_wire::proto::{self, ToBroker, ToClient, close::Why};
use penstock_wire::{
    MAX_PRESENTED_LEASES, MAX_QUERIES_A_FRAME, Versions, WireError, convert, encoded_frame_len,
};

use super::{Engine, Peer};
use crate::connection::{AcceptedHello, ConnectionStage};
use crate::token::Token;

/// Range of heartbeats. A shorter one would be lost to scheduling; a longer one hides the dead for hours.
const HEARTBEAT_RANGE_MS: std::ops::RangeInclusive<u64> = 100..=3_600_000;

/// Maximum total movement of a clock: a hundred years.
const MAX_MOVED_MS: u64 = 100 * 366 * 86_400_000;
/// Maximum of schedule times that one query passes; then it is answered, and the client asks again.
const TIMES_PASSED: usize = 10_000;
/// Maximum of turns for the schedules that are due at one time.
const MOST_TURNS: usize = 1_000;

impl Engine {
    pub(super) fn handle_frame(
        &mut self,
        conn: ConnId,
        mut frame: ToBroker,
    ) -> Result<(), RefusedFrame> {
        let stage = &self.connections[&conn].stage;
        match (
            frame.hello.take(),
            matches!(stage, ConnectionStage::Greeting { .. }),
        ) {
            (Some(hello), true) => self.greet(conn, hello)?,
            (None, true) => return Err(protocol("the first frame is not a hello")),
            (Some(_), false) => return Err(protocol("a second hello")),
            (None, false) => {}
        }
        if !self.connections[&conn].is_open() {
            return Ok(());
        }
        for progress in frame.progress {
            let progress = progress.try_into()?;
            self.input(Input::Progress { conn, progress });
        }
        for commit in frame.commits {
            self.commit(conn, commit)?;
        }
        for consumer in frame.consumers {
            self.input(match consumer.stop {
                true => Input::StopConsuming {
                    conn,
                    consumer: consumer.consumer,
                },
                false => Input::Consume {
                    conn,
                    consume: consumer.into(),
                },
            });
        }
        if let Some(watch) = frame.watch {
            if !watch.keys.is_empty() {
                let keys = convert::all(watch.keys)?;
                let waiter = match watch.waiter.is_empty() {
                    true => None,
                    false => Some(convert::message_id(&watch.waiter)?),
                };
                self.input(Input::Watch { conn, keys, waiter });
            }
            if !watch.unwatch.is_empty() {
                let keys = convert::all(watch.unwatch)?;
                self.input(Input::Unwatch { conn, keys });
            }
            if !watch.wait_over.is_empty() {
                let keys = convert::all(watch.wait_over)?;
                let waiter = convert::message_id(&watch.waiter)?;
                self.input(Input::WaitOver { conn, keys, waiter });
            }
        }
        if frame.queries.len() > MAX_QUERIES_A_FRAME {
            return Err(protocol("more than 1,024 queries in one frame"));
        }
        for query in frame.queries {
            let (id, query) = query.try_into()?;
            self.query(conn, id, query);
        }
        if let Some(report) = frame.report {
            self.input(Input::Report {
                conn,
                report: report.into(),
            });
        }
        for reply in frame.replies {
            self.input(Input::Reply {
                conn,
                ask: reply.id,
                reply: reply.reply,
            });
        }
        if frame.ping {
            let pong = ToClient {
                pong: true,
                ..ToClient::default()
            };
            self.send_frame(conn, &pong);
        }
        // This comes last, whatever other fields the frame has.
        if frame.goodbye {
            self.end_connection(conn, true);
        }
        Ok(())
    }

    /// Handles a hello, or the continuation of one.
    fn greet(&mut self, conn: ConnId, mut hello: proto::Hello) -> Result<(), RefusedFrame> {
        let connection = self.connections.get_mut(&conn).expect("it was heard");
        let leases: Vec<Lease> = convert::all(std::mem::take(&mut hello.leases))?;
        let continued = hello.continued;
        let accepted = match connection.take_hello() {
            Some(mut begun) => {
                begun.leases.extend(leases);
                begun
            }
            None => {
                let version = check_hello(&hello, connection.peer, self.options.token.as_ref())?;
                connection.trust();
                Box::new(AcceptedHello {
                    hello,
                    version,
                    leases,
                })
            }
        };
        if accepted.leases.len() > MAX_PRESENTED_LEASES {
            return Err(protocol("a hello with more than 262,144 leases"));
        }
        if continued {
            connection.keep_hello(accepted);
            return Ok(());
        }
        let AcceptedHello {
            hello,
            version,
            leases,
        } = *accepted;
        let session = convert::session_id(&hello.session)?;
        let heartbeat_ms = match hello.heartbeat_ms {
            0 => self.options.broker.default_heartbeat_ms,
            asked => asked.clamp(*HEARTBEAT_RANGE_MS.start(), *HEARTBEAT_RANGE_MS.end()),
        };
        connection.stage = ConnectionStage::Open {
            heartbeat_ms,
            version,
        };
        self.schedule_check(conn);
        self.input(Input::Connected {
            conn,
            session,
            name: hello.name,
            heartbeat_ms,
            last_seq: hello.last_seq,
            leases,
        });
        Ok(())
    }

    fn commit(&mut self, conn: ConnId, commit: proto::Commit) -> Result<(), RefusedFrame> {
        // Computed only when it may have to wait.
        let bytes = match self.journal.space() {
            Space::NoSettlements => encoded_frame_len(&commit),
            _ => 0,
        };
        let durability = convert::durability(commit.durability)?;
        let part = proto::Part::try_from(commit.part)
            .map_err(|_| protocol("an unknown part of a transaction"))?;
        if part == proto::Part::Whole {
            let txs = convert::decode_txs(commit.txs)?;
            let input = Input::Commit {
                conn,
                first_seq: commit.first_seq,
                durability,
                txs,
            };
            self.decide(conn, bytes, input);
            return Ok(());
        }
        let [tx] = <[Bytes; 1]>::try_from(commit.txs)
            .map_err(|_| protocol("a part of a transaction that is not exactly one"))?;
        let input = Input::CommitPart {
            conn,
            seq: commit.first_seq,
            durability,
            tx: convert::decode_tx(tx)?,
            last: part == proto::Part::Last,
        };
        self.decide(conn, bytes, input);
        Ok(())
    }

    fn query(&mut self, conn: ConnId, id: u64, query: Query) {
        let answer = match query {
            Query::Stop if self.options.stop_on_request => {
                self.stop_requested = true;
                Answer::Stopping
            }
            Query::Stop => Answer::Refused(
                "only a local broker can be stopped by a client; send its process SIGTERM"
                    .to_owned(),
            ),
            Query::SetClock {
                forward_ms,
                by_schedules,
            } => match self.move_clock(forward_ms, by_schedules) {
                Ok(()) => Answer::Clock(self.now.wall_ms),
                Err(why) => Answer::Refused(why.to_owned()),
            },
            query => return self.input(Input::Query { conn, id, query }),
        };
        self.answer(conn, id, answer);
    }

    /// Moves the clock. Everything due by then is due when the answer is read. With `by_schedules`, stops where a
    /// schedule has made a job or a delayed job is due, so that jobs run at their times. Also stops after many times,
    /// so that the answer comes soon.
    fn move_clock(&mut self, forward_ms: u64, by_schedules: bool) -> Result<(), &'static str> {
        // A countdown of this many milliseconds is over when the next one begins, not before.
        let mut left_ms = forward_ms.saturating_add(1);
        if !self.options.is_double {
            return Err("only the clock of a memory: broker, a double for tests, can be moved");
        }
        if self.clock_moved_ms.saturating_add(left_ms) > MAX_MOVED_MS {
            return Err("the clock can be moved by at most a hundred years in total");
        }
        if by_schedules {
            match self.advance_by_schedules(left_ms) {
                Some(passed_ms) => left_ms -= passed_ms,
                None => return Ok(()),
            }
        }
        self.advance_clock(left_ms);
        Ok(())
    }

    /// Passes the times of schedules and everything else that follows the clock, within this many milliseconds. Returns
    /// the time passed; `None`: it has stopped.
    fn advance_by_schedules(&mut self, most_ms: u64) -> Option<u64> {
        let until = self.now.wall_ms.saturating_add(most_ms);
        let begun = self.now.wall_ms;
        let given = self.broker.clock_progress();
        for _ in 0..TIMES_PASSED {
            self.run_due_schedules();
            if self.broker.clock_progress() != given {
                return None;
            }
            let left_ms = until - self.now.wall_ms;
            match self.broker.next_on_clock_ms() {
                Some(ms) if ms <= left_ms => self.advance_clock(ms),
                _ => return Some(self.now.wall_ms - begun),
            }
        }
        None
    }

    fn run_due_schedules(&mut self) {
        for _ in 0..MOST_TURNS {
            self.tick(self.now);
            self.pump();
            if !self.broker.has_due_schedule() {
                return;
            }
        }
    }

    fn advance_clock(&mut self, ms: u64) {
        self.clock_moved_ms += ms;
        self.clock_move_ms += ms;
        self.now.move_on(ms);
        for connection in self.connections.values_mut() {
            // The client was heard just now, whatever the clock says.
            connection.excuse_silence(self.now.mono_ms, ms);
        }
        self.tick(self.now);
    }

    pub(super) fn input(&mut self, input: Input) {
        self.broker.handle(self.now, input);
    }
}

/// Reason to close a connection.
pub(super) struct RefusedFrame {
    pub(super) why: Why,
    pub(super) text: String,
}

/// Returns the protocol version to speak after a first hello, or the reason for a refusal.
fn check_hello(
    hello: &proto::Hello,
    peer: Peer,
    token: Option<&Token>,
) -> Result<u32, RefusedFrame> {
    // A client that must present a token is never admitted if the broker has none.
    let may_enter = peer == Peer::Trusted || token.is_some_and(|token| token.is(&hello.token));
    if !may_enter {
        return Err(RefusedFrame {
            why: Why::Unauthorized,
            text: match hello.token.is_empty() {
                true => "this broker requires a token: set PENSTOCK_TOKEN to the one it was started with".to_owned(),
                false => "wrong PENSTOCK_TOKEN: set it to the token that the broker was started with".to_owned(),
            },
        });
    }
    let ours = Versions::TODAY;
    ours.common(hello.protocol_version).ok_or_else(|| RefusedFrame {
        why: Why::Version,
        text: format!(
            "this client speaks version {} of the protocol and this broker (penstock {version}) {ours}: \
             install penstock {version} for the client",
            hello.protocol_version,
            version = env!("CARGO_PKG_VERSION"),
        ),
    })
}

fn protocol(text: &str) -> RefusedFrame {
    RefusedFrame {
        why: Why::Protocol,
        text: text.to_owned(),
    }
}

impl From<WireError> for RefusedFrame {
    fn from(error: WireError) -> Self {
        protocol(&error.to_string())
    }
}
