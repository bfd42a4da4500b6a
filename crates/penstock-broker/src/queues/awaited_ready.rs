//! Ready messages that running jobs wait for. They are handed out before others of their level, those with the deepest
//! waiter first, so that jobs that have begun continue before more begin. The number of jobs that wait in the middle of
//! their work is then the depth of a tree of jobs for each slot, and not its width.
//!
//! This is a hint, kept only in memory. Each message is also in the run of its flow; its entry there becomes stale when
//! it is taken from here.

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

    /// Adds a message, or moves it forward. A turn only ever becomes earlier.
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
