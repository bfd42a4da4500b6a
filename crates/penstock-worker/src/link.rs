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

use std::io::{self, IoSliceMut};
use std::mem::{MaybeUninit, replace, take};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::Duration;

use penstock_faults::planted;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

use crate::fault;
use crate::memory::trim;
use crate::order::{JobAt, Order};
use crate::packet::{
    BELL, FailureView, JobView, Kind, MAX_PACKET_BYTES, Malformed, OutcomeFrame, ProgressFrame,
    Reader, Wait, WaitFrame, serving,
};
use crate::page::{
    ClaimCell, Claims, LazyBuffer, RingWriter, open_child, steady_ns, thread_cpu_ns,
};

/// Maximum size of the buffer that an idle slot keeps for its next packet.
const KEPT_BYTES: usize = 4096;

/// End of a job, as its task's code caused it.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    pub kind: Kind,
    pub delay_ms: u64,
    pub value: Option<&'a [u8]>,
    /// Present only for a job that failed permanently.
    pub failure: Option<FailureView<'a>>,
    pub note: &'a [u8],
}

/// Outcome of waiting for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// This slot has a packet, whose jobs can begin.
    Packet,
    /// The supervisor wants no more jobs to run, or is gone, or this child is closed.
    End,
    /// A signal arrived: let its handler run, then pull again.
    Interrupted,
    /// There is no packet now, and the call does not wait.
    Nothing,
}

/// Minimum time between two progress reports of a job to the supervisor.
const PROGRESS_EVERY_NS: u64 = 100_000_000;

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

/// Place that runs one job at a time.
pub struct Slot {
    number: usize,
    /// Whether a fault of its thread is reported, with the slot's packet.
    is_watched: bool,
    link: Arc<Link>,
    turn: Arc<Turn>,
    /// Current packet: header, then payload.
    bytes: Vec<u8>,
    packet: OpenPacket,
    running: Option<BegunJob>,
    /// Number of jobs that it has begun.
    begun: u64,
    /// Whether no other slot shares its thread.
    has_thread: bool,
    window: Arc<Window>,
}

/// Running job of a slot, as orders find it. Unlike the slot, it may be used by any thread, and in a signal
/// handler.
///
/// The thread that carries out an order must hold the interpreter's lock from the check until the order is
/// carried out. The slot's thread holds the same lock when its job ends.
pub struct Window {
    link: Arc<Link>,
    /// [`Window::pack`], or 0 while no job runs.
    job: AtomicU64,
    /// Number of shielding code blocks that the job is in, which hold orders off.
    shields: AtomicU32,
    /// Id of the job, in two halves.
    id: [AtomicU64; 2],
    waits: Mutex<OpenWaits>,
    /// Whether the job was parked.
    was_parked: AtomicBool,
    /// Whether the job has reported progress.
    has_progress: AtomicBool,
    progress: Mutex<LatestProgress>,
}

/// Progress of the job that a slot runs.
#[derive(Default)]
struct LatestProgress {
    /// Job, as in [`Window::job`], without the orders that it has received.
    job: u64,
    at_ns: u64,
    /// Latest progress, if it was not passed on.
    late: Option<Vec<u8>>,
}

/// Waits of a job for other jobs.
#[derive(Default)]
struct OpenWaits {
    /// Job, as in [`Window::job`], without the orders that it has received.
    job: u64,
    /// Number of long waits that are not over.
    open: u32,
    /// Number of the job's latest parking, as counted by the slot.
    number: u32,
    is_parked: bool,
}

/// Long wait of a running job; ended by [`Window::end_wait`] or [`Window::break_off`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongWait {
    job: u64,
}

/// Outcome of the end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// The job continues.
    Now,
    /// The job continues when [`Window::has_turn`] returns true for this number.
    After(u32),
}

/// Interval, in jobs, of measuring the CPU time of jobs that share a packet. Such jobs are short, and reading
/// the CPU time costs about as much as running one.
const MEASURED_OF: u64 = 64;

