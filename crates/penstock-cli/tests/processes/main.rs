//! Tests the program as processes: what a person or a script that runs `penstock` may rely on.

mod bounded;
mod local_broker;
mod server;
mod strangers;
mod support;
mod upgrade;
