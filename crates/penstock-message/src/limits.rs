/// Limits of the messages that wait in a queue. Running ones are not counted, and settlements are never refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLimits {
    /// Number of messages that may wait, ready or delayed.
    pub max_length: Option<u64>,
    /// Total body bytes of those messages.
    pub max_bytes: Option<u64>,
    pub overflow: Overflow,
}

impl QueueLimits {
    pub const NONE: Self = Self {
        max_length: None,
        max_bytes: None,
        overflow: Overflow::Reject,
    };

    /// Whether anything is limited at all.
    pub fn is_none(&self) -> bool {
        self.max_length.is_none() && self.max_bytes.is_none()
    }

    /// Whether this many messages of this many bytes may wait.
    pub fn allow(&self, length: u64, bytes: u64) -> bool {
        self.max_length.is_none_or(|limit| length <= limit)
            && self.max_bytes.is_none_or(|limit| bytes <= limit)
    }
}

/// Treatment of a message that arrives at a full queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Overflow {
    /// The message is refused, and its producer learns of it.
    #[default]
    Reject = 0,
    /// The message is accepted, and the oldest ready one of the lowest priority ends as cancelled.
    DropOldest = 1,
}

/// Work that waits for space on the broker's disk. Each level holds back all of the levels before it too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Space {
    #[default]
    Plenty = 0,
    /// New work is refused.
    NoPublishes = 1,
    /// New work is refused, and nothing is handed out.
    NoLeases = 2,
    /// New work is refused, nothing is handed out, and the outcomes of runs wait.
    NoSettlements = 3,
}
