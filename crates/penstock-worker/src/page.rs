//! Lays out the memory that a supervisor shares with its children: which child has which packet, which of
//! its jobs runs, and outcomes that were not collected yet.
//!
//! ```text
//!     header        one line     what the rest looks like
//!     claims        a line each  one for each packet that may be out at once
//!     outcome ring  one a child  head and fault, tail, closing and trim, then RING_BYTES of frames (see packet.rs)
//! ```
//!
//! # Claims
//!
//! A child is a process with one or more slots. Its idle slots pull packets from a socket that all children of
//! their pool share, so the supervisor can't know which child gets a packet. The *claim* settles that. It is
//! one atomic word for each packet:
//!
//! ```text
//!      63          32 31       20 19       10 9         0
//!     ┌──────────────┬───────────┬───────────┬───────────┐
//!     │ sequence  32 │ owner  12 │ limit  10 │ begun  10 │
//!     └──────────────┴───────────┴───────────┴───────────┘
//! ```
//!
//! Both sides change it only by compare-and-swap. A slot that has pulled a packet writes its child as the
//! owner; no other slot of that child knows the packet. Before each job it raises `begun`, which must not
//! exceed `limit`. The supervisor takes back jobs that have not begun by lowering `limit` to `begun`, at any
//! time and without asking. If the packet had no owner yet, it can no longer be claimed. Therefore:
//!
//! - a job is begun by one child or taken back, never both, however the two race;
//! - a child that dies between pulling and claiming loses nothing: the supervisor takes the packet back and
//!   sends its jobs again, and if that child is alive after all, its claim fails;
//! - a death interrupts only jobs below `begun` that have no outcome: at most one for each slot of the child;
//! - a packet that is stuck behind others is taken back without being drained from the socket.
//!
//! # The words next to a claim
//!
//! ```text
//!     since     child → supervisor    time at which the latest job began: nanoseconds of the steady clock
//!     order     supervisor → child    order to a running job (see order.rs)
//!     heard     child → supervisor    the latest order that was carried out
//!     turn      supervisor → child    the latest wait after which its job may continue (see supervisor/lending.rs)
//! ```
//!
//! `since` is written before `begun` is raised. So a reader that reads `begun` first and `since` after it never
//! takes an earlier job's time for the current job's.
//!
//! # Outcome rings
//!
//! A child's slots write each outcome into its ring, one at a time. That costs no system call and survives the
//! child's death: an ended job is not lost with the jobs after it. At the end of each packet the child rings
//! the supervisor's bell, which is one frame on the child's own socket. Outcomes that don't fit into the ring
//! are sent over that socket instead, so a child never waits for a full ring.
//!
//! # The guilty job
//!
//! When a process with several slots dies by a processor fault or an abort, its signal handler writes into
//! `fault` which packet the faulting thread had (see fault.rs): its place plus one. 0 means unknown.
//!
//! # The end of one child
//!
//! The supervisor writes `closing`, next to the tail. Once it is not 0, the child claims and begins nothing
//! more. The supervisor sets it, and then takes back the jobs that the child has claimed and not begun. A child
//! claims first and reads `closing` afterwards, so at least one of the two sees the other.
//!
//! `trim` asks a child to give freed memory back to the system before its next job; the child then sets it
//! to 0.
//!
//! Children can write here, so the supervisor trusts nothing it reads: it copies, then checks.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use penstock_faults::planted;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::time::{ClockId, clock_gettime};

use crate::order::{JobAt, Order};

/// Size of a cache line. Each word that two processes write has its own line, so that neighbours don't slow
/// each other.
const LINE_BYTES: usize = 64;
/// Alignment of separately mapped parts: the largest page size in use.
const PAGE_BYTES: usize = 64 * 1024;
/// Size of a ring's frames: enough for two packets of 256 small results.
pub const RING_BYTES: usize = PAGE_BYTES - 2 * LINE_BYTES;
const CHILD_BYTES: usize = PAGE_BYTES;
/// Offset of `fault`, on the head's line.
const FAULT_OFFSET: usize = 8;
/// Offset of `closing`, on the tail's line.
const CLOSING_OFFSET: usize = LINE_BYTES + 8;
/// Offset of `trim`, on the tail's line.
const TRIM_OFFSET: usize = LINE_BYTES + 16;

const MAGIC: u32 = 0x5053_7433;

