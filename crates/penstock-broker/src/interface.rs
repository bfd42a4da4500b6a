//! Inputs and outputs of the core.

use bytes::Bytes;
use penstock_message::{
    Ask, CancelOrder, Consume, Delivery, Durability, Key, KeyState, Lease, MessageId, Progress,
    Receipt, RefusedWait, SessionId, Space, Tx, WallMs, WorkerReport,
};

// What travels between a client and the core stands with the nouns.
pub use penstock_message::{
    Answer, MessageInfo, MessageState, Notice, ProcessStatus, Query, QueueStatus, Status,
    WorkerStatus,
};

/// The time, as the shell reads it once for each input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds on a clock that never steps; its zero is the start of the process.
    pub mono_ms: u64,
    pub wall_ms: WallMs,
    /// The machine's own clock; `None`: the system does not tell.
    pub boot: Option<Boot>,
}

impl Now {
    /// Moves all clocks on.
    pub fn move_on(&mut self, ms: u64) {
        self.mono_ms += ms;
        self.wall_ms += ms;
        if let Some(boot) = &mut self.boot {
            boot.ms += ms;
        }
    }
}

/// The machine's own clock: nobody can set it, and it goes on while no broker runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boot {
    /// Id of this start of the machine; each has another.
    pub id: [u8; 16],
    /// Milliseconds since that start.
    pub ms: u64,
}

/// The place of a record in the journal: records are numbered from 1, without gaps, for the
/// journal's whole life. Zero is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// A connection, as the shell numbers it; never used again after `Disconnected`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

#[derive(Clone, Debug)]
pub enum Input {
    /// A client said hello. A second hello of one session fences the older connection (it gets
    /// `Close`). Answered by `Welcome`.
    Connected {
        conn: ConnId,
        session: SessionId,
        /// Name for people: `worker@host:pid`, for instance.
        name: String,
        /// Time for which the session's leases are held back for it after its connection broke.
        heartbeat_ms: u64,
        /// The highest sequence number this client has ever used in this session; 0 for a new one.
        last_seq: u64,
        /// Leases that the client still works on, or has settled without having received the confirm: that
        /// settlement is yet to be resent. It keeps those that `Welcome` names; of its others, the
        /// messages return.
        leases: Vec<Lease>,
    },
    /// `clean`: the client said goodbye, so its leases return at once, as `Returned`.
    Disconnected {
        conn: ConnId,
        clean: bool,
    },
    /// Transactions with contiguous sequence numbers from `first_seq`.
    Commit {
        conn: ConnId,
        first_seq: u64,
        durability: Durability,
        txs: Vec<Tx>,
    },
    /// Part of a transaction too large for a frame: its operations are kept until `last`, then
    /// applied as one `Tx`. Parts of other sessions and whole transactions of this one may not come between.
    CommitPart {
        conn: ConnId,
        seq: u64,
        durability: Durability,
        tx: Tx,
        last: bool,
    },
    /// Sets the queues, tasks and credit of a consumer.
    Consume {
        conn: ConnId,
        consume: Consume,
    },
    /// Stops deliveries to the consumer: its credit becomes 0.
    StopConsuming {
        conn: ConnId,
        consumer: u32,
    },
    /// Each key is answered by one `Values` entry when it is not pending, at once or later; a key
    /// that is pending now is answered `Pending` once first.
    Watch {
        conn: ConnId,
        keys: Vec<Key>,
        /// Running job inside which the client waits for the keys. Pending ones may also be answered by a refusal.
        waiter: Option<MessageId>,
    },
    Unwatch {
        conn: ConnId,
        keys: Vec<Key>,
    },
    /// The job waits for these keys no longer. The session still watches them.
    WaitOver {
        conn: ConnId,
        keys: Vec<Key>,
        waiter: MessageId,
    },
    /// `Query::Stop` and `Query::SetClock` never come here: the process around the core answers them.
    Query {
        conn: ConnId,
        id: u64,
        query: Query,
    },
    /// Whether the connection's outgoing buffer has room. Deliveries and values wait while it has none.
    Writable {
        conn: ConnId,
        writable: bool,
    },
    /// Space on the disk. The settlements that `Space::NoSettlements` forbids are for the
    /// shell to keep back: here they can only be refused or applied.
    Space(Space),
    /// Whether there is room in the segment in use for steps of operations that end messages: then they may go on
    /// even where `Space::NoSettlements` stops all else, for they free more than they take.
    StepsFit(bool),
    /// Bytes of records that fit on the disk, for the transactions of the next `Commit` or last part: sent
    /// before large ones. New work that is larger is refused, though there is plenty.
    Room {
        bytes: u64,
    },
    /// Whether the process holds as much memory as it may, so that no new work is taken.
    Memory {
        is_full: bool,
        limit_bytes: u64,
    },
    /// A worker's own figures and state, for `status`. Not journaled.
    Report {
        conn: ConnId,
        report: WorkerReport,
    },
    /// Progress of a job that the client runs. Not journaled; that of an ended lease is dropped.
    Progress {
        conn: ConnId,
        progress: Progress,
    },
    /// A worker's reply to a question, by the number that `Asks` gave it.
    Reply {
        conn: ConnId,
        ask: u64,
        reply: Bytes,
    },
}

/// Action for the shell. All of it is safe to be seen: `poll_output` returns an output only
/// once the records that it rests on are as durable as they were asked to be.
#[derive(Clone, Debug)]
pub enum Output {
    Welcome {
        conn: ConnId,
        /// Transactions up to this number are applied and durable, each simply `Applied`; the client
        /// resends the rest.
        applied_through: u64,
        /// Whether the session was not known although `last_seq` was not 0: unconfirmed transactions are `Unknown`.
        forgotten: bool,
        /// Presented leases that still hold.
        leases: Vec<Lease>,
    },
    /// All transactions up to `through` are confirmed. Those that were not simply
    /// `Applied { skipped: [] }` are listed. `early` are confirmed out of turn, because they asked
    /// for less durability than an earlier one.
    Confirm {
        conn: ConnId,
        through: u64,
        receipts: Vec<(u64, Receipt)>,
        early: Vec<u64>,
    },
    Deliver {
        conn: ConnId,
        deliveries: Vec<Delivery>,
    },
    /// Jobs that the client runs and is to stop. Comes after their deliveries, and again after each hello.
    Cancels {
        conn: ConnId,
        cancels: Vec<CancelOrder>,
    },
    /// Questions that the worker is to answer by `Reply`.
    Asks {
        conn: ConnId,
        asks: Vec<Ask>,
    },
    Values {
        conn: ConnId,
        values: Vec<(Key, KeyState)>,
    },
    /// Waits inside jobs that would never end. Their keys stay watched.
    RefusedWaits {
        conn: ConnId,
        refused: Vec<RefusedWait>,
    },
    Answer {
        conn: ConnId,
        id: u64,
        answer: Answer,
    },
    /// Something a person should know; sent to every connection and written to the log.
    Notice(Notice),
    Close {
        conn: ConnId,
        reason: CloseReason,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// A newer connection of the same session took over.
    Fenced,
    /// The client broke the protocol; the text says how.
    Protocol(String),
}
