//! Opens journals: on any disk, by one process, in a known format.

use penstock_journal::sim::SimStorage;
use penstock_journal::{DiskStorage, FORMAT_VERSION, NotReplayed, OpenError, fsck};

use crate::support::{User, golden, open, recovered, small};

#[test]
fn what_was_appended_comes_back_in_order_at_its_positions() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    assert!(user.opened.report.created);
    assert_eq!((user.opened.epoch, user.opened.next_position), (1, 1));
    for bytes in [0, 1, 300, 5_000, 20_000, 7] {
        user.append(bytes);
    }
    user.commit().unwrap();
    let appended = user.appended.clone();
    drop(user);

    let (opened, records) = open(&storage, small()).unwrap();
    assert_eq!(records, appended);
    assert_eq!((opened.epoch, opened.next_position), (2, 7));
    assert_eq!(opened.report.records, 6);
    assert_eq!(opened.report.torn_batches, 0);
}

#[test]
fn it_works_on_the_disk_of_this_machine_in_a_directory_that_it_makes() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("deep/journal");
    for round in 0..3 {
        let storage = DiskStorage::open(&path).unwrap();
        let mut user = User::open(&storage).unwrap();
        assert_eq!(user.opened.report.records, round * 20);
        for _ in 0..20 {
            user.append_and_commit(200);
        }
        user.write_watermark().unwrap();
    }
    let report = fsck(&DiskStorage::open_existing(&path).unwrap()).unwrap();
    assert_eq!(report.opening.unwrap().records, 60);
    assert_eq!(
        report
            .segments
            .iter()
            .map(|segment| segment.records)
            .sum::<u64>(),
        60
    );
    assert!(
        report
            .segments
            .iter()
            .all(|segment| segment.damage.is_empty())
    );
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

#[test]
fn a_newer_format_or_an_unknown_feature_is_refused_by_name() {
    let (storage, _) = golden();
    let name = "0000000000000001.segment";
    let page = storage.contents(name).unwrap();
    let written_by = |change: &dyn Fn(&mut Vec<u8>)| {
        let storage = storage.fork();
        let mut page = page.clone();
        change(&mut page);
        // Written as by a newer program, with the checksum at its fixed offset.
        let checksum = crc32c::crc32c(&page[..4092]);
        page[4092..4096].copy_from_slice(&checksum.to_le_bytes());
        storage.corrupt(name, page);
        recovered(&storage).map(|_| ()).unwrap_err()
    };

    let newer = written_by(&|page| page[12] = FORMAT_VERSION as u8 + 1);
    assert!(
        matches!(newer, OpenError::NewerFormat { needed: 3, .. }),
        "{newer}"
    );
    let feature = written_by(&|page| page[16] = 4);
    assert!(
        matches!(feature, OpenError::UnknownFeatures { unknown: 4, .. }),
        "{feature}"
    );
}

#[test]
fn a_newer_format_that_this_program_can_read_is_read_but_never_written_to() {
    let (storage, _) = golden();
    let name = "0000000000000004.segment";
    let mut page = storage.contents(name).unwrap();
    page[8] = FORMAT_VERSION as u8 + 1;
    let checksum = crc32c::crc32c(&page[..4092]);
    page[4092..4096].copy_from_slice(&checksum.to_le_bytes());
    storage.corrupt(name, page);
    let calls = storage.calls();
    let refused = recovered(&storage).unwrap_err();
    assert!(
        matches!(refused, OpenError::NewerFormat { written: 3, .. }),
        "{refused}"
    );
    assert_eq!(fsck(&storage).unwrap().opening.unwrap().records, 8);
    assert_eq!(storage.calls(), calls);
}

#[test]
fn a_record_that_cannot_be_replayed_stops_the_opening_and_changes_nothing() {
    let (storage, appended) = golden();
    let calls = storage.calls();
    let refused = penstock_journal::Journal::open(storage.clone(), small(), &mut |record| {
        if record.position == 3 {
            Err(NotReplayed::Wrong("no such queue".to_string()))
        } else {
            Ok(())
        }
    });
    let error = refused.map(|_| ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "record 3 can't be replayed: no such queue"
    );
    assert_eq!(storage.calls(), calls);
    assert_eq!(recovered(&storage).unwrap().1, appended);
}
