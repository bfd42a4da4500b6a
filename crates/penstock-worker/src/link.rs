//! Implements a child's side of the link to its supervisor. The Python extension wraps it; it needs no Python.
//!
//! A child has one [`Link`], and a [`Slot`] for each job that it can run at once. Only an idle slot pulls.
//! Nothing is buffered in the child: otherwise a process would hoard jobs for which others have idle slots.
//!
//! Idle slots with their own threads stand in line, and only the one at the head waits at the socket. When it
//! gets a packet, the slot that joined the line last takes its place. So at low load few threads run at all,
//! and only these touch their stacks and open connections.
//!
//! A job that waits for other jobs is *parked*: its slot is lent to another job until the supervisor says that
//! it may continue. A job's code may wait in several threads or coroutines at once; the job stays parked while
//! any of them waits.
//!
//! A job reports its progress as often as it likes. At most one report in a tenth of a second is passed on, the
//! latest: by the next call, by a thread that exists only for the last report, or with the job's end.

mod first_idle;
mod slot;
mod window;

use std::io;
use std::mem::take;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

pub use self::slot::{Ended, Pulled, Slot};
pub use self::window::{LongWait, Resumed, Window};

use self::first_idle::FirstIdle;
use self::window::PROGRESS_EVERY_NS;
use crate::fault;
use crate::memory::trim;
use crate::packet::{
    BELL, MAX_PACKET_BYTES, Malformed, OutcomeFrame, ProgressFrame, Wait, WaitFrame, serving,
};
use crate::page::{Claims, LazyBuffer, RingWriter, SharedPages};

/// Connection to the supervisor, shared by the slots of a child.
pub struct Link {
    work: OwnedFd,
    child: u32,
    claims: Claims,
    outcomes: Mutex<Outcomes>,
    line: Mutex<IdleSlots>,
    /// Buffer for the longest message, used by the slot at the head of the line.
    buffer: Mutex<LazyBuffer>,
    slots: AtomicU32,
    /// Number of slots with a parked job.
    parked: AtomicU32,
    /// Descriptor to which each change of that number is written, as four 0xff bytes.
    news: OnceLock<OwnedFd>,
    /// Where a child with one slot waits for packets; `None` if it has to block at the socket.
    first_idle: OnceLock<Option<FirstIdle>>,
    /// Whether nothing more is claimed or begun here.
    has_closed: AtomicBool,
    /// Windows of all slots, to find the jobs that report progress.
    windows: Mutex<Vec<Weak<Window>>>,
    /// Whether a thread is waiting to pass on progress that came too soon after the previous report.
    is_late: AtomicBool,
}

struct Outcomes {
    reply: OwnedFd,
    ring: RingWriter,
    frame: Vec<u8>,
    /// Whether the ring has outcomes that were not announced to the supervisor.
    unannounced: bool,
}

/// Line of idle slots.
#[derive(Default)]
struct IdleSlots {
    /// Whether a slot is at the socket.
    has_head: bool,
    /// Thread of that slot, once it exists.
    head: Option<libc::pthread_t>,
    /// Other slots, in order of arrival.
    waiting: Vec<Arc<Turn>>,
    has_ended: bool,
}

/// Waiting point of a slot in line.
#[derive(Default)]
struct Turn {
    has_come: AtomicBool,
    is_dismissed: AtomicBool,
    changed: Condvar,
}

/// Outcome of waiting in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InLine {
    Head,
    Dismissed,
    Ended,
}

fn damaged() -> io::Error {
    io::Error::other("a damaged packet came from the supervisor")
}

impl From<Malformed> for io::Error {
    fn from(_: Malformed) -> Self {
        damaged()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of these locks panics, and each change leaves the data consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Opens a child's link. `work` is shared by all children of a pool; `reply` belongs to this child.
    pub fn new(
        work: OwnedFd,
        reply: OwnedFd,
        pages: SharedPages,
        child: u32,
    ) -> io::Result<Arc<Self>> {
        let (claims, ring) = pages.of_child(child)?;
        Ok(Arc::new(Self {
            work,
            child,
            claims,
            outcomes: Mutex::new(Outcomes {
                reply,
                ring,
                frame: Vec::new(),
                unannounced: false,
            }),
            line: Mutex::default(),
            buffer: Mutex::new(LazyBuffer::new(MAX_PACKET_BYTES)?),
            slots: AtomicU32::new(0),
            parked: AtomicU32::new(0),
            news: OnceLock::new(),
            first_idle: OnceLock::new(),
            has_closed: AtomicBool::new(false),
            windows: Mutex::default(),
            is_late: AtomicBool::new(false),
        }))
    }

    /// Makes fatal signals report the slot whose thread caused them. Use it for a child with this many slots in
    /// threads, all of which die with the process.
    pub fn watch_faults(self: &Arc<Self>, slots: usize) -> io::Result<()> {
        // A signal handler may run until the process exits.
        std::mem::forget(Arc::clone(self));
        // SAFETY: the link, and its ring with it, is never dropped after this.
        let fault = unsafe { lock(&self.outcomes).ring.fault() };
        fault::install(fault, slots)
    }

    pub fn slot(self: &Arc<Self>) -> Slot {
        let number = self.slots.fetch_add(1, Ordering::Relaxed);
        let window = Arc::new(Window::new(Arc::clone(self)));
        let mut windows = lock(&self.windows);
        windows.retain(|window| window.strong_count() > 0);
        windows.push(Arc::downgrade(&window));
        drop(windows);
        Slot::new(number as usize, Arc::clone(self), window)
    }

    /// Returns the socket of [`Slot::try_pull`], for an event loop.
    pub fn work(&self) -> BorrowedFd<'_> {
        self.work.as_fd()
    }

