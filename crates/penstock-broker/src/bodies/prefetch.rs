//! Reads bodies of delayed messages ahead of time.
//!
//! Delayed messages come due in an order of their own, and reading a body means reading its whole record, which may
//! hold a thousand others. So bodies that come due at about the same time are read together, shortly before.

use std::collections::VecDeque;

use penstock_faults::planted;

use crate::messages::Handle;
use crate::messages::entry::MessageEntry;
use crate::state::BrokerState;
use crate::{Broker, Position};

/// Length of the intervals whose messages are read together. The read starts at least one interval early.
const MOMENT_MS: u64 = 250;
/// Bytes that bodies read ahead may take beyond the limit for bodies in memory.
const BYTES: u64 = 8 << 20;
/// Number of bodies read at once. In the worst case each is in a separate record, which takes a few milliseconds.
pub(crate) const AT_ONCE: usize = 2_048;

/// Returns the time to read the body of a message that is due at `due`.
pub(crate) fn prefetch_at(due: u64) -> u64 {
    (due / MOMENT_MS).saturating_sub(1) * MOMENT_MS
}

/// Delayed messages that are due soon and whose bodies are to be read.
#[derive(Debug, Default)]
pub(crate) struct Prefetch {
    /// Messages in journal order.
    sorted: VecDeque<DueSoon>,
    /// Messages that `sort` has not yet moved to `sorted`.
    new: Vec<DueSoon>,
    /// Total bytes of the bodies of both.
    bytes: u64,
}

/// A message, and the location of its body when it was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DueSoon {
    base: Position,
    offset: u64,
    bytes: u64,
    number: u64,
    slot: u32,
}

impl Prefetch {
    /// Sorts the new messages and appends them to the others.
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
    /// Plans to read the body of a delayed message that is due soon, if a consumer may receive it then.
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
    /// Whether the message is still delayed or ready, and its body is not in memory.
    pub(crate) fn may_prefetch(&self, message: Handle) -> bool {
        let is_waiting = |entry: &MessageEntry| entry.is_delayed() || entry.is_ready();
        let entry = match planted!("body-to-next-tenant") {
            true => self.messages.by_slot(message.slot),
            false => self.messages.get(message),
        };
        entry.is_some_and(is_waiting) && self.lacks_body(message.slot)
    }
}
