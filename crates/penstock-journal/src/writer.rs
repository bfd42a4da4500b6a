//! Carries batches out: write, sync, roll to a new segment, drop an old one. Owned by one thread,
//! which does nothing else.
//!
//! The order of each step is the crash argument:
//!
//! - *Roll.* The full segment is synced; the next one's header is written into a spare and synced;
//!   the spare is renamed; the directory is synced; only then comes the first batch. So a segment
//!   that has a successor is whole, and a file with a segment's name has a good header. Whoever
//!   finds either otherwise has found damage.
//! - *Drop.* The batch whose header no longer counts the old segment is synced before the file is
//!   renamed to a spare, and the directory is synced before the next one goes.
//! - *Ghosts.* A spare is full of old batches. They carry the number of the segment they were
//!   written for, and no number is used twice, so they are never taken for new ones.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crc32c::crc32c;

use crate::format::{
    BatchHeader, FIRST_BATCH, FORMAT_VERSION, KNOWN_FEATURES, MAGIC, Reserved, SegmentHeader,
    batch_tag, segment_name,
};
use crate::journal::{Batch, JournalOptions};
use crate::reader::Reader;
use crate::storage::{Storage, StoredFile};

/// Why nothing can be written. Final for this process: after a failed write or sync the operating
/// system may show data that the disk does not have, so only a new start, which reads what is
/// proven and writes the rest anew, can tell what was kept.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("could not {action} {file}: {source}; what was not confirmed may be lost")]
    Io {
        action: &'static str,
        file: String,
        source: io::Error,
    },
    #[error("the journal accepts nothing since it {0}")]
    AlreadyFailed(String),
}

/// The one hand that writes to a journal; see [`crate::Journal`] for when to call what.
pub struct Writer<S: Storage> {
    storage: S,
    spares: Spares<S>,
    options: JournalOptions,
    active: ActiveSegment<S::File>,
    chain: Chain,
    /// The last batch that is synced.
    durable: u64,
    drops: Vec<u64>,
    /// Told to readers before a file is given away.
    dropped_through: Arc<AtomicU64>,
    failure: Option<String>,
    _lock: S::Lock,
}

pub(crate) struct ActiveSegment<F> {
    pub file: F,
    pub name: String,
    pub number: u64,
    /// Up to here the file holds zeros or old batches, which are quick to overwrite.
    pub filled: u64,
}

/// What ties each batch to the one before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    pub journal_id: [u8; 16],
    /// Number and header checksum of the last batch.
    pub sequence: u64,
    pub previous: u32,
}

impl Chain {
    /// The header of the next batch. The watermark and the link to the batch before are filled in
    /// here, at the moment of writing, and not when the batch was built: only so does the
    /// watermark name every batch that a confirm may rest on.
    pub fn link(&mut self, batch: &Batch, durable_through: u64) -> [u8; BatchHeader::BYTES] {
        assert_eq!(batch.sequence, self.sequence + 1, "a batch is out of order");
        let mut header = BatchHeader {
            tag: batch_tag(self.journal_id),
            length: batch.body.len() as u32,
            segment: batch.segment,
            sequence: batch.sequence,
            durable_through,
            first_position: batch.first_position,
            epoch: batch.epoch,
            older_segments: batch.older_segments,
            count: batch.count,
            previous: self.previous,
            body: crc32c(&batch.body),
            checksum: 0,
        };
        let bytes = header.encode();
        self.sequence = batch.sequence;
        self.previous = header.checksum;
        bytes
    }
}

/// What a new segment's header says, but for what follows from the [`Chain`].
pub(crate) struct NewSegment {
    pub number: u64,
    pub epoch: u32,
    pub base_position: u64,
    pub older_segments: u32,
    pub file_bytes: u64,
    pub durable_through: u64,
}

impl NewSegment {
    pub fn header(&self, chain: &Chain) -> [u8; SegmentHeader::BYTES] {
        let header = SegmentHeader {
            magic: MAGIC,
            format_version: FORMAT_VERSION,
            minimum_reader: FORMAT_VERSION,
            features: KNOWN_FEATURES,
            journal_id: chain.journal_id,
            segment: self.number,
            base_position: self.base_position,
            base_sequence: chain.sequence + 1,
            durable_through: self.durable_through,
            file_bytes: self.file_bytes,
            epoch: self.epoch,
            previous: chain.previous,
            older_segments: self.older_segments,
            reserved: Reserved,
            checksum: 0,
        };
        header.encode()
    }
}

