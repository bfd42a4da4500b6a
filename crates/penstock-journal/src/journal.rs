//! Decides the content of the next batch, its segment and its offset. Runs on the core's thread and touches no file:
//! [`crate::Writer`] carries batches out on its own thread.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use penstock_faults::perhaps;
use penstock_message::Space;

use crate::format::{
    BatchHeader, FIRST_BATCH, LONGEST_PART, PAGE, RecordHeader, RecordKind, RecordPart,
    batch_aligned,
};
use crate::marks::{ReadAt, RecordIndex, RecordMark, Spacing};
use crate::spares::SharedSpares;

/// Sizes of a journal. The defaults suit everything but tests.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// Id of a new journal; an existing one keeps its own. Draw it at random.
    pub journal_id: [u8; 16],
    /// Size of a segment. A batch that does not fit goes to the next segment.
    pub segment_bytes: u64,
    /// Maximum size of a batch.
    pub batch_bytes: usize,
    /// Unit to which the first segment of an opening is rounded up: small, so that opening takes milliseconds.
    pub opening_bytes: u64,
    /// Number of files kept ready to become segments, and for a full disk: four, one each for publishes, leases,
    /// settlements and reclaiming.
    pub spares: usize,
    /// Whether opening may upgrade a journal of an earlier format, which earlier programs then refuse. By default such
    /// a journal is refused and left unchanged.
    pub upgrades: bool,
    /// Size of a file that is removed to make room when the disk is full; 0: there is none.
    pub reserve_bytes: u64,
    /// Disk space left free when a spare or the reserve is made.
    pub margin_bytes: u64,
    /// Bytes beyond the live data that a journal may keep, if that is less than the live data itself: dead data must
    /// not crowd out live data on a small disk.
    pub dead_bytes: u64,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self {
            journal_id: [0; 16],
            segment_bytes: 16 << 20,
            batch_bytes: 8 << 20,
            opening_bytes: 1 << 20,
            spares: 4,
            upgrades: false,
            reserve_bytes: 0,
            margin_bytes: 0,
            dead_bytes: u64::MAX,
        }
    }
}

impl JournalOptions {
    /// Adapts the sizes to the file system. On a small one segments are smaller, or the reserves would take too much of
    /// it; dead data is limited for the same reason.
    pub fn fit_to_disk(&mut self, disk_bytes: u64) {
        self.dead_bytes = self.dead_bytes.min(disk_bytes / 16);
        let share = (disk_bytes / 64).max(2 << 20);
        let share = 1 << (u64::BITS - 1 - share.leading_zeros());
        self.segment_bytes = self.segment_bytes.min(share);
    }

    /// Keeps a reserve of a size that the file system can spare: enough for the first segment of an opening and some
    /// names. Where each write takes new blocks (not `in_place`), the reserve is larger and as much is left free.
    pub fn keep_reserve(&mut self, disk_bytes: u64, in_place: bool) {
        let opening_bytes = self.opening_bytes + self.opening_bytes / 2;
        let share = disk_bytes / 32;
        (self.reserve_bytes, self.margin_bytes) = match in_place {
            true => (share.min(opening_bytes), 0),
            false => {
                let bytes = share.clamp(opening_bytes, 8 << 20);
                (bytes, bytes)
            }
        };
    }

    /// Returns the longest body of a batch that fits into a segment, whatever the configured sizes.
    pub(crate) fn longest_body(&self) -> usize {
        let room = self.segment_bytes.saturating_sub(FIRST_BATCH) as usize;
        assert!(
            room >= 256,
            "segment_bytes must be at least {}",
            FIRST_BATCH + 256
        );
        self.batch_bytes.min(room) - BatchHeader::BYTES
    }

    pub(crate) fn longest_part(&self) -> usize {
        LONGEST_PART.min(self.longest_body() - RecordHeader::BYTES)
    }
}

