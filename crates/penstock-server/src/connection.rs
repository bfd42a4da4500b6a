//! Protocol state of a client: which frames it may send, which bytes wait for it, and whether it is still there.
//! Decides nothing about queues.

use bytes::{Buf, BytesMut};
use penstock_faults::perhaps;
use penstock_message::Lease;
use penstock_wire::proto::{self, ToBroker, ToClient};
use penstock_wire::{Decoder, MAX_FRAME_BYTES, MAX_HELLO_BYTES, WireError, encode_frame};

/// Time within which a new connection must say hello.
const GREETING_MS: u64 = 5_000;
/// Time for a closing connection to receive the reason.
const CLOSING_MS: u64 = 2_000;
/// Waiting bytes above which no deliveries and values are added.
const HIGH_WATER_BYTES: usize = 1 << 20;
/// Waiting bytes to which it must fall before deliveries and values are added again.
const LOW_WATER_BYTES: usize = 256 << 10;
/// Waiting bytes above which a client is not read until it has received most of them.
const BACKLOG_BYTES: usize = 4 << 20;
/// Size above which an empty buffer is freed.
const KEPT_BYTES: usize = 128 << 10;

/// Maximum bytes of a client's frames that wait for disk space.
const BLOCKED_BYTES: usize = 1 << 20;

/// Whether a connection must show the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The socket's file mode admits only permitted users, or no token was set.
    Trusted,
    MustShowToken,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: Peer,
    pub(crate) stage: ConnectionStage,
    decoder: Decoder<ToBroker>,
    out: BytesMut,
    received_at_ms: u64,
    sent_at_ms: u64,
    /// Whether its welcome is on its way. Nothing else may be sent before it.
    pub(crate) welcomed: bool,
    /// Whether the core knows that there is no room.
    pub(crate) full: bool,
    /// Whether it is in the engine's list of connections with something to send.
    pub(crate) listed: bool,
    /// Whether it is not read because it receives its waiting bytes too slowly.
    backlogged: bool,
    /// Bytes of its frames that the engine holds back until there is disk space.
    pub(crate) blocked_bytes: usize,
    /// Time of the next check of its deadline.
    pub(crate) check_at_ms: u64,
}

#[derive(Debug)]
pub(crate) enum ConnectionStage {
    /// Only a hello is accepted. The beginning of a continued hello is kept here.
    Greeting {
        until_ms: u64,
        hello: Option<Box<AcceptedHello>>,
    },
    /// The core knows the connection, and this protocol version is spoken.
    Open { heartbeat_ms: u64, version: u32 },
    /// Waiting bytes are still sent; nothing more is read.
    Closing { until_ms: u64 },
}

/// Hello with a valid token and version.
#[derive(Debug)]
pub(crate) struct AcceptedHello {
    pub(crate) hello: proto::Hello,
    /// Version to speak from now on.
    pub(crate) version: u32,
    pub(crate) leases: Vec<Lease>,
}

/// Action that is due for a connection at this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DueAction {
    Nothing,
    /// Nothing was sent to the client for a third of the heartbeat.
    SendPong,
    /// No hello came.
    NoHello,
    /// Nothing was received for a whole heartbeat.
    Silent {
        heartbeat_ms: u64,
    },
    /// The client does not receive its waiting bytes.
    GiveUp,
}

impl Connection {
    pub(crate) fn new(now_ms: u64, peer: Peer) -> Self {
        Self {
            peer,
            stage: ConnectionStage::Greeting {
                until_ms: now_ms + GREETING_MS,
                hello: None,
            },
            decoder: Decoder::new(MAX_HELLO_BYTES),
            out: BytesMut::new(),
            received_at_ms: now_ms,
            sent_at_ms: now_ms,
            welcomed: false,
            full: false,
            listed: false,
            backlogged: false,
            blocked_bytes: 0,
            check_at_ms: u64::MAX,
        }
    }

    pub(crate) fn receive(&mut self, now_ms: u64, bytes: &[u8]) {
        // A backlogged client shows life only by receiving again.
        if !self.backlogged {
            self.received_at_ms = now_ms;
        }
        if !matches!(self.stage, ConnectionStage::Closing { .. }) {
            self.decoder.extend(bytes);
        }
    }

    pub(crate) fn next_frame(&mut self) -> Result<Option<ToBroker>, WireError> {
        if matches!(self.stage, ConnectionStage::Closing { .. }) || self.is_backlogged() {
            return Ok(None);
        }
        self.decoder.next_message()
    }

