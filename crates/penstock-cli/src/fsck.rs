use std::path::PathBuf;

use clap::Args;
use penstock_journal::{DiskStorage, FsckReport, fsck};

use crate::exit::{DAMAGED, FAILED, Failure};
use crate::text::{Table, bytes, show};

#[derive(Args)]
pub struct Arguments {
    /// A broker's directory, or the journal in it
    directory: PathBuf,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let inner = arguments.directory.join("journal");
    let directory = match inner.is_dir() {
        true => inner,
        false => arguments.directory.clone(),
    };
    let storage = DiskStorage::open_existing(&directory).map_err(|error| {
        Failure::new(
            FAILED,
            format!("can't look at {}: {error}", directory.display()),
        )
    })?;
    let report = fsck(&storage)?;
    if report.segments.is_empty() {
        let nothing = format!("{} holds no journal", directory.display());
        return Err(Failure::new(FAILED, nothing));
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
        Ok(_) => Err(Failure::new(
            DAMAGED,
            "damaged where nothing that was confirmed stands; a broker starts from it",
        )),
        Err(error) => Err(Failure::new(DAMAGED, error)),
    }
}

fn for_people(report: &FsckReport) -> String {
    let mut table = Table::new(&[
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
            "{} records would be recovered; {} interrupted writes would be cut off\n",
            opening.records, opening.torn_batches
        ));
    }
    text
}
