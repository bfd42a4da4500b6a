//! The bugs that can be planted, each with the promise that it breaks; and the points that the
//! simulator makes frequent.

/// Bug for the simulator to catch, or for tests where the simulator does not reach.
#[derive(Clone, Copy, Debug)]
pub struct Plant {
    pub name: &'static str,
    pub promise: &'static str,
    pub finder: Finder,
}

/// Tests that must find a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finder {
    Simulator,
    /// Tests of the worker: the memory that a supervisor shares with its children is not simulated.
    Worker,
    /// A script of the broker: the simulator gets there too rarely, or not at all.
    Script,
    /// Broker scripts drawn at random, and the simulator: each must find the bug on its own.
    Both,
}

const fn plant(name: &'static str, promise: &'static str) -> Plant {
    Plant {
        name,
        promise,
        finder: Finder::Simulator,
    }
}

const fn of_script(name: &'static str, promise: &'static str) -> Plant {
    Plant {
        name,
        promise,
        finder: Finder::Script,
    }
}

const fn in_worker(name: &'static str, promise: &'static str) -> Plant {
    Plant {
        name,
        promise,
        finder: Finder::Worker,
    }
}

const fn of_schedules(name: &'static str, promise: &'static str) -> Plant {
    Plant {
        name,
        promise,
        finder: Finder::Both,
    }
}

/// Points that are lawful at any time, and rare by nature.
pub const POINTS: &[(&str, &str)] = &[
    (
        "roll-early",
        "a new segment begins before the last one is full",
    ),
    ("tiny-batch", "a batch is closed though it has room"),
    ("carry-little", "live things are carried forward one by one"),
    (
        "reclaim-early",
        "the oldest segment is emptied though there is space",
    ),
    (
        "sweep-early",
        "stale entries of a table are swept though they are few",
    ),
    (
        "forget-names",
        "names that nobody holds are forgotten though they are few",
    ),
    (
        "forget-early",
        "a queue or task that is not in use is forgotten before its time",
    ),
    ("wake-late", "a batch that is due is taken at a later call"),
    (
        "full-early",
        "a connection counts as full though little waits to be sent",
    ),
    (
        "small-steps",
        "work that is done in steps is done in steps of a few",
    ),
    (
        "say-little",
        "what waits for a client goes out in several portions",
    ),
];

