//! Bytes of a journal. `docs/internals/journal.md` draws them, and a test below compares that drawing with this file,
//! so there is one description.
//!
//! A segment is a header of one page, then batches. A batch is a header of 64 bytes, then records, each a header of 16
//! bytes and its payload. Batches begin at multiples of 64 bytes. So their headers never straddle a disk sector (a
//! header is on disk whole or not at all), and a search for batches after a damaged one knows where they can begin.
//!
//! From format 2 on, a batch without records, which proves the previous one, may begin at the next page: then no single
//! bad page takes both a batch and its proof.
//!
//! All numbers are little-endian; all checksums are CRC-32C.

use crc32c::{crc32c, crc32c_append};

/// Format that this program writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 2;
/// Features that a segment may use, one in each bit. A reader that does not know a feature must refuse the segment.
pub const KNOWN_FEATURES: u64 = if cfg!(test) { FEATURE_OF_TESTS } else { 0 };
/// Feature for the unit tests of this crate: there is no real one yet.
pub(crate) const FEATURE_OF_TESTS: u64 = 1 << 63;

/// The format that a segment is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    pub version: u32,
    /// Features that this journal uses; the program may know more.
    pub features: u64,
}

impl Format {
    /// Format of a new journal.
    pub const NEWEST: Self = Self {
        version: FORMAT_VERSION,
        features: 0,
    };
}

pub(crate) const MAGIC: [u8; 8] = *b"PENSTOCK";
/// Offset of the first batch in a segment.
pub(crate) const FIRST_BATCH: u64 = SegmentHeader::BYTES as u64;
pub(crate) const BATCH_ALIGN: u64 = 64;
/// Unit in which a disk goes bad.
pub(crate) const PAGE: u64 = 4096;
/// Longer records are split into parts of at most this many bytes.
pub(crate) const LONGEST_PART: usize = 1 << 20;

