//! Shared support of the journal's tests: a small journal, and a user who remembers its promises.

use std::collections::BTreeMap;

use penstock_journal::sim::SimStorage;
use penstock_journal::{
    Batch, Journal, JournalOptions, OpenError, OpenedJournal, RecoveryReport, Storage, WriteError,
};

/// Sizes at which everything happens within a few records.
pub fn small() -> JournalOptions {
    JournalOptions {
        journal_id: [7; 16],
        segment_bytes: 4096 + 2048,
        batch_bytes: 1024,
        opening_bytes: 4096 + 2048,
        spares: 1,
        ..JournalOptions::default()
    }
}

/// Sizes at which several batches, and their proofs, fit into a segment.
pub fn roomy() -> JournalOptions {
    JournalOptions {
        segment_bytes: 5 * 4096,
        opening_bytes: 5 * 4096,
        ..small()
    }
}

/// Records that a journal showed when it was opened, by position.
pub type ReplayedRecords = BTreeMap<u64, Vec<u8>>;

pub fn open<S: Storage>(
    storage: &S,
    options: JournalOptions,
) -> Result<(OpenedJournal<S>, ReplayedRecords), OpenError> {
    let mut records = ReplayedRecords::new();
    let opened = Journal::open(storage.clone(), options, &mut |record| {
        records.insert(record.position, record.bytes.to_vec());
        Ok(())
    })?;
    Ok((opened, records))
}

/// Returns what opening finds, without the means to write.
pub fn recovered<S: Storage>(storage: &S) -> Result<(RecoveryReport, ReplayedRecords), OpenError> {
    open(storage, small()).map(|(opened, records)| (opened.report, records))
}

/// User of a journal who remembers its promises.
pub struct User<S: Storage> {
    pub opened: OpenedJournal<S>,
    pub options: JournalOptions,
    /// Last appended record of each position.
    pub appended: ReplayedRecords,
    /// Last position that is synced and may have been confirmed.
    pub confirmed: u64,
    /// First position that must still be there, and the lowest that may be the first.
    pub dropped_before: u64,
    pub drop_asked_before: u64,
    /// Last position appended when the drop was requested: nothing may be dropped without it.
    carried_through: u64,
    distinct: u64,
    /// Batch that a full disk has not accepted yet.
    unwritten: Option<Batch>,
}

impl<S: Storage> User<S> {
    pub fn open(storage: &S) -> Result<Self, OpenError> {
        Self::open_with(storage, small())
    }

    pub fn open_with(storage: &S, options: JournalOptions) -> Result<Self, OpenError> {
        let (opened, appended) = open(storage, options.clone())?;
        let first = appended
            .first_key_value()
            .map_or(opened.next_position, |(first, _)| *first);
        let mut user = Self {
            opened,
            options,
            appended: ReplayedRecords::new(),
            confirmed: 0,
            dropped_before: 0,
            drop_asked_before: 0,
            carried_through: 0,
            distinct: 0,
            unwritten: None,
        };
        user.takes_for_granted(first, appended);
        Ok(user)
    }

    /// Counts the records of an opening as confirmed: they may be served at once, so none may be taken back.
    fn takes_for_granted(&mut self, first: u64, records: ReplayedRecords) {
        self.confirmed = self.opened.next_position - 1;
        self.dropped_before = first;
        self.drop_asked_before = first;
        self.appended = records;
    }

    /// Lets another process take over; this one's lock must be released.
    pub fn reopen(&mut self, storage: &S) -> Result<(), OpenError> {
        let (distinct, options) = (self.distinct, self.options.clone());
        *self = Self::open_with(storage, options)?;
        self.distinct = distinct;
        Ok(())
    }

    /// Appends a record unlike all earlier ones.
    pub fn append(&mut self, bytes: usize) -> u64 {
        self.distinct += 1;
        let position = self.opened.next_position;
        let mark = (position << 32 | self.distinct).to_le_bytes();
        let record: Vec<u8> = mark.iter().copied().cycle().take(bytes).collect();
        self.opened.journal.append(position, &record);
        self.opened.next_position += 1;
        self.appended.insert(position, record);
        position
    }

