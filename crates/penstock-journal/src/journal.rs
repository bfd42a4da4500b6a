//! Decides the content of the next batch, and its place in which segment. Lives on the core's thread and
//! touches no file: [`crate::Writer`] carries batches out on a thread of its own.

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

/// A journal's sizes. The defaults suit everybody but tests.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// Names a journal that is made anew; one that exists keeps its own. Draw it at random.
    pub journal_id: [u8; 16],
    /// A segment that has no room for the next batch within this size is followed by another.
    pub segment_bytes: u64,
    /// A batch is closed before it outgrows this.
    pub batch_bytes: usize,
    /// The first segment of an opening is filled up to a multiple of this: little, so that opening
    /// takes milliseconds.
    pub opening_bytes: u64,
    /// How many files are kept ready to become segments, and for the time when the disk is full: four,
    /// for publishes, leases, settlements and reclaiming.
    pub spares: usize,
    /// Whether opening may upgrade a journal of an earlier format, which earlier programs then refuse.
    /// By default such a journal is refused and left as it is.
    pub upgrades: bool,
    /// The size of a file that is removed to make room when the disk is full; 0: none is kept.
    pub reserve_bytes: u64,
    /// How much of the disk is left free when a spare or the reserve is made.
    pub margin_bytes: u64,
    /// How much beyond the live data a journal may keep, where that is less than the live data again: what
    /// is dead must not take a small disk from the living.
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
    /// On a small file system segments are smaller, or the reserves would take too much of it; and so is
    /// what the journal keeps beyond the live data.
    pub fn fit_to_disk(&mut self, disk_bytes: u64) {
        self.dead_bytes = self.dead_bytes.min(disk_bytes / 16);
        let share = (disk_bytes / 64).max(2 << 20);
        let share = 1 << (u64::BITS - 1 - share.leading_zeros());
        self.segment_bytes = self.segment_bytes.min(share);
    }

    /// Keeps a reserve, in a size that the file system can spare: for the first segment of an opening, and
    /// some names. More where each write takes new blocks (not `in_place`), and as much is left free there.
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

    /// A batch must fit into a segment, whatever the sizes asked for.
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
    /// Oldest first; the last is the one that is written to.
    segments: VecDeque<Segment>,
    /// Offset of the next batch in the last segment.
    end: u64,
    /// Sequence number of the last batch taken.
    sequence: u64,
    next_position: u64,
    closed: VecDeque<Filling>,
    filling: Filling,
    closed_bytes: usize,
    /// Segments that are dropped, by batches that were not taken yet.
    untaken_drops: u32,
    /// The last position taken, and the last synced.
    taken_through: u64,
    synced_through: u64,
    /// Records were taken that no watermark covers.
    watermark_owed: bool,
    /// In the life of this process.
    appended_bytes: u64,
    reclaim: Reclaim,
    shared: Arc<SharedSpares>,
    free_bytes: FreeBytes,
    /// All goes into one segment, however much it is.
    rolls: bool,
    index: RecordIndex,
    spacing: Spacing,
}

/// Asks the file system how much could be written; `None`: it does not tell.
pub(crate) type FreeBytes = Box<dyn Fn() -> Option<u64> + Send>;

/// How far reclaiming has come.
#[derive(Clone, Copy, Debug)]
enum Reclaim {
    /// Segments up to this one are to go, if that is what it takes; this much was live when it began.
    Through { last: u64, live_bytes: u64 },
    /// Bytes appended and bytes live when it ended.
    Idle {
        since_bytes: u64,
        live_bytes: u64,
        was_tight: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub number: u64,
    /// The first position whose record begins in it or later.
    pub base_position: u64,
    /// On disk, with what is preallocated.
    pub bytes: u64,
}

/// Records for one write, and where they go.
#[derive(Debug)]
pub struct Batch {
    /// The last position that is complete with this batch.
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
    /// How much it writes.
    pub fn bytes(&self) -> usize {
        BatchHeader::BYTES + self.body.len()
    }

