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
//!
//! *Only one format is written.* A journal of an earlier format is upgraded before anything else: by its
//! owner's word, or because nobody else could. A record is of the format of its segment, so what must be
//! written again is written in that of before first, and then the segment of the new format begins.

use std::collections::VecDeque;
use std::io;

use penstock_faults::planted;

use crate::format::{
    FIRST_BATCH, FORMAT_VERSION, Format, NewestSlot, Record, RecordKind, SegmentHeader,
    segment_name, segment_number,
};
use crate::index::{Index, Mark, Spacing};
use crate::journal::{Batch, Journal, JournalOptions, Segment};
use crate::newest::{NEWEST, Newest};
use crate::read::{SegmentImage, read_header};
use crate::reserve::{give_up_reserve, making_room};
use crate::spares::{Shared, Spares, fill, is_full};
use crate::storage::{Storage, StoredFile};
use crate::writer::{ActiveSegment, Chain, NewSegment, Writer};

/// The new segment of an opening that is not finished. Never reused: its batches could pass for
/// those of the next attempt.
pub(crate) const UNFINISHED: &str = "opening.partial";

/// What to type to upgrade a journal: this and the directory.
pub const UPGRADE_COMMAND: &str = "penstock journal upgrade";

/// Is shown each record; an error ends the opening.
pub type Replay<'a> = dyn FnMut(Replayed<'_>) -> Result<(), NotReplayed> + 'a;

/// A record as it is read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replayed<'a> {
    pub position: u64,
    /// The format of the journal when it was written.
    pub format: u32,
    pub bytes: &'a [u8],
}

/// Why a record can't be replayed, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReplayed {
    /// A newer program wrote it; nothing is wrong with it.
    Newer(String),
    Wrong(String),
}

/// A journal that is ready to be written.
pub struct Opened<S: Storage> {
    pub journal: Journal,
    pub writer: Writer<S>,
    pub report: RecoveryReport,
    /// The format that it is written in from now on.
    pub format: u32,
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
    /// It was in this format, and was upgraded.
    pub upgraded_from: Option<u32>,
    pub segments: u64,
    pub batches: u64,
    pub records: u64,
    /// The last record; 0 when there is none.
    pub through: u64,
    /// The watermark did not cover these records yet; they were written again.
    pub rewritten_records: u64,
    /// Writes that a crash interrupted; none was confirmed. They were cut off.
    pub torn_batches: u64,
    /// It was closed in order, so nothing can be missing unnoticed.
    pub was_closed: bool,
}

/// Why a journal was not opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "{location} is in use by another process, and nothing was changed; end its broker first \
         (`penstock broker stop` for a local one)"
    )]
    Locked { location: String },
    #[error(
        "{location}/{file} is damaged at byte {offset}: {what}. Work that was confirmed may be in \
         the damaged part, so the journal is not opened. `penstock journal check {location}` shows what can \
         still be read, and `penstock journal repair` keeps that and lists what is gone; or restore the \
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
        "{location} is in format {written}, and this program writes format {known}. Nothing is lost and \
         nothing was changed. To go on with it, type `{UPGRADE_COMMAND} {location}` once: earlier programs \
         refuse it from then on, so copy the directory first if you may want to go back to one"
    )]
    OlderFormat {
        location: String,
        written: u32,
        known: u32,
    },
    #[error(
        "{file} uses features that this program does not know (bits {unknown:#x}): use a newer penstock. \
         Nothing was changed"
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
        "record {position} can't be replayed: {why}. Use a newer penstock. Nothing was changed"
    )]
    NewerRecord { position: u64, why: String },
    #[error("{0}. Nothing is lost and nothing was changed")]
    NotAFile(String),
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
        // The system's own errors have a number.
        move |source| match (source.kind(), source.raw_os_error()) {
            (io::ErrorKind::InvalidInput, None) => Self::NotAFile(source.to_string()),
            _ => Self::Io {
                action,
                file,
                source,
            },
        }
    }

    /// ... unless it is only that the disk is full.
    pub(crate) fn full_or_io<S: Storage>(
        storage: &S,
        action: &'static str,
        file: &str,
    ) -> impl FnOnce(io::Error) -> Self {
        let (location, file) = (storage.location(), file.to_string());
        move |source| match is_full(&source) {
            true => Self::DiskFull { location, source },
            false => Self::io(action, &file)(source),
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
    /// order. Sizes in the options may differ from one opening to the next. A journal of an earlier format
    /// is upgraded before, where the options allow it.
    pub fn open<S: Storage>(
        storage: S,
        options: JournalOptions,
        replay: &mut Replay<'_>,
    ) -> Result<Opened<S>, OpenError> {
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
            // What the upgrade has seen to is not found again.
            opened.report.upgraded_from = Some(written);
            opened.report.torn_batches = found.torn_batches;
            opened.report.rewritten_records = found.rewritten_records;
        }
        Ok(opened)
    }
}

