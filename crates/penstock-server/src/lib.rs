//! The server: it introduces the broker core, the journal and the wire to each other.
//!
//! [`Engine`] makes all decisions, without a socket or a clock; [`Server`] is the process around it.

mod connection;
mod detach;
mod engine;
mod files;
mod guard;
mod histogram;
mod listen;
mod memory;
mod panics;
mod reader;
mod shell;
mod token;
mod writer;

pub use detach::{detach, let_go_of_stderr};
pub use engine::{Engine, EngineOptions, Memory, Peer, ReadTask, WriterTask};
pub use guard::LocalGuard;
pub use listen::{ListenAddress, ListenError};
pub use shell::{Home, LocalOptions, OnlyClient, Server, ServerError, ServerOptions};
pub use token::{Token, TokenError};
