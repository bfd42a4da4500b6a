//! The server: it introduces the broker core, the journal and the wire to each other.

pub mod local;