impl<S: Storage> Writer<S> {
    pub(crate) fn resume(
        storage: S,
        lock: S::Lock,
        options: JournalOptions,
        active: ActiveSegment<S::File>,
        chain: Chain,
        spares: Spares<S>,
    ) -> Self {
        let durable = chain.sequence;
        Self {
            storage,
            spares,
            options,
            active,
            chain,
            durable,
            drops: Vec::new(),
            dropped_through: Arc::default(),
            failure: None,
            _lock: lock,
        }
    }

    /// Writes one batch, with one call; it is safe from a crash of this process, but not of the
    /// machine.
    pub fn write(&mut self, batch: &Batch) -> Result<(), WriteError> {
        self.unless_failed(|writer| writer.write_batch(batch))
    }

    /// Makes all that was written safe from everything; then drops the segments that batches said
    /// to drop.
    pub fn sync(&mut self) -> Result<(), WriteError> {
        self.unless_failed(|writer| {
            writer.sync_active()?;
            for segment in std::mem::take(&mut writer.drops) {
                writer.drop_segment(segment)?;
            }
            Ok(())
        })
    }

    /// A handle with which another thread prepares spare segments.
    pub fn spares(&self) -> Spares<S> {
        self.spares.clone()
    }

    /// One that reads records back, on a thread of its own.
    pub fn reader(&self) -> Reader<S> {
        let dropped_through = self.dropped_through.clone();
        Reader::new(self.storage.clone(), self.chain.journal_id, dropped_through)
    }

    fn unless_failed(
        &mut self,
        step: impl FnOnce(&mut Self) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        if let Some(failure) = &self.failure {
            return Err(WriteError::AlreadyFailed(failure.clone()));
        }
        step(self).inspect_err(|error| {
            if let WriteError::Io {
                action,
                file,
                source,
            } = error
            {
                self.failure = Some(format!("could not {action} {file}: {source}"));
            }
        })
    }

    fn write_batch(&mut self, batch: &Batch) -> Result<(), WriteError> {
        if batch.segment != self.active.number {
            self.roll(batch)?;
        }
        let header = self.chain.link(batch, self.durable);
        let end = batch.offset + batch.bytes() as u64;
        let zeros = vec![0; self.zeros_after(end)];
        let active = &mut self.active;
        let written = active
            .file
            .write_at(batch.offset, &[&header, &batch.body, &zeros]);
        written.map_err(failed_to("write to", &active.name))?;
        active.filled = active.filled.max(end + zeros.len() as u64);
        self.spares.used(end, self.options.segment_bytes);
        self.drops.extend_from_slice(&batch.drops);
        Ok(())
    }

    /// How far to extend the file behind a batch that ends at `end`.
    fn zeros_after(&self, end: u64) -> usize {
        if end <= self.active.filled {
            return 0;
        }
        let extended = end.next_multiple_of(self.options.extend_bytes);
        extended.min(self.options.segment_bytes).saturating_sub(end) as usize
    }

    fn sync_active(&mut self) -> Result<(), WriteError> {
        if self.durable < self.chain.sequence {
            self.active
                .file
                .sync()
                .map_err(failed_to("sync", &self.active.name))?;
            self.durable = self.chain.sequence;
        }
        Ok(())
    }

    fn roll(&mut self, batch: &Batch) -> Result<(), WriteError> {
        self.sync_active()?;
        let name = segment_name(batch.segment);
        let spare = self.spares.take().map_err(failed_to("prepare", &name))?;
        let mut active = ActiveSegment {
            filled: spare.file.size().map_err(failed_to("prepare", &name))?,
            file: spare.file,
            number: batch.segment,
            name,
        };
        let file_bytes = active.filled.max(FIRST_BATCH);
        let header = NewSegment {
            number: batch.segment,
            epoch: batch.epoch,
            base_position: batch.base_position,
            // The header is on disk before the batch: what the batch drops still counts.
            older_segments: batch.older_segments + batch.drops.len() as u32,
            file_bytes,
            durable_through: self.durable,
        };
        let header = header.header(&self.chain);
        let written = active
            .file
            .write_at(0, &[&header])
            .and_then(|()| active.file.sync());
        written.map_err(failed_to("write to", &active.name))?;
        active.filled = file_bytes;
        let renamed = self.storage.rename(&spare.name, &active.name);
        let renamed = renamed.and_then(|()| self.storage.sync_directory());
        renamed.map_err(failed_to("name", &active.name))?;
        self.active = active;
        Ok(())
    }

    fn drop_segment(&mut self, number: u64) -> Result<(), WriteError> {
        let name = segment_name(number);
        self.dropped_through.fetch_max(number, Ordering::Release);
        let dropped = self.spares.keep(&name, number);
        let dropped = dropped.and_then(|()| self.storage.sync_directory());
        dropped.map_err(failed_to("drop", &name))
    }
}

