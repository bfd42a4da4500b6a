//! Reads all sound records of a damaged journal, and reports the damage.
//!
//! A batch whose checksums are right is sound, wherever it is. In any other batch each record is judged by its own
//! checksum. After a bad record the next one is searched for, and believed only if records follow each other from there
//! to the end of the batch.

use crate::format::{
    BATCH_ALIGN, BatchHeader, FIRST_BATCH, Format, NewestSlot, RecordHeader, RecordKind,
    RecordPart, SegmentHeader, batch_tag, segment_name,
};
use crate::open_error::OpenError;
use crate::recovery::{Found, Replayed};
use crate::scan::{Flaw, SegmentImage, read_damaged_header};
use crate::storage::Storage;

/// Records that can't be recovered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Position of the first lost record; `records` of them are certainly gone.
    pub position: u64,
    pub records: u64,
    /// Whether the loss is at the beginning or the end of the journal, so that more records may be missing.
    pub is_open_ended: bool,
    pub file: String,
    /// Start of the damage, and start of the next sound record.
    pub from: u64,
    pub to: u64,
    pub what: String,
    /// Bytes found in place of a record. Read them with doubt: the checksum is wrong.
    pub remains: Vec<Vec<u8>>,
}

/// Facts that a damaged journal still states about itself.
#[derive(Debug)]
pub(crate) struct Salvage {
    pub lost: Vec<Lost>,
    pub records: u64,
    pub torn_batches: u64,
    /// Highest epoch of any batch.
    pub epoch: u32,
    /// Format of the newest segment whose header can be read.
    pub format: Format,
}

/// Callback for each sound record, in order.
pub(crate) type Keep<'a> = dyn FnMut(Replayed<'_>) -> Result<(), OpenError> + 'a;

pub(crate) fn salvage<S: Storage>(
    storage: &S,
    found: &Found,
    keep: &mut Keep<'_>,
) -> Result<Salvage, OpenError> {
    let mut headers = Vec::new();
    for &number in &found.segments {
        headers.push((number, read_damaged_header(storage, number)?));
    }
    let known = headers.iter().find_map(|(_, (header, _))| *header);
    let Some(known) = known else {
        let first = found.segments.first().copied().unwrap_or(1);
        return Err(OpenError::damaged(
            storage,
            &segment_name(first),
            0,
            "no header of any segment can be read, so nothing tells old batches from new ones",
        ));
    };
    let mut salvager = Salvager {
        keep,
        salvage: Salvage {
            lost: Vec::new(),
            records: 0,
            torn_batches: 0,
            epoch: 0,
            format: known.format(),
        },
        next: None,
        parts: None,
        damage: None,
        format: known.format_version,
    };
    let mut images = Vec::new();
    let mut known = known;
    for (number, (header, flaw)) in headers {
        images.push(Image::load(storage, number, header, flaw, &known)?);
        known = header.unwrap_or(known);
    }
    salvager.salvage.format = known.format();
    let oldest = oldest_that_counts(storage, &images)?;
    // Older segments were dropped; only their files still exist.
    images.retain(|image| image.number >= oldest);
    if images.first().is_none_or(|first| first.number > oldest) {
        salvager.damaged(&segment_name(oldest), 0..0, "the file is missing");
    }
    let slot = NewestSlot::read(storage, found)?;
    let slot = slot.filter(|slot| slot.journal_id == known.journal_id);
    for index in 0..images.len() {
        let successor = images.get(index + 1);
        let counts_through = successor.and_then(|next| next.base_sequence.checked_sub(1));
        let is_last = successor.is_none();
        let mut bytes = images[index].read(storage)?;
        if let Some(slot) = slot
            && slot.segment == images[index].number
        {
            bytes.closed_through = slot.closed_through;
        }
        if let Some(before) = index.checked_sub(1)
            && images[before].number + 1 < images[index].number
        {
            salvager.damaged(
                &segment_name(images[before].number + 1),
                0..0,
                "the file is missing",
            );
        }
        salvager.segment(&images[index], bytes, counts_through, is_last)?;
    }
    if let Some(slot) = slot
        && images.last().is_some_and(|last| last.number < slot.segment)
    {
        salvager.damaged(&segment_name(slot.segment), 0..0, "the file is missing");
    }
    let unreadable = images.iter().filter(|image| image.header_is_lost).count();
    let mut salvage = salvager.finish();
    salvage.epoch += u32::try_from(unreadable).expect("few segments");
    Ok(salvage)
}

