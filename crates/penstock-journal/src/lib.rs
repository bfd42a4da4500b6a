//! Penstock's durable file: segments of batches of records, on disk before anything relies on them.
//!
//! [`Journal`] gathers records on the core's thread, [`Writer`] writes and syncs them on its own, [`JournalReader`]
//! reads single ones back, [`Journal::open`] recovers what a crash left, [`fsck()`] checks without changing anything.
//! The journal does not know what a record means: it keeps bytes, numbered without gaps.
//!
//! `docs/internals/journal.md` draws the bytes on disk.

#[cfg(not(unix))]
compile_error!("Penstock's journal needs Linux or macOS");

mod format;
mod fsck;
#[cfg(feature = "hostile")]
pub mod hostile;
mod journal;
mod marks;
mod newest;
mod open;
mod open_error;
mod reader;
mod recovery;
mod repair;
mod reserve;
mod salvage;
mod scan;
pub mod sim;
mod spares;
mod storage;
mod upgrade;
mod writer;

pub use format::{FORMAT_VERSION, KNOWN_FEATURES};
pub use fsck::{Damage, FsckReport, SegmentReport, fsck};
pub use journal::{Batch, Journal, JournalOptions};
pub use marks::ReadAt;
pub use open::OpenedJournal;
pub use open_error::OpenError;
pub use reader::{JournalReader, ReadError};
pub use recovery::{NotReplayed, RecoveryReport, Replay, Replayed};
pub use repair::{RepairError, RepairReport, repair};
pub use salvage::Lost;
pub use spares::{Spares, is_full};
pub use storage::{DiskStorage, Storage, StoredFile};
pub use upgrade::{UPGRADE_COMMAND, Upgraded, upgrade};
pub use writer::{WriteError, Writer};
