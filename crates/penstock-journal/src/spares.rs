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

use crate::format::{FIRST_BATCH, segment_name};
use crate::journal::JournalOptions;
use crate::storage::{Storage, StoredFile};

/// What a spare holds at least: the longest part of a record, with all the headers around it.
const LEAST_BYTES: u64 = 2 << 20;
/// So much of a segment is used before spares are prepared.
const HARDLY_USED_BYTES: u64 = 64 << 10;
/// What is written at a time to fill a file.
const FILL_BYTES: u64 = 1 << 20;

/// Who must stop because the disk is full. Each level comes when one more of the reserves is used up,
/// so that what frees space can go on longest. Reclaiming is never to be stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Space {
    #[default]
    Plenty,
    /// New work is refused.
    NoPublishes,
    /// ... and nothing more is handed out.
    NoLeases,
    /// ... and nothing is settled: what is left is for reclaiming.
    NoSettlements,
}

impl Space {
    const ALL: [Self; 4] = [
        Self::Plenty,
        Self::NoPublishes,
        Self::NoLeases,
        Self::NoSettlements,
    ];
}

/// Whether there is no space, or no more is allowed: what may change at any moment.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

/// The spares of a journal; another thread prepares them ([`Self::wanted`], [`Self::prepare`]), so that a
/// roll costs the writer a rename and not the filling of a file.
pub struct Spares<S: Storage> {
    storage: S,
    shared: Arc<Shared>,
}

/// What the core's thread, the writer's and the preparing one know of each other.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
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
struct State {
    ready: VecDeque<Ready>,
    /// How many are kept.
    at_most: usize,
    /// The size of the next one.
    next_bytes: u64,
    least_bytes: u64,
    most_bytes: u64,
    /// There was no space for one more, and there are not enough again yet.
    is_full: bool,
    /// Numbers the names of fresh ones.
    fresh: u64,
}

#[derive(Clone, Debug)]
struct Ready {
    name: String,
    bytes: u64,
    /// This process knows that all of it is on disk.
    is_safe: bool,
}

impl State {
    fn new(options: &JournalOptions) -> Self {
        let least_bytes = LEAST_BYTES.min(options.segment_bytes);
        Self {
            at_most: options.spares,
            next_bytes: least_bytes,
            least_bytes,
            most_bytes: options.segment_bytes,
            ..Self::default()
        }
    }

    /// What fits into whatever spare comes next. Never falls, so that a batch that was closed fits later.
    fn smallest_bytes(&self) -> u64 {
        let ready = self.ready.iter().map(|spare| spare.bytes);
        ready.min().unwrap_or(self.next_bytes)
    }

    fn space(&self) -> Space {
        let missing = self.at_most.saturating_sub(self.ready.len());
        match self.is_full {
            true => Space::ALL[missing.min(Space::ALL.len() - 1)],
            false => Space::Plenty,
        }
    }

    fn add(&mut self, spare: Ready) {
        self.ready.push_back(spare);
        // Not before there are enough: or new work would be let in and thrown out in turns.
        self.is_full &= self.ready.len() < self.at_most;
    }
}

impl Shared {
    pub fn new(options: &JournalOptions) -> Arc<Self> {
        let shared = Self::default();
        *shared.lock() = State::new(options);
        shared.publish(&shared.lock());
        Arc::new(shared)
    }

