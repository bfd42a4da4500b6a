//! The driver's thread: it waits for the socket, watches deadlines, and connects.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use penstock_message::Lease;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{ConnectPhase, DriverShared, DriverState, IoThread, ReadBy};
use crate::dial::{BrokerStart, DialError};
use crate::session::LinkEnd;
use crate::{DriverError, ErrorKind};

/// Maximum time of one attempt to connect before the next one starts.
const DIAL_PATIENCE: Duration = Duration::from_secs(10);
const LONGEST_RETRY: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(4);

/// State of the driver's thread.
pub(super) struct IoLoop {
    shared: Arc<DriverShared>,
    backoff: Backoff,
}

impl IoLoop {
    pub(super) fn new(shared: Arc<DriverShared>) -> Self {
        Self {
            shared,
            backoff: Backoff::new(),
        }
    }

    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _ = shared.thread.set(thread::current().id());
        while !self.run_due_work(&shared) {
            let (socket, connection, sleep) = {
                let mut state = shared.flush(shared.lock());
                let socket = match &state.phase {
                    ConnectPhase::Connected { socket, .. } => Some(Arc::clone(socket)),
                    ConnectPhase::Dialed(_) => continue,
                    ConnectPhase::Down { .. } | ConnectPhase::Dialing => None,
                };
                if state.session.has_events() {
                    continue;
                }
                if state.read_by == ReadBy::Thread && state.session.is_idle() {
                    state.read_by = ReadBy::Nobody;
                }
                let sleep = Sleep {
                    until: next_wake_up(&state),
                    watches_read: state.read_by == ReadBy::Thread,
                    watches_write: state.blocked,
                };
                state.asleep = Some(sleep);
                (socket, state.connection, sleep)
            };
            let ready = self.wait(socket.as_deref(), sleep);
            let mut state = shared.lock();
            state.asleep = None;
            state.blocked &= !ready.write;
            // The thread that reads may be late, and silence is judged next.
            let checks = state.read_by == ReadBy::Elsewhere && Instant::now() >= sleep.until;
            let reads = ready.read || state.read_by == ReadBy::Nobody || checks;
            drop(state);
            if let Some(socket) = socket
                && reads
                && let Err(end) = shared.read(&socket, connection)
            {
                let mut state = shared.lock();
                if state.connection == connection {
                    self.lose_link(&mut state, end);
                }
            }
        }
        let mut state = shared.lock();
        state.thread = IoThread::Ended;
        if let ConnectPhase::Connected { socket, .. } = &state.phase {
            // Wakes the leading caller; written bytes are still sent.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Read);
        }
        state.phase = ConnectPhase::Down {
            retry_at: Instant::now(),
        };
        shared.ended.notify_all();
    }

    /// Watches deadlines, connects, and carries out the resulting events. Returns whether the driver was
    /// closed.
    fn run_due_work(&mut self, shared: &Arc<DriverShared>) -> bool {
        let mut state = shared.lock();
        let now = Instant::now();
        if let Some(end) = state.broken.take() {
            self.lose_link(&mut state, end);
        }
        if let Err(end) = state.session.tick(now) {
            self.lose_link(&mut state, end);
        }
        let closes = state
            .closing
            .is_some_and(|deadline| now >= deadline || state.session.is_settled());
        if closes {
            state.session.fail_all(&DriverError::closed());
            state.session.say_goodbye();
            state = shared.flush(state);
        }
        match &state.phase {
            ConnectPhase::Dialed(Ok(_)) => {
                // Called without the lock: a sink may be in a call to this driver.
                let sinks = state.session.delivery_sinks();
                drop(state);
                let leases = sinks.iter().flat_map(|sink| sink.held_leases()).collect();
                state = shared.lock();
                self.greet(&mut state, now, leases);
            }
            ConnectPhase::Dialed(Err(error)) => {
                let end = match error.clone() {
                    DialError::Unreachable(why) => LinkEnd::Lost(why),
                    DialError::Hopeless(why) => LinkEnd::Hopeless(ErrorKind::Invalid, why),
                };
                self.lose_link(&mut state, end);
            }
            ConnectPhase::Down { retry_at }
                if now >= *retry_at && state.session.wants_connection() && !closes =>
            {
                self.start_to_dial(shared, &mut state, now);
            }
            _ => {}
        }
        match state.read_by {
            ReadBy::Elsewhere => {
                drop(state);
                shared.carry_out_in_order();
            }
            _ => shared.carry_out_events(state),
        }
        closes
    }

    fn start_to_dial(&mut self, shared: &Arc<DriverShared>, state: &mut DriverState, now: Instant) {
        let shared = Arc::clone(shared);
        let start = state.session.start(state.closing.is_some());
        // Connecting has its own thread, so that this one can keep watching deadlines.
        let attempt = thread::Builder::new()
            .name("penstock-dial".into())
            .spawn(move || {
                let dialed = shared.dial.dial(now + DIAL_PATIENCE, start);
                shared.lock().phase = ConnectPhase::Dialed(dialed);
                shared.wake();
            });
        match attempt {
            Ok(_) => state.phase = ConnectPhase::Dialing,
            Err(error) => {
                let why = format!("this process can't start a thread: {error}");
                self.lose_link(state, LinkEnd::Lost(why));
            }
        }
    }

    fn greet(&mut self, state: &mut DriverState, now: Instant, leases: Vec<Lease>) {
        let retry_at = now;
        if let ConnectPhase::Dialed(Ok(socket)) =
            std::mem::replace(&mut state.phase, ConnectPhase::Down { retry_at })
        {
            state.session.connected(now, leases);
            state.connection += 1;
            state.unwritten.clear();
            state.blocked = false;
            self.shared
                .socket
                .store(socket.as_raw_fd(), Ordering::Relaxed);
            state.phase = ConnectPhase::Connected {
                socket: Arc::new(socket),
                since: now,
            };
        }
    }

    fn lose_link(&mut self, state: &mut DriverState, end: LinkEnd) {
        let now = Instant::now();
        if let ConnectPhase::Connected { since, .. } = &state.phase
            && now - *since > LONGEST_RETRY
        {
            self.backoff.reset();
        }
        // The leading caller waits on this socket.
        if let ConnectPhase::Connected { socket, .. } = &state.phase {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            // A broker that is about to exit accepts further connections, and ends each at once.
            let was_welcome = state.session.trouble().is_none();
            if was_welcome && state.session.start(state.closing.is_some()) == BrokerStart::No {
                let broker = &self.shared.broker;
                let starter = match self.shared.dial.starts_brokers() {
                    true => "a client starts it again",
                    false => "it is started again",
                };
                tracing::info!("the broker at {broker} was stopped; waiting until {starter}");
            }
        }
        state.read_by = ReadBy::Thread;
        state.broken = None;
        self.shared.socket.store(-1, Ordering::Relaxed);
        state.phase = ConnectPhase::Down {
            retry_at: now + self.backoff.next(),
        };
        // A writer that is still running must not touch the bytes of the next connection.
        state.connection += 1;
        state.unwritten.clear();
        state.blocked = false;
        match end {
            LinkEnd::Lost(why) => {
                tracing::debug!(
                    why,
                    broker = self.shared.broker,
                    "no connection to the broker"
                );
                state.session.disconnected(&why);
            }
            LinkEnd::Hopeless(kind, reason) => {
                state.session.disconnected(&reason);
                state.session.fail_all(&DriverError::new(kind, reason));
            }
        }
    }

    fn wait(&self, socket: Option<&OwnedFd>, sleep: Sleep) -> WakeReason {
        let waker = self.shared.waker.get();
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, sleep.watches_read);
        interest.set(PollFlags::OUT, sleep.watches_write);
        let socket = socket.filter(|_| !interest.is_empty());
        let mut fds = Vec::with_capacity(2);
        fds.extend(socket.map(|socket| PollFd::new(socket, interest)));
        fds.extend(waker.map(|waker| PollFd::new(waker, PollFlags::IN)));
        let left = sleep.until.saturating_duration_since(Instant::now());
        // An interrupted wait reports nothing ready; the next one will.
        let _ = poll(&mut fds, timeout(left).as_ref());
        let happened = |index: usize| fds.get(index).map_or(PollFlags::empty(), PollFd::revents);
        let of_socket = match socket {
            Some(_) => happened(0),
            None => PollFlags::empty(),
        };
        if fds.last().is_some_and(|last| !last.revents().is_empty())
            && let Some(waker) = waker
        {
            waker.clear();
        }
        WakeReason {
            // Also on an error or end of stream, which reading then finds.
            read: of_socket.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR),
            write: of_socket.contains(PollFlags::OUT),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Sleep {
    pub(super) until: Instant,
    pub(super) watches_read: bool,
    pub(super) watches_write: bool,
}

