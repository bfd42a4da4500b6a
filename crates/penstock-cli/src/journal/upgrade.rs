use std::path::Path;

use penstock_journal::{JournalOptions, upgrade};

use super::open_existing;
use crate::exit::CommandError;
use crate::text::show;

pub fn run(directory: &Path) -> Result<(), CommandError> {
    let storage = open_existing(directory)?;
    let mut options = JournalOptions::default();
    options.fit_to_disk(storage.disk_bytes()?);
    let done = upgrade(storage, options)?;
    let mut text = match done.from == done.to {
        true => format!(
            "the journal is in format {}, the newest that this program knows; nothing was changed\n",
            done.to
        ),
        false => format!(
            "upgraded from format {} to {}; older programs now refuse this journal\n",
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
