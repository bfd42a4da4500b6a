//! Inputs and outputs of the core.

use bytes::Bytes;
use penstock_message::{
    Ask, CancelOrder, Consume, Delivery, Durability, Key, KeyState, Lease, MessageId, Progress,
    Receipt, RefusedWait, SessionId, Space, Tx, WallMs, WorkerReport,
};

// Nouns that travel between a client and the core are in `penstock-message`.
pub use penstock_message::{
    Answer, MessageInfo, MessageState, Notice, ProcessStatus, Query, QueueStatus, Status,
    WorkerStatus,
};

/// The current time. The shell reads it once for each input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds on a clock that never steps. Its zero is the start of the process.
    pub mono_ms: u64,
    pub wall_ms: WallMs,
    /// The machine's own clock; `None` if the system does not provide it.
    pub boot: Option<Boot>,
}

impl Now {
    /// Moves all clocks forward.
    pub fn move_on(&mut self, ms: u64) {
        self.mono_ms += ms;
        self.wall_ms += ms;
        if let Some(boot) = &mut self.boot {
            boot.ms += ms;
        }
    }
}

/// The machine's own clock. Nobody can set it, and it continues while no broker runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boot {
    /// Id of this start of the machine. Each start has another.
    pub id: [u8; 16],
    /// Milliseconds since that start.
    pub ms: u64,
}

/// Position of a record in the journal. Records are numbered from 1, without gaps, for the journal's whole life. Zero
/// is before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// Number of a connection, assigned by the shell. Never used again after `Disconnected`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

#[derive(Clone, Debug)]
pub enum Input {
    /// A client said hello. A second hello of a session fences the older connection (it gets `Close`). Answered by
    /// `Welcome`.
    Connected {
        conn: ConnId,
        session: SessionId,
        /// Name for people, such as `worker@host:pid`.
        name: String,
        /// Time for which the session's leases are kept after its connection breaks.
        heartbeat_ms: u64,
        /// Highest sequence number that the client has used in this session; 0 for a new session.
        last_seq: u64,
        /// Leases that the client still works on, or has settled without having received the confirm; it has yet to
        /// resend that settlement. It keeps the leases that `Welcome` names. Messages of its other leases return to
        /// their queues.
        leases: Vec<Lease>,
    },
    /// A connection closed. `clean`: the client said goodbye, so its leases return at once, as `Returned`.
    Disconnected {
        conn: ConnId,
        clean: bool,
    },
    /// Transactions with consecutive sequence numbers from `first_seq`.
    Commit {
        conn: ConnId,
        first_seq: u64,
        durability: Durability,
        txs: Vec<Tx>,
    },
    /// Part of a transaction too large for a frame. Its operations are kept until `last`, then applied as one `Tx`.
    /// Parts of other sessions and whole transactions of this one may not come between.
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
    /// Stops deliveries to the consumer: sets its credit to 0.
    StopConsuming {
        conn: ConnId,
        consumer: u32,
    },
    /// Watches keys. Each key is answered by one `Values` entry when it is not pending, at once or later. A key that is
    /// pending now is first answered `Pending`, once.
    Watch {
        conn: ConnId,
        keys: Vec<Key>,
        /// Running job that waits for the keys. The answer for a pending key may also be a refusal.
        waiter: Option<MessageId>,
    },
    Unwatch {
        conn: ConnId,
        keys: Vec<Key>,
    },
    /// The job no longer waits for these keys. The session still watches them.
    WaitOver {
        conn: ConnId,
        keys: Vec<Key>,
        waiter: MessageId,
    },
    /// A query. `Query::Stop` and `Query::SetClock` never arrive here: the process around the core answers them.
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
    /// Space on the disk. The shell keeps back the settlements that `Space::NoSettlements` forbids: here they can only
    /// be refused or applied.
    Space(Space),
    /// Whether the segment in use has room for steps of operations that end messages. If so, they may continue even
    /// where `Space::NoSettlements` stops everything else, since they free more than they take.
    StepsFit(bool),
    /// Bytes of records that fit on the disk, for the transactions of the next `Commit` or last part. Sent before large
    /// ones. Larger new work is refused even while space is plenty.
    Room {
        bytes: u64,
    },
    /// Whether the process has reached its memory limit, so that it accepts no new work.
    Memory {
        is_full: bool,
        limit_bytes: u64,
    },
    /// A worker's own figures and state, for `status`. Not journaled.
    Report {
        conn: ConnId,
        report: WorkerReport,
    },
    /// Progress of a job that the client runs. Not journaled; dropped if the lease has ended.
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

/// Action for the shell. `poll_output` returns an output only once the records that it depends on are as durable as
/// requested, so any output may be carried out at once.
#[derive(Clone, Debug)]
pub enum Output {
    Welcome {
        conn: ConnId,
        /// All transactions up to this number are applied and durable, each simply `Applied`. The client resends the
        /// rest.
        applied_through: u64,
        /// Whether the session was unknown although `last_seq` was not 0: unconfirmed transactions are `Unknown`.
        forgotten: bool,
        /// Presented leases that still hold.
        leases: Vec<Lease>,
    },
    /// Confirms all transactions up to `through`. Those that were not simply `Applied { skipped: [] }` are listed.
    /// Those in `early` are confirmed out of turn, because they asked for less durability than an earlier one.
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
    /// Jobs that the client runs and should stop. Sent after their deliveries, and again after each hello.
    Cancels {
        conn: ConnId,
        cancels: Vec<CancelOrder>,
    },
    /// Questions for the worker to answer by `Reply`.
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
    /// Something a person should know. Sent to every connection and written to the log.
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
