//! Ready messages that running jobs wait for. They are handed out before others of their level, those of the deepest
//! waiter first, so that what has begun goes on before more begins: as many jobs wait in the midst of their work as a
//! tree of jobs is deep, for each slot, and not as many as it is wide.
//!
//! A hint, in memory alone: each also stands in the run of its flow, where its place becomes stale when it is taken
//! from here.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::messages::Handle;

/// Depth of the waiter, and the message.
pub(crate) type AwaitedTurn = (Reverse<u32>, Handle);

/// Awaited messages of one flow.
#[derive(Debug, Default)]
pub(crate) struct AwaitedReady {
    turns: BTreeSet<AwaitedTurn>,
    /// Turn of each message, by its slot.
    by_slot: FxHashMap<u32, AwaitedTurn>,
}

impl AwaitedReady {
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub(crate) fn first(&self) -> Option<AwaitedTurn> {
        self.turns.first().copied()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Handle> {
        self.turns.iter().map(|(_, handle)| *handle)
    }

    /// Adds a message, or moves it forward. A turn only ever becomes an earlier one.
    pub(crate) fn insert(&mut self, handle: Handle, depth: u32) {
        let turn = (Reverse(depth), handle);
        if let Some(was) = self.by_slot.get(&handle.slot) {
            if *was <= turn {
                return;
            }
            self.turns.remove(was);
        }
        self.by_slot.insert(handle.slot, turn);
        self.turns.insert(turn);
    }

    pub(crate) fn remove(&mut self, slot: u32) {
        if let Some(turn) = self.by_slot.remove(&slot) {
            self.turns.remove(&turn);
        }
    }

    /// Panics unless each message is found by its slot.
    pub(crate) fn assert_paired(&self) {
        assert_eq!(self.turns.len(), self.by_slot.len());
        for turn in &self.turns {
            assert_eq!(self.by_slot.get(&turn.1.slot), Some(turn));
        }
    }
}