/// Maximum number of jobs in a packet, which `limit` and `begun` can count.
pub const MAX_PACKET_JOBS: usize = 256;

#[repr(C, align(64))]
struct Header {
    magic: AtomicU32,
    claims: AtomicU32,
    children: AtomicU32,
}

/// Mapping of memory that processes share.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned, and stays where it is until dropped. It is read and written through atomics or,
// for the bytes of a ring, by one side at a time (see `RingWriter` and `RingReader`).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: BorrowedFd<'_>, offset: usize, len: usize) -> io::Result<Self> {
        // SAFETY: a new shared mapping at an address that the kernel chooses aliases nothing.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset as u64,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Maps memory of zeros that this process shares with its forks.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        Self::of_zeros(len, MapFlags::SHARED)
    }

    fn of_zeros(len: usize, flags: MapFlags) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choosing aliases nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Returns the `T` at `offset`, which must consist only of atomics and be aligned.
    pub(crate) fn at<T>(&self, offset: usize) -> &T {
        assert!(offset + size_of::<T>() <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: within the mapping, aligned, valid for any bits (atomics), and alive as long as self.
        unsafe { self.start.add(offset).cast::<T>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is exactly the range that mmap returned, and no reference into it outlives self.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Buffer whose pages cost nothing until they are written.
///
/// A fork that took it from the heap would copy the pages that it shares with its parent: to find room, and to clear it.
pub(crate) struct LazyBuffer(Mapping);

impl LazyBuffer {
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        Ok(Self(Mapping::of_zeros(len, MapFlags::PRIVATE)?))
    }
}

impl Deref for LazyBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is as long, belongs to this process, and lives as long as self; all of it is initialized.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }
}

impl DerefMut for LazyBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and no other reference exists.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.len) }
    }
}

/// Content of a claim's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketClaim {
    /// Sequence number of the packet. Places in the table are soon reused, sequence numbers only after a long
    /// time.
    pub sequence: u32,
    /// Child that has the packet; `None` while it is on its way.
    pub owner: Option<u32>,
    /// Number of its jobs that may begin.
    pub limit: usize,
    /// Number of its jobs that have begun.
    pub begun: usize,
}

impl PacketClaim {
    fn pack(self) -> u64 {
        let owner = self.owner.map_or(0, |child| u64::from(child) + 1);
        u64::from(self.sequence) << 32
            | (owner & 0xfff) << 20
            | (self.limit as u64 & 0x3ff) << 10
            | (self.begun as u64 & 0x3ff)
    }

    fn unpack(word: u64) -> Self {
        Self {
            sequence: (word >> 32) as u32,
            owner: ((word >> 20 & 0xfff) as u32).checked_sub(1),
            limit: (word >> 10 & 0x3ff) as usize,
            begun: (word & 0x3ff) as usize,
        }
    }
}

/// Returns the steady clock's time in nanoseconds. Children use it to report when a job began.
pub fn steady_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the CPU time of the calling thread, in nanoseconds. Unlike [`steady_ns`], it is a system call.
pub fn thread_cpu_ns() -> u64 {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    used.tv_sec as u64 * 1_000_000_000 + used.tv_nsec as u64
}

/// Claim of a packet, as both sides see it, with the words about its running job.
#[repr(C, align(64))]
pub struct ClaimCell {
    word: AtomicU64,
    since: AtomicU64,
    order: AtomicU64,
    heard: AtomicU64,
    turn: AtomicU32,
}

impl ClaimCell {
    /// Offers a packet that the supervisor is about to send. The place must not be in use.
    pub fn offer(&self, sequence: u32, jobs: usize) {
        assert!(jobs <= MAX_PACKET_JOBS);
        let claim = PacketClaim {
            sequence,
            owner: None,
            limit: jobs,
            begun: 0,
        };
        self.turn.store(0, Ordering::Relaxed);
        self.word.store(claim.pack(), Ordering::Release);
    }

    pub fn read(&self) -> PacketClaim {
        PacketClaim::unpack(self.word.load(Ordering::Acquire))
    }

    /// Returns when a job began: the latest one at the last [`ClaimCell::read`], or a later one.
    pub fn since_ns(&self) -> u64 {
        self.since.load(Ordering::Acquire)
    }

