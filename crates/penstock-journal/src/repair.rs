//! Replaces a damaged journal with a sound one, and keeps the damaged files.
//!
//! The sound journal is written to a separate directory (`repaired.partial`, then `repaired`) and read back before
//! anything is changed. Its segments have higher numbers than the damaged ones. Then files are moved, in an order in
//! which no intermediate state looks like a good journal:
//!
//! 1. the newest sound segment: it names its predecessors, which are missing, so nothing opens this;
//! 2. the damaged files, to a directory next to them;
//! 3. the file that names the newest segment;
//! 4. the remaining sound segments, the oldest one last.
//!
//! An interrupted repair is continued by the next one.
//!
//! Segments with swapped names are not damage: their own names are restored before anything else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::format::{Format, segment_name, segment_number};
use crate::journal::JournalOptions;
use crate::newest::NEWEST;
use crate::open::{OpenedJournal, resume, start};
use crate::open_error::OpenError;
use crate::recovery::{Found, Recovered, check_nothing, recover};
use crate::salvage::{Lost, Salvage, salvage};
use crate::scan::{read_header, stated_header};
use crate::storage::{DiskStorage, Storage};
use crate::upgrade::begin_format;
use crate::writer::WriteError;

const UNFINISHED: &str = "repaired.partial";
const FINISHED: &str = "repaired";

/// Outcome of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// Number of segments whose names were swapped and are right again.
    pub put_back: u64,
    /// New location of the damaged files; `None`: none was damaged, and nothing was written.
    pub damaged_files: Option<PathBuf>,
    /// Whether an interrupted repair only had to be finished. The earlier run reported the losses.
    pub resumed: bool,
    /// Number of sound records, all of which were kept.
    pub records: u64,
    /// Number of writes that a crash interrupted; none was confirmed.
    pub torn_batches: u64,
    pub lost: Vec<Lost>,
}

/// Reason why nothing was repaired. The damaged files are unchanged, or were moved unchanged.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(
        "could not {action} {path}: {source}. Nothing is lost: run the repair again once that is fixed"
    )]
    Move {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "the rewritten journal does not read back as expected ({0}); the damaged files are unchanged"
    )]
    NotTheSame(String),
}

