//! Bodies that are not in memory: read back from the journal before they are needed.

pub(crate) mod prefetch;
pub(crate) mod reading;
