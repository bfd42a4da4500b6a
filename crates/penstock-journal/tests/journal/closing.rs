//! Journals that were closed cleanly: no loss is silent, whichever page goes bad or file disappears.

use penstock_journal::sim::SimStorage;
use penstock_journal::{JournalOptions, OpenError, RecoveryReport, Storage, fsck};

use crate::support::{ReplayedRecords, User, open, roomy, small};

const PAGE: usize = 4096;

/// Makes a journal with some history that one process used for a while and then closed in order; returns it with its
/// records.
fn closed(options: &JournalOptions, last: &[usize]) -> (SimStorage, ReplayedRecords) {
    let (storage, user) = used(options, last, true);
    (storage.kill(), user.appended)
}

fn used(options: &JournalOptions, last: &[usize], closes: bool) -> (SimStorage, User<SimStorage>) {
    let storage = SimStorage::new();
    let mut user = User::open_with(&storage, options.clone()).unwrap();
    for bytes in [100, 700, 2500, 300, 900, 900, 900, 900] {
        user.append_and_commit(bytes);
    }
    // Leaves ghosts in the spares.
    for _ in 0..2 {
        user.drop_oldest();
        user.append_and_commit(80);
    }
    user.appended = user.appended.split_off(&user.dropped_before);
    let storage = storage.kill();
    user.reopen(&storage).unwrap();
    for bytes in last {
        user.append_and_commit(*bytes);
    }
    if closes {
        user.close().unwrap();
    }
    (storage, user)
}

fn files(storage: &SimStorage, kind: &str) -> Vec<String> {
    let mut names = storage.list().unwrap();
    names.retain(|name| name.ends_with(kind));
    names
}