    /// Announces the outcomes in the ring to the supervisor.
    pub fn flush(&self) -> io::Result<()> {
        let mut outcomes = lock(&self.outcomes);
        if take(&mut outcomes.unannounced) {
            send_all(&outcomes.reply, &BELL)?;
        }
        Ok(())
    }

    /// Reports to the supervisor how many slots of this child can take jobs.
    pub fn tell_serving(&self, slots: u32) -> io::Result<()> {
        send_all(&lock(&self.outcomes).reply, &serving(slots))
    }

    /// Stops all slots from claiming or beginning jobs. Slots in line are notified. The slot at the socket
    /// stays there, and leaves any further packets unclaimed for the supervisor to take back.
    pub fn close(&self) {
        self.has_closed.store(true, Ordering::SeqCst);
        self.end_line();
    }

    /// Whether the supervisor wants this child to exit once the jobs that it has begun have ended.
    pub fn is_closing(&self) -> bool {
        self.claims.is_closing()
    }

    /// Carries out the supervisor's requests between two jobs. Returns whether this child must exit.
    pub fn heed(&self) -> bool {
        self.claims.trim_if_asked(trim);
        self.is_closing()
    }

    fn has_closed(&self) -> bool {
        self.has_closed.load(Ordering::SeqCst) || self.is_closing()
    }

    /// Reports the end of a slot whose child is closing: jobs that it left unclaimed or did not begin go to others.
    fn tell_closing(&self) -> io::Result<()> {
        match self.has_closed() {
            true => self.tell_serving(0),
            false => Ok(()),
        }
    }

    /// Interrupts the slot at the socket, after [`Link::close`], by a signal that must have a handler. Returns
    /// whether there is such a slot; if not, there will be none.
    pub fn nudge(&self) -> bool {
        let line = lock(&self.line);
        if let Some(thread) = line.head {
            // SAFETY: the thread exists, because it takes this lock before it continues.
            unsafe { libc::pthread_kill(thread, libc::SIGURG) };
        }
        line.has_head
    }

    /// Returns how many slots have a parked job: this many other slots may run jobs in their place.
    pub fn parked(&self) -> u32 {
        self.parked.load(Ordering::Relaxed)
    }

    /// Reports each change of [`Link::parked`] to `news`, as four 0xff bytes. Call it once.
    pub fn tell_parked_on(&self, news: OwnedFd) {
        let _ = self.news.set(news);
    }

    fn tell_news(&self) {
        if let Some(news) = self.news.get() {
            // If this fails, there is no listener left.
            let _ = rustix::io::write(news, &u32::MAX.to_le_bytes());
        }
    }

    /// Returns where to wait for packets, unless the wait is to be at the socket itself.
    ///
    /// A child with several slots waits there: if the first of two such children took all jobs, they would compete for
    /// one interpreter's lock.
    fn first_idle(&self) -> Option<&FirstIdle> {
        let enter = || FirstIdle::new(&self.work).ok();
        match self.slots.load(Ordering::Relaxed) {
            1 => self.first_idle.get_or_init(enter).as_ref(),
            _ => None,
        }
    }

    /// Whether a slot is at the socket, or about to be.
    pub fn has_head(&self) -> bool {
        lock(&self.line).has_head
    }

    /// Dismisses up to this many of the slots that wait in line, the earliest first. Returns how many it
    /// dismissed.
    pub fn dismiss(&self, slots: usize) -> usize {
        let mut line = lock(&self.line);
        let slots = slots.min(line.waiting.len());
        for turn in line.waiting.drain(..slots) {
            turn.is_dismissed.store(true, Ordering::Relaxed);
            turn.changed.notify_one();
        }
        slots
    }

