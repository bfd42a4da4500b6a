//! Carries batches out: write, sync, roll to a new segment, drop an old one. Owned by a thread that does nothing else.
//!
//! The order of each step is the crash argument:
//!
//! - *Roll.* The full segment is synced; the next one's header is written into a spare and synced; the spare is
//!   renamed; the directory is synced; the segment is named as the newest; only then the first batch is written. So a
//!   segment with a successor is whole, a file with a segment's name has a good header, and the segment named as the
//!   newest exists. Any other state is damage.
//! - *Drop.* The batch whose header no longer counts the old segment is synced before the file is renamed to a spare,
//!   and the directory is synced before the next segment is dropped.
//! - *Ghosts.* A spare is full of old batches. They carry the number of the segment they were written for, and no
//!   number is used twice, so they are never taken for new ones.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crc32c::crc32c;
use penstock_faults::planted;

use crate::format::{
    BatchHeader, Format, MAGIC, ReservedBytes, SegmentHeader, batch_tag, segment_name,
};
use crate::journal::Batch;
use crate::newest::{NEWEST, Newest};
use crate::reader::JournalReader;
use crate::spares::{Spares, is_full};
use crate::storage::{Storage, StoredFile};

/// Reason why nothing was written. Every error but a full disk is final for this process: after a failed write or sync
/// the operating system may show data that the disk does not have. Only a new start, which reads the proven records and
/// rewrites the rest, can tell what was kept.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The batch is not written: try the same one again when there may be space.
    #[error(
        "the disk is full: could not {action} {file}: {source}; nothing is lost, and writing continues once there is space"
    )]
    DiskFull {
        action: &'static str,
        file: String,
        source: io::Error,
    },
    #[error("could not {action} {file}: {source}; unconfirmed records may be lost")]
    Io {
        action: &'static str,
        file: String,
        source: io::Error,
    },
    #[error("the journal accepts nothing since it {0}")]
    AlreadyFailed(String),
}

/// Sole writer of a journal; see [`crate::Journal`] for the order of calls.
pub struct Writer<S: Storage> {
    storage: S,
    spares: Spares<S>,
    active: ActiveSegment<S::File>,
    newest: Newest<S::File>,
    /// Format of the earlier segments: a newer one begins with an upgrade only.
    format: Format,
    chain: Chain,
    /// Number of the last synced batch.
    durable: u64,
    drops: Vec<u64>,
    /// Number up to which segments were dropped. Readers see it before a file is removed or renamed.
    dropped_through: Arc<AtomicU64>,
    failure: Option<String>,
    lock: S::Lock,
}

pub(crate) struct ActiveSegment<F> {
    pub file: F,
    pub name: String,
    pub number: u64,
}

/// Link from each batch to the previous one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    pub journal_id: [u8; 16],
    /// Number and header checksum of the last batch.
    pub sequence: u64,
    pub previous: u32,
}

impl Chain {
    /// Returns the header of the next batch. The watermark and the link to the previous batch are set here, at the
    /// moment of writing, not when the batch was built. Otherwise the watermark would not name every batch on which a
    /// confirm may rely.
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

/// Fields of a new segment's header that do not follow from the [`Chain`].
pub(crate) struct NewSegment {
    pub format: Format,
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
            format_version: self.format.version,
            minimum_reader: self.format.version,
            features: self.format.features,
            journal_id: chain.journal_id,
            segment: self.number,
            base_position: self.base_position,
            base_sequence: chain.sequence + 1,
            durable_through: self.durable_through,
            file_bytes: self.file_bytes,
            epoch: self.epoch,
            previous: chain.previous,
            older_segments: self.older_segments,
            reserved: ReservedBytes,
            checksum: 0,
        };
        header.encode()
    }
}

impl<S: Storage> Writer<S> {
    pub(crate) fn resume(
        storage: S,
        lock: S::Lock,
        active: ActiveSegment<S::File>,
        newest: Newest<S::File>,
        format: Format,
        chain: Chain,
        spares: Spares<S>,
    ) -> Self {
        let durable = chain.sequence;
        Self {
            storage,
            spares,
            active,
            newest,
            format,
            chain,
            durable,
            drops: Vec::new(),
            dropped_through: Arc::default(),
            failure: None,
            lock,
        }
    }

    /// Releases the journal but keeps its lock.
    pub(crate) fn into_lock(self) -> S::Lock {
        self.lock
    }

    /// Writes one batch with one call. It then survives a crash of this process, but not of the machine. Only
    /// [`WriteError::DiskFull`] is not final.
    pub fn write(&mut self, batch: &Batch) -> Result<(), WriteError> {
        self.unless_failed(|writer| writer.write_batch(batch))
    }

    /// Makes all written batches durable, then drops the segments that they said to drop.
    pub fn sync(&mut self) -> Result<(), WriteError> {
        self.unless_failed(|writer| {
            writer.sync_active()?;
            for segment in std::mem::take(&mut writer.drops) {
                writer.drop_segment(segment)?;
            }
            Ok(())
        })
    }

