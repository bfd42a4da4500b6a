//! Opens a journal: replays the found records, rewrites unproven ones, and begins a new segment.
//!
//! *The page cache is not the truth.* Batches above the proven watermark may be read from memory although the disk
//! never got them, for example because a sync failed and took the process down. They are replayed, but before anything
//! relies on them they are written again, to a new segment under a higher epoch, and synced. The rename that names this
//! segment is the moment at which it counts. Until then the journal is unchanged, and a second power cut costs nothing.
//! From then on the old segment counts only up to the watermark.

use std::io;

use penstock_faults::planted;

use crate::format::{FIRST_BATCH, FORMAT_VERSION, Format, segment_name};
use crate::journal::{Batch, Journal, JournalOptions, Segment};
use crate::newest::{NEWEST, Newest};
use crate::open_error::OpenError;
use crate::recovery::{Found, Recovered, RecoveryReport, Replay, check_nothing, recover};
use crate::reserve::{give_up_reserve, making_room};
use crate::spares::{SharedSpares, Spares, fill, is_full};
use crate::storage::{Storage, StoredFile};
use crate::upgrade::{begin_format, older_format};
use crate::writer::{ActiveSegment, Chain, NewSegment, Writer};

/// Name of the new segment while an opening is unfinished. Never reused: its batches could pass for those of the next
/// attempt.
pub(crate) const UNFINISHED: &str = "opening.partial";

/// Journal that is ready to be written.
pub struct OpenedJournal<S: Storage> {
    pub journal: Journal,
    pub writer: Writer<S>,
    pub report: RecoveryReport,
    /// Format that the journal is written in from now on.
    pub format: u32,
    /// Number of this opening; each opening has a higher one.
    pub epoch: u32,
    /// Position of the next record.
    pub next_position: u64,
}

impl Journal {
    /// Opens the journal in a directory, or makes one there. Calls `replay` with each record in order. Sizes in the
    /// options may differ from one opening to the next. A journal of an earlier format is upgraded first if the options
    /// allow it.
    pub fn open<S: Storage>(
        storage: S,
        options: JournalOptions,
        replay: &mut Replay<'_>,
    ) -> Result<OpenedJournal<S>, OpenError> {
        let location = storage.location();
        let lock = storage.lock().map_err(OpenError::io("lock", &location))?;
        let mut lock = lock.ok_or(OpenError::Locked { location })?;
        let mut upgraded = None;
        if let Some(written) = older_format(&storage)? {
            if !options.upgrades {
                return Err(OpenError::OlderFormat {
                    location: storage.location(),
                    written,
                    known: FORMAT_VERSION,
                });
            }
            let (found, kept) = begin_format(&storage, lock, &options, FORMAT_VERSION)?;
            upgraded = Some((written, found));
            lock = kept;
        }
        let mut opened = resume(storage, lock, options, replay)?;
        if let Some((written, found)) = upgraded {
            // The upgrade has already repaired this, so the opening doesn't find it again.
            opened.report.upgraded_from = Some(written);
            opened.report.torn_batches = found.torn_batches;
            opened.report.rewritten_records = found.rewritten_records;
        }
        Ok(opened)
    }
}

/// Opens a journal that is locked, in its present format.
pub(crate) fn resume<S: Storage>(
    storage: S,
    lock: S::Lock,
    options: JournalOptions,
    replay: &mut Replay<'_>,
) -> Result<OpenedJournal<S>, OpenError> {
    let found = Found::list(&storage)?;
    let recovered = match found.segments.is_empty() {
        false => recover(&storage, &found, replay)?,
        true => {
            check_nothing(&storage, &found)?;
            Recovered::nothing(options.journal_id)
        }
    };
    start(storage, lock, options, found, recovered)
}

