//! The server: it introduces the broker core, the journal and the wire to each other.
//!
//! [`Engine`] is all of it that decides, without a socket or a clock; [`Server`] is the process around it.

mod connection;
mod detach;
mod engine;
mod files;
mod histogram;
mod listen;
pub mod local;
mod memory;
mod panics;
mod reader;
mod shell;
mod token;
mod trust;
mod writer;

pub use detach::{detach, let_go_of_stderr};
pub use engine::{Engine, EngineOptions, Memory, Peer, ReadTask, WriterTask};
pub use listen::{ListenAddress, ListenError};
pub use shell::{LocalOptions, Server, ServerError, ServerOptions};
pub use token::{Token, TokenError};

/// How a local broker ends that found another one in its place.
pub const EXIT_IN_USE: u8 = 3;
