//! Holds effects until the records that they depend on are safe.

use std::collections::VecDeque;

use penstock_message::{Answer, Durability, Key, KeyState, RefusedWait};

use crate::messages::Handle;
use crate::{ConnId, Position};

/// Records that must be on disk, or written to the operating system, before an effect may be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SafeAfter {
    pub(crate) disk: Position,
    pub(crate) os: Position,
}

impl SafeAfter {
    pub(crate) fn on(position: Position, durability: Durability) -> Self {
        let mut safe_after = Self::default();
        safe_after.add(position, durability);
        safe_after
    }

    /// Returns the records that either of two things depends on.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            disk: self.disk.max(other.disk),
            os: self.os.max(other.os),
        }
    }

    pub(crate) fn add(&mut self, position: Position, durability: Durability) {
        match durability {
            Durability::Disk | Durability::Replicated => self.disk = self.disk.max(position),
            Durability::Os => self.os = self.os.max(position),
            Durability::None => {}
        }
    }
}

#[derive(Debug)]
pub(crate) enum Effect {
    Deliver {
        conn: ConnId,
        consumer: u32,
        message: Handle,
        grant: u64,
    },
    /// An order to stop the message, under this lease.
    Cancel {
        conn: ConnId,
        message: Handle,
        grant: u64,
    },
    Value {
        conn: ConnId,
        key: Key,
        state: KeyState,
    },
    /// A wait of a running job that would never end. Boxed, since it is large and rare.
    Refused {
        conn: ConnId,
        refused: Box<RefusedWait>,
    },
    Answer {
        conn: ConnId,
        id: u64,
        /// Boxed, since it is large and rare.
        answer: Box<Answer>,
    },
}

/// Effects in the order of the records that they wait for. An effect that was decided early may therefore wait for a
/// later record, but never the other way round.
#[derive(Debug, Default)]
pub(crate) struct HeldEffects {
    /// Positions up to which all records are synced, and written.
    pub(crate) durable: Position,
    pub(crate) written: Position,
    /// Last record that a held effect has waited for.
    pub(crate) awaited: Position,
    for_disk: VecDeque<(SafeAfter, Effect)>,
    for_os: VecDeque<(SafeAfter, Effect)>,
}

impl HeldEffects {
    /// Starts with all records up to this position safe, since they were read from the disk.
    pub(crate) fn new(safe: Position) -> Self {
        Self {
            durable: safe,
            written: safe,
            awaited: safe,
            ..Self::default()
        }
    }

    pub(crate) fn is_safe(&self, safe_after: SafeAfter) -> bool {
        safe_after.disk <= self.durable && safe_after.os <= self.written
    }

    /// Holds the effect, or returns it if it need not wait.
    pub(crate) fn hold(&mut self, mut safe_after: SafeAfter, effect: Effect) -> Option<Effect> {
        if safe_after.disk > self.durable {
            if let Some((last, _)) = self.for_disk.back() {
                safe_after.disk = safe_after.disk.max(last.disk);
            }
            self.awaited = self.awaited.max(safe_after.disk).max(safe_after.os);
            self.for_disk.push_back((safe_after, effect));
            return None;
        }
        if safe_after.os > self.written {
            if let Some((last, _)) = self.for_os.back() {
                safe_after.os = safe_after.os.max(last.os);
            }
            self.awaited = self.awaited.max(safe_after.os);
            self.for_os.push_back((safe_after, effect));
            return None;
        }
        Some(effect)
    }

    /// Returns the next effect that has become safe.
    pub(crate) fn release(&mut self) -> Option<Effect> {
        while let Some((safe_after, _)) = self.for_disk.front()
            && safe_after.disk <= self.durable
        {
            let (safe_after, effect) = self.for_disk.pop_front()?;
            if let Some(effect) = self.hold(safe_after, effect) {
                return Some(effect);
            }
        }
        match self.for_os.front() {
            Some((safe_after, _)) if safe_after.os <= self.written => {
                self.for_os.pop_front().map(|(_, effect)| effect)
            }
            _ => None,
        }
    }
}