    /// Syncs all writes and marks where they end: records missing at the next start are then known to be damage. A
    /// later write removes the mark first.
    pub fn close(&mut self) -> Result<(), WriteError> {
        self.unless_failed(|writer| {
            writer.sync_active()?;
            writer.record_newest(writer.chain.sequence)
        })
    }

    /// Whether a batch goes into the segment in use and drops none, so that one write and one sync suffice.
    pub fn appends(&self, batch: &Batch) -> bool {
        let number = self.active.number;
        batch.segment == number
            && self.newest.names(number)
            && self.drops.is_empty()
            && batch.drops.is_empty()
    }

    /// Returns a handle with which another thread prepares spare segments.
    pub fn spares(&self) -> Spares<S> {
        self.spares.clone()
    }

    /// Creates a reader of records, for use on a separate thread.
    pub fn reader(&self) -> JournalReader<S> {
        let dropped_through = self.dropped_through.clone();
        JournalReader::new(self.storage.clone(), self.chain.journal_id, dropped_through)
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
        if !self.newest.names(self.active.number) {
            self.record_newest(0)?;
        }
        let mut chain = self.chain;
        let header = chain.link(batch, self.durable);
        let active = &mut self.active;
        // The file already has this length. On a file system that never overwrites a block, a full disk may still leave
        // part of the batch there, and the next attempt overwrites it.
        let written = active.file.write_at(batch.offset, &[&header, &batch.body]);
        written.map_err(no_room_to("write to", &active.name))?;
        self.chain = chain;
        self.spares.used(batch.end());
        if planted!("drop-before-sync") {
            return batch
                .drops
                .iter()
                .try_for_each(|segment| self.drop_segment(*segment));
        }
        self.drops.extend_from_slice(&batch.drops);
        Ok(())
    }

    fn sync_active(&mut self) -> Result<(), WriteError> {
        if self.durable < self.chain.sequence {
            let active = &self.active;
            let synced = match planted!("skip-sync") {
                true => Ok(()),
                false => active.file.sync(),
            };
            let synced = synced.or_else(|error| match planted!("retry-failed-sync") {
                true => active.file.sync(),
                false => Err(error),
            });
            synced.map_err(failed_to("sync", &active.name))?;
            self.durable = self.chain.sequence;
        }
        Ok(())
    }

    fn roll(&mut self, batch: &Batch) -> Result<(), WriteError> {
        if !planted!("roll-before-sync") {
            self.sync_active()?;
        }
        let name = segment_name(batch.segment);
        let needed = batch.offset + batch.bytes() as u64;
        let spare = self.spares.take(needed);
        let spare = spare.map_err(no_room_to("prepare", &name))?;
        let header = NewSegment {
            format: self.format,
            number: batch.segment,
            epoch: batch.epoch,
            base_position: batch.base_position,
            // The header is on disk before the batch, so segments that the batch drops still count.
            older_segments: batch.older_segments + batch.drops.len() as u32,
            file_bytes: spare.bytes,
            durable_through: self.durable,
        };
        let header = header.header(&self.chain);
        let put_back = |_: &_| self.spares.put_back(spare.name.clone(), spare.bytes);
        let written = spare.file.write_at(0, &[&header]);
        let written = written.map_err(no_room_to("write to", &name));
        written.inspect_err(put_back)?;
        let synced = match planted!("name-before-sync") {
            true => Ok(()),
            false => spare.file.sync(),
        };
        synced.map_err(failed_to("write to", &name))?;
        let renamed = self.storage.rename(&spare.name, &name);
        let renamed = renamed.map_err(no_room_to("name", &name));
        renamed.inspect_err(put_back)?;
        let synced = match planted!("skip-directory-sync") {
            true => Ok(()),
            false => self.storage.sync_directory(),
        };
        synced.map_err(failed_to("name", &name))?;
        self.spares.rolled();
        self.spares.begin_segment(batch.segment, spare.bytes);
        self.active = ActiveSegment {
            file: spare.file,
            number: batch.segment,
            name,
        };
        Ok(())
    }

    fn record_newest(&mut self, closed_through: u64) -> Result<(), WriteError> {
        let written = self.newest.write(self.active.number, closed_through);
        written.map_err(no_room_to("write to", NEWEST))?;
        self.newest.sync().map_err(failed_to("sync", NEWEST))
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

/// Converts like [`failed_to`], but reports a full disk as such.
fn no_room_to(action: &'static str, file: &str) -> impl FnOnce(io::Error) -> WriteError {
    let file = file.to_string();
    move |source| match is_full(&source) {
        true => WriteError::DiskFull {
            action,
            file,
            source,
        },
        false => WriteError::Io {
            action,
            file,
            source,
        },
    }
}
