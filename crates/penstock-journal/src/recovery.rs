//! Opens a journal: replays what it holds, tells a torn end from a rotten middle, and starts a new
//! segment.
//!
//! *Torn or rotten?* Each batch names the last one that was synced when it was written: the
//! watermark. A batch that can't be read and stands above every watermark was never promised to
//! anybody, so it and what follows it are cut off. At or below one it had been on disk, and somebody
//! may rely on it: then nothing is opened, and a person is told the file, the place and what to do.
//! A segment with a successor is proven whole by it.
//!
//! *The page cache is not the truth.* Batches above the proven watermark may be read from memory
//! that the disk never got, for instance because a sync failed and took the process down. They are
//! replayed, but before anything rests on them they are written again, to a new segment under a
//! raised epoch, and synced. The rename that names this segment is the moment at which it counts:
//! until then the journal is as it was found, and a second power cut costs nothing. From then on
//! the old segment counts only up to the watermark.

use std::collections::VecDeque;
use std::io;

use penstock_faults::planted;

use crate::format::{
    FIRST_BATCH, FORMAT_VERSION, Record, RecordKind, SegmentHeader, segment_name, segment_number,
};
use crate::index::{Index, Mark, Spacing};
use crate::journal::{Batch, Journal, JournalOptions, Segment};
use crate::read::{SegmentImage, read_header};
use crate::reserve::{give_up_reserve, making_room};
use crate::spares::{Shared, Spares, fill, is_full};
use crate::storage::{Storage, StoredFile};
use crate::writer::{ActiveSegment, Chain, NewSegment, Writer};

/// The new segment of an opening that is not finished. Never reused: its batches could pass for
/// those of the next attempt.
pub(crate) const UNFINISHED: &str = "opening.partial";

/// Is shown a position and its record; an error, in words, ends the opening.
pub type Replay<'a> = dyn FnMut(u64, &[u8]) -> Result<(), String> + 'a;

/// A journal that is ready to be written.
pub struct Opened<S: Storage> {
    pub journal: Journal,
    pub writer: Writer<S>,
    pub report: RecoveryReport,
    /// Higher at each opening.
    pub epoch: u32,
    /// For the next record.
    pub next_position: u64,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// There was no journal before.
    pub created: bool,
    pub segments: u64,
    pub batches: u64,
    pub records: u64,
    /// The last record; 0 when there is none.
    pub through: u64,
    /// The watermark did not cover these records yet; they were written again.
    pub rewritten_records: u64,
    /// Writes that a crash interrupted; none was confirmed. They were cut off.
    pub torn_batches: u64,
}

/// Why a journal was not opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("{location} is in use by another process")]
    Locked { location: String },
    #[error(
        "{location}/{file} is damaged at byte {offset}: {what}. Work that was confirmed may be in \
         the damaged part, so the journal is not opened. `penstock fsck {location}` shows what can \
         still be read, and with `--repair` keeps that and lists what is gone; or restore the \
         directory from a backup, or move it away to start empty"
    )]
    Damaged {
        location: String,
        file: String,
        offset: u64,
        what: String,
    },
    #[error(
        "{file} was written in format {written} and needs a program that knows format {needed}; \
         this one knows format {known}: use a newer penstock. Nothing was changed"
    )]
    NewerFormat {
        file: String,
        written: u32,
        needed: u32,
        known: u32,
    },
    #[error(
        "{file} uses features that this program does not know (bits {unknown:#x}): use a newer penstock"
    )]
    UnknownFeatures { file: String, unknown: u64 },
    #[error(
        "the disk of {location} is full: {source}. Nothing is lost; make some space (a few MB) and \
         start again"
    )]
    DiskFull { location: String, source: io::Error },
    #[error("record {position} can't be replayed: {why}")]
    Replay { position: u64, why: String },
    #[error(
        "could not {action} {file}: {source}. What was confirmed is kept. Check the disk (space, quota, kernel \
         log), then start again"
    )]
    Io {
        action: &'static str,
        file: String,
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn io(action: &'static str, file: &str) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_string();
        move |source| Self::Io {
            action,
            file,
            source,
        }
    }

    pub(crate) fn damaged<S: Storage>(storage: &S, file: &str, offset: u64, what: &str) -> Self {
        let (location, file, what) = (storage.location(), file.to_string(), what.to_string());
        Self::Damaged {
            location,
            file,
            offset,
            what,
        }
    }
}

