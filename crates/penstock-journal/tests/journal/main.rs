//! What the journal promises.

mod damage;
mod failures;
mod opening;
mod power_cuts;
mod space;
mod support;
