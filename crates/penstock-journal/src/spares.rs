//! Files that are ready to become segments, and so the room left when the disk is full.
//!
//! A segment has its final size before anything is written to it, so that no batch meets a full disk half-way. A few
//! spares are kept ready once a journal is in use. When no further one can be prepared, the spares are the remaining
//! room, and [`Space`] states which work must wait to save them. The first spares are small, and each roll doubles the
//! size of the next: a journal that is hardly used should cost little disk.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_message::Space;

use crate::format::{FIRST_BATCH, segment_name};
use crate::journal::JournalOptions;
use crate::reserve;
use crate::storage::{Storage, StoredFile};

/// Smallest size of a spare: the longest part of a record with all headers around it.
const MIN_BYTES: u64 = 2 << 20;
/// Bytes of a segment that are used before spares are prepared.
const HARDLY_USED_BYTES: u64 = 64 << 10;
/// Bytes written at a time to fill a file.
const FILL_BYTES: u64 = 1 << 20;

/// Levels of [`Space`] by the number of reserves that are used up: each level stops one more kind of work, so that work
/// which frees space can continue longest. Reclaiming never stops.
const LEVELS: [Space; 4] = [
    Space::Plenty,
    Space::NoPublishes,
    Space::NoLeases,
    Space::NoSettlements,
];

/// Whether there is no space, or no more is allowed. Either may change at any time.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

/// Spares of a journal. Another thread prepares them ([`Self::wanted`], [`Self::prepare`]), so that a roll costs the
/// writer only a rename, not the filling of a file.
pub struct Spares<S: Storage> {
    storage: S,
    shared: Arc<SharedSpares>,
}

/// State shared by the threads of the core, the writer and the preparation.
#[derive(Debug, Default)]
pub(crate) struct SharedSpares {
    state: Mutex<SpareState>,
    /// Copies of values that follow from the state, readable without waiting.
    space: AtomicU8,
    ready: AtomicU64,
    largest_batch: AtomicU64,
    /// Segment in use, and the length of its file.
    active: AtomicU64,
    active_bytes: AtomicU64,
    is_used: AtomicBool,
}

#[derive(Debug, Default)]
struct SpareState {
    ready: VecDeque<ReadySpare>,
    /// Number of spares to keep.
    kept_count: usize,
    /// Size of the next spare.
    next_bytes: u64,
    min_bytes: u64,
    max_bytes: u64,
    /// Whether there was no space for a spare or a batch, and the spares are not complete again yet.
    is_full: bool,
    /// Size of the file that is removed to make room (0: there is none), and whether it exists.
    reserve_bytes: u64,
    has_reserve: bool,
    /// Disk space that is left free.
    margin_bytes: u64,
    /// Counter for the names of fresh spares.
    fresh: u64,
}

#[derive(Clone, Debug)]
struct ReadySpare {
    name: String,
    bytes: u64,
    /// Whether this process knows that all of it is on disk.
    is_synced: bool,
}

/// File that was removed to make room.
enum Spent {
    Reserve,
    Spare(ReadySpare),
}

impl SpareState {
    fn new(options: &JournalOptions) -> Self {
        let min_bytes = MIN_BYTES.min(options.segment_bytes);
        Self {
            kept_count: options.spares,
            next_bytes: min_bytes,
            min_bytes,
            max_bytes: options.segment_bytes,
            reserve_bytes: options.reserve_bytes,
            margin_bytes: options.margin_bytes,
            ..Self::default()
        }
    }

    /// Returns the size that fits into any next spare. Never falls, so that a batch that was closed fits later.
    fn smallest_bytes(&self) -> u64 {
        let ready = self.ready.iter().map(|spare| spare.bytes);
        ready.min().unwrap_or(self.next_bytes)
    }

    fn space(&self) -> Space {
        // Without a reserve, or after a batch found no room, new work is refused although no spare is missing.
        let missing = self.kept_count.saturating_sub(self.ready.len()).max(1);
        match self.is_full {
            true => LEVELS[missing.min(LEVELS.len() - 1)],
            false => Space::Plenty,
        }
    }

    fn add(&mut self, spare: ReadySpare) {
        self.ready.push_back(spare);
        self.recheck_full();
    }

