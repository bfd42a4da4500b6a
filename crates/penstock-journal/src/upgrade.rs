//! Upgrades a journal to the newest format.
//!
//! *Only one format is written.* A journal of an earlier format is upgraded before anything else: on its owner's
//! command, or automatically where nobody else could. A record has the format of its segment. So records that must be
//! rewritten are first rewritten in the old format, and then the segment of the new format begins.

use crate::format::{FORMAT_VERSION, segment_name};
use crate::journal::JournalOptions;
use crate::open::start;
use crate::open_error::OpenError;
use crate::recovery::{Found, RecoveryReport, recover};
use crate::scan::read_header;
use crate::storage::Storage;

/// Command to upgrade a journal: this and the directory.
pub const UPGRADE_COMMAND: &str = "penstock journal upgrade";

/// Outcome of `penstock journal upgrade`: the formats before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upgraded {
    pub from: u32,
    pub to: u32,
    /// Number of writes that a crash interrupted; none was confirmed. They were cut off.
    pub torn_batches: u64,
}

/// Upgrades to the newest format that this program knows. Older programs refuse the journal from then on. A journal
/// that already has that format is not touched.
pub fn upgrade<S: Storage>(storage: S, options: JournalOptions) -> Result<Upgraded, OpenError> {
    let location = storage.location();
    let lock = storage.lock().map_err(OpenError::io("lock", &location))?;
    let lock = lock.ok_or(OpenError::Locked { location })?;
    let to = FORMAT_VERSION;
    let Some(from) = older_format(&storage)? else {
        return Ok(Upgraded {
            from: to,
            to,
            torn_batches: 0,
        });
    };
    let (found, _lock) = begin_format(&storage, lock, &options, to)?;
    Ok(Upgraded {
        from,
        to,
        torn_batches: found.torn_batches,
    })
}

/// Returns the journal's format if it must be upgraded before this program writes to it. A program that can read a
/// newer format must not write to it either.
pub(crate) fn older_format<S: Storage>(storage: &S) -> Result<Option<u32>, OpenError> {
    let Some(last) = Found::list(storage)?.segments.last().copied() else {
        return Ok(None);
    };
    match read_header(storage, last)?.format_version {
        FORMAT_VERSION => Ok(None),
        older if older < FORMAT_VERSION => Ok(Some(older)),
        newer => Err(OpenError::NewerFormat {
            file: segment_name(last),
            written: newer,
            needed: newer,
            known: FORMAT_VERSION,
        }),
    }
}

