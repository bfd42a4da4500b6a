//! A child's side of the link to its supervisor. The Python extension wraps it; it needs no Python.
//!
//! A child has one [`Link`] and a [`Slot`] for each job that it can run at once. Only an idle slot pulls: nothing is
//! buffered in the child, or a process would hoard jobs for which others have idle slots.
//!
//! Idle slots with threads of their own stand in line, and the one at its head alone waits at the socket. When it has
//! a packet, the slot that came to the line last takes its place. So at little load few threads run at all, and only
//! these touch their stacks and open connections.
//!
//! A job that waits for others is *parked*: its slot is lent to another, until its supervisor says that it may go on. Code of a
//! job may wait in several threads or coroutines at once; the job is parked as long as it does in any.
//!
//! A job tells its progress as often as it likes. Of what it tells in a tenth of a second only the latest is passed on: by the
//! call that comes first, by a thread that is there for the last, or with the job's end.

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
use crate::page::{ClaimCell, Claims, RingWriter, open_child, steady_ns, thread_cpu_ns};

/// An idle slot keeps no larger buffer than this for its next packet.
const KEPT_BYTES: usize = 4096;

/// End of a job, as its task's code brought it about.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    pub kind: Kind,
    pub delay_ms: u64,
    pub value: Option<&'a [u8]>,
    /// Present for a job that failed for good, and for no other.
    pub failure: Option<FailureView<'a>>,
    pub note: &'a [u8],
}

/// How waiting for work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// There is a packet of this slot's own: its jobs can begin.
    Packet,
    /// The supervisor wants no more, or is gone; or this child takes no more.
    End,
    /// A signal came in: let its handler run, then pull again.
    Interrupted,
    /// There is none now, and this was not to wait.
    Nothing,
}

/// Time between two tellings of a job's progress to the supervisor.
const PROGRESS_EVERY_NS: u64 = 100_000_000;

/// Shared by the slots of a child.
pub struct Link {
    work: OwnedFd,
    child: u32,
    claims: Claims,
    outcomes: Mutex<Outcomes>,
    line: Mutex<IdleSlots>,
    /// For the longest message; of the slot at the head of the line.
    buffer: Mutex<Vec<u8>>,
    slots: AtomicU32,
    /// How many of them have a job that is parked.
    parked: AtomicU32,
    /// Where each change of that number is told, by four bytes that are 0xff each.
    news: OnceLock<OwnedFd>,
    /// Nothing is claimed or begun here any more.
    has_closed: AtomicBool,
    /// Those of all slots, by which jobs are found that tell their progress.
    windows: Mutex<Vec<Weak<Window>>>,
    /// A thread is there that passes on progress which was told too soon after what was told before.
    is_late: AtomicBool,
}

struct Outcomes {
    reply: OwnedFd,
    ring: RingWriter,
    frame: Vec<u8>,
    /// Outcomes are in the ring of which the supervisor has not been told.
    unannounced: bool,
}

/// Idle slots.
#[derive(Default)]
struct IdleSlots {
    /// A slot is at the socket.
    has_head: bool,
    /// Its thread, once that has got there.
    head: Option<libc::pthread_t>,
    /// The others; the last came last.
    waiting: Vec<Arc<Turn>>,
    has_ended: bool,
}

/// Where a slot waits in line.
#[derive(Default)]
struct Turn {
    has_come: AtomicBool,
    is_dismissed: AtomicBool,
    changed: Condvar,
}

/// How waiting in line ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InLine {
    Head,
    Dismissed,
    Ended,
}

/// Place that runs one job at a time.
pub struct Slot {
    number: usize,
    /// A fault of its thread is told, and which packet it has.
    is_watched: bool,
    link: Arc<Link>,
    turn: Arc<Turn>,
    /// The packet that it has: header, then payload.
    bytes: Vec<u8>,
    packet: OpenPacket,
    running: Option<BegunJob>,
    /// Number of jobs that it has begun.
    begun: u64,
    /// Whether no other slot shares its thread.
    has_thread: bool,
    window: Arc<Window>,
}

