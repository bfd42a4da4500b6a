//! The broker as its clients see it: scripts with what they expect, and scripts that nobody wrote.

mod anything;
mod behaviour;
mod golden;
mod limits;
mod script;
