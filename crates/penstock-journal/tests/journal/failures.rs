//! Failing disks: nothing is confirmed after the first error, and the next process finds everything confirmed before.

use penstock_journal::sim::{Fault, Rng, SimStorage};
use penstock_journal::{OpenError, Storage, StoredFile, WriteError};

use crate::support::{User, recovered, small};

/// Works like a broker until its disk fails; returns whether it did.
fn work(user: &mut User<SimStorage>) -> Result<(), WriteError> {
    for bytes in [100, 700, 2600, 20, 900, 2600, 300] {
        user.append(bytes);
        user.commit()?;
        user.write_watermark()?;
        if bytes == 20 {
            user.drop_oldest();
        }
    }
    Ok(())
}

#[test]
fn an_error_at_any_call_is_final_and_costs_nothing_that_was_confirmed() {
    for fault in [Fault::Error, Fault::DiskFull] {
        for call in 0.. {
            let storage = SimStorage::new();
            storage.seed_faults(Rng::new(call));
            let mut user = User::open(&storage).unwrap();
            storage.fail_at(storage.calls() + call, fault);
            let mut result = work(&mut user);
            if matches!(result, Err(WriteError::DiskFull { .. })) {
                // Nothing is lost, and the work continues.
                result = user.commit();
            }
            if let Err(error) = &result {
                assert!(matches!(error, WriteError::Io { .. }), "{error}");
                // The disk has recovered; the writer must not pretend that nothing happened.
                user.append(10);
                let again = user.commit().unwrap_err();
                assert!(matches!(again, WriteError::AlreadyFailed(_)), "{again}");
                let again = user.opened.writer.sync().unwrap_err();
                assert!(matches!(again, WriteError::AlreadyFailed(_)), "{again}");
            }
            // When a process is killed the page cache stays; what it shows must remain true.
            let mut rng = Rng::new(call ^ 99);
            let storage = storage.kill();
            let (_, records) = recovered(&storage).expect("nothing is damaged");
            user.expects(&records);
            let (_, again) = recovered(&storage.crash(&mut rng)).expect("nothing is damaged");
            assert_eq!(
                again, records,
                "what was shown after a failed call was not on disk"
            );
            if result.is_ok() && call > 20 {
                break;
            }
        }
    }
}

#[test]
fn a_name_that_was_never_synced_is_synced_before_anything_counts_on_it() {
    let calls_of_a_roll = 8;
    for call in 0..calls_of_a_roll {
        let storage = SimStorage::new();
        let mut user = User::open(&storage).unwrap();
        // Two of these fill a segment.
        user.append_and_commit(940);
        user.append_and_commit(940);
        storage.fail_at(storage.calls() + call, Fault::Error);
        user.append(940);
        let _failed = user.commit();
        let storage = storage.kill();
        // The next process sees the name, and loses power at any moment of its opening.
        for cut in 0..12 {
            for seed in 0..8 {
                let mut rng = Rng::new(seed);
                let storage = storage.fork();
                storage.fail_at(storage.calls() + cut, Fault::PowerOff);
                let _cut = recovered(&storage);
                let (_, records) = recovered(&storage.crash(&mut rng)).expect("nothing is missing");
                user.expects(&records);
            }
        }
    }
}

#[test]
fn an_error_while_opening_leaves_the_journal_as_it_was() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    work(&mut user).unwrap();
    let found = storage.kill();
    for call in 0.. {
        let storage = found.fork();
        storage.fail_at(storage.calls() + call, Fault::Error);
        match recovered(&storage) {
            Err(OpenError::Io { .. }) => {}
            Err(error) => panic!("{error}"),
            Ok(_) => return,
        }
        let (_, records) = recovered(&storage.kill()).expect("nothing is damaged");
        user.expects(&records);
    }
}

#[test]
fn a_writer_that_failed_says_once_what_failed() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    user.append_and_commit(100);
    storage.fail_at(storage.calls() + 1, Fault::Error);
    user.append(100);
    assert_eq!(
        user.commit().unwrap_err().to_string(),
        "could not sync 0000000000000001.segment: the disk failed; unconfirmed records may be lost"
    );
    assert_eq!(
        user.commit().unwrap_err().to_string(),
        "the journal accepts nothing since it could not sync 0000000000000001.segment: the disk failed"
    );
}

/// Checks a spare whose sync failed in an earlier process. It looks whole to the next one: its pages count as clean,
/// though its length was never on disk, and the sync of the segment that it became wrote none of them. After a power
/// cut the file was shorter than its header said, and the journal was refused.
#[test]
fn a_spare_whose_sync_failed_in_an_earlier_process_is_filled_again() {
    for seed in 0..64 {
        let storage = SimStorage::new();
        let mut user = User::open(&storage).unwrap();
        user.append_and_commit(100);
        storage.seed_faults(Rng::new(seed));
        let spare = storage.create("fresh-1.spare").unwrap();
        spare
            .write_at(0, &[&vec![0; small().segment_bytes as usize]])
            .unwrap();
        storage.fail_at(storage.calls(), Fault::Error);
        spare.sync().unwrap_err();
        let storage = storage.kill();
        user.reopen(&storage).unwrap();
        // Two of these fill a segment.
        for _ in 0..4 {
            user.append_and_commit(940);
        }
        let mut rng = Rng::new(seed);
        let (_, records) = recovered(&storage.crash(&mut rng)).expect("nothing was cut");
        user.expects(&records);
    }
}