impl Journal {
    /// Opens the journal in a directory, or makes one there; `replay` is shown all its records in
    /// order. Sizes in the options may differ from one opening to the next.
    pub fn open<S: Storage>(
        storage: S,
        options: JournalOptions,
        replay: &mut Replay<'_>,
    ) -> Result<Opened<S>, OpenError> {
        let location = storage.location();
        let lock = storage.lock().map_err(OpenError::io("lock", &location))?;
        let lock = lock.ok_or(OpenError::Locked { location })?;
        let found = Found::list(&storage)?;
        let recovered = match found.segments.last() {
            Some(&last) => {
                writable_format(&storage, last)?;
                recover(&storage, &found.segments, replay)?
            }
            None => Recovered::nothing(options.journal_id),
        };
        start(storage, lock, options, found, recovered)
    }
}

/// What `penstock upgrade` has done: the formats before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upgraded {
    pub from: u32,
    pub to: u32,
}

/// Goes over to the newest format that this program knows. From then on older programs refuse the
/// journal; without this, each program goes on in the format that it finds. A journal that is in that
/// format is not touched.
pub fn upgrade<S: Storage>(storage: S, options: JournalOptions) -> Result<Upgraded, OpenError> {
    upgrade_to(storage, options, FORMAT_VERSION)
}

fn upgrade_to<S: Storage>(
    storage: S,
    options: JournalOptions,
    to: u32,
) -> Result<Upgraded, OpenError> {
    let location = storage.location();
    let lock = storage.lock().map_err(OpenError::io("lock", &location))?;
    let lock = lock.ok_or(OpenError::Locked { location })?;
    let found = Found::list(&storage)?;
    let Some(&last) = found.segments.last() else {
        return Ok(Upgraded { from: to, to });
    };
    let from = writable_format(&storage, last)?;
    if from < to {
        let mut recovered = recover(&storage, &found.segments, &mut |_, _| Ok(()))?;
        recovered.format = to;
        start(storage, lock, options, found, recovered)?;
    }
    Ok(Upgraded { from, to })
}

/// The format that the journal goes on in. A program that can read a newer one must not write to it.
fn writable_format<S: Storage>(storage: &S, last: u64) -> Result<u32, OpenError> {
    let header = read_header(storage, last)?;
    match header.format_version {
        known if known <= FORMAT_VERSION => Ok(known),
        newer => Err(OpenError::NewerFormat {
            file: segment_name(last),
            written: newer,
            needed: newer,
            known: FORMAT_VERSION,
        }),
    }
}

/// The journal's files.
#[derive(Default)]
pub(crate) struct Found {
    /// Numbers, in order.
    pub segments: Vec<u64>,
    pub spares: Vec<String>,
    pub unfinished: bool,
}

impl Found {
    pub fn list<S: Storage>(storage: &S) -> Result<Self, OpenError> {
        let mut found = Self::default();
        let names = storage
            .list()
            .map_err(OpenError::io("list", &storage.location()))?;
        for name in names {
            if let Some(number) = segment_number(&name) {
                found.segments.push(number);
            } else if Spares::<S>::is_spare(&name) {
                found.spares.push(name);
            } else if name == UNFINISHED {
                found.unfinished = true;
            }
        }
        found.segments.sort_unstable();
        found.spares.sort_unstable();
        Ok(found)
    }
}

