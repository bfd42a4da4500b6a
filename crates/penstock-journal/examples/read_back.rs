//! Measures how fast records are read back: `cargo run --release --example read_back -- DIRECTORY`.

use std::time::Instant;

use penstock_journal::sim::Rng;
use penstock_journal::{DiskStorage, Journal, JournalOptions};

const RECORDS: u64 = 500_000;
const RECORD_BYTES: u64 = 300;

fn main() {
    let directory = std::env::args().nth(1).expect("a directory to write to");
    let storage = DiskStorage::open(directory).expect("a directory on a local disk");
    let mut opened = Journal::open(storage, JournalOptions::default(), &mut |_| Ok(()))
        .expect("a journal that was not there before");
    let first = opened.next_position;
    let record = vec![b'x'; RECORD_BYTES as usize];
    for position in first..first + RECORDS {
        opened.journal.append(position, &record);
    }
    while let Some(batch) = opened.journal.take_batch() {
        opened.writer.write(&batch).expect("the disk takes it");
        opened.writer.sync().expect("the disk keeps it");
        opened.journal.batch_synced(batch.through);
    }
    let mut rng = Rng::new(1);
    let rising: Vec<u64> = (first..first + RECORDS).collect();
    let random: Vec<u64> = (0..RECORDS / 25)
        .map(|_| first + rng.below(RECORDS))
        .collect();
    for (order, positions) in [("rising", rising), ("random", random)] {
        let mut reader = opened.writer.reader();
        let start = Instant::now();
        for &position in &positions {
            let at = opened.journal.reads(position, 0..RECORD_BYTES);
            let read = reader.read(&at).expect("it is there");
            assert_eq!(read.len() as u64, RECORD_BYTES);
        }
        let seconds = start.elapsed().as_secs_f64();
        let records = positions.len() as f64 / seconds;
        let megabytes = records * RECORD_BYTES as f64 / 1e6;
        println!("{order:>7}: {records:>10.0} records/s  {megabytes:>6.0} MB/s");
    }
}
