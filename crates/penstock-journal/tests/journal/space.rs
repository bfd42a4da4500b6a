//! Segments: how they follow each other, are dropped, and reused.

use penstock_journal::sim::SimStorage;
use penstock_journal::{JournalOptions, Storage, fsck};

use crate::support::{User, recovered, small};

fn files(storage: &SimStorage, suffix: &str) -> Vec<String> {
    storage
        .list()
        .unwrap()
        .into_iter()
        .filter(|name| name.ends_with(suffix))
        .collect()
}

#[test]
fn a_journal_as_large_as_it_gets_is_taken_over_and_goes_on() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    for bytes in 0..400 {
        user.append_and_commit(bytes);
    }
    // Stops inside a batch that was written but not synced.
    user.append(900);
    user.write().unwrap();
    let appended = user.appended.clone();
    let storage = storage.kill();
    let mut next = User::open(&storage).unwrap();
    assert_eq!(next.appended, appended);
    assert!(files(&storage, ".segment").len() > 30);
    next.append_and_commit(900);
    let appended = next.appended.clone();
    assert_eq!(recovered(&storage.kill()).unwrap().1, appended);
}

#[test]
fn dropped_segments_are_gone_and_their_files_are_written_again() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    for round in 0..50 {
        user.append_and_commit(600);
        user.append_and_commit(1900);
        if round >= 3 {
            while user.opened.journal.reclaim_due(0) {
                user.drop_oldest();
                user.commit().unwrap();
            }
        }
    }
    let total = user.opened.journal.total_bytes();
    assert!(total <= 2 * small().segment_bytes, "{total} bytes");
    assert!(files(&storage, ".segment").len() <= 2);
    assert!(files(&storage, ".spare").len() <= small().spares);
    let (_, records) = recovered(&storage.kill()).unwrap();
    user.expects(&records);
    assert!(
        *records.first_key_value().unwrap().0 > 90,
        "old records are gone"
    );
}

#[test]
fn reclaiming_what_is_all_live_ends_after_one_pass() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    for _ in 0..40 {
        user.append_and_commit(900);
    }
    // All of it is live, but the core reports next to nothing.
    let live = 40;
    let mut passes = 0;
    while user.opened.journal.reclaim_due(10) {
        let (_, after) = user.opened.journal.oldest_segment().unwrap();
        for _ in 0..live / 10 {
            user.append(900);
        }
        assert!(after > 0);
        user.drop_oldest();
        user.commit().unwrap();
        passes += 1;
        assert!(passes < 100, "it would go on forever");
    }
    assert!(passes > 10);
    user.append_and_commit(900);
    assert!(!user.opened.journal.reclaim_due(10), "it rests");
    let total = user.opened.journal.total_bytes();
    for _ in 0..total / 4 / 900 {
        user.append_and_commit(900);
    }
    assert!(user.opened.journal.reclaim_due(10), "until enough is new");
}

/// Drops the oldest segments as long as that is due.
fn reclaim(user: &mut User<SimStorage>, live_bytes: u64) {
    while user.opened.journal.reclaim_due(live_bytes) {
        user.drop_oldest();
        user.append_and_commit(10);
    }
}

#[test]
fn what_goes_little_by_little_while_nothing_is_new_is_reclaimed_all_the_same() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    for _ in 0..100 {
        user.append_and_commit(900);
    }
    let mut live_bytes = user.opened.journal.total_bytes();
    while live_bytes > 10_000 {
        reclaim(&mut user, live_bytes);
        let total = user.opened.journal.total_bytes();
        let allowed = 2 * live_bytes + 2 * small().segment_bytes;
        assert!(total <= allowed + allowed / 4, "{total} of {allowed} bytes");
        // Never half of it at a time.
        live_bytes -= live_bytes / 16;
    }
}

#[test]
fn what_was_carried_forward_and_goes_before_the_pass_is_over_is_reclaimed() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    for _ in 0..100 {
        user.append_and_commit(900);
    }
    // Everything is carried forward although only a third is reported live; then the last segment is dropped.
    let live_bytes = user.opened.journal.total_bytes() / 3;
    let through = user.opened.next_position;
    while user.opened.journal.reclaim_due(live_bytes) {
        let (_, after) = user.opened.journal.oldest_segment().unwrap();
        user.append(900);
        user.append(900);
        user.drop_oldest();
        user.commit().unwrap();
        if after >= through {
            break;
        }
    }
    reclaim(&mut user, 100);
    let total = user.opened.journal.total_bytes();
    assert!(total <= 5 * small().segment_bytes, "{total} bytes");
}

