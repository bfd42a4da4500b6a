//! The core decides: queues, leases, keys, joins, timers, sessions. It has no IO, no clock and no randomness: the same
//! inputs give the same outputs, bit for bit.
//!
//! ```text
//!     broker.handle(now, input);                   something happened
//!     broker.handle_deadline(now);                 ... or the time came that next_deadline() returned
//!     broker.handle_written(position);             the journal has written up to here
//!     broker.handle_durable(position);             ... and synced up to here
//!     while let Some(record) = broker.poll_record() { journal.append(record) }
//!     while let Some(output) = broker.poll_output() { shell.carry_out(output) }
//!     for read in broker.poll_reads(bytes) { ... }     read these back; answer with handle_read
//!     timer.reset(broker.next_deadline());
//! ```
//!
//! Any number of inputs may come before the polls; the more, the larger the batches. Records are polled before outputs,
//! since polling records hands out work: the grant then rides in the same batch as the publish, and the delivery leaves
//! when that is safe.
//!
//! At the start, [`Recovery`] reads the journal's records in order and becomes the [`Broker`].

mod bodies;
mod broker;
mod bulk_operations;
mod cancels;
mod chores;
mod clock;
mod commits;
mod connections;
mod consistency;
mod consumers;
mod dispatch;
mod endings;
mod failed;
#[cfg(test)]
mod hash_flooding;
mod held_effects;
mod interface;
mod joins;
mod keys;
mod messages;
mod options;
mod progress;
mod published;
mod queues;
mod reclaim;
mod records;
mod recovery;
mod relay;
mod schedules;
mod sessions;
mod state;
mod status;
mod table;
mod timers;
mod waits;
mod workflows;

pub use bodies::reading::{Read, Unread};
pub use broker::Broker;
pub use interface::*;
pub use options::BrokerOptions;
pub use published::{Published, published_in};
pub use reclaim::CarriedForward;
pub use records::{Record, RecordError};
pub use recovery::{Recovery, ReplayError};
pub use schedules::ScheduleState;
