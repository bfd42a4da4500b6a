//! Reads one segment: decides whether a batch is valid, and whether it is proven to have been on disk.

use crc32c::crc32c;

use crate::format::{
    BATCH_ALIGN, BatchHeader, FIRST_BATCH, FORMAT_VERSION, KNOWN_FEATURES, PAGE, RecordHeader,
    RecordPart, SegmentHeader, batch_aligned, batch_tag, segment_name,
};
use crate::open_error::OpenError;
use crate::storage::{Storage, StoredFile};
use crate::writer::Chain;
use penstock_faults::planted;

/// A segment in memory.
pub(crate) struct SegmentImage {
    pub name: String,
    pub header: SegmentHeader,
    pub bytes: Vec<u8>,
    /// Batch after which the journal was closed cleanly, in this segment; 0: it was not.
    pub closed_through: u64,
}

/// Batch whose checksums are right and that follows the previous batch.
pub(crate) struct BatchView<'a> {
    pub header: BatchHeader,
    pub body: &'a [u8],
    /// Offset of the next batch.
    pub end: u64,
}

/// Findings after the last valid batch of a segment.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Beyond {
    /// Batches of this segment that can't be read or reached.
    pub torn_batches: u64,
    /// Proof that the missing batch had been synced.
    pub proof: Option<Proof>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    Header,
    /// Offset of a batch that was written after it.
    Batch(u64),
    Close,
}

impl std::fmt::Display for Proof {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Header => write!(out, "though it was on disk when the file got its name"),
            Self::Batch(at) => write!(
                out,
                "though the batch at byte {at} was written after it was synced"
            ),
            Self::Close => write!(out, "though the journal was closed cleanly after it"),
        }
    }
}

/// Reads and checks a segment's header.
pub(crate) fn read_header<S: Storage>(
    storage: &S,
    number: u64,
) -> Result<SegmentHeader, OpenError> {
    match read_damaged_header(storage, number)? {
        (Some(header), None) => Ok(header),
        (_, flaw) => {
            let (offset, what) = flaw.unwrap_or_default();
            let name = segment_name(number);
            Err(OpenError::damaged(storage, &name, offset, &what))
        }
    }
}

/// Reads the header, whatever the name of its file; `None`: it can't be read.
pub(crate) fn stated_header<S: Storage>(
    storage: &S,
    number: u64,
) -> Result<Option<SegmentHeader>, OpenError> {
    let name = segment_name(number);
    let mut page = vec![0; SegmentHeader::BYTES];
    let file = storage.open(&name).map_err(OpenError::io("open", &name))?;
    file.read_at(0, &mut page)
        .map_err(OpenError::io("read", &name))?;
    Ok(SegmentHeader::decode(&page).filter(SegmentHeader::is_plausible))
}

/// Offset of a fault, and a description.
pub(crate) type Flaw = (u64, String);

/// Reads the header if there is one, and describes what is wrong with it or with the file's length.
pub(crate) fn read_damaged_header<S: Storage>(
    storage: &S,
    number: u64,
) -> Result<(Option<SegmentHeader>, Option<Flaw>), OpenError> {
    let name = segment_name(number);
    let mut page = vec![0; SegmentHeader::BYTES];
    let file = storage.open(&name).map_err(OpenError::io("open", &name))?;
    let bytes = file.size().map_err(OpenError::io("read", &name))?;
    file.read_at(0, &mut page)
        .map_err(OpenError::io("read", &name))?;
    let Some(header) = SegmentHeader::decode(&page) else {
        let what = "the checksum of its header is wrong".to_string();
        return Ok((None, Some((0, what))));
    };
    if header.minimum_reader > FORMAT_VERSION {
        return Err(OpenError::NewerFormat {
            file: name,
            written: header.format_version,
            needed: header.minimum_reader,
            known: FORMAT_VERSION,
        });
    }
    let unknown = header.features & !KNOWN_FEATURES;
    if unknown != 0 {
        return Err(OpenError::UnknownFeatures {
            file: name,
            unknown,
        });
    }
    if !header.is_plausible() {
        let what = "its header has impossible numbers".to_string();
        return Ok((None, Some((0, what))));
    }
    if header.segment != number {
        let what = format!("its header is that of segment {}", header.segment);
        return Ok((None, Some((0, what))));
    }
    if bytes < header.file_bytes {
        let what = format!("the file was cut: it had {} bytes", header.file_bytes);
        return Ok((Some(header), Some((bytes, what))));
    }
    Ok((Some(header), None))
}

impl SegmentImage {
    pub fn load<S: Storage>(storage: &S, header: SegmentHeader) -> Result<Self, OpenError> {
        let name = segment_name(header.segment);
        let file = storage.open(&name).map_err(OpenError::io("open", &name))?;
        let length = file.size().map_err(OpenError::io("read", &name))?;
        let mut bytes = vec![0; length as usize];
        let read = file
            .read_at(0, &mut bytes)
            .map_err(OpenError::io("read", &name))?;
        bytes.truncate(read);
        Ok(Self {
            name,
            header,
            bytes,
            closed_through: 0,
        })
    }

    /// Returns the chain before the segment's first batch.
    pub fn first_link(&self) -> Chain {
        Chain {
            journal_id: self.header.journal_id,
            sequence: self.header.base_sequence - 1,
            previous: self.header.previous,
        }
    }

