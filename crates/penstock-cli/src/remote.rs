//! Sends queries and orders to a running broker. These commands never start one.

use std::io::{Write, stderr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use penstock_directory::{LocalPaths, is_nobody};
use penstock_driver::{BrokerUrl, Done, Driver, DriverConfig, DriverError, ValueSink};
use penstock_local::{connect, memory_url_error};
use penstock_message::{
    Answer, Applied, AskQuery, Capabilities, Key, KeyState, MessageId, MessageInfo, NoReply, Op,
    OperationStatus, Query, Receipt, Status, StatusPage, StatusQuery, Tx,
};

use crate::exit::{CommandError, FAILED, NO_BROKER, WRONG_CALL, applied, cant_use_directory};
use crate::text::count;

/// Time that a broker has to answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Args)]
pub struct BrokerArguments {
    /// The broker: local:PATH, unix:PATH or tcp://HOST:PORT
    #[arg(long, env = "PENSTOCK_URL", default_value = DEFAULT_URL, hide_env_values = true)]
    pub url: String,
}

pub const DEFAULT_URL: &str = "local:.penstock";

/// First and longest interval between two queries for an operation's progress.
const FIRST_POLL: Duration = Duration::from_millis(2);
const LONGEST_POLL: Duration = Duration::from_millis(250);
/// Interval between progress lines for a person who waits for an operation.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Connection to a broker, with the name to show for it.
pub struct RemoteBroker {
    driver: Arc<dyn Driver>,
    pub shown: String,
}

impl BrokerArguments {
    pub fn address(&self) -> Result<BrokerUrl, CommandError> {
        address_of(self.named())
    }

    /// Returns the URL. An empty PENSTOCK_URL counts as unset, as in programs and workers.
    fn named(&self) -> &str {
        match self.url.as_str() {
            "" => DEFAULT_URL,
            url => url,
        }
    }

    /// Finds the broker. Fails with a clear message when a local one is not running.
    pub fn find(&self) -> Result<RemoteBroker, CommandError> {
        let (url, shown) = match self.address()? {
            BrokerUrl::Local(path) => {
                let paths = resolve(&path)?;
                let Some(socket) = find_socket(&paths)? else {
                    return Err(CommandError::new(NO_BROKER, not_running(&paths)));
                };
                let shown = format!("local:{}", paths.directory.display());
                (socket_url(&socket), shown)
            }
            _ => (self.named().to_owned(), self.named().to_owned()),
        };
        let config = DriverConfig {
            token: token_from_environment(),
            name: format!("penstock command, pid {}", std::process::id()),
            ..DriverConfig::new(url)
        };
        Ok(RemoteBroker {
            driver: connect(config)?,
            shown,
        })
    }
}

/// Parses a URL. A memory broker is part of another process, so no command can reach it.
pub fn address_of(url: &str) -> Result<BrokerUrl, CommandError> {
    match url.parse() {
        Ok(BrokerUrl::Memory(_)) => Err(CommandError::new(WRONG_CALL, memory_url_error())),
        Ok(address) => Ok(address),
        Err(error) => Err(CommandError::new(WRONG_CALL, error)),
    }
}

impl RemoteBroker {
    pub fn ask(&self, query: Query) -> Result<Answer, CommandError> {
        let answer = wait_for(|done| self.driver.query(query, deadline(), done))?;
        match answer {
            Answer::Refused(why) => Err(CommandError::new(FAILED, why)),
            answer => Ok(answer),
        }
    }

    /// Asks the broker to relay questions to workers, and returns the replies in the same order.
    pub fn relay(
        &self,
        asks: Vec<AskQuery>,
        patience: Duration,
    ) -> Result<Vec<Result<Bytes, NoReply>>, CommandError> {
        let deadline = Instant::now() + patience + PATIENCE;
        let replies = asks.into_iter().map(|ask| {
            let (done, ended) = channel();
            let done = Box::new(move |outcome| {
                let _unheard = done.send(outcome);
            });
            self.driver.query(Query::Ask(ask), deadline, done);
            ended
        });
        // Send all questions before waiting for the first reply.
        let replies: Vec<_> = replies.collect();
        let replies = replies.into_iter().map(|ended| match ended.recv() {
            Ok(Ok(Answer::Asked(reply))) => Ok(reply),
            Ok(Ok(Answer::Refused(why))) => Err(CommandError::new(FAILED, why)),
            Ok(Ok(_)) => Err(CommandError::new(
                FAILED,
                "the broker sent an unexpected answer instead of a worker's reply",
            )),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(unanswered()),
        });
        replies.collect()
    }

    /// Returns the capabilities of the engine behind the broker.
    pub fn capabilities(&self) -> Result<Arc<Capabilities>, CommandError> {
        wait_for(|done| self.driver.probe(deadline(), done))
    }

    /// Fetches one page of the status.
    pub fn status_page(&self, query: StatusQuery) -> Result<StatusPage, CommandError> {
        match self.ask(Query::Status(query))? {
            Answer::Status(page) => Ok(page),
            _ => Err(CommandError::new(
                FAILED,
                "the broker sent an unexpected answer instead of its status",
            )),
        }
    }

    /// Fetches the status with all queues and workers.
    pub fn status(&self) -> Result<Status, CommandError> {
        Status::collect(|page| self.status_page(page))
    }

    /// Looks up a job; `None` if the broker has none with this id.
    pub fn job(&self, id: MessageId) -> Result<Option<MessageInfo>, CommandError> {
        match self.ask(Query::Message(id))? {
            Answer::Message(info) => Ok(info),
            _ => Err(CommandError::new(
                FAILED,
                "the broker sent an unexpected answer instead of a job",
            )),
        }
    }

    /// Fetches the progress of a running job; `None` also when the broker has none.
    pub fn progress(&self, id: MessageId) -> Option<serde_json::Value> {
        match self.ask(Query::Progress(id)) {
            Ok(Answer::Progress(Some(body))) => serde_json::from_slice(&body).ok(),
            _ => None,
        }
    }

    /// Fetches the present state of a key.
    pub fn peek(&self, key: Key) -> Result<KeyState, CommandError> {
        let (told, answer) = channel();
        let sink = Arc::new(Peek(Mutex::new(told)));
        self.driver.peek(vec![key], Some(deadline()), sink);
        match answer.recv() {
            Ok(Peeked::State(state)) => Ok(state),
            Ok(Peeked::Failed(error)) => Err(error.into()),
            Ok(Peeked::TimedOut) | Err(_) => Err(CommandError::new(
                NO_BROKER,
                format!("the broker did not answer within {} s", PATIENCE.as_secs()),
            )),
        }
    }

    /// Carries out operations one by one, as durably as the engine can. Returns a receipt for each.
    pub fn commit_each(&self, ops: Vec<Op>) -> Result<Vec<Receipt>, CommandError> {
        let expected = ops.len();
        let txs = ops.into_iter().map(|op| Tx::from(vec![op])).collect();
        let receipts = wait_for(|done| self.driver.settle(txs, Some(deadline()), done))?;
        match receipts.len() == expected {
            true => Ok(receipts),
            false => Err(CommandError::new(FAILED, "the broker sent no receipt")),
        }
    }

    pub fn commit(&self, op: Op) -> Result<Applied, CommandError> {
        let receipts = self.commit_each(vec![op])?;
        receipts.into_iter().next().map_or_else(
            || Err(CommandError::new(FAILED, "the broker sent no receipt")),
            applied,
        )
    }

    /// Carries out an operation on many jobs, and waits until it is complete.
    pub fn run_operation(&self, op: Op) -> Result<OperationStatus, CommandError> {
        let Some(operation) = self.commit(op)?.operation else {
            // Nothing matched.
            return Ok(OperationStatus::default());
        };
        let mut pause = FIRST_POLL;
        let mut tell_at = Instant::now() + PROGRESS_INTERVAL;
        loop {
            let status = match self.ask(Query::Operation(operation))? {
                Answer::Operation(Some(status)) => status,
                _ => {
                    let text = "the broker no longer reports the progress of this operation; the operation is recorded and continues";
                    return Err(CommandError::new(FAILED, text));
                }
            };
            if status.is_over {
                return Ok(status);
            }
            if Instant::now() >= tell_at {
                tell_at = Instant::now() + PROGRESS_INTERVAL;
                let done = count(status.done, "job");
                // The broker has stored the order, so stopping this command does not stop it.
                let _unread = writeln!(
                    stderr(),
                    "{done} done so far; stopping this command does not stop the operation"
                );
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_POLL);
        }
    }
}

enum Peeked {
    State(KeyState),
    Failed(DriverError),
    TimedOut,
}

/// Passes on the first state that a driver reports for a key.
struct Peek(Mutex<Sender<Peeked>>);

impl Peek {
    fn tell(&self, peeked: Peeked) {
        if let Ok(told) = self.0.lock() {
            // Only the first report counts.
            let _unheard = told.send(peeked);
        }
    }
}

impl ValueSink for Peek {
    fn value(&self, _key: Key, state: KeyState) {
        self.tell(Peeked::State(state));
    }

    fn pending(&self, _key: Key) {
        self.tell(Peeked::State(KeyState::Pending));
    }

    fn reachable(&self, _reachable: bool) {}

    fn failed(&self, error: DriverError) {
        self.tell(Peeked::Failed(error));
    }

    fn timed_out(&self, _trouble: Option<String>) {
        self.tell(Peeked::TimedOut);
    }
}

impl Drop for RemoteBroker {
    fn drop(&mut self) {
        self.driver.close(Instant::now() + Duration::from_secs(1));
    }
}

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

fn wait_for<T: Send + 'static>(call: impl FnOnce(Done<T>)) -> Result<T, CommandError> {
    let (done, ended) = channel();
    call(Box::new(move |outcome: Result<T, DriverError>| {
        // Sending fails only when this process is about to exit.
        let _unheard = done.send(outcome);
    }));
    match ended.recv() {
        Ok(outcome) => Ok(outcome?),
        Err(_) => Err(unanswered()),
    }
}

