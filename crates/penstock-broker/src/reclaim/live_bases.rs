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
    Value { slot: u32 },
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
    messages: BasesOfSlots,
    values: BasesOfSlots,
    others: VecDeque<(Position, Entity)>,
    /// Number of entries known to be stale: their thing is gone or has a later base.
    stale: usize,
}

/// Slots of things of one kind, of which there may be millions. `bases` has the number of those that share each base.
#[derive(Debug, Default)]
struct BasesOfSlots {
    slots: Fifo<u32>,
    bases: Fifo<Bases>,
}

/// Base of the next slots in the list, and their number.
#[derive(Clone, Copy, Debug)]
struct Bases {
    base: Position,
    count: u32,
}

impl BasesOfSlots {
    fn add(&mut self, base: Position, slot: u32) {
        self.slots.push_back(slot);
        match self.bases.back_mut() {
            Some(last) if last.base == base => last.count += 1,
            last => {
                debug_assert!(last.is_none_or(|last| last.base <= base));
                self.bases.push_back(Bases { base, count: 1 });
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = (Position, u32)> {
        let bases = self.bases.iter();
        let bases = bases.flat_map(|bases| std::iter::repeat_n(bases.base, bases.count as usize));
        bases.zip(self.slots.iter())
    }

    fn first(&self) -> Option<Position> {
        self.bases.front().map(|bases| bases.base)
    }

    fn pop(&mut self) -> Option<(Position, u32)> {
        let slot = self.slots.pop_front()?;
        let first = self.bases.front_mut()?;
        let base = first.base;
        first.count -= 1;
        if first.count == 0 {
            self.bases.pop_front();
        }
        Some((base, slot))
    }

    fn retain(&mut self, is_wanted: impl Fn(Position, u32) -> bool) {
        let mut old = std::mem::take(self);
        while let Some((base, slot)) = old.pop() {
            if is_wanted(base, slot) {
                self.add(base, slot);
            }
        }
    }
}

fn message((base, slot): (Position, u32)) -> (Position, Entity) {
    (base, Entity::Message { slot })
}

fn value((base, slot): (Position, u32)) -> (Position, Entity) {
    (base, Entity::Value { slot })
}

impl LiveBases {
    pub(crate) fn add(&mut self, base: Position, entity: Entity) {
        match entity {
            Entity::Message { slot } => self.messages.add(base, slot),
            Entity::Value { slot } => self.values.add(base, slot),
            other => {
                debug_assert!(self.others.back().is_none_or(|(last, _)| *last <= base));
                self.others.push_back((base, other));
            }
        }
    }

    pub(crate) fn abandon(&mut self) {
        self.stale += 1;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Position, Entity)> {
        let messages = self.messages.iter().map(message);
        let values = self.values.iter().map(value);
        messages.chain(values).chain(self.others.iter().copied())
    }

    fn len(&self) -> usize {
        self.messages.slots.len() + self.values.slots.len() + self.others.len()
    }

    /// Takes the oldest entry, if its position is before this one.
    pub(crate) fn pop_before(&mut self, before: Position) -> Option<(Position, Entity)> {
        let firsts = [
            self.others.front().map(|(base, _)| *base),
            self.values.first(),
            self.messages.first(),
        ];
        let firsts = firsts.into_iter().enumerate();
        let firsts = firsts.filter_map(|(list, base)| Some((base?, list)));
        let (_, list) = firsts.min().filter(|(base, _)| *base < before)?;
        match list {
            0 => self.others.pop_front(),
            1 => self.values.pop().map(value),
            _ => self.messages.pop().map(message),
        }
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
        self.others.retain(|(base, entity)| is_live(*base, entity));
        if self.others.len() < self.others.capacity() / 8 {
            self.others.shrink_to_fit();
        }
        self.messages
            .retain(|base, slot| is_live(base, &Entity::Message { slot }));
        self.values
            .retain(|base, slot| is_live(base, &Entity::Value { slot }));
        self.stale = 0;
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
        let value = |slot| Entity::Value { slot };
        let all = [
            (1, message(7)),
            (1, message(8)),
            (2, queue(1)),
            (2, value(7)),
            (3, message(9)),
            (4, value(8)),
            (5, queue(2)),
            (5, message(10)),
            (6, message(11)),
        ];
        for (base, entity) in all {
            live_bases.add(Position(base), entity);
        }
        let popped = std::iter::from_fn(|| live_bases.pop_before(Position(6)));
        let popped: Vec<(u64, Entity)> = popped.map(|(base, entity)| (base.0, entity)).collect();
        assert_eq!(popped, all[..8]);
        let left: Vec<(Position, Entity)> = live_bases.iter().collect();
        assert_eq!(left, [(Position(6), message(11))]);
    }
}
