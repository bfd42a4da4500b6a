use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use clap::Args;
use penstock_driver::Address;
use penstock_message::Query;
use penstock_server::local::LocalPaths;

use crate::exit::{FAILED, Failure};
use crate::remote::{BrokerArguments, not_running, resolve, runs, socket_url};
use crate::text::show;

/// How long a broker may take to put everything on disk and end.
const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Args)]
pub struct Arguments {
    /// The broker's directory, in place of a URL
    path: Option<PathBuf>,
    #[command(flatten)]
    broker: BrokerArguments,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let path = match (&arguments.path, arguments.broker.url.parse()?) {
        (Some(path), _) => path.clone(),
        (None, Address::Local(path)) => path,
        // Such a broker says itself that this is not how it is stopped.
        (None, _) => return arguments.broker.find()?.ask(Query::Stop).map(drop),
    };
    let paths = resolve(&path)?;
    if !runs(&paths) {
        return show(&format!("{}\n", not_running(&paths)));
    }
    let broker = BrokerArguments {
        url: socket_url(&paths.socket),
    };
    broker.find()?.ask(Query::Stop)?;
    wait_until_gone(&paths)?;
    show(&format!(
        "the broker for {} has ended\n",
        paths.directory.display()
    ))
}

/// A broker's lock ends with its process, so whoever gets the lock knows that it is gone.
fn wait_until_gone(paths: &LocalPaths) -> Result<(), Failure> {
    let lock = match File::open(&paths.lock) {
        Ok(lock) => lock,
        // The directory is gone, so its broker goes as well.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let (gone, told) = channel();
    thread::spawn(move || gone.send(lock.lock_shared()));
    match told.recv_timeout(PATIENCE) {
        Ok(locked) => Ok(locked?),
        Err(_) => Err(Failure::new(
            FAILED,
            "the broker was told to end, but one still runs: a client may have started it again",
        )),
    }
}
