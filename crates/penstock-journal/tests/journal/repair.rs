//! Repairs keep all sound records, list the lost ones, and keep the damaged files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use penstock_journal::sim::Rng;
use penstock_journal::{DiskStorage, OpenError, RepairReport, Storage, repair};
use tempfile::TempDir;

use crate::support::{ReplayedRecords, User, is_long_run, recovered, roomy, small};

/// Uses a directory in memory if there is one: these tests write thousands of small files.
fn directory() -> TempDir {
    let shared_memory = Path::new("/dev/shm");
    match shared_memory.is_dir() {
        true => tempfile::tempdir_in(shared_memory).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

fn storage(directory: &TempDir) -> DiskStorage {
    DiskStorage::open(directory.path()).unwrap()
}

/// Makes a journal of a few segments that was closed in order; returns its files and its records.
fn golden() -> (TempDir, Files, ReplayedRecords) {
    let root = directory();
    let mut user = User::open(&storage(&root)).unwrap();
    for bytes in [100, 200, 300] {
        user.append(bytes);
    }
    user.commit().unwrap();
    for bytes in [700, 20, 2500, 300, 0, 600, 80] {
        user.append_and_commit(bytes);
    }
    user.reopen_in(&root);
    for bytes in [40, 50, 60, 900] {
        user.append_and_commit(bytes);
    }
    user.close().unwrap();
    let appended = user.appended.clone();
    drop(user);
    let files = files(root.path());
    (root, files, appended)
}

impl User<DiskStorage> {
    fn reopen_in(&mut self, root: &TempDir) {
        // The lock disappears with the old directory.
        let other = directory();
        self.reopen(&storage(&other)).unwrap();
        self.reopen(&storage(root)).unwrap();
    }
}

type Files = BTreeMap<String, Vec<u8>>;

fn files(path: &Path) -> Files {
    let mut files = Files::new();
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            let name = entry.file_name().into_string().unwrap();
            files.insert(name, fs::read(entry.path()).unwrap());
        }
    }
    files
}

fn put(files: &Files) -> TempDir {
    let root = directory();
    for (name, bytes) in files {
        fs::write(root.path().join(name), bytes).unwrap();
    }
    root
}

/// Repairs these files, and checks what must hold after any damage. `None`: no damage matters.
fn check(damaged: &Files, appended: &ReplayedRecords) -> Option<(RepairReport, Vec<Vec<u8>>)> {
    let root = put(damaged);
    let refused = match recovered(&storage(&root)) {
        Ok(_) => false,
        Err(OpenError::Damaged { .. }) => true,
        Err(error) => panic!("{error}"),
    };
    if !refused {
        let root = put(damaged);
        let report = repair(root.path(), &small(), "1").unwrap();
        assert_eq!(report, RepairReport::default());
        assert_eq!(files(root.path()), *damaged, "nothing had to be changed");
        return None;
    }
    assert_eq!(files(root.path()), *damaged);
    let report = repair(root.path(), &small(), "1").unwrap();
    let (_, records) = recovered(&storage(&root)).expect("it is sound now");
    let kept: Vec<Vec<u8>> = records.into_values().collect();
    assert_eq!(report.records, kept.len() as u64);

    // All records were in it, in this order.
    let mut originals = appended.values();
    for record in &kept {
        assert!(originals.any(|original| original == record), "made up");
    }
    let lost: u64 = report.lost.iter().map(|lost| lost.records).sum();
    let missing = (appended.len() - kept.len()) as u64;
    assert!(lost <= missing, "{lost} are said to be lost of {missing}");
    if lost < missing {
        let told = report.torn_batches > 0 || report.lost.iter().any(|lost| lost.is_open_ended);
        assert!(told, "lost in silence: {report:?}");
    }
    // Every damaged file is at the reported location, unchanged.
    let aside = report.damaged_files.clone().unwrap();
    let segments = |files: Files| -> Files {
        let is_segment = |name: &String| name.ends_with(".segment");
        files
            .into_iter()
            .filter(|(name, _)| is_segment(name))
            .collect()
    };
    assert_eq!(segments(files(&aside)), segments(damaged.clone()));
    // The journal can be used.
    let mut user = User::open(&storage(&root)).unwrap();
    user.append_and_commit(900);
    user.append_and_commit(900);
    Some((report, kept))
}

fn segment_names(files: &Files) -> Vec<String> {
    let names = files.keys().filter(|name| name.ends_with(".segment"));
    names.cloned().collect()
}