/// Segment, whose header may have been reconstructed from its batches.
struct Image {
    number: u64,
    header: SegmentHeader,
    header_is_lost: bool,
    flaw: Option<Flaw>,
    /// Number of its first batch; 0: nothing in it can be read.
    base_sequence: u64,
    /// Offset of the first batch that can be read, if the header can't.
    first_batch: u64,
}

impl Image {
    fn load<S: Storage>(
        storage: &S,
        number: u64,
        header: Option<SegmentHeader>,
        flaw: Option<Flaw>,
        known: &SegmentHeader,
    ) -> Result<Self, OpenError> {
        let header_is_lost = header.is_none();
        let mut first_batch = FIRST_BATCH;
        let mut base_sequence = header.map_or(0, |header| header.base_sequence);
        let mut header = header.unwrap_or(SegmentHeader {
            segment: number,
            durable_through: 0,
            base_position: 0,
            base_sequence: 1,
            previous: 0,
            epoch: 0,
            ..*known
        });
        if header_is_lost {
            let image = SegmentImage::load(storage, header)?;
            let tag = batch_tag(known.journal_id);
            let first = (FIRST_BATCH..image.bytes.len() as u64)
                .step_by(BATCH_ALIGN as usize)
                .filter_map(|at| Some((at, BatchHeader::decode(&image.bytes[at as usize..])?)))
                .find(|(_, batch)| batch.tag == tag && batch.segment == number);
            if let Some((at, first)) = first {
                first_batch = at;
                header.epoch = first.epoch;
                header.base_sequence = first.sequence;
                header.base_position = first.first_position;
                header.previous = first.previous;
                base_sequence = first.sequence;
            }
        }
        Ok(Self {
            number,
            header,
            header_is_lost,
            flaw,
            base_sequence,
            first_batch,
        })
    }

    fn read<S: Storage>(&self, storage: &S) -> Result<SegmentImage, OpenError> {
        SegmentImage::load(storage, self.header)
    }
}

/// Returns the oldest segment that counts, as the last readable batch states it.
fn oldest_that_counts<S: Storage>(storage: &S, images: &[Image]) -> Result<u64, OpenError> {
    let Some(last) = images.iter().rfind(|image| image.base_sequence > 0) else {
        return Ok(0);
    };
    let image = last.read(storage)?;
    let mut older = (!last.header_is_lost).then_some(last.header.older_segments);
    let (mut offset, mut sequence) = (FIRST_BATCH, last.base_sequence - 1);
    while let Some((at, batch)) = image.next_batch(offset, sequence) {
        older = Some(batch.older_segments);
        (offset, sequence) = (at + BATCH_ALIGN, batch.sequence);
    }
    Ok(last.number - u64::from(older.unwrap_or(0)).min(last.number))
}

struct Salvager<'a> {
    keep: &'a mut Keep<'a>,
    salvage: Salvage,
    /// Expected position of the next record; `None` before the first.
    next: Option<u64>,
    /// Long record that is not complete yet.
    parts: Option<(u64, Vec<u8>)>,
    /// Damage since the last sound record.
    damage: Option<Lost>,
    /// Format of the segment being read; a segment without a header takes that of the previous one.
    format: u32,
}

