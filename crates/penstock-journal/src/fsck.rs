//! Checks a journal without changing it.

use crate::format::{FIRST_BATCH, NewestSlot, segment_name};
use crate::open_error::OpenError;
use crate::recovery::{Found, RecoveryReport, check_nothing, recover};
use crate::scan::{SegmentImage, read_header};
use crate::storage::Storage;

/// Report that `penstock journal check` prints.
#[derive(Debug)]
pub struct FsckReport {
    pub segments: Vec<SegmentReport>,
    pub spares: usize,
    /// Findings of an opening, or the reason why it would be refused.
    pub opening: Result<RecoveryReport, OpenError>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentReport {
    pub file: String,
    pub file_bytes: u64,
    pub epoch: u32,
    /// First position whose record begins in this segment or later.
    pub base_position: u64,
    pub batches: u64,
    /// Number of whole records and parts of long ones.
    pub records: u64,
    /// Bytes from the beginning to the end of the last batch.
    pub used_bytes: u64,
    /// Batches at the end that were rewritten to the next segment, or were never whole.
    pub void_batches: u64,
    /// Ranges that can't be read but should be.
    pub damage: Vec<Damage>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    pub offset: u64,
    pub what: String,
}

/// Checks all segments and continues behind damage. The directory must not be in use.
pub fn fsck<S: Storage>(storage: &S) -> Result<FsckReport, OpenError> {
    let location = storage.location();
    let lock = storage.lock().map_err(OpenError::io("lock", &location))?;
    let _lock = lock.ok_or(OpenError::Locked { location })?;
    let found = Found::list(storage)?;
    let opening = match found.segments.last() {
        Some(_) => recover(storage, &found, &mut |_| Ok(())).map(|found| found.report),
        None => check_nothing(storage, &found).map(|()| RecoveryReport {
            created: true,
            ..RecoveryReport::default()
        }),
    };
    let newest = NewestSlot::read(storage, &found)?;
    let segments = found.segments.iter().map(|&number| {
        // Only batches before the next segment's first one count.
        let next = read_header(storage, number + 1).ok();
        let closed = newest.filter(|slot| slot.segment == number);
        let closed_through = closed.map_or(0, |slot| slot.closed_through);
        let counts_through = next.map(|next| next.base_sequence - 1);
        check_segment(storage, number, counts_through, closed_through)
    });
    Ok(FsckReport {
        segments: segments.collect::<Result<_, _>>()?,
        spares: found.spares.len(),
        opening,
    })
}

fn check_segment<S: Storage>(
    storage: &S,
    number: u64,
    counts_through: Option<u64>,
    closed_through: u64,
) -> Result<SegmentReport, OpenError> {
    let mut report = SegmentReport {
        file: segment_name(number),
        ..SegmentReport::default()
    };
    let header = match read_header(storage, number) {
        Ok(header) => header,
        Err(OpenError::Damaged { offset, what, .. }) => {
            report.damage.push(Damage { offset, what });
            return Ok(report);
        }
        Err(error) => return Err(error),
    };
    let mut image = SegmentImage::load(storage, header)?;
    image.closed_through = closed_through;
    report.file_bytes = image.bytes.len() as u64;
    report.epoch = header.epoch;
    report.base_position = header.base_position;
    let mut chain = image.first_link();
    let mut offset = FIRST_BATCH;
    while counts_through.is_none_or(|through| chain.sequence < through) {
        match image.batch_at(offset, &mut chain) {
            Ok(batch) => {
                offset = batch.end;
                report.batches += 1;
                report.used_bytes = batch.end;
                for record in batch.records() {
                    match record {
                        Ok(_) => report.records += 1,
                        Err((offset, what)) => {
                            report.damage.push(Damage {
                                offset,
                                what: what.to_string(),
                            });
                        }
                    }
                }
            }
            Err(what) => {
                let beyond = image.beyond(offset, chain.sequence);
                if counts_through.is_none() && beyond.proof.is_none() {
                    report.void_batches = beyond.torn_batches;
                    break;
                }
                report.damage.push(Damage {
                    offset,
                    what: what.to_string(),
                });
                let Some((next, header)) = image.next_batch(offset, chain.sequence + 1) else {
                    break;
                };
                offset = next;
                chain.sequence = header.sequence - 1;
                chain.previous = header.previous;
            }
        }
    }
    if counts_through.is_some() {
        report.void_batches = image.beyond(offset, chain.sequence).torn_batches;
    }
    Ok(report)
}