#[test]
fn one_rotten_record_costs_that_record_and_is_named_with_its_place() {
    let (_root, files, appended) = golden();
    let mut damaged = files.clone();
    let first = segment_names(&files).remove(0);
    // Second record of the first batch: its batch and record headers are good.
    let at = 4096 + 64 + 16 + 100 + 16 + 50;
    damaged.get_mut(&first).unwrap()[at] ^= 4;
    let (report, kept) = check(&damaged, &appended).expect("it is damaged");
    let expected: Vec<Vec<u8>> = appended
        .iter()
        .filter(|(position, _)| **position != 2)
        .map(|(_, record)| record.clone())
        .collect();
    assert_eq!(kept, expected);
    let [lost] = &report.lost[..] else {
        panic!("{report:?}")
    };
    assert_eq!((lost.position, lost.records), (2, 1));
    assert!(!lost.is_open_ended);
    assert_eq!(
        (lost.file.as_str(), lost.from, lost.to),
        (first.as_str(), 4096 + 64 + 116, 4096 + 64 + 116 + 216)
    );
    assert_eq!(lost.what, "the checksum of the batch is wrong");
    let mut remains = appended[&2].clone();
    remains[50] ^= 4;
    assert_eq!(lost.remains, [remains]);
}

#[test]
fn a_rotten_batch_header_costs_nothing_but_the_header() {
    let (_root, files, appended) = golden();
    let mut damaged = files.clone();
    let first = segment_names(&files).remove(0);
    damaged.get_mut(&first).unwrap()[4096 + 20] ^= 4;
    let (report, kept) = check(&damaged, &appended).expect("it is damaged");
    assert!(kept.iter().eq(appended.values()), "{report:?}");
}

#[test]
fn a_missing_segment_costs_its_records_and_they_are_counted() {
    let (_root, files, appended) = golden();
    let names = segment_names(&files);
    for missing in &names {
        let mut damaged = files.clone();
        damaged.remove(missing);
        let (report, kept) = check(&damaged, &appended).expect("it is damaged");
        assert!(kept.len() < appended.len() || !report.lost.is_empty());
    }
}

#[test]
fn the_end_of_a_journal_that_was_closed_in_order_is_not_lost_in_silence() {
    let root = directory();
    let mut user = User::open_with(&storage(&root), roomy()).unwrap();
    for _ in 0..20 {
        user.append_and_commit(900);
    }
    user.close().unwrap();
    let appended = user.appended.clone();
    drop(user);
    let mut damaged = files(root.path());
    let newest = segment_names(&damaged).pop().unwrap();
    damaged.get_mut(&newest).unwrap()[4096..].fill(0);
    let (report, kept) = check(&damaged, &appended).expect("it is damaged");
    assert!(kept.len() < appended.len());
    let [lost] = &report.lost[..] else {
        panic!("{report:?}")
    };
    assert_eq!((&lost.file, lost.from), (&newest, 4096));
    assert!(lost.is_open_ended && lost.remains.is_empty());
    assert_eq!(lost.position, kept.len() as u64 + 1);
}

#[test]
fn without_the_file_that_names_the_newest_segment_a_repair_keeps_everything() {
    let (_root, files, appended) = golden();
    for newest in [None, Some(vec![0; 8192])] {
        let mut damaged = files.clone();
        damaged.remove("newest");
        damaged.extend(newest.map(|bytes| ("newest".to_string(), bytes)));
        let (report, kept) = check(&damaged, &appended).expect("it is damaged");
        assert!(kept.iter().eq(appended.values()) && report.lost.is_empty());
    }
}

#[test]
fn where_every_segment_is_missing_nothing_is_begun_and_nothing_repaired() {
    let (_root, mut damaged, _) = golden();
    damaged.retain(|name, _| !name.ends_with(".segment"));
    let root = put(&damaged);
    let refused = recovered(&storage(&root)).map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains("the file is missing"));
    let error = repair(root.path(), &small(), "1").unwrap_err();
    assert_eq!(error.to_string(), refused.to_string());
    assert_eq!(files(root.path()), damaged);
}

#[test]
fn whatever_is_flipped_zeroed_cut_or_removed_a_repair_keeps_what_is_sound() {
    let (_root, whole, appended) = golden();
    let mut names = segment_names(&whole);
    names.push("newest".to_string());
    let rounds = if is_long_run() { 6_000 } else { 250 };
    let mut repaired = 0;
    for round in 0..rounds {
        let mut rng = Rng::new(round);
        let mut damaged = whole.clone();
        for _ in 0..=rng.below(3) {
            let name = &names[rng.below(names.len() as u64) as usize];
            let Some(bytes) = damaged.get_mut(name) else {
                continue;
            };
            let length = bytes.len() as u64;
            let at = rng.below(length.max(1)) as usize;
            match rng.below(8) {
                0..=3 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
                4 | 5 => {
                    let end = (at + rng.below(700) as usize).min(bytes.len());
                    bytes[at..end].fill(0);
                }
                6 => bytes.truncate(at),
                7 => {
                    damaged.remove(name);
                }
                _ => {}
            }
        }
        // Without any header nothing identifies these batches.
        let headers = damaged.iter().filter(|(name, bytes)| {
            let good = whole[*name].get(..4096);
            name.ends_with(".segment") && bytes.get(..4096) == good
        });
        if headers.count() > 0 && check(&damaged, &appended).is_some() {
            repaired += 1;
        }
    }
    assert!(repaired > rounds / 2, "{repaired} of {rounds}");
}