    /// Ends the full state only once all spares exist again, or new work would be accepted and refused in turns.
    fn recheck_full(&mut self) {
        self.is_full &= self.wants_reserve() || self.ready.len() < self.kept_count;
    }

    /// Returns the free space needed for all missing spares and the reserve.
    fn missing_bytes(&self) -> u64 {
        let spares = self.kept_count.saturating_sub(self.ready.len()) as u64 * self.next_bytes;
        match (spares, self.wants_reserve()) {
            (0, false) => 0,
            (spares, false) => spares + self.margin_bytes,
            (spares, true) => spares + self.reserve_bytes + self.margin_bytes,
        }
    }

    fn wants_reserve(&self) -> bool {
        self.reserve_bytes > 0 && !self.has_reserve
    }
}

impl SharedSpares {
    pub fn new(options: &JournalOptions) -> Arc<Self> {
        let shared = Self::default();
        *shared.lock() = SpareState::new(options);
        shared.publish(&shared.lock());
        Arc::new(shared)
    }

    pub fn space(&self) -> Space {
        LEVELS[usize::from(self.space.load(Ordering::Acquire))]
    }

    /// Returns the part of the free space that is reserved.
    pub fn reserved_bytes(&self) -> u64 {
        let state = self.lock();
        state.missing_bytes().max(state.margin_bytes)
    }

    pub fn ready(&self) -> u64 {
        self.ready.load(Ordering::Relaxed)
    }

    /// Returns the size of the longest batch that fits into any next spare.
    pub fn largest_batch(&self) -> u64 {
        self.largest_batch.load(Ordering::Relaxed)
    }

    /// Returns the length of this segment's file, if it is the segment in use.
    pub fn bytes_of(&self, segment: u64) -> Option<u64> {
        (self.active.load(Ordering::Acquire) == segment)
            .then(|| self.active_bytes.load(Ordering::Acquire))
    }

    pub fn begin_segment(&self, segment: u64, bytes: u64) {
        self.active_bytes.store(bytes, Ordering::Release);
        self.active.store(segment, Ordering::Release);
    }

