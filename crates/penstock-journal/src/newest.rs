//! File next to the segments that names the newest one: it reveals a missing segment, and the end of a journal that was
//! closed cleanly.
//!
//! This file may lag behind but never runs ahead. A segment is on disk under its name before it is named here, and
//! everything before a close is written first. Two slots, each in its own page, are written in turn: a torn write or a
//! bad page leaves the previous content.

use std::io;

use crate::format::NewestSlot;
use crate::open_error::OpenError;
use crate::recovery::Found;
use crate::storage::{Storage, StoredFile};

pub(crate) const NEWEST: &str = "newest";

/// Offset of the second slot.
const SLOT_SPACING: u64 = 4096;

impl NewestSlot {
    /// Reads the file; `None`: there is none, or neither slot can be read.
    pub fn read<S: Storage>(storage: &S, found: &Found) -> Result<Option<Self>, OpenError> {
        if !found.newest {
            return Ok(None);
        }
        let file = storage.open(NEWEST);
        let file = file.map_err(OpenError::io("open", NEWEST))?;
        let mut slots = [None; 2];
        for (offset, slot) in (0..).step_by(SLOT_SPACING as usize).zip(&mut slots) {
            let mut bytes = [0; Self::BYTES];
            let read = file.read_at(offset, &mut bytes);
            read.map_err(OpenError::io("read", NEWEST))?;
            *slot = Self::decode(&bytes);
        }
        Ok(slots
            .into_iter()
            .flatten()
            .max_by_key(|slot| slot.generation))
    }
}

/// Writes the file for the process that uses the journal.
pub(crate) struct Newest<F> {
    file: F,
    slot: NewestSlot,
}

impl<F: StoredFile> Newest<F> {
    /// Takes over the file, or makes a new one and syncs its content, but not its name. `segment`: the newest so far, 0
    /// for none.
    pub fn resume<S: Storage<File = F>>(
        storage: &S,
        found: &Found,
        journal_id: [u8; 16],
        segment: u64,
    ) -> Result<Self, OpenError> {
        if let Some(slot) = NewestSlot::read(storage, found)?
            && slot.journal_id == journal_id
        {
            let file = storage.open(NEWEST);
            let file = file.map_err(OpenError::io("open", NEWEST))?;
            return Ok(Self { file, slot });
        }
        let slot = NewestSlot::new(journal_id, segment);
        Self::make(storage, found, slot).map_err(OpenError::full_or_io(storage, "write to", NEWEST))
    }

    fn make<S: Storage<File = F>>(
        storage: &S,
        found: &Found,
        slot: NewestSlot,
    ) -> io::Result<Self> {
        // A file without a slot belongs to an opening that was interrupted before it named a segment.
        let file = match found.newest {
            true => storage.open(NEWEST)?,
            false => storage.create(NEWEST)?,
        };
        let mut first = [0; SLOT_SPACING as usize];
        first[..NewestSlot::BYTES].copy_from_slice(&slot.encode());
        let second = [0; SLOT_SPACING as usize];
        file.write_at(0, &[&first, &second])?;
        file.sync()?;
        Ok(Self { file, slot })
    }

    /// Whether the file names this segment as in use.
    pub fn names(&self, segment: u64) -> bool {
        (self.slot.segment, self.slot.closed_through) == (segment, 0)
    }

    /// Writes the new state, which must then be synced. After an error, write it again.
    pub fn write(&mut self, segment: u64, closed_through: u64) -> io::Result<()> {
        let slot = NewestSlot {
            generation: self.slot.generation + 1,
            segment,
            closed_through,
            ..self.slot
        };
        let offset = slot.generation % 2 * SLOT_SPACING;
        self.file.write_at(offset, &[&slot.encode()])?;
        self.slot = slot;
        Ok(())
    }

    pub fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
}