    pub fn write(&mut self) -> Result<(), WriteError> {
        while let Some(batch) = self.next_batch() {
            if let Err(error) = self.write_batch(&batch) {
                self.unwritten = Some(batch);
                return Err(error);
            }
        }
        Ok(())
    }

    fn next_batch(&mut self) -> Option<Batch> {
        let unwritten = self.unwritten.take();
        unwritten.or_else(|| self.opened.journal.take_batch())
    }

    pub fn write_batch(&mut self, batch: &Batch) -> Result<(), WriteError> {
        self.opened.writer.write(batch)?;
        self.prepare_spares();
        Ok(())
    }

    /// Works as another thread would.
    pub fn prepare_spares(&self) {
        let spares = self.opened.writer.spares();
        while spares.wanted() && spares.prepare().is_ok() {}
    }

    /// Writes and syncs all waiting records.
    pub fn commit(&mut self) -> Result<(), WriteError> {
        self.write()?;
        self.opened.writer.sync()?;
        self.opened
            .journal
            .batch_synced(self.opened.next_position - 1);
        self.confirmed = self.opened.next_position - 1;
        self.dropped_before = self.drop_asked_before;
        Ok(())
    }

    pub fn append_and_commit(&mut self, bytes: usize) {
        self.append(bytes);
        self.commit().expect("nothing was planned to fail");
    }

    pub fn write_watermark(&mut self) -> Result<(), WriteError> {
        match self.opened.journal.watermark_batch() {
            Some(batch) => {
                if let Err(error) = self.write_batch(&batch) {
                    self.unwritten = Some(batch);
                    return Err(error);
                }
                self.opened.writer.sync()
            }
            None => Ok(()),
        }
    }

    /// Closes the journal like a broker that stops cleanly.
    pub fn close(&mut self) -> Result<(), WriteError> {
        self.commit()?;
        self.write_watermark()?;
        self.opened.writer.close()
    }

    pub fn drop_oldest(&mut self) {
        if let Some((_, after)) = self.opened.journal.oldest_segment() {
            self.drop_asked_before = after;
            self.carried_through = self.opened.next_position - 1;
            self.opened.journal.drop_oldest();
        }
    }

    /// Checks that `found` keeps every promise: all confirmed records, complete and unchanged, and of the others only
    /// the beginning.
    #[track_caller]
    pub fn expects(&self, found: &ReplayedRecords) {
        let first = found.first_key_value().map(|(first, _)| *first);
        let last = found
            .last_key_value()
            .map_or(self.confirmed, |(last, _)| *last);
        assert!(
            last >= self.confirmed,
            "confirmed {}, found up to {last}",
            self.confirmed
        );
        if let Some(first) = first {
            assert_eq!(last + 1 - first, found.len() as u64, "there are gaps");
            assert!(
                first <= self.drop_asked_before,
                "{first} is the first, but nobody dropped so much"
            );
            assert!(
                first >= self.dropped_before,
                "{first} came back after it was dropped"
            );
        } else {
            assert!(
                self.drop_asked_before > self.confirmed,
                "everything is gone"
            );
        }
        if first.is_some_and(|first| first > self.dropped_before) {
            let carried = self.carried_through;
            assert!(
                last >= carried,
                "dropped before {carried} was carried; found up to {last}"
            );
        }
        for (position, record) in found {
            assert_eq!(
                Some(record),
                self.appended.get(position),
                "record {position}"
            );
        }
    }
}

/// Makes a journal of a few segments. The last record is synced, but no watermark proves it.
pub fn golden() -> (SimStorage, ReplayedRecords) {
    let storage = SimStorage::new();
    let mut user = User::open(&storage).unwrap();
    for bytes in [100, 700, 20, 2500, 300, 0, 600, 80] {
        user.append_and_commit(bytes);
    }
    let appended = user.appended.clone();
    (storage.kill(), appended)
}

/// Whether to run everything, as `make rot` does; otherwise a test takes a second.
pub fn is_long_run() -> bool {
    std::env::var_os("PENSTOCK_LONG").is_some()
}