/// Gathers records into batches.
///
/// ```text
///     journal.append(position, record);                 for each record of the core
///     while let Some(batch) = journal.take_batch() {     when the last sync is done
///         writer.write(&batch)?;                        on the writer's thread
///     }
///     writer.sync()?;
///     journal.batch_synced(batch.through);
/// ```
pub struct Journal {
    longest_body: usize,
    longest_part: usize,
    segment_bytes: u64,
    dead_bytes: u64,
    epoch: u32,
    /// Segments, oldest first; the last one is written to.
    segments: VecDeque<Segment>,
    /// Offset of the next batch in the last segment.
    end: u64,
    /// Sequence number of the last batch taken.
    sequence: u64,
    next_position: u64,
    closed: VecDeque<Filling>,
    filling: Filling,
    closed_bytes: usize,
    /// Number of segments dropped by batches that were not taken yet.
    untaken_drops: u32,
    /// Last position taken, and last position synced.
    taken_through: u64,
    synced_through: u64,
    /// Whether records were taken that no watermark covers yet.
    watermark_owed: bool,
    /// Bytes appended since this process began.
    appended_bytes: u64,
    reclaim: Reclaim,
    shared: Arc<SharedSpares>,
    free_bytes: FreeBytes,
    /// Whether a full segment is followed by another; otherwise all batches go into one segment.
    rolls: bool,
    index: RecordIndex,
    spacing: Spacing,
}

/// Asks the file system how much could be written; `None`: unknown.
pub(crate) type FreeBytes = Box<dyn Fn() -> Option<u64> + Send>;

/// Progress of reclaiming.
#[derive(Clone, Copy, Debug)]
enum Reclaim {
    /// Drops segments up to this one, as far as necessary. `live_bytes` is the live data at the start.
    Through { last: u64, live_bytes: u64 },
    /// Reclaiming has stopped, at this total of appended bytes and with this much live data.
    Idle {
        since_bytes: u64,
        live_bytes: u64,
        was_tight: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub number: u64,
    /// First position whose record begins in this segment or later.
    pub base_position: u64,
    /// Bytes on disk, preallocated ones included.
    pub bytes: u64,
}

/// Records for one write, and their location.
#[derive(Debug)]
pub struct Batch {
    /// Last position that is complete with this batch.
    pub through: u64,
    pub(crate) epoch: u32,
    pub(crate) segment: u64,
    pub(crate) base_position: u64,
    pub(crate) offset: u64,
    pub(crate) sequence: u64,
    pub(crate) first_position: u64,
    pub(crate) older_segments: u32,
    pub(crate) count: u32,
    pub(crate) body: Vec<u8>,
    pub(crate) drops: Vec<u64>,
}

impl Batch {
    /// Returns the number of bytes to write.
    pub fn bytes(&self) -> usize {
        BatchHeader::BYTES + self.body.len()
    }

    /// Returns the offset at which the next batch may begin.
    pub(crate) fn end(&self) -> u64 {
        batch_aligned(self.offset + self.bytes() as u64)
    }
}

/// Batch that still grows.
#[derive(Default)]
struct Filling {
    body: Vec<u8>,
    count: u32,
    /// Position of its first record or part, and first position that begins in it or later.
    first_position: u64,
    base_position: u64,
    through: u64,
    /// Bytes of its first record's payload in earlier batches.
    first_skipped: u64,
    /// Marks of records and parts: position, payload bytes before, offset in the body.
    marks: Vec<(u64, u64, u64)>,
    /// Segments to drop once the batch is synced.
    drops: Vec<u64>,
}

impl Filling {
    fn is_empty(&self) -> bool {
        self.count == 0 && self.drops.is_empty()
    }
}

impl Journal {
    pub(crate) fn resume(
        options: &JournalOptions,
        epoch: u32,
        segments: VecDeque<Segment>,
        sequence: u64,
        next_position: u64,
        index: RecordIndex,
        shared: Arc<SharedSpares>,
    ) -> Self {
        Self {
            longest_body: options.longest_body(),
            longest_part: options.longest_part(),
            segment_bytes: options.segment_bytes,
            dead_bytes: options.dead_bytes,
            epoch,
            segments,
            end: FIRST_BATCH,
            sequence,
            next_position,
            closed: VecDeque::new(),
            filling: Filling::default(),
            closed_bytes: 0,
            untaken_drops: 0,
            taken_through: next_position - 1,
            synced_through: next_position - 1,
            watermark_owed: false,
            appended_bytes: 0,
            reclaim: Reclaim::Idle {
                since_bytes: 0,
                live_bytes: u64::MAX,
                was_tight: false,
            },
            shared,
            free_bytes: Box::new(|| None),
            rolls: true,
            index,
            spacing: Spacing::default(),
        }
    }

