//! The same crates under a seeded clock, disk and network: one seed replays any failure.
//!
//! [`world`] drives the server's own [`penstock_server::Engine`] and lets everything go wrong that can;
//! [`client`]s speak to it in bytes; [`checker`] reads all that is said and holds it against [`model`],
//! which is told what was decided and knows what may be.

pub mod checker;
pub mod client;
pub mod model;
#[cfg(feature = "faults")]
pub mod mutants;
pub mod shrink;
pub mod soak;
pub mod words;
pub mod world;