/// What a journal holds, and where its next segment takes up.
pub(crate) struct Recovered {
    pub report: RecoveryReport,
    /// Those that still count.
    segments: VecDeque<Segment>,
    /// Of the next segment.
    format: u32,
    /// Of the last segment; 0 when there is none.
    number: u64,
    epoch: u32,
    /// At the last batch that is proven to be on disk.
    proven: Chain,
    /// Of the records up to that batch.
    index: Index,
    /// Records behind that batch, and the position of the first record that is not proven.
    unproven: Vec<Vec<u8>>,
    base_position: u64,
}

impl Recovered {
    fn nothing(journal_id: [u8; 16]) -> Self {
        Self {
            report: RecoveryReport {
                created: true,
                ..RecoveryReport::default()
            },
            segments: VecDeque::new(),
            format: FORMAT_VERSION,
            number: 0,
            epoch: 0,
            proven: Chain {
                journal_id,
                sequence: 0,
                previous: 0,
            },
            index: Index::default(),
            unproven: Vec::new(),
            base_position: 1,
        }
    }
}

impl Recovered {
    /// An empty journal, whose segments and epochs come after those of a damaged one.
    pub fn after_a_repair(
        journal_id: [u8; 16],
        last_segment: u64,
        last_epoch: u32,
        base_position: u64,
    ) -> Self {
        Self {
            number: last_segment,
            epoch: last_epoch,
            base_position,
            ..Self::nothing(journal_id)
        }
    }
}

/// Where the last segment ends.
struct Tail {
    /// Behind the last valid batch.
    last: Chain,
    /// Batches up to this one are proven to be on disk.
    proven: u64,
    /// How many segments before the last one still count.
    older_segments: u32,
    torn_batches: u64,
}

/// Reads, and changes nothing.
pub(crate) fn recover<S: Storage>(
    storage: &S,
    segments: &[u64],
    replay: &mut Replay<'_>,
) -> Result<Recovered, OpenError> {
    let number = *segments.last().expect("a journal has a segment");
    let last = SegmentImage::load(storage, read_header(storage, number)?)?;
    let tail = find_tail(storage, &last)?;
    let oldest = number.saturating_sub(u64::from(tail.older_segments));
    let mut headers = Vec::new();
    for wanted in oldest..number {
        if !segments.contains(&wanted) {
            let name = segment_name(wanted);
            return Err(OpenError::damaged(storage, &name, 0, "the file is missing"));
        }
        headers.push(read_header(storage, wanted)?);
    }
    headers.push(last.header);

    let mut joiner = Joiner::new(&headers[0], tail.proven, replay);
    let mut index = Index::default();
    let mut spacing = Spacing::default();
    let mut counted = VecDeque::new();
    let mut proven = last.first_link();
    let mut last = Some(last);
    for (place, header) in headers.iter().enumerate() {
        let successor = headers.get(place + 1);
        let image = match successor {
            Some(_) => SegmentImage::load(storage, *header)?,
            None => last.take().expect("the last segment comes last"),
        };
        let damaged = |offset, what: &str| OpenError::damaged(storage, &image.name, offset, what);
        joiner
            .begin_segment(header)
            .map_err(|what| damaged(0, &what))?;
        let mut chain = image.first_link();
        let mut offset = FIRST_BATCH;
        let end = successor.map_or(tail.last.sequence, |next| next.base_sequence - 1);
        while chain.sequence < end {
            let batch = image
                .batch_at(offset, &mut chain)
                .map_err(|what| damaged(offset, what))?;
            let begin = std::mem::replace(&mut offset, batch.end);
            joiner.report.batches += 1;
            for record in batch.records() {
                let (offset, record) = record.map_err(|(offset, what)| damaged(offset, what))?;
                if chain.sequence <= tail.proven {
                    let skipped = joiner.skipped(&record);
                    let must = skipped > 0 || !index.knows(header.segment);
                    if spacing.is_due(record.payload.len(), must) {
                        index.add(Mark {
                            position: record.position,
                            skipped,
                            segment: header.segment,
                            batch: begin,
                            record: offset,
                        });
                    }
                }
                joiner.take(chain.sequence, record, |what| damaged(offset, what))?;
            }
            if chain.sequence == tail.proven {
                proven = chain;
            }
        }
        if let Some(next) = successor
            && (chain.sequence, chain.previous) != (next.base_sequence - 1, next.previous)
        {
            return Err(damaged(
                offset,
                "the segment after it does not follow its last batch",
            ));
        }
        counted.push_back(Segment {
            number: header.segment,
            base_position: header.base_position,
            bytes: image.bytes.len() as u64,
        });
    }
    joiner.report.segments = counted.len() as u64;
    joiner.report.torn_batches = tail.torn_batches;
    joiner.report.rewritten_records = joiner.unproven.len() as u64;
    joiner.report.through = joiner.next_position - 1;
    Ok(Recovered {
        base_position: joiner.next_position - joiner.unproven.len() as u64,
        report: joiner.report,
        unproven: joiner.unproven,
        index,
        segments: counted,
        format: headers
            .last()
            .expect("there is the last one")
            .format_version,
        number,
        epoch: headers.last().expect("there is the last one").epoch,
        proven,
    })
}

