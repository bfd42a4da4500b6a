//! Where in the journal each live thing stands, oldest first, so that the oldest segment can be emptied.
//!
//! What counts is a thing's *base*: the record that holds its full state. Later records that only
//! change it (a grant, a join, a move) come after the base by nature; so once all bases are past a
//! segment, nothing in that segment is needed.

use std::collections::VecDeque;

use crate::Position;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Entity {
    Message { slot: u32 },
    Value { slot: u32, number: u64 },
    Session { index: u32, number: u64 },
    Join { slot: u32, number: u64 },
    Queue { index: u32 },
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entries: VecDeque<(Position, Entity)>,
    /// How many entries are known to be stale: their thing is gone or has a later base.
    stale: usize,
}

impl Ledger {
    pub(crate) fn add(&mut self, base: Position, entity: Entity) {
        debug_assert!(self.entries.back().is_none_or(|(last, _)| *last <= base));
        self.entries.push_back((base, entity));
    }

    pub(crate) fn abandon(&mut self) {
        self.stale += 1;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(Position, Entity)> {
        self.entries.iter()
    }

    /// The oldest entry, if its position is before this one.
    pub(crate) fn pop_before(&mut self, before: Position) -> Option<(Position, Entity)> {
        match self.entries.front() {
            Some((base, _)) if *base < before => self.entries.pop_front(),
            _ => None,
        }
    }

    /// A stale entry was popped rather than swept.
    pub(crate) fn popped_stale(&mut self) {
        self.stale = self.stale.saturating_sub(1);
    }

    /// Drops stale entries once they are the greater part; each entry pays for its own sweep.
    pub(crate) fn sweep(&mut self, is_live: impl Fn(Position, &Entity) -> bool) {
        if self.stale > 1024 && self.stale > self.entries.len() / 2 {
            self.entries.retain(|(base, entity)| is_live(*base, entity));
            self.stale = 0;
        }
    }
}