    /// Reads the batch at `offset` that follows `chain`, and advances the chain; or describes what is wrong. A batch
    /// without records may be at the next page instead.
    pub fn batch_at(&self, offset: u64, chain: &mut Chain) -> Result<BatchView<'_>, &'static str> {
        let here = self.batch_here(offset, *chain);
        let page = offset.next_multiple_of(PAGE);
        let batch = match here {
            Err(flaw) if self.header.format_version >= 2 && page > offset => {
                let there = self.batch_here(page, *chain);
                there
                    .ok()
                    .filter(|batch| batch.header.count == 0)
                    .ok_or(flaw)?
            }
            here => here?,
        };
        chain.sequence = batch.header.sequence;
        chain.previous = batch.header.checksum;
        Ok(batch)
    }

    fn batch_here(&self, offset: u64, chain: Chain) -> Result<BatchView<'_>, &'static str> {
        let bytes = self.bytes.get(offset as usize..).ok_or("the file ends")?;
        let header = BatchHeader::decode(bytes).ok_or("there is no valid header of a batch")?;
        if !self.is_ours(&header) && !planted!("accept-ghosts") {
            return Err("the batch belongs to another segment");
        }
        let follows = header.sequence == chain.sequence + 1 && header.previous == chain.previous;
        if !follows && !planted!("accept-ghosts") {
            return Err("the batch does not follow the one before");
        }
        // Its watermark serves as a proof only, and this one could prove anything.
        if header.durable_through >= header.sequence {
            return Err("the batch names batches as synced that were not written before it");
        }
        let body = bytes[BatchHeader::BYTES..].get(..header.length as usize);
        let body = body.ok_or("the batch is longer than the file")?;
        if crc32c(body) != header.body && !planted!("accept-torn-batch") {
            return Err("the checksum of the batch is wrong");
        }
        let end = batch_aligned(offset + BatchHeader::BYTES as u64 + u64::from(header.length));
        Ok(BatchView { header, body, end })
    }

    /// Finds the first batch at or after `offset` with a valid header and a number above `sequence`.
    pub fn next_batch(&self, offset: u64, sequence: u64) -> Option<(u64, BatchHeader)> {
        let tag = batch_tag(self.header.journal_id).to_le_bytes();
        (offset.max(FIRST_BATCH)..self.bytes.len() as u64)
            .step_by(BATCH_ALIGN as usize)
            .filter(|&offset| self.bytes[offset as usize..].starts_with(&tag))
            .filter_map(|offset| {
                Some((offset, BatchHeader::decode(&self.bytes[offset as usize..])?))
            })
            .find(|(_, header)| self.is_ours(header) && header.sequence > sequence)
    }

    /// Examines `offset` and everything after it, where the batch after `sequence` can't be read.
    pub fn beyond(&self, offset: u64, sequence: u64) -> Beyond {
        let missing = sequence + 1;
        let mut beyond = Beyond::default();
        if self.header.durable_through >= missing {
            beyond.proof = Some(Proof::Header);
        }
        if self.resembles_ours(offset) {
            beyond.torn_batches += 1;
        }
        let mut from = offset;
        while let Some((at, header)) = self.next_batch(from, sequence) {
            beyond.torn_batches += 1;
            if header.durable_through >= missing {
                beyond.proof = beyond.proof.or(Some(Proof::Batch(at)));
            }
            from = at + BATCH_ALIGN;
        }
        if self.closed_through >= missing {
            beyond.proof = beyond.proof.or(Some(Proof::Close));
        }
        beyond
    }

    /// Whether a batch belongs to this use of the file. Segment numbers are never reused, and the epoch tells attempts
    /// at one segment apart.
    fn is_ours(&self, header: &BatchHeader) -> bool {
        header.tag == batch_tag(self.header.journal_id)
            && header.segment == self.header.segment
            && header.epoch == self.header.epoch
    }

    /// Whether a broken header is close enough to a valid one of this segment to be no remnant.
    fn resembles_ours(&self, offset: u64) -> bool {
        let bytes = self.bytes.get(offset as usize..).unwrap_or_default();
        if BatchHeader::decode(bytes).is_some() {
            return false;
        }
        BatchHeader::decode_unchecked(bytes).is_some_and(|header| {
            let placed = header.segment == self.header.segment && header.epoch == self.header.epoch;
            placed || header.tag == batch_tag(self.header.journal_id)
        })
    }
}

impl<'a> BatchView<'a> {
    pub fn offset(&self) -> u64 {
        let bytes = (BatchHeader::BYTES + self.body.len()) as u64;
        self.end - batch_aligned(bytes)
    }

    /// Iterates over the records, each with its offset in the segment.
    pub fn records(
        &self,
    ) -> impl Iterator<Item = Result<(u64, RecordPart<'a>), (u64, &'static str)>> {
        let mut rest = self.body;
        let mut offset = self.offset() + BatchHeader::BYTES as u64;
        let mut left = self.header.count;
        std::iter::from_fn(move || {
            if left == 0 {
                let surplus = !std::mem::take(&mut rest).is_empty();
                return surplus.then_some(Err((offset, "there is data after the batch's records")));
            }
            left -= 1;
            let here = offset;
            match RecordPart::decode(rest) {
                Ok((record, behind)) => {
                    offset += (RecordHeader::BYTES + record.payload.len()) as u64;
                    rest = behind;
                    Some(Ok((here, record)))
                }
                Err(what) => {
                    (left, rest) = (0, &[]);
                    Some(Err((here, what)))
                }
            }
        })
    }
}
