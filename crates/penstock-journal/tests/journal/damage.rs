//! Torn or rotten: damage is harmless, cut off because nothing there was promised, or refused; never ignored.

use penstock_journal::sim::{Rng, SimStorage};
use penstock_journal::{JournalOptions, OpenError, Storage, fsck};

use crate::support::{ReplayedRecords, User, golden, is_long_run, recovered, roomy, small};

const FIRST: &str = "0000000000000001.segment";

/// Segments of a journal, and whether each is the last.
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
enum OpeningOutcome {
    Exact,
    /// The last record, which no watermark proves, was cut off, and the report states it.
    Trimmed,
    Refused,
}

/// Opens a damaged journal and classifies the outcome; panics when a loss is silent.
fn outcome(storage: &SimStorage, appended: &ReplayedRecords) -> OpeningOutcome {
    match recovered(storage) {
        Ok((_, records)) if records == *appended => OpeningOutcome::Exact,
        Ok((report, records)) => {
            assert!(report.torn_batches > 0, "something was lost in silence");
            let all_but_the_last = appended.iter().take(appended.len() - 1);
            assert!(
                records.iter().eq(all_but_the_last),
                "more was lost than was never promised"
            );
            OpeningOutcome::Trimmed
        }
        Err(OpenError::Damaged { .. }) => OpeningOutcome::Refused,
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
            // Reserved bytes of a segment's header are all alike.
            if (100..4092).contains(&(bit / 8)) && bit % 97 != 0 {
                continue;
            }
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let storage = storage.fork();
            storage.corrupt(&file, bytes);
            let outcome = outcome(&storage, &appended);
            assert!(
                outcome != OpeningOutcome::Trimmed || is_last,
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
                    // A power cut may shorten a file by the bytes it grew while in use. That can't be told from damage,
                    // and the earlier records are kept.
                    assert!(records.iter().eq(appended.iter().take(records.len())));
                    assert!(records.len() == appended.len() || is_last);
                }
                Err(OpenError::Damaged { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Makes a segment of 64 KB, full of records of many lengths. The last record is synced, but no watermark proves it.
fn large_golden() -> (SimStorage, ReplayedRecords) {
    let storage = SimStorage::new();
    let options = JournalOptions {
        segment_bytes: 64 << 10,
        opening_bytes: 64 << 10,
        batch_bytes: 8 << 10,
        ..small()
    };
    let mut user = User::open_with(&storage, options).unwrap();
    for round in 0..16 {
        for bytes in [0, 17, 300, 1200, 64] {
            user.append(bytes + round);
        }
        if round % 3 == 0 {
            user.append(5000);
        }
        user.append_and_commit(100);
    }
    assert_eq!(segments(&storage).len(), 1);
    let appended = user.appended.clone();
    (storage.kill(), appended)
}

/// Corrupts the golden segment in many ways, and counts the outcomes. The given number of last batches may lose the
/// proof that they were on disk.
fn outcomes_of(
    unproven: usize,
    ways: impl Iterator<Item = u64>,
    corrupt: impl Fn(&mut Vec<u8>, u64),
) -> [u64; 3] {
    let (golden, appended) = large_golden();
    let whole = golden.contents(FIRST).unwrap();
    let mut seen = [0; 3];
    let mut storage = golden.fork();
    for way in ways {
        let mut bytes = whole.clone();
        corrupt(&mut bytes, way);
        if bytes == whole {
            continue;
        }
        storage.corrupt(FIRST, bytes);
        let calls = storage.calls();
        let outcome = match recovered(&storage) {
            Ok((_, records)) if records == appended => OpeningOutcome::Exact,
            Ok((report, records)) => {
                // Zeros where the last batch began look as if it was never written.
                let is_told = report.torn_batches > 0
                    || storage.contents(FIRST).unwrap().ends_with(&[0; 4096]);
                assert!(is_told, "{way}: lost in silence");
                let kept = appended.iter().take(records.len());
                assert!(records.iter().eq(kept), "{way}: not a beginning");
                let lost = appended.len() - records.len();
                assert!(lost <= 7 * unproven, "{way}: {lost} records are lost");
                OpeningOutcome::Trimmed
            }
            Err(OpenError::Damaged { file, offset, .. }) => {
                assert!(file == FIRST && offset <= 64 << 10, "{way}: no place");
                OpeningOutcome::Refused
            }
            Err(error) => panic!("{way}: {error}"),
        };
        seen[outcome as usize] += 1;
        if storage.calls() > calls {
            storage = golden.fork();
        }
    }
    seen
}

#[test]
fn a_golden_segment_cut_at_any_byte_is_refused_with_the_place() {
    let step = if is_long_run() { 1 } else { 61 };
    let cuts = (0..64 << 10).step_by(step);
    let seen = outcomes_of(0, cuts, |bytes, cut| bytes.truncate(cut as usize));
    assert_eq!(seen, [0, 0, (64_u64 << 10).div_ceil(step as u64)]);
}

#[test]
fn a_golden_segment_that_is_zeros_from_any_byte_on_is_exact_trimmed_or_refused() {
    let step = if is_long_run() { 1 } else { 61 };
    let cuts = (0..64 << 10).step_by(step);
    // A disk that has lost everything from some moment on can't be told from a power cut at that moment.
    let seen = outcomes_of(16, cuts, |bytes, cut| bytes[cut as usize..].fill(0));
    assert!(seen[1] > 500 && seen[2] > 50, "{seen:?}");
}

#[test]
fn random_bits_flipped_in_a_golden_segment_are_harmless_trimmed_or_refused() {
    let (flips, all_bits) = (if is_long_run() { 50_000 } else { 2_000 }, 8 * (64 << 10));
    let mut rng = Rng::new(8211);
    let bits: Vec<u64> = (0..flips).map(|_| rng.below(all_bits)).collect();
    let seen = outcomes_of(1, bits.into_iter(), |bytes, bit| {
        bytes[bit as usize / 8] ^= 1 << (bit % 8);
    });
    assert!(seen[2] > seen[1] && seen[2] > 1_000, "{seen:?}");
}

#[test]
fn several_bits_flipped_at_once_are_harmless_trimmed_or_refused() {
    let flips = if is_long_run() { 20_000 } else { 500 };
    let seen = outcomes_of(3, 0..flips, |bytes, seed| {
        let mut rng = Rng::new(seed);
        for _ in 0..2 + rng.below(6) {
            let bit = rng.below(8 * bytes.len() as u64);
            bytes[bit as usize / 8] ^= 1 << (bit % 8);
        }
    });
    assert!(seen[2] > 250, "{seen:?}");
}

#[test]
fn a_missing_segment_is_refused_even_if_it_is_the_oldest_or_the_newest() {
    let (storage, _) = golden();
    for (file, _) in segments(&storage) {
        let storage = storage.fork();
        storage.remove(&file).unwrap();
        let error = recovered(&storage).unwrap_err().to_string();
        assert!(
            error.contains(&file) && error.contains("missing"),
            "{error}"
        );
    }
}

#[test]
fn damage_below_the_watermark_is_refused_with_the_place_and_what_to_do() {
    let storage = SimStorage::new();
    let mut user = User::open_with(&storage, roomy()).unwrap();
    user.append_and_commit(100);
    user.append_and_commit(100);
    user.write_watermark().unwrap();
    let appended = user.appended.clone();
    let storage = storage.kill();
    // Last record: without the watermark it would pass for torn.
    let mut bytes = storage.contents(FIRST).unwrap();
    let second_batch = 4096 + 64 * 3;
    bytes[second_batch + 70] ^= 1;
    storage.corrupt(FIRST, bytes);

    assert_eq!(outcome(&storage.fork(), &appended), OpeningOutcome::Refused);
    let error = recovered(&storage.fork()).unwrap_err().to_string();
    assert_eq!(
        error,
        "(simulated)/0000000000000001.segment is damaged at byte 4288: the checksum of the batch is \
         wrong, though the batch at byte 8192 was written after it was synced. Work that was \
         confirmed may be in the damaged part, so the journal is not opened. `penstock journal check \
         (simulated)` shows what can still be read, and `penstock journal repair` keeps that and lists what is \
         gone; or restore the directory from a backup, or move it away to start empty"
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
    assert_eq!(outcome(&storage, &appended), OpeningOutcome::Refused);
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