#[test]
fn a_journal_in_which_no_header_can_be_read_is_left_as_it_is() {
    let (_root, mut damaged, _) = golden();
    for (name, bytes) in &mut damaged {
        if name.ends_with(".segment") {
            bytes[30] ^= 1;
        }
    }
    let root = put(&damaged);
    let error = repair(root.path(), &small(), "1").unwrap_err().to_string();
    assert!(
        error.contains("no header of any segment can be read"),
        "{error}"
    );
    assert_eq!(files(root.path()), damaged);
    assert!(!root.path().join("repaired.partial").exists());
}

#[test]
fn a_sound_journal_is_not_touched_by_a_repair() {
    let (root, files_before, _) = golden();
    let report = repair(root.path(), &small(), "1").unwrap();
    assert_eq!(report, RepairReport::default());
    assert_eq!(files(root.path()), files_before);
    let names = storage(&root).list().unwrap();
    assert!(names.iter().all(|name| !name.starts_with("damaged")));
}

/// Checks names swapped by a restored backup, or by hand. Nothing in the files is damaged.
#[test]
fn segments_that_have_each_others_names_get_their_own_back_and_nothing_is_lost() {
    let (_, original, appended) = golden();
    let names = segment_names(&original);
    assert!(names.len() >= 3, "{names:?}");
    let moved = |files: &mut Files, order: &[usize]| {
        for (place, from) in order.iter().enumerate() {
            files.insert(names[place].clone(), original[&names[*from]].clone());
        }
    };
    for order in [&[1, 0][..], &[0, 2, 1], &[1, 2, 0], &[2, 0, 1]] {
        let mut files_then = original.clone();
        moved(&mut files_then, order);
        let root = put(&files_then);
        let refused = recovered(&storage(&root));
        assert!(
            matches!(refused, Err(OpenError::Damaged { .. })),
            "{order:?}"
        );
        let report = repair(root.path(), &small(), "1").unwrap();
        let misplaced = order.iter().enumerate().filter(|(at, from)| at != *from);
        assert_eq!(report.put_back, misplaced.count() as u64, "{order:?}");
        assert_eq!((report.damaged_files, report.lost), (None, Vec::new()));
        assert_eq!(files(root.path()), original, "{order:?}");
        assert_eq!(recovered(&storage(&root)).unwrap().1, appended);
    }

    // Next to real damage the names are restored first, and only damaged records are lost.
    let mut files_then = original.clone();
    moved(&mut files_then, &[1, 0]);
    let last = files_then.get_mut(names.last().unwrap()).unwrap();
    last.truncate(last.len() / 2);
    let root = put(&files_then);
    let report = repair(root.path(), &small(), "1").unwrap();
    assert_eq!(report.put_back, 2);
    let mut only_damaged = files_then.clone();
    moved(&mut only_damaged, &[0, 1]);
    let (without, _) = check(&only_damaged, &appended).expect("it is damaged");
    assert_eq!(report.records, without.records);

    // A copy under another name is not renamed: it would replace a missing segment.
    let mut files_then = original.clone();
    moved(&mut files_then, &[1, 1]);
    let (report, _) = check(&files_then, &appended).expect("a segment is missing");
    assert_eq!(report.put_back, 0);
}

#[test]
fn what_is_no_file_is_named_with_what_to_do() {
    let (root, files_then, _) = golden();
    let name = segment_names(&files_then).pop().unwrap();
    let check = |name: &str, what: &str, opened: &dyn Fn() -> String| {
        let said = opened();
        assert!(said.contains(name) && said.contains(what), "{said}");
        assert!(said.contains("move it out of"), "{said}");
    };
    let place = root.path().join(&name);
    fs::remove_file(&place).unwrap();
    fs::create_dir(&place).unwrap();
    let opened = || recovered(&storage(&root)).unwrap_err().to_string();
    check(&name, "a directory", &opened);
    fs::remove_dir(&place).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &place,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    check(&name, "no ordinary file", &opened);
    fs::remove_file(&place).unwrap();
    fs::write(&place, &files_then[&name]).unwrap();
    fs::create_dir(root.path().join("7.spare")).unwrap();
    let opened = || {
        let opened = User::open(&storage(&root));
        opened.err().expect("it is not opened").to_string()
    };
    check("7.spare", "a directory", &opened);
}
