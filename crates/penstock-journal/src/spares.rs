//! Files that wait to become segments, and so the room that is left when the disk is full.
//!
//! A segment is as large as it will ever be before anything is written to it, so that no batch meets a
//! full disk half-way. A few spares are kept ahead, once a journal is used at all: when no further
//! one can be prepared, they are what is left, and [`Space`] says who must stop to save them. The
//! first ones are small, and each roll doubles the size of those to come: a journal that is hardly
//! used should cost little disk.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_message::Space;

use crate::format::{FIRST_BATCH, segment_name};
use crate::journal::JournalOptions;
use crate::reserve;
use crate::storage::{Storage, StoredFile};

/// Smallest size of a spare: the longest part of a record, with all the headers around it.
const MIN_BYTES: u64 = 2 << 20;
/// Bytes of a segment that are used before spares are prepared.
const HARDLY_USED_BYTES: u64 = 64 << 10;
/// The bytes that are written at a time to fill a file.
const FILL_BYTES: u64 = 1 << 20;

/// Levels of [`Space`] by the number of reserves that are used up: each one more stops one more kind of work, so that
/// work which frees space can go on longest. Reclaiming never stops.
const LEVELS: [Space; 4] = [
    Space::Plenty,
    Space::NoPublishes,
    Space::NoLeases,
    Space::NoSettlements,
];

/// Whether there is no space, or no more is allowed: what may change at any moment.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

/// The spares of a journal; another thread prepares them ([`Self::wanted`], [`Self::prepare`]), so that a
/// roll costs the writer a rename and not the filling of a file.
pub struct Spares<S: Storage> {
    storage: S,
    shared: Arc<SharedSpares>,
}

/// State that the threads of the core, the writer and the preparation share.
#[derive(Debug, Default)]
pub(crate) struct SharedSpares {
    state: Mutex<SpareState>,
    /// Repeats what follows from the state, to be asked without waiting.
    space: AtomicU8,
    ready: AtomicU64,
    largest_batch: AtomicU64,
    /// The segment that is written to, and its file's length.
    active: AtomicU64,
    active_bytes: AtomicU64,
    is_used: AtomicBool,
}

#[derive(Debug, Default)]
struct SpareState {
    ready: VecDeque<ReadySpare>,
    /// How many are kept.
    kept_count: usize,
    /// The size of the next one.
    next_bytes: u64,
    min_bytes: u64,
    max_bytes: u64,
    /// There was no space for one more, or for a batch, and what is to be kept is not all there again yet.
    is_full: bool,
    /// The size of the file that is removed to make room, and whether it is there. 0: none is kept.
    reserve_bytes: u64,
    has_reserve: bool,
    /// The part of the disk that is left free.
    margin_bytes: u64,
    /// Numbers the names of fresh ones.
    fresh: u64,
}

#[derive(Clone, Debug)]
struct ReadySpare {
    name: String,
    bytes: u64,
    /// This process knows that all of it is on disk.
    is_synced: bool,
}

/// A file that was removed to make room.
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

    /// Size that fits into any next spare. Never falls, so that a batch that was closed fits later.
    fn smallest_bytes(&self) -> u64 {
        let ready = self.ready.iter().map(|spare| spare.bytes);
        ready.min().unwrap_or(self.next_bytes)
    }

    fn space(&self) -> Space {
        // Without a reserve, or while a batch found no room, new work is refused though no spare is missing.
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

    /// Not before all is there: or new work would be let in and thrown out in turns.
    fn recheck_full(&mut self) {
        self.is_full &= self.wants_reserve() || self.ready.len() < self.kept_count;
    }

    /// How much must be free for all that is to be kept and is not there.
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

    /// How much of what is free is spoken for.
    pub fn reserved_bytes(&self) -> u64 {
        let state = self.lock();
        state.missing_bytes().max(state.margin_bytes)
    }

    pub fn ready(&self) -> u64 {
        self.ready.load(Ordering::Relaxed)
    }

    /// The longest batch that fits into whatever spare comes next.
    pub fn largest_batch(&self) -> u64 {
        self.largest_batch.load(Ordering::Relaxed)
    }

    /// The length of this segment's file, if it is the one that is written to.
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
        // Whoever panicked meanwhile has not left the list half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut SpareState) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        self.publish(&state);
        result
    }
}

/// A spare on its way to become a segment.
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

    /// Takes over the spares that an earlier process left. It may have died of a failed sync: then a spare
    /// looks longer than the disk has it, and no later sync mends that, for its pages count as clean. So
    /// each is filled again before it is used. `largest_segment`: spares must be as large,
    /// or what is live in one would not fit into them when it is carried forward.
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
                // Known before anything is taken in: what is left may be needed for what waits.
                state.is_full =
                    reserve::check_free(&spares.storage, state.missing_bytes()).is_err();
            }
            Ok::<_, io::Error>(())
        })?;
        Ok(spares)
    }

    /// Whether something should be prepared: there is not as much as is to be kept, and the journal is
    /// in use. While the disk is full this stays so: try again every now and then.
    pub fn wanted(&self) -> bool {
        let is_used = self.shared.is_used.load(Ordering::Relaxed);
        let state = self.shared.lock();
        let is_short = state.wants_reserve() || state.ready.len() < state.kept_count;
        state.is_full || is_used && is_short
    }

    /// Who must stop because the disk is full.
    pub fn space(&self) -> Space {
        self.shared.space()
    }

    /// Fills a new spare with zeros and syncs it, which takes as long as the disk takes for a whole
    /// segment: call it from a thread that may wait, when [`Self::wanted`]. Before the spares comes the
    /// reserve, where one is kept. An error leaves none; that the disk is full is told by
    /// [`Self::space`], too.
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
                // It was only to see whether there is room again.
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

    /// A batch found no room, although its place is in the file already: what that needs is the file system's
    /// secret. New work is refused from here on, and the reserve is given up, then spares; returns whether
    /// that made room.
    pub fn ran_out(&self) -> bool {
        let spent = self.shared.change(|state| {
            state.is_full = true;
            match std::mem::take(&mut state.has_reserve) {
                true => Some(Spent::Reserve),
                // The last one is for the segment that comes next.
                false if state.reserve_bytes > 0 && state.ready.len() > 1 => {
                    state.ready.pop_back().map(Spent::Spare)
                }
                false => None,
            }
        });
        // What can't be removed makes no room, and is found by the next opening.
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

    /// A new file of so many zeros, not synced.
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
                // What was written of it is not to be kept from those who need it; if it can't be
                // removed, the next opening does.
                let _removed = self.storage.remove(&name);
                Err(error)
            }
        }
    }

    /// Returns a spare that holds at least `needed` bytes. If none is ready, the caller waits while one is made; also
    /// while spares are missing that the disk may have no space for. Learning of a full disk only when most
    /// reserves are gone would stop new work too late: it would have filled the rest.
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

    /// A spare has become a segment: the next ones may be larger.
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
                // A new name may need a block; to take one away always succeeds, and makes room.
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

    /// The active segment is written up to here.
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

/// Writes zeros.
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
