//! Positions of all live things in the journal, oldest first, so that the oldest segment can be emptied.
//!
//! A thing counts at its *base*: the record that holds its full state. Later records that only change it (a grant, a
//! join, a move) always come after the base. So once all bases are past a segment, nothing in that segment is needed.
//!
//! A change of one thing may imply a change of another: the end of a member changes its join, the end of a copy changes
//! the owner of a key, a retry changes a result. If the other's base is later than its own, the record states the second
//! change explicitly. A reader that begins between the two bases does not know the first thing, and skips its events.

use std::collections::VecDeque;

use penstock_faults::perhaps;

use crate::Position;
use crate::table::fifo::Fifo;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Entity {
    Message { slot: u32 },
    Value { slot: u32, number: u64 },
    Session { index: u32, number: u64 },
    Join { slot: u32, number: u64 },
    Queue { index: u32 },
    Limits { index: u32 },
    Mark { number: u64 },
    Workflow { number: u64 },
    Schedule { number: u32 },
}

#[derive(Debug, Default)]
pub(crate) struct LiveBases {
    /// Slots of messages, of which there may be millions. `bases` has the number of messages that share each base.
    slots: Fifo<u32>,
    bases: Fifo<Bases>,
    others: VecDeque<(Position, Entity)>,
    /// Number of entries known to be stale: their thing is gone or has a later base.
    stale: usize,
}

/// Base of the next slots in the list, and their number.
#[derive(Clone, Copy, Debug)]
struct Bases {
    base: Position,
    count: u32,
}

impl LiveBases {
    pub(crate) fn add(&mut self, base: Position, entity: Entity) {
        let Entity::Message { slot } = entity else {
            debug_assert!(self.others.back().is_none_or(|(last, _)| *last <= base));
            self.others.push_back((base, entity));
            return;
        };
        self.slots.push_back(slot);
        match self.bases.back_mut() {
            Some(last) if last.base == base => last.count += 1,
            last => {
                debug_assert!(last.is_none_or(|last| last.base <= base));
                self.bases.push_back(Bases { base, count: 1 });
            }
        }
    }

    pub(crate) fn abandon(&mut self) {
        self.stale += 1;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Position, Entity)> {
        let bases = self.bases.iter();
        let bases = bases.flat_map(|bases| std::iter::repeat_n(bases.base, bases.count as usize));
        let messages = self.slots.iter().map(|slot| Entity::Message { slot });
        bases.zip(messages).chain(self.others.iter().copied())
    }

    fn len(&self) -> usize {
        self.slots.len() + self.others.len()
    }

    /// Takes the oldest entry, if its position is before this one.
    pub(crate) fn pop_before(&mut self, before: Position) -> Option<(Position, Entity)> {
        let message = self.bases.front().map(|bases| bases.base);
        let other = self.others.front().map(|(base, _)| *base);
        let is_message = match (message, other) {
            (Some(message), Some(other)) => message < other,
            (message, _) => message.is_some(),
        };
        match is_message {
            true => self.pop_message_before(before),
            false if other? < before => self.others.pop_front(),
            false => None,
        }
    }

    fn pop_message_before(&mut self, before: Position) -> Option<(Position, Entity)> {
        let base = self.bases.front()?.base;
        if base >= before {
            return None;
        }
        let slot = self.slots.pop_front()?;
        let first = self.bases.front_mut()?;
        first.count -= 1;
        if first.count == 0 {
            self.bases.pop_front();
        }
        Some((base, Entity::Message { slot }))
    }

    /// Notes that a stale entry was popped rather than swept.
    pub(crate) fn popped_stale(&mut self) {
        self.stale = self.stale.saturating_sub(1);
    }

    /// Drops stale entries once they are the majority; each entry pays for its own sweep.
    pub(crate) fn sweep(&mut self, is_live: impl Fn(Position, &Entity) -> bool) {
        let is_worth_it = self.stale > 1024 && self.stale > self.len() / 2;
        if !is_worth_it && !perhaps!("sweep-early") {
            return;
        }
        let mut old = std::mem::take(self);
        old.others.retain(|(base, entity)| is_live(*base, entity));
        if old.others.len() < old.others.capacity() / 8 {
            old.others.shrink_to_fit();
        }
        self.others = std::mem::take(&mut old.others);
        while let Some((base, entity)) = old.pop_message_before(Position(u64::MAX)) {
            if is_live(base, &entity) {
                self.add(base, entity);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_base_comes_first_whatever_its_thing() {
        let mut live_bases = LiveBases::default();
        let message = |slot| Entity::Message { slot };
        let queue = |index| Entity::Queue { index };
        let all = [
            (1, message(7)),
            (1, message(8)),
            (2, queue(1)),
            (3, message(9)),
            (5, queue(2)),
            (5, message(10)),
            (6, message(11)),
        ];
        for (base, entity) in all {
            live_bases.add(Position(base), entity);
        }
        let popped = std::iter::from_fn(|| live_bases.pop_before(Position(6)));
        let popped: Vec<(u64, Entity)> = popped.map(|(base, entity)| (base.0, entity)).collect();
        assert_eq!(popped, all[..6]);
        let left: Vec<(Position, Entity)> = live_bases.iter().collect();
        assert_eq!(left, [(Position(6), message(11))]);
    }
}
