/// How much may wait in a queue. What runs is not counted, and settlements are never refused for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLimits {
    /// How many messages may wait, ready or delayed.
    pub max_length: Option<u64>,
    /// How many bytes of bodies they may have in all.
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

    /// Whether so many messages of so many bytes may wait.
    pub fn allow(&self, length: u64, bytes: u64) -> bool {
        self.max_length.is_none_or(|limit| length <= limit)
            && self.max_bytes.is_none_or(|limit| bytes <= limit)
    }
}

/// What happens to a message that comes to a full queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Overflow {
    /// It is refused, and its producer told so.
    #[default]
    Reject = 0,
    /// It is taken, and the oldest ready message of the lowest priority ends as cancelled.
    DropOldest = 1,
}

/// What must wait for want of space on the broker's disk. Each level holds all of those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Space {
    #[default]
    Plenty = 0,
    /// New work is refused.
    NoPublishes = 1,
    /// ... and nothing more is handed out.
    NoLeases = 2,
    /// ... and the outcomes of runs wait.
    NoSettlements = 3,
}