    pub fn space(&self) -> Space {
        Space::ALL[usize::from(self.space.load(Ordering::Acquire))]
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

    fn publish(&self, state: &State) {
        self.space.store(state.space() as u8, Ordering::Release);
        self.ready
            .store(state.ready.len() as u64, Ordering::Relaxed);
        let room = state.smallest_bytes() - FIRST_BATCH.min(state.smallest_bytes());
        self.largest_batch.store(room, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever panicked meanwhile has not left the list half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
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
        shared: Arc<Shared>,
        left: Vec<String>,
        largest_segment: u64,
    ) -> io::Result<Self> {
        let spares = Self { storage, shared };
        spares.shared.change(|state| {
            let largest = largest_segment.min(state.most_bytes);
            state.next_bytes = state.next_bytes.max(largest);
            for name in left {
                let bytes = spares.storage.open(&name)?.size()?;
                state.fresh = state.fresh.max(fresh_number(&name));
                let fits = (state.least_bytes..=state.most_bytes).contains(&bytes);
                match fits && state.ready.len() < state.at_most {
                    true => state.add(Ready {
                        name,
                        bytes,
                        is_safe: false,
                    }),
                    false => spares.storage.remove(&name)?,
                }
            }
            Ok::<_, io::Error>(())
        })?;
        Ok(spares)
    }

    /// Whether a spare should be prepared: there are not as many as are to be kept, and the journal is
    /// in use. While the disk is full this stays so: try again every now and then.
    pub fn wanted(&self) -> bool {
        let is_used = self.shared.is_used.load(Ordering::Relaxed);
        let state = self.shared.lock();
        (is_used || state.is_full) && state.ready.len() < state.at_most
    }

    /// Who must stop because the disk is full.
    pub fn space(&self) -> Space {
        self.shared.space()
    }

    /// Fills a new spare with zeros and syncs it, which takes as long as the disk takes for a whole
    /// segment: call it from a thread that may wait, when [`Self::wanted`]. An error leaves none; that
    /// the disk is full is told by [`Self::space`], too.
    pub fn prepare(&self) -> io::Result<()> {
        let bytes = self.shared.lock().next_bytes;
        let made = self.create(bytes).and_then(|spare| {
            let synced = spare.file.sync();
            synced.inspect_err(|_| drop(self.storage.remove(&spare.name)))?;
            Ok(spare.name)
        });
        self.shared.change(|state| match made {
            Ok(name) => {
                state.add(Ready {
                    name,
                    bytes,
                    is_safe: true,
                });
                Ok(())
            }
            Err(error) => {
                state.is_full |= is_full(&error);
                Err(error)
            }
        })
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

    /// One that holds so many bytes. None is ready: one is made at once, which the caller waits for.
    pub(crate) fn take(&self, needed: u64) -> io::Result<Spare<S::File>> {
        let (ready, least) = self.shared.change(|state| {
            let fits = |spare: &Ready| spare.bytes >= needed;
            let place = state.ready.iter().position(fits);
            (
                place.and_then(|place| state.ready.remove(place)),
                state.least_bytes,
            )
        });
        if let Some(Ready {
            name,
            bytes,
            is_safe,
        }) = ready
        {
            let filled = self.storage.open(&name).and_then(|file| {
                let from = if is_safe { bytes } else { 0 };
                fill(&file, from, bytes)?;
                Ok(file)
            });
            return match filled {
                Ok(file) => Ok(Spare { name, file, bytes }),
                Err(error) => {
                    self.give_back(name, bytes);
                    Err(error)
                }
            };
        }
        let bytes = least.max(needed.next_multiple_of(FILL_BYTES));
        let most = self.shared.lock().most_bytes;
        self.create(bytes.min(most).max(needed))
            .inspect_err(|error| {
                self.shared.change(|state| state.is_full |= is_full(error));
            })
    }

    /// It could not be used, and is taken first the next time.
    pub(crate) fn give_back(&self, name: String, bytes: u64) {
        let spare = Ready {
            name,
            bytes,
            is_safe: false,
        };
        self.shared.change(|state| state.ready.push_front(spare));
    }

    /// A spare has become a segment: the next ones may be larger.
    pub(crate) fn rolled(&self) {
        self.shared.change(|state| {
            state.next_bytes = (state.next_bytes * 2).min(state.most_bytes);
        });
    }

    /// Makes a dropped segment a spare, or removes it when there are enough.
    pub(crate) fn keep(&self, segment: &str, number: u64) -> io::Result<()> {
        let bytes = self.storage.open(segment)?.size()?;
        let name = format!("{number:016}{SPARE}");
        self.shared.change(|state| {
            let fits = (state.smallest_bytes()..=state.most_bytes).contains(&bytes);
            if state.ready.len() >= state.at_most || !fits {
                return self.storage.remove(segment);
            }
            self.storage.rename(segment, &name)?;
            state.add(Ready {
                name,
                bytes,
                is_safe: true,
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
