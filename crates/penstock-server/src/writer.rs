//! Threads that write and sync, and that prepare spare segments.
//!
//! The loop's thread writes a small batch itself when somebody waits for it, the disk is quick and the loop has time:
//! two threads need not be woken then. See [`crate::standby`] for a disk that hangs meanwhile.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use penstock_journal::{Spares, Storage, StoredFile, WriteError, Writer};

use crate::engine::WriterTask;
use crate::panics::panic_if_asked;

/// Interval between attempts while the disk is full: it does not report new space.
const FULL_RETRY: Duration = Duration::from_millis(250);

/// Size of a batch up to which the loop's thread may write it.
const SMALL_BYTES: usize = 32 << 10;
/// Mean time of the latest small batches with a sync up to which the disk counts as quick.
const QUICK_US: u64 = 1_000;
/// Number of small batches that the mean is about.
const BATCHES_IN_MEAN: u64 = 16;

/// Message from the writer to the loop.
pub(crate) enum WriterReport {
    /// The batch is written up to this position; the sync is still running.
    Written(u64),
    Done {
        task: WriterTask,
        sync_us: u64,
    },
    Failed(WriteError),
    /// The loop's thread found the disk full: the writer's thread is to wait for space and write the batch.
    NoRoom(WriterTask),
    /// Other commands must wait for disk space now: ask the engine's journal.
    SpaceChanged,
}

/// [`Writer`] of any storage.
trait CarryOut: Send {
    fn carry_out(&mut self, task: &WriterTask, written: &dyn Fn(u64)) -> Result<(), WriteError>;

    /// Whether the task takes one write and at most one sync: no change of segments.
    fn is_plain(&self, task: &WriterTask) -> bool;

    fn wants_spare(&self) -> bool;
}

impl<S: Storage> CarryOut for Writer<S> {
    fn carry_out(&mut self, task: &WriterTask, written: &dyn Fn(u64)) -> Result<(), WriteError> {
        task.carry_out(self, written)
    }

    fn is_plain(&self, task: &WriterTask) -> bool {
        task.batch.as_ref().is_some_and(|batch| self.appends(batch)) && !task.close
    }

    fn wants_spare(&self) -> bool {
        self.spares().wanted()
    }
}

/// The writer, for the thread that has the engine's task. The engine has one task out at a time, so nobody waits here.
#[derive(Clone)]
struct SharedWriter {
    writer: Arc<Mutex<dyn CarryOut>>,
    tell: Arc<dyn Fn(WriterReport) + Send + Sync>,
    /// Wakes the thread that prepares spares.
    prepare_spare: SyncSender<()>,
}

impl SharedWriter {
    fn lock(&self) -> MutexGuard<'_, dyn CarryOut + 'static> {
        self.writer.lock().expect("a panic ends the process")
    }

    /// Writes and syncs; returns the time that took, in microseconds.
    fn carry_out(&self, task: &WriterTask) -> Result<u64, WriteError> {
        panic_if_asked("writer");
        let start = Instant::now();
        let told = |through| (self.tell)(WriterReport::Written(through));
        let mut writer = self.lock();
        writer.carry_out(task, &told)?;
        let sync_us = start.elapsed().as_micros() as u64;
        // Checked here, since waking an idle thread costs a lone commit 7 µs.
        if writer.wants_spare() {
            // Full channel: the thread is already at work.
            let _busy = self.prepare_spare.try_send(());
        }
        Ok(sync_us)
    }
}

pub(crate) struct WriterThread {
    tasks: SyncSender<WriterTask>,
    pub(crate) reports: Receiver<WriterReport>,
    writer: SharedWriter,
    /// Mean time of the latest small batches, times their number.
    small_batches_us: u64,
}

