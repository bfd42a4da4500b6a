//! Implements the commands for a broker's journal while the broker is not running.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use penstock_journal::DiskStorage;

use crate::exit::{CommandError, FAILED};

mod check;
mod repair;
mod upgrade;

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Read a whole journal and change nothing
    Check(JournalArguments),
    /// Replace a damaged journal by a sound one: keeps everything readable, lists the lost records, and moves
    /// the damaged files to a directory inside the journal's
    Repair(JournalArguments),
    /// Convert a journal to the newest format, which older programs refuse
    Upgrade(JournalArguments),
}

#[derive(Args)]
struct JournalArguments {
    /// A broker's directory, or the journal inside it
    directory: PathBuf,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        Command::Check(place) => check::run(&journal_in(&place.directory)),
        Command::Repair(place) => repair::run(&journal_in(&place.directory)),
        Command::Upgrade(place) => upgrade::run(&journal_in(&place.directory)),
    }
}

/// Returns the journal inside a broker's directory, or the directory itself.
fn journal_in(directory: &Path) -> PathBuf {
    let inner = directory.join("journal");
    match inner.is_dir() {
        true => inner,
        false => directory.to_path_buf(),
    }
}

/// Opens the storage of an existing journal. Opening it for writing would create a directory for a mistyped
/// name.
fn open_existing(directory: &Path) -> Result<DiskStorage, CommandError> {
    DiskStorage::open_existing(directory).map_err(|error| {
        let text = format!("can't look at {}: {error}", directory.display());
        CommandError::new(FAILED, text)
    })
}
