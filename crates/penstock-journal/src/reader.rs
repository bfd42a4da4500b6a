//! Reads records back, on its own thread, while the writer continues.
//!
//! *Never wrong bytes.* A segment may be dropped and its file overwritten while it is read. The writer announces that a
//! segment is gone before it reuses the file, so bytes read before the announcement belong to the segment. In addition
//! the batch header must name the journal and the segment, the record must state its position, and its checksum must be
//! right. A requested record was synced before anybody could ask for it, and is not written again.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use crc32c::crc32c_append;

use crate::format::{
    BatchHeader, FIRST_BATCH, PAGE, RecordHeader, RecordKind, batch_aligned, batch_tag,
    segment_name,
};
use crate::marks::{ReadAt, RecordMark};
use crate::storage::{Storage, StoredFile};

/// Bytes read from a file at a time.
const BLOCK_BYTES: u64 = 256 << 10;
/// Number of blocks kept: this many queues can be read at the same time in ascending order, with one call for each
/// block.
const BLOCKS: usize = 16;

/// Reason why a record can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The segment was dropped. Its live records were carried forward first: ask the journal for their new location.
    #[error("the segment has been dropped")]
    Gone,
    #[error("{file} is damaged at byte {offset}: {what}")]
    Damaged {
        file: String,
        offset: u64,
        what: &'static str,
    },
    #[error("could not read {file}: {source}")]
    Io { file: String, source: io::Error },
}

/// Reads the bytes that [`crate::Journal::reads`] has located, and keeps a few blocks in memory.
pub struct JournalReader<S: Storage> {
    blocks: Blocks<S>,
    tag: u32,
    /// End of the last walk, so that the next one in ascending order need not begin at its mark.
    cursor: Option<Cursor>,
    /// Records whose checksum was verified, while their bytes are among the blocks: the messages of a long record are
    /// read one by one.
    verified: Vec<Found>,
}

/// Record header to examine next, and its batch.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    segment: u64,
    sequence: u64,
    batch_end: u64,
    record: u64,
    /// Position of the record, and bytes of its payload before this part.
    position: u64,
    skipped: u64,
}

/// Record, or part of one, that was located.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    segment: u64,
    /// Offset of the record's header.
    record: u64,
    length: u64,
    skipped: u64,
    checksum: u32,
}

impl Found {
    fn payload(&self) -> u64 {
        self.record + RecordHeader::BYTES as u64
    }
}

impl<S: Storage> JournalReader<S> {
    pub(crate) fn new(storage: S, journal_id: [u8; 16], dropped_through: Arc<AtomicU64>) -> Self {
        Self {
            blocks: Blocks {
                storage,
                dropped_through,
                kept: Vec::new(),
                were_kept: false,
            },
            tag: batch_tag(journal_id),
            cursor: None,
            verified: Vec::new(),
        }
    }

    /// Reads the requested bytes of the record's payload.
    pub fn read(&mut self, at: &ReadAt) -> Result<Bytes, ReadError> {
        self.blocks.were_kept = false;
        match self.read_once(at) {
            // A block read before the record was written does not contain it: read it again.
            Err(ReadError::Damaged { .. }) if self.blocks.were_kept => {
                self.forget();
                self.read_once(at)
            }
            result => result,
        }
        .inspect_err(|_| self.forget())
    }

    /// Frees the blocks that speed up further reads.
    pub fn forget(&mut self) {
        self.blocks.kept = Vec::new();
        self.verified = Vec::new();
        self.cursor = None;
    }

    fn read_once(&mut self, at: &ReadAt) -> Result<Bytes, ReadError> {
        let mut wanted = at.range.clone();
        let mut bytes = BytesMut::zeroed((wanted.end - wanted.start) as usize);
        let mut rest = &mut bytes[..];
        for mark in &at.marks {
            let found = self.find(mark, at.position, wanted.start)?;
            self.verify(&found)?;
            let end = wanted.end.min(found.skipped + found.length);
            if end < wanted.start {
                return Err(damaged(&found, "the record is shorter than it was"));
            }
            let (piece, behind) = rest.split_at_mut((end - wanted.start) as usize);
            let from = found.payload() + wanted.start - found.skipped;
            self.blocks.copy(found.segment, from, piece)?;
            rest = behind;
            wanted.start = end;
            if !wanted.is_empty() {
                continue;
            }
            return Ok(bytes.freeze());
        }
        let last = at.marks.last().expect("there is somewhere to look");
        let offset = last.record;
        Err(damage(
            last.segment,
            offset,
            "the record is shorter than it was",
        ))
    }