fn find_tail<S: Storage>(storage: &S, last: &SegmentImage) -> Result<Tail, OpenError> {
    let mut chain = last.first_link();
    let mut proven = chain.sequence.max(last.header.durable_through);
    let mut older_segments = last.header.older_segments;
    let mut offset = FIRST_BATCH;
    let flaw = loop {
        match last.batch_at(offset, &mut chain) {
            Ok(batch) => {
                proven = proven.max(batch.header.durable_through);
                older_segments = batch.header.older_segments;
                offset = batch.end;
            }
            Err(flaw) => break flaw,
        }
    };
    let beyond = last.beyond(offset, chain.sequence);
    if let Some(proof) = beyond.proof
        && !planted!("ignore-watermark")
    {
        let what = match proof {
            0 => format!("{flaw}, though it was on disk when the file got its name"),
            proof => {
                format!("{flaw}, though the batch at byte {proof} was written after it was synced")
            }
        };
        return Err(OpenError::damaged(storage, &last.name, offset, &what));
    }
    if planted!("trust-page-cache") {
        proven = chain.sequence;
    }
    Ok(Tail {
        last: chain,
        proven,
        older_segments,
        torn_batches: beyond.torn_batches,
    })
}

/// Joins the parts of long records and checks that positions have no gaps.
struct Joiner<'a> {
    replay: &'a mut Replay<'a>,
    report: RecoveryReport,
    next_position: u64,
    epoch: u32,
    /// Parts of a record before this position are what is left of it since its first part went
    /// with a dropped segment.
    oldest_position: u64,
    parts: Option<Vec<u8>>,
    proven: u64,
    unproven: Vec<Vec<u8>>,
}

impl<'a> Joiner<'a> {
    fn new(oldest: &SegmentHeader, proven: u64, replay: &'a mut Replay<'a>) -> Self {
        Self {
            replay,
            report: RecoveryReport::default(),
            next_position: oldest.base_position,
            epoch: oldest.epoch,
            oldest_position: oldest.base_position,
            parts: None,
            proven,
            unproven: Vec::new(),
        }
    }

    fn begin_segment(&mut self, header: &SegmentHeader) -> Result<(), String> {
        if header.epoch > self.epoch {
            // The process that began the record died before its last part; its position was free
            // for the next process.
            self.parts = None;
            // ... also when its first part is gone with a dropped segment.
            let is_first = self.report.records == 0;
            if is_first && header.base_position + 1 == self.next_position {
                self.next_position = header.base_position;
            }
        }
        self.epoch = header.epoch;
        let expected = self.next_position + u64::from(self.parts.is_some());
        if header.base_position == expected {
            Ok(())
        } else {
            let found = header.base_position;
            Err(format!(
                "it begins at record {found}, and should at {expected}"
            ))
        }
    }

    /// How much of the record's payload came before this part.
    fn skipped(&self, record: &Record<'_>) -> u64 {
        let is_further = !record.kind.begins();
        let before = self.parts.as_ref().filter(|_| is_further);
        before.map_or(0, |parts| parts.len() as u64)
    }