/// The job that a slot runs, as orders find it. Unlike the slot, it may be asked by any thread, and in a signal handler.
///
/// The thread that carries out an order must hold the interpreter's lock from the question to the deed, as the slot's thread does
/// when its job ends.
pub struct Window {
    link: Arc<Link>,
    /// [`Window::pack`], or 0 while no job runs.
    job: AtomicU64,
    /// How many parts of the job that keep orders off it is in.
    shields: AtomicU32,
    /// The job's id, in two halves.
    id: [AtomicU64; 2],
    waits: Mutex<OpenWaits>,
    /// The job was parked.
    was_parked: AtomicBool,
    /// The job has told its progress.
    has_progress: AtomicBool,
    progress: Mutex<LatestProgress>,
}

/// Progress of the job that a slot runs.
#[derive(Default)]
struct LatestProgress {
    /// The job, as in [`Window::job`], without what it has heard.
    job: u64,
    at_ns: u64,
    /// The latest, if it was not passed on.
    late: Option<Vec<u8>>,
}

/// Waits of a job for others.
#[derive(Default)]
struct OpenWaits {
    /// The job, as in [`Window::job`], without what it has heard.
    job: u64,
    /// Waits that take long, and are not over.
    open: u32,
    /// Number of the last time that the job was parked, by the slot's count.
    number: u32,
    is_parked: bool,
}

/// A wait of a running job that takes long; to be ended by [`Window::end_wait`] or [`Window::break_off`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongWait {
    job: u64,
}

/// Outcome of the end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// The job goes on.
    Now,
    /// It goes on when [`Window::has_turn`] says so of this number.
    After(u32),
}

/// Jobs that share a packet are short, and reading the CPU time costs about as much as running one: one in so many is
/// measured.
const MEASURED_OF: u64 = 64;

const HEARD_SHIFT: u32 = 27;
const HEARD_MASK: u64 = 3 << HEARD_SHIFT;
const PLACE_SHIFT: u32 = 11;

/// The packet whose jobs a slot is running.
#[derive(Clone, Copy, Default)]
struct OpenPacket {
    sequence: u32,
    place: u16,
    jobs: usize,
    next: usize,
    /// Where the next job begins in the bytes.
    offset: usize,
}

