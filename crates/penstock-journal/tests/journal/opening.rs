//! What a journal promises to whoever opens it.

use crate::support::{append, commit, open, record, small, write_watermark};
use penstock_journal::sim::SimStorage;
use penstock_journal::{DiskStorage, OpenError, fsck};

#[test]
fn what_was_appended_comes_back_in_order_at_its_positions() {
    let storage = SimStorage::new();
    let (mut opened, records) = open(&storage, small()).unwrap();
    assert!(opened.report.created && records.is_empty());
    assert_eq!((opened.epoch, opened.next_position), (1, 1));
    for bytes in [0, 1, 300, 5_000, 20_000, 7] {
        append(&mut opened, bytes);
    }
    commit(&mut opened).unwrap();
    drop(opened);

    let (opened, records) = open(&storage, small()).unwrap();
    let expected: Vec<_> = (1..).zip([0, 1, 300, 5_000, 20_000, 7]).collect();
    let expected: Vec<_> = expected
        .into_iter()
        .map(|(at, bytes)| (at, record(at, bytes)))
        .collect();
    assert_eq!(records, expected);
    assert_eq!((opened.epoch, opened.next_position), (2, 7));
    assert_eq!(opened.report.records, 6);
}

#[test]
fn it_works_on_the_disk_of_this_machine_in_a_directory_that_it_makes() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("deep/journal");
    for round in 0..3 {
        let storage = DiskStorage::open(&path).unwrap();
        let (mut opened, records) = open(&storage, small()).unwrap();
        assert_eq!(records.len(), round * 40);
        assert!(records.iter().all(|(at, bytes)| *bytes == record(*at, 500)));
        for _ in 0..40 {
            append(&mut opened, 500);
            commit(&mut opened).unwrap();
        }
        write_watermark(&mut opened).unwrap();
    }
    let report = fsck(&DiskStorage::open_existing(&path).unwrap()).unwrap();
    assert_eq!(report.opening.unwrap().records, 120);
}

#[test]
fn a_directory_in_use_by_another_process_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let first = open(&DiskStorage::open(root.path()).unwrap(), small()).unwrap();
    let second = open(&DiskStorage::open(root.path()).unwrap(), small());
    assert!(matches!(second, Err(OpenError::Locked { .. })));
    let looking = fsck(&DiskStorage::open(root.path()).unwrap());
    assert!(matches!(looking, Err(OpenError::Locked { .. })));
    drop(first);
    open(&DiskStorage::open(root.path()).unwrap(), small()).unwrap();
}