    fn take(
        &mut self,
        sequence: u64,
        record: Record<'_>,
        damaged: impl Fn(&str) -> OpenError,
    ) -> Result<(), OpenError> {
        let position = record.position;
        match (&mut self.parts, record.kind) {
            (None, RecordKind::Whole | RecordKind::First) if position == self.next_position => {
                if record.kind == RecordKind::First {
                    self.parts = Some(record.payload.to_vec());
                    return Ok(());
                }
                self.complete(sequence, position, record.payload)
            }
            (Some(parts), RecordKind::Middle | RecordKind::Last)
                if position == self.next_position =>
            {
                parts.extend_from_slice(record.payload);
                if record.kind == RecordKind::Middle {
                    return Ok(());
                }
                let whole = self.parts.take().expect("it was there");
                self.complete(sequence, position, &whole)
            }
            (None, RecordKind::Middle | RecordKind::Last) if position < self.oldest_position => {
                Ok(())
            }
            _ => {
                let expected = self.next_position;
                Err(damaged(&format!(
                    "record {position} stands where {expected} belongs"
                )))
            }
        }
    }

    fn complete(&mut self, sequence: u64, position: u64, record: &[u8]) -> Result<(), OpenError> {
        let replayed = (self.replay)(position, record);
        replayed.map_err(|why| OpenError::Replay { position, why })?;
        self.next_position += 1;
        self.report.records += 1;
        if sequence > self.proven {
            self.unproven.push(record.to_vec());
        }
        Ok(())
    }
}

/// Writes the new segment, gives it its name, and lets go of what no longer counts.
pub(crate) fn start<S: Storage>(
    storage: S,
    lock: S::Lock,
    options: JournalOptions,
    found: Found,
    mut recovered: Recovered,
) -> Result<Opened<S>, OpenError> {
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
    // What is written again stands in two segments, and stays until the later one goes.
    let mut later = base_position;
    for segment in recovered.segments.iter_mut().rev() {
        later = later.min(segment.base_position);
        segment.base_position = later;
    }

    let shared = Shared::new(&options);
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
    journal.rewritten(next_position - 1);

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
    let mut spares = found.spares;
    let (file, file_bytes, chain) = opening.write(&mut spares)?;
    shared.begin_segment(number, file_bytes);
    // What was found may have got its names from a process that died before it could sync them: not
    // one of them may be lost once the new segment, which counts on them, has its own.
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

    let spares = Spares::resume(storage.clone(), shared, spares, largest_segment)
        .map_err(OpenError::io("clean", &storage.location()))?;
    let oldest = number - u64::from(older_segments);
    for leftover in found.segments.into_iter().filter(|found| *found < oldest) {
        // The drop of this segment was interrupted.
        let dropped = spares.drop_leftover(leftover);
        dropped.map_err(OpenError::io("drop", &segment_name(leftover)))?;
    }
    let active = ActiveSegment { file, name, number };
    Ok(Opened {
        journal,
        writer: Writer::resume(storage, lock, active, recovered.format, chain, spares),
        report: recovered.report,
        epoch,
        next_position,
    })
}

/// The first segment of an opening, under a name at which it does not count yet.
struct Opening<'a, S> {
    storage: &'a S,
    options: &'a JournalOptions,
    format: u32,
    number: u64,
    epoch: u32,
    base_position: u64,
    older_segments: u32,
    proven: Chain,
    /// What must be written again.
    batches: Vec<Batch>,
}

