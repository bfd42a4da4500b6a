//! Thread that reads bodies back from the journal, so that no delivery waits for another's disk.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use mio::Waker;
use penstock_journal::{JournalReader, Storage};

use crate::engine::ReadTask;

/// Time without work after which the kept blocks are freed.
const IDLE: Duration = Duration::from_secs(5);

pub(crate) struct ReaderThread {
    tasks: SyncSender<ReadTask>,
    pub(crate) done: Receiver<ReadTask>,
}

impl ReaderThread {
    pub(crate) fn start<S: Storage>(
        reader: JournalReader<S>,
        waker: Arc<Waker>,
    ) -> std::io::Result<Self> {
        // The engine has one task out at a time, so the channel never blocks.
        let (tasks, todo) = sync_channel::<ReadTask>(1);
        let (report, done) = channel();
        let tell = move |task: ReadTask| {
            // The loop may have stopped first; then nobody waits for the report.
            if report.send(task).is_ok() {
                waker.wake().expect("an eventfd takes a wake-up");
            }
        };
        thread::Builder::new()
            .name("journal-reader".to_owned())
            .spawn(move || run_reader(reader, &todo, &tell))?;
        Ok(Self { tasks, done })
    }

    pub(crate) fn carry_out(&self, task: ReadTask) {
        self.tasks
            .try_send(task)
            .expect("the reader lives, and has one task at a time");
    }
}

fn run_reader<S: Storage>(
    mut reader: JournalReader<S>,
    todo: &Receiver<ReadTask>,
    tell: &impl Fn(ReadTask),
) {
    let mut patience = IDLE;
    loop {
        match todo.recv_timeout(patience) {
            Ok(mut task) => {
                task.carry_out(&mut reader);
                tell(task);
                patience = IDLE;
            }
            Err(RecvTimeoutError::Timeout) => {
                reader.forget();
                // Nothing is left to free.
                patience = Duration::MAX;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
