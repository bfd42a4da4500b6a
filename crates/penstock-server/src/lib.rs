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
pub const EXIT_IN_USE: u8 = 6;
/// The command line, or a file that it names, is wrong.
pub const EXIT_WRONG_CALL: u8 = 2;
/// The journal is damaged.
pub const EXIT_DAMAGED: u8 = 65;
/// A path, a permission or the format of the journal is wrong.
pub const EXIT_UNUSABLE: u8 = 78;
/// With these a start fails until somebody fixes something. Whatever other reason a broker exits for may pass.
pub const EXITS_UNTIL_FIXED: [u8; 3] = [EXIT_WRONG_CALL, EXIT_DAMAGED, EXIT_UNUSABLE];