/// Opens a journal that is locked, in the format in which it is.
pub(crate) fn resume<S: Storage>(
    storage: S,
    lock: S::Lock,
    options: JournalOptions,
    replay: &mut Replay<'_>,
) -> Result<Opened<S>, OpenError> {
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

/// What `penstock journal upgrade` has done: the formats before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upgraded {
    pub from: u32,
    pub to: u32,
    /// Writes that a crash interrupted; none was confirmed. They were cut off.
    pub torn_batches: u64,
}

/// Goes over to the newest format that this program knows. From then on older programs refuse the
/// journal. One that is in that format is not touched.
pub fn upgrade<S: Storage>(storage: S, options: JournalOptions) -> Result<Upgraded, OpenError> {
    let location = storage.location();
    let lock = storage.lock().map_err(OpenError::io("lock", &location))?;
    let lock = lock.ok_or(OpenError::Locked { location })?;
    let to = FORMAT_VERSION;
    let Some(from) = older_format(&storage)? else {
        return Ok(Upgraded {
            from: to,
            to,
            torn_batches: 0,
        });
    };
    let (found, _lock) = begin_format(&storage, lock, &options, to)?;
    Ok(Upgraded {
        from,
        to,
        torn_batches: found.torn_batches,
    })
}

/// The journal's format, if it must be upgraded before this program writes to it. One that can read a
/// newer format must not write to it either.
fn older_format<S: Storage>(storage: &S) -> Result<Option<u32>, OpenError> {
    let Some(last) = Found::list(storage)?.segments.last().copied() else {
        return Ok(None);
    };
    match read_header(storage, last)?.format_version {
        FORMAT_VERSION => Ok(None),
        older if older < FORMAT_VERSION => Ok(Some(older)),
        newer => Err(OpenError::NewerFormat {
            file: segment_name(last),
            written: newer,
            needed: newer,
            known: FORMAT_VERSION,
        }),
    }
}

/// Begins a segment in this format, by an opening that ends at once. It is empty, so no record of before
/// stands in a segment of the new format. Returns what was found first.
pub(crate) fn begin_format<S: Storage>(
    storage: &S,
    mut lock: S::Lock,
    options: &JournalOptions,
    version: u32,
) -> Result<(RecoveryReport, S::Lock), OpenError> {
    let mut report = None;
    loop {
        let found = Found::list(storage)?;
        let mut recovered = recover(storage, &found, &mut |_| Ok(()))?;
        let is_proven = recovered.unproven.is_empty();
        if is_proven {
            recovered.format.version = version;
        }
        let opened = start(storage.clone(), lock, options.clone(), found, recovered)?;
        let report = report.get_or_insert(opened.report);
        lock = opened.writer.into_lock();
        if is_proven {
            return Ok((report.clone(), lock));
        }
        // All of it is proven now.
    }
}

