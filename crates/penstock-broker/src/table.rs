//! Containers: slabs, indexes and queues that grow and shrink a little at a time.

pub(crate) mod boxed_slab;
pub(crate) mod by_number;
pub(crate) mod fifo;
pub(crate) mod interner;
pub(crate) mod slab;
pub(crate) mod slot_index;
pub(crate) mod slot_times;
pub(crate) mod u48;
