use std::path::PathBuf;

use clap::Args;
use penstock_journal::{DiskStorage, JournalOptions, upgrade};

use crate::exit::{FAILED, Failure};
use crate::fsck::journal_in;
use crate::text::show;

#[derive(Args)]
pub struct Arguments {
    /// A broker's directory, or the journal in it
    directory: PathBuf,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let directory = journal_in(&arguments.directory);
    let storage = DiskStorage::open_existing(&directory).map_err(|error| {
        let text = format!("can't look at {}: {error}", directory.display());
        Failure::new(FAILED, text)
    })?;
    let mut options = JournalOptions::default();
    options.suit_disk(storage.disk_bytes()?);
    let done = upgrade(storage, options)?;
    let mut text = match done.from == done.to {
        true => format!(
            "the journal is in format {}, the newest that this program knows: nothing was changed\n",
            done.to
        ),
        false => format!(
            "upgraded from format {} to {}: older programs refuse the journal from now on\n",
            done.from, done.to
        ),
    };
    if done.torn_batches > 0 {
        text.push_str(&format!(
            "{} interrupted writes were cut off; none was confirmed\n",
            done.torn_batches
        ));
    }
    show(&text)
}
