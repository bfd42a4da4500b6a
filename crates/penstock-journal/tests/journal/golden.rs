//! Journals of earlier programs are read exactly, and can be continued. `examples/make_golden.rs` made them; committed
//! ones are never made again.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_journal::{DiskStorage, FORMAT_VERSION, Journal, JournalOptions, OpenError, fsck};

fn entries(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Returns each committed journal, with its format.
fn shapes() -> Vec<(u32, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut shapes = Vec::new();
    for format in entries(&root) {
        let name = format.file_name().unwrap().to_str().unwrap();
        let number = name.strip_prefix("format-").unwrap().parse().unwrap();
        shapes.extend(entries(&format).into_iter().map(|shape| (number, shape)));
    }
    shapes
}

/// Copies a journal to work on.
fn copy(shape: &Path) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for file in entries(&shape.join("journal")) {
        fs::copy(&file, root.path().join(file.file_name().unwrap())).unwrap();
    }
    root
}

/// Returns what opening a journal shows, in the form of `expected.txt`.
fn opened(path: &Path) -> Result<String, OpenError> {
    let mut found = String::new();
    let storage = DiskStorage::open(path).unwrap();
    let options = JournalOptions {
        segment_bytes: 64 << 10,
        opening_bytes: 8 << 10,
        upgrades: true,
        ..JournalOptions::default()
    };
    let mut opened = Journal::open(storage, options, &mut |record| {
        let checksum = crc32c::crc32c(record.bytes);
        let (position, length) = (record.position, record.bytes.len());
        found.push_str(&format!("{position} {length} {checksum:08x}\n"));
        Ok(())
    })?;
    found.push_str(&format!(
        "torn batches {}, written again {}\n",
        opened.report.torn_batches, opened.report.rewritten_records
    ));
    // It works like any other journal.
    opened.journal.append(opened.next_position, b"more");
    while let Some(batch) = opened.journal.take_batch() {
        opened.writer.write(&batch).unwrap();
    }
    opened.writer.sync().unwrap();
    Ok(found)
}

fn without_last_line(text: &str) -> &str {
    text.trim_end()
        .rsplit_once('\n')
        .map_or("", |(lines, _)| lines)
}

#[test]
fn golden_journals_of_every_format_are_read_exactly_and_go_on() {
    let shapes = shapes();
    assert!(shapes.len() >= 14 + 18, "{shapes:?}");
    assert!(shapes.iter().any(|(format, _)| *format == FORMAT_VERSION));
    for (_, shape) in shapes {
        let expected = fs::read_to_string(shape.join("expected.txt")).unwrap();
        let root = copy(&shape);
        let report = fsck(&DiskStorage::open(root.path()).unwrap()).unwrap();
        assert!(report.opening.is_ok(), "{}", shape.display());
        let damage: Vec<_> = report
            .segments
            .iter()
            .flat_map(|segment| &segment.damage)
            .collect();
        assert!(damage.is_empty(), "{}: {damage:?}", shape.display());
        assert_eq!(
            opened(root.path()).unwrap(),
            expected,
            "{}",
            shape.display()
        );
        // Old and new records are there.
        let again = opened(root.path()).unwrap();
        let (were, are) = (without_last_line(&expected), without_last_line(&again));
        let new = are.strip_prefix(were).unwrap().trim();
        assert!(
            new.ends_with(&format!(" 4 {:08x}", crc32c::crc32c(b"more"))),
            "{new}"
        );
        assert_eq!(new.lines().count(), 1);
    }
}

#[test]
fn golden_journals_of_a_newer_program_are_refused_and_left_as_they_are() {
    for (_, shape) in shapes() {
        let root = copy(&shape);
        for file in entries(root.path()) {
            if file.extension().is_none_or(|kind| kind != "segment") {
                continue;
            }
            let mut bytes = fs::read(&file).unwrap();
            bytes[8..12].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
            bytes[12..16].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
            let checksum = crc32c::crc32c(&bytes[..4092]);
            bytes[4092..4096].copy_from_slice(&checksum.to_le_bytes());
            fs::write(&file, bytes).unwrap();
        }
        let contents = || -> Vec<(PathBuf, Vec<u8>)> {
            let files = entries(root.path());
            files
                .into_iter()
                .map(|file| (file.clone(), fs::read(file).unwrap()))
                .collect()
        };
        let before = contents();
        let error = opened(root.path()).unwrap_err();
        assert!(matches!(error, OpenError::NewerFormat { .. }), "{error}");
        assert!(
            error
                .to_string()
                .ends_with("use a newer penstock. Nothing was changed")
        );
        assert!(before == contents(), "{} was changed", shape.display());
    }
}
