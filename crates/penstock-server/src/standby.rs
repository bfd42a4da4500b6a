//! Continues the loop in a second thread while the first one hangs in a write or a sync.
//!
//! ```text
//!     loop      passes ── write, sync ── passes ── write, sync ─────── (the disk hangs) ─────── report ── passes
//!     server     here      [slot]         here      [slot]  │                                   ┌ [slot]   here
//!     standby   sleeps ─────────────────────────────────────┴ takes it: passes ─────────────────┘ sleeps
//! ```
//!
//! While the loop's thread writes, the server lies in a slot, from which it is normally taken back within 0.1 ms. When
//! the disk keeps it waiting, the other thread takes it and answers everything that needs no disk. So a broker whose
//! disk hangs is not silent for longer than twice [`PATIENCE`], and it can be stopped. The loop's thread continues
//! afterwards: the memory of everything it has read is in its heap, which no other thread can reuse.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::shell::{Pass, Server, ServerError, ServerOptions};

/// Time that a write and its sync may take before the other thread continues the loop. It also looks this often, but only
/// while there are writes.
const PATIENCE: Duration = Duration::from_millis(50);

type ServerShift = Shift<Box<Server>, Result<(), ServerError>>;

impl Server {
    /// Starts a server, calls `started`, and serves until a signal, a client of a local broker, or the last client's
    /// disconnection there stops it. Uses threads of its own, so that this returns even if the disk never answers.
    pub fn run(
        options: ServerOptions,
        started: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<(), ServerError> {
        let shift = Arc::new(ServerShift::default());
        let home = Arc::clone(&shift);
        let serve = move || {
            let server = Self::start(options).and_then(|server| {
                started().map_err(ServerError::system("report the start"))?;
                Ok(server)
            });
            match server {
                Ok(server) => run_loop(&home, Box::new(server)),
                Err(error) => home.end(Err(error)),
            }
        };
        let standby = Arc::clone(&shift);
        for (name, thread) in [
            ("loop", Box::new(serve) as Box<dyn FnOnce() + Send>),
            ("loop-standby", Box::new(move || run_standby(&standby))),
        ] {
            thread::Builder::new()
                .name(name.to_owned())
                .spawn(thread)
                .map_err(ServerError::system("start a thread"))?;
        }
        shift.wait_for_end()
    }
}

fn run_loop(shift: &ServerShift, mut server: Box<Server>) {
    loop {
        match server.pass() {
            Pass::Done => {}
            Pass::Over(outcome) => return shift.end(outcome),
            Pass::Write(task) => {
                shift.lend(server);
                let (report, tell) = task.carry_out();
                server = match shift.take_back() {
                    Some(mut server) => {
                        server.written_here(report);
                        server
                    }
                    None => {
                        tell(report);
                        match shift.wait_for_return() {
                            Some(server) => server,
                            None => return,
                        }
                    }
                };
            }
        }
    }
}

fn run_standby(shift: &ServerShift) {
    while let Some(server) = shift.stand_by() {
        tracing::debug!("the disk keeps a write waiting; another thread continues the loop");
        let mut mine = Some(server);
        while let Some(mut server) = mine {
            match server.pass() {
                Pass::Done => {}
                Pass::Over(outcome) => return shift.end(outcome),
                Pass::Write(task) => server.write_in_thread(task),
            }
            mine = shift.give_back(server);
        }
    }
}

/// Hands a server over between the two threads.
struct Shift<T, R> {
    handover: Mutex<Handover<T, R>>,
    changed: Condvar,
}

struct Handover<T, R> {
    /// Server whose thread is writing, and the time since which it has been.
    lent: Option<(T, Instant)>,
    /// Whether the server was lent since the other thread last looked.
    was_lent: bool,
    /// Whether the other thread looks only when it is woken.
    sleeps: bool,
    /// Whether the loop's thread has ended its write and waits for the server, and the server that it gets.
    home_waits: bool,
    returned: Option<T>,
    outcome: Option<R>,
    is_over: bool,
}

impl<T, R> Default for Shift<T, R> {
    fn default() -> Self {
        Self {
            handover: Mutex::new(Handover {
                lent: None,
                was_lent: false,
                sleeps: false,
                home_waits: false,
                returned: None,
                outcome: None,
                is_over: false,
            }),
            changed: Condvar::new(),
        }
    }
}

impl<T, R> Shift<T, R> {
    fn lock(&self) -> MutexGuard<'_, Handover<T, R>> {
        self.handover.lock().expect("a panic ends the process")
    }

