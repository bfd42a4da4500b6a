//! Bodies of delayed messages, which are read before their time.
//!
//! Such messages come due in an order of their own, and each body costs a look at the whole of its record,
//! which may hold a thousand. So those that come due in the same moment are read together, before it.

use std::collections::VecDeque;

use penstock_faults::planted;

use crate::messages::{Handle, MessageEntry};
use crate::state::BrokerState;
use crate::{Broker, Position};

/// Messages that come due within the same moment of this length are read together, at least as long before.
const MOMENT_MS: u64 = 250;
/// Bytes that bodies which are read before they are due may take on top of the limit for bodies in memory.
const BYTES: u64 = 8 << 20;
/// Bodies that are read at once, from about as many records at worst: a few milliseconds.
pub(crate) const AT_ONCE: usize = 2_048;

/// Returns the time to read the body of a message that comes due at this time.
pub(crate) fn prefetch_at(due: u64) -> u64 {
    (due / MOMENT_MS).saturating_sub(1) * MOMENT_MS
}

/// Delayed messages that come due soon, and whose bodies are to be read.
#[derive(Debug, Default)]
pub(crate) struct Prefetch {
    /// Messages in the order in which they stand in the journal.
    sorted: VecDeque<DueSoon>,
    /// Messages that `sort` has yet to move behind the others.
    new: Vec<DueSoon>,
    /// Bytes that the bodies of both would take.
    bytes: u64,
}

/// Message, and the place of its body when it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DueSoon {
    base: Position,
    offset: u64,
    bytes: u64,
    number: u64,
    slot: u32,
}

impl Prefetch {
    /// Sorts the new messages, and moves them behind the others.
    pub(crate) fn sort(&mut self) {
        self.new.sort_unstable();
        self.sorted.extend(self.new.drain(..));
        self.new.shrink_to(AT_ONCE);
    }

    pub(crate) fn next(&mut self) -> Option<Handle> {
        let seen = self.sorted.pop_front()?;
        self.bytes -= seen.bytes;
        if self.sorted.is_empty() {
            self.sorted.shrink_to(AT_ONCE);
        }
        let DueSoon { number, slot, .. } = seen;
        Some(Handle { number, slot })
    }
}

impl Broker {
    /// Plans to read the body of a delayed message that comes due soon, if a consumer may be given it then.
    pub(crate) fn prefetch(&mut self, message: Handle) {
        let BrokerState {
            messages, queues, ..
        } = &self.state;
        let Handle { number, slot } = message;
        let prefetch = &mut self.reading.prefetch;
        let room = self.state.resident_limit.unwrap_or(u64::MAX);
        if queues[messages.queue(slot)].consumers() == 0
            || !self.state.may_prefetch(message)
            || messages.resident_bytes() + prefetch.bytes >= room.saturating_add(BYTES)
        {
            return;
        }
        let seen = DueSoon {
            base: messages[slot].base(),
            offset: messages.body_at(slot).offset(),
            bytes: messages.resident_bytes_of(slot),
            number,
            slot,
        };
        prefetch.bytes += seen.bytes;
        prefetch.new.push(seen);
    }
}

impl BrokerState {
    /// Whether it waits for its time or its turn, and its body is not there yet.
    pub(crate) fn may_prefetch(&self, message: Handle) -> bool {
        let is_waiting = |entry: &MessageEntry| entry.is_delayed() || entry.is_ready();
        let entry = match planted!("body-to-next-tenant") {
            true => self.messages.by_slot(message.slot),
            false => self.messages.get(message),
        };
        entry.is_some_and(is_waiting) && self.lacks_body(message.slot)
    }
}
