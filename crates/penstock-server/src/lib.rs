//! The server: joins the broker core, the journal and the wire protocol.
//!
//! [`Engine`] makes all decisions, without a socket or a clock; [`Server`] is the process around it.

mod connection;
mod detach;
mod directory_lock;
mod engine;
mod files;
mod histogram;
mod listen;
mod panics;
mod process_memory;
mod reader;
mod shell;
mod standby;
mod token;
mod writer;

pub use detach::{detach, release_stderr};
pub use directory_lock::DirectoryLock;
pub use engine::{Engine, EngineOptions, MemoryUse, Peer, ReadTask, WriterTask};
pub use listen::{ListenAddress, ListenError};
pub use shell::{Home, LocalOptions, OnlyClient, Server, ServerError, ServerOptions};
pub use token::{Token, TokenError};
