//! Reads bodies that are not in memory back from the journal before they are needed.
//!
//! A message that is handed out waits in its connection until its body arrives; one that is carried forward waits here.
//! Bodies are requested in journal order, and neighbours together. A message whose body can't be read fails: a notice
//! says so, and all others continue.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{Durability, Notice};

use crate::bodies::prefetch::{self, Prefetch};
use crate::endings::UNREADABLE;
use crate::messages::Handle;
use crate::records::RecordEvent;
use crate::state::BrokerState;
use crate::{Broker, ConnId, Now, Position};

/// Bytes of deliveries that a connection reads ahead: enough to fill frames while more is being read.
const AHEAD_BYTES: usize = 4 << 20;
/// Largest gap between bodies that are read at once, together with the bytes between them.
const GAP_BYTES: u64 = 4 << 10;
/// Maximum bytes read at once, unless a single body is longer.
const READ_BYTES: u64 = 256 << 10;
/// Number of attempts: a disk that fails to read may succeed at the next attempt.
const ATTEMPTS: u8 = 3;

/// A range of bytes of one record, to be read from the journal.
#[derive(Debug)]
pub struct Read {
    pub position: Position,
    pub range: Range<u64>,
    parts: Vec<ReadPart>,
}

/// Reason why bytes could not be read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unread {
    /// The record no longer exists: its live things have since been carried forward.
    Gone,
    /// The bytes could not be read this time.
    Failed(String),
    /// The bytes are missing or changed. The text says where, and what is wrong.
    Damaged(String),
}

/// A wanted body and its location in the record.
#[derive(Debug)]
struct ReadPart {
    wanted: WantedBody,
    base: Position,
    range: Range<u64>,
}

#[derive(Clone, Copy, Debug)]
struct WantedBody {
    by: WantedBy,
    attempts: u8,
}

#[derive(Clone, Copy, Debug)]
enum WantedBy {
    /// The message was handed out.
    Delivery(Handle),
    /// The message comes due soon.
    Prefetch(Handle),
    /// The message in this slot is carried forward.
    Reclaim(u32),
}

#[derive(Debug, Default)]
pub(crate) struct Reading {
    wanted: VecDeque<WantedBody>,
    /// Bodies in records that are not yet safe.
    too_early: Vec<WantedBody>,
    /// Messages to be carried forward that wait for their bodies, with their bases. They are not in the live bases in
    /// the meantime.
    pub(crate) carrying: BTreeMap<u32, Position>,
    /// Messages to be carried forward, with their bodies.
    pub(crate) carried: Vec<(u32, Bytes)>,
    /// Values of ended messages to write with the current record.
    pub(crate) ends: Vec<u32>,
    pub(crate) prefetch: Prefetch,
    /// Number of messages quarantined since the process started.
    pub(crate) unreadable: u64,
}

impl Reading {
    fn request(&mut self, by: WantedBy) {
        self.wanted.push_back(WantedBody { by, attempts: 0 });
    }

    /// Notes that the message has left the live bases, to be carried forward once its body arrives.
    pub(crate) fn carry(&mut self, slot: u32, base: Position) {
        self.carrying.insert(slot, base);
        self.request(WantedBy::Reclaim(slot));
    }

    /// Requests bodies that were too early before: more records are safe now.
    pub(crate) fn advance(&mut self) {
        self.wanted.extend(self.too_early.drain(..));
    }
}

