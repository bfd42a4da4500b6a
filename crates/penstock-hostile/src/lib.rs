//! Promises for any input at all, for each place where penstock reads bytes that others wrote.
//!
//! Each function takes bytes, makes of them what a broken disk, a stranger or a child out of its mind
//! could do, and panics when a promise does not hold. `make fuzz` looks for such bytes (fuzz/); what it
//! has found worth keeping is in fuzz/corpus, and `cargo test` tries all of that again.

mod broker;
mod frames;
mod journal;

pub use broker::broker;
pub use frames::frames;
pub use journal::journal;

/// A child writes what it likes into the memory that it shares with its supervisor.
pub fn slots(data: &[u8]) {
    penstock_worker::hostile::child_out_of_its_mind(data);
}

pub type Target = fn(&[u8]);

/// Each by the name of its corpus.
pub const TARGETS: [(&str, Target); 4] = [
    ("journal", journal),
    ("frames", frames),
    ("broker", broker),
    ("slots", slots),
];