fn unanswered() -> CommandError {
    CommandError::new(FAILED, "the connection was closed without an answer")
}

pub fn token_from_environment() -> Option<String> {
    std::env::var("PENSTOCK_TOKEN")
        .ok()
        .filter(|token| !token.is_empty())
}

pub fn resolve(path: &Path) -> Result<LocalPaths, CommandError> {
    LocalPaths::resolve(path).map_err(|error| {
        CommandError::new(
            FAILED,
            format!("can't use local:{} as a directory: {error}", path.display()),
        )
    })
}

/// Returns the socket of the directory's broker, if one is listening.
pub fn find_socket(paths: &LocalPaths) -> Result<Option<PathBuf>, CommandError> {
    match paths.connect(|path| UnixStream::connect(path)) {
        Ok((_, socket)) => Ok(Some(socket.to_path_buf())),
        Err(error) if is_nobody(&error) => Ok(None),
        Err(error) => Err(cant_use_directory(&paths.directory, &error)),
    }
}

pub fn not_running(paths: &LocalPaths) -> String {
    format!(
        "no broker is running for {}; the next program that enqueues, or a new worker, starts it",
        paths.directory.display()
    )
}

pub fn socket_url(socket: &Path) -> String {
    format!("unix:{}", PathBuf::from(socket).display())
}
