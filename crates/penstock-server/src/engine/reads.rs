//! Reads back bodies that are not in memory, on a separate thread, one task at a time.

use bytes::Bytes;
use penstock_broker::{Now, Read, Unread};
use penstock_journal::{JournalReader, ReadAt, ReadError, Storage};

use super::{Engine, Lifecycle};

/// Approximate bytes read by one task: the first ones are sent while the next are read.
const TASK_BYTES: usize = 1 << 20;

/// Task of the reader's thread, done in one go.
#[derive(Debug)]
pub struct ReadTask {
    reads: Vec<(Read, ReadAt)>,
    outcomes: Vec<Result<Bytes, Unread>>,
}

impl ReadTask {
    pub fn carry_out<S: Storage>(&mut self, reader: &mut JournalReader<S>) {
        let read = |(_, at): &(Read, ReadAt)| {
            reader.read(at).map_err(|error| match error {
                ReadError::Gone => Unread::Gone,
                ReadError::Damaged { .. } => Unread::Damaged(error.to_string()),
                ReadError::Io { .. } => Unread::Failed(error.to_string()),
            })
        };
        self.outcomes = self.reads.iter().map(read).collect();
    }
}

impl Engine {
    /// Returns the reader's next task; `None` while it has one, or when there is nothing to read. The shell reports the
    /// task with [`Engine::reads_done`].
    #[must_use = "the task is returned once"]
    pub fn take_reads(&mut self, now: Now) -> Option<ReadTask> {
        self.now = now;
        if self.reading || matches!(self.lifecycle, Lifecycle::Failed { .. }) {
            return None;
        }
        let wanted = self.broker.poll_reads(TASK_BYTES);
        let reads: Vec<(Read, ReadAt)> = wanted
            .into_iter()
            .map(|read| {
                let at = self.journal.reads(read.position.0, read.range.clone());
                (read, at)
            })
            .collect();
        self.reading = !reads.is_empty();
        if !self.reading && self.reclaim_reads && !self.broker.awaits_carried() {
            // All messages that reclaiming waited for have ended, so no read will resume it.
            self.reclaim_reads = false;
            self.reclaim();
        }
        self.reading.then_some(ReadTask {
            reads,
            outcomes: Vec::new(),
        })
    }

    /// Handles the outcomes of the reader's task.
    pub fn reads_done(&mut self, now: Now, task: ReadTask) {
        self.now = now;
        self.reading = false;
        if matches!(self.lifecycle, Lifecycle::Failed { .. }) {
            return;
        }
        for ((read, _), outcome) in task.reads.into_iter().zip(task.outcomes) {
            self.broker.handle_read(now, read, outcome);
        }
        self.reclaim_reads = false;
        self.reclaim();
    }
}