struct WakeReason {
    read: bool,
    write: bool,
}

fn next_wake_up(state: &DriverState) -> Instant {
    let retry = match state.phase {
        ConnectPhase::Down { retry_at } if state.session.wants_connection() => Some(retry_at),
        _ => None,
    };
    let far = Instant::now() + Duration::from_secs(3600);
    [state.session.next_deadline(), retry, state.closing]
        .into_iter()
        .flatten()
        .fold(far, Instant::min)
}

/// Rounds up: waking slightly too early would mean waking twice.
pub(super) fn timeout(left: Duration) -> Option<Timespec> {
    Timespec::try_from(left + Duration::from_micros(50)).ok()
}

/// Delay before the next attempt. It doubles each time, with jitter, so that clients that lost the same broker
/// do not reconnect in step.
struct Backoff {
    next: Duration,
    random: u64,
}

impl Backoff {
    fn new() -> Self {
        Self {
            next: FIRST_RETRY,
            random: getrandom::u64().unwrap_or(1),
        }
    }

    fn reset(&mut self) {
        self.next = FIRST_RETRY;
    }

    fn next(&mut self) -> Duration {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let share = 0.5 + (mixed >> 40) as f64 / (1_u64 << 25) as f64;
        let wait = self.next.mul_f64(share);
        self.next = (self.next * 2).min(LONGEST_RETRY);
        wait
    }
}
