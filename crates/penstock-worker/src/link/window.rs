//! A slot's running job, as other threads find it: orders to it, its progress, and its waits for other jobs.

use std::io;
use std::mem::replace;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_faults::planted;

use super::slot::OpenPacket;
use super::{Link, lock};
use crate::order::{JobAt, Order};
use crate::packet::{ProgressFrame, Wait};
use crate::page::{ClaimCell, steady_ns};

/// Minimum time between two progress reports of a job to the supervisor.
pub(super) const PROGRESS_EVERY_NS: u64 = 100_000_000;

const HEARD_SHIFT: u32 = 27;
const HEARD_MASK: u64 = 3 << HEARD_SHIFT;
const PLACE_SHIFT: u32 = 11;

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

fn halves(id: [u8; 16]) -> [u64; 2] {
    let id = u128::from_le_bytes(id);
    [id as u64, (id >> 64) as u64]
}

impl Window {
    pub(super) fn new(link: Arc<Link>) -> Self {
        Self {
            link,
            job: AtomicU64::new(0),
            shields: AtomicU32::new(0),
            id: [const { AtomicU64::new(0) }; 2],
            waits: Mutex::default(),
            was_parked: AtomicBool::new(false),
            has_progress: AtomicBool::new(false),
            progress: Mutex::default(),
        }
    }

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

    pub(super) fn unpack(word: u64) -> Option<(usize, JobAt)> {
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
    pub(super) fn runs(&self, id: [u8; 16]) -> bool {
        let own = self.id.each_ref().map(|half| half.load(Ordering::Relaxed));
        own == halves(id) && self.is_open()
    }

    /// Passes on the progress of the running job and returns true, or keeps it for later and returns false.
    pub(super) fn tell_progress(&self, body: &[u8]) -> io::Result<bool> {
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
    pub(super) fn pass_on_progress(&self, rings: bool) -> io::Result<()> {
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

    /// Shows the job that begins now.
    pub(super) fn begin(&self, packet: &OpenPacket, index: usize, id: [u8; 16]) {
        if !planted!("shield-outlives-its-job") {
            self.shields.store(0, Ordering::Relaxed);
        }
        for (half, value) in std::iter::zip(&self.id, halves(id)) {
            half.store(value, Ordering::Relaxed);
        }
        self.job.store(Self::pack(packet, index), Ordering::Relaxed);
    }

    /// Ends the job, and passes on its last progress. If it was parked, returns when it began, moved later by the
    /// time that it was parked.
    pub(super) fn end(&self) -> io::Result<Option<u64>> {
        if self.has_progress.load(Ordering::Relaxed) {
            self.pass_on_progress(false)?;
            self.has_progress.store(false, Ordering::Relaxed);
        }
        let job = self.job.load(Ordering::Relaxed) & !HEARD_MASK;
        self.job.store(0, Ordering::Relaxed);
        if !self.was_parked.swap(false, Ordering::Relaxed) {
            return Ok(None);
        }
        let mut waits = lock(&self.waits);
        if waits.job == job {
            // Its outcome notifies the supervisor.
            let _ = self.go_on(&mut waits, false);
            waits.job = 0;
        }
        Ok(self.cell_of(job).map(ClaimCell::since_ns))
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
