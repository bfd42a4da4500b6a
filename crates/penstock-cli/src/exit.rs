//! Defines the exit codes, as main.rs and docs/cli.md list them.

use std::fmt::Display;
use std::io::stderr;
use std::path::Path;
use std::process::ExitCode;

use penstock_driver::{DriverError, ErrorKind};
use penstock_journal::{OpenError, RepairError};
use penstock_message::{Applied, Receipt, Refusal};
use penstock_server::{ListenError, ServerError};

use crate::logging;
use crate::text::{printable_lines, state_name};

pub const FAILED: u8 = 1;
pub const WRONG_CALL: u8 = penstock_directory::EXIT_WRONG_CALL;
pub const IN_USE: u8 = penstock_directory::EXIT_IN_USE;
pub const DAMAGED: u8 = penstock_directory::EXIT_DAMAGED;
pub const NO_BROKER: u8 = 69;
pub const DISK_FAILED: u8 = 74;
pub const NOT_OFFERED: u8 = 75;
pub const UNUSABLE: u8 = penstock_directory::EXIT_UNUSABLE;

/// Error message for the user, with the exit code that tells programs what happened.
#[derive(Debug)]
pub struct CommandError {
    pub code: u8,
    pub message: String,
}

impl CommandError {
    pub fn new(code: u8, message: impl Display) -> Self {
        Self {
            code,
            message: message.to_string(),
        }
    }

    pub fn report(&self) -> ExitCode {
        // `eprintln!` panics when standard error can't be written, and the exit code would be wrong too.
        let message = printable_lines(&self.message);
        let _unread = logging::end(stderr(), &format!("penstock: {message}"));
        ExitCode::from(self.code)
    }
}

impl From<std::io::Error> for CommandError {
    fn from(error: std::io::Error) -> Self {
        Self::new(FAILED, error)
    }
}

impl From<DriverError> for CommandError {
    fn from(error: DriverError) -> Self {
        let code = match error.kind {
            ErrorKind::Unavailable | ErrorKind::Silent => NO_BROKER,
            ErrorKind::Invalid | ErrorKind::Unauthorized => UNUSABLE,
            ErrorKind::NotOffered(_) => NOT_OFFERED,
            ErrorKind::TooLarge | ErrorKind::Closed => FAILED,
        };
        Self::new(code, error)
    }
}

impl From<Refusal> for CommandError {
    fn from(why: Refusal) -> Self {
        let (code, text) = match why {
            Refusal::NotOffered(text) => (NOT_OFFERED, text),
            Refusal::DiskFull => (
                FAILED,
                "the broker's disk is nearly full; free some space on its machine".to_owned(),
            ),
            Refusal::NoSuchJob => (
                FAILED,
                "the broker has no such job: it has ended, or never existed".to_owned(),
            ),
            Refusal::TooLate(state) => (
                FAILED,
                format!(
                    "the job is already {}, so it is too late for that",
                    state_name(state)
                ),
            ),
            Refusal::TooLarge(text) | Refusal::QueueFull(text) | Refusal::Invalid(text) => {
                (FAILED, text)
            }
            // No command sends an operation that these refuse.
            Refusal::LeaseLost
            | Refusal::GuardFailed
            | Refusal::AlreadyExists
            | Refusal::Claimed(_) => (FAILED, format!("the broker refused: {why:?}")),
        };
        Self::new(code, format!("{text}; nothing was changed"))
    }
}

/// Returns the outcome of one order. A duplicate, resent after a lost connection, counts as done.
pub fn applied(receipt: Receipt) -> Result<Applied, CommandError> {
    match receipt {
        Receipt::Applied(applied) => Ok(applied),
        Receipt::Duplicate => Ok(Applied::default()),
        Receipt::Refused { why, .. } => Err(why.into()),
        Receipt::Unknown => Err(CommandError::new(
            FAILED,
            "the broker was unreachable for so long that it no longer remembers this order. It may have been carried \
             out: check before you repeat it",
        )),
    }
}

