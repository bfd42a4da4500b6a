//! The directory of a local broker: its files, the users who are trusted with it, and the broker's exit codes. Clients
//! and the broker both need this, and apply the same rules.

mod paths;
mod trust;

pub use paths::{LocalPaths, is_nobody, open_own};

/// Exit code of a local broker that found another one already running.
pub const EXIT_IN_USE: u8 = 6;
/// Exit code for a wrong command line, or a wrong file that it names.
pub const EXIT_WRONG_CALL: u8 = 2;
/// Exit code for a damaged journal.
pub const EXIT_DAMAGED: u8 = 65;
/// Exit code for a wrong path, permission or journal format.
pub const EXIT_UNUSABLE: u8 = 78;
/// Exit codes of a start that fails until somebody fixes something. Any other cause may be temporary.
pub const EXITS_UNTIL_FIXED: [u8; 3] = [EXIT_WRONG_CALL, EXIT_DAMAGED, EXIT_UNUSABLE];
