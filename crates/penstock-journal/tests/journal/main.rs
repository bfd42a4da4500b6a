//! Tests of the journal's promises.

mod closing;
mod damage;
mod failures;
mod full;
mod golden;
mod opening;
mod power_cuts;
mod reading;
mod repair;
mod space;
mod support;