    /// Walks to the record, or to the part of it that holds `byte` of its payload.
    fn find(&mut self, mark: &RecordMark, position: u64, byte: u64) -> Result<Found, ReadError> {
        let mut cursor = match self.cursor {
            Some(cursor)
                if cursor.segment == mark.segment
                    && cursor.record >= mark.record
                    && (cursor.position, cursor.skipped) <= (position, byte) =>
            {
                cursor
            }
            _ => self.begin(mark)?,
        };
        loop {
            if cursor.record == cursor.batch_end {
                cursor = self.next_batch(&cursor)?;
            }
            let mut header = [0; RecordHeader::BYTES];
            let behind = cursor.record + RecordHeader::BYTES as u64;
            let strayed = |what| damage(cursor.segment, cursor.record, what);
            if behind > cursor.batch_end {
                return Err(strayed("a record's header is cut off"));
            }
            self.blocks
                .copy(cursor.segment, cursor.record, &mut header)?;
            let header = RecordHeader::get_from(&header);
            let kind = RecordKind::try_from(header.kind)
                .map_err(|()| strayed("there is no record of a known kind"))?;
            let length = u64::from(header.length.0);
            if behind + length > cursor.batch_end {
                return Err(strayed("a record is longer than its batch"));
            }
            // Positions rise by one from the start of the walk.
            if header.position != cursor.position {
                return Err(strayed("another record is here"));
            }
            let skipped = if kind.begins() { 0 } else { cursor.skipped };
            if header.position == position && byte <= skipped + length {
                self.cursor = Some(Cursor { skipped, ..cursor });
                return Ok(Found {
                    segment: cursor.segment,
                    record: cursor.record,
                    length,
                    skipped,
                    checksum: header.checksum,
                });
            }
            if header.position > position || (header.position == position && kind.ends()) {
                return Err(strayed("the record is not where it was written"));
            }
            cursor.record = behind + length;
            (cursor.position, cursor.skipped) = match kind.ends() {
                true => (header.position + 1, 0),
                false => (header.position, skipped + length),
            };
        }
    }

    fn begin(&mut self, mark: &RecordMark) -> Result<Cursor, ReadError> {
        let header = self.batch_header(mark.segment, mark.batch)?;
        Ok(Cursor {
            segment: mark.segment,
            sequence: header.sequence,
            batch_end: batch_end(mark.batch, &header),
            record: mark.record,
            position: mark.position,
            skipped: mark.skipped,
        })
    }

    fn next_batch(&mut self, last: &Cursor) -> Result<Cursor, ReadError> {
        let offset = batch_aligned(last.batch_end);
        // A batch without records may be at the next page.
        let page = offset.next_multiple_of(PAGE);
        let (offset, header) = match self.following(last, offset) {
            Err(damage @ ReadError::Damaged { .. }) => match self.following(last, page) {
                Ok(header) if header.length == 0 => (page, header),
                Err(error @ (ReadError::Gone | ReadError::Io { .. })) => return Err(error),
                _ => return Err(damage),
            },
            header => (offset, header?),
        };
        let next = Cursor {
            sequence: header.sequence,
            batch_end: batch_end(offset, &header),
            record: offset + BatchHeader::BYTES as u64,
            ..*last
        };
        match header.length {
            // The batch has a watermark only.
            0 => self.next_batch(&next),
            _ => Ok(next),
        }
    }

    fn following(&mut self, last: &Cursor, offset: u64) -> Result<BatchHeader, ReadError> {
        let header = self.batch_header(last.segment, offset)?;
        match header.sequence == last.sequence + 1 {
            true => Ok(header),
            false => Err(damage(
                last.segment,
                offset,
                "the batch does not follow the one before",
            )),
        }
    }

    fn batch_header(&mut self, segment: u64, offset: u64) -> Result<BatchHeader, ReadError> {
        debug_assert!(offset >= FIRST_BATCH);
        let mut bytes = [0; BatchHeader::BYTES];
        self.blocks.copy(segment, offset, &mut bytes)?;
        BatchHeader::decode(&bytes)
            .filter(|header| header.tag == self.tag && header.segment == segment)
            .ok_or_else(|| {
                damage(
                    segment,
                    offset,
                    "there is no valid header of a batch of this segment",
                )
            })
    }