impl From<OpenError> for CommandError {
    fn from(error: OpenError) -> Self {
        let code = match &error {
            OpenError::Locked { .. } => IN_USE,
            OpenError::Damaged { .. } | OpenError::Replay { .. } => DAMAGED,
            OpenError::Io { source, .. } if is_wrong_path(source) => UNUSABLE,
            OpenError::Io { .. } | OpenError::DiskFull { .. } => DISK_FAILED,
            OpenError::NewerFormat { .. }
            | OpenError::OlderFormat { .. }
            | OpenError::UnknownFeatures { .. }
            | OpenError::NewerRecord { .. }
            | OpenError::NotAFile(_) => UNUSABLE,
        };
        Self::new(code, error)
    }
}

impl From<RepairError> for CommandError {
    fn from(error: RepairError) -> Self {
        match error {
            RepairError::Open(error) => error.into(),
            error => Self::new(FAILED, error),
        }
    }
}

impl From<ServerError> for CommandError {
    fn from(error: ServerError) -> Self {
        match error {
            ServerError::Journal(error) => error.into(),
            ServerError::DiskFailed(_) | ServerError::Listen(ListenError::NoRoom { .. }) => {
                Self::new(DISK_FAILED, error)
            }
            ServerError::Listen(ListenError::NoToken { .. }) => Self::new(UNUSABLE, error),
            ServerError::Directory { ref source, .. }
            | ServerError::Listen(ListenError::Io { ref source, .. }) => {
                Self::new(path_error_code(source), error)
            }
            error => Self::new(FAILED, error),
        }
    }
}

/// Reports that the directory of a local broker can't be used, and how to fix a missing permission.
pub fn cant_use_directory(directory: &Path, error: &std::io::Error) -> CommandError {
    let mut text = format!("can't use {}: {error}", directory.display());
    // Penstock's own refusals already say what to do.
    let is_of_the_system = error.raw_os_error().is_some();
    if is_of_the_system && error.kind() == std::io::ErrorKind::PermissionDenied {
        text += ". Give this user permission to write there, or choose another directory with \
                 PENSTOCK_URL=local:PATH";
    }
    CommandError::new(path_error_code(error), text)
}

/// Returns the exit code for an error about a path.
fn path_error_code(error: &std::io::Error) -> u8 {
    match error {
        error if is_disk_fault(error) => DISK_FAILED,
        error if is_wrong_path(error) => UNUSABLE,
        _ => FAILED,
    }
}

/// Whether a path or a permission is wrong, and stays wrong until somebody changes it.
fn is_wrong_path(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::PermissionDenied | Kind::NotADirectory | Kind::IsADirectory | Kind::AlreadyExists
    )
}

/// Whether the disk is at fault, not a path or a permission.
pub fn is_disk_fault(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        number,
        Some(Errno::IO | Errno::NXIO | Errno::NOSPC | Errno::DQUOT | Errno::ROFS)
    )
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn where_a_permission_is_missing_the_way_out_is_named() {
        let check = |error: Error, code: u8, is_advised: bool| {
            let failure = cant_use_directory(Path::new("/srv/shop"), &error);
            assert_eq!(failure.code, code, "{error}");
            let says = failure.message.starts_with("can't use /srv/shop: ");
            let advises = failure.message.ends_with("with PENSTOCK_URL=local:PATH");
            assert_eq!((says, advises), (true, is_advised), "{}", failure.message);
        };
        check(Errno::ACCESS.into(), UNUSABLE, true);
        check(Errno::NOSPC.into(), DISK_FAILED, false);
        check(Errno::NOTDIR.into(), UNUSABLE, false);
        // Penstock explains its own refusals.
        let refused = Error::new(ErrorKind::PermissionDenied, "others may write there");
        check(refused, UNUSABLE, false);
    }
}
