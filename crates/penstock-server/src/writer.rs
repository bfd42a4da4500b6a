//! Threads that write and sync, and that prepare spare segments.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use penstock_journal::{Spares, Storage, StoredFile, WriteError, Writer};

use crate::engine::WriterTask;
use crate::panics::panic_if_asked;

/// Interval between attempts while the disk is full: it does not report new space.
const FULL_RETRY: Duration = Duration::from_millis(250);

/// Message from the writer to the loop.
pub(crate) enum WriterReport {
    /// The batch is written up to this position; the sync is still running.
    Written(u64),
    Done {
        task: WriterTask,
        sync_us: u64,
    },
    Failed(WriteError),
    /// Other commands must wait for disk space now: ask the engine's journal.
    SpaceChanged,
}

pub(crate) struct WriterThread {
    tasks: SyncSender<WriterTask>,
    pub(crate) reports: Receiver<WriterReport>,
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
        let prepare_spare = start_spares(writer.spares(), tell.clone())?;
        thread::Builder::new()
            .name("journal-writer".to_owned())
            .spawn(move || run_writer(writer, &todo, &tell, &prepare_spare))?;
        Ok(Self { tasks, reports })
    }

    pub(crate) fn carry_out(&self, task: WriterTask) {
        self.tasks
            .try_send(task)
            .expect("the writer lives, and has one task at a time");
    }
}

fn run_writer<S: Storage>(
    mut writer: Writer<S>,
    todo: &Receiver<WriterTask>,
    tell: &impl Fn(WriterReport),
    prepare_spare: &SyncSender<()>,
) {
    let spares = writer.spares();
    while let Ok(task) = todo.recv() {
        panic_if_asked("writer");
        let start = Instant::now();
        let mut waits = false;
        let outcome = loop {
            let told = |through| tell(WriterReport::Written(through));
            match task.carry_out(&mut writer, told) {
                Err(error @ WriteError::DiskFull { .. }) => {
                    // Once for each batch: the log may be on the same disk.
                    if !std::mem::replace(&mut waits, true) {
                        tracing::warn!("{error}");
                    }
                    let made_room = spares.ran_out();
                    tell(WriterReport::SpaceChanged);
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
            Ok(()) => {
                let sync_us = start.elapsed().as_micros() as u64;
                tell(WriterReport::Done { task, sync_us });
            }
            Err(error) => return tell(WriterReport::Failed(error)),
        }
        // Checked here, since waking an idle thread costs a lone commit 7 µs.
        if spares.wanted() {
            // Full channel: the thread is already at work.
            let _busy = prepare_spare.try_send(());
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
                    WriterReport::Written(_) | WriterReport::Failed(_) => panic!("it failed"),
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
                WriterReport::Written(_) | WriterReport::Failed(_) => panic!("it failed"),
            }
        }
    }
}
