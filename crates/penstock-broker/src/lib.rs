//! What should happen: queues, leases, keys, joins, timers, sessions. No IO, no clock, no randomness:
//! the same inputs give the same outputs, bit for bit.
//!
//! ```text
//!     broker.handle(now, input);                   something happened
//!     broker.handle_written(position);             the journal has written up to here
//!     broker.handle_durable(position);             ... and synced up to here
//!     while let Some(record) = broker.poll_record() { journal.append(record) }
//!     while let Some(output) = broker.poll_output() { shell.carry_out(output) }
//!     timer.reset(broker.next_deadline());
//! ```

mod interface;

pub use interface::*;