impl Broker {
    /// Returns the next reads of the journal, of roughly `max_bytes` in total. Call it after records have been polled,
    /// while no other read is under way; answer each read with `handle_read`.
    #[must_use = "each read is returned once"]
    pub fn poll_reads(&mut self, max_bytes: usize) -> Vec<Read> {
        let mut parts = Vec::new();
        let mut bytes = 0;
        while bytes < max_bytes
            && let Some(wanted) = self.reading.wanted.pop_front()
        {
            if let Some(part) = self.locate(wanted) {
                bytes += (part.range.end - part.range.start) as usize;
                parts.push(part);
            }
        }
        let most = parts.len() + prefetch::AT_ONCE;
        while bytes < max_bytes
            && parts.len() < most
            && let Some(message) = self.reading.prefetch.next()
        {
            let by = WantedBy::Prefetch(message);
            if let Some(part) = self.locate(WantedBody { by, attempts: 0 }) {
                bytes += (part.range.end - part.range.start) as usize;
                parts.push(part);
            }
        }
        parts.sort_by_key(|part| (part.base, part.range.start));
        let mut reads: Vec<Read> = Vec::new();
        for part in parts {
            match reads.last_mut() {
                Some(last)
                    if last.position == part.base
                        && part.range.start <= last.range.end + GAP_BYTES
                        && part.range.end <= last.range.start + READ_BYTES =>
                {
                    last.range.end = last.range.end.max(part.range.end);
                    last.parts.push(part);
                }
                _ => reads.push(Read {
                    position: part.base,
                    range: part.range.clone(),
                    parts: vec![part],
                }),
            }
        }
        reads
    }

    /// Whether a message to be carried forward still lacks its body.
    pub fn awaits_carried(&self) -> bool {
        self.reading.carried.len() < self.reading.carrying.len()
    }

    /// Locates a wanted body; `None` if it is no longer wanted.
    fn locate(&mut self, wanted: WantedBody) -> Option<ReadPart> {
        let slot = match wanted.by {
            WantedBy::Delivery(message) => {
                self.state.awaits_body(message).then_some(message.slot)?
            }
            WantedBy::Prefetch(message) => {
                self.state.may_prefetch(message).then_some(message.slot)?
            }
            WantedBy::Reclaim(slot) => {
                let base = *self.reading.carrying.get(&slot)?;
                let entry = self.state.messages.by_slot(slot);
                let entry = entry.filter(|entry| entry.base() == base);
                let Some(entry) = entry else {
                    self.reading.carrying.remove(&slot);
                    self.state.live_bases.popped_stale();
                    return None;
                };
                if entry.is_ended() {
                    // Only its value is left, which needs no body.
                    self.reading.carried.push((slot, Bytes::new()));
                    return None;
                }
                slot
            }
        };
        let base = self.state.messages[slot].base();
        if base > self.state.durable {
            if !matches!(wanted.by, WantedBy::Prefetch(_)) {
                self.reading.too_early.push(wanted);
            }
            return None;
        }
        let body_at = self.state.messages.body_at(slot);
        let start = body_at.offset();
        Some(ReadPart {
            wanted,
            base,
            range: start..start + body_at.length() as u64,
        })
    }

    /// Handles the outcome of a read.
    pub fn handle_read(&mut self, now: Now, read: Read, outcome: Result<Bytes, Unread>) {
        self.handle_deadline(now);
        let mut lost = Vec::new();
        for ReadPart {
            mut wanted,
            base,
            range,
        } in read.parts
        {
            match &outcome {
                Ok(bytes) if self.is_at(wanted.by, base) => {
                    let from = read.range.start;
                    let piece = (range.start - from) as usize..(range.end - from) as usize;
                    self.has_read(wanted.by, bytes.slice(piece));
                }
                // Its delivery will ask again and report the reason.
                _ if matches!(wanted.by, WantedBy::Prefetch(_)) => {}
                // The message was carried forward, or another has its slot and its place: one that replaced it.
                Ok(_) => self.reading.wanted.push_back(wanted),
                Err(unread) => {
                    // If the message has a new base, look for the body there.
                    let is_there = self.is_at(wanted.by, base);
                    wanted.attempts += u8::from(is_there);
                    let reason = match unread {
                        Unread::Gone => format!("record {} is gone", base.0),
                        Unread::Failed(why) | Unread::Damaged(why) => why.clone(),
                    };
                    let is_over = matches!(unread, Unread::Damaged(_)) && is_there;
                    match is_over || wanted.attempts >= ATTEMPTS {
                        true => lost.push((wanted.by, reason)),
                        false => self.reading.wanted.push_back(wanted),
                    }
                }
            }
        }
        if !lost.is_empty() {
            self.begin(Durability::Disk);
            for (by, reason) in lost {
                self.give_up_read(by, &reason);
            }
            self.seal(Durability::Disk);
        }
        self.state.sweep();
    }