/// Declares the fields of a layout in their order on disk; offsets follow from the sizes.
macro_rules! layout {
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct $name { $($(#[$field_about])* pub $field: $type,)* }

        impl $name {
            pub const BYTES: usize = 0 $(+ <$type as DiskField>::BYTES)*;
            #[cfg(test)]
            const FIELDS: &[(&str, usize)] = &[$((stringify!($field), <$type as DiskField>::BYTES)),*];

            fn put(&self, out: &mut [u8; Self::BYTES]) {
                let rest = &mut out[..];
                $(let (field, rest) = rest.split_at_mut(<$type as DiskField>::BYTES);
                self.$field.put(field);)*
                debug_assert!(rest.is_empty());
            }

            fn get(bytes: &[u8; Self::BYTES]) -> Self {
                let rest = &bytes[..];
                $(let (field, rest) = rest.split_at(<$type as DiskField>::BYTES);
                let $field = <$type as DiskField>::get(field);)*
                debug_assert!(rest.is_empty());
                Self { $($field),* }
            }
        }
    };
}

layout! {
    /// First page of a segment. It is written and synced before the file gets its name, so a segment with a bad header
    /// is damaged, never merely torn.
    SegmentHeader {
        magic: [u8; 8],
        /// Format that the segment is written in.
        format_version: u32,
        /// Oldest format version whose programs can read it.
        minimum_reader: u32,
        features: u64,
        journal_id: [u8; 16],
        segment: u64,
        /// First position whose record begins in this segment or later.
        base_position: u64,
        /// Number of its first batch: earlier segments count only up to the previous one.
        base_sequence: u64,
        /// Batches up to this one were on disk before the file got its name.
        durable_through: u64,
        /// Length of the file when it got its name: it can't be shorter now.
        file_bytes: u64,
        epoch: u32,
        /// Header checksum of the batch before the first one.
        previous: u32,
        /// Number of earlier segments that still count.
        older_segments: u32,
        reserved: ReservedBytes<4000>,
        checksum: u32,
    }
}

layout! {
    /// Header of one write.
    BatchHeader {
        /// Fold of the journal's id, which marks the beginning of a batch.
        tag: u32,
        /// Bytes of records that follow.
        length: u32,
        segment: u64,
        /// Batches are numbered from 1, without gaps, through all segments.
        sequence: u64,
        /// Watermark: batches up to this one were synced when this one was written.
        durable_through: u64,
        /// Position of its first record, or the next position when it has none.
        first_position: u64,
        epoch: u32,
        older_segments: u32,
        /// Number of records and parts of records in it.
        count: u32,
        /// Header checksum of the previous batch.
        previous: u32,
        /// Checksum of the records that follow.
        body: u32,
        /// Checksum of this header, without these four bytes.
        checksum: u32,
    }
}

layout! {
    /// Slot of the file that names the newest segment; it has two.
    NewestSlot {
        magic: [u8; 8],
        journal_id: [u8; 16],
        /// Number of the write: the slot with the higher one counts.
        generation: u64,
        /// Number of the newest segment; 0 when there is none.
        segment: u64,
        /// Number of the last batch, once the journal is closed in order; 0 while it is in use.
        closed_through: u64,
        unused: ReservedBytes<12>,
        checksum: u32,
    }
}

layout! {
    RecordHeader {
        /// Checksum of the rest of this header and the payload.
        checksum: u32,
        /// Bytes of payload.
        length: U24,
        kind: u8,
        position: u64,
    }
}

/// Limit that no journal reaches by counting. Sums of smaller numbers don't overflow. A larger number was not written
/// by a journal, however right its checksum is.
const HIGHEST: u64 = 1 << 62;
const HIGHEST_EPOCH: u32 = 1 << 30;

impl SegmentHeader {
    pub fn format(&self) -> Format {
        Format {
            version: self.format_version,
            features: self.features,
        }
    }

    /// Whether a journal can have reached these numbers.
    pub fn is_plausible(&self) -> bool {
        (1..HIGHEST).contains(&self.base_sequence)
            && self.base_position < HIGHEST
            && self.durable_through < HIGHEST
            && self.segment < HIGHEST
            && u64::from(self.older_segments) <= self.segment
            && self.epoch < HIGHEST_EPOCH
    }

    const CHECKED: usize = Self::BYTES - u32::BYTES;

    pub fn encode(mut self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        self.put(&mut bytes);
        self.checksum = crc32c(&bytes[..Self::CHECKED]);
        self.put(&mut bytes);
        bytes
    }

    /// Reads the header; `None` when the checksum is wrong. The caller checks versions: their offsets and the
    /// checksum's are the same in all future formats.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.get(..Self::BYTES)?.try_into().ok()?;
        let header = Self::get(bytes);
        (header.magic == MAGIC && header.checksum == crc32c(&bytes[..Self::CHECKED]))
            .then_some(header)
    }
}

impl BatchHeader {
    const CHECKED: usize = Self::BYTES - u32::BYTES;

    /// Encodes the header and sets `checksum`, which the next batch's `previous` repeats.
    pub fn encode(&mut self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        self.put(&mut bytes);
        self.checksum = crc32c(&bytes[..Self::CHECKED]);
        self.put(&mut bytes);
        bytes
    }

    /// Reads the header; `None` when the checksum is wrong or a number is impossible.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let header = Self::decode_unchecked(bytes)?;
        let is_whole = header.checksum == crc32c(&bytes[..Self::CHECKED]);
        (is_whole && header.is_plausible()).then_some(header)
    }

    fn is_plausible(&self) -> bool {
        (1..HIGHEST).contains(&self.sequence)
            && self.durable_through < HIGHEST
            && self.first_position < HIGHEST
            && u64::from(self.older_segments) <= self.segment
            && self.epoch < HIGHEST_EPOCH
    }

    /// Reads the header without checking it; `None` only when there are too few bytes.
    pub fn decode_unchecked(bytes: &[u8]) -> Option<Self> {
        Some(Self::get(bytes.get(..Self::BYTES)?.try_into().ok()?))
    }
}

impl NewestSlot {
    const MAGIC: [u8; 8] = *b"PENSNEWS";
    const CHECKED: usize = Self::BYTES - u32::BYTES;

    pub fn new(journal_id: [u8; 16], segment: u64) -> Self {
        Self {
            magic: Self::MAGIC,
            journal_id,
            generation: 0,
            segment,
            closed_through: 0,
            unused: ReservedBytes,
            checksum: 0,
        }
    }

    pub fn encode(mut self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        self.put(&mut bytes);
        self.checksum = crc32c(&bytes[..Self::CHECKED]);
        self.put(&mut bytes);
        bytes
    }

    /// Reads the slot; `None` when the checksum is wrong or a number is impossible.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let slot = Self::get(bytes);
        let is_whole =
            slot.magic == Self::MAGIC && slot.checksum == crc32c(&bytes[..Self::CHECKED]);
        let is_plausible =
            slot.generation < HIGHEST && slot.segment < HIGHEST && slot.closed_through < HIGHEST;
        (is_whole && is_plausible).then_some(slot)
    }
}

/// Whole record, or part of a long one. No kind is 0, so zeros on disk are never a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RecordKind {
    Whole = 1,
    First = 2,
    Middle = 3,
    Last = 4,
}