/// Opens the journal; `None`: it is refused as damaged, and `fsck` finds the same damage.
fn outcome(
    storage: &SimStorage,
    options: &JournalOptions,
) -> Option<(RecoveryReport, ReplayedRecords)> {
    let looked = fsck(storage).unwrap().opening;
    match open(storage, options.clone()) {
        Ok((opened, records)) => {
            assert!(looked.is_ok());
            Some((opened.report, records))
        }
        Err(error @ OpenError::Damaged { .. }) => {
            assert_eq!(looked.unwrap_err().to_string(), error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Numbers of records that the last process wrote: many, few, none.
const LAST: [&[usize]; 4] = [&[100, 200, 300], &[2000, 1900, 50], &[10], &[]];

#[test]
fn any_page_of_a_journal_that_was_closed_in_order_may_go_bad_and_nothing_is_lost_in_silence() {
    for options in [small(), roomy()] {
        for last in LAST {
            let (storage, appended) = closed(&options, last);
            let (mut exact, mut refused) = (0, 0);
            for file in files(&storage, "").iter() {
                let whole = storage.contents(file).unwrap();
                for at in (0..whole.len()).step_by(PAGE) {
                    let storage = storage.fork();
                    let mut bytes = whole.clone();
                    bytes[at..whole.len().min(at + PAGE)].fill(0);
                    storage.corrupt(file, bytes);
                    match outcome(&storage, &options) {
                        Some((_, records)) => {
                            assert!(records == appended, "page {at} of {file} was lost");
                            exact += 1;
                        }
                        None => refused += 1,
                    }
                }
            }
            // Spares, bytes after the last batch, and one of the two slots of the mark.
            assert!(
                exact >= 2 && refused >= 2,
                "{exact} exact, {refused} refused"
            );
        }
    }
}

#[test]
fn all_that_is_zeros_from_any_place_on_is_missed() {
    for options in [small(), roomy()] {
        for last in LAST {
            let (storage, appended) = closed(&options, last);
            let newest = files(&storage, ".segment").pop().unwrap();
            let whole = storage.contents(&newest).unwrap();
            let used = whole.iter().rposition(|byte| *byte != 0).unwrap();
            for from in (0..whole.len()).step_by(16) {
                let storage = storage.fork();
                let mut bytes = whole.clone();
                bytes[from..].fill(0);
                storage.corrupt(&newest, bytes);
                match outcome(&storage, &options) {
                    Some((_, records)) => assert!(records == appended && from > used.min(4096)),
                    None => assert!(from <= used, "nothing is gone from {from} on"),
                }
            }
        }
    }
}

#[test]
fn the_newest_segments_are_missed_whether_it_was_closed_or_not() {
    for options in [small(), roomy()] {
        for closes in [true, false] {
            let (storage, _) = used(&options, &[900, 900, 900, 2500], closes);
            let storage = storage.kill();
            let segments = files(&storage, ".segment");
            for missing in 1..=segments.len() {
                let storage = storage.fork();
                for segment in &segments[segments.len() - missing..] {
                    storage.remove(segment).unwrap();
                }
                let calls = storage.calls();
                let error = open(&storage, options.clone()).map(|_| ()).unwrap_err();
                let newest = segments.last().unwrap();
                let text = error.to_string();
                assert!(
                    text.contains(&format!(
                        "{newest} is damaged at byte 0: the file is missing"
                    )),
                    "{text}"
                );
                let looked = fsck(&storage).unwrap().opening.unwrap_err();
                assert_eq!(looked.to_string(), text);
                assert_eq!(storage.calls(), calls, "something was changed");
            }
        }
    }
}

/// Checks the mark: it is written last, and is useless without the rest.
#[test]
fn without_the_mark_a_journal_is_refused_and_with_half_of_it_it_is_as_after_a_crash() {
    let (storage, appended) = closed(&roomy(), &[100, 200]);
    assert!(outcome(&storage.fork(), &roomy()).unwrap().0.was_closed);
    let whole = storage.contents("newest").unwrap();
    for slot in [0, PAGE] {
        let storage = storage.fork();
        let mut bytes = whole.clone();
        bytes[slot + 30] ^= 1;
        storage.corrupt("newest", bytes);
        assert_eq!(outcome(&storage, &roomy()).unwrap().1, appended);
    }
    let rotten = storage.fork();
    let mut bytes = whole;
    (bytes[30], bytes[PAGE + 30]) = (1, 1);
    rotten.corrupt("newest", bytes);
    assert_eq!(outcome(&rotten, &roomy()), None);
    storage.remove("newest").unwrap();
    assert_eq!(outcome(&storage, &roomy()), None);
}

#[test]
fn a_write_after_a_close_takes_the_mark_away_first() {
    let storage = SimStorage::new();
    let mut user = User::open_with(&storage, roomy()).unwrap();
    user.append_and_commit(100);
    user.close().unwrap();
    user.append(200);
    user.write().unwrap();
    // It was not synced, so it may be lost.
    let mut seen = [false; 2];
    for seed in 0..20 {
        let after = storage
            .fork()
            .crash(&mut penstock_journal::sim::Rng::new(seed));
        let (report, records) = outcome(&after, &roomy()).expect("nothing is damaged");
        assert!(!report.was_closed);
        user.expects(&records);
        seen[records.len() - 1] = true;
    }
    assert_eq!(seen, [true; 2]);
    user.close().unwrap();
    let (report, records) = outcome(&storage.kill(), &roomy()).unwrap();
    assert!(report.was_closed);
    assert_eq!(records, user.appended);
}

/// Checks that the proof of a quiet journal's last batch is not lost together with the batch.
#[test]
fn a_bad_page_of_an_idle_journal_takes_no_batch_and_its_proof() {
    for records in 1..12 {
        let storage = SimStorage::new();
        let mut user = User::open_with(&storage, roomy()).unwrap();
        for _ in 0..records {
            user.append_and_commit(300);
        }
        user.write_watermark().unwrap();
        let appended = user.appended.clone();
        let storage = storage.kill();
        let first = "0000000000000001.segment";
        let whole = storage.contents(first).unwrap();
        for at in (0..whole.len()).step_by(PAGE) {
            let storage = storage.fork();
            let mut bytes = whole.clone();
            bytes[at..at + PAGE].fill(0);
            storage.corrupt(first, bytes);
            if let Some((_, records)) = outcome(&storage, &roomy()) {
                assert!(records == appended, "page {at}: lost in silence");
            }
        }
    }
}
