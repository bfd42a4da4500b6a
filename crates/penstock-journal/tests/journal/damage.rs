//! Torn or rotten: what is damaged is harmless, or cut off because nobody was promised it, or
//! refused; never passed over in silence.

use penstock_journal::sim::SimStorage;
use penstock_journal::{OpenError, Storage, fsck};

use crate::support::{Records, User, golden, recovered};

const FIRST: &str = "0000000000000001.segment";

/// The segments of a journal, and whether each is the last.
fn segments(storage: &SimStorage) -> Vec<(String, bool)> {
    let mut names = storage.list().unwrap();
    names.retain(|name| name.ends_with(".segment"));
    let last = names.last().unwrap().clone();
    names
        .into_iter()
        .map(|name| (name.clone(), name == last))
        .collect()
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Exact,
    /// The last record, which no watermark proves, was cut off, and the report says so.
    Trimmed,
    Refused,
}

/// What opening makes of a damaged journal; panics when something passes in silence.
fn outcome(storage: &SimStorage, appended: &Records) -> Outcome {
    match recovered(storage) {
        Ok((_, records)) if records == *appended => Outcome::Exact,
        Ok((report, records)) => {
            assert!(report.torn_batches > 0, "something was lost in silence");
            let all_but_the_last = appended.iter().take(appended.len() - 1);
            assert!(
                records.iter().eq(all_but_the_last),
                "more was lost than was never promised"
            );
            Outcome::Trimmed
        }
        Err(OpenError::Damaged { .. }) => Outcome::Refused,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn every_flipped_bit_is_harmless_cut_off_or_refused() {
    let (storage, appended) = golden();
    let mut seen = [0; 3];
    for (file, is_last) in segments(&storage) {
        let whole = storage.contents(&file).unwrap();
        for bit in 0..whole.len() * 8 {
            // The reserved bytes of a segment's header are all alike.
            if (100..4092).contains(&(bit / 8)) && bit % 97 != 0 {
                continue;
            }
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let storage = storage.fork();
            storage.corrupt(&file, bytes);
            let outcome = outcome(&storage, &appended);
            assert!(
                outcome != Outcome::Trimmed || is_last,
                "bit {bit} of {file}: a segment with a successor was trimmed"
            );
            seen[outcome as usize] += 1;
        }
    }
    assert!(seen.iter().all(|outcomes| *outcomes > 100), "{seen:?}");
}

#[test]
fn a_file_cut_at_any_byte_keeps_a_beginning_or_is_refused() {
    let (storage, appended) = golden();
    for (file, is_last) in segments(&storage) {
        let whole = storage.contents(&file).unwrap();
        for length in 0..whole.len() {
            let storage = storage.fork();
            storage.corrupt(&file, whole[..length].to_vec());
            match recovered(&storage) {
                Ok((_, records)) => {
                    // By what a file grew while it was in use, a power cut may shorten it; so that
                    // can't be told from damage, and the records before it are kept.
                    assert!(records.iter().eq(appended.iter().take(records.len())));
                    assert!(records.len() == appended.len() || is_last);
                }
                Err(OpenError::Damaged { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn a_missing_segment_is_refused_even_if_it_is_the_oldest() {
    let (storage, _) = golden();
    for (file, is_last) in segments(&storage) {
        let storage = storage.fork();
        storage.remove(&file).unwrap();
        // The last one is named by nothing but itself.
        if !is_last {
            let error = recovered(&storage).unwrap_err().to_string();
            assert!(
                error.contains(&file) && error.contains("missing"),
                "{error}"
            );
        }
    }
}

#[test]
fn damage_below_the_watermark_is_refused_with_the_place_and_what_to_do() {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    user.append_and_commit(100);
    user.append_and_commit(100);
    user.write_watermark().unwrap();
    let appended = user.appended.clone();
    let storage = storage.kill();
    // The last record: without the watermark it would pass for torn.
    let mut bytes = storage.contents(FIRST).unwrap();
    let second_batch = 4096 + 64 * 3;
    bytes[second_batch + 70] ^= 1;
    storage.corrupt(FIRST, bytes);

    assert_eq!(outcome(&storage.fork(), &appended), Outcome::Refused);
    let error = recovered(&storage.fork()).unwrap_err().to_string();
    assert_eq!(
        error,
        "(simulated)/0000000000000001.segment is damaged at byte 4288: the checksum of the batch is \
         wrong, though the batch at byte 4480 was written after it was synced. Work that was \
         confirmed may be in the damaged part, so the journal is not opened. `penstock fsck \
         (simulated)` shows what can still be read; restore the directory from a backup, or move it \
         away to start empty"
    );

    let calls = storage.calls();
    let report = fsck(&storage).unwrap();
    assert_eq!(report.opening.unwrap_err().to_string(), error);
    assert_eq!(report.segments[0].damage[0].offset, 4288);
    assert_eq!(
        report.segments[0].records, 1,
        "what is behind the damage is read, too"
    );
    assert_eq!(storage.calls(), calls, "looking changed something");
}

#[test]
fn damage_to_what_an_opening_wrote_again_is_refused() {
    let (storage, appended) = golden();
    recovered(&storage).unwrap();
    let storage = storage.kill();
    let (last, _) = segments(&storage).pop().unwrap();
    let mut bytes = storage.contents(&last).unwrap();
    bytes[4096 + 70] ^= 1;
    storage.corrupt(&last, bytes);
    assert_eq!(outcome(&storage, &appended), Outcome::Refused);
}

#[test]
fn a_segment_of_another_journal_is_refused() {
    let (storage, _) = golden();
    let other = SimStorage::new();
    let mut options = crate::support::small();
    options.journal_id = [8; 16];
    crate::support::open(&other, options).unwrap();
    let mut stranger = other.contents(FIRST).unwrap();
    stranger.resize(storage.contents(FIRST).unwrap().len(), 0);
    storage.corrupt(FIRST, stranger);
    assert!(matches!(
        recovered(&storage),
        Err(OpenError::Damaged { .. })
    ));
}
