//! Reads a journal, replays each record, and tells a torn end from a rotten middle.
//!
//! *Torn or rotten?* Each batch names the last batch that was synced when it was written: the watermark. An unreadable
//! batch above every watermark was never promised to anybody, so it and everything after it are cut off. An unreadable
//! batch at or below a watermark had been on disk, and somebody may rely on it. Then the journal is not opened, and the
//! error names the file, the offset and what to do. A segment with a successor is proven whole by it.

use std::collections::VecDeque;

use penstock_faults::planted;

use crate::format::{
    FIRST_BATCH, Format, NewestSlot, RecordKind, RecordPart, SegmentHeader, segment_name,
    segment_number,
};
use crate::journal::Segment;
use crate::marks::{RecordIndex, RecordMark, Spacing};
use crate::newest::NEWEST;
use crate::open::UNFINISHED;
use crate::open_error::OpenError;
use crate::scan::{SegmentImage, read_header};
use crate::spares::Spares;
use crate::storage::Storage;
use crate::writer::Chain;

/// Callback for each record; an error stops the opening.
pub type Replay<'a> = dyn FnMut(Replayed<'_>) -> Result<(), NotReplayed> + 'a;

/// Record that was read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replayed<'a> {
    pub position: u64,
    /// Format of the journal when the record was written.
    pub format: u32,
    pub bytes: &'a [u8],
}

/// Reason why a record can't be replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotReplayed {
    /// Record of a newer program; it is not damaged.
    Newer(String),
    Wrong(String),
}

/// Findings of an opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Whether there was no journal before.
    pub created: bool,
    /// Format that it was upgraded from.
    pub upgraded_from: Option<u32>,
    pub segments: u64,
    pub batches: u64,
    pub records: u64,
    /// Position of the last record; 0 when there is none.
    pub through: u64,
    /// Records that the watermark did not cover yet; they were written again.
    pub rewritten_records: u64,
    /// Number of writes that a crash interrupted; none was confirmed. They were cut off.
    pub torn_batches: u64,
    /// Whether it was closed cleanly, so that missing records would be noticed.
    pub was_closed: bool,
}

/// Files of the journal.
#[derive(Default)]
pub(crate) struct Found {
    /// Numbers of the segments, ascending.
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

/// Content of a journal, and the point where its next segment continues.
pub(crate) struct Recovered {
    pub report: RecoveryReport,
    /// Segments that still count.
    pub segments: VecDeque<Segment>,
    /// Format of the next segment.
    pub format: Format,
    /// Number of the last segment; 0 when there is none.
    pub number: u64,
    pub epoch: u32,
    /// Chain after the last batch that is proven to be on disk.
    pub proven: Chain,
    /// Index of the records up to that batch.
    pub index: RecordIndex,
    /// Records after that batch, and the position of the first record that is not proven.
    pub unproven: Vec<Vec<u8>>,
    pub base_position: u64,
}

impl Recovered {
    pub fn nothing(journal_id: [u8; 16]) -> Self {
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
            index: RecordIndex::default(),
            unproven: Vec::new(),
            base_position: 1,
        }
    }

    /// Begins an empty journal whose segments and epochs come after those of a damaged one.
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

/// End of the last segment.
struct Tail {
    /// Chain after the last valid batch.
    last: Chain,
    /// Number of the last batch proven to be on disk.
    proven: u64,
    /// Number of earlier segments that still count.
    older_segments: u32,
    torn_batches: u64,
}

/// Reads the journal without changing it.
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
    let mut index = RecordIndex::default();
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
                        index.add(RecordMark {
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

/// Checks that the last segment found is the newest one. Returns the batch after which it was closed cleanly; 0: it
/// was not.
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
            damaged("it belongs to another journal")
        }
        Some(slot) if !is_ours(&slot) => Ok(0),
        Some(slot) if slot.segment > last.segment => Err(missing(storage, slot.segment)),
        Some(slot) if slot.segment == last.segment => Ok(slot.closed_through),
        Some(_) => Ok(0),
        // Earlier formats did not have the file, and an upgrade may have been interrupted.
        None if last.format_version < 2 => Ok(0),
        None if found.newest => damaged("none of its checksums is correct"),
        None => damaged("the file is missing"),
    }
}

/// Checks that a journal without segments never had one.
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
    /// Position before which parts of a record are remnants: its first part was in a dropped segment.
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
            // The process that began the record died before its last part, and the next process used its position
            // again.
            self.parts = None;
            // The first part may also be in a dropped segment.
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
            Err(format!("it begins at record {found} instead of {expected}"))
        }
    }

    /// Returns the bytes of the record's payload before this part.
    fn skipped(&self, record: &RecordPart<'_>) -> u64 {
        let is_further = !record.kind.begins();
        let before = self.parts.as_ref().filter(|_| is_further);
        before.map_or(0, |parts| parts.len() as u64)
    }

    fn take(
        &mut self,
        sequence: u64,
        format: u32,
        record: RecordPart<'_>,
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
                    "record {position} is in the place of record {expected}"
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