    fn verify(&mut self, found: &Found) -> Result<(), ReadError> {
        if self.verified.contains(found) && self.blocks.has(found) {
            return Ok(());
        }
        // Covers all of the header but the checksum, and the payload.
        let from = found.record + u64::from(u32::BITS / 8);
        let end = found.payload() + found.length;
        if self.blocks.checksum(found.segment, from..end)? != found.checksum {
            return Err(damaged(found, "a record's checksum is wrong"));
        }
        if self.verified.len() == BLOCKS {
            self.verified.remove(0);
        }
        self.verified.push(*found);
        Ok(())
    }
}

fn batch_end(offset: u64, header: &BatchHeader) -> u64 {
    offset + BatchHeader::BYTES as u64 + u64::from(header.length)
}

fn damage(segment: u64, offset: u64, what: &'static str) -> ReadError {
    let file = segment_name(segment);
    ReadError::Damaged { file, offset, what }
}

fn damaged(found: &Found, what: &'static str) -> ReadError {
    damage(found.segment, found.record, what)
}

/// Blocks of segments as they were read; the last used comes first.
struct Blocks<S> {
    storage: S,
    /// Number up to which segments may be overwritten.
    dropped_through: Arc<AtomicU64>,
    kept: Vec<Block>,
    /// Whether bytes came from a block that was kept.
    were_kept: bool,
}

struct Block {
    segment: u64,
    number: u64,
    bytes: Vec<u8>,
}

impl<S: Storage> Blocks<S> {
    fn copy(&mut self, segment: u64, offset: u64, target: &mut [u8]) -> Result<(), ReadError> {
        let mut copied = 0;
        self.each_piece(segment, offset..offset + target.len() as u64, |piece| {
            target[copied..copied + piece.len()].copy_from_slice(piece);
            copied += piece.len();
        })
    }

    fn checksum(&mut self, segment: u64, range: Range<u64>) -> Result<u32, ReadError> {
        let mut checksum = 0;
        self.each_piece(segment, range, |piece| {
            checksum = crc32c_append(checksum, piece);
        })?;
        Ok(checksum)
    }

    fn each_piece(
        &mut self,
        segment: u64,
        mut range: Range<u64>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), ReadError> {
        while !range.is_empty() {
            let number = range.start / BLOCK_BYTES;
            let begin = number * BLOCK_BYTES;
            let end = range.end.min(begin + BLOCK_BYTES);
            let block = self.block(segment, number)?;
            let piece = (range.start - begin) as usize..(end - begin) as usize;
            take(
                block
                    .get(piece)
                    .ok_or_else(|| damage(segment, range.start, "the file ends"))?,
            );
            range.start = end;
        }
        Ok(())
    }

    /// Whether the whole record is unchanged since it was verified.
    fn has(&self, found: &Found) -> bool {
        let last = (found.payload() + found.length).saturating_sub(1) / BLOCK_BYTES;
        (found.record / BLOCK_BYTES..=last).all(|number| {
            let kept = |block: &Block| (block.segment, block.number) == (found.segment, number);
            self.kept.iter().any(kept)
        })
    }

    fn block(&mut self, segment: u64, number: u64) -> Result<&[u8], ReadError> {
        let kept = |block: &Block| (block.segment, block.number) == (segment, number);
        match self.kept.iter().position(kept) {
            Some(0) => self.were_kept = true,
            Some(place) => {
                self.were_kept = true;
                self.kept[..=place].rotate_right(1);
            }
            None => {
                let mut bytes = match self.kept.len() {
                    BLOCKS => self.kept.pop().expect("there are some").bytes,
                    _ => Vec::new(),
                };
                self.read(segment, number, &mut bytes)?;
                let block = Block {
                    segment,
                    number,
                    bytes,
                };
                self.kept.insert(0, block);
            }
        }
        Ok(&self.kept[0].bytes)
    }

    fn read(&self, segment: u64, number: u64, bytes: &mut Vec<u8>) -> Result<(), ReadError> {
        let file = segment_name(segment);
        bytes.resize(BLOCK_BYTES as usize, 0);
        // Opened each time: an open file would keep a removed segment on the disk.
        let read = self
            .storage
            .open(&file)
            .and_then(|file| file.read_at(number * BLOCK_BYTES, bytes));
        if segment <= self.dropped_through.load(Ordering::Acquire) {
            return Err(ReadError::Gone);
        }
        match read {
            Ok(read) => {
                bytes.truncate(read);
                Ok(())
            }
            Err(source) if source.kind() == io::ErrorKind::NotFound => {
                Err(damage(segment, 0, "the file is missing"))
            }
            Err(source) => Err(ReadError::Io { file, source }),
        }
    }
}