pub const PLANTS: &[Plant] = &[
    // The journal.
    plant("skip-sync", "what is confirmed is on disk"),
    plant("roll-before-sync", "a segment with a successor is complete"),
    plant(
        "name-before-sync",
        "a file with a segment's name has a good header",
    ),
    plant(
        "skip-directory-sync",
        "a segment in use has its name on disk",
    ),
    plant(
        "open-without-directory-sync",
        "an opened journal can be found again",
    ),
    plant(
        "count-on-unsynced-names",
        "an opening relies on no file whose name may still be lost",
    ),
    plant(
        "drop-before-sync",
        "a segment is dropped only after the data carried out of it is on disk",
    ),
    plant(
        "trust-page-cache",
        "records that an opening returns are on disk before anything relies on them",
    ),
    plant("accept-torn-batch", "a batch torn by a crash is cut off"),
    plant(
        "ignore-watermark",
        "damage to confirmed records is an error, never ignored",
    ),
    plant(
        "accept-ghosts",
        "old contents of a recycled segment are never read as new",
    ),
    plant("keep-epoch", "each start of the broker has its own epoch"),
    plant(
        "retry-failed-sync",
        "after a failed sync nothing is confirmed",
    ),
    // The engine.
    plant(
        "confirm-before-sync",
        "a confirm waits for the sync, not for the write",
    ),
    plant(
        "keep-outcomes-waiting",
        "an outcome that nobody waits for is on disk soon",
    ),
    plant(
        "drop-live-things",
        "a segment is dropped only when nothing in it is needed",
    ),
    // Transactions.
    plant(
        "deliver-before-durable",
        "no job starts whose publishing may be lost",
    ),
    plant("show-value-early", "a value that may be lost is not shown"),
    plant(
        "forget-refusal",
        "a transaction that is sent again gets the same answer",
    ),
    plant(
        "apply-again",
        "a transaction that is sent again is applied once",
    ),
    plant("apply-half", "a refused transaction changes nothing"),
    plant(
        "pass-every-guard",
        "a transaction whose guard fails changes nothing",
    ),
    plant("lose-copy", "a message reaches each of its queues"),
    plant("lose-purge", "purged messages do not return"),
    plant(
        "send-any-task",
        "a job is sent only to a worker that can run its task",
    ),
    plant(
        "wait-for-other-kinds",
        "no job waits while a slot that may run it is idle",
    ),
    plant(
        "leave-line-early",
        "a consumer is served as long as it has credit",
    ),
    plant(
        "purge-released",
        "messages that a group releases are not purged with those that waited",
    ),
    plant(
        "check-id-late",
        "an id appears once in a transaction, whatever happens to its key",
    ),
    plant("purge-at-once", "a purge is done in steps of 1,024"),
    plant(
        "expire-at-once",
        "messages that expire together end in steps of 1,024",
    ),
    plant(
        "forget-claim",
        "of two messages with the same unless_key, the second is skipped",
    ),
    plant("keep-key", "a value is gone once it has expired"),
    plant(
        "claim-survives-dead-letter",
        "a job that fails for good frees its unique key",
    ),
    of_script(
        "keep-claim-of-lost-grant",
        "a claim that ends with the start of its job ends, though the record of the start is lost",
    ),
    plant(
        "claim-retaken-on-retry",
        "a key until the start is not taken again by a retry",
    ),
    plant(
        "debounce-never-runs",
        "a debounced job runs within its longest wait",
    ),
    // Leases.
    plant(
        "settle-by-any-lease",
        "a settlement whose lease was lost changes nothing",
    ),
    plant(
        "forget-leases",
        "a worker that comes back in time keeps its leases",
    ),
    plant(
        "keep-leases",
        "messages of a lost worker return after its heartbeat",
    ),
    plant(
        "keep-old-connection",
        "a session has one connection; the older is fenced off",
    ),
    plant(
        "believe-lost-grant",
        "a lease that has ended does not come back",
    ),
    plant(
        "lend-unsafely",
        "a message that may be delivered once is not handed out again",
    ),
    plant(
        "forget-redelivery",
        "a message that may have run before says so",
    ),
    plant(
        "forget-unseen-run",
        "after a crash a message that may have run says so",
    ),
    plant(
        "miscount-crashes",
        "a job that kills its workers fails in time",
    ),
    plant(
        "crash-runs-at-once",
        "a job that has crashed twice waits before it runs again",
    ),
    plant(
        "suspect-counted-as-crash",
        "a job is charged with no crash that may be another's",
    ),
    plant(
        "suspect-not-isolated",
        "a job that was near a death runs alone",
    ),
    plant(
        "neighbours-burned",
        "if the guilty job is known, its neighbours are not charged",
    ),
    plant(
        "cancel-forgotten-at-reconnect",
        "a worker that reconnects learns which of its jobs to stop",
    ),
    plant(
        "cycle-missed-through-join",
        "a job's wait for something that waits for the job is refused, even through a group",
    ),
    plant(
        "refuse-any-wait",
        "a wait is refused only if it would close a circle",
    ),
    plant(
        "cancel-resurrected-by-retry",
        "a job that was asked to stop does not start again",
    ),
    plant(
        "cancel-beats-success",
        "a job that succeeds is not cancelled, whichever client asked",
    ),
    plant(
        "start-while-cancelling",
        "no job that matches a cancellation by filter starts after the decision",
    ),
    plant(
        "cancel-spared-jobs",
        "a job that ran while others were cancelled is left alone even when it returns",
    ),
    plant(
        "cancel-later-jobs",
        "a cancellation by filter affects only jobs that existed then",
    ),
    plant(
        "cancel-misses-delayed",
        "a cancellation by filter ends delayed jobs, too",
    ),
    plant(
        "miscount-asked",
        "a cancellation by filter counts each job: ended, asked or left alone",
    ),
    plant(
        "lose-failed-job",
        "a job that killed its workers is kept as a failed job",
    ),
    plant(
        "keep-all-failed",
        "failed jobs beyond the limits are dropped",
    ),
    plant(
        "drop-newest-failed",
        "beyond the limits, the oldest failed jobs are dropped",
    ),
    plant(
        "forget-failed",
        "a failed job is kept until it is retried or dropped",
    ),
    plant(
        "displace-itself",
        "a message that can't be refused is not dropped because of its own arrival",
    ),
    // Joins.
    plant(
        "release-twice",
        "a join releases what it holds exactly once",
    ),
    plant("count-member-twice", "a member of a join counts once"),
    plant(
        "lose-member",
        "each member reports to its join, however it ended",
    ),
    plant(
        "revive-keeps-old-arrival",
        "a group waits again for a failed member that a person has retried",
    ),
    plant(
        "mix-up-values",
        "a message gets the values of its group, each in its place",
    ),
    plant(
        "unpin-early",
        "a value is kept for as long as its group may need it, even beyond its TTL",
    ),
    plant(
        "cascade-one-level",
        "a failure blocks everything that waits for it, at any distance",
    ),
    plant(
        "errback-per-member",
        "an errback of a group runs once, however many members fail",
    ),
    plant(
        "replace-loses-membership",
        "the replacement of a job reports to the job's join",
    ),
    plant(
        "blocked-keeps-key",
        "a failed group frees the unique keys of the jobs that it blocks",
    ),
    plant(
        "replace-doubles-membership",
        "a replaced job has not ended until its replacement has",
    ),
    plant(
        "spawn-escapes-cancel",
        "no job of a cancelled workflow spawns others",
    ),
    plant(
        "leave-stalled-workers",
        "no run ends with jobs that wait for each other's slots",
    ),
    plant(
        "grow-without-count",
        "a group waits for the members that its running members add",
    ),
    plant(
        "forget-failures",
        "a group counts each failed member against the failures it tolerates",
    ),
    // Order and time.
    plant("return-to-end", "a returned message goes to its old place"),
    plant("ignore-priority", "a higher priority goes first"),
    plant("serve-paused", "nothing is taken from a paused queue"),
    plant("start-early", "no message starts before its time"),
    plant("retry-at-once", "a retry waits as long as requested"),
    plant(
        "wrong-clock",
        "a time that a person named follows the wall clock",
    ),
    plant(
        "trust-the-wall",
        "a countdown follows the machine's clock while no broker runs",
    ),
    plant("deliver-expired", "no message starts after it has expired"),
    plant("lose-note", "a message keeps the notes of its attempts"),
    plant(
        "body-to-next-tenant",
        "a body that was read ahead goes to its own message or to none",
    ),
    // Carrying forward.
    plant(
        "carry-no-arrivals",
        "a join remembers its members for as long as it lives",
    ),
    plant(
        "carry-no-failures",
        "a group remembers its failed members for as long as it lives",
    ),
    plant(
        "carry-no-workflow",
        "a workflow is listed for as long as it is kept, whatever the journal does",
    ),
    plant(
        "untold-end-of-workflow",
        "a workflow counts each of its jobs that has ended, however old the job's record",
    ),
    plant(
        "carry-no-receipts",
        "a refused transaction stays refused, however old its record",
    ),
    plant("carry-no-claim", "a claim lives as long as its message"),
    plant(
        "carry-no-cancel",
        "a job that was asked to stop ends, whatever the journal does",
    ),
    plant(
        "carry-no-delay",
        "a delay outlives the segment it was written in",
    ),
    plant(
        "carry-no-value",
        "a value outlives the segment it was written in",
    ),
    plant(
        "carry-no-session",
        "a session outlives the segment it was opened in",
    ),
    of_script(
        "carry-no-mark",
        "a purge continues, however old the record in which it began",
    ),
    plant(
        "carry-no-pause",
        "a pause outlives the segment it was written in",
    ),
    // Schedules, found by the simulator and by scripts drawn at random.
    of_schedules(
        "fire-twice-after-step-back",
        "a time of a schedule is decided once, even if the clock is set back",
    ),
    of_schedules(
        "skip-forgets-retry",
        "a job that waits for its retry is in the way of the next",
    ),
    of_schedules(
        "queue-forgets-its-time",
        "a time that is decided has a job, was skipped, or was missed",
    ),
    // The worker, found by its tests.
    in_worker(
        "order-without-index",
        "an order is for one job, and never for its neighbour",
    ),
    in_worker(
        "order-outdone-by-less",
        "a job that is to end is not asked for less after that",
    ),
    in_worker(
        "order-carried-out-twice",
        "a job is interrupted once by each order",
    ),
    in_worker(
        "shield-against-the-end",
        "no shield holds off the end of a job's time",
    ),
    in_worker(
        "shield-outlives-its-job",
        "a shield that a job leaves open does not hold off orders for the next",
    ),
    in_worker(
        "limit-not-armed-again",
        "each job of a packet is held to its limit",
    ),
    in_worker(
        "limit-from-the-hand-out",
        "a job's time begins when the job does",
    ),
    in_worker(
        "remind-never",
        "a child that has not carried out an order is reminded",
    ),
    in_worker(
        "cancel-gains-time",
        "a cancelled job gains no time when its limit is over",
    ),
    in_worker(
        "kill-after-the-grace",
        "a job that is to be killed has no grace",
    ),
    in_worker(
        "kill-when-others-are-due",
        "a job that is to be killed is checked at once",
    ),
    in_worker(
        "alarm-too-late",
        "a place is checked at the earliest of its times",
    ),
    in_worker(
        "claim-a-former-packet",
        "a packet that was taken back can't be claimed",
    ),
    in_worker(
        "begin-what-was-taken-back",
        "a job is begun or taken back, never both",
    ),
    in_worker(
        "take-back-what-has-begun",
        "a job that has begun is not handed out again",
    ),
    in_worker(
        "closing-ignored-mid-packet",
        "a child that is closed begins nothing more",
    ),
    in_worker(
        "close-the-successor",
        "a child that is closed has a successor that is not",
    ),
    in_worker(
        "resume-beyond-the-slots",
        "a job that was parked goes on when there is a slot for it",
    ),
    in_worker(
        "fault-of-the-one-before",
        "a fault is blamed on the child that had it",
    ),
    in_worker(
        "fault-of-anybody",
        "a fault is blamed on a packet that its child had",
    ),
    in_worker(
        "admission-counts-twice",
        "memory that a job already uses is not reserved for it again",
    ),
    in_worker(
        "kill-explains-two-deaths",
        "one kill for a lack of memory explains one death",
    ),
    in_worker(
        "grow-old-together",
        "processes of the same age are replaced at different times",
    ),
    in_worker(
        "order-for-a-settled-job",
        "an order to stop a job goes only to a worker that has it",
    ),
];
