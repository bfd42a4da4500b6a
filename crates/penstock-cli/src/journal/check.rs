use std::path::Path;

use penstock_journal::{FsckReport, fsck};

use super::open_existing;
use crate::exit::{CommandError, DAMAGED, FAILED};
use crate::text::{TextTable, bytes, show};

pub fn run(directory: &Path) -> Result<(), CommandError> {
    let report = fsck(&open_existing(directory)?)?;
    // All segments may be missing.
    if report.segments.is_empty() && report.opening.is_ok() {
        let nothing = format!("{} holds no journal", directory.display());
        return Err(CommandError::new(FAILED, nothing));
    }
    show(&for_people(&report))?;
    match report.opening {
        Ok(_)
            if report
                .segments
                .iter()
                .all(|segment| segment.damage.is_empty()) =>
        {
            Ok(())
        }
        Ok(_) => Err(CommandError::new(
            DAMAGED,
            "the journal is damaged, but no confirmed record is affected; a broker can start from it",
        )),
        Err(error) => Err(CommandError::new(DAMAGED, error)),
    }
}

fn for_people(report: &FsckReport) -> String {
    let mut table = TextTable::new(&[
        "SEGMENT", ">EPOCH", ">FROM", ">BATCHES", ">RECORDS", ">USED", ">FILE", "",
    ]);
    for segment in &report.segments {
        table.row(vec![
            segment.file.clone(),
            segment.epoch.to_string(),
            segment.base_position.to_string(),
            segment.batches.to_string(),
            segment.records.to_string(),
            bytes(segment.used_bytes),
            bytes(segment.file_bytes),
            match segment.damage.len() {
                0 => "good".to_owned(),
                count => format!("DAMAGED in {count} places"),
            },
        ]);
    }
    let mut text = table.to_string();
    for segment in &report.segments {
        for damage in &segment.damage {
            text.push_str(&format!(
                "{} at byte {}: {}\n",
                segment.file, damage.offset, damage.what
            ));
        }
    }
    if let Ok(opening) = &report.opening {
        text.push_str(&format!(
            "{} records would be recovered; {} interrupted writes would be cut off{}\n",
            opening.records,
            opening.torn_batches,
            match opening.was_closed {
                true => "; it was closed cleanly",
                false => "",
            }
        ));
    }
    text
}
