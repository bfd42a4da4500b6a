//! Single records are read back while the journal continues: their exact bytes, or an error that they are gone or
//! damaged; never anything else.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use penstock_journal::sim::{Rng, SimFile, SimLock, SimStorage};
use penstock_journal::{DiskStorage, JournalReader, ReadError, Storage, StoredFile};
use proptest::prelude::*;

use crate::support::{User, roomy, small};

/// Reads the records that a user's journal should hold, some of them in pieces.
fn reads_all<S: Storage>(user: &User<S>, reader: &mut JournalReader<S>, rng: &mut Rng) {
    for (&position, record) in &user.appended {
        if position < user.drop_asked_before || position > user.confirmed {
            continue;
        }
        let length = record.len() as u64;
        let start = rng.below(length + 1);
        let end = start + rng.below(length - start + 1);
        for range in [0..length, start..end] {
            let at = user.opened.journal.reads(position, range.clone());
            let read = reader.read(&at).expect("it is there");
            let expected = &record[range.start as usize..range.end as usize];
            assert!(read == expected, "bytes {range:?} of record {position}");
        }
    }
}

fn long_history<S: Storage>(user: &mut User<S>) {
    for bytes in [100, 700, 0, 2500, 300, 5, 600, 9000, 80] {
        user.append_and_commit(bytes);
        user.write_watermark().unwrap();
    }
}

#[test]
fn every_record_is_read_back_whole_and_in_pieces_also_after_the_next_opening() {
    for options in [small(), roomy()] {
        let storage = SimStorage::new();
        let mut rng = Rng::new(1);
        let mut user = User::open_with(&storage, options).unwrap();
        let mut reader = user.opened.writer.reader();
        long_history(&mut user);
        reads_all(&user, &mut reader, &mut rng);
        user.append(900);
        user.append(3000);
        user.write().unwrap();
        let storage = storage.kill();
        user.reopen(&storage).unwrap();
        let mut reader = user.opened.writer.reader();
        reads_all(&user, &mut reader, &mut rng);
        long_history(&mut user);
        reads_all(&user, &mut reader, &mut rng);
    }
}

#[test]
fn it_reads_the_disk_of_this_machine_with_the_usual_sizes() {
    let root = tempfile::tempdir().unwrap();
    let storage = DiskStorage::open(root.path()).unwrap();
    let mut options = small();
    options.segment_bytes = 4 << 20;
    options.batch_bytes = 2 << 20;
    let mut user = User::open_with(&storage, options).unwrap();
    let mut reader = user.opened.writer.reader();
    for bytes in [10, 300_000, 3_500_000, 70_000, 1 << 20, 1] {
        user.append(bytes);
        for _ in 0..200 {
            user.append(400);
        }
        user.commit().unwrap();
    }
    reads_all(&user, &mut reader, &mut Rng::new(2));
}

#[test]
fn a_record_that_was_written_after_its_neighbours_were_read_is_found() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    let mut reader = user.opened.writer.reader();
    for _ in 0..20 {
        user.append_and_commit(30);
        reads_all(&user, &mut reader, &mut Rng::new(3));
    }
}

#[test]
#[should_panic(expected = "record 2 is not on disk yet: 1 is the last")]
fn a_record_that_is_not_synced_cannot_be_asked_for() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    user.append_and_commit(30);
    user.append(30);
    user.write().unwrap();
    user.opened.journal.reads(2, 0..30);
}

#[test]
#[should_panic(expected = "record 1 went with a dropped segment")]
fn a_record_that_was_not_carried_forward_cannot_be_asked_for() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    user.append_and_commit(900);
    user.append_and_commit(900);
    user.append_and_commit(900);
    user.drop_oldest();
    user.opened.journal.reads(1, 0..30);
}

#[test]
fn what_is_asked_of_a_segment_that_was_dropped_meanwhile_is_gone() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    let mut reader = user.opened.writer.reader();
    for _ in 0..4 {
        user.append_and_commit(900);
    }
    let at = user.opened.journal.reads(1, 0..900);
    user.drop_oldest();
    user.commit().unwrap();
    assert!(matches!(reader.read(&at), Err(ReadError::Gone)));
    // Its file is another segment now.
    for _ in 0..4 {
        user.append_and_commit(900);
    }
    assert!(matches!(reader.read(&at), Err(ReadError::Gone)));
}

type Happening = Box<dyn FnOnce() + Send>;

/// Disk on which something happens right before or during a read.
#[derive(Clone)]
struct Racing {
    disk: SimStorage,
    meanwhile: Arc<Mutex<Option<Happening>>>,
}

struct RacingFile {
    file: SimFile,
    of: Racing,
}

impl Storage for Racing {
    type File = RacingFile;
    type Lock = SimLock;

    fn location(&self) -> String {
        self.disk.location()
    }
    fn lock(&self) -> io::Result<Option<SimLock>> {
        self.disk.lock()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }
    fn create(&self, name: &str) -> io::Result<RacingFile> {
        let (file, of) = (self.disk.create(name)?, self.clone());
        Ok(RacingFile { file, of })
    }
    fn open(&self, name: &str) -> io::Result<RacingFile> {
        let (file, of) = (self.disk.open(name)?, self.clone());
        Ok(RacingFile { file, of })
    }
    fn rename(&self, source: &str, target: &str) -> io::Result<()> {
        self.disk.rename(source, target)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }
    fn sync_directory(&self) -> io::Result<()> {
        self.disk.sync_directory()
    }
}

