/// Limits of a broker. The server journals those that an operator may change; these are the values in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerOptions {
    /// Largest body of a message or value. Default 16 MiB.
    pub max_body_bytes: usize,
    /// Maximum bytes of results that each group (task) may keep, and of the derived values of all groups together.
    /// Default 64 MiB.
    pub results_cap_bytes: u64,
    /// Time for which a session is remembered after its connection closed. Default 10 minutes.
    pub session_memory_ms: u64,
    /// Heartbeat of sessions that do not request one. Default 15 s.
    pub default_heartbeat_ms: u64,
    /// Time after which ready messages without any consumer cause a warning. Default 30 s, since workers restart.
    pub unserved_ms: u64,
    /// Time after which ready messages in a queue that never had a consumer cause a warning. Default 3 s, since a
    /// person who tries Penstock out is waiting.
    pub never_served_ms: u64,
    /// Time after which a waiting job whose task none of its queue's consumers can run causes a warning.
    pub unknown_ms: u64,
    /// Time for which an empty queue or task without settings is listed. Its counts are then added to those of others.
    /// Default one hour.
    pub unused_kept_ms: u64,
    /// Maximum bytes of unfinished large transactions, in total. Default 512 MiB.
    pub staged_parts_cap_bytes: usize,
    /// Time for which failed jobs and failed groups are kept. Default 30 days.
    pub failed_kept_ms: u64,
    /// Maximum number of failed jobs that are kept, including failed groups and the jobs that they block. The oldest
    /// are dropped first. Default 1,000,000.
    pub failed_kept: u64,
    /// Maximum journal bytes of failed jobs. Default 1 GiB.
    pub failed_kept_bytes: u64,
    /// Maximum number of ended workflows that are listed, for a day or for as long as failed jobs are kept. Those with
    /// the least time left are dropped first. Default 100,000.
    pub workflows_kept: u64,
    /// Maximum bytes of ended workflows in the journal, and in memory. Default 64 MiB.
    pub workflows_kept_bytes: u64,
    /// Approximate bytes of waiting messages' bodies that are kept in memory; others are read back from the journal
    /// when they are handed out. The messages that arrived first are handed out first, so with this much a worker that
    /// starts on a long backlog need not wait for the disk. `None`: all are kept, for shells that do not read them
    /// back. Default 64 MiB, some 100,000 jobs of usual size.
    pub resident_bodies_bytes: Option<u64>,
    /// Seed of the hashes of tables whose keys clients choose, so that no client can choose keys that collide. No
    /// decision depends on it. Default 0, which everyone knows: a shell that serves clients draws one at random.
    pub hash_seed: u64,
}

impl BrokerOptions {
    /// Returns the time after which ready messages of a queue without any consumer cause a warning.
    pub(crate) fn patience_ms(&self, was_served: bool) -> u64 {
        match was_served {
            true => self.unserved_ms,
            false => self.never_served_ms,
        }
    }
}

impl Default for BrokerOptions {
    fn default() -> Self {
        Self {
            max_body_bytes: 16 << 20,
            results_cap_bytes: 64 << 20,
            session_memory_ms: 600_000,
            default_heartbeat_ms: 15_000,
            unserved_ms: 30_000,
            never_served_ms: 3_000,
            unknown_ms: 3_000,
            unused_kept_ms: 60 * 60 * 1000,
            staged_parts_cap_bytes: 512 << 20,
            failed_kept_ms: 30 * 24 * 60 * 60 * 1000,
            failed_kept: 1_000_000,
            failed_kept_bytes: 1 << 30,
            workflows_kept: 100_000,
            workflows_kept_bytes: 64 << 20,
            resident_bodies_bytes: Some(64 << 20),
            hash_seed: 0,
        }
    }
}
