//! Commands on a broker's journal while the broker does not run.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use penstock_journal::DiskStorage;

use crate::exit::{FAILED, Failure};

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
    /// Read all of a journal and change nothing
    Check(Place),
    /// Put a sound journal in the place of a damaged one: keeps all that can be read, lists what is gone,
    /// and moves the damaged files to a directory inside the journal's
    Repair(Place),
    /// Convert a journal to the newest format, which older programs refuse
    Upgrade(Place),
}

#[derive(Args)]
struct Place {
    /// A broker's directory, or the journal in it
    directory: PathBuf,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.command {
        Command::Check(place) => check::run(&journal_in(&place.directory)),
        Command::Repair(place) => repair::run(&journal_in(&place.directory)),
        Command::Upgrade(place) => upgrade::run(&journal_in(&place.directory)),
    }
}

/// A broker's directory has the journal in it.
fn journal_in(directory: &Path) -> PathBuf {
    let inner = directory.join("journal");
    match inner.is_dir() {
        true => inner,
        false => directory.to_path_buf(),
    }
}

/// Opening a journal to write makes directories; a name that is wrong should not become one of them.
fn open_existing(directory: &Path) -> Result<DiskStorage, Failure> {
    DiskStorage::open_existing(directory).map_err(|error| {
        let text = format!("can't look at {}: {error}", directory.display());
        Failure::new(FAILED, text)
    })
}
