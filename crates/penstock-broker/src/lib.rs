//! Decisions: queues, leases, keys, joins, timers, sessions. No IO, no clock, no randomness:
//! the same inputs give the same outputs, bit for bit.
//!
//! ```text
//!     broker.handle(now, input);                   something happened
//!     broker.handle_deadline(now);                 ... or the time came that next_deadline() named
//!     broker.handle_written(position);             the journal has written up to here
//!     broker.handle_durable(position);             ... and synced up to here
//!     while let Some(record) = broker.poll_record() { journal.append(record) }
//!     while let Some(output) = broker.poll_output() { shell.carry_out(output) }
//!     for read in broker.poll_reads(bytes) { ... }     to be read back; answered by handle_read
//!     timer.reset(broker.next_deadline());
//! ```
//!
//! Any number of inputs may come before the polls; the more, the larger the batches. Records are polled
//! before outputs, for that is when work is handed out: the grant then rides in the same batch as the
//! publish, and the delivery leaves when that is safe.
//!
//! At the start, [`Recovery`] takes the journal's records in order and becomes the [`Broker`].

mod active;
mod awaited;
mod broker;
mod cancels;
mod charges;
mod chores;
#[cfg(test)]
mod chosen;
mod clock;
mod commits;
mod connections;
mod consistency;
mod consumers;
mod dispatch;
mod effects;
mod endings;
mod ends;
mod extras;
mod failed;
mod flows;
mod held;
mod inputs;
mod inspect;
mod interface;
mod joins;
mod keys;
mod kinds;
mod ledger;
mod limits;
mod marks;
mod messages;
mod near;
mod options;
mod progress;
mod queue;
mod queues;
mod readiness;
mod reading;
mod reclaim;
mod records;
mod recovery;
mod relay;
mod revivals;
mod schedules;
mod sessions;
mod state;
mod status;
mod table;
mod tally;
mod task_sets;
mod tasks;
mod timers;
mod unused;
mod waits;
mod watchers;
mod watches;
mod workflows;

pub use broker::Broker;
pub use inspect::{Published, published_in};
pub use interface::*;
pub use options::BrokerOptions;
pub use reading::{Read, Unread};
pub use reclaim::Carried;
pub use records::{Record, RecordError};
pub use recovery::{Recovery, ReplayError};