    /// Whether the record that was read is still the base of its message.
    fn is_at(&self, by: WantedBy, base: Position) -> bool {
        let (WantedBy::Delivery(Handle { slot, .. })
        | WantedBy::Prefetch(Handle { slot, .. })
        | WantedBy::Reclaim(slot)) = by;
        let entry = self.state.messages.by_slot(slot);
        entry.is_some_and(|entry| entry.base() == base || planted!("body-to-next-tenant"))
    }

    fn has_read(&mut self, by: WantedBy, body: Bytes) {
        match by {
            WantedBy::Delivery(message) => {
                if !self.state.awaits_body(message) {
                    return;
                }
                self.state.messages.set_body_read_back(message.slot, body);
                let lease = self.state.messages.lease_state(message.slot);
                let session = lease.and_then(|lease| self.state.sessions.get(lease.session));
                if let Some(conn) = session.and_then(|session| session.conn) {
                    self.enqueue_output(conn);
                }
            }
            WantedBy::Prefetch(message) => {
                if self.state.may_prefetch(message) {
                    // A copy, since a slice would keep everything that was read with it in memory.
                    let body = Bytes::copy_from_slice(&body);
                    self.state.messages.set_body_read_back(message.slot, body);
                }
            }
            WantedBy::Reclaim(slot) => {
                if self.reading.carrying.contains_key(&slot) {
                    self.reading.carried.push((slot, body));
                }
            }
        }
    }

    fn give_up_read(&mut self, by: WantedBy, reason: &str) {
        match by {
            WantedBy::Delivery(message) => {
                if self.state.awaits_body(message) {
                    self.state.live_bases.abandon();
                    self.quarantine(message.slot, reason);
                }
            }
            WantedBy::Prefetch(_) => {}
            WantedBy::Reclaim(slot) => {
                let Some(base) = self.reading.carrying.remove(&slot) else {
                    return;
                };
                let entry = self.state.messages.by_slot(slot);
                match entry.filter(|entry| entry.base() == base) {
                    Some(entry) if entry.is_ended() => {
                        self.reading.carrying.insert(slot, base);
                        self.reading.carried.push((slot, Bytes::new()));
                    }
                    Some(_) => self.quarantine(slot, reason),
                    None => self.state.live_bases.popped_stale(),
                }
            }
        }
    }

    /// Fails a message whose body is lost. The reason takes the place of the body.
    fn quarantine(&mut self, slot: u32, reason: &str) {
        let BrokerState {
            messages, queues, ..
        } = &self.state;
        let id = messages[slot].id;
        let from = queues[messages.queue(slot)].name;
        let from = self.state.names.text(from).to_owned();
        let text = format!("its body can't be read back from the journal: {reason}");
        match self.state.messages[slot].is_failed() {
            // A failed job already has its result; only its arguments are lost.
            true => self.note(slot, &text),
            false => self.fail_by_itself(slot, false, UNREADABLE, &Bytes::from(text.clone())),
        }
        // Writes its full state again without a body, so that nobody looks for the body again.
        self.carry_message(slot, &[]);
        self.reading.unreadable += 1;
        self.notice(Notice::Unreadable {
            id,
            queue: from,
            reason: text,
        });
    }

    fn note(&mut self, slot: u32, text: &str) {
        let number = self.state.messages[slot].number();
        let note = text.as_bytes();
        self.record(&RecordEvent::Noted { number, note });
        self.state.add_note(slot, Bytes::copy_from_slice(note));
    }

    /// Requests the bodies of the deliveries that this connection sends next.
    pub(crate) fn read_ahead(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        while connection.ahead_bytes < AHEAD_BYTES
            && let Some(waiting) = connection.deliveries.get_mut(connection.ahead)
        {
            connection.ahead += 1;
            if self.state.awaits_body(waiting.message) {
                let body_at = self.state.messages.body_at(waiting.message.slot);
                waiting.bytes = body_at.length();
                connection.ahead_bytes += waiting.bytes;
                self.reading.request(WantedBy::Delivery(waiting.message));
            }
        }
    }
}