/// Begins a segment in this format, by an opening that stops at once. The segment is empty, so no older record is in a
/// segment of the new format. Returns the findings of the opening.
pub(crate) fn begin_format<S: Storage>(
    storage: &S,
    mut lock: S::Lock,
    options: &JournalOptions,
    version: u32,
) -> Result<(RecoveryReport, S::Lock), OpenError> {
    let mut report = None;
    loop {
        let found = Found::list(storage)?;
        let mut recovered = recover(storage, &found, &mut |_| Ok(()))?;
        let is_proven = recovered.unproven.is_empty();
        if is_proven {
            recovered.format.version = version;
        }
        let opened = start(storage.clone(), lock, options.clone(), found, recovered)?;
        let report = report.get_or_insert(opened.report);
        lock = opened.writer.into_lock();
        if is_proven {
            return Ok((report.clone(), lock));
        }
        // All records are proven now.
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{FEATURE_OF_TESTS, SegmentHeader};
    use crate::journal::Journal;
    use crate::recovery::Recovered;
    use crate::sim::{Fault, Rng, SimStorage};

    fn options() -> JournalOptions {
        JournalOptions {
            segment_bytes: 4096 + 2048,
            batch_bytes: 1024,
            opening_bytes: 4096 + 2048,
            ..JournalOptions::default()
        }
    }

    fn formats(storage: &SimStorage) -> Vec<u32> {
        let found = Found::list(storage).unwrap();
        let headers = found.segments.iter().map(|number| {
            let page = storage.contents(&segment_name(*number)).unwrap();
            SegmentHeader::decode(&page).unwrap().format_version
        });
        headers.collect()
    }

    fn append(storage: &SimStorage, records: u64) {
        let mut opened =
            Journal::open(storage.clone(), options(), &mut |_| Ok(())).expect("it opens");
        for _ in 0..records {
            opened.journal.append(opened.next_position, &[7; 900]);
            opened.next_position += 1;
        }
        while let Some(batch) = opened.journal.take_batch() {
            opened.writer.write(&batch).unwrap();
        }
        opened.writer.sync().unwrap();
    }

    /// Makes a journal as the last program before format 2 would have left it: both formats have the same layouts.
    fn of_format_1(records: u64) -> SimStorage {
        let storage = SimStorage::new();
        append(&storage, records);
        let found = Found::list(&storage).unwrap();
        for number in found.segments {
            let mut page = storage.contents(&segment_name(number)).unwrap();
            let mut header = SegmentHeader::decode(&page).unwrap();
            header.format_version = 1;
            header.minimum_reader = 1;
            page[..SegmentHeader::BYTES].copy_from_slice(&header.encode());
            storage.corrupt(&segment_name(number), page);
        }
        storage
    }

    /// Returns each record's format.
    fn replayed(
        storage: &SimStorage,
        upgrades: bool,
    ) -> Result<(Vec<u32>, RecoveryReport), OpenError> {
        let mut formats = Vec::new();
        let options = JournalOptions {
            upgrades,
            ..options()
        };
        let opened = Journal::open(storage.clone(), options, &mut |record| {
            assert_eq!(record.bytes, [7; 900]);
            assert_eq!(record.position, formats.len() as u64 + 1);
            formats.push(record.format);
            Ok(())
        })?;
        assert_eq!(opened.format, FORMAT_VERSION);
        Ok((formats, opened.report))
    }

    #[test]
    fn a_journal_of_format_1_is_refused_with_what_to_type_until_it_is_upgraded() {
        let storage = of_format_1(5);
        let (calls, formats_before) = (storage.calls(), formats(&storage));
        assert!(formats_before.len() >= 2, "it has rolled");
        assert_eq!(
            replayed(&storage, false).unwrap_err().to_string(),
            "(simulated) is in format 1, and this program writes format 2. Nothing is lost and nothing was \
             changed. To upgrade it, run `penstock journal upgrade (simulated)` once: earlier programs refuse it \
             from then on, so copy the directory first if you may want to go back to one"
        );
        assert_eq!(storage.calls(), calls, "something was changed");

        let upgraded = upgrade(storage.clone(), options()).unwrap();
        assert_eq!((upgraded.from, upgraded.to), (1, 2));
        append(&storage, 5);
        assert_eq!(formats(&storage).last(), Some(&2));
        // A record that no watermark covered also keeps the format that it was written in.
        let (found, report) = replayed(&storage, false).unwrap();
        assert_eq!(found, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
        assert_eq!(report.upgraded_from, None);
    }

    #[test]
    fn an_opening_that_may_upgrade_does_so_first_and_says_it() {
        let storage = of_format_1(3);
        let (found, report) = replayed(&storage, true).unwrap();
        assert_eq!(found, [1, 1, 1]);
        assert_eq!(report.upgraded_from, Some(1));
        append(&storage, 1);
        let (found, report) = replayed(&storage, true).unwrap();
        assert_eq!(found, [1, 1, 1, 2]);
        assert_eq!(report.upgraded_from, None);
    }

    #[test]
    fn a_power_cut_at_any_call_of_an_upgrade_costs_nothing() {
        let found = of_format_1(3);
        for cut in 0.. {
            let storage = found.fork();
            storage.fail_at(storage.calls() + cut, Fault::PowerOff);
            let is_done = upgrade(storage.clone(), options()).is_ok();
            for seed in 0..8 {
                let after = storage.fork().crash(&mut Rng::new(seed));
                let (formats, _) = replayed(&after, true).unwrap();
                assert_eq!(formats, [1, 1, 1], "cut {cut}, seed {seed}");
            }
            if is_done {
                assert!(cut > 10);
                return;
            }
        }
    }

    #[test]
    fn features_are_those_that_the_journal_uses_and_not_all_that_the_program_knows() {
        for features in [0, FEATURE_OF_TESTS] {
            let storage = SimStorage::new();
            let lock = storage.lock().unwrap().unwrap();
            let mut recovered = Recovered::nothing([7; 16]);
            recovered.format.features |= features;
            drop(
                start(
                    storage.clone(),
                    lock,
                    options(),
                    Found::default(),
                    recovered,
                )
                .unwrap(),
            );
            append(&storage, 5);
            let segments = Found::list(&storage).unwrap().segments;
            assert!(segments.len() >= 3, "it has opened, and rolled");
            for number in segments {
                let header = read_header(&storage, number).unwrap();
                assert_eq!(header.features, features);
            }
        }
    }

    #[test]
    fn a_journal_of_a_newer_program_is_refused_and_left_untouched() {
        let storage = SimStorage::new();
        append(&storage, 3);
        let lock = storage.lock().unwrap().unwrap();
        drop(begin_format(&storage, lock, &options(), FORMAT_VERSION + 1).unwrap());
        let calls = storage.calls();
        let name = segment_name(*Found::list(&storage).unwrap().segments.last().unwrap());
        for refused in [
            replayed(&storage, true).map(|_| ()),
            upgrade(storage.clone(), options()).map(|_| ()),
            crate::fsck(&storage).map(|_| ()),
        ] {
            assert_eq!(
                refused.unwrap_err().to_string(),
                format!(
                    "{name} was written in format 3 and needs a program that knows format 3; this one knows \
                     format 2: use a newer penstock. Nothing was changed"
                )
            );
        }
        assert_eq!(storage.calls(), calls, "something was changed");
    }

    #[test]
    fn an_upgrade_of_what_needs_none_changes_nothing() {
        let storage = SimStorage::new();
        append(&storage, 3);
        let calls = storage.calls();
        let upgraded = upgrade(storage.clone(), options()).unwrap();
        assert_eq!(
            (upgraded.from, upgraded.to),
            (FORMAT_VERSION, FORMAT_VERSION)
        );
        assert_eq!(storage.calls(), calls);
    }
}
