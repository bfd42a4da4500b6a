//! Carries batches out: write, sync, roll to a new segment, drop an old one. Owned by one thread,
//! which does nothing else.
//!
//! The order of each step is the crash argument:
//!
//! - *Roll.* The full segment is synced; the next one's header is written into a spare and synced;
//!   the spare is renamed; the directory is synced; the segment is said to be the newest; only then comes
//!   the first batch. So a segment that has a successor is whole, a file with a segment's name has a good
//!   header, and what is said to be the newest is there. Whoever finds it otherwise has found damage.
//! - *Drop.* The batch whose header no longer counts the old segment is synced before the file is
//!   renamed to a spare, and the directory is synced before the next one goes.
//! - *Ghosts.* A spare is full of old batches. They carry the number of the segment they were
//!   written for, and no number is used twice, so they are never taken for new ones.

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

/// Why nothing was written. All but a full disk is final for this process: after a failed write or
/// sync the operating system may show data that the disk does not have, so only a new start, which
/// reads what is proven and writes the rest anew, can tell what was kept.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The batch is not written: try the same one again once there may be space.
    #[error(
        "the disk is full: could not {action} {file}: {source}; nothing is lost, and it goes on once there is space"
    )]
    DiskFull {
        action: &'static str,
        file: String,
        source: io::Error,
    },
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
    active: ActiveSegment<S::File>,
    newest: Newest<S::File>,
    /// That of the segments before: a newer one begins with an upgrade only.
    format: Format,
    chain: Chain,
    /// The last batch that is synced.
    durable: u64,
    drops: Vec<u64>,
    /// Number up to which segments were dropped, told to readers before a file is removed or renamed.
    dropped_through: Arc<AtomicU64>,
    failure: Option<String>,
    lock: S::Lock,
}

pub(crate) struct ActiveSegment<F> {
    pub file: F,
    pub name: String,
    pub number: u64,
}

/// Link of each batch to the one before.
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

    /// Gives up the journal, and not the lock on it.
    pub(crate) fn into_lock(self) -> S::Lock {
        self.lock
    }

    /// Writes one batch, with one call; it is safe from a crash of this process, but not of the
    /// machine. [`WriteError::DiskFull`] alone is not final.
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

    /// Syncs what was written, and leaves a mark of where it ends: what is missing at the next start is then
    /// known to be damage. A later write takes the mark away first.
    pub fn close(&mut self) -> Result<(), WriteError> {
        self.unless_failed(|writer| {
            writer.sync_active()?;
            writer.record_newest(writer.chain.sequence)
        })
    }

    /// A handle with which another thread prepares spare segments.
    pub fn spares(&self) -> Spares<S> {
        self.spares.clone()
    }

    /// Makes a reader of records, for a thread of its own.
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
        // The file has this place already. Where that does not help (a file system that writes no block
        // twice), a full disk may leave part of the batch there, and the next attempt writes over it.
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
            // The header is on disk before the batch: what the batch drops still counts.
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

/// As [`failed_to`], but tells a full disk apart.
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