impl RecordKind {
    pub fn begins(self) -> bool {
        matches!(self, Self::Whole | Self::First)
    }

    pub fn ends(self) -> bool {
        matches!(self, Self::Whole | Self::Last)
    }
}

impl TryFrom<u8> for RecordKind {
    type Error = ();

    fn try_from(kind: u8) -> Result<Self, ()> {
        [Self::Whole, Self::First, Self::Middle, Self::Last]
            .into_iter()
            .find(|known| *known as u8 == kind)
            .ok_or(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordPart<'a> {
    pub kind: RecordKind,
    pub position: u64,
    pub payload: &'a [u8],
}

impl RecordHeader {
    /// Reads the header unchecked: only the record's own checksum, which covers the payload too, can verify it.
    pub fn get_from(bytes: &[u8; Self::BYTES]) -> Self {
        Self::get(bytes)
    }
}

impl<'a> RecordPart<'a> {
    const CHECKED_FROM: usize = u32::BYTES;

    pub fn encode_into(&self, out: &mut Vec<u8>) {
        let mut header = RecordHeader {
            checksum: 0,
            length: U24(self.payload.len() as u32),
            kind: self.kind as u8,
            position: self.position,
        };
        let mut bytes = [0; RecordHeader::BYTES];
        header.put(&mut bytes);
        header.checksum = crc32c_append(crc32c(&bytes[Self::CHECKED_FROM..]), self.payload);
        header.put(&mut bytes);
        out.extend_from_slice(&bytes);
        out.extend_from_slice(self.payload);
    }

    /// Reads the first record in `bytes`, and returns the rest; or describes what is wrong.
    pub fn decode(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), &'static str> {
        let header = bytes.first_chunk::<{ RecordHeader::BYTES }>();
        let header = RecordHeader::get(header.ok_or("a record's header is cut off")?);
        let end = RecordHeader::BYTES + header.length.0 as usize;
        let record = bytes.get(..end).ok_or("a record is cut off")?;
        if header.checksum != crc32c(&record[Self::CHECKED_FROM..]) {
            return Err("a record's checksum is wrong");
        }
        let kind = header.kind.try_into();
        let kind = kind.map_err(|()| "a record is of a kind that this program does not know")?;
        let payload = &record[RecordHeader::BYTES..];
        let position = header.position;
        Ok((
            Self {
                kind,
                position,
                payload,
            },
            &bytes[end..],
        ))
    }
}

/// Returns the first bytes of each batch.
pub(crate) fn batch_tag(journal_id: [u8; 16]) -> u32 {
    crc32c_append(crc32c(b"penstock batch"), &journal_id)
}

pub(crate) fn batch_aligned(offset: u64) -> u64 {
    offset.next_multiple_of(BATCH_ALIGN)
}

pub(crate) fn segment_name(number: u64) -> String {
    format!("{number:016}.segment")
}

pub(crate) fn segment_number(name: &str) -> Option<u64> {
    let number = name.strip_suffix(".segment")?.parse().ok()?;
    (segment_name(number) == name).then_some(number)
}

/// Value of a fixed size on disk.
trait DiskField: Sized {
    const BYTES: usize;
    fn put(&self, out: &mut [u8]);
    /// Reads the value; `bytes` is exactly `BYTES` long.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! number_fields {
    ($($type:ty)*) => { $(
        impl DiskField for $type {
            const BYTES: usize = size_of::<$type>();

            fn put(&self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }

            fn get(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("the layout gives as many bytes"))
            }
        }
    )* };
}

number_fields!(u8 u32 u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct U24(pub u32);

impl DiskField for U24 {
    const BYTES: usize = 3;

    fn put(&self, out: &mut [u8]) {
        debug_assert!(self.0 < 1 << 24);
        out.copy_from_slice(&self.0.to_le_bytes()[..3]);
    }

    fn get(bytes: &[u8]) -> Self {
        Self(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]))
    }
}

impl<const N: usize> DiskField for [u8; N] {
    const BYTES: usize = N;

    fn put(&self, out: &mut [u8]) {
        out.copy_from_slice(self);
    }

    fn get(bytes: &[u8]) -> Self {
        bytes.try_into().expect("the layout gives as many bytes")
    }
}

/// Bytes without a meaning yet, written as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReservedBytes<const N: usize>;

impl<const N: usize> DiskField for ReservedBytes<N> {
    const BYTES: usize = N;

    fn put(&self, out: &mut [u8]) {
        out.fill(0);
    }