#[test]
fn on_a_small_disk_less_that_is_dead_stays() {
    for dead_bytes in [4 * small().segment_bytes, u64::MAX] {
        let storage = SimStorage::new();
        let options = JournalOptions {
            dead_bytes,
            ..small()
        };
        let mut user = User::open_with(&storage, options).unwrap();
        for _ in 0..150 {
            user.append_and_commit(900);
        }
        let live_bytes = user.opened.journal.total_bytes() * 6 / 10;
        let is_due = user.opened.journal.reclaim_due(live_bytes);
        assert_eq!(is_due, dead_bytes < u64::MAX);
        reclaim(&mut user, live_bytes);
        let dead = user.opened.journal.total_bytes().saturating_sub(live_bytes);
        let most = dead_bytes.saturating_add(2 * small().segment_bytes);
        assert!(dead <= most, "{dead} bytes of {live_bytes}");
    }
}

#[test]
fn a_long_record_whose_beginning_was_dropped_is_not_half_shown() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    user.append_and_commit(900);
    let long = user.append(5000);
    user.append_and_commit(100);
    let (_, after) = user.opened.journal.oldest_segment().unwrap();
    assert_eq!(
        after,
        long + 1,
        "it begins in the first segment, so it goes with it"
    );
    user.drop_oldest();
    user.commit().unwrap();
    let (_, records) = recovered(&storage.kill()).unwrap();
    user.expects(&records);
    assert_eq!(records.into_keys().collect::<Vec<_>>(), [long + 1]);
}

#[test]
fn a_long_record_that_was_never_finished_may_lose_its_beginning_to_a_drop() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    user.append_and_commit(900);
    user.append(5000);
    // The process dies with the record half written, far enough to reach the second segment ...
    for _ in 0..4 {
        let batch = user.opened.journal.take_batch().unwrap();
        user.write_batch(&batch).unwrap();
    }
    user.opened.writer.sync().unwrap();
    let storage = storage.kill();
    // ... and the next one drops the first segment, then dies as well.
    let mut user = User::open(&storage).unwrap();
    user.append_and_commit(10);
    user.drop_oldest();
    user.commit().unwrap();
    let (_, records) = recovered(&storage.kill()).unwrap();
    assert_eq!(records, user.appended.split_off(&2));
}

#[test]
fn a_new_journal_costs_little_disk_and_its_segments_grow_with_it() {
    let storage = SimStorage::new();
    let options = JournalOptions {
        journal_id: [7; 16],
        ..JournalOptions::default()
    };
    let mut user = User::open_with(&storage, options).unwrap();
    let newest = 2 * 4096;
    assert_eq!(storage.used_bytes(), (1 << 20) + newest);
    user.append_and_commit(10_000);
    assert_eq!(
        storage.used_bytes(),
        (1 << 20) + newest,
        "it is hardly used"
    );
    user.append_and_commit(100_000);
    assert_eq!(
        storage.used_bytes(),
        (9 << 20) + newest,
        "there are reserves"
    );
    let mut seen = Vec::new();
    while seen.last() != Some(&(16 << 20)) {
        user.append_and_commit(900_000);
        let (newest, _) = files(&storage, ".segment")
            .pop()
            .map(|name| {
                let bytes = storage.contents(&name).unwrap().len();
                (bytes, name)
            })
            .unwrap();
        if seen.last() != Some(&newest) {
            seen.push(newest);
        }
    }
    assert_eq!(seen, [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20]);
    assert_eq!(files(&storage, ".spare").len(), 4);
}

#[test]
fn a_watermark_is_written_once_and_only_when_all_is_synced() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    assert!(
        user.opened.journal.watermark_batch().is_none(),
        "there is nothing to prove"
    );
    user.append(10);
    assert!(
        user.opened.journal.watermark_batch().is_none(),
        "a record waits"
    );
    user.write().unwrap();
    assert!(
        user.opened.journal.watermark_batch().is_none(),
        "a record is not synced"
    );
    user.commit().unwrap();
    user.write_watermark().unwrap();
    assert!(
        user.opened.journal.watermark_batch().is_none(),
        "it is proven"
    );
    let report = fsck(&storage.kill()).unwrap();
    assert_eq!(report.opening.unwrap().rewritten_records, 0);
}
