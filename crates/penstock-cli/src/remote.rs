//! One question or order to a broker that runs already: these commands start none.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use clap::Args;
use penstock_driver::{Address, Done, Driver, DriverConfig, DriverError, connect};
use penstock_message::{Answer, Durability, Query, Receipt, StatusPage, StatusQuery, Tx};
use penstock_server::local::{LocalPaths, is_nobody};

use crate::exit::{FAILED, Failure, NO_BROKER};

/// How long a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Args)]
pub struct BrokerArguments {
    /// The broker: local:PATH, unix:PATH or tcp://HOST:PORT
    #[arg(long, env = "PENSTOCK_URL", default_value = DEFAULT_URL, hide_env_values = true)]
    pub url: String,
}

pub const DEFAULT_URL: &str = "local:.penstock";

/// A connection to a broker, and what to call it.
pub struct Broker {
    driver: Arc<dyn Driver>,
    pub shown: String,
}

impl BrokerArguments {
    /// Finds the broker. Fails with a clear word when a local one does not run.
    pub fn find(&self) -> Result<Broker, Failure> {
        let (url, shown) = match self.url.parse()? {
            Address::Local(path) => {
                let paths = resolve(&path)?;
                let Some(socket) = find_socket(&paths)? else {
                    return Err(Failure::new(NO_BROKER, not_running(&paths)));
                };
                let shown = format!("local:{}", paths.directory.display());
                (socket_url(&socket), shown)
            }
            _ => (self.url.clone(), self.url.clone()),
        };
        let config = DriverConfig {
            token: token_from_environment(),
            name: format!("penstock command, pid {}", std::process::id()),
            ..DriverConfig::new(url)
        };
        Ok(Broker {
            driver: connect(config)?,
            shown,
        })
    }
}

impl Broker {
    pub fn ask(&self, query: Query) -> Result<Answer, Failure> {
        let answer = wait_for(|done| self.driver.query(query, deadline(), done))?;
        match answer {
            Answer::Refused(why) => Err(Failure::new(FAILED, why)),
            answer => Ok(answer),
        }
    }

    /// One page of the status.
    pub fn status_page(&self, query: StatusQuery) -> Result<StatusPage, Failure> {
        match self.ask(Query::Status(query))? {
            Answer::Status(page) => Ok(page),
            _ => Err(Failure::new(
                FAILED,
                "the broker gave another answer than its status",
            )),
        }
    }

    pub fn commit(&self, tx: Tx) -> Result<Receipt, Failure> {
        let receipts = wait_for(|done| {
            self.driver
                .commit(vec![tx], Durability::Disk, Some(deadline()), done)
        })?;
        receipts
            .into_iter()
            .next()
            .ok_or_else(|| Failure::new(FAILED, "the broker sent no receipt"))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.driver.close(Instant::now() + Duration::from_secs(1));
    }
}

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

fn wait_for<T: Send + 'static>(call: impl FnOnce(Done<T>)) -> Result<T, Failure> {
    let (done, ended) = channel();
    call(Box::new(move |outcome: Result<T, DriverError>| {
        // Nobody waits any more when this process ends.
        let _unheard = done.send(outcome);
    }));
    match ended.recv() {
        Ok(outcome) => Ok(outcome?),
        Err(_) => Err(Failure::new(
            FAILED,
            "the connection ended without an answer",
        )),
    }
}

pub fn token_from_environment() -> Option<String> {
    std::env::var("PENSTOCK_TOKEN")
        .ok()
        .filter(|token| !token.is_empty())
}

pub fn resolve(path: &Path) -> Result<LocalPaths, Failure> {
    LocalPaths::resolve(path).map_err(|error| {
        Failure::new(
            FAILED,
            format!("local:{} names no directory: {error}", path.display()),
        )
    })
}

/// Where a broker of the directory listens, if one does.
pub fn find_socket(paths: &LocalPaths) -> Result<Option<PathBuf>, Failure> {
    match paths.connect(|path| UnixStream::connect(path)) {
        Ok((_, socket)) => Ok(Some(socket.to_path_buf())),
        Err(error) if is_nobody(&error) => Ok(None),
        Err(error) => {
            let directory = paths.directory.display();
            Err(Failure::new(
                FAILED,
                format!("can't use {directory}: {error}"),
            ))
        }
    }
}

pub fn not_running(paths: &LocalPaths) -> String {
    format!(
        "no broker is running for {}; the first client or worker starts it",
        paths.directory.display()
    )
}

pub fn socket_url(socket: &Path) -> String {
    format!("unix:{}", PathBuf::from(socket).display())
}