impl WriterThread {
    pub(crate) fn start<S: Storage>(writer: Writer<S>, waker: Arc<Waker>) -> std::io::Result<Self> {
        // The engine has one task out at a time, so the channel never blocks.
        let (tasks, todo) = sync_channel::<WriterTask>(1);
        let (report, reports) = channel();
        let tell = move |said: WriterReport| {
            // The loop may have stopped first; then nobody waits for the report.
            if report.send(said).is_ok() {
                waker.wake().expect("an eventfd takes a wake-up");
            }
        };
        let spares = writer.spares();
        let prepare_spare = start_spares(spares.clone(), tell.clone())?;
        let writer = SharedWriter {
            writer: Arc::new(Mutex::new(writer)),
            tell: Arc::new(tell),
            prepare_spare,
        };
        let shared = writer.clone();
        thread::Builder::new()
            .name("journal-writer".to_owned())
            .spawn(move || run_writer(&shared, &spares, &todo))?;
        Ok(Self {
            tasks,
            reports,
            writer,
            small_batches_us: 0,
        })
    }

    pub(crate) fn carry_out(&self, task: WriterTask) {
        self.tasks
            .try_send(task)
            .expect("the writer lives, and has one task at a time");
    }

    /// Whether the task can be expected to take less time than waking the writer's thread is worth.
    pub(crate) fn is_quick(&self, task: &WriterTask) -> bool {
        is_small(task)
            && self.small_batches_us <= QUICK_US * BATCHES_IN_MEAN
            && self.writer.lock().is_plain(task)
    }

    /// Returns the task for the loop's own thread.
    pub(crate) fn task_here(&self, task: WriterTask) -> TaskHere {
        TaskHere {
            task,
            writer: self.writer.clone(),
        }
    }

    /// Notes the time that a task took.
    pub(crate) fn took(&mut self, task: &WriterTask, sync_us: u64) {
        if is_small(task) && task.sync {
            self.small_batches_us -= self.small_batches_us / BATCHES_IN_MEAN;
            self.small_batches_us += sync_us;
        }
    }
}

fn is_small(task: &WriterTask) -> bool {
    task.batch
        .as_ref()
        .is_some_and(|batch| batch.bytes() <= SMALL_BYTES)
}

/// Task that the loop's thread carries out itself.
pub(crate) struct TaskHere {
    pub(crate) task: WriterTask,
    writer: SharedWriter,
}

impl TaskHere {
    /// Writes and syncs. Returns the report, and what sends it to the loop if that is elsewhere by now.
    pub(crate) fn carry_out(self) -> (WriterReport, impl FnOnce(WriterReport)) {
        let Self { task, writer } = self;
        let report = match writer.carry_out(&task) {
            Ok(sync_us) => WriterReport::Done { task, sync_us },
            Err(WriteError::DiskFull { .. }) => WriterReport::NoRoom(task),
            Err(error) => WriterReport::Failed(error),
        };
        (report, move |report| (writer.tell)(report))
    }
}

fn run_writer<S: Storage>(writer: &SharedWriter, spares: &Spares<S>, todo: &Receiver<WriterTask>) {
    while let Ok(task) = todo.recv() {
        let mut waits = false;
        let outcome = loop {
            match writer.carry_out(&task) {
                Err(error @ WriteError::DiskFull { .. }) => {
                    // Once for each batch: the log may be on the same disk.
                    if !std::mem::replace(&mut waits, true) {
                        tracing::warn!("{error}");
                    }
                    let made_room = spares.ran_out();
                    (writer.tell)(WriterReport::SpaceChanged);
                    if made_room {
                        tracing::warn!("made room by removing a reserve file");
                        continue;
                    }
                    // No other task arrives while this one is pending; but the loop may stop.
                    match todo.recv_timeout(FULL_RETRY) {
                        Err(RecvTimeoutError::Timeout) => {}
                        _ => return,
                    }
                }
                outcome => break outcome,
            }
        };
        match outcome {
            Ok(sync_us) => (writer.tell)(WriterReport::Done { task, sync_us }),
            Err(error) => return (writer.tell)(WriterReport::Failed(error)),
        }
    }
}