/// Repairs the journal in a directory. `stamp` names the directory for the damaged files,
/// `damaged-STAMP`.
pub fn repair(
    path: &Path,
    options: &JournalOptions,
    stamp: &str,
) -> Result<RepairReport, RepairError> {
    let storage = open_directory(path)?;
    let location = storage.location();
    let lock = storage.lock().map_err(OpenError::io("lock", &location))?;
    let _lock = lock.ok_or(OpenError::Locked { location })?;
    let damaged_files = path.join(format!("damaged-{stamp}"));
    if path.join(FINISHED).is_dir() {
        move_files(path, &damaged_files, &mut |_| Ok(()))?;
        return Ok(RepairReport {
            damaged_files: Some(damaged_files),
            resumed: true,
            ..RepairReport::default()
        });
    }
    let found = Found::list(&storage)?;
    if found.segments.is_empty() {
        check_nothing(&storage, &found)?;
        return Ok(RepairReport::default());
    }
    match recover(&storage, &found, &mut |_| Ok(())) {
        Ok(_) => return Ok(RepairReport::default()),
        Err(OpenError::Damaged { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let put_back = put_names_back(&storage, path, &found)?;
    if put_back > 0
        && let Ok(recovered) = recover(&storage, &found, &mut |_| Ok(()))
    {
        return Ok(RepairReport {
            put_back,
            records: recovered.report.records,
            torn_batches: recovered.report.torn_batches,
            ..RepairReport::default()
        });
    }

    let unfinished = path.join(UNFINISHED);
    if unfinished.is_dir() {
        // Left by an interrupted repair: a copy of records that are still here.
        fs::remove_dir_all(&unfinished).map_err(failed_to("remove", &unfinished))?;
    }
    let target = open_directory(&unfinished)?;
    let written = write_anew(&storage, &found, &target, options);
    let salvage = written.inspect_err(|_| {
        // The copy itself may have filled the disk.
        let _removed = fs::remove_dir_all(&unfinished);
    })?;
    let finished = path.join(FINISHED);
    rename(&unfinished, &finished)?;
    sync(path)?;
    move_files(path, &damaged_files, &mut |_| Ok(()))?;
    Ok(RepairReport {
        put_back,
        damaged_files: Some(damaged_files),
        resumed: false,
        records: salvage.records,
        torn_batches: salvage.torn_batches,
        lost: salvage.lost,
    })
}

/// Restores the names of segments that were swapped, as their headers state them. Two files exchange names at once, so
/// an interruption leaves each under one of their names, and the next repair continues.
fn put_names_back(storage: &DiskStorage, path: &Path, found: &Found) -> Result<u64, RepairError> {
    let mut journals = BTreeSet::new();
    // Segment in each file, where it differs from the file's name.
    let mut holds = BTreeMap::new();
    for number in &found.segments {
        if let Some(header) = stated_header(storage, *number)? {
            journals.insert(header.journal_id);
            if header.segment != *number {
                holds.insert(*number, header.segment);
            }
        }
    }
    let names: BTreeSet<u64> = holds.keys().copied().collect();
    let segments: BTreeSet<u64> = holds.values().copied().collect();
    if journals.len() > 1 || names != segments {
        return Ok(0);
    }
    let wrong = |holds: &BTreeMap<u64, u64>| {
        let mut all = holds.iter().map(|(place, segment)| (*place, *segment));
        all.find(|(place, segment)| place != segment)
    };
    while let Some((place, segment)) = wrong(&holds) {
        let file = path.join(segment_name(place));
        let exchanged = exchange(&file, &path.join(segment_name(segment)));
        match exchanged {
            Ok(()) => {}
            // This file system can't exchange names. The batches are then copied like those of damaged segments.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(0),
            Err(error) => return Err(failed_to("move", &file)(error)),
        }
        let other = holds.insert(segment, segment).unwrap_or(segment);
        holds.insert(place, other);
    }
    sync(path)?;
    Ok(names.len() as u64)
}

fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

/// Writes all sound records of a journal to a new one, and reads them back.
pub(crate) fn write_anew<S: Storage, T: Storage>(
    source: &S,
    found: &Found,
    target: &T,
    options: &JournalOptions,
) -> Result<Salvage, RepairError> {
    // First pass without writing, to find the epoch: new batches need a later one.
    let mut first = None;
    let looked = salvage(source, found, &mut |record| {
        first.get_or_insert((record.position, record.format));
        Ok(())
    })?;
    let last_format = looked.format;
    let (first_position, first_format) = first.unwrap_or((1, last_format.version));
    let location = target.location();
    let lock = target.lock().map_err(OpenError::io("lock", &location))?;
    let lock = lock.ok_or(OpenError::Locked { location })?;
    let mut format = Format {
        version: first_format,
        ..last_format
    };
    let recovered = Recovered::after_a_repair(
        options.journal_id,
        format,
        found.segments.last().copied().unwrap_or(0),
        looked.epoch + 1,
        first_position,
    );
    let nothing_yet = Found::default();
    let mut opened = Some(start(
        target.clone(),
        lock,
        options.clone(),
        nothing_yet,
        recovered,
    )?);
    // Each record keeps its format. The journal is upgraded at the same points as the old one.
    let mut go_over_to = |opened: &mut Option<OpenedJournal<T>>, version| {
        if version > format.version {
            let lock = finish(opened.take().expect("it is open"))?;
            let (_, lock) = begin_format(target, lock, options, version)?;
            *opened = Some(resume(target.clone(), lock, options.clone(), &mut |_| {
                Ok(())
            })?);
            format.version = version;
        }
        Ok::<_, RepairError>(())
    };
    let mut checksum = 0;
    let mut failed = None;
    let salvaged = salvage(source, found, &mut |record| {
        checksum = crc32c::crc32c_append(checksum, record.bytes);
        if failed.is_none() {
            failed = go_over_to(&mut opened, record.format).err();
        }
        if let Some(opened) = &mut opened
            && failed.is_none()
        {
            opened.journal.append(opened.next_position, record.bytes);
            opened.next_position += 1;
            if opened.journal.waiting_bytes() >= options.batch_bytes {
                failed = write_waiting(opened).err().map(RepairError::from);
            }
        }
        Ok(())
    })?;
    if failed.is_none() {
        failed = go_over_to(&mut opened, last_format.version).err();
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let lock = finish(opened.take().expect("it is open"))?;

    // The next opening adds a segment, so that there are at least two, and proves the rest.
    let (mut read, mut read_checksum) = (0, 0);
    resume(target.clone(), lock, options.clone(), &mut |record| {
        read += 1;
        read_checksum = crc32c::crc32c_append(read_checksum, record.bytes);
        Ok(())
    })?;
    if (read, read_checksum) != (salvaged.records, checksum) {
        let what = format!("{read} of {} records", salvaged.records);
        return Err(RepairError::NotTheSame(what));
    }
    Ok(salvaged)
}

/// Writes and syncs all waiting records, and releases everything but the lock.
fn finish<S: Storage>(mut opened: OpenedJournal<S>) -> Result<S::Lock, WriteError> {
    write_waiting(&mut opened)?;
    opened.writer.sync()?;
    Ok(opened.writer.into_lock())
}

fn write_waiting<S: Storage>(opened: &mut OpenedJournal<S>) -> Result<(), WriteError> {
    while let Some(batch) = opened.journal.take_batch() {
        opened.writer.write(&batch)?;
    }
    Ok(())
}

/// Moves files in the order that the module describes. Calls `before` before each step.
fn move_files(
    path: &Path,
    damaged_files: &Path,
    before: &mut dyn FnMut(&str) -> Result<(), RepairError>,
) -> Result<(), RepairError> {
    let finished = path.join(FINISHED);
    let here = Found::list(&open_directory(path)?)?;
    let mut there = Found::list(&open_directory(&finished)?)?;
    // The newest segment is moved first; it states how many precede it.
    let from = match here.segments.last().max(there.segments.last()) {
        Some(newest) if there.segments.last() == Some(newest) => finished.as_path(),
        _ => path,
    };
    let newest = here.segments.last().max(there.segments.last());
    let newest = *newest.expect("a repair leaves segments");
    let header = read_header(&open_directory(from)?, newest)?;
    let oldest = newest - u64::from(header.older_segments);
    if from == finished {
        before("move the newest")?;
        rename(
            &finished.join(segment_name(newest)),
            &path.join(segment_name(newest)),
        )?;
        sync(path)?;
        there.segments.pop();
    }

    if !damaged_files.is_dir() {
        fs::create_dir(damaged_files).map_err(failed_to("make", damaged_files))?;
    }
    for entry in fs::read_dir(path).map_err(failed_to("list", path))? {
        let name = entry.map_err(failed_to("list", path))?.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_old = segment_number(name).is_some_and(|number| number < oldest);
        if is_old || name.ends_with(".spare") || name == crate::open::UNFINISHED {
            before("move a damaged one")?;
            rename(&path.join(name), &damaged_files.join(name))?;
        }
    }
    // Once the sound file is here, there is none over there.
    let newest = finished.join(NEWEST);
    if newest.exists() {
        if path.join(NEWEST).exists() {
            before("move a damaged one")?;
            rename(&path.join(NEWEST), &damaged_files.join(NEWEST))?;
        }
        sync(damaged_files)?;
        before("move the file that names the newest segment")?;
        rename(&newest, &path.join(NEWEST))?;
    }
    sync(damaged_files)?;
    sync(path)?;

    for number in there.segments.into_iter().rev() {
        before("move a sound one")?;
        rename(
            &finished.join(segment_name(number)),
            &path.join(segment_name(number)),
        )?;
        sync(path)?;
    }
    before("clean")?;
    // Removes the remaining spares, if any.
    fs::remove_dir_all(&finished).map_err(failed_to("remove", &finished))?;
    sync(path)
}

fn open_directory(path: &Path) -> Result<DiskStorage, OpenError> {
    DiskStorage::open(path).map_err(OpenError::io("open", &path.display().to_string()))
}

fn rename(source: &Path, target: &Path) -> Result<(), RepairError> {
    fs::rename(source, target).map_err(failed_to("move", source))
}

fn sync(directory: &Path) -> Result<(), RepairError> {
    let synced = DiskStorage::open_existing(directory).and_then(|storage| storage.sync_directory());
    synced.map_err(failed_to("sync", directory))
}

fn failed_to(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RepairError {
    let path = path.to_path_buf();
    move |source| RepairError::Move {
        action,
        path,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::SegmentHeader;
    use crate::journal::Journal;

    const STOPPED: &str = "stopped here";

    /// Makes a journal whose first segment is damaged, and returns its original records.
    fn damaged(path: &Path, options: &JournalOptions) -> Vec<Vec<u8>> {
        let storage = DiskStorage::open(path).unwrap();
        let mut opened = Journal::open(storage, options.clone(), &mut |_| Ok(())).unwrap();
        let records: Vec<Vec<u8>> = (1..40_u8).map(|n| vec![n; 100]).collect();
        for (position, record) in (1..).zip(&records) {
            opened.journal.append(position, record);
            write_waiting(&mut opened).unwrap();
            opened.writer.sync().unwrap();
        }
        flip(path);
        records
    }

    /// Flips a bit of the first record.
    fn flip(path: &Path) {
        let first = path.join(segment_name(1));
        let mut bytes = fs::read(&first).unwrap();
        bytes[4096 + 90] ^= 1;
        fs::write(&first, bytes).unwrap();
    }

    /// Checks that each record keeps its format although all of them are rewritten.
    #[test]
    fn a_repair_of_a_journal_that_was_upgraded_half_way_mixes_no_formats() {
        let mut options = JournalOptions {
            journal_id: [7; 16],
            segment_bytes: 4096 + 2048,
            batch_bytes: 1024,
            opening_bytes: 4096 + 2048,
            ..JournalOptions::default()
        };
        for is_upgraded in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path();
            let records = damaged(path, &options);
            let storage = DiskStorage::open(path).unwrap();
            for number in Found::list(&storage).unwrap().segments {
                let mut bytes = fs::read(path.join(segment_name(number))).unwrap();
                let mut header = SegmentHeader::decode(&bytes).unwrap();
                (header.format_version, header.minimum_reader) = (1, 1);
                bytes[..SegmentHeader::BYTES].copy_from_slice(&header.encode());
                fs::write(path.join(segment_name(number)), bytes).unwrap();
            }
            if is_upgraded {
                // Taken while it was sound.
                flip(path);
                options.upgrades = true;
                let mut opened = Journal::open(storage, options.clone(), &mut |_| Ok(())).unwrap();
                opened.journal.append(opened.next_position, b"new");
                finish(opened).unwrap();
                options.upgrades = false;
                flip(path);
            }
            let report = repair(path, &options, "1").unwrap();
            let lost: u64 = report.lost.iter().map(|lost| lost.records).sum();
            assert_eq!(lost, 1);

            let mut formats = Vec::new();
            options.upgrades = true;
            let storage = DiskStorage::open(path).unwrap();
            let opened = Journal::open(storage, options.clone(), &mut |record| {
                formats.push(record.format);
                Ok(())
            });
            let upgraded_from = opened.unwrap().report.upgraded_from;
            options.upgrades = false;
            let of_format_1 = records.len() - 1;
            assert!(formats[..of_format_1].iter().all(|format| *format == 1));
            match is_upgraded {
                false => assert_eq!((formats.len(), upgraded_from), (of_format_1, Some(1))),
                true => {
                    assert_eq!(formats[of_format_1..], [2]);
                    assert_eq!(upgraded_from, None);
                }
            }
        }
    }

    fn open(path: &Path, options: &JournalOptions) -> Result<Vec<Vec<u8>>, OpenError> {
        let mut records = Vec::new();
        let storage = DiskStorage::open(path).unwrap();
        Journal::open(storage, options.clone(), &mut |record| {
            records.push(record.bytes.to_vec());
            Ok(())
        })?;
        Ok(records)
    }

    #[test]
    fn a_repair_that_is_interrupted_anywhere_looks_damaged_until_it_is_finished() {
        let options = JournalOptions {
            journal_id: [7; 16],
            segment_bytes: 4096 + 2048,
            batch_bytes: 1024,
            opening_bytes: 4096 + 2048,
            spares: 1,
            ..JournalOptions::default()
        };
        for steps in 0.. {
            let root = tempfile::tempdir().unwrap();
            let path = root.path();
            let records = damaged(path, &options);
            // Repeats `repair` up to the moves.
            let storage = DiskStorage::open(path).unwrap();
            let found = Found::list(&storage).unwrap();
            let target = DiskStorage::open(path.join(FINISHED)).unwrap();
            let salvage = write_anew(&storage, &found, &target, &options).unwrap();
            assert_eq!(salvage.records as usize, records.len() - 1);
            assert_eq!(salvage.lost.len(), 1);
            let mut left = steps;
            let moved = move_files(path, &path.join("damaged-1"), &mut |_| {
                left -= 1;
                match left < 0 {
                    true => Err(failed_to(STOPPED, path)(io::ErrorKind::Other.into())),
                    false => Ok(()),
                }
            });
            let is_finished = match moved {
                Ok(()) => true,
                Err(RepairError::Move {
                    action: STOPPED, ..
                }) => false,
                Err(error) => panic!("{error}"),
            };
            let found = Found::list(&DiskStorage::open(path).unwrap()).unwrap();
            let oldest_is_there = found.segments.first().is_some_and(|oldest| {
                !path.join(FINISHED).join(segment_name(*oldest - 1)).exists() && *oldest > 1
            });
            let all_moved = Found::list(&DiskStorage::open(path.join(FINISHED)).unwrap())
                .unwrap()
                .segments
                .is_empty();
            if all_moved && oldest_is_there {
                assert_eq!(open(path, &options).unwrap(), records[1..]);
            } else {
                let refused = open(path, &options).unwrap_err();
                assert!(
                    matches!(refused, OpenError::Damaged { .. }),
                    "{steps}: {refused}"
                );
                let report = repair(path, &options, "2").unwrap();
                assert!(report.resumed);
                assert_eq!(open(path, &options).unwrap(), records[1..]);
            }
            let kept = [path.join("damaged-1"), path.join("damaged-2")];
            assert!(kept.iter().any(|kept| kept.join(segment_name(1)).exists()));
            if is_finished {
                assert!(steps > 5);
                return;
            }
        }
    }
}