    /// Offset at which the batch after it may begin.
    pub(crate) fn end(&self) -> u64 {
        batch_aligned(self.offset + self.bytes() as u64)
    }
}

/// A batch that still grows.
#[derive(Default)]
struct Filling {
    body: Vec<u8>,
    count: u32,
    /// Position of its first record or part, and the first position that begins in it or later.
    first_position: u64,
    base_position: u64,
    through: u64,
    /// How much of its first record's payload was in batches before.
    first_skipped: u64,
    /// Records and parts that get a mark: position, payload before, offset in the body.
    marks: Vec<(u64, u64, u64)>,
    /// Segments that go once it is synced.
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

    /// Adds a record to the batch that comes next. Positions have no gaps: anything else is a bug
    /// of the caller, and stops it here, before it can be written.
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
            // The parts may end up in several batches and segments; recovery shows the record to
            // nobody before it has met the last one.
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

    /// `skipped`: how much of its payload came before.
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

    /// Call when the writer has nothing to do: the batch holds all that waits, up to a limit, so
    /// call again at once when more does. Batches must be written in the order they are taken.
    pub fn take_batch(&mut self) -> Option<Batch> {
        if let Some(filling) = self.closed.pop_front() {
            self.closed_bytes -= filling.body.len();
            return Some(self.assign_place(filling, false));
        }
        if self.filling.is_empty() {
            return None;
        }
        // The next batch will be about as large: let it not grow step by step.
        let body = Vec::with_capacity(self.filling.body.len());
        let next = Filling {
            body,
            ..Filling::default()
        };
        let filling = std::mem::replace(&mut self.filling, next);
        Some(self.assign_place(filling, false))
    }

    /// A batch without records, whose watermark proves that the last records were synced. Call
    /// when idle and before closing, then write and sync it: damage to the last records is then an
    /// error at the next start, where it would have passed for a torn write. It begins a page, so that no
    /// page that goes bad takes it and them. `None`: there is nothing to prove, or not yet.
    pub fn watermark_batch(&mut self) -> Option<Batch> {
        let idle = self.waiting_bytes() == 0 && self.synced_through == self.taken_through;
        let begins_a_page = true;
        (idle && self.watermark_owed).then(|| self.assign_place(Filling::default(), begins_a_page))
    }