    /// Excludes a pause from the job's time, for the supervisor. Call it only while the job waits for its turn.
    pub fn add_to_since(&self, pause_ns: u64) {
        self.since.fetch_add(pause_ns, Ordering::AcqRel);
    }

    /// Lets the job continue after the wait of this number, for the supervisor.
    pub fn give_turn(&self, wait: u32) {
        self.turn.store(wait, Ordering::Release);
        wake(&self.turn);
    }

    /// Whether the child's job may continue after this wait.
    pub fn has_turn(&self, wait: u32) -> bool {
        self.turn.load(Ordering::Acquire) == wait
    }

    /// Waits until the child's job may continue, up to `patience`. Returns whether it may. A signal ends the
    /// wait too.
    pub fn await_turn(&self, wait: u32, patience: Duration) -> bool {
        let turn = self.turn.load(Ordering::Acquire);
        turn == wait || {
            sleep_while(&self.turn, turn, patience);
            self.has_turn(wait)
        }
    }

    /// Gives a job an order, for the supervisor. Returns false if it has this order or a stronger one already.
    pub fn order(&self, job: JobAt, order: Order) -> bool {
        // Only the supervisor may write here.
        let now = job.order_in(self.order.load(Ordering::Relaxed));
        let is_more = now.is_none_or(|now| now < order);
        if is_more {
            self.order.store(job.word(Some(order)), Ordering::Release);
        }
        is_more
    }

    /// Returns the order to the child's job that was not carried out yet.
    pub fn wanted(&self, job: JobAt) -> Option<Order> {
        let word = self.order.load(Ordering::Acquire);
        job.order_in(word).filter(|_| {
            self.heard.load(Ordering::Relaxed) != word || planted!("order-carried-out-twice")
        })
    }

    /// Notes that the child has carried out this order.
    pub fn hear(&self, job: JobAt, order: Order) {
        self.heard.store(job.word(Some(order)), Ordering::Release);
    }

    /// Returns the latest order that this job has received.
    pub fn heard(&self, job: JobAt) -> Option<Order> {
        job.order_in(self.heard.load(Ordering::Acquire))
    }

    fn change(
        &self,
        change: impl Fn(PacketClaim) -> Option<PacketClaim>,
    ) -> Result<PacketClaim, PacketClaim> {
        self.word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                change(PacketClaim::unpack(word)).map(PacketClaim::pack)
            })
            .map(PacketClaim::unpack)
            .map_err(PacketClaim::unpack)
    }

    /// Claims the packet that the child has just pulled. Returns false if it was taken back, so that no child
    /// has it.
    pub fn claim(&self, sequence: u32, child: u32) -> bool {
        self.change(|claim| {
            let is_it = claim.sequence == sequence || planted!("claim-a-former-packet");
            let free = is_it && claim.owner.is_none() && claim.limit > 0;
            free.then_some(PacketClaim {
                owner: Some(child),
                ..claim
            })
        })
        .is_ok()
    }

    /// Begins the job at `index`, which the child is about to run, at `now_ns`. Returns false if it was taken
    /// back.
    pub fn begin(&self, sequence: u32, child: u32, index: usize, now_ns: u64) -> bool {
        // Written first: see the module's documentation.
        self.since.store(now_ns, Ordering::Release);
        self.change(|claim| {
            let mine = claim.sequence == sequence && claim.owner == Some(child);
            (mine && (index < claim.limit || planted!("begin-what-was-taken-back"))).then_some(
                PacketClaim {
                    begun: index + 1,
                    ..claim
                },
            )
        })
        .is_ok()
    }

    /// Stops the packet's remaining jobs from beginning, for the supervisor. Returns the claim before that.
    pub fn take_back(&self) -> PacketClaim {
        match self.change(|claim| {
            Some(PacketClaim {
                limit: claim.begun,
                ..claim
            })
        }) {
            Ok(before) | Err(before) => before,
        }
    }
}

