//! Damage that checksums do not reveal, for the search for input that breaks the journal.

use crc32c::{crc32c, crc32c_append};

use crate::format::{BatchHeader, FIRST_BATCH, PAGE, RecordHeader, SegmentHeader, batch_aligned};

/// Makes the checksums of a segment match its bytes, as far as they look like a segment.
pub fn set_checksums_right(segment: &mut [u8]) {
    const SUM: usize = size_of::<u32>();
    let Some(header) = segment.get_mut(..SegmentHeader::BYTES) else {
        return;
    };
    let (checked, sum) = header.split_at_mut(SegmentHeader::BYTES - SUM);
    sum.copy_from_slice(&crc32c(checked).to_le_bytes());
    let mut previous = None;
    let mut at = FIRST_BATCH as usize;
    loop {
        // A batch without records may be at the next page.
        let is_batch = |at: usize| {
            let header = segment.get(at..).and_then(BatchHeader::decode_unchecked);
            header.is_some_and(|header| header.tag != 0)
        };
        if !is_batch(at) {
            at = at.next_multiple_of(PAGE as usize);
        }
        if !is_batch(at) {
            return;
        }
        let bytes = &mut segment[at..];
        let mut header = BatchHeader::decode_unchecked(bytes).expect("it was one");
        let end = BatchHeader::BYTES.saturating_add(header.length as usize);
        if let Some(body) = bytes.get_mut(BatchHeader::BYTES..end) {
            set_record_checksums_right(body);
            header.body = crc32c(body);
        }
        header.previous = previous.unwrap_or(header.previous);
        let header_bytes = header.encode();
        bytes[..BatchHeader::BYTES].copy_from_slice(&header_bytes);
        previous = Some(header.checksum);
        at = batch_aligned((at + end) as u64) as usize;
    }
}

fn set_record_checksums_right(mut body: &mut [u8]) {
    const SUM: usize = size_of::<u32>();
    while let Some(header) = body.first_chunk::<{ RecordHeader::BYTES }>() {
        let end = RecordHeader::BYTES + RecordHeader::get_from(header).length.0 as usize;
        if body.len() < end {
            return;
        }
        let (record, rest) = body.split_at_mut(end);
        let sum = crc32c_append(
            crc32c(&record[SUM..RecordHeader::BYTES]),
            &record[RecordHeader::BYTES..],
        );
        record[..SUM].copy_from_slice(&sum.to_le_bytes());
        body = rest;
    }
}