const HEARD_SHIFT: u32 = 27;
const HEARD_MASK: u64 = 3 << HEARD_SHIFT;
const PLACE_SHIFT: u32 = 11;

/// Packet whose jobs a slot is running.
#[derive(Clone, Copy, Default)]
struct OpenPacket {
    sequence: u32,
    place: u16,
    jobs: usize,
    next: usize,
    /// Offset of the next job in the bytes.
    offset: usize,
}

#[derive(Clone, Copy)]
struct BegunJob {
    index: usize,
    since_ns: u64,
    /// CPU time of its thread when the job began; `None` if this job is not measured.
    cpu_since_ns: Option<u64>,
}

fn damaged() -> io::Error {
    io::Error::other("a damaged packet came from the supervisor")
}

impl From<Malformed> for io::Error {
    fn from(_: Malformed) -> Self {
        damaged()
    }
}

fn halves(id: [u8; 16]) -> [u64; 2] {
    let id = u128::from_le_bytes(id);
    [id as u64, (id >> 64) as u64]
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of these locks panics, and each change leaves the data consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Opens a child's link. `work` is shared by all children of a pool; `reply` belongs to this child.
    pub fn new(work: OwnedFd, reply: OwnedFd, pages: OwnedFd, child: u32) -> io::Result<Arc<Self>> {
        let (claims, ring) = open_child(pages.as_fd(), child)?;
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
        let window = Arc::new(Window {
            link: Arc::clone(self),
            job: AtomicU64::new(0),
            shields: AtomicU32::new(0),
            id: [const { AtomicU64::new(0) }; 2],
            waits: Mutex::default(),
            was_parked: AtomicBool::new(false),
            has_progress: AtomicBool::new(false),
            progress: Mutex::default(),
        });
        let mut windows = lock(&self.windows);
        windows.retain(|window| window.strong_count() > 0);
        windows.push(Arc::downgrade(&window));
        drop(windows);
        Slot {
            number: number as usize,
            is_watched: false,
            link: Arc::clone(self),
            turn: Arc::default(),
            bytes: Vec::new(),
            packet: OpenPacket::default(),
            running: None,
            begun: 0,
            has_thread: true,
            window,
        }
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

impl Window {
    /// ```text
    ///      63          32 31    29 28    27 26      11 10     1  0
    ///     ┌──────────────┬────────┬────────┬──────────┬────────┬───┐
    ///     │ sequence  32 │      0 │ heard  │ place 16 │  index │ 1 │
    ///     └──────────────┴────────┴────────┴──────────┴────────┴───┘
    /// ```
    fn pack(packet: &OpenPacket, index: usize) -> u64 {
        u64::from(packet.sequence) << 32
            | u64::from(packet.place) << PLACE_SHIFT
            | (index as u64 & 0x3ff) << 1
            | 1
    }

    fn unpack(word: u64) -> Option<(usize, JobAt)> {
        let job = JobAt {
            sequence: (word >> 32) as u32,
            index: (word >> 1 & 0x3ff) as usize,
        };
        (word & 1 == 1).then_some(((word >> PLACE_SHIFT & 0xffff) as usize, job))
    }

    /// Whether a job runs.
    pub fn is_open(&self) -> bool {
        self.job.load(Ordering::Relaxed) != 0
    }

    /// Returns the order to the running job that may be carried out now.
    pub fn order(&self) -> Option<Order> {
        let (place, job) = Self::unpack(self.job.load(Ordering::Relaxed))?;
        let order = self.link.claims.get(place)?.wanted(job)?;
        // Shields do not hold off the end of a job's time.
        let is_the_end = order == Order::Hard && !planted!("shield-against-the-end");
        (is_the_end || self.shields.load(Ordering::Relaxed) == 0).then_some(order)
    }

    /// Returns the same order as [`Window::order`], which then counts as carried out.
    pub fn take_order(&self) -> Option<Order> {
        let order = self.order()?;
        let word = self.job.load(Ordering::Relaxed);
        let (place, job) = Self::unpack(word)?;
        self.link.claims.get(place)?.hear(job, order);
        let heard = word & !HEARD_MASK | (order as u64) << HEARD_SHIFT;
        self.job.store(heard, Ordering::Relaxed);
        Some(order)
    }

    /// Returns the latest order that the running job has received.
    pub fn heard(&self) -> Option<Order> {
        Order::from_bits(self.job.load(Ordering::Relaxed) >> HEARD_SHIFT)
    }

    /// Whether the job of this id runs here.
    fn runs(&self, id: [u8; 16]) -> bool {
        let own = self.id.each_ref().map(|half| half.load(Ordering::Relaxed));
        own == halves(id) && self.is_open()
    }

    /// Passes on the progress of the running job and returns true, or keeps it for later and returns false.
    fn tell_progress(&self, body: &[u8]) -> io::Result<bool> {
        let mut told = lock(&self.progress);
        let job = self.job.load(Ordering::Relaxed) & !HEARD_MASK;
        let now = steady_ns();
        if told.job != job {
            *told = LatestProgress {
                job,
                ..LatestProgress::default()
            };
        }
        self.has_progress.store(true, Ordering::Relaxed);
        if told.at_ns + PROGRESS_EVERY_NS > now {
            let late = told.late.get_or_insert_default();
            let was_late = !late.is_empty();
            late.clear();
            late.extend_from_slice(body);
            // If an earlier report was kept, a thread is already waiting to pass it on.
            return Ok(was_late);
        }
        told.at_ns = now;
        told.late = None;
        self.send_progress(job, body, true)?;
        Ok(true)
    }

    /// Passes on the kept progress. `rings`: whether to wake the supervisor, because no later message will.
    fn pass_on_progress(&self, rings: bool) -> io::Result<()> {
        if !self.has_progress.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut told = lock(&self.progress);
        let job = self.job.load(Ordering::Relaxed) & !HEARD_MASK;
        match told.late.take() {
            Some(body) if told.job == job => {
                told.at_ns = steady_ns();
                self.send_progress(job, &body, rings)
            }
            _ => Ok(()),
        }
    }

    fn send_progress(&self, job: u64, body: &[u8], rings: bool) -> io::Result<()> {
        let Some((place, job)) = Self::unpack(job) else {
            return Ok(());
        };
        lock(&self.link.outcomes).tell_progress(
            ProgressFrame {
                sequence: job.sequence,
                place: place as u16,
                index: job.index as u16,
                body,
            },
            rings,
        )
    }

    /// Notes that the job of this id waits for other jobs, and that this takes long: its slot may be lent.
    /// `None`: the job does not run here.
    pub fn begin_wait(&self, id: [u8; 16]) -> io::Result<Option<LongWait>> {
        let job = self.job.load(Ordering::Relaxed) & !HEARD_MASK;
        let own = self.id.each_ref().map(|half| half.load(Ordering::Relaxed));
        if job == 0 || own != halves(id) {
            return Ok(None);
        }
        let mut waits = lock(&self.waits);
        if waits.job != job {
            *waits = OpenWaits {
                job,
                number: waits.number,
                ..OpenWaits::default()
            };
        }
        waits.open += 1;
        if waits.open == 1 {
            waits.number = waits.number.wrapping_add(1).max(1);
            if !replace(&mut waits.is_parked, true) {
                self.link.parked.fetch_add(1, Ordering::Relaxed);
            }
            self.was_parked.store(true, Ordering::Relaxed);
            self.link.tell_wait(job, waits.number, Wait::Begun)?;
            self.link.tell_news();
        }
        Ok(Some(LongWait { job }))
    }

    /// Ends a wait. While other waits of the job are open, this code continues at once, and the job stays
    /// parked: it is waiting anyway.
    ///
    /// `is_on_loop`: a signal announces the job's turn.
    pub fn end_wait(&self, wait: LongWait, is_on_loop: bool) -> io::Result<Resumed> {
        let mut waits = lock(&self.waits);
        if waits.job != wait.job || waits.open == 0 {
            return Ok(Resumed::Now);
        }
        waits.open -= 1;
        if waits.open > 0 || !waits.is_parked {
            return Ok(Resumed::Now);
        }
        let what = match is_on_loop {
            true => Wait::OverOnLoop,
            false => Wait::Over,
        };
        self.link.tell_wait(wait.job, waits.number, what)?;
        Ok(Resumed::After(waits.number))
    }

    /// Breaks off a wait: the job continues at once.
    pub fn break_off(&self, wait: LongWait) -> io::Result<()> {
        let mut waits = lock(&self.waits);
        if waits.job == wait.job && waits.open > 0 {
            waits.open -= 1;
            if waits.open == 0 {
                return self.go_on(&mut waits, true);
            }
        }
        Ok(())
    }

    /// Stops waiting for the job's turn: the job continues.
    pub fn give_up_turn(&self, number: u32) -> io::Result<()> {
        let mut waits = lock(&self.waits);
        match waits.number == number && waits.open == 0 {
            true => self.go_on(&mut waits, true),
            false => Ok(()),
        }
    }

    fn go_on(&self, waits: &mut OpenWaits, is_to_be_told: bool) -> io::Result<()> {
        if replace(&mut waits.is_parked, false) {
            self.link.parked.fetch_sub(1, Ordering::Relaxed);
            self.link.tell_news();
            if is_to_be_told {
                self.link
                    .tell_wait(waits.job, waits.number, Wait::BrokenOff)?;
            }
        }
        Ok(())
    }

    /// Whether the job may continue after the wait of this number.
    pub fn has_turn(&self, number: u32) -> bool {
        let mut waits = lock(&self.waits);
        if waits.number != number || waits.open > 0 || !waits.is_parked {
            // Other code of the job has begun to wait, or the job has ended.
            return true;
        }
        let has_turn = self
            .cell_of(waits.job)
            .is_none_or(|cell| cell.has_turn(number));
        if has_turn {
            // With `false` nothing is sent, so this can't fail.
            let _ = self.go_on(&mut waits, false);
        }
        has_turn
    }

    /// Waits for the job's turn, up to `patience`, and returns the same as [`Window::has_turn`]. A signal ends
    /// the wait too.
    pub fn await_turn(&self, number: u32, patience: Duration) -> bool {
        if self.has_turn(number) {
            return true;
        }
        let job = lock(&self.waits).job;
        if let Some(cell) = self.cell_of(job) {
            cell.await_turn(number, patience);
        }
        self.has_turn(number)
    }

    fn cell_of(&self, job: u64) -> Option<&ClaimCell> {
        let (place, _) = Self::unpack(job)?;
        self.link.claims.get(place)
    }

    /// Ends the job. If it was parked, returns when it began, moved later by the time that it was parked.
    fn end(&self) -> Option<u64> {
        let job = self.job.load(Ordering::Relaxed) & !HEARD_MASK;
        self.job.store(0, Ordering::Relaxed);
        if !self.was_parked.swap(false, Ordering::Relaxed) {
            return None;
        }
        let mut waits = lock(&self.waits);
        if waits.job == job {
            // Its outcome notifies the supervisor.
            let _ = self.go_on(&mut waits, false);
            waits.job = 0;
        }
        self.cell_of(job).map(ClaimCell::since_ns)
    }

    /// Holds off orders to the running job, except [`Order::Hard`], until [`Window::unshield`] was called as
    /// often.
    pub fn shield(&self) {
        self.shields.fetch_add(1, Ordering::Relaxed);
    }

    pub fn unshield(&self) {
        let fewer = |shields: u32| shields.checked_sub(1);
        // If the count is 0 already, the shielded job has ended.
        let _ = self
            .shields
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
    }
}

impl Slot {
    #[cfg(test)]
    pub fn link(&self) -> Arc<Link> {
        Arc::clone(&self.link)
    }

    /// Returns the window to this slot's running job, for orders.
    pub fn window(&self) -> Arc<Window> {
        Arc::clone(&self.window)
    }

    /// Waits for a packet and claims it for this slot.
    pub fn pull(&mut self) -> io::Result<Pulled> {
        self.link.flush()?;
        self.forget_packet();
        self.link.heed();
        let link = Arc::clone(&self.link);
        let in_line = match link.has_closed() {
            true => InLine::Ended,
            false => link.enter_line(&self.turn),
        };
        match in_line {
            InLine::Head => {}
            InLine::Dismissed => return Ok(Pulled::End),
            InLine::Ended => {
                link.end_line();
                link.tell_closing()?;
                return Ok(Pulled::End);
            }
        }
        let pulled = match link.has_closed() {
            true => Ok(Pulled::End),
            false => self.receive(&link, RecvFlags::empty()),
        };
        link.leave_line();
        if let Ok(Pulled::End) = pulled {
            link.end_line();
            link.tell_closing()?;
        }
        pulled
    }

    /// Does the same as [`Slot::pull`], but without waiting and without announcing outcomes. For slots that
    /// share a thread.
    pub fn try_pull(&mut self) -> io::Result<Pulled> {
        self.has_thread = false;
        self.forget_packet();
        self.link.heed();
        let link = Arc::clone(&self.link);
        let pulled = match link.has_closed() {
            true => Ok(Pulled::End),
            false => self.receive(&link, RecvFlags::DONTWAIT),
        };
        if let Ok(Pulled::End) = pulled {
            link.tell_closing()?;
        }
        pulled
    }

    fn forget_packet(&mut self) {
        if self.bytes.capacity() > KEPT_BYTES {
            self.bytes = Vec::new();
        }
    }

    fn receive(&mut self, link: &Link, wait: RecvFlags) -> io::Result<Pulled> {
        let mut buffer = lock(&link.buffer);
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | wait;
            let mut whole = [IoSliceMut::new(&mut buffer)];
            let received = match recvmsg(&link.work, &mut whole, &mut ancillary, flags) {
                Ok(received) => received.bytes,
                Err(Errno::INTR) => return Ok(Pulled::Interrupted),
                Err(Errno::AGAIN) => return Ok(Pulled::Nothing),
                Err(Errno::CONNRESET) => return Ok(Pulled::End),
                Err(error) => return Err(error.into()),
            };
            if received == 0 || link.has_closed() {
                return Ok(Pulled::End);
            }
            let file = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut files) => files.next(),
                _ => None,
            });
            let message = &buffer[..received];
            let mut reader = Reader(message);
            let header = reader.packet_header()?;
            let header_bytes = received - reader.0.len();
            let cell = link.claims.get(header.place.into()).ok_or_else(damaged)?;
            if !cell.claim(header.sequence, link.child) {
                // The packet was taken back while it lay in the socket.
                continue;
            }
            self.bytes.clear();
            if header.in_file {
                self.bytes.extend_from_slice(&message[..header_bytes]);
                let all = header_bytes + header.payload_bytes as usize;
                self.bytes.resize(all, 0);
                let file = std::fs::File::from(file.ok_or_else(damaged)?);
                let payload = &mut self.bytes[header_bytes..];
                std::os::unix::fs::FileExt::read_exact_at(&file, payload, 0)?;
            } else {
                self.bytes.extend_from_slice(message);
            }
            self.packet = OpenPacket {
                sequence: header.sequence,
                place: header.place,
                jobs: header.jobs.into(),
                next: 0,
                offset: header_bytes,
            };
            return Ok(Pulled::Packet);
        }
    }

    /// Returns the task of the latest packet.
    pub fn task(&self) -> &str {
        Reader(&self.bytes)
            .packet_header()
            .map_or("", |header| header.task)
    }

    /// Begins the next job of the packet, which must run now and end with [`Slot::finish`]. `None`: no job is
    /// left, or the rest was taken back.
    pub fn begin(&mut self) -> io::Result<Option<JobView<'_>>> {
        let packet = &mut self.packet;
        if packet.next == packet.jobs {
            return Ok(None);
        }
        let link = &self.link;
        let cell = link.claims.get(packet.place.into()).ok_or_else(damaged)?;
        let since_ns = steady_ns();
        let has_closed = link.has_closed() && !planted!("closing-ignored-mid-packet");
        if has_closed || !cell.begin(packet.sequence, link.child, packet.next, since_ns) {
            packet.next = packet.jobs;
            return Ok(None);
        }
        let mut reader = Reader(&self.bytes[packet.offset..]);
        let job = reader.job()?;
        packet.offset = self.bytes.len() - reader.0.len();
        if self.is_watched {
            fault::set_place(self.number, Some(packet.place));
        }
        self.begun += 1;
        let is_measured = packet.jobs == 1 || self.begun.is_multiple_of(MEASURED_OF);
        self.running = Some(BegunJob {
            index: packet.next,
            since_ns,
            cpu_since_ns: (self.has_thread && is_measured).then(thread_cpu_ns),
        });
        let window = &self.window;
        if !planted!("shield-outlives-its-job") {
            window.shields.store(0, Ordering::Relaxed);
        }
        for (half, value) in std::iter::zip(&window.id, halves(job.id)) {
            half.store(value, Ordering::Relaxed);
        }
        window
            .job
            .store(Window::pack(packet, packet.next), Ordering::Relaxed);
        packet.next += 1;
        Ok(Some(job))
    }

    /// Whether another slot is reporting an outcome at the moment, so that [`Slot::finish`] would wait for it.
    pub fn would_wait(&self) -> bool {
        let outcomes = &self.link.outcomes;
        self.link.slots.load(Ordering::Relaxed) > 1
            && matches!(outcomes.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Reports the outcome of the job that was begun last.
    pub fn finish(&mut self, ended: Ended<'_>) -> io::Result<()> {
        let Some(running) = self.running.take() else {
            return Err(io::Error::other("no job of this slot is running"));
        };
        if self.window.has_progress.load(Ordering::Relaxed) {
            self.window.pass_on_progress(false)?;
            self.window.has_progress.store(false, Ordering::Relaxed);
        }
        let since_ns = self.window.end().unwrap_or(running.since_ns);
        let used = |since: u64| thread_cpu_ns().saturating_sub(since).max(1);
        let cpu_ns = running.cpu_since_ns.map_or(0, used);
        if self.is_watched {
            fault::set_place(self.number, None);
        }
        lock(&self.link.outcomes).tell(OutcomeFrame {
            sequence: self.packet.sequence,
            place: self.packet.place,
            index: running.index as u16,
            kind: ended.kind,
            cost_ns: steady_ns().saturating_sub(since_ns),
            cpu_ns,
            delay_ms: ended.delay_ms,
            value: ended.value,
            failure: ended.failure,
            note: ended.note,
        })
    }

    /// Registers the calling thread as this slot's (see [`Link::watch_faults`]).
    pub fn watch_thread(&mut self) -> io::Result<()> {
        self.is_watched = true;
        fault::watch_thread(self.number)
    }

    /// Reports that the thread of this slot has exited during its job, if it had one. Returns whether it had.
    pub fn lose(&mut self, why: &str) -> io::Result<bool> {
        self.packet.next = self.packet.jobs;
        let Some(running) = &mut self.running else {
            return Ok(false);
        };
        // The caller is another thread, whose CPU time is not the job's.
        running.cpu_since_ns = None;
        self.finish(Ended {
            kind: Kind::Lost,
            delay_ms: 0,
            value: None,
            failure: None,
            note: why.as_bytes(),
        })?;
        self.link.flush()?;
        Ok(true)
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