    /// Waits until `found` returns something, or until the server has stopped: then returns none.
    fn wait_for<V>(&self, mut found: impl FnMut(&mut Handover<T, R>) -> Option<V>) -> Option<V> {
        let mut handover = self.lock();
        loop {
            if let Some(value) = found(&mut handover) {
                return Some(value);
            }
            if handover.is_over {
                return None;
            }
            let woken = self.changed.wait(handover);
            handover = woken.expect("a panic ends the process");
        }
    }

    // In the loop's thread.

    fn lend(&self, server: T) {
        let mut handover = self.lock();
        handover.lent = Some((server, Instant::now()));
        handover.was_lent = true;
        // Seldom: a sleeping thread stays awake for as long as there are writes.
        if std::mem::take(&mut handover.sleeps) {
            self.changed.notify_all();
        }
    }

    /// Returns the server, unless the other thread has taken it.
    fn take_back(&self) -> Option<T> {
        self.lock().lent.take().map(|(server, _)| server)
    }

    /// Waits until the other thread has given the server back. Returns none once the server has stopped.
    fn wait_for_return(&self) -> Option<T> {
        self.lock().home_waits = true;
        self.wait_for(|handover| handover.returned.take())
    }

    // In the other thread.

    /// Waits until a write has taken [`PATIENCE`], and returns the server. Returns none once the server has stopped.
    fn stand_by(&self) -> Option<T> {
        let mut handover = self.lock();
        while !handover.is_over {
            let is_late = |(_, since): &mut (T, Instant)| since.elapsed() >= PATIENCE;
            if let Some((server, _)) = handover.lent.take_if(is_late) {
                return Some(server);
            }
            if std::mem::take(&mut handover.was_lent) || handover.lent.is_some() {
                let waited = self.changed.wait_timeout(handover, PATIENCE);
                handover = waited.expect("a panic ends the process").0;
            } else {
                handover.sleeps = true;
                let woken = self.changed.wait(handover);
                handover = woken.expect("a panic ends the process");
            }
        }
        None
    }

    /// Gives the server to the loop's thread if that waits for it; otherwise returns it.
    fn give_back(&self, server: T) -> Option<T> {
        let mut handover = self.lock();
        if !std::mem::take(&mut handover.home_waits) {
            return Some(server);
        }
        handover.returned = Some(server);
        self.changed.notify_all();
        None
    }

    // In whichever thread has the server at the end, and in the one that waits for it.

    fn end(&self, outcome: R) {
        let mut handover = self.lock();
        handover.outcome = Some(outcome);
        handover.is_over = true;
        self.changed.notify_all();
    }

    fn wait_for_end(&self) -> R {
        let outcome = self.wait_for(|handover| handover.outcome.take());
        outcome.expect("only this thread takes it")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_server_whose_thread_hangs_is_continued_by_the_other_one_until_then() {
        let shift = Arc::new(Shift::<&str, ()>::default());
        let other = Arc::clone(&shift);
        let (taken, takes) = channel();
        let standby = thread::spawn(move || {
            while let Some(server) = other.stand_by() {
                taken
                    .send((server, Instant::now()))
                    .expect("a test that listens");
                let mut mine = Some(server);
                while let Some(server) = mine {
                    thread::yield_now();
                    mine = other.give_back(server);
                }
            }
        });
        for round in ["first", "second"] {
            // A write that ends at once.
            shift.lend("quick");
            assert_eq!(shift.take_back(), Some("quick"));

            let lent = Instant::now();
            shift.lend(round);
            let (server, at) = takes.recv().expect("the other thread takes it");
            assert_eq!(server, round);
            assert!(at - lent >= PATIENCE, "{:?}", at - lent);
            assert_eq!(shift.take_back(), None, "it is elsewhere");
            assert_eq!(shift.wait_for_return(), Some(round));
        }
        shift.end(());
        shift.wait_for_end();
        standby.join().expect("it ends with the server");
        assert!(takes.recv().is_err(), "nothing else was taken");
    }
}
