//! States promises for any input, at each place where penstock reads bytes written by others.
//!
//! Each function takes bytes, turns them into what a broken disk, a stranger or a faulty child could do, and
//! panics when a promise is broken. `make fuzz` searches for such bytes (fuzz/). Valuable findings are in
//! fuzz/corpus, and `cargo test` runs all of them again.

mod broker;
mod frames;
mod journal;

pub use broker::broker;
pub use frames::frames;
pub use journal::journal;

/// Writes as a faulty child could into the memory that it shares with its supervisor.
pub fn slots(data: &[u8]) {
    penstock_worker::hostile::child_out_of_its_mind(data);
}

pub type FuzzTarget = fn(&[u8]);

/// Targets by the name of their corpus.
pub const TARGETS: [(&str, FuzzTarget); 4] = [
    ("journal", journal),
    ("frames", frames),
    ("broker", broker),
    ("slots", slots),
];