    fn tell_wait(&self, job: u64, wait: u32, what: Wait) -> io::Result<()> {
        let Some((place, job)) = Window::unpack(job) else {
            return Ok(());
        };
        let frame = WaitFrame {
            sequence: job.sequence,
            place: place as u16,
            index: job.index as u16,
            wait,
            what,
        };
        send_all(&lock(&self.outcomes).reply, &frame.encode())
    }

    /// Reports the progress of a job, from any thread. Returns whether the job runs here.
    pub fn tell_progress(self: &Arc<Self>, id: [u8; 16], body: &[u8]) -> io::Result<bool> {
        let windows = lock(&self.windows);
        let mut all = windows.iter().filter_map(Weak::upgrade);
        let found = all.find(|window| window.runs(id));
        drop(windows);
        let Some(window) = found else {
            return Ok(false);
        };
        if !window.tell_progress(body)? {
            self.await_late();
        }
        Ok(true)
    }

    /// Makes a thread pass on the latest progress of a job when it is time. The thread lives only until then,
    /// because a job that forks should have no extra threads.
    fn await_late(self: &Arc<Self>) {
        if self.is_late.swap(true, Ordering::SeqCst) {
            return;
        }
        let link = Arc::clone(self);
        let pass_on = move || {
            std::thread::sleep(Duration::from_nanos(PROGRESS_EVERY_NS));
            // Progress that comes too late for this thread gets another one.
            link.is_late.store(false, Ordering::SeqCst);
            let windows = lock(&link.windows).clone();
            for window in windows.iter().filter_map(Weak::upgrade) {
                // If this fails, the supervisor is gone.
                let _ = window.pass_on_progress(true);
            }
        };
        // Signals are for the interpreter's threads, where they interrupt waits.
        let thread = without_signals(|| {
            let builder = std::thread::Builder::new().name("progress".to_owned());
            builder.stack_size(256 << 10).spawn(pass_on)
        });
        if thread.is_err() {
            // The next call passes it on, or the job's end does.
            self.is_late.store(false, Ordering::SeqCst);
        }
    }

    fn end_line(&self) {
        let mut line = lock(&self.line);
        line.has_ended = true;
        for turn in line.waiting.drain(..) {
            turn.changed.notify_one();
        }
    }

    /// Waits until this slot is at the head of the line, or must exit.
    fn enter_line(&self, turn: &Arc<Turn>) -> InLine {
        let mut line = lock(&self.line);
        if line.has_ended {
            return InLine::Ended;
        }
        // SAFETY: the call has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        if !line.has_head {
            line.has_head = true;
            line.head = Some(thread);
            return InLine::Head;
        }
        turn.has_come.store(false, Ordering::Relaxed);
        line.waiting.push(Arc::clone(turn));
        loop {
            line = turn
                .changed
                .wait(line)
                .unwrap_or_else(PoisonError::into_inner);
            if turn.has_come.load(Ordering::Relaxed) {
                line.head = Some(thread);
                return InLine::Head;
            }
            if turn.is_dismissed.swap(false, Ordering::Relaxed) {
                return InLine::Dismissed;
            }
            if line.has_ended {
                return InLine::Ended;
            }
        }
    }

    /// Removes the slot at the head; the slot that joined last takes its place.
    fn leave_line(&self) {
        let mut line = lock(&self.line);
        line.head = None;
        match line.waiting.pop() {
            Some(turn) => {
                turn.has_come.store(true, Ordering::Relaxed);
                drop(line);
                turn.changed.notify_one();
            }
            None => line.has_head = false,
        }
    }
}

impl Outcomes {
    fn tell_progress(&mut self, progress: ProgressFrame<'_>, rings: bool) -> io::Result<()> {
        self.frame.clear();
        progress.encode_into(&mut self.frame);
        // The progress goes into the ring, before the outcome that may follow.
        if !self.ring.push(&self.frame) {
            return send_all(&self.reply, &self.frame);
        }
        match rings {
            true => send_all(&self.reply, &BELL),
            false => Ok(()),
        }
    }

    fn tell(&mut self, outcome: OutcomeFrame<'_>) -> io::Result<()> {
        self.frame.clear();
        outcome.encode_into(&mut self.frame);
        if self.ring.push(&self.frame) {
            self.unannounced = true;
        } else {
            // The outcome fits the ring only in part or not at all, so it is sent over the socket, in pieces.
            send_all(&self.reply, &self.frame)?;
            self.frame.shrink_to(64 * 1024);
        }
        Ok(())
    }
}

/// Runs `this` with all signals blocked; threads created in it inherit that.
fn without_signals<T>(this: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are this function's own.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let made = this();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        made
    }
}

fn send_all(socket: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
