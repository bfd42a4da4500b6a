//! Runs the product's crates under a seeded clock, disk and network: one seed replays any failure.
//!
//! [`world`] drives the server's own [`penstock_server::Engine`] and injects every fault it can. Half of its
//! [`client`]s are [`process`]es like those of users, with the driver's own session and the worker's own policy. The
//! others are [`wild`] and do things that no driver would do. [`checker`] reads all bytes and compares them with
//! [`model`], which learns of the decisions and knows the allowed outcomes.

pub mod checker;
pub mod client;
pub mod model;
#[cfg(feature = "faults")]
pub mod mutants;
mod network;
pub mod process;
pub mod said;
pub mod shrink;
pub mod soak;
pub mod wild;
pub mod words;
pub mod work;
pub mod world;