impl StoredFile for RacingFile {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let half = buffer.len() / 2;
        let mut read = self.file.read_at(offset, &mut buffer[..half])?;
        let meanwhile = self.of.meanwhile.lock().unwrap().take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        if read == half {
            read += self
                .file
                .read_at(offset + half as u64, &mut buffer[half..])?;
        }
        Ok(read)
    }
    fn write_at(&self, offset: u64, pieces: &[&[u8]]) -> io::Result<()> {
        self.file.write_at(offset, pieces)
    }
    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
}

#[test]
fn a_segment_that_is_written_over_while_it_is_read_is_gone_and_not_mixed() {
    // Reads one after another, so that many new records arrive while the file is open.
    for commits in 0..8 {
        let storage = Racing {
            disk: SimStorage::new(),
            meanwhile: Arc::default(),
        };
        let mut user = User::open(&storage).unwrap();
        let mut reader = user.opened.writer.reader();
        for _ in 0..4 {
            user.append_and_commit(900);
        }
        let at = user.opened.journal.reads(1, 0..900);
        let user = Arc::new(Mutex::new(user));
        let writer = user.clone();
        *storage.meanwhile.lock().unwrap() = Some(Box::new(move || {
            let mut user = writer.lock().unwrap();
            user.drop_oldest();
            for _ in 0..=commits {
                user.append_and_commit(900);
            }
        }));
        assert!(matches!(reader.read(&at), Err(ReadError::Gone)));
        assert!(storage.meanwhile.lock().unwrap().is_none(), "it happened");
    }
}

#[test]
fn every_flipped_bit_is_named_with_its_place_or_does_not_matter() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    for bytes in [100, 300, 0, 900, 300] {
        user.append_and_commit(bytes);
    }
    let whole_reads: Vec<(u64, Range<u64>)> = user
        .appended
        .iter()
        .map(|(position, record)| (*position, 0..record.len() as u64))
        .collect();
    let file = "0000000000000001.segment";
    let whole = storage.contents(file).unwrap();
    let mut seen = [0; 2];
    for bit in 4096 * 8..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        storage.corrupt(file, bytes);
        let mut reader = user.opened.writer.reader();
        for (position, range) in &whole_reads {
            let at = user.opened.journal.reads(*position, range.clone());
            match reader.read(&at) {
                Ok(read) => {
                    assert!(read == user.appended[position], "bit {bit}: wrong bytes");
                    seen[0] += 1;
                }
                Err(ReadError::Damaged { file, offset, .. }) => {
                    assert!(file.ends_with(".segment") && offset <= whole.len() as u64);
                    seen[1] += 1;
                }
                Err(error) => panic!("bit {bit}: {error}"),
            }
        }
    }
    assert!(seen.iter().all(|reads| *reads > 1000), "{seen:?}");
    storage.corrupt(file, whole);
    reads_all(&user, &mut user.opened.writer.reader(), &mut Rng::new(4));
}

#[derive(Clone, Debug)]
enum JournalStep {
    Append(usize),
    Commit,
    Write,
    Watermark,
    DropOldest,
    Reopen,
    PowerCut(u64),
    Read(u64),
}

fn steps() -> impl Strategy<Value = Vec<JournalStep>> {
    let step = prop_oneof![
        4 => (0..1200_usize).prop_map(JournalStep::Append),
        1 => (0..9000_usize).prop_map(JournalStep::Append),
        4 => Just(JournalStep::Commit),
        2 => Just(JournalStep::Write),
        1 => Just(JournalStep::Watermark),
        2 => Just(JournalStep::DropOldest),
        1 => Just(JournalStep::Reopen),
        1 => any::<u64>().prop_map(JournalStep::PowerCut),
        3 => any::<u64>().prop_map(JournalStep::Read),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn whatever_a_journal_went_through_what_counts_can_be_read(steps in steps()) {
        let mut storage = SimStorage::new();
        let mut user = User::open(&storage).unwrap();
        let mut reader = user.opened.writer.reader();
        for step in steps {
            match step {
                JournalStep::Append(bytes) => {
                    user.append(bytes);
                }
                JournalStep::Commit => user.commit().unwrap(),
                JournalStep::Write => user.write().unwrap(),
                JournalStep::Watermark => user.write_watermark().unwrap(),
                JournalStep::DropOldest => user.drop_oldest(),
                JournalStep::Reopen | JournalStep::PowerCut(_) => {
                    storage = match step {
                        JournalStep::PowerCut(seed) => storage.crash(&mut Rng::new(seed)),
                        _ => storage.kill(),
                    };
                    user.reopen(&storage).unwrap();
                    reader = user.opened.writer.reader();
                }
                JournalStep::Read(seed) => reads_all(&user, &mut reader, &mut Rng::new(seed)),
            }
        }
        user.commit().unwrap();
        reads_all(&user, &mut reader, &mut Rng::new(0));
        reads_all(&user, &mut user.opened.writer.reader(), &mut Rng::new(0));
    }
}
