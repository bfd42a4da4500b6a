//! Finds the driver for a URL, and starts the brokers that clients own.
//!
//! ```text
//!     local.rs           local:PATH   the background broker of a directory, which many clients share
//!     memory_broker.rs   memory:      a broker for a single client, gone with it: a test double
//!     broker_process.rs               a process that either of them has started
//! ```
//!
//! This crate contains no broker or journal: it starts the `penstock` program, which does.

use std::sync::Arc;

use penstock_directory::LocalPaths;
use penstock_driver::{BrokerUrl, Driver, DriverConfig, DriverError, Tcp, Unix, native};
use penstock_wire::native::{in_memory, on_disk};

mod broker_process;
mod local;
mod memory_broker;

pub use memory_broker::memory_url_error;

/// Returns a broker's URL for people, with the full directory of a local broker, since two of them are easily
/// confused. An invalid URL stays as it is: connecting reports what is wrong with it.
pub fn full_url(url: &str) -> String {
    if let Ok(BrokerUrl::Local(path)) = url.parse()
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
        BrokerUrl::Unix(path) => native(config, Box::new(Unix::new(path)), on_disk(), false),
        BrokerUrl::Tcp { host, port } => {
            native(config, Box::new(Tcp::new(host, port)), on_disk(), false)
        }
        // Only local brokers are stopped by a client that needs a newer one, because they belong to their
        // clients.
        BrokerUrl::Local(path) => {
            let dial = local::Local::new(&path, program)?;
            native(config, Box::new(dial), on_disk(), true)
        }
        BrokerUrl::Memory(name) => {
            let dial = memory_broker::MemoryDial::new(&name, program)?;
            // The socket shows the broker's exit at once, and a debugger may stop this process for a long time.
            config.heartbeat = memory_broker::HEARTBEAT;
            native(config, Box::new(dial), in_memory(), false)
        }
    }
}
