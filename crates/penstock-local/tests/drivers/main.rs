//! Tests the drivers against real brokers. One program, so that the executable they start is built once.

mod capabilities;
mod conformance;
mod engines;
mod liar;
mod local;
mod remote;
mod support;
mod versions;
mod workflows;