impl Salvager<'_> {
    fn segment(
        &mut self,
        of: &Image,
        image: SegmentImage,
        counts_through: Option<u64>,
        is_last: bool,
    ) -> Result<(), OpenError> {
        self.salvage.epoch = self.salvage.epoch.max(of.header.epoch);
        self.format = of.header.format_version;
        if self.next.is_none() && !of.header_is_lost {
            self.next = Some(of.header.base_position);
        }
        if let Some((offset, what)) = of.flaw.as_ref().filter(|_| of.header_is_lost) {
            self.damaged(&image.name, *offset..of.first_batch, what);
        }
        if of.base_sequence == 0 {
            return Ok(());
        }
        let mut chain = image.first_link();
        let mut offset = of.first_batch;
        while counts_through.is_none_or(|through| chain.sequence < through) {
            let what = match image.batch_at(offset, &mut chain) {
                Ok(batch) => {
                    offset = batch.end;
                    for record in batch.records() {
                        match record {
                            Ok((_, record)) => self.take(record)?,
                            Err((at, what)) => self.damaged(&image.name, at..batch.end, what),
                        }
                    }
                    continue;
                }
                Err(what) => what,
            };
            let beyond = image.beyond(offset, chain.sequence);
            if is_last && beyond.proof.is_none() && !of.header_is_lost {
                self.salvage.torn_batches = beyond.torn_batches;
                break;
            }
            let next = image.next_batch(offset, chain.sequence + 1);
            let next = next
                .filter(|(_, next)| counts_through.is_none_or(|through| next.sequence <= through));
            if next.is_none() && is_last && of.header_is_lost {
                let what = "its end can't be found without its header";
                self.damaged(&image.name, offset..offset, what);
                break;
            }
            self.broken_batch(&image, offset, chain.sequence, next, what)?;
            let Some((at, header)) = next else { break };
            offset = at;
            chain.sequence = header.sequence - 1;
            chain.previous = header.previous;
        }
        if let Some((length, what)) = of.flaw.as_ref().filter(|_| !of.header_is_lost) {
            self.damaged(&image.name, *length..of.header.file_bytes, what);
        }
        Ok(())
    }

    /// Handles one or more invalid batches, up to the next valid one.
    fn broken_batch(
        &mut self,
        image: &SegmentImage,
        offset: u64,
        sequence: u64,
        next: Option<(u64, BatchHeader)>,
        what: &str,
    ) -> Result<(), OpenError> {
        let body = offset + BatchHeader::BYTES as u64;
        let file_end = image.bytes.len() as u64;
        let header = image
            .bytes
            .get(offset as usize..)
            .and_then(BatchHeader::decode);
        let header = header.filter(|header| header.sequence == sequence + 1);
        // The best known end of its records and range of their positions.
        let end = match (&header, &next) {
            (Some(header), _) => (body + u64::from(header.length)).min(file_end),
            (None, Some((at, _))) => *at,
            (None, None) => file_end,
        };
        let positions_end = match (&header, &next) {
            (Some(header), _) => Some(header.first_position + u64::from(header.count)),
            (None, Some((_, next))) => Some(next.first_position + 1),
            (None, None) => None,
        };
        // A batch of unknown length may have up to 63 other bytes after its last record.
        let slack = if header.is_some() { 0 } else { BATCH_ALIGN };
        let bytes = &image.bytes[..end as usize];
        let mut at = body;
        let mut bad_from = None;
        while at < end {
            let expected = self.next.unwrap_or(0);
            let sound = RecordPart::decode(&bytes[at as usize..])
                .ok()
                .filter(|(record, _)| {
                    let is_next = record.position == expected;
                    is_next || bad_from.is_some() && record.position > expected
                });
            match sound {
                Some((record, rest)) => {
                    if let Some(from) = bad_from.take() {
                        self.lost_record(image, from, at, what);
                    }
                    self.take(record)?;
                    at = end - rest.len() as u64;
                }
                None => {
                    let from = *bad_from.get_or_insert(at);
                    let resumed = positions_end
                        .and_then(|limit| resume(bytes, from + 1, expected, limit, slack));
                    match resumed {
                        Some(sound) => at = sound,
                        None => break,
                    }
                }
            }
        }
        if let Some(from) = bad_from {
            match header.is_some() || next.is_some() {
                true => self.lost_record(image, from, end, what),
                // These bytes may be old: nothing states where the batch ended.
                false if from == body => self.damaged(&image.name, offset..end, what),
                false => self.damaged(&image.name, from..end, what),
            }
        } else if at + slack < end || header.is_none() {
            self.damaged(&image.name, offset..end, what);
        }
        Ok(())
    }

    /// Notes unsound bytes between these offsets.
    fn lost_record(&mut self, image: &SegmentImage, from: u64, to: u64, what: &str) {
        self.damaged(&image.name, from..to, what);
        let payload = from as usize + RecordHeader::BYTES;
        if let Some(remains) = image.bytes.get(payload..to as usize)
            && let Some(damage) = &mut self.damage
        {
            damage.remains.push(remains.to_vec());
        }
    }

    fn damaged(&mut self, file: &str, range: std::ops::Range<u64>, what: &str) {
        match &mut self.damage {
            // Adjacent damage is one hole as long as nothing sound lies in between.
            Some(damage) if damage.file == file => damage.to = damage.to.max(range.end),
            Some(damage) => damage.what = format!("{}; {file}: {what}", damage.what),
            none => {
                *none = Some(Lost {
                    position: 0,
                    records: 0,
                    is_open_ended: self.next.is_none(),
                    file: file.to_string(),
                    from: range.start,
                    to: range.end,
                    what: what.to_string(),
                    remains: Vec::new(),
                });
            }
        }
    }

    fn take(&mut self, record: RecordPart<'_>) -> Result<(), OpenError> {
        let position = record.position;
        if self.next.is_some_and(|next| position < next) {
            // Rewritten later, or a remnant of a record that began in a dropped segment.
            return Ok(());
        }
        let is_continued = matches!(&self.parts, Some((of, _)) if *of == position);
        match record.kind {
            RecordKind::Whole => {
                self.parts = None;
                self.complete(position, record.payload)
            }
            RecordKind::First => {
                self.parts = Some((position, record.payload.to_vec()));
                Ok(())
            }
            // Its beginning is lost; the next whole record reveals that.
            RecordKind::Middle | RecordKind::Last if !is_continued || self.damage.is_some() => {
                self.parts = None;
                Ok(())
            }
            RecordKind::Middle | RecordKind::Last => {
                let (_, mut whole) = self.parts.take().expect("it is continued");
                whole.extend_from_slice(record.payload);
                match record.kind {
                    RecordKind::Last => self.complete(position, &whole),
                    _ => {
                        self.parts = Some((position, whole));
                        Ok(())
                    }
                }
            }
        }
    }

    fn complete(&mut self, position: u64, record: &[u8]) -> Result<(), OpenError> {
        let expected = self.next.unwrap_or(position);
        self.close_damage(expected, position - expected);
        (self.keep)(Replayed {
            position,
            format: self.format,
            bytes: record,
        })?;
        self.next = Some(position + 1);
        self.salvage.records += 1;
        Ok(())
    }

    fn close_damage(&mut self, position: u64, records: u64) {
        match self.damage.take() {
            Some(damage) => self.salvage.lost.push(Lost {
                position,
                records,
                ..damage
            }),
            None if records > 0 => self.salvage.lost.push(Lost {
                position,
                records,
                is_open_ended: false,
                file: String::new(),
                from: 0,
                to: 0,
                what: "the records are not there".to_string(),
                remains: Vec::new(),
            }),
            None => {}
        }
    }

    fn finish(mut self) -> Salvage {
        let position = self.next.unwrap_or(1);
        if let Some(damage) = &mut self.damage {
            damage.is_open_ended = true;
        }
        self.close_damage(position, 0);
        self.salvage
    }
}

/// Finds the first offset from which records follow each other to the end of the batch, with positions above `after`
/// and below `limit`.
fn resume(bytes: &[u8], from: u64, after: u64, limit: u64, slack: u64) -> Option<u64> {
    (from as usize..bytes.len().saturating_sub(RecordHeader::BYTES)).find_map(|at| {
        let position = u64::from_le_bytes(bytes.get(at + 8..at + 16)?.try_into().ok()?);
        if position < after || position >= limit {
            return None;
        }
        let mut rest = &bytes[at..];
        let mut last = position;
        let mut count = 0;
        while rest.len() as u64 >= RecordHeader::BYTES as u64 {
            let Ok((record, behind)) = RecordPart::decode(rest) else {
                break;
            };
            if record.position != last && record.position != last + 1 {
                break;
            }
            last = record.position;
            rest = behind;
            count += 1;
        }
        (count > 0 && (rest.len() as u64) <= slack).then_some(at as u64)
    })
}
