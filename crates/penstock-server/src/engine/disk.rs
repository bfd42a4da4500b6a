//! Decides when records are written: they become batches for the writer's thread, one at a time.

use penstock_broker::{CarriedForward, ConnId, Input, Now, Position};
use penstock_faults::{perhaps, planted};
#[cfg(doc)]
use penstock_journal::Journal;
use penstock_journal::{Batch, Storage, WriteError, Writer};
use penstock_message::{Durability, Op, Space, Tx};

use super::{Engine, Lifecycle};

/// Maximum delay of records that nobody waits for (grants of leases, mostly).
const LAZY_MS: u64 = 20;
/// Bytes of such records that are written at once, without the delay of [`LAZY_MS`].
const LAZY_BYTES: usize = 1 << 20;
/// Maximum delay of outcomes that nobody waits for, and the bytes that are written at once without it.
const OUTCOMES_MS: u64 = 2;
const OUTCOMES_BYTES: usize = 16 << 10;
/// Bytes of a transaction from which free disk space is checked before it is accepted: the segments kept for a full
/// disk hold several times as much.
const LARGE_BYTES: usize = 256 << 10;
/// Free bytes that steps of operations need in the segment in use, on the last reserve of the disk. A step that ends
/// 1,024 messages takes at most 20 KiB.
const ROOM_FOR_STEPS_BYTES: u64 = 256 << 10;
/// Time without a record after which the journal gets a watermark that covers the last one.
const IDLE_MS: u64 = 100;
/// Minimum bytes that are carried forward from the oldest segment at a time.
const RECLAIM_STEP_BYTES: usize = 256 << 10;

/// Task of the writer's thread, done in one go.
#[derive(Debug)]
pub struct WriterTask {
    /// Batch to write with one call.
    pub batch: Option<Batch>,
    /// Whether to sync after the write.
    pub sync: bool,
    /// Whether a client waits for the write itself, and not for the sync after it.
    pub tell_written: bool,
    /// Whether to close the journal afterwards: nothing more will be written.
    pub close: bool,
    /// Whether somebody waits for the task.
    pub is_awaited: bool,
    /// Last position that is complete with this task.
    pub through: u64,
}

impl WriterTask {
    /// Writes and syncs. Calls `written` in between if a client waits for the write alone. Does nothing when the disk
    /// is full: try again later.
    pub fn carry_out<S: Storage>(
        &self,
        writer: &mut Writer<S>,
        written: impl FnOnce(u64),
    ) -> Result<(), WriteError> {
        if let Some(batch) = &self.batch {
            writer.write(batch)?;
        }
        if self.tell_written {
            written(self.through);
        }
        if self.sync {
            writer.sync()?;
        }
        if self.close {
            writer.close()?;
        }
        Ok(())
    }
}

impl Engine {
    /// Returns the writer's next task; `None` while it has one, or when there is nothing to do. The shell reports the
    /// task with [`Engine::batch_done`] or [`Engine::disk_failed`].
    #[must_use = "the task is returned once"]
    pub fn take_batch(&mut self, now: Now) -> Option<WriterTask> {
        self.now = now;
        self.pump();
        if self.disk.in_flight || matches!(self.lifecycle, Lifecycle::Failed { .. }) {
            return None;
        }
        let is_awaited = self.disk.is_awaited();
        let batch = if self.is_batch_due() && !perhaps!("wake-late") {
            self.journal.take_batch()
        } else {
            None
        };
        let task = match batch {
            Some(batch) => {
                let through = batch.through;
                self.batches.count += 1;
                self.batches.records += through - self.disk.taken;
                self.batches.bytes += batch.bytes() as u64;
                self.disk.taken = through;
                if planted!("confirm-before-sync") {
                    self.broker.handle_durable(Position(through));
                }
                let more = self.disk.appended > through;
                let delay_ms = match self.disk.is_wanted() {
                    true => OUTCOMES_MS,
                    false => LAZY_MS,
                };
                self.disk.due_ms = more.then_some(now.mono_ms + delay_ms);
                let sync = self.disk.wanted_synced > self.disk.synced || self.reclaiming;
                WriterTask {
                    batch: Some(batch),
                    sync,
                    tell_written: sync && self.disk.wanted_written > self.disk.written,
                    close: false,
                    is_awaited,
                    through,
                }
            }
            None => self.idle_task()?,
        };
        self.disk.in_flight = true;
        self.disk.idle_due_ms = None;
        Some(task)
    }

    /// Notes that the batch is written: it survives the death of this process.
    pub fn batch_written(&mut self, now: Now, through: u64) {
        self.now = now;
        self.disk.written = self.disk.written.max(through);
        self.broker.handle_written(Position(through));
    }

