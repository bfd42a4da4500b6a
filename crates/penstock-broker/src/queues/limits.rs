//! Limits of the messages that wait in a queue: when it is full, new ones are refused or old ones dropped.
//!
//! A queue's length is the number of messages that wait in it, ready or delayed. Running ones are not counted, nor
//! those that a join holds: both enter the queue when they must, full or not. So only a publish that is not part of a
//! run's outcome is refused, and a queue may grow somewhat longer than its limit.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{Key, Message, Notice, Op, Overflow, QueueLimits, Refusal, Space};

use crate::Broker;
use crate::endings::Unrun;
use crate::records::{RecordEvent, UnrunCause};
use crate::state::BrokerState;

const DISPLACED: &str = "its queue was full and newer jobs took its place";

/// Messages that the current transaction has added to a queue with limits so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrivals {
    queue: u32,
    length: u64,
    bytes: u64,
}

impl Broker {
    pub(crate) fn space_changed(&mut self, space: Space) {
        if std::mem::replace(&mut self.space, space) != space {
            self.state.schedules.review();
            self.notice(Notice::Space(space));
        }
    }

    pub(crate) fn memory_changed(&mut self, is_full: bool, limit_bytes: u64) {
        let now = is_full.then_some(limit_bytes);
        let was = std::mem::replace(&mut self.memory_is_full, now);
        if was.is_some() != is_full {
            self.state.schedules.review();
            self.notice(Notice::Memory {
                is_full,
                limit_bytes,
            });
        }
    }

    /// Whether new work may be refused at present, by one queue or by all.
    pub(crate) fn has_limits(&self) -> bool {
        self.state.queues.limited > 0
            || self.space != Space::Plenty
            || self.memory_is_full.is_some()
    }

    /// Checks whether these operations, and those before them in the current record, fit on the disk. If not, the error
    /// is the operation to refuse. They may use only half of the room: the ends of segments may stay empty, and records
    /// that free space later must be written too.
    pub(crate) fn check_size(&self, ops: &[Op]) -> Result<(), u32> {
        if self.room_bytes == u64::MAX || ops.iter().any(Op::is_settlement) {
            return Ok(());
        }
        let bytes: usize = ops.iter().map(journal_bytes).sum();
        let bytes = (bytes + self.writer.len()) as u64;
        let is_new = |op: &Op| matches!(op, Op::Publish { .. } | Op::Hold { .. });
        match ops.iter().position(is_new) {
            Some(op) if bytes > self.room_bytes / 2 => Err(op as u32),
            _ => Ok(()),
        }
    }

    /// Whether the broker accepts new work at all.
    pub(crate) fn check_admission(&self) -> Result<(), Refusal> {
        if self.space != Space::Plenty {
            return Err(Refusal::DiskFull);
        }
        match self.memory_is_full {
            Some(limit) => Err(Refusal::QueueFull(format!(
                "the broker is at its memory limit of {} MiB",
                limit >> 20
            ))),
            None => Ok(()),
        }
    }

    /// Whether one more message may wait in these queues.
    pub(crate) fn check_room(
        &mut self,
        queues: &[String],
        bytes: u64,
        is_delayed: bool,
        arrivals: &mut Vec<Arrivals>,
    ) -> Result<(), Refusal> {
        for name in queues {
            let found = self.state.names.find(name);
            let Some(index) = found.and_then(|name| self.state.queues.find(name)) else {
                continue;
            };
            let queue = &mut self.state.queues[index];
            let limits = queue.rare().limits;
            if limits.is_none() {
                continue;
            }
            // If the oldest make room, only delayed messages can be in the way.
            let (mut length, mut waiting_bytes) = match limits.overflow {
                Overflow::Reject => (
                    queue.ready + queue.delayed - queue.rare().ending,
                    queue.waiting_bytes(),
                ),
                Overflow::DropOldest => (queue.delayed, queue.delayed_bytes),
            };
            length += 1;
            waiting_bytes += bytes;
            if limits.overflow == Overflow::Reject || is_delayed {
                let of_queue = |brought: &&mut Arrivals| brought.queue == index;
                match arrivals.iter_mut().find(of_queue) {
                    Some(brought) => {
                        length += brought.length;
                        waiting_bytes += brought.bytes;
                        brought.length += 1;
                        brought.bytes += bytes;
                    }
                    None => arrivals.push(Arrivals {
                        queue: index,
                        length: 1,
                        bytes,
                    }),
                }
            }
            if !limits.allow(length, waiting_bytes) {
                queue.rare_mut().refused += 1;
                return Err(Refusal::QueueFull(full(
                    name,
                    queue.ready + queue.delayed,
                    queue.waiting_bytes(),
                    limits,
                )));
            }
        }
        Ok(())
    }

