//! Marks: positions of records in the segments, at intervals, from which a reader walks on.
//!
//! A mark costs 40 bytes of memory for each 64 KiB of journal. The walk from a mark to a record never leaves a segment:
//! the first record of a segment has a mark, and so does each further part of a long record.

use std::collections::VecDeque;
use std::ops::Range;

use crate::format::RecordHeader;

/// Minimum bytes of journal between two marks, except for marks that are always set.
const SPACING_BYTES: u64 = 64 << 10;

/// Offset in a segment at which a record, or a part of one, begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordMark {
    pub position: u64,
    /// Bytes of the record's payload before this part.
    pub skipped: u64,
    pub segment: u64,
    /// Offsets of the batch header and of the record header.
    pub batch: u64,
    pub record: u64,
}

impl RecordMark {
    fn key(&self) -> (u64, u64) {
        (self.position, self.skipped)
    }
}

/// Decides for each record or part, in order, whether it gets a mark.
#[derive(Debug)]
pub(crate) struct Spacing {
    bytes: u64,
}

impl Default for Spacing {
    fn default() -> Self {
        // The very first record gets one.
        Self {
            bytes: SPACING_BYTES,
        }
    }
}

impl Spacing {
    /// Whether a record with this `payload` length gets a mark. `must`: it does in any case.
    pub fn is_due(&mut self, payload: usize, must: bool) -> bool {
        let due = must || self.bytes >= SPACING_BYTES;
        if due {
            self.bytes = 0;
        }
        self.bytes += (RecordHeader::BYTES + payload) as u64;
        due
    }
}

/// Locations of some bytes of one record. Returned by [`crate::Journal::reads`], used by
/// [`crate::JournalReader::read`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadAt {
    pub(crate) position: u64,
    pub(crate) range: Range<u64>,
    /// Start of the walk for each part that holds some of the range.
    pub(crate) marks: Vec<RecordMark>,
}

impl ReadAt {
    pub fn position(&self) -> u64 {
        self.position
    }

    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}

/// Marks of all segments that count, in the order of positions.
#[derive(Debug, Default)]
pub(crate) struct RecordIndex {
    marks: VecDeque<RecordMark>,
}

impl RecordIndex {
    pub fn add(&mut self, mark: RecordMark) {
        // A record that an earlier process left unfinished, or that was written again to a new segment, occurs twice:
        // the later copy counts.
        while self
            .marks
            .back()
            .is_some_and(|last| last.key() >= mark.key())
        {
            self.marks.pop_back();
        }
        self.marks.push_back(mark);
    }

    /// Whether this segment has a mark. It is the last segment with marks, or comes after it.
    pub fn knows(&self, segment: u64) -> bool {
        self.marks
            .back()
            .is_some_and(|mark| mark.segment == segment)
    }

    pub fn forget_segment(&mut self, segment: u64) {
        while self
            .marks
            .front()
            .is_some_and(|mark| mark.segment <= segment)
        {
            self.marks.pop_front();
        }
        // Returns memory after a time with many marks.
        if self.marks.len() < self.marks.capacity() / 4 {
            self.marks.shrink_to(self.marks.len() * 2);
        }
    }

    /// Locates a range of a record's payload; `None`: the record's segment was dropped.
    pub fn reads(&self, position: u64, range: Range<u64>) -> Option<ReadAt> {
        let behind = self
            .marks
            .partition_point(|mark| mark.key() <= (position, range.start));
        let first = behind.checked_sub(1)?;
        let further = self.marks.range(behind..);
        let further = further.take_while(|mark| mark.key() < (position, range.end));
        let mut marks = vec![self.marks[first]];
        marks.extend(further.copied());
        Some(ReadAt {
            position,
            range,
            marks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(position: u64, skipped: u64, segment: u64) -> RecordMark {
        RecordMark {
            position,
            skipped,
            segment,
            batch: 4096,
            record: 4160,
        }
    }

    #[test]
    fn what_was_written_again_is_read_where_it_stands_now() {
        let mut index = RecordIndex::default();
        for old in [
            mark(1, 0, 1),
            mark(5, 0, 1),
            mark(5, 100, 2),
            mark(5, 200, 2),
        ] {
            index.add(old);
        }
        for new in [mark(5, 0, 3), mark(5, 100, 3)] {
            index.add(new);
        }
        let at = index.reads(5, 50..150).unwrap();
        assert_eq!(at.marks, [mark(5, 0, 3), mark(5, 100, 3)]);
        assert_eq!(index.reads(4, 0..9).unwrap().marks, [mark(1, 0, 1)]);
        index.forget_segment(2);
        assert_eq!(index.reads(4, 0..9), None);
        assert_eq!(index.reads(6, 0..9).unwrap().marks, [mark(5, 100, 3)]);
    }
}