/// The journal's files.
#[derive(Default)]
pub(crate) struct Found {
    /// Numbers, in order.
    pub segments: Vec<u64>,
    pub spares: Vec<String>,
    pub unfinished: bool,
    pub newest: bool,
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
            } else if name == NEWEST {
                found.newest = true;
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
    format: Format,
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
            format: Format::NEWEST,
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
        format: Format,
        last_segment: u64,
        last_epoch: u32,
        base_position: u64,
    ) -> Self {
        Self {
            format,
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
    found: &Found,
    replay: &mut Replay<'_>,
) -> Result<Recovered, OpenError> {
    let segments = &found.segments;
    let number = *segments.last().expect("a journal has a segment");
    let header = read_header(storage, number)?;
    let closed_through = check_newest(storage, found, &header)?;
    let mut last = SegmentImage::load(storage, header)?;
    last.closed_through = closed_through;
    let tail = find_tail(storage, &last)?;
    let oldest = number.saturating_sub(u64::from(tail.older_segments));
    let mut headers = Vec::new();
    for wanted in oldest..number {
        if !segments.contains(&wanted) {
            return Err(missing(storage, wanted));
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
            let begin = batch.offset();
            offset = batch.end;
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
                let format = header.format_version;
                joiner.take(chain.sequence, format, record, |what| damaged(offset, what))?;
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
    joiner.report.was_closed = closed_through > 0;
    joiner.report.rewritten_records = joiner.unproven.len() as u64;
    joiner.report.through = joiner.next_position - 1;
    Ok(Recovered {
        base_position: joiner.next_position - joiner.unproven.len() as u64,
        report: joiner.report,
        unproven: joiner.unproven,
        index,
        segments: counted,
        format: headers.last().expect("there is the last one").format(),
        number,
        epoch: headers.last().expect("there is the last one").epoch,
        proven,
    })
}

/// Whether the last segment that is there is the newest one. After which batch it was closed in order;
/// 0: it was not.
fn check_newest<S: Storage>(
    storage: &S,
    found: &Found,
    last: &SegmentHeader,
) -> Result<u64, OpenError> {
    let damaged = |what| Err(OpenError::damaged(storage, NEWEST, 0, what));
    let slot = NewestSlot::read(storage, found)?;
    let is_ours = |slot: &NewestSlot| slot.journal_id == last.journal_id;
    match slot {
        Some(slot) if !is_ours(&slot) && last.format_version >= 2 => {
            damaged("it is that of another journal")
        }
        Some(slot) if !is_ours(&slot) => Ok(0),
        Some(slot) if slot.segment > last.segment => Err(missing(storage, slot.segment)),
        Some(slot) if slot.segment == last.segment => Ok(slot.closed_through),
        Some(_) => Ok(0),
        // Formats before did without it, and the upgrade of one may have been interrupted.
        None if last.format_version < 2 => Ok(0),
        None if found.newest => damaged("none of its checksums is right"),
        None => damaged("the file is missing"),
    }
}

/// Where there is no segment, there was none.
pub(crate) fn check_nothing<S: Storage>(storage: &S, found: &Found) -> Result<(), OpenError> {
    match NewestSlot::read(storage, found)? {
        Some(slot) if slot.segment > 0 => Err(missing(storage, slot.segment)),
        _ => Ok(()),
    }
}

fn missing<S: Storage>(storage: &S, segment: u64) -> OpenError {
    let name = segment_name(segment);
    OpenError::damaged(storage, &name, 0, "the file is missing")
}

fn find_tail<S: Storage>(storage: &S, last: &SegmentImage) -> Result<Tail, OpenError> {
    let mut chain = last.first_link();
    let mut proven = chain.sequence.max(last.header.durable_through);
    proven = proven.max(last.closed_through);
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
        let what = format!("{flaw}, {proof}");
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
        format: u32,
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
                self.complete(sequence, format, position, record.payload)
            }
            (Some(parts), RecordKind::Middle | RecordKind::Last)
                if position == self.next_position =>
            {
                parts.extend_from_slice(record.payload);
                if record.kind == RecordKind::Middle {
                    return Ok(());
                }
                let whole = self.parts.take().expect("it was there");
                self.complete(sequence, format, position, &whole)
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

    fn complete(
        &mut self,
        sequence: u64,
        format: u32,
        position: u64,
        record: &[u8],
    ) -> Result<(), OpenError> {
        let replayed = (self.replay)(Replayed {
            position,
            format,
            bytes: record,
        });
        replayed.map_err(|error| match error {
            NotReplayed::Newer(why) => OpenError::NewerRecord { position, why },
            NotReplayed::Wrong(why) => OpenError::Replay { position, why },
        })?;
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
    mut found: Found,
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
    let asked = storage.clone();
    journal.ask_for_free_bytes(Box::new(move || asked.free_bytes()));

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
    Ok(Opened {
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

/// The first segment of an opening, under a name at which it does not count yet.
struct Opening<'a, S> {
    storage: &'a S,
    options: &'a JournalOptions,
    format: Format,
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
    use crate::format::FEATURE_OF_TESTS;
    use crate::sim::{Fault, Rng, SimStorage};

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
            Journal::open(storage.clone(), options(), &mut |_| Ok(())).expect("it opens");
        for _ in 0..records {
            opened.journal.append(opened.next_position, &[7; 900]);
            opened.next_position += 1;
        }
        while let Some(batch) = opened.journal.take_batch() {
            opened.writer.write(&batch).unwrap();
        }
        opened.writer.sync().unwrap();
    }

    /// As the last program before format 2 would have left it: the layouts of both are the same.
    fn of_format_1(records: u64) -> SimStorage {
        let storage = SimStorage::new();
        append(&storage, records);
        let found = Found::list(&storage).unwrap();
        for number in found.segments {
            let mut page = storage.contents(&segment_name(number)).unwrap();
            let mut header = SegmentHeader::decode(&page).unwrap();
            header.format_version = 1;
            header.minimum_reader = 1;
            page[..SegmentHeader::BYTES].copy_from_slice(&header.encode());
            storage.corrupt(&segment_name(number), page);
        }
        storage
    }

    /// Each record's format.
    fn replayed(
        storage: &SimStorage,
        upgrades: bool,
    ) -> Result<(Vec<u32>, RecoveryReport), OpenError> {
        let mut formats = Vec::new();
        let options = JournalOptions {
            upgrades,
            ..options()
        };
        let opened = Journal::open(storage.clone(), options, &mut |record| {
            assert_eq!(record.bytes, [7; 900]);
            assert_eq!(record.position, formats.len() as u64 + 1);
            formats.push(record.format);
            Ok(())
        })?;
        assert_eq!(opened.format, FORMAT_VERSION);
        Ok((formats, opened.report))
    }

    #[test]
    fn a_journal_of_format_1_is_refused_with_what_to_type_until_it_is_upgraded() {
        let storage = of_format_1(5);
        let (calls, formats_before) = (storage.calls(), formats(&storage));
        assert!(formats_before.len() >= 2, "it has rolled");
        assert_eq!(
            replayed(&storage, false).unwrap_err().to_string(),
            "(simulated) is in format 1, and this program writes format 2. Nothing is lost and nothing was \
             changed. To go on with it, type `penstock journal upgrade (simulated)` once: earlier programs refuse it \
             from then on, so copy the directory first if you may want to go back to one"
        );
        assert_eq!(storage.calls(), calls, "something was changed");

        let upgraded = upgrade(storage.clone(), options()).unwrap();
        assert_eq!((upgraded.from, upgraded.to), (1, 2));
        append(&storage, 5);
        assert_eq!(formats(&storage).last(), Some(&2));
        // Also what no watermark covered is of the format that it was written in.
        let (found, report) = replayed(&storage, false).unwrap();
        assert_eq!(found, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
        assert_eq!(report.upgraded_from, None);
    }

    #[test]
    fn an_opening_that_may_upgrade_does_so_first_and_says_it() {
        let storage = of_format_1(3);
        let (found, report) = replayed(&storage, true).unwrap();
        assert_eq!(found, [1, 1, 1]);
        assert_eq!(report.upgraded_from, Some(1));
        append(&storage, 1);
        let (found, report) = replayed(&storage, true).unwrap();
        assert_eq!(found, [1, 1, 1, 2]);
        assert_eq!(report.upgraded_from, None);
    }

    #[test]
    fn a_power_cut_at_any_call_of_an_upgrade_costs_nothing() {
        let found = of_format_1(3);
        for cut in 0.. {
            let storage = found.fork();
            storage.fail_at(storage.calls() + cut, Fault::PowerOff);
            let is_done = upgrade(storage.clone(), options()).is_ok();
            for seed in 0..8 {
                let after = storage.fork().crash(&mut Rng::new(seed));
                let (formats, _) = replayed(&after, true).unwrap();
                assert_eq!(formats, [1, 1, 1], "cut {cut}, seed {seed}");
            }
            if is_done {
                assert!(cut > 10);
                return;
            }
        }
    }

    #[test]
    fn features_are_those_that_the_journal_uses_and_not_all_that_the_program_knows() {
        for features in [0, FEATURE_OF_TESTS] {
            let storage = SimStorage::new();
            let lock = storage.lock().unwrap().unwrap();
            let mut recovered = Recovered::nothing([7; 16]);
            recovered.format.features |= features;
            drop(
                start(
                    storage.clone(),
                    lock,
                    options(),
                    Found::default(),
                    recovered,
                )
                .unwrap(),
            );
            append(&storage, 5);
            let segments = Found::list(&storage).unwrap().segments;
            assert!(segments.len() >= 3, "it has opened, and rolled");
            for number in segments {
                let header = read_header(&storage, number).unwrap();
                assert_eq!(header.features, features);
            }
        }
    }

    #[test]
    fn a_journal_of_a_newer_program_is_refused_and_left_untouched() {
        let storage = SimStorage::new();
        append(&storage, 3);
        let lock = storage.lock().unwrap().unwrap();
        drop(begin_format(&storage, lock, &options(), FORMAT_VERSION + 1).unwrap());
        let calls = storage.calls();
        let name = segment_name(*Found::list(&storage).unwrap().segments.last().unwrap());
        for refused in [
            replayed(&storage, true).map(|_| ()),
            upgrade(storage.clone(), options()).map(|_| ()),
            crate::fsck(&storage).map(|_| ()),
        ] {
            assert_eq!(
                refused.unwrap_err().to_string(),
                format!(
                    "{name} was written in format 3 and needs a program that knows format 3; this one knows \
                     format 2: use a newer penstock. Nothing was changed"
                )
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