    fn get(_: &[u8]) -> Self {
        Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWING: &str = include_str!("../../../docs/internals/journal.md");

    /// Returns the fields that the page draws under `title`, as (name, offset, size), and the total size.
    ///
    /// A drawing is rows of cells. Above each row is a ruler: the offset of each cell, right above the `+` that begins
    /// it, and at its end the offset after the row.
    fn drawn(title: &str) -> (Vec<(String, usize, usize)>, usize) {
        let mut lines = DRAWING.lines().skip_while(|line| !line.starts_with(title));
        let heading = lines
            .next()
            .unwrap_or_else(|| panic!("no drawing of {title:?}"));
        let whole = heading
            .split_whitespace()
            .rev()
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        let mut fields = Vec::new();
        let mut lines = lines.take_while(|line| !line.starts_with("```")).peekable();
        while let Some(ruler) = lines.next() {
            if ruler.trim().is_empty() {
                continue;
            }
            let border = lines.next().unwrap();
            let names = lines.next().unwrap();
            let types = lines.next().unwrap();
            assert_eq!(
                lines.next(),
                Some(border),
                "the row under {ruler:?} is not closed"
            );
            let corners: Vec<usize> = border
                .match_indices('+')
                .map(|(column, _)| column)
                .collect();
            let offset_at = |column: usize| -> usize {
                let digits = ruler[column..].split_whitespace().next().unwrap();
                assert!(
                    !ruler[column..].starts_with(' '),
                    "no offset at {column} in {ruler:?}"
                );
                digits.parse().unwrap()
            };
            for cell in corners.windows(2) {
                let (left, right) = (cell[0], cell[1]);
                let (offset, end) = (offset_at(left), offset_at(right));
                let size = match types[left + 1..right].trim() {
                    "u8" => 1,
                    "u24" => 3,
                    "u32" => 4,
                    "u64" => 8,
                    bytes => bytes.strip_suffix(" bytes").unwrap().parse().unwrap(),
                };
                assert_eq!(
                    end - offset,
                    size,
                    "the cell at {offset} in the drawing of {title:?}"
                );
                fields.push((names[left + 1..right].trim().to_string(), offset, size));
            }
        }
        (fields, whole)
    }

    fn written(fields: &[(&str, usize)]) -> Vec<(String, usize, usize)> {
        let mut offset = 0;
        let place = |&(name, size): &(&str, usize)| {
            offset += size;
            (name.to_string(), offset - size, size)
        };
        fields.iter().map(place).collect()
    }

    #[test]
    fn the_drawing_in_the_docs_agrees_with_the_code() {
        for (title, fields, bytes) in [
            (
                "Segment header",
                SegmentHeader::FIELDS,
                SegmentHeader::BYTES,
            ),
            ("Batch header", BatchHeader::FIELDS, BatchHeader::BYTES),
            ("Record header", RecordHeader::FIELDS, RecordHeader::BYTES),
            ("Newest slot", NewestSlot::FIELDS, NewestSlot::BYTES),
        ] {
            assert_eq!(drawn(title), (written(fields), bytes), "{title}");
        }
    }

    #[test]
    fn a_batch_header_never_straddles_a_sector() {
        assert_eq!(BatchHeader::BYTES as u64, BATCH_ALIGN);
        assert_eq!(FIRST_BATCH % 512, 0);
        assert_eq!(512 % BATCH_ALIGN, 0);
    }

    #[test]
    fn headers_and_records_read_back_as_written() {
        let mut batch = BatchHeader {
            tag: batch_tag([7; 16]),
            length: 1,
            segment: 20,
            sequence: 3,
            durable_through: 4,
            first_position: 5,
            epoch: 6,
            older_segments: 7,
            count: 8,
            previous: 9,
            body: 10,
            checksum: 0,
        };
        let bytes = batch.encode();
        assert_eq!(BatchHeader::decode(&bytes), Some(batch));

        let record = RecordPart {
            kind: RecordKind::First,
            position: 1 << 40,
            payload: b"water",
        };
        let mut bytes = Vec::new();
        record.encode_into(&mut bytes);
        bytes.extend_from_slice(b"rest");
        assert_eq!(RecordPart::decode(&bytes), Ok((record, &b"rest"[..])));
        assert!(RecordPart::decode(&[0; 64]).is_err(), "zeros are no record");
    }

    #[test]
    fn segment_names_sort_by_number_and_other_names_are_no_segments() {
        assert_eq!(segment_number(&segment_name(12)), Some(12));
        assert!(segment_name(9) < segment_name(10));
        for other in [
            "12.segment",
            "0000000000000001.spare",
            "+000000000000001.segment",
        ] {
            assert_eq!(segment_number(other), None);
        }
    }
}