#[derive(Clone, Copy)]
struct BegunJob {
    index: usize,
    since_ns: u64,
    /// CPU time of its thread when it began; `None`: not measured for this job.
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
    // Nothing panics while it holds one of these, and each change leaves them whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// `work` is shared by all children of a pool; `reply` is this child's own.
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
            buffer: Mutex::new(vec![0; MAX_PACKET_BYTES]),
            slots: AtomicU32::new(0),
            parked: AtomicU32::new(0),
            news: OnceLock::new(),
            has_closed: AtomicBool::new(false),
            windows: Mutex::default(),
            is_late: AtomicBool::new(false),
        }))
    }

    /// Has the fatal signals of slots' threads say whose they were. For a child with so many slots in threads, which end
    /// with the process.
    pub fn watch_faults(self: &Arc<Self>, slots: usize) -> io::Result<()> {
        // A handler may run until the very end.
        std::mem::forget(Arc::clone(self));
        // SAFETY: the link, and the ring with it, is never dropped from here on.
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

    /// The socket of [`Slot::try_pull`], for an event loop.
    pub fn work(&self) -> BorrowedFd<'_> {
        self.work.as_fd()
    }

    /// Tells the supervisor of outcomes that are in the ring.
    pub fn flush(&self) -> io::Result<()> {
        let mut outcomes = lock(&self.outcomes);
        if take(&mut outcomes.unannounced) {
            send_all(&outcomes.reply, &BELL)?;
        }
        Ok(())
    }

    /// Tells the supervisor how many slots of this child can take jobs.
    pub fn tell_serving(&self, slots: u32) -> io::Result<()> {
        send_all(&lock(&self.outcomes).reply, &serving(slots))
    }

    /// From here on no slot claims or begins anything. Those in line are told; the one at the socket stays there, and
    /// what it may still receive it leaves unclaimed, for the supervisor to take back.
    pub fn close(&self) {
        self.has_closed.store(true, Ordering::SeqCst);
        self.end_line();
    }

    /// Whether the supervisor wants this child to end when what it has begun has.
    pub fn is_closing(&self) -> bool {
        self.claims.is_closing()
    }

    /// Does what the supervisor asks for between two jobs. Says whether this child is to end.
    pub fn heed(&self) -> bool {
        self.claims.trim_if_asked(trim);
        self.is_closing()
    }

    fn has_closed(&self) -> bool {
        self.has_closed.load(Ordering::SeqCst) || self.is_closing()
    }

    /// A slot ends here because its child is closed: what it left unclaimed or did not begin is for others.
    fn tell_closing(&self) -> io::Result<()> {
        match self.has_closed() {
            true => self.tell_serving(0),
            false => Ok(()),
        }
    }

    /// Interrupts the slot at the socket, after [`Link::close`], by a signal that must have a handler. False: there is none,
    /// and there will be none.
    pub fn nudge(&self) -> bool {
        let line = lock(&self.line);
        if let Some(thread) = line.head {
            // SAFETY: the thread is there, since it takes this lock before it goes on.
            unsafe { libc::pthread_kill(thread, libc::SIGURG) };
        }
        line.has_head
    }

    /// How many slots have a job that is parked: so many others may run jobs in their place.
    pub fn parked(&self) -> u32 {
        self.parked.load(Ordering::Relaxed)
    }

    /// Has each change of [`Link::parked`] told, by four bytes that are 0xff each. Once.
    pub fn tell_parked_on(&self, news: OwnedFd) {
        let _ = self.news.set(news);
    }

    fn tell_news(&self) {
        if let Some(news) = self.news.get() {
            // Nobody listens any more where this fails.
            let _ = rustix::io::write(news, &u32::MAX.to_le_bytes());
        }
    }

    /// Whether a slot is at the socket, or about to be.
    pub fn has_head(&self) -> bool {
        lock(&self.line).has_head
    }

    /// Ends so many of the slots that wait in line, those that came first. Returns how many there were.
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

    /// A job tells its progress, from any thread. Says whether it runs here.
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

    /// Has the latest progress of a job passed on once it is time, by a thread that lives until then: a job that forks had
    /// better find none.
    fn await_late(self: &Arc<Self>) {
        if self.is_late.swap(true, Ordering::SeqCst) {
            return;
        }
        let link = Arc::clone(self);
        let pass_on = move || {
            std::thread::sleep(Duration::from_nanos(PROGRESS_EVERY_NS));
            // From here on another thread is made for what is told too late for this one.
            link.is_late.store(false, Ordering::SeqCst);
            let windows = lock(&link.windows).clone();
            for window in windows.iter().filter_map(Weak::upgrade) {
                // Where this fails, the supervisor is gone.
                let _ = window.pass_on_progress(true);
            }
        };
        // Signals are for the threads of the interpreter, where they interrupt waits.
        let thread = without_signals(|| {
            let builder = std::thread::Builder::new().name("progress".to_owned());
            builder.stack_size(256 << 10).spawn(pass_on)
        });
        if thread.is_err() {
            // The next call passes it on, or the job's end.
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

    /// Waits until this slot is at the head of the line, or is to end.
    fn enter_line(&self, turn: &Arc<Turn>) -> InLine {
        let mut line = lock(&self.line);
        if line.has_ended {
            return InLine::Ended;
        }
        // SAFETY: it has no conditions.
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

    /// The slot at the head leaves; the one that came last takes its place.
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

    /// Order to the running job that may be carried out now.
    pub fn order(&self) -> Option<Order> {
        let (place, job) = Self::unpack(self.job.load(Ordering::Relaxed))?;
        let order = self.link.claims.get(place)?.wanted(job)?;
        // Nothing keeps off the end of a job's time.
        let is_the_end = order == Order::Hard && !planted!("shield-against-the-end");
        (is_the_end || self.shields.load(Ordering::Relaxed) == 0).then_some(order)
    }

    /// As [`Window::order`], and the order counts as carried out from here on.
    pub fn take_order(&self) -> Option<Order> {
        let order = self.order()?;
        let word = self.job.load(Ordering::Relaxed);
        let (place, job) = Self::unpack(word)?;
        self.link.claims.get(place)?.hear(job, order);
        let heard = word & !HEARD_MASK | (order as u64) << HEARD_SHIFT;
        self.job.store(heard, Ordering::Relaxed);
        Some(order)
    }

    /// The order that the running job has heard last.
    pub fn heard(&self) -> Option<Order> {
        Order::from_bits(self.job.load(Ordering::Relaxed) >> HEARD_SHIFT)
    }

    /// Whether the job of this id runs here.
    fn runs(&self, id: [u8; 16]) -> bool {
        let own = self.id.each_ref().map(|half| half.load(Ordering::Relaxed));
        own == halves(id) && self.is_open()
    }

    /// Passes the progress of the running job on, or keeps it for later: then says so by `false`.
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
            // Who has kept the one before has had it awaited.
            return Ok(was_late);
        }
        told.at_ns = now;
        told.late = None;
        self.send_progress(job, body, true)?;
        Ok(true)
    }

    /// Passes on what was kept for later. `rings`: nothing follows that the supervisor is told of in any case.
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

    /// The job of this id waits for others, and that takes long: its slot may be lent. `None`: it does not run here.
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

    /// A wait is over. While others of the job are not, it goes on at once and stays parked: it waits in any case.
    ///
    /// `is_on_loop`: a signal is to tell when it is the job's turn.
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

    /// A wait was broken off: the job goes on at once.
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

    /// The job does not wait for its turn any more, but goes on.
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

    /// Whether the job may go on after the wait of this number.
    pub fn has_turn(&self, number: u32) -> bool {
        let mut waits = lock(&self.waits);
        if waits.number != number || waits.open > 0 || !waits.is_parked {
            // Another part of its code waits by now, or it has ended.
            return true;
        }
        let has_turn = self
            .cell_of(waits.job)
            .is_none_or(|cell| cell.has_turn(number));
        if has_turn {
            // Nothing is told, so nothing fails.
            let _ = self.go_on(&mut waits, false);
        }
        has_turn
    }

    /// As [`Window::has_turn`], after waiting for it so long at most. A signal ends the wait, too.
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

    /// The job has ended. Returns when it began, later by the time that it was parked, if it was.
    fn end(&self) -> Option<u64> {
        let job = self.job.load(Ordering::Relaxed) & !HEARD_MASK;
        self.job.store(0, Ordering::Relaxed);
        if !self.was_parked.swap(false, Ordering::Relaxed) {
            return None;
        }
        let mut waits = lock(&self.waits);
        if waits.job == job {
            // Its outcome tells the supervisor.
            let _ = self.go_on(&mut waits, false);
            waits.job = 0;
        }
        self.cell_of(job).map(ClaimCell::since_ns)
    }

    /// Keeps orders off the running job, but for [`Order::Hard`], until [`Window::unshield`] was called as often.
    pub fn shield(&self) {
        self.shields.fetch_add(1, Ordering::Relaxed);
    }

    pub fn unshield(&self) {
        let fewer = |shields: u32| shields.checked_sub(1);
        // Less than none: the job that it was for has ended.
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

    /// The job that it runs, for orders to this.
    pub fn window(&self) -> Arc<Window> {
        Arc::clone(&self.window)
    }

    /// Waits for a packet and makes it this slot's.
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

    /// As [`Slot::pull`], without waiting, and without telling of outcomes. For slots that share a thread.
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
                // It was taken back while it lay in the socket.
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

    /// The task of the packet that was pulled last.
    pub fn task(&self) -> &str {
        Reader(&self.bytes)
            .packet_header()
            .map_or("", |header| header.task)
    }

    /// Claims the next job of the packet, which must run now and end with [`Slot::finish`]. `None`: there
    /// is none left, or the rest was taken back.
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

    /// Whether another slot is telling of an outcome just now, so that [`Slot::finish`] would wait for it.
    pub fn would_wait(&self) -> bool {
        let outcomes = &self.link.outcomes;
        self.link.slots.load(Ordering::Relaxed) > 1
            && matches!(outcomes.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Tells how the job that was begun last has ended.
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

    /// The calling thread is this slot's (see [`Link::watch_faults`]).
    pub fn watch_thread(&mut self) -> io::Result<()> {
        self.is_watched = true;
        fault::watch_thread(self.number)
    }

    /// Tells that the thread of this slot has ended in the midst of its job, if it had one. Says whether it had.
    pub fn lose(&mut self, why: &str) -> io::Result<bool> {
        self.packet.next = self.packet.jobs;
        let Some(running) = &mut self.running else {
            return Ok(false);
        };
        // Another thread says so.
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
        // In the ring, before the outcome that may follow.
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
            // It fits the ring only in part or not at all: over the socket, in pieces.
            send_all(&self.reply, &self.frame)?;
            self.frame.shrink_to(64 * 1024);
        }
        Ok(())
    }
}

/// Runs `this` with all signals blocked, which a thread that it makes inherits.
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
