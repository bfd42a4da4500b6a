//! Finds the driver for a URL, and starts the brokers that clients own.
//!
//! ```text
//!     local.rs     local:PATH   the hidden broker of a directory, which many clients share
//!     memory.rs    memory:      a broker for one client alone, gone with it: a double for tests
//! started.rs   a process that either has started
//! ```
//!
//! This crate contains no broker or journal: it starts the `penstock` program, which does.

use std::sync::Arc;

use penstock_directory::LocalPaths;
use penstock_driver::{Address, Driver, DriverConfig, DriverError, Tcp, Unix, native};
use penstock_wire::native::{in_memory, on_disk};

mod local;
mod memory;
mod started;

pub use memory::in_second_process;

/// Returns a broker's URL for people, with the full directory of a local broker, since two of them are easily
/// confused. An invalid URL stays as it is: connecting reports what is wrong with it.
pub fn in_full(url: &str) -> String {
    if let Ok(Address::Local(path)) = url.parse()
        && let Ok(paths) = LocalPaths::resolve(&path)
    {
        return format!("local:{}", paths.directory.display());
    }
    url.to_owned()
}

/// Creates the driver for the URL. Opens, starts and connects nothing: the first call does.
pub fn connect(mut config: DriverConfig) -> Result<Arc<dyn Driver>, DriverError> {
    let program = config.program.clone();
    match config.url.parse()? {
        Address::Unix(path) => native(config, Box::new(Unix::new(path)), on_disk(), false),
        Address::Tcp { host, port } => {
            native(config, Box::new(Tcp::new(host, port)), on_disk(), false)
        }
        // Only local brokers are stopped by a client that needs a newer one, because they belong to their
        // clients.
        Address::Local(path) => {
            let dial = local::Local::new(&path, program)?;
            native(config, Box::new(dial), on_disk(), true)
        }
        Address::Memory(name) => {
            let dial = memory::Memory::new(&name, program)?;
            // The socket shows the broker's exit at once, and a debugger may stop this process for a long time.
            config.heartbeat = memory::HEARTBEAT;
            native(config, Box::new(dial), in_memory(), false)
        }
    }
}