/// Sleeps while the word, which other processes share, has this value, up to `patience` or until a signal
/// arrives.
fn sleep_while(word: &AtomicU32, value: u32, patience: Duration) {
    #[cfg(target_os = "linux")]
    {
        let patience = libc::timespec {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_nsec: patience.subsec_nanos() as libc::c_long,
        };
        // SAFETY: the word and the time are alive for the duration of the call. Whatever it returns, the caller
        // checks the word again.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                word.as_ptr(),
                libc::FUTEX_WAIT,
                value,
                &raw const patience,
            );
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        // No call for this exists in all versions.
        let until = std::time::Instant::now() + patience.min(Duration::from_millis(50));
        while word.load(Ordering::Acquire) == value && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn wake(word: &AtomicU32) {
    #[cfg(target_os = "linux")]
    // SAFETY: the word is alive for the duration of the call, which reads nothing there.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = word;
}

#[repr(C, align(64))]
struct CacheLine(AtomicU64);

/// Shared memory as the supervisor sees it: all of it.
pub struct Pages {
    file: OwnedFd,
    all: Mapping,
    claims: usize,
    children: u32,
}

fn claims_bytes(claims: usize) -> usize {
    (LINE_BYTES + claims * LINE_BYTES).next_multiple_of(PAGE_BYTES)
}

fn ring_offset(claims: usize, child: u32) -> usize {
    claims_bytes(claims) + child as usize * CHILD_BYTES
}

impl Pages {
    pub fn new(children: u32, claims: usize) -> io::Result<Self> {
        let file = anonymous_file("penstock-pages")?;
        let len = ring_offset(claims, children);
        rustix::fs::ftruncate(&file, len as u64)?;
        let all = Mapping::new(file.as_fd(), 0, len)?;
        let header: &Header = all.at(0);
        header.claims.store(claims as u32, Ordering::Relaxed);
        header.children.store(children, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(Self {
            file,
            all,
            claims,
            children,
        })
    }

    pub fn claim(&self, place: usize) -> &ClaimCell {
        assert!(place < self.claims);
        self.all.at(LINE_BYTES + place * LINE_BYTES)
    }

    /// Returns the reader of a ring that no child has used.
    pub fn ring(&self, child: u32) -> RingReader {
        assert!(child < self.children);
        let offset = ring_offset(self.claims, child);
        RingReader { offset, tail: 0 }
    }

    /// Returns the reader of a child's ring, emptied. The frames of an earlier child with its number must have
    /// been read.
    pub fn fresh_ring(&self, child: u32) -> RingReader {
        let ring = self.ring(child);
        let offset = ring.offset;
        self.all
            .at::<CacheLine>(offset)
            .0
            .store(0, Ordering::Release);
        if !planted!("fault-of-the-one-before") {
            self.fault_word(child).store(0, Ordering::Release);
        }
        if !planted!("close-the-successor") {
            self.closing_word(child).store(0, Ordering::Release);
        }
        self.trim_word(child).store(0, Ordering::Release);
        self.all
            .at::<CacheLine>(offset + LINE_BYTES)
            .0
            .store(0, Ordering::Release);
        ring
    }

    fn fault_word(&self, child: u32) -> &AtomicU64 {
        self.all.at(ring_offset(self.claims, child) + FAULT_OFFSET)
    }

    fn closing_word(&self, child: u32) -> &AtomicU64 {
        self.all
            .at(ring_offset(self.claims, child) + CLOSING_OFFSET)
    }

    fn trim_word(&self, child: u32) -> &AtomicU64 {
        self.all.at(ring_offset(self.claims, child) + TRIM_OFFSET)
    }

    /// Asks a child to return freed memory before its next job.
    pub fn ask_to_trim(&self, child: u32) {
        self.trim_word(child).store(1, Ordering::Release);
    }

    /// Whether a child was asked to return freed memory and has not done so yet.
    pub fn is_to_trim(&self, child: u32) -> bool {
        self.trim_word(child).load(Ordering::Acquire) != 0
    }

    /// Stops this child from claiming or beginning anything. Look for its earlier claims only after this call.
    pub fn close(&self, child: u32) {
        // Not a store: it must be seen before the claims are read.
        self.closing_word(child).swap(1, Ordering::SeqCst);
    }

    /// Returns the place of the packet that a child was running when a fault ended it, if it is known and
    /// valid.
    pub fn fault(&self, child: u32) -> Option<usize> {
        let place = self
            .fault_word(child)
            .load(Ordering::Acquire)
            .checked_sub(1)? as usize;
        let is_its_own =
            || self.claim(place).read().owner == Some(child) || planted!("fault-of-anybody");
        (place < self.claims && is_its_own()).then_some(place)
    }
}

impl AsFd for Pages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Error for a child that wrote invalid data into its ring.
#[derive(Debug, PartialEq, Eq)]
pub struct Damaged;

/// Supervisor's reader of one child's outcomes.
pub struct RingReader {
    offset: usize,
    tail: u64,
}

impl RingReader {
    /// Appends new frames to `out` and frees their room.
    pub fn read(&mut self, pages: &Pages, out: &mut Vec<u8>) -> Result<(), Damaged> {
        let head = pages
            .all
            .at::<CacheLine>(self.offset)
            .0
            .load(Ordering::Acquire);
        let len = head.wrapping_sub(self.tail) as usize;
        if len == 0 {
            return Ok(());
        }
        if len > RING_BYTES {
            return Err(Damaged);
        }
        let from = self.tail as usize % RING_BYTES;
        let first = len.min(RING_BYTES - from);
        let data = self.offset + 2 * LINE_BYTES;
        for (start, len) in [(from, first), (0, len - first)] {
            out.reserve(len);
            let old = out.len();
            // SAFETY: the source is within the child's part of the mapping, the target in the room just
            // reserved. No reference is made to shared memory. The child writes only beyond `head`; a child
            // that writes elsewhere changes bytes that are copied once and checked by their parser.
            unsafe {
                let source = pages.all.start.add(data + start).as_ptr();
                std::ptr::copy_nonoverlapping(source, out.as_mut_ptr().add(old), len);
                out.set_len(old + len);
            }
        }
        self.tail = head;
        pages
            .all
            .at::<CacheLine>(self.offset + LINE_BYTES)
            .0
            .store(head, Ordering::Release);
        Ok(())
    }
}

/// Pages that all children of a zygote see: the claims. A zygote maps them, and its forks inherit the mapping.
pub struct SharedPages {
    file: OwnedFd,
    claims: Mapping,
    count: usize,
    children: u32,
}

impl SharedPages {
    pub fn map(file: OwnedFd) -> io::Result<Self> {
        let header = Mapping::new(file.as_fd(), 0, PAGE_BYTES)?;
        let header: &Header = header.at(0);
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(not_ours());
        }
        let count = header.claims.load(Ordering::Relaxed) as usize;
        Ok(Self {
            claims: Mapping::new(file.as_fd(), 0, claims_bytes(count))?,
            children: header.children.load(Ordering::Relaxed),
            file,
            count,
        })
    }

    /// Maps the ring of this process, a child. Children see no ring but their own, so a wild write can't reach their
    /// siblings' outcomes.
    pub fn of_child(self, child: u32) -> io::Result<(Claims, RingWriter)> {
        if child >= self.children {
            return Err(not_ours());
        }
        let ring = ring_offset(self.count, child);
        let own = Arc::new(Mapping::new(self.file.as_fd(), ring, CHILD_BYTES)?);
        let claims = Claims {
            shared: self.claims,
            own: Arc::clone(&own),
            count: self.count,
        };
        let ring = RingWriter {
            own,
            head: 0,
            tail: 0,
        };
        Ok((claims, ring))
    }
}

fn not_ours() -> io::Error {
    io::Error::other("these are not a penstock worker's pages")
}

/// Claims, as a child's slots see them.
pub struct Claims {
    shared: Mapping,
    own: Arc<Mapping>,
    count: usize,
}

impl Claims {
    /// Returns the claim at a place. `None`: this place does not exist, so the packet that named it is damaged.
    pub fn get(&self, place: usize) -> Option<&ClaimCell> {
        (place < self.count).then(|| self.shared.at(LINE_BYTES + place * LINE_BYTES))
    }

    /// Whether this child must not claim or begin anything more.
    pub fn is_closing(&self) -> bool {
        let word: &AtomicU64 = self.own.at(CLOSING_OFFSET);
        word.load(Ordering::SeqCst) != 0
    }

    /// Runs `trim` once if this child was asked to return freed memory.
    pub fn trim_if_asked(&self, trim: impl FnOnce()) {
        let word: &AtomicU64 = self.own.at(TRIM_OFFSET);
        if word.load(Ordering::Relaxed) != 0 {
            trim();
            word.store(0, Ordering::Release);
        }
    }
}

/// Child's writer of its outcomes; its slots take turns.
pub struct RingWriter {
    own: Arc<Mapping>,
    head: u64,
    tail: u64,
}

impl RingWriter {
    /// Returns the word for [`Pages::fault`].
    ///
    /// # Safety
    ///
    /// The writer must stay alive as long as the returned word is used.
    pub unsafe fn fault(&self) -> &'static AtomicU64 {
        let word: &AtomicU64 = self.own.at(FAULT_OFFSET);
        // SAFETY: the mapping stays where it is until the writer is dropped.
        unsafe { &*std::ptr::from_ref(word) }
    }

    /// Appends a frame to the ring; false if it doesn't fit now.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        let room = |tail: u64, head: u64| RING_BYTES - (head - tail) as usize;
        if room(self.tail, self.head) < frame.len() {
            let tail = self
                .own
                .at::<CacheLine>(LINE_BYTES)
                .0
                .load(Ordering::Acquire);
            self.tail = tail;
            if room(self.tail, self.head) < frame.len() {
                return false;
            }
        }
        let from = self.head as usize % RING_BYTES;
        let (first, second) = frame.split_at(frame.len().min(RING_BYTES - from));
        for (start, bytes) in [(from, first), (0, second)] {
            // SAFETY: within this child's ring, in the part that the supervisor has finished reading.
            unsafe {
                let target = self.own.start.add(2 * LINE_BYTES + start).as_ptr();
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
            }
        }
        self.head += frame.len() as u64;
        self.own
            .at::<CacheLine>(0)
            .0
            .store(self.head, Ordering::Release);
        true
    }
}