    fn publish(&self, state: &SpareState) {
        self.space.store(state.space() as u8, Ordering::Release);
        self.ready
            .store(state.ready.len() as u64, Ordering::Relaxed);
        let room = state.smallest_bytes() - FIRST_BATCH.min(state.smallest_bytes());
        self.largest_batch.store(room, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, SpareState> {
        // A thread that panicked has not left the list half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut SpareState) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        self.publish(&state);
        result
    }
}

/// Spare that is about to become a segment.
pub(crate) struct Spare<F> {
    pub name: String,
    pub file: F,
    pub bytes: u64,
}

const SPARE: &str = ".spare";

impl<S: Storage> Clone for Spares<S> {
    fn clone(&self) -> Self {
        Self {
            storage: self.storage.clone(),
            shared: self.shared.clone(),
        }
    }
}

impl<S: Storage> Spares<S> {
    pub(crate) fn is_spare(name: &str) -> bool {
        name.ends_with(SPARE)
    }

    /// Takes over the spares that an earlier process left. If that process died of a failed sync, a spare may look
    /// longer than it is on disk. No later sync repairs that, since its pages count as clean, so each spare is filled
    /// again before use. Spares must be as large as `largest_segment`, or its live records would not fit when they are
    /// carried forward.
    pub(crate) fn resume(
        storage: S,
        shared: Arc<SharedSpares>,
        left: Vec<String>,
        largest_segment: u64,
    ) -> io::Result<Self> {
        let spares = Self { storage, shared };
        spares.shared.change(|state| {
            let largest = largest_segment.min(state.max_bytes);
            state.next_bytes = state.next_bytes.max(largest);
            for name in left {
                let bytes = spares.storage.open(&name)?.size()?;
                state.fresh = state.fresh.max(fresh_number(&name));
                let fits = (state.min_bytes..=state.max_bytes).contains(&bytes);
                match fits && state.ready.len() < state.kept_count {
                    true => state.add(ReadySpare {
                        name,
                        bytes,
                        is_synced: false,
                    }),
                    false => spares.storage.remove(&name)?,
                }
            }
            if state.reserve_bytes > 0 {
                state.has_reserve = reserve::is_there(&spares.storage, state.reserve_bytes)?;
                // Checked before any new work is accepted: waiting work may need the remaining space.
                state.is_full =
                    reserve::check_free(&spares.storage, state.missing_bytes()).is_err();
            }
            Ok::<_, io::Error>(())
        })?;
        Ok(spares)
    }

    /// Whether something should be prepared: spares are missing, and the journal is in use. Stays true while the disk
    /// is full: try again at intervals.
    pub fn wanted(&self) -> bool {
        let is_used = self.shared.is_used.load(Ordering::Relaxed);
        let state = self.shared.lock();
        let is_short = state.wants_reserve() || state.ready.len() < state.kept_count;
        state.is_full || is_used && is_short
    }

    /// Returns the work that must wait because the disk is full.
    pub fn space(&self) -> Space {
        self.shared.space()
    }

    /// Fills a new spare with zeros and syncs it, which may take long: call it from a thread that may wait, when
    /// [`Self::wanted`]. The reserve, if there is one, comes before the spares. Leaves no file after an error;
    /// [`Self::space`] also reports a full disk.
    pub fn prepare(&self) -> io::Result<()> {
        let prepared = self.prepare_next();
        if let Err(error) = &prepared {
            self.shared.change(|state| state.is_full |= is_full(error));
        }
        prepared
    }

    fn prepare_next(&self) -> io::Result<()> {
        let (bytes, reserve_bytes, wants_reserve, margin_bytes) = {
            let state = self.shared.lock();
            let wants_reserve = state.wants_reserve();
            (
                state.next_bytes,
                state.reserve_bytes,
                wants_reserve,
                state.margin_bytes,
            )
        };
        if reserve_bytes > 0 {
            let filled = if wants_reserve { reserve_bytes } else { bytes };
            reserve::check_free(&self.storage, filled + margin_bytes)?;
        }
        if wants_reserve {
            reserve::make(&self.storage, reserve_bytes)?;
            self.shared.change(|state| {
                state.has_reserve = true;
                state.recheck_full();
            });
            return Ok(());
        }
        let spare = self.create(bytes)?;
        let synced = spare.file.sync();
        synced.inspect_err(|_| drop(self.storage.remove(&spare.name)))?;
        self.shared.change(|state| {
            if state.ready.len() >= state.kept_count {
                // The file only tested whether there is room again.
                self.storage.remove(&spare.name)?;
                state.recheck_full();
                return Ok(());
            }
            state.add(ReadySpare {
                name: spare.name,
                bytes,
                is_synced: true,
            });
            Ok(())
        })
    }

    /// Handles a batch that found no room although its file already has the length. Only the file system knows what it
    /// needs. From now on new work is refused, and first the reserve, then spares are removed. Returns whether that
    /// made room.
    pub fn ran_out(&self) -> bool {
        let spent = self.shared.change(|state| {
            state.is_full = true;
            match std::mem::take(&mut state.has_reserve) {
                true => Some(Spent::Reserve),
                // The last spare is for the next segment.
                false if state.reserve_bytes > 0 && state.ready.len() > 1 => {
                    state.ready.pop_back().map(Spent::Spare)
                }
                false => None,
            }
        });
        // A file that can't be removed makes no room; the next opening finds it.
        let made_room = match spent {
            None => Ok(false),
            Some(Spent::Reserve) => reserve::give_up_reserve(&self.storage),
            Some(Spent::Spare(spare)) => self
                .storage
                .remove(&spare.name)
                .and_then(|()| self.storage.sync_directory())
                .map(|()| true),
        };
        made_room.unwrap_or(false)
    }

    /// Creates a file of this many zeros, not synced.
    fn create(&self, bytes: u64) -> io::Result<Spare<S::File>> {
        let number = self.shared.change(|state| {
            state.fresh += 1;
            state.fresh
        });
        let name = format!("fresh-{number}{SPARE}");
        let file = self.storage.create(&name)?;
        match fill(&file, 0, bytes) {
            Ok(()) => Ok(Spare { name, file, bytes }),
            Err(error) => {
                // Don't keep the written part from others that need the space. If it can't be removed, the next opening
                // does so.
                let _removed = self.storage.remove(&name);
                Err(error)
            }
        }
    }

    /// Returns a spare that holds at least `needed` bytes. If none is ready, makes one while the caller waits; also
    /// while spares are missing and may not fit on the disk. To notice a full disk only after most reserves are used
    /// would stop new work too late: it would have filled the rest.
    pub(crate) fn take(&self, needed: u64) -> io::Result<Spare<S::File>> {
        let unknown = {
            let state = self.shared.lock();
            let some = 1..state.kept_count;
            (!state.is_full && some.contains(&state.ready.len())).then_some(state.next_bytes)
        };
        if let Some(bytes) = unknown {
            match self.create(bytes.max(needed)) {
                Err(error) if is_full(&error) => self.shared.change(|state| state.is_full = true),
                created => return created,
            }
        }
        let (ready, least) = self.shared.change(|state| {
            let fits = |spare: &ReadySpare| spare.bytes >= needed;
            let place = state.ready.iter().position(fits);
            (
                place.and_then(|place| state.ready.remove(place)),
                state.min_bytes,
            )
        });
        if let Some(ReadySpare {
            name,
            bytes,
            is_synced,
        }) = ready
        {
            let filled = self.storage.open(&name).and_then(|file| {
                let from = if is_synced { bytes } else { 0 };
                fill(&file, from, bytes)?;
                Ok(file)
            });
            return match filled {
                Ok(file) => Ok(Spare { name, file, bytes }),
                Err(error) => {
                    self.put_back(name, bytes);
                    Err(error)
                }
            };
        }
        let bytes = least.max(needed.next_multiple_of(FILL_BYTES));
        let most = self.shared.lock().max_bytes;
        self.create(bytes.min(most).max(needed))
            .inspect_err(|error| {
                self.shared.change(|state| state.is_full |= is_full(error));
            })
    }

    /// Puts back a spare that could not be used. It is taken first the next time.
    pub(crate) fn put_back(&self, name: String, bytes: u64) {
        let spare = ReadySpare {
            name,
            bytes,
            is_synced: false,
        };
        self.shared.change(|state| state.ready.push_front(spare));
    }

    /// Notes that a spare has become a segment: the next ones may be larger.
    pub(crate) fn rolled(&self) {
        self.shared.change(|state| {
            state.next_bytes = (state.next_bytes * 2).min(state.max_bytes);
        });
    }

    /// Makes a dropped segment a spare, or removes it when there are enough.
    pub(crate) fn keep(&self, segment: &str, number: u64) -> io::Result<()> {
        let bytes = self.storage.open(segment)?.size()?;
        let name = format!("{number:016}{SPARE}");
        self.shared.change(|state| {
            let fits = (state.smallest_bytes()..=state.max_bytes).contains(&bytes);
            if state.ready.len() >= state.kept_count || !fits {
                return self.storage.remove(segment);
            }
            match self.storage.rename(segment, &name) {
                // A new name may need a block. Removing a file always succeeds, and makes room.
                Err(error) if is_full(&error) => return self.storage.remove(segment),
                renamed => renamed?,
            }
            state.add(ReadySpare {
                name,
                bytes,
                is_synced: true,
            });
            Ok(())
        })
    }

    pub(crate) fn drop_leftover(&self, number: u64) -> io::Result<()> {
        self.keep(&segment_name(number), number)?;
        self.storage.sync_directory()
    }

    /// Notes that the segment in use is written up to this offset.
    pub(crate) fn used(&self, end: u64) {
        if end
            > FIRST_BATCH
                + HARDLY_USED_BYTES.min(self.shared.active_bytes.load(Ordering::Relaxed) / 4)
        {
            self.shared.is_used.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn begin_segment(&self, segment: u64, bytes: u64) {
        self.shared.begin_segment(segment, bytes);
    }
}

fn fresh_number(name: &str) -> u64 {
    let number = |name: &str| {
        let number = name.strip_prefix("fresh-")?.strip_suffix(SPARE)?;
        number.parse().ok()
    };
    number(name).unwrap_or(0)
}

/// Fills a range of a file with zeros.
pub(crate) fn fill<F: StoredFile>(file: &F, begin: u64, end: u64) -> io::Result<()> {
    let zeros = vec![0; FILL_BYTES.min(end.saturating_sub(begin)) as usize];
    let mut filled = begin;
    while filled < end {
        let piece = FILL_BYTES.min(end - filled) as usize;
        file.write_at(filled, &[&zeros[..piece]])?;
        filled += piece as u64;
    }
    Ok(())
}