fn start_spares<S: Storage>(
    spares: Spares<S>,
    tell: impl Fn(WriterReport) + Send + 'static,
) -> std::io::Result<SyncSender<()>> {
    let (look, asked) = sync_channel(1);
    thread::Builder::new()
        .name("journal-spares".to_owned())
        .spawn(move || {
            let mut failing = false;
            loop {
                let asked = match failing {
                    true => asked.recv_timeout(FULL_RETRY),
                    false => asked.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                if asked == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
                failing = prepare_spares(&spares, failing, &tell);
            }
        })?;
    Ok(look)
}

/// Prepares the wanted spares; returns whether that failed.
fn prepare_spares<S: Storage>(
    spares: &Spares<S>,
    failed: bool,
    tell: &impl Fn(WriterReport),
) -> bool {
    let space = spares.space();
    let mut failing = false;
    while !failing && spares.wanted() {
        if let Err(error) = spares.prepare() {
            failing = true;
            if !failed {
                tracing::warn!(
                    "no segment could be prepared ahead: {error}; trying again until there is space"
                );
            }
        }
    }
    if spares.space() != space {
        tracing::warn!(was = ?space, is = ?spares.space(), "the disk space for the journal has changed level");
        tell(WriterReport::SpaceChanged);
    }
    failing
}

/// Logs, shortly after the start, how long every confirm will wait for a sync.
pub(crate) fn measure_sync<S: Storage>(storage: S) -> std::io::Result<()> {
    const NAME: &str = "sync-time.probe";
    const SYNCS: usize = 9;
    let measure = move || -> std::io::Result<u128> {
        // An earlier process may have died here.
        let _none = storage.remove(NAME);
        let file = storage.create(NAME)?;
        let mut took_us = Vec::new();
        for _ in 0..=SYNCS {
            let start = Instant::now();
            file.write_at(0, &[&[0; 4096]])?;
            file.sync()?;
            took_us.push(start.elapsed().as_micros());
        }
        storage.remove(NAME)?;
        // The first one also made the file longer.
        let overwrites = &mut took_us[1..];
        overwrites.sort_unstable();
        Ok(overwrites[SYNCS / 2])
    };
    thread::Builder::new()
        .name("sync-time".to_owned())
        .spawn(move || match measure() {
            Ok(median_us) => {
                tracing::info!("a sync of the journal's disk takes about {median_us} µs")
            }
            Err(error) => tracing::debug!("the sync time could not be measured: {error}"),
        })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use penstock_journal::sim::SimStorage;
    use penstock_journal::{Journal, JournalOptions};
    use penstock_message::Space;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_full_disk_is_told_and_waited_for_and_then_all_goes_on() {
        let storage = SimStorage::new();
        let options = JournalOptions {
            segment_bytes: 64 << 10,
            opening_bytes: 64 << 10,
            ..JournalOptions::default()
        };
        let opened = Journal::open(storage.clone(), options, &mut |_| Ok(()));
        let mut journal = opened.expect("an empty disk");
        let poll = mio::Poll::new().expect("a poll");
        let waker = Waker::new(poll.registry(), mio::Token(0)).expect("a waker");
        let writer = WriterThread::start(journal.writer, Arc::new(waker)).expect("threads");
        // One segment and its four spares, whichever thread makes them, and however late.
        storage.set_quota(Some(5 * (64 << 10)));
        let mut position = journal.next_position;
        let mut write = || {
            journal.journal.append(position, &[7; 10_000]);
            position += 1;
            let batch = journal.journal.take_batch().expect("there is a record");
            writer.carry_out(WriterTask {
                through: batch.through,
                batch: Some(batch),
                sync: true,
                tell_written: false,
                close: false,
                is_awaited: true,
            });
        };

        let mut done = 0;
        loop {
            write();
            let mut changes = 0;
            // One write changes the space at most twice: the disk is found full, and a spare is used. A third report
            // means that the writer waits.
            let is_done = loop {
                match writer.reports.recv_timeout(LONG).expect("a report") {
                    WriterReport::Done { .. } => break true,
                    WriterReport::SpaceChanged if changes == 2 => break false,
                    WriterReport::SpaceChanged => changes += 1,
                    _ => panic!("it failed"),
                }
            };
            if !is_done {
                break;
            }
            done += 1;
            assert!(done < 1000, "the disk is never full");
        }
        assert!(done > 20, "the reserves were used: {done}");
        assert_eq!(journal.journal.space(), Space::NoSettlements);
        storage.set_quota(None);
        let (mut is_done, mut has_space) = (false, false);
        while !is_done || !has_space {
            match writer.reports.recv_timeout(LONG).expect("a report") {
                WriterReport::Done { .. } => is_done = true,
                WriterReport::SpaceChanged => has_space = journal.journal.space() == Space::Plenty,
                _ => panic!("it failed"),
            }
        }
    }
}
