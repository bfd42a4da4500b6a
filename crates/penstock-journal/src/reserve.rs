//! File that only occupies space, and is removed when the disk is full.
//!
//! The blocks of a spare belong to the journal, and batches need no others. But a spare becomes a segment by a rename,
//! and XFS may need a block for the new name. Btrfs and ZFS never overwrite a block: every write takes new blocks
//! before it frees old ones, if only for their tree of blocks. So a full disk can stop the journal however many spares
//! it has. Removing a file always succeeds. The freed space lets workers drain the queues, which frees more.

use std::io;

use crate::spares::is_full;
use crate::storage::{Storage, StoredFile};

const RESERVE: &str = "room.reserve";
/// Bytes written at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Removes the reserve if there is one. Returns whether that made room.
pub(crate) fn give_up_reserve<S: Storage>(storage: &S) -> io::Result<bool> {
    match storage.remove(RESERVE) {
        // The blocks are free once the removal is on disk.
        Ok(()) => storage.sync_directory().map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Runs a step of an opening, and makes room for it if needed: first by the reserve, then by spares.
pub(crate) fn making_room<S: Storage>(
    storage: &S,
    spares: &mut Vec<String>,
    step: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    loop {
        match step() {
            Err(error) if is_full(&error) => {
                if !give_up_reserve(storage)? {
                    storage.remove(&spares.pop().ok_or(error)?)?;
                    storage.sync_directory()?;
                }
            }
            outcome => return outcome,
        }
    }
}

/// Whether an earlier process left a reserve of this size. A reserve of another size is removed.
pub(crate) fn is_there<S: Storage>(storage: &S, bytes: u64) -> io::Result<bool> {
    let found = match storage.open(RESERVE) {
        Ok(file) => file.size()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if found != bytes {
        storage.remove(RESERVE)?;
    }
    Ok(found == bytes)
}

/// Writes and syncs the reserve. Leaves none after an error.
pub(crate) fn make<S: Storage>(storage: &S, bytes: u64) -> io::Result<()> {
    let file = storage.create(RESERVE)?;
    let written = fill_with_noise(&file, bytes).and_then(|()| file.sync());
    // If it can't be removed, the next opening notices its wrong size.
    written.inspect_err(|_| drop(storage.remove(RESERVE)))
}

/// Fills a file with noise: zeros would occupy no space where the file system compresses.
fn fill_with_noise<F: StoredFile>(file: &F, bytes: u64) -> io::Result<()> {
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let mut piece = Vec::with_capacity(PIECE_BYTES);
    let mut filled = 0;
    while filled < bytes {
        piece.clear();
        while piece.len() < PIECE_BYTES {
            // Xorshift.
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            piece.extend_from_slice(&noise.to_le_bytes());
        }
        let length = (bytes - filled).min(PIECE_BYTES as u64);
        file.write_at(filled, &[&piece[..length as usize]])?;
        filled += length;
    }
    Ok(())
}

/// Fails before anything is tried if there is too little room: filling a file to find out would take the room from all
/// others, including the journal's own writes.
pub(crate) fn check_free<S: Storage>(storage: &S, needed: u64) -> io::Result<()> {
    match storage.free_bytes() {
        Some(free) if free < needed => Err(io::ErrorKind::StorageFull.into()),
        _ => Ok(()),
    }
}
