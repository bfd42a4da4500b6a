//! The directory of a local broker: where its files are, which users are trusted with it, and how its
//! broker says why it exits. Clients and the broker both need this, and reckon by the same rules.

mod paths;
mod trust;

pub use paths::{LocalPaths, is_nobody, open_own};

/// How a local broker exits that found another one in its place.
pub const EXIT_IN_USE: u8 = 6;
/// The command line, or a file that it names, is wrong.
pub const EXIT_WRONG_CALL: u8 = 2;
/// The journal is damaged.
pub const EXIT_DAMAGED: u8 = 65;
/// A path, a permission or the format of the journal is wrong.
pub const EXIT_UNUSABLE: u8 = 78;
/// With these a start fails until somebody fixes something. Any other reason for an exit may pass.
pub const EXITS_UNTIL_FIXED: [u8; 3] = [EXIT_WRONG_CALL, EXIT_DAMAGED, EXIT_UNUSABLE];