    /// Notes that the writer has carried out its task. `sync_us`: duration of the sync, if there was one.
    pub fn batch_done(&mut self, now: Now, task: &WriterTask, sync_us: u64) {
        self.now = now;
        let through = task.through;
        self.disk.in_flight = false;
        self.disk.written = self.disk.written.max(through);
        if task.sync {
            self.disk.synced = self.disk.synced.max(through);
            self.journal.batch_synced(through);
            self.syncs.add(sync_us);
            self.broker.handle_durable(Position(through));
        } else {
            self.broker.handle_written(Position(through));
        }
        self.disk.closed = task.close && self.disk.appended == through;
        self.disk.idle_due_ms = Some(now.mono_ms + IDLE_MS);
        // A dropped segment is a spare now: held-back clients may continue, and may stay silent until then.
        self.update_space();
        self.reclaim();
    }

    /// Notes that other commands may have to wait for the disk; [`Journal::space`] states which.
    pub fn space_changed(&mut self, now: Now) {
        self.now = now;
        self.update_space();
        self.reclaim();
    }

    /// Passes the current disk space to the core before its next decision.
    pub(super) fn update_space(&mut self) {
        let space = self.journal.space();
        if space != self.space {
            self.space = space;
            self.input(Input::Space(space));
        }
        let fit = space == Space::NoSettlements
            && self.journal.segment_room_bytes() >= ROOM_FOR_STEPS_BYTES;
        if fit != self.steps_fit {
            self.steps_fit = fit;
            self.input(Input::StepsFit(fit));
        }
        if self.space < Space::NoSettlements && !self.blocked.is_empty() {
            for (conn, input) in std::mem::take(&mut self.blocked) {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.blocked_bytes = 0;
                    self.input(input);
                }
            }
        }
    }

    /// Applies transactions or holds them back. At the last level of space, outcomes of runs wait, and so do all later
    /// transactions of the same client. New work alone is refused at once.
    pub(super) fn decide(&mut self, conn: ConnId, bytes: usize, input: Input) {
        self.update_space();
        let settles = |tx: &Tx| tx.ops.iter().any(Op::is_settlement);
        let must_wait = self.space == Space::NoSettlements
            && match &input {
                Input::Commit { txs, .. } => txs.iter().any(settles),
                // Its other parts are not known yet.
                Input::CommitPart { .. } => true,
                _ => false,
            };
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if must_wait || connection.blocked_bytes > 0 {
            connection.blocked_bytes += bytes.max(1);
            self.blocked.push_back((conn, input));
            return;
        }
        let is_large =
            bytes >= LARGE_BYTES || matches!(input, Input::CommitPart { last: true, .. });
        if is_large && let Some(bytes) = self.journal.room_bytes() {
            self.input(Input::Room { bytes });
        }
        self.input(input);
    }

    /// Drops held transactions: their client will send them again on its next connection.
    pub(super) fn forget_blocked(&mut self, conn: ConnId) {
        if let Some(connection) = self.connections.get_mut(&conn)
            && connection.blocked_bytes > 0
        {
            connection.blocked_bytes = 0;
            self.blocked.retain(|(other, _)| *other != conn);
        }
    }

    pub(super) fn append_records(&mut self) {
        while let Some(record) = self.broker.poll_record() {
            let position = record.position.0;
            self.journal.append(position, record.as_bytes());
            self.disk.appended = position;
            self.disk.proven = false;
            self.disk.closed = false;
            let (may_wait, delay_ms) = match record.durability {
                Durability::None => (true, LAZY_MS),
                Durability::Disk | Durability::Replicated => {
                    self.disk.wanted_synced = position;
                    (record.may_wait, OUTCOMES_MS)
                }
                Durability::Os => {
                    self.disk.wanted_written = position;
                    (record.may_wait, OUTCOMES_MS)
                }
            };
            if !may_wait {
                self.disk.awaited = position;
            } else if delay_ms == LAZY_MS || !planted!("keep-outcomes-waiting") {
                self.disk.due_by(self.now.mono_ms + delay_ms);
            }
        }
        self.disk.awaited = self.disk.awaited.max(self.broker.awaited().0);
    }

    fn is_batch_due(&self) -> bool {
        let disk = &self.disk;
        let has_waited = disk.due_ms.is_some_and(|due_ms| due_ms <= self.now.mono_ms);
        let enough = match disk.is_wanted() {
            true => OUTCOMES_BYTES,
            false => LAZY_BYTES,
        };
        disk.is_awaited()
            || has_waited
            || self.reclaiming
            || self.lifecycle != Lifecycle::Running
            || self.journal.waiting_bytes() >= enough
    }

    /// Returns a task when the broker is idle or stopping: syncs written records, then proves them with a watermark. On
    /// stopping it also closes the journal.
    fn idle_task(&mut self) -> Option<WriterTask> {
        let stopping = self.lifecycle != Lifecycle::Running;
        let quiet = self
            .disk
            .idle_due_ms
            .is_some_and(|due_ms| due_ms <= self.now.mono_ms);
        if !(stopping || quiet) || self.disk.appended > self.disk.taken {
            return None;
        }
        self.disk.idle_due_ms = None;
        let mut batch = None;
        if self.disk.synced == self.disk.taken {
            batch = self.journal.watermark_batch();
            self.disk.proven = batch.is_none();
        }
        let close = self.disk.proven;
        if close && !self.wants_close() {
            return None;
        }
        Some(WriterTask {
            batch,
            sync: !close,
            tell_written: false,
            close,
            is_awaited: false,
            through: self.disk.taken,
        })
    }

    /// Whether no client is left that could cause a write, and all records are proven.
    fn wants_close(&self) -> bool {
        let announced = matches!(
            self.lifecycle,
            Lifecycle::Stopping {
                announced: true,
                ..
            }
        );
        announced && self.connections.is_empty() && self.disk.proven && !self.disk.closed
    }

    /// Empties the oldest segment step by step while too little of the journal is live.
    pub(super) fn reclaim(&mut self) {
        if self.lifecycle != Lifecycle::Running || self.disk.in_flight || self.reclaim_reads {
            return;
        }
        // Waits until the previous step is written, or it would never end.
        let is_early = self.journal.waiting_bytes() == 0 && perhaps!("reclaim-early");
        self.reclaiming = self.journal.reclaim_due(self.broker.live_bytes()) || is_early;
        if !self.reclaiming {
            return;
        }
        let Some((segment, before)) = self.journal.oldest_segment() else {
            self.reclaiming = false;
            return;
        };
        // At least as fast as new records arrive, so that the journal's size stays bounded.
        let step = match perhaps!("carry-little") {
            true => 1,
            false => RECLAIM_STEP_BYTES.max(self.journal.waiting_bytes()),
        };
        let carried = self.broker.carry_forward(Position(before), step);
        self.append_records();
        self.reclaim_reads = carried == CarriedForward::ReadFirst;
        if carried == CarriedForward::All || planted!("drop-live-things") {
            tracing::debug!(segment, "the oldest segment has no live records left");
            self.journal.drop_oldest();
        }
    }

    /// Returns the time when the disk needs attention next.
    pub(super) fn disk_due_ms(&self) -> Option<u64> {
        let disk = &self.disk;
        if disk.in_flight {
            return None;
        }
        let reclaims = self.reclaiming && !self.reclaim_reads;
        let at_once = disk.is_awaited() || reclaims || self.wants_close();
        // A watermark comes after all records waiting to be written.
        let idle_due_ms = disk.idle_due_ms.filter(|_| disk.appended == disk.taken);
        [
            at_once.then_some(self.now.mono_ms),
            disk.due_ms,
            idle_due_ms,
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

/// Progress of appending, writing and syncing, by position.
#[derive(Debug, Default)]
pub(super) struct DiskState {
    /// Last record that must be written, and last record that must be synced, before its effects are seen.
    wanted_written: u64,
    wanted_synced: u64,
    /// Last record that somebody waits for.
    awaited: u64,
    pub(super) appended: u64,
    taken: u64,
    written: u64,
    pub(super) synced: u64,
    /// Whether a watermark covers all appended records.
    pub(super) proven: bool,
    /// Whether the journal is closed.
    pub(super) closed: bool,
    pub(super) in_flight: bool,
    /// Time at which records that nobody waits for are written anyway.
    due_ms: Option<u64>,
    /// Time at which the broker counts as idle and writes a watermark.
    idle_due_ms: Option<u64>,
}

impl DiskState {
    /// Starts with all recovered records on disk.
    pub(super) fn recovered(through: u64) -> Self {
        Self {
            appended: through,
            taken: through,
            written: through,
            synced: through,
            awaited: through,
            ..Self::default()
        }
    }

    /// Whether somebody waits for a record that the writer does not have yet.
    fn is_awaited(&self) -> bool {
        self.awaited > self.taken
    }

    /// Whether the writer does not have all records yet that must be written or synced.
    fn is_wanted(&self) -> bool {
        self.wanted_synced.max(self.wanted_written) > self.taken
    }

    /// Has the waiting records written by this time.
    fn due_by(&mut self, due_ms: u64) {
        self.due_ms = Some(self.due_ms.map_or(due_ms, |earlier| earlier.min(due_ms)));
    }
}
