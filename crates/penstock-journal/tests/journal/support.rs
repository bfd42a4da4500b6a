//! What the tests of the journal share: a small journal on a simulated disk.

use penstock_journal::{Journal, JournalOptions, OpenError, Opened, Storage, WriteError};

/// Sizes at which everything happens within a few records.
pub fn small() -> JournalOptions {
    JournalOptions {
        journal_id: [7; 16],
        segment_bytes: 8192,
        batch_bytes: 2048,
        extend_bytes: 1024,
        spares: 1,
    }
}

/// Opens the journal and returns its records, as (position, bytes).
pub fn open<S: Storage>(
    storage: &S,
    options: JournalOptions,
) -> Result<(Opened<S>, Vec<(u64, Vec<u8>)>), OpenError> {
    let mut records = Vec::new();
    let opened = Journal::open(storage.clone(), options, &mut |position, record: &[u8]| {
        records.push((position, record.to_vec()));
        Ok(())
    })?;
    Ok((opened, records))
}

/// The record that every test puts at a position; its length is the test's choice.
pub fn record(position: u64, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|index| (position as usize * 31 + index * 7) as u8)
        .collect()
}

/// Writes and syncs all that waits.
pub fn commit<S: Storage>(opened: &mut Opened<S>) -> Result<(), WriteError> {
    let mut through = None;
    while let Some(batch) = opened.journal.take_batch() {
        opened.writer.write(&batch)?;
        through = Some(batch.through);
    }
    opened.writer.sync()?;
    if let Some(through) = through {
        opened.journal.batch_synced(through);
    }
    Ok(())
}

/// Appends one record at the next position.
pub fn append<S: Storage>(opened: &mut Opened<S>, bytes: usize) -> u64 {
    let position = opened.next_position;
    opened.journal.append(position, &record(position, bytes));
    opened.next_position += 1;
    position
}

pub fn write_watermark<S: Storage>(opened: &mut Opened<S>) -> Result<(), WriteError> {
    if let Some(batch) = opened.journal.watermark_batch() {
        opened.writer.write(&batch)?;
        opened.writer.sync()?;
    }
    Ok(())
}
