//! Damages the journal's files in any way that a disk could.

use std::collections::BTreeMap;

use arbitrary::{Result, Unstructured};
use penstock_journal::sim::SimStorage;
use penstock_journal::{Journal, JournalOptions, OpenedJournal, Storage, fsck, hostile};

type Records = BTreeMap<u64, Vec<u8>>;

/// Writes a journal, changes its files and opens it, which must end in records or in an error. Unless the
/// checksums were fixed up, it must show no record that was not written, and no record without all its
/// predecessors. The next opening must show the same records, with the new ones.
pub fn journal(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let storage = SimStorage::new();
    let written = write(&storage, &mut data).unwrap_or_default();
    let storage = storage.kill();
    let damage = change(&storage, &mut data).unwrap_or_default();
    // Success or failure: either may report what it finds.
    let _report = fsck(&storage);

    let Ok((mut opened, found)) = open(&storage) else {
        assert!(damage.any, "a journal that nobody touched does not open");
        return;
    };
    if !damage.forged {
        let prefix: Records = written.clone().into_iter().take(found.len()).collect();
        assert!(found == prefix, "what was found is not what was written");
        assert!(damage.any || found == written, "some of it is missing");
    }
    let mut expected = found;
    let position = opened.next_position;
    expected.insert(position, b"after".to_vec());
    opened.journal.append(position, b"after");
    while let Some(batch) = opened.journal.take_batch() {
        opened.writer.write(&batch).expect("the disk works");
    }
    opened.writer.sync().expect("the disk works");
    opened.journal.batch_synced(position);
    drop(opened);
    let (_, again) = open(&storage.kill()).expect("what was opened once opens again");
    assert!(again == expected, "another opening shows something else");
}

/// Returns sizes with which everything happens within a few records.
fn options() -> JournalOptions {
    JournalOptions {
        journal_id: [7; 16],
        segment_bytes: 4096 + 2048,
        batch_bytes: 1024,
        opening_bytes: 4096 + 2048,
        spares: 1,
        ..JournalOptions::default()
    }
}

fn open(
    storage: &SimStorage,
) -> std::result::Result<(OpenedJournal<SimStorage>, Records), penstock_journal::OpenError> {
    let mut records = Records::new();
    let opened = Journal::open(storage.clone(), options(), &mut |record| {
        records.insert(record.position, record.bytes.to_vec());
        Ok(())
    })?;
    Ok((opened, records))
}

fn write(storage: &SimStorage, data: &mut Unstructured<'_>) -> Result<Records> {
    let (mut opened, mut written) = open(storage).expect("a new journal opens");
    for _ in 0..data.int_in_range(0..=24)? {
        let length = match data.ratio(1, 8)? {
            true => data.int_in_range(0..=5_000)?,
            false => data.int_in_range(0..=300)?,
        };
        let position = opened.next_position;
        let record: Vec<u8> = (0..length).map(|index| (position + index) as u8).collect();
        opened.journal.append(position, &record);
        opened.next_position += 1;
        written.insert(position, record);
        if data.ratio(2, 3)? {
            finish(&mut opened);
        }
    }
    finish(&mut opened);
    Ok(written)
}

fn finish(opened: &mut OpenedJournal<SimStorage>) {
    while let Some(batch) = opened.journal.take_batch() {
        opened.writer.write(&batch).expect("the disk works");
    }
    opened.writer.sync().expect("the disk works");
    opened.journal.batch_synced(opened.next_position - 1);
}

#[derive(Default)]
struct FileDamage {
    any: bool,
    /// Whether the checksums were fixed up afterwards.
    forged: bool,
}

fn change(storage: &SimStorage, data: &mut Unstructured<'_>) -> Result<FileDamage> {
    let names = storage.list().expect("the disk works");
    let mut damage = FileDamage::default();
    for _ in 0..data.int_in_range(0..=8)? {
        let name = data.choose(&names)?;
        let before = storage.contents(name).expect("it was listed");
        let mut bytes = before.clone();
        let near = |data: &mut Unstructured<'_>, length: usize| -> Result<usize> {
            // Most of a file is after its first page.
            match data.ratio(1, 4)? {
                true => data.int_in_range(0..=length),
                false => data.int_in_range(4096.min(length)..=length),
            }
        };
        let at = near(data, bytes.len())?;
        match data.int_in_range(0..=5)? {
            0 => bytes.truncate(at),
            1 => {
                let length = data.int_in_range(1..=32.min(bytes.len().max(1)))?;
                let new = data.bytes(length.min(data.len()))?;
                let room = bytes.len() - at;
                bytes[at..][..new.len().min(room)].copy_from_slice(&new[..new.len().min(room)]);
            }
            2 => {
                let end = near(data, bytes.len())?.max(at);
                bytes[at..end].fill(0);
            }
            3 => bytes.resize(
                bytes.len() + data.int_in_range(0..=4096)?,
                data.arbitrary()?,
            ),
            // A batch from another position, or from another file.
            4 => {
                let source = storage
                    .contents(data.choose(&names)?)
                    .expect("it was listed");
                let from = near(data, source.len())? / 64 * 64;
                let length = data.int_in_range(0..=32_usize)? * 64;
                let piece = &source[from..][..length.min(source.len() - from)];
                let at = at / 64 * 64;
                let room = bytes.len() - at;
                bytes[at..][..piece.len().min(room)]
                    .copy_from_slice(&piece[..piece.len().min(room)]);
            }
            _ => {
                bytes = storage
                    .contents(data.choose(&names)?)
                    .expect("it was listed")
            }
        }
        if data.ratio(1, 2)? {
            damage.forged = true;
            hostile::set_checksums_right(&mut bytes);
        }
        if bytes != before {
            damage.any = true;
            storage.corrupt(name, bytes);
        }
    }
    Ok(damage)
}