impl<S: Storage> Opening<'_, S> {
    /// Writes and syncs it: the file, its length, and where the chain then stands. A full disk has
    /// spares for this.
    fn write(&self, spares: &mut Vec<String>) -> Result<(S::File, u64, Chain), OpenError> {
        let mut spare = None;
        loop {
            match self.try_to_write(spare.as_deref()) {
                Ok(written) => return Ok(written),
                Err(error) if is_full(&error) => {
                    // It may not have come to be.
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
            // What is in it was written for other segments.
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
            // Its sync may have failed in an earlier process: it is filled again, as any such spare.
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
        // The header tells where the chain stood before the segment's first batch.
        file.write_at(0, &[&header.header(&self.proven)])?;
        file.sync()?;
        Ok((file, file_bytes, chain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::SimStorage;

    fn options() -> JournalOptions {
        JournalOptions {
            segment_bytes: 4096 + 2048,
            batch_bytes: 1024,
            opening_bytes: 4096 + 2048,
            ..JournalOptions::default()
        }
    }

    fn formats(storage: &SimStorage) -> Vec<u32> {
        let found = Found::list(storage).unwrap();
        let headers = found.segments.iter().map(|number| {
            let page = storage.contents(&segment_name(*number)).unwrap();
            SegmentHeader::decode(&page).unwrap().format_version
        });
        headers.collect()
    }

    fn append(storage: &SimStorage, records: u64) {
        let mut opened =
            Journal::open(storage.clone(), options(), &mut |_, _| Ok(())).expect("it opens");
        for _ in 0..records {
            opened.journal.append(opened.next_position, &[7; 900]);
            opened.next_position += 1;
        }
        while let Some(batch) = opened.journal.take_batch() {
            opened.writer.write(&batch).unwrap();
        }
        opened.writer.sync().unwrap();
    }

    #[test]
    fn a_program_goes_on_in_the_format_it_finds_until_the_journal_is_upgraded() {
        let storage = SimStorage::new();
        append(&storage, 1);
        // As if the journal were from before there was a format 1.
        let mut page = storage.contents(&segment_name(1)).unwrap();
        let mut header = SegmentHeader::decode(&page).unwrap();
        header.format_version = 0;
        header.minimum_reader = 0;
        page[..SegmentHeader::BYTES].copy_from_slice(&header.encode());
        storage.corrupt(&segment_name(1), page);

        append(&storage, 5);
        assert!(formats(&storage).len() >= 3, "it has opened, and rolled");
        assert!(formats(&storage).iter().all(|format| *format == 0));
        let upgraded = upgrade(storage.clone(), options()).unwrap();
        assert_eq!(upgraded, Upgraded { from: 0, to: 1 });
        append(&storage, 5);
        assert_eq!(formats(&storage).last(), Some(&1));
        let mut records = 0;
        let opened = Journal::open(storage.clone(), options(), &mut |_, _| {
            records += 1;
            Ok(())
        });
        assert!(opened.is_ok());
        assert_eq!(records, 11);
    }

    #[test]
    fn a_journal_that_was_upgraded_beyond_this_program_is_refused_and_left_untouched() {
        let storage = SimStorage::new();
        append(&storage, 3);
        let upgraded = upgrade_to(storage.clone(), options(), FORMAT_VERSION + 1).unwrap();
        assert_eq!((upgraded.from, upgraded.to), (1, 2));
        let calls = storage.calls();
        for refused in [
            Journal::open(storage.clone(), options(), &mut |_, _| Ok(())).map(|_| ()),
            upgrade(storage.clone(), options()).map(|_| ()),
            crate::fsck(&storage).map(|_| ()),
        ] {
            assert_eq!(
                refused.unwrap_err().to_string(),
                "0000000000000003.segment was written in format 2 and needs a program that knows format 2; \
                 this one knows format 1: use a newer penstock. Nothing was changed"
            );
        }
        assert_eq!(storage.calls(), calls, "something was changed");
    }

    #[test]
    fn an_upgrade_of_what_needs_none_changes_nothing() {
        let storage = SimStorage::new();
        append(&storage, 3);
        let calls = storage.calls();
        let upgraded = upgrade(storage.clone(), options()).unwrap();
        assert_eq!(
            (upgraded.from, upgraded.to),
            (FORMAT_VERSION, FORMAT_VERSION)
        );
        assert_eq!(storage.calls(), calls);
    }
}