    /// Decides where a batch goes: behind the last one, or first in a new segment.
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
            // Until the writer has taken a spare for it, as much as is known to fit.
            bytes: FIRST_BATCH,
        });
        self.end = FIRST_BATCH;
    }

    /// How large the file is that the writer has taken for the active segment.
    fn update_active_size(&mut self) {
        let active = self.segments.back_mut().expect("a journal has a segment");
        if let Some(bytes) = self.shared.bytes_of(active.number) {
            active.bytes = bytes;
        }
    }

    /// Size that fits into every spare there is: a batch must not be stuck for its size when the disk is full.
    fn longest_body(&self) -> usize {
        let fits = self.shared.largest_batch() as usize;
        self.longest_body
            .min(fits.saturating_sub(BatchHeader::BYTES))
    }

    /// Who must stop because the disk is full. It changes at any time; ask each time before deciding.
    pub fn space(&self) -> Space {
        self.shared.space()
    }

    /// How many segments are prepared ahead.
    pub fn spares_ready(&self) -> u64 {
        self.shared.ready()
    }

    /// The writer has synced everything up to this position.
    pub fn batch_synced(&mut self, through: u64) {
        debug_assert!(through <= self.taken_through);
        self.synced_through = self.synced_through.max(through);
    }

    /// How many bytes of records fit in besides what waits and what is kept for a full disk; `None`: the file
    /// system does not tell. Asks it each time, so ask before something large.
    pub fn room_bytes(&self) -> Option<u64> {
        let free_bytes = (self.free_bytes)()? + self.unfilled_bytes();
        let taken_bytes = self.shared.reserved_bytes() + self.waiting_bytes() as u64;
        Some(free_bytes.saturating_sub(taken_bytes))
    }

    /// Bytes that fit into the segment in use, besides the waiting ones.
    pub fn segment_room_bytes(&self) -> u64 {
        self.unfilled_bytes()
            .saturating_sub(self.waiting_bytes() as u64)
    }

    pub(crate) fn set_free_bytes_source(&mut self, free_bytes: FreeBytes) {
        self.free_bytes = free_bytes;
    }

    /// Bytes that were appended and wait to be taken.
    pub fn waiting_bytes(&self) -> usize {
        self.closed_bytes + self.filling.body.len()
    }

    /// Room left in the segment in use.
    fn unfilled_bytes(&self) -> u64 {
        let active = self.segments.back().expect("a journal has a segment");
        active.bytes.saturating_sub(self.end)
    }

    /// Bytes that the journal occupies on disk without spares, once all that waits is written.
    pub fn total_bytes(&self) -> u64 {
        let segments: u64 = self.segments.iter().map(|segment| segment.bytes).sum();
        segments + self.waiting_bytes() as u64
    }

    /// Whether so little of the journal is live that its oldest segment should go: it may be as
    /// large as twice the live data, on a small disk less, and two segments; while the disk is full, hardly
    /// larger than the live data.
    ///
    /// Once begun, it goes on to an eighth below that, but at most once through all segments: what is
    /// live may take more than is said here, and then going on would write the same for ever. It
    /// begins anew when what is new and what is gone since make an eighth of the journal; while the disk
    /// is full, half a segment. So what is carried forward is never much more than what is new: whatever is
    /// gone was new once.
    pub fn reclaim_due(&mut self, live_bytes: u64) -> bool {
        let (oldest, newest) = match (self.segments.front(), self.segments.back()) {
            (Some(oldest), Some(newest)) => (*oldest, newest.number),
            _ => return false,
        };
        let is_tight = self.space() != Space::Plenty;
        let total_bytes = self.total_bytes();
        let allowed_bytes = match is_tight {
            // What is free in the newest segment is no waste: to win that would cost a spare.
            true => {
                live_bytes.saturating_add(live_bytes / 8 + oldest.bytes + self.unfilled_bytes())
            }
            // Never less than while the disk is full, or that would end and begin in turns.
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
                // What is gone since it began may have been carried forward before.
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

    /// The oldest segment that can be dropped, and the first position after it. Everything live
    /// before that position must be carried forward first. `None`: there is only the one in use.
    pub fn oldest_segment(&self) -> Option<(u64, u64)> {
        Some((
            self.segments.front()?.number,
            self.segments.get(1)?.base_position,
        ))
    }

    /// Drops the oldest segment once all that was appended until now is synced.
    ///
    /// Records that were carried forward must have been appended before. The instruction travels with the
    /// last of it, in a batch that says in its header how many segments still count; the writer
    /// renames or removes the file after syncing that batch. Whenever the power is cut, either the journal
    /// still counts the segment and has it, or counts it no more and has all that it held.
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

    /// Places of bytes of a record's payload, without reading them: for [`crate::JournalReader::read`], on a
    /// thread of its own. The record must be synced, and stand in a segment that was not dropped.
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

    /// Recovery has written and synced all records up to `through`, and the new segment's header
    /// proves it: no watermark is owed.
    pub(crate) fn mark_rewritten(&mut self, through: u64) {
        self.synced_through = through;
        self.watermark_owed = false;
    }

    /// Recovery writes all that it must write again into one segment, however much that is, so
    /// that naming this one file is what makes it count.
    pub(crate) fn without_rolls(&mut self, append: impl FnOnce(&mut Self)) {
        self.rolls = false;
        append(self);
        self.rolls = true;
    }
}
