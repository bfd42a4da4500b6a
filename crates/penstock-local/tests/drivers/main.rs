//! The drivers against real brokers. One program, so that the executable they start is built once.

mod capabilities;
mod conformance;
mod local;
mod remote;
mod support;
mod versions;
mod workflows;