    /// Adds a record to the next batch. Positions have no gaps. A gap is a bug of the caller and panics here, before it
    /// can be written.
    pub fn append(&mut self, position: u64, record: &[u8]) {
        assert_eq!(position, self.next_position, "a record is out of order");
        if record.len() <= self.longest_part {
            let record = RecordPart {
                kind: RecordKind::Whole,
                position,
                payload: record,
            };
            self.push(record, 0);
        } else {
            // The parts may end up in several batches and segments. Recovery shows the record to nobody before it has
            // found the last part.
            let last = (record.len() - 1) / self.longest_part;
            for (index, payload) in record.chunks(self.longest_part).enumerate() {
                let kind = match index {
                    0 => RecordKind::First,
                    index if index == last => RecordKind::Last,
                    _ => RecordKind::Middle,
                };
                let part = RecordPart {
                    kind,
                    position,
                    payload,
                };
                self.push(part, (index * self.longest_part) as u64);
            }
        }
        self.next_position += 1;
    }

    /// Adds a record or a part to the batch. `skipped`: bytes of the record's payload before this part.
    fn push(&mut self, record: RecordPart<'_>, skipped: u64) {
        let bytes = RecordHeader::BYTES + record.payload.len();
        let is_full = self.filling.body.len() + bytes > self.longest_body();
        if self.filling.count > 0 && (is_full || perhaps!("tiny-batch")) {
            self.closed_bytes += self.filling.body.len();
            let next = Filling {
                body: Vec::with_capacity(self.longest_body()),
                ..Filling::default()
            };
            self.closed
                .push_back(std::mem::replace(&mut self.filling, next));
        }
        let filling = &mut self.filling;
        if filling.count == 0 {
            filling.first_position = record.position;
            filling.base_position = record.position + u64::from(!record.kind.begins());
            filling.through = record.position - 1;
            filling.first_skipped = skipped;
        }
        let offset = filling.body.len() as u64;
        if self.spacing.is_due(record.payload.len(), skipped > 0) {
            filling.marks.push((record.position, skipped, offset));
        }
        record.encode_into(&mut filling.body);
        self.appended_bytes += bytes as u64;
        filling.count += 1;
        if record.kind.ends() {
            filling.through = record.position;
        }
    }

    /// Takes the next batch, with all waiting records up to a limit. Call when the writer is idle, and again at once
    /// while more records wait. Batches must be written in the order they are taken.
    #[must_use = "the batch is returned once"]
    pub fn take_batch(&mut self) -> Option<Batch> {
        if let Some(filling) = self.closed.pop_front() {
            self.closed_bytes -= filling.body.len();
            return Some(self.assign_place(filling, false));
        }
        if self.filling.is_empty() {
            return None;
        }
        // The next batch will probably be about as large: allocate once instead of growing step by step.
        let body = Vec::with_capacity(self.filling.body.len());
        let next = Filling {
            body,
            ..Filling::default()
        };
        let filling = std::mem::replace(&mut self.filling, next);
        Some(self.assign_place(filling, false))
    }

    /// Takes a batch without records, whose watermark proves that the last records were synced. Call when idle and
    /// before closing, then write and sync it. Damage to the last records is then an error at the next start; without
    /// the watermark it would pass for a torn write. The batch begins a page, so that one bad page can't destroy both
    /// it and the records. `None`: there is nothing to prove, or not yet.
    #[must_use = "the batch is returned once"]
    pub fn watermark_batch(&mut self) -> Option<Batch> {
        let idle = self.waiting_bytes() == 0 && self.synced_through == self.taken_through;
        let begins_a_page = true;
        (idle && self.watermark_owed).then(|| self.assign_place(Filling::default(), begins_a_page))
    }