pub(crate) fn failed_to(action: &'static str, file: &str) -> impl FnOnce(io::Error) -> WriteError {
    let file = file.to_string();
    move |source| WriteError::Io {
        action,
        file,
        source,
    }
}

/// Files that wait to become segments: dropped segments, and zeros prepared ahead, so that a roll
/// costs the writer a rename and not the filling of a file.
pub struct Spares<S: Storage> {
    storage: S,
    shared: Arc<Shared>,
}

struct Shared {
    segment_bytes: u64,
    at_most: usize,
    names: Mutex<Vec<String>>,
    /// Numbers the names of fresh spares.
    fresh: AtomicU64,
    /// The active segment is more than half full.
    roll_is_near: AtomicBool,
}

struct Spare<F> {
    name: String,
    file: F,
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

    /// Takes over the spares that an earlier process left.
    pub(crate) fn resume(
        storage: S,
        options: &JournalOptions,
        mut left: Vec<String>,
    ) -> io::Result<Self> {
        for name in left.split_off(left.len().min(options.spares)) {
            storage.remove(&name)?;
        }
        let fresh = |name: &String| {
            name.strip_prefix("fresh-")?
                .strip_suffix(SPARE)?
                .parse()
                .ok()
        };
        let last_fresh: u64 = left.iter().filter_map(fresh).max().unwrap_or(0);
        let shared = Shared {
            segment_bytes: options.segment_bytes,
            at_most: options.spares,
            names: Mutex::new(left),
            fresh: AtomicU64::new(last_fresh),
            roll_is_near: AtomicBool::new(false),
        };
        Ok(Self {
            storage,
            shared: Arc::new(shared),
        })
    }

    /// Whether the writer will soon want a spare that is not there. Not so for a journal that has
    /// hardly been used: it should not cost two segments of disk.
    pub fn wanted(&self) -> bool {
        self.shared.roll_is_near.load(Ordering::Relaxed) && self.names().is_empty()
    }

    /// Fills a new spare with zeros and syncs it, which takes as long as the disk takes for a whole
    /// segment: call it from a thread that may wait, when [`Self::wanted`]. When it fails there is
    /// no spare, which the writer can do without.
    pub fn prepare(&self) -> io::Result<()> {
        let spare = self.create()?;
        let filled = self.fill(&spare.file);
        match filled {
            Ok(()) => self.names().push(spare.name),
            Err(_) => self.storage.remove(&spare.name)?,
        }
        filled
    }

    fn fill(&self, file: &S::File) -> io::Result<()> {
        let zeros = vec![0; self.shared.segment_bytes.min(1 << 20) as usize];
        let mut filled = 0;
        while filled < self.shared.segment_bytes {
            let piece = zeros
                .len()
                .min((self.shared.segment_bytes - filled) as usize);
            file.write_at(filled, &[&zeros[..piece]])?;
            filled += piece as u64;
        }
        file.sync()
    }

    fn create(&self) -> io::Result<Spare<S::File>> {
        let number = self.shared.fresh.fetch_add(1, Ordering::Relaxed) + 1;
        let name = format!("fresh-{number}{SPARE}");
        Ok(Spare {
            file: self.storage.create(&name)?,
            name,
        })
    }

    fn take(&self) -> io::Result<Spare<S::File>> {
        self.shared.roll_is_near.store(false, Ordering::Relaxed);
        let name = self.names().pop();
        match name {
            Some(name) => Ok(Spare {
                file: self.storage.open(&name)?,
                name,
            }),
            None => self.create(),
        }
    }

    /// Makes a dropped segment a spare, or removes it when there are enough.
    fn keep(&self, segment: &str, number: u64) -> io::Result<()> {
        let mut names = self.names();
        if names.len() >= self.shared.at_most
            || self.storage.open(segment)?.size()? > self.shared.segment_bytes
        {
            return self.storage.remove(segment);
        }
        let name = format!("{number:016}{SPARE}");
        self.storage.rename(segment, &name)?;
        names.push(name);
        Ok(())
    }

    pub(crate) fn drop_leftover(&self, number: u64) -> io::Result<()> {
        self.keep(&segment_name(number), number)?;
        self.storage.sync_directory()
    }

    fn used(&self, end: u64, segment_bytes: u64) {
        if end > segment_bytes / 2 {
            self.shared.roll_is_near.store(true, Ordering::Relaxed);
        }
    }

    fn names(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        // Whoever panicked meanwhile has not left the list half changed.
        self.shared
            .names
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