    /// Allows frames of any size: the hello was valid.
    pub(crate) fn trust(&mut self) {
        self.decoder.set_max_frame_bytes(MAX_FRAME_BYTES);
    }

    /// Takes the beginning of a continued hello.
    pub(crate) fn take_hello(&mut self) -> Option<Box<AcceptedHello>> {
        match &mut self.stage {
            ConnectionStage::Greeting { hello, .. } => hello.take(),
            _ => None,
        }
    }

    pub(crate) fn keep_hello(&mut self, begun: Box<AcceptedHello>) {
        if let ConnectionStage::Greeting { hello, .. } = &mut self.stage {
            *hello = Some(begun);
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.stage, ConnectionStage::Open { .. })
    }

    pub(crate) fn is_greeting(&self) -> bool {
        matches!(self.stage, ConnectionStage::Greeting { .. })
    }

    pub(crate) fn is_closing(&self) -> bool {
        matches!(self.stage, ConnectionStage::Closing { .. })
    }

    pub(crate) fn begin_closing(&mut self, now_ms: u64) {
        self.stage = ConnectionStage::Closing {
            until_ms: now_ms + CLOSING_MS,
        };
        self.decoder = Decoder::new(0);
    }

    pub(crate) fn send_frame(&mut self, now_ms: u64, frame: &ToClient) {
        self.sent_at_ms = now_ms;
        encode_frame(frame, &mut self.out);
        self.backlogged |= self.out.len() > BACKLOG_BYTES;
    }

    /// Whether the client has too many bytes left to receive; its own frames wait in that time.
    pub(crate) fn is_backlogged(&self) -> bool {
        self.backlogged
    }

    /// Whether enough of its bytes wait for disk space that further ones must wait too.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked_bytes > BLOCKED_BYTES
    }

    /// Frees the buffers that a quiet connection does not need.
    pub(crate) fn shrink_buffers(&mut self) {
        self.decoder.shrink();
        if self.out.is_empty() {
            self.out = BytesMut::new();
        }
    }

    pub(crate) fn outgoing(&self) -> &[u8] {
        &self.out
    }

    pub(crate) fn sent(&mut self, now_ms: u64, bytes: usize) {
        self.out.advance(bytes);
        if self.backlogged && bytes > 0 {
            // The client receives bytes, and its own frames are not read in that time.
            self.received_at_ms = now_ms;
            self.backlogged = self.out.len() > LOW_WATER_BYTES;
        }
        if self.out.is_empty() && self.out.capacity() > KEPT_BYTES {
            self.out = BytesMut::new();
        }
    }

    pub(crate) fn has_become_full(&self) -> bool {
        !self.full && (self.out.len() > HIGH_WATER_BYTES || perhaps!("full-early"))
    }

    pub(crate) fn has_room_again(&self) -> bool {
        self.full && self.out.len() <= LOW_WATER_BYTES
    }

    /// Excuses a client's silence for a time in which it was not read.
    pub(crate) fn excuse_silence(&mut self, now_ms: u64, unread_ms: u64) {
        self.received_at_ms = self.received_at_ms.saturating_add(unread_ms).min(now_ms);
        if let ConnectionStage::Greeting { until_ms, .. } = &mut self.stage {
            *until_ms = until_ms.saturating_add(unread_ms).min(now_ms + GREETING_MS);
        }
    }

    pub(crate) fn due(&self, now_ms: u64) -> DueAction {
        match self.stage {
            ConnectionStage::Greeting { until_ms, .. } if now_ms >= until_ms => DueAction::NoHello,
            ConnectionStage::Closing { until_ms } if now_ms >= until_ms => DueAction::GiveUp,
            ConnectionStage::Open { heartbeat_ms, .. }
                if now_ms >= self.received_at_ms + heartbeat_ms =>
            {
                DueAction::Silent { heartbeat_ms }
            }
            ConnectionStage::Open { heartbeat_ms, .. }
                if now_ms >= self.sent_at_ms + heartbeat_ms / 3 =>
            {
                DueAction::SendPong
            }
            _ => DueAction::Nothing,
        }
    }

    /// Returns the time to call [`Connection::due`] again, unless something is sent or received before.
    pub(crate) fn next_deadline_ms(&self) -> u64 {
        match self.stage {
            ConnectionStage::Greeting { until_ms, .. } | ConnectionStage::Closing { until_ms } => {
                until_ms
            }
            ConnectionStage::Open { heartbeat_ms, .. } => {
                (self.received_at_ms + heartbeat_ms).min(self.sent_at_ms + heartbeat_ms / 3)
            }
        }
    }
}
