//! An integer of 48 bits.

/// Numbers and positions count up from 1, and milliseconds from 1970. At a million a second, 48 bits last nine years of
/// messages, and they hold times until the year 10889.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct U48([u16; 3]);

impl U48 {
    pub(crate) const MAX: u64 = (1 << 48) - 1;

    pub(crate) fn new(value: u64) -> Self {
        Self([value as u16, (value >> 16) as u16, (value >> 32) as u16])
    }

    pub(crate) fn get(self) -> u64 {
        let [low, middle, high] = self.0;
        u64::from(low) | u64::from(middle) << 16 | u64::from(high) << 32
    }
}

impl Ord for U48 {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.get().cmp(&other.get())
    }
}

impl PartialOrd for U48 {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl std::fmt::Debug for U48 {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(out)
    }
}