/// Creates a file without a name, closed on exec.
pub fn anonymous_file(name: &str) -> io::Result<OwnedFd> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{MemfdFlags, memfd_create};
        Ok(memfd_create(name, MemfdFlags::CLOEXEC)?)
    }
    // macOS has no memfd, so create a file and remove its name at once.
    #[cfg(not(target_os = "linux"))]
    {
        use rustix::fs::{Mode, OFlags, open, unlink};
        use std::sync::atomic::AtomicU64;
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{name}-{}-{number}", std::process::id()));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let file = open(&path, flags, Mode::RUSR | Mode::WUSR)?;
        unlink(&path)?;
        Ok(file)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;

    fn open_child(pages: &impl AsFd, child: u32) -> io::Result<(Claims, RingWriter)> {
        SharedPages::map(pages.as_fd().try_clone_to_owned()?)?.of_child(child)
    }

    fn cell() -> ClaimCell {
        let [word, since, order, heard] = [const { AtomicU64::new(0) }; 4];
        ClaimCell {
            word,
            since,
            order,
            heard,
            turn: AtomicU32::new(0),
        }
    }

    #[test]
    fn a_claim_survives_packing() {
        for owner in [None, Some(0), Some(crate::MAX_PROCESSES - 1)] {
            let claim = PacketClaim {
                sequence: u32::MAX - 1,
                owner,
                limit: MAX_PACKET_JOBS,
                begun: MAX_PACKET_JOBS - 1,
            };
            assert_eq!(PacketClaim::unpack(claim.pack()), claim);
        }
    }

    #[test]
    pub(crate) fn what_was_taken_back_can_not_be_claimed_or_begun() {
        let cell = cell();
        cell.offer(7, 3);
        assert!(!cell.claim(6, 0), "another packet's sequence");
        assert!(cell.claim(7, 0));
        assert!(!cell.claim(7, 1), "it has an owner");
        assert!(cell.begin(7, 0, 0, 1));
        assert_eq!((cell.take_back().limit, cell.read().limit), (3, 1));
        assert!(!cell.begin(7, 0, 1, 1));

        cell.offer(8, 3);
        assert_eq!(cell.take_back().owner, None);
        assert!(!cell.claim(8, 0), "no job is left to claim");
        assert!(
            !cell.begin(7, 0, 1, 1),
            "the place belongs to another packet"
        );
    }

    /// Makes two children that pulled the same sequence (as happens with a child wrongly thought dead) and a supervisor
    /// that takes back race for each job, many times. Each job is run once or returned once.
    #[test]
    fn each_job_is_begun_once_or_taken_back_whoever_races() {
        const JOBS: usize = 4;
        for round in 0..2_000_u32 {
            let cell = cell();
            cell.offer(round, JOBS);
            let begun = AtomicUsize::new(0);
            let child = |child: u32| {
                if cell.claim(round, child) {
                    for index in 0..JOBS {
                        if !cell.begin(round, child, index, 1) {
                            break;
                        }
                        begun.fetch_add(1, Ordering::Relaxed);
                    }
                }
            };
            let returned = thread::scope(|scope| {
                scope.spawn(|| child(0));
                scope.spawn(|| child(1));
                let before = cell.take_back();
                before.limit - before.begun
            });
            assert_eq!(begun.load(Ordering::Relaxed) + returned, JOBS);
        }
    }

    /// Otherwise the limit of one job would count from the start of another.
    #[test]
    fn a_job_never_seems_to_have_begun_when_one_before_it_did() {
        let cell = cell();
        let ends = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                while ends.load(Ordering::Relaxed) == 0 {
                    let claim = cell.read();
                    let since = cell.since_ns();
                    let least = u64::from(claim.sequence) * 1_000 + claim.begun as u64;
                    assert!(claim.begun == 0 || since >= least, "{since} {claim:?}");
                }
            });
            for sequence in 0..40_000 {
                cell.offer(sequence, MAX_PACKET_JOBS);
                cell.claim(sequence, 0);
                for index in 0..MAX_PACKET_JOBS {
                    let now = u64::from(sequence) * 1_000 + index as u64 + 1;
                    assert!(cell.begin(sequence, 0, index, now));
                }
            }
            ends.store(1, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_ring_hands_over_every_byte_in_order_while_both_sides_run() {
        let pages = Pages::new(2, 4).unwrap();
        let mut reader = pages.fresh_ring(1);
        let (_, mut child) = open_child(&pages, 1).unwrap();
        let total: u32 = 60_000;
        thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..total {
                    while !child.push(&number.to_le_bytes()) {
                        thread::yield_now();
                    }
                }
            });
            let mut seen = Vec::new();
            while seen.len() < total as usize * 4 {
                reader.read(&pages, &mut seen).unwrap();
            }
            for (number, bytes) in (0..total).zip(seen.chunks(4)) {
                assert_eq!(bytes, number.to_le_bytes());
            }
        });
    }

    #[test]
    fn a_full_ring_refuses_and_a_wild_head_is_noticed() {
        let pages = Pages::new(1, 1).unwrap();
        let mut reader = pages.fresh_ring(0);
        let (_, mut child) = open_child(&pages, 0).unwrap();
        assert!(child.push(&vec![1; RING_BYTES]));
        assert!(!child.push(&[1]));
        let mut out = Vec::new();
        reader.read(&pages, &mut out).unwrap();
        assert_eq!(out.len(), RING_BYTES);
        assert!(child.push(&[1]));
        child
            .own
            .at::<CacheLine>(0)
            .0
            .store(u64::MAX, Ordering::Release);
        assert_eq!(reader.read(&pages, &mut out), Err(Damaged));
    }

    #[test]
    pub(crate) fn a_fault_is_of_the_child_s_own_packets_or_of_none() {
        let pages = Pages::new(2, 4).unwrap();
        let _ring = pages.fresh_ring(1);
        let (claims, ring) = open_child(&pages, 1).unwrap();
        // SAFETY: the ring is dropped at the end.
        let fault = unsafe { ring.fault() };
        assert_eq!(pages.fault(1), None);
        pages.claim(2).offer(7, 1);
        assert!(claims.get(2).unwrap().claim(7, 1));
        for (word, expected) in [(3, Some(2)), (2, None), (5, None), (u64::MAX, None)] {
            fault.store(word, Ordering::Relaxed);
            assert_eq!(pages.fault(1), expected, "{word}");
        }
        fault.store(3, Ordering::Relaxed);
        assert_eq!(pages.fault(0), None, "another child's");
        pages.fresh_ring(1);
        assert_eq!(pages.fault(1), None, "it is a new child's");
    }

    #[test]
    pub(crate) fn a_child_is_closed_alone_and_a_new_one_of_its_number_is_not() {
        let pages = Pages::new(2, 4).unwrap();
        let (one, _ring) = open_child(&pages, 0).unwrap();
        let (other, _other_ring) = open_child(&pages, 1).unwrap();
        pages.close(1);
        assert!(!one.is_closing() && other.is_closing());
        pages.fresh_ring(1);
        assert!(!other.is_closing());
    }

    #[test]
    fn a_child_refuses_pages_that_are_none() {
        let file = anonymous_file("nothing").unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        assert!(open_child(&file, 0).is_err());
        let pages = Pages::new(1, 1).unwrap();
        assert!(open_child(&pages, 1).is_err(), "no such child");
    }
}
