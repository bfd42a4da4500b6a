//! Runs the findings of fuzzing again on every test run.

use std::fs;
use std::path::Path;

use penstock_hostile::TARGETS;

#[test]
fn everything_that_fuzzing_kept_still_holds() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (name, target) in TARGETS {
        let directory = corpora.join(name);
        let mut tried = 0;
        for entry in fs::read_dir(&directory).expect("each target has a corpus") {
            let path = entry.expect("it is there").path();
            println!("{}", path.display());
            target(&fs::read(&path).expect("it is a file"));
            tried += 1;
        }
        assert!(tried > 0, "{} is empty", directory.display());
    }
}

#[test]
fn every_target_is_fuzzed() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).expect("it is there");
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        assert!(
            fuzz.join("fuzz_targets")
                .join(format!("{name}.rs"))
                .exists()
        );
    }
}

/// A header with a correct checksum said that its first batch has number 0. `penstock fsck` then computed the
/// number before it, and panicked instead of reporting. Numbers that no journal reaches now count as damage
/// wherever they are read.
#[test]
fn a_header_whose_numbers_no_journal_comes_to_is_damage() {
    let found = "../../fuzz/corpus/journal/a-header-whose-numbers-begin-below-the-first";
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join(found);
    penstock_hostile::journal(&fs::read(found).expect("it is kept"));
}

/// A batch with a correct checksum named a position as synced that was written after it, or never. An opening trusted
/// it, counted nothing as left to write again, and began the next segment at the wrong batch. No later opening
/// succeeded. Such a batch now counts as damage.
#[test]
fn a_batch_that_names_as_synced_what_was_not_written_is_damage() {
    let found = "../../fuzz/corpus/journal/a-batch-that-names-as-synced-what-was-not-written";
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join(found);
    penstock_hostile::journal(&fs::read(found).expect("it is kept"));
}