/// Writes the new segment, names it, and removes files that no longer count.
pub(crate) fn start<S: Storage>(
    storage: S,
    lock: S::Lock,
    options: JournalOptions,
    mut found: Found,
    mut recovered: Recovered,
) -> Result<OpenedJournal<S>, OpenError> {
    if found.unfinished {
        storage
            .remove(UNFINISHED)
            .map_err(OpenError::io("remove", UNFINISHED))?;
    }
    let number = recovered.number + 1;
    let epoch = recovered.epoch + u32::from(!planted!("keep-epoch") || recovered.epoch == 0);
    let base_position = recovered.base_position;
    let proven = recovered.proven;
    let older_segments = recovered.segments.len() as u32;
    let found_bytes = recovered.segments.iter().map(|segment| segment.bytes);
    let largest_segment = found_bytes.max().unwrap_or(0);
    recovered.segments.push_back(Segment {
        number,
        base_position,
        bytes: FIRST_BATCH,
    });
    // Rewritten records exist in two segments, and stay until the later one is dropped.
    let mut later = base_position;
    for segment in recovered.segments.iter_mut().rev() {
        later = later.min(segment.base_position);
        segment.base_position = later;
    }

    let shared = SharedSpares::new(&options);
    let mut journal = Journal::resume(
        &options,
        epoch,
        recovered.segments,
        proven.sequence,
        base_position,
        recovered.index,
        shared.clone(),
    );
    let mut batches = Vec::new();
    journal.without_rolls(|journal| {
        for (position, record) in (base_position..).zip(&recovered.unproven) {
            journal.append(position, record);
        }
        batches.extend(std::iter::from_fn(|| journal.take_batch()));
    });
    let next_position = base_position + recovered.unproven.len() as u64;
    journal.mark_rewritten(next_position - 1);
    let asked = storage.clone();
    journal.set_free_bytes_source(Box::new(move || asked.free_bytes()));

    let name = segment_name(number);
    let opening = Opening {
        storage: &storage,
        options: &options,
        format: recovered.format,
        number,
        epoch,
        base_position,
        older_segments,
        proven,
        batches,
    };
    let mut spares = std::mem::take(&mut found.spares);
    let (file, file_bytes, chain) = opening.write(&mut spares)?;
    shared.begin_segment(number, file_bytes);
    let mut newest = Newest::resume(&storage, &found, chain.journal_id, recovered.number)?;
    // The process that named these files may have died before it synced their names. None may be lost once the new
    // segment, which relies on them, has its own name.
    let names_synced = match planted!("count-on-unsynced-names") {
        true => Ok(()),
        false => storage.sync_directory(),
    };
    names_synced
        .and_then(|()| making_room(&storage, &mut spares, || storage.rename(UNFINISHED, &name)))
        .and_then(|()| match planted!("open-without-directory-sync") {
            true => Ok(()),
            false => storage.sync_directory(),
        })
        .map_err(OpenError::io("name", &name))?;
    let named = newest.write(number, 0).and_then(|()| newest.sync());
    named.map_err(OpenError::full_or_io(&storage, "write to", NEWEST))?;

    let spares = Spares::resume(storage.clone(), shared, spares, largest_segment)
        .map_err(OpenError::io("clean", &storage.location()))?;
    let oldest = number - u64::from(older_segments);
    for leftover in found.segments.into_iter().filter(|found| *found < oldest) {
        // The drop of this segment was interrupted.
        let dropped = spares.drop_leftover(leftover);
        dropped.map_err(OpenError::io("drop", &segment_name(leftover)))?;
    }
    let active = ActiveSegment { file, name, number };
    Ok(OpenedJournal {
        journal,
        writer: Writer::resume(
            storage,
            lock,
            active,
            newest,
            recovered.format,
            chain,
            spares,
        ),
        report: recovered.report,
        format: recovered.format.version,
        epoch,
        next_position,
    })
}

/// First segment of an opening, under a name with which it does not count yet.
struct Opening<'a, S> {
    storage: &'a S,
    options: &'a JournalOptions,
    format: Format,
    number: u64,
    epoch: u32,
    base_position: u64,
    older_segments: u32,
    proven: Chain,
    /// Batches to write again.
    batches: Vec<Batch>,
}

impl<S: Storage> Opening<'_, S> {
    /// Writes and syncs the file and its length, and returns them with the chain after its last batch. Spares provide
    /// for this on a full disk.
    fn write(&self, spares: &mut Vec<String>) -> Result<(S::File, u64, Chain), OpenError> {
        let mut spare = None;
        loop {
            match self.try_to_write(spare.as_deref()) {
                Ok(written) => return Ok(written),
                Err(error) if is_full(&error) => {
                    // The file may not exist.
                    let _removed = self.storage.remove(UNFINISHED);
                    if give_up_reserve(self.storage).unwrap_or(false) {
                        spare = None;
                        continue;
                    }
                    spare = spares.pop();
                    if spare.is_none() {
                        let location = self.storage.location();
                        return Err(OpenError::DiskFull {
                            location,
                            source: error,
                        });
                    }
                }
                Err(error) => return Err(OpenError::io("write to", UNFINISHED)(error)),
            }
        }
    }

    fn try_to_write(&self, spare: Option<&str>) -> io::Result<(S::File, u64, Chain)> {
        let file = match spare {
            None => self.storage.create(UNFINISHED)?,
            // Its content was written for other segments.
            Some(spare) => {
                self.storage.rename(spare, UNFINISHED)?;
                self.storage.open(UNFINISHED)?
            }
        };
        let mut chain = self.proven;
        let mut end = FIRST_BATCH;
        for batch in &self.batches {
            let header = chain.link(batch, self.proven.sequence);
            file.write_at(batch.offset, &[&header, &batch.body])?;
            end = batch.offset + batch.bytes() as u64;
        }
        let filled = (end + 1).next_multiple_of(self.options.opening_bytes);
        let filled = filled.min(self.options.segment_bytes).max(end);
        let file_bytes = match spare {
            None => {
                fill(&file, end, filled)?;
                filled
            }
            // Its sync may have failed in an earlier process: fill it again, like any such spare.
            Some(_) => {
                let bytes = file.size()?.max(end);
                fill(&file, end, bytes)?;
                bytes
            }
        };
        let header = NewSegment {
            format: self.format,
            number: self.number,
            epoch: self.epoch,
            base_position: self.base_position,
            older_segments: self.older_segments,
            file_bytes,
            durable_through: chain.sequence,
        };
        // The header states the chain before the segment's first batch.
        file.write_at(0, &[&header.header(&self.proven)])?;
        file.sync()?;
        Ok((file, file_bytes, chain))
    }
}
