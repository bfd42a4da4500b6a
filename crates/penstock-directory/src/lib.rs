//! The directory of a local broker: its files, the users that are trusted with it, and the codes with which its
//! broker exits. Clients and the broker both need this, and reckon by the same rules.

mod paths;
mod trust;

pub use paths::{LocalPaths, is_nobody, open_own};

/// Exit code of a local broker that found another one in its place.
pub const EXIT_IN_USE: u8 = 6;
/// Exit code when the command line, or a file that it names, is wrong.
pub const EXIT_WRONG_CALL: u8 = 2;
/// Exit code when the journal is damaged.
pub const EXIT_DAMAGED: u8 = 65;
/// Exit code when a path, a permission or the format of the journal is wrong.
pub const EXIT_UNUSABLE: u8 = 78;
/// Exit codes of a start that fails until somebody fixes something. Any other reason for an exit may pass.
pub const EXITS_UNTIL_FIXED: [u8; 3] = [EXIT_WRONG_CALL, EXIT_DAMAGED, EXIT_UNUSABLE];