    /// Assigns a batch its location: after the last one, or first in a new segment.
    fn assign_place(&mut self, mut filling: Filling, begins_a_page: bool) -> Batch {
        if filling.count == 0 {
            filling.first_position = self.next_position;
            filling.base_position = self.next_position;
            filling.through = self.next_position - 1;
        }
        self.untaken_drops -= filling.drops.len() as u32;
        let bytes = (BatchHeader::BYTES + filling.body.len()) as u64;
        self.update_active_size();
        if begins_a_page {
            self.end = self.end.next_multiple_of(PAGE);
        }
        let active = self.segments.back().expect("a journal has a segment");
        let is_full = self.end + bytes > active.bytes;
        let is_early = self.end > FIRST_BATCH && perhaps!("roll-early");
        if self.rolls && (is_full || is_early) {
            self.roll(filling.base_position);
        }
        let active = self.segments.back().expect("a journal has a segment");
        self.sequence += 1;
        self.taken_through = filling.through;
        self.watermark_owed = filling.count > 0;
        let batch = Batch {
            through: filling.through,
            epoch: self.epoch,
            segment: active.number,
            base_position: active.base_position,
            offset: self.end,
            sequence: self.sequence,
            first_position: filling.first_position,
            older_segments: self.segments.len() as u32 - 1 + self.untaken_drops,
            count: filling.count,
            body: filling.body,
            drops: filling.drops,
        };
        if batch.count > 0 && !self.index.knows(batch.segment) {
            let first = (filling.first_position, filling.first_skipped, 0);
            if filling.marks.first() != Some(&first) {
                filling.marks.insert(0, first);
            }
        }
        for (position, skipped, offset) in filling.marks {
            self.index.add(RecordMark {
                position,
                skipped,
                segment: batch.segment,
                batch: batch.offset,
                record: batch.offset + BatchHeader::BYTES as u64 + offset,
            });
        }
        self.end = batch.end();
        let active = self.segments.back_mut().expect("a journal has a segment");
        active.bytes = active.bytes.max(self.end);
        batch
    }

    fn roll(&mut self, base_position: u64) {
        let full = self.segments.back().expect("a journal has a segment");
        self.segments.push_back(Segment {
            number: full.number + 1,
            base_position,
            // The known minimum, until the writer has taken a spare for the segment.
            bytes: FIRST_BATCH,
        });
        self.end = FIRST_BATCH;
    }

    /// Updates the size of the active segment from the file that the writer has taken.
    fn update_active_size(&mut self) {
        let active = self.segments.back_mut().expect("a journal has a segment");
        if let Some(bytes) = self.shared.bytes_of(active.number) {
            active.bytes = bytes;
        }
    }

    /// Returns the longest body that fits into every spare: on a full disk a batch must not be stuck because of its
    /// size.
    fn longest_body(&self) -> usize {
        let fits = self.shared.largest_batch() as usize;
        self.longest_body
            .min(fits.saturating_sub(BatchHeader::BYTES))
    }

    /// Returns the work that must wait because the disk is full. Changes at any time; ask before each decision.
    pub fn space(&self) -> Space {
        self.shared.space()
    }

    /// Returns the number of segments prepared ahead.
    pub fn spares_ready(&self) -> u64 {
        self.shared.ready()
    }

    /// Notes that the writer has synced everything up to this position.
    pub fn batch_synced(&mut self, through: u64) {
        debug_assert!(through <= self.taken_through);
        self.synced_through = self.synced_through.max(through);
    }

    /// Returns the bytes of further records that fit in, without the space kept for a full disk; `None`: unknown. Asks
    /// the file system each time, so call it before something large only.
    pub fn room_bytes(&self) -> Option<u64> {
        let free_bytes = (self.free_bytes)()? + self.unfilled_bytes();
        let taken_bytes = self.shared.reserved_bytes() + self.waiting_bytes() as u64;
        Some(free_bytes.saturating_sub(taken_bytes))
    }

    /// Returns the bytes that still fit into the segment in use, after the waiting ones.
    pub fn segment_room_bytes(&self) -> u64 {
        self.unfilled_bytes()
            .saturating_sub(self.waiting_bytes() as u64)
    }

    pub(crate) fn set_free_bytes_source(&mut self, free_bytes: FreeBytes) {
        self.free_bytes = free_bytes;
    }

    /// Returns the bytes that were appended and not taken yet.
    pub fn waiting_bytes(&self) -> usize {
        self.closed_bytes + self.filling.body.len()
    }

    /// Returns the room left in the segment in use.
    fn unfilled_bytes(&self) -> u64 {
        let active = self.segments.back().expect("a journal has a segment");
        active.bytes.saturating_sub(self.end)
    }

    /// Returns the bytes that the journal occupies on disk without spares, once all waiting records are written.
    pub fn total_bytes(&self) -> u64 {
        let segments: u64 = self.segments.iter().map(|segment| segment.bytes).sum();
        segments + self.waiting_bytes() as u64
    }

