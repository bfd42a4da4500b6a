//! Measures what the journal adds to the bare cost of the disk: `cargo run --release --example append_sync [DIR]`.
//!
//! Bare: `pwrite` and `fdatasync` of the same number of bytes, on a file of zeros. Journal: append, take a batch,
//! write, sync. The two alternate, so that both meet the same disk.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use penstock_journal::{DiskStorage, Journal, JournalOptions, OpenedJournal, Storage, StoredFile};

const RECORD_BYTES: usize = 300;
const ROUNDS: usize = 200;
const SYNCS_PER_ROUND: usize = 10;
const FILE_BYTES: u64 = 16 << 20;

fn main() {
    let root = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "target".to_string());
    let root = Path::new(&root).join(format!("append-sync-{}", std::process::id()));
    println!(
        "{:>8}  {:>12} {:>12} {:>12}  ratio",
        "records", "bare/sync", "journal/sync", "records/s"
    );
    for records in [1, 16, 256, 4096] {
        compare(&root, records);
    }
    std::fs::remove_dir_all(&root).expect("the directory is ours");
}

fn compare(root: &Path, records: usize) {
    let directory = root.join(records.to_string());
    let mut bare = Bare::new(&root.join("bare"), records * RECORD_BYTES);
    let storage = DiskStorage::open(&directory).expect("a directory for the journal");
    let opened = Journal::open(storage, JournalOptions::default(), &mut |_| Ok(()));
    let mut opened = opened.expect("a new journal");
    opened.writer.spares().prepare().expect("a spare");
    let (mut bare_times, mut journal_times) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for _ in 0..SYNCS_PER_ROUND {
            bare_times.push(timed(|| bare.write_and_sync()));
        }
        for _ in 0..SYNCS_PER_ROUND {
            journal_times.push(timed(|| append_and_sync(&mut opened, records)));
        }
        // Prepared like in the server, on another thread and not within a commit.
        let spares = opened.writer.spares();
        if spares.wanted() {
            spares.prepare().expect("a spare");
        }
    }
    let (bare, journal) = (median(bare_times), median(journal_times));
    let rate = records as f64 / journal.as_secs_f64();
    let ratio = journal.as_secs_f64() / bare.as_secs_f64();
    println!("{records:>8}  {bare:>12.1?} {journal:>12.1?} {rate:>12.0}  {ratio:.2}");
}

fn append_and_sync<S: Storage>(opened: &mut OpenedJournal<S>, records: usize) {
    let record = [b'x'; RECORD_BYTES];
    for _ in 0..records {
        opened.journal.append(opened.next_position, &record);
        opened.next_position += 1;
    }
    while let Some(batch) = opened.journal.take_batch() {
        opened.writer.write(&batch).expect("the disk takes it");
        opened.writer.sync().expect("the disk keeps it");
        opened.journal.batch_synced(batch.through);
    }
    while opened.journal.reclaim_due(0) {
        opened.journal.drop_oldest();
    }
}

struct Bare {
    file: std::fs::File,
    bytes: Vec<u8>,
    offset: u64,
}

impl Bare {
    fn new(path: &Path, bytes: usize) -> Self {
        let parent = path.parent().expect("it is in a directory");
        std::fs::create_dir_all(parent).expect("a directory for the file");
        let mut options = OpenOptions::new();
        options
            .create(true)
            .truncate(true)
            .write(true)
            .read(true)
            .mode(0o600);
        let file = options.open(path).expect("a new file");
        file.write_all_at(&vec![0; FILE_BYTES as usize], 0)
            .expect("room for the file");
        file.sync().expect("the disk keeps it");
        Self {
            file,
            bytes: vec![b'x'; bytes],
            offset: 0,
        }
    }

    fn write_and_sync(&mut self) {
        if self.offset + self.bytes.len() as u64 > FILE_BYTES {
            self.offset = 0;
        }
        self.file
            .write_all_at(&self.bytes, self.offset)
            .expect("the disk takes it");
        self.file.sync().expect("the disk keeps it");
        self.offset += self.bytes.len() as u64;
    }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