    /// Drops the oldest messages of a queue that has become too full, if its limits say so. Messages that do not fit
    /// into the current record are dropped in a later step. Only messages with numbers below `before` are dropped: a
    /// message that can't be refused, such as a retry, must not be lost by its own arrival. The queue is then longer
    /// than its limit.
    pub(crate) fn make_room(&mut self, queue: u32, before: u64) {
        let before = match planted!("displace-itself") {
            true => u64::MAX,
            false => before,
        };
        while self.is_overfull(queue) {
            if self.step_size() == 0 {
                return self.chores.make_room(queue, before);
            }
            let BrokerState {
                queues, messages, ..
            } = &mut self.state;
            let Some(slot) = queues.oldest_of_lowest(queue, before, messages) else {
                return;
            };
            // Clients that wait for its result are notified; it must not come back after that.
            self.must_be_safe();
            let reason = self.state.names.intern(DISPLACED);
            let how = UnrunCause::Displaced;
            self.added += 1;
            self.added += self.end_waiting(vec![slot], Unrun { how, reason });
        }
    }

    fn is_overfull(&self, queue: u32) -> bool {
        let queue = &self.state.queues[queue];
        let length = queue.ready + queue.delayed - queue.rare().ending;
        let limits = &queue.rare().limits;
        limits.overflow == Overflow::DropOldest && !limits.allow(length, queue.waiting_bytes())
    }

    pub(crate) fn limit(&mut self, queue: &str, limits: QueueLimits) {
        let name = self.state.names.intern(queue);
        let queue = self.state.queue_named(name);
        self.record(&RecordEvent::Limited {
            queue: name,
            limits,
        });
        self.state.limit(queue, limits);
    }
}

/// Returns roughly how many bytes an operation takes in the journal.
fn journal_bytes(op: &Op) -> usize {
    let message_bytes = |message: &Message| {
        let notes: usize = message.notes.iter().map(|note| note.len() + 8).sum();
        let extras = message.extras.as_ref().map_or(0, |extras| {
            48 + extras.headers_bytes() + extras.key.as_ref().map_or(0, Bytes::len)
        });
        48 + message.body.len() + notes + extras
    };
    match op {
        Op::Publish {
            queues,
            message,
            unless_key,
            ..
        } => {
            let key = match unless_key.as_ref().map(|claim| &claim.key) {
                Some(Key::Named(name) | Key::Scoped(_, name)) => name.len(),
                _ => 0,
            };
            message_bytes(message) + key + 16 * queues.len()
        }
        Op::Hold(hold) => {
            let messages = hold
                .messages
                .iter()
                .map(|(_, message)| message_bytes(message));
            48 + messages.sum::<usize>()
        }
        Op::Put { value, .. } => 64 + value.body.len(),
        _ => 64,
    }
}

/// Names the limit that was reached, and where it can be changed.
fn full(name: &str, length: u64, bytes: u64, limits: QueueLimits) -> String {
    let limit = match (limits.max_length, limits.max_bytes) {
        (Some(length), Some(bytes)) => format!("{length} jobs and {bytes} bytes"),
        (Some(length), None) => format!("{length} jobs"),
        (None, Some(bytes)) => format!("{bytes} bytes"),
        (None, None) => String::new(),
    };
    format!(
        "queue {name:?} is full: {length} jobs of {bytes} bytes wait in it, and its limit is {limit} (penstock limit set {name})"
    )
}