    /// Whether so little of the journal is live that its oldest segment should be dropped. A journal may be twice as
    /// large as the live data (less on a small disk) plus two segments; while the disk is full, hardly larger than the
    /// live data.
    ///
    /// Once begun, reclaiming continues to an eighth below that limit, but passes through all segments at most once.
    /// Live data may take more than `live_bytes` says, and a second pass would then write the same records forever. It
    /// begins again when new and dropped data since then make an eighth of the journal; while the disk is full, half a
    /// segment. So the bytes carried forward never exceed the new bytes by much: all dropped data was new once.
    pub fn reclaim_due(&mut self, live_bytes: u64) -> bool {
        let (oldest, newest) = match (self.segments.front(), self.segments.back()) {
            (Some(oldest), Some(newest)) => (*oldest, newest.number),
            _ => return false,
        };
        let is_tight = self.space() != Space::Plenty;
        let total_bytes = self.total_bytes();
        let allowed_bytes = match is_tight {
            // Free room in the newest segment is not waste: to win it back would cost a spare.
            true => {
                live_bytes.saturating_add(live_bytes / 8 + oldest.bytes + self.unfilled_bytes())
            }
            // Never less than on a full disk, or reclaiming would stop and start in turns.
            false => {
                let dead_bytes = live_bytes.min(self.dead_bytes.max(live_bytes / 8));
                live_bytes.saturating_add(dead_bytes + 2 * self.segment_bytes)
            }
        };
        if let Reclaim::Through {
            last,
            live_bytes: were_live_bytes,
        } = self.reclaim
        {
            let is_enough = total_bytes <= allowed_bytes - allowed_bytes / 8;
            if is_enough || oldest.number > last || oldest.number == newest {
                // Data dropped since the start may have been carried forward before.
                self.reclaim = Reclaim::Idle {
                    since_bytes: self.appended_bytes,
                    live_bytes: live_bytes.max(were_live_bytes),
                    was_tight: is_tight,
                };
            }
        }
        if let Reclaim::Idle {
            since_bytes,
            live_bytes: were_live_bytes,
            was_tight,
        } = self.reclaim
        {
            let new_bytes = self.appended_bytes - since_bytes;
            let gone_bytes = were_live_bytes.saturating_sub(live_bytes);
            let is_worth_it = match is_tight {
                true => !was_tight || new_bytes.max(gone_bytes) >= oldest.bytes / 2,
                false => new_bytes.saturating_add(gone_bytes) >= total_bytes / 8,
            };
            if total_bytes > allowed_bytes && oldest.number < newest && is_worth_it {
                self.reclaim = Reclaim::Through {
                    last: newest,
                    live_bytes,
                };
            }
        }
        matches!(self.reclaim, Reclaim::Through { .. })
    }

    /// Returns the oldest segment that can be dropped, and the first position after it. Everything live before that
    /// position must be carried forward first. `None`: there is only the segment in use.
    pub fn oldest_segment(&self) -> Option<(u64, u64)> {
        Some((
            self.segments.front()?.number,
            self.segments.get(1)?.base_position,
        ))
    }

    /// Drops the oldest segment once everything appended so far is synced.
    ///
    /// Carried records must have been appended before. The instruction travels with the last of them, in a batch whose
    /// header states how many segments still count. The writer renames or removes the file after syncing that batch.
    /// Whenever the power fails, the journal either still counts the segment and has it, or no longer counts it and has
    /// all of its live records.
    pub fn drop_oldest(&mut self) {
        assert!(
            self.segments.len() > 1,
            "the segment in use can't be dropped"
        );
        let oldest = self.segments.pop_front().expect("there are two");
        self.filling.drops.push(oldest.number);
        self.untaken_drops += 1;
        self.index.forget_segment(oldest.number);
    }

    /// Locates bytes of a record's payload without reading them: for [`crate::JournalReader::read`], on its own thread.
    /// The record must be synced, and its segment not dropped.
    pub fn reads(&self, position: u64, range: Range<u64>) -> ReadAt {
        assert!(
            position <= self.synced_through,
            "record {position} is not on disk yet: {} is the last",
            self.synced_through
        );
        assert!(range.start <= range.end, "a range that runs backwards");
        let found = self.index.reads(position, range);
        found.unwrap_or_else(|| panic!("record {position} went with a dropped segment"))
    }

    /// Notes that recovery has written and synced all records up to `through`. The new segment's header proves it, so
    /// no watermark is owed.
    pub(crate) fn mark_rewritten(&mut self, through: u64) {
        self.synced_through = through;
        self.watermark_owed = false;
    }

    /// Appends to a single segment, however large. Recovery rewrites records this way, so that naming this one file
    /// makes all of them count.
    pub(crate) fn without_rolls(&mut self, append: impl FnOnce(&mut Self)) {
        self.rolls = false;
        append(self);
        self.rolls = true;
    }
}
