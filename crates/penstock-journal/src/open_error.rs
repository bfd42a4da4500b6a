//! Why a journal was not opened.

use std::io;

use crate::spares::is_full;
use crate::storage::Storage;
use crate::upgrade::UPGRADE_COMMAND;

/// Reason why a journal was not opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "{location} is in use by another process, and nothing was changed; stop its broker first (`penstock broker \
         stop` for a local one)"
    )]
    Locked { location: String },
    #[error(
        "{location}/{file} is damaged at byte {offset}: {what}. Work that was confirmed may be in \
         the damaged part, so the journal is not opened. `penstock journal check {location}` shows what can \
         still be read, and `penstock journal repair` keeps that and lists what is gone; or restore the \
         directory from a backup, or move it away to start empty"
    )]
    Damaged {
        location: String,
        file: String,
        offset: u64,
        what: String,
    },
    #[error(
        "{file} was written in format {written} and needs a program that knows format {needed}; \
         this one knows format {known}: use a newer penstock. Nothing was changed"
    )]
    NewerFormat {
        file: String,
        written: u32,
        needed: u32,
        known: u32,
    },
    #[error(
        "{location} is in format {written}, and this program writes format {known}. Nothing is lost and \
         nothing was changed. To upgrade it, run `{UPGRADE_COMMAND} {location}` once: earlier programs \
         refuse it from then on, so copy the directory first if you may want to go back to one"
    )]
    OlderFormat {
        location: String,
        written: u32,
        known: u32,
    },
    #[error(
        "{file} uses features that this program does not know (bits {unknown:#x}): use a newer penstock. \
         Nothing was changed"
    )]
    UnknownFeatures { file: String, unknown: u64 },
    #[error(
        "the disk of {location} is full: {source}. Nothing is lost; make some space (a few MB) and \
         start again"
    )]
    DiskFull { location: String, source: io::Error },
    #[error("record {position} can't be replayed: {why}")]
    Replay { position: u64, why: String },
    #[error(
        "record {position} can't be replayed: {why}. Use a newer penstock. Nothing was changed"
    )]
    NewerRecord { position: u64, why: String },
    #[error("{0}. Nothing is lost and nothing was changed")]
    NotAFile(String),
    #[error(
        "could not {action} {file}: {source}. What was confirmed is kept. Check the disk (space, quota, kernel \
         log), then start again"
    )]
    Io {
        action: &'static str,
        file: String,
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn io(action: &'static str, file: &str) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_string();
        // Errors of the operating system have a number.
        move |source| match (source.kind(), source.raw_os_error()) {
            (io::ErrorKind::InvalidInput, None) => Self::NotAFile(source.to_string()),
            _ => Self::Io {
                action,
                file,
                source,
            },
        }
    }

    /// Converts like [`Self::io`], but reports a full disk as such.
    pub(crate) fn full_or_io<S: Storage>(
        storage: &S,
        action: &'static str,
        file: &str,
    ) -> impl FnOnce(io::Error) -> Self {
        let (location, file) = (storage.location(), file.to_string());
        move |source| match is_full(&source) {
            true => Self::DiskFull { location, source },
            false => Self::io(action, &file)(source),
        }
    }

    pub(crate) fn damaged<S: Storage>(storage: &S, file: &str, offset: u64, what: &str) -> Self {
        let (location, file, what) = (storage.location(), file.to_string(), what.to_string());
        Self::Damaged {
            location,
            file,
            offset,
            what,
        }
    }
}
