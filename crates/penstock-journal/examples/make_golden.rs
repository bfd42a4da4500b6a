//! Makes small journals of many shapes, which all later programs must read: `cargo run --example make_golden --
//! crates/penstock-journal/tests/golden`. They are written in this program's format, into a directory of that name. Run
//! it once for each new format and commit the result. `tests/journal/golden.rs` reads it.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_journal::{DiskStorage, FORMAT_VERSION, Journal, JournalOptions, OpenedJournal};

/// Maker of a journal, step by step.
struct Maker {
    path: PathBuf,
    segment_bytes: u64,
    /// Open journal; `None`: no process has it open.
    opened: Option<OpenedJournal<DiskStorage>>,
}

impl Maker {
    fn open(&mut self) {
        self.opened = None;
        let storage = DiskStorage::open(&self.path).expect("a directory");
        let options = JournalOptions {
            journal_id: *b"golden journal..",
            segment_bytes: self.segment_bytes,
            batch_bytes: 512,
            opening_bytes: self.segment_bytes,
            spares: 1,
            ..JournalOptions::default()
        };
        let opened = Journal::open(storage, options, &mut |_| Ok(()));
        self.opened = Some(opened.expect("it opens"));
    }

    fn opened(&mut self) -> &mut OpenedJournal<DiskStorage> {
        self.opened.as_mut().expect("it is open")
    }

    fn append(&mut self, bytes: usize) {
        let opened = self.opened();
        let position = opened.next_position;
        let letters = (0..bytes).map(|index| b'a' + ((position as usize + index) % 26) as u8);
        opened
            .journal
            .append(position, &letters.collect::<Vec<u8>>());
        opened.next_position += 1;
    }

    /// Writes at most this many batches.
    fn write(&mut self, batches: usize) {
        let opened = self.opened();
        for _ in 0..batches {
            let Some(batch) = opened.journal.take_batch() else {
                break;
            };
            opened.writer.write(&batch).expect("the disk takes it");
        }
    }

    fn commit(&mut self, sizes: &[usize]) {
        for bytes in sizes {
            self.append(*bytes);
        }
        self.write(usize::MAX);
        let opened = self.opened();
        opened.writer.sync().expect("the disk keeps it");
        opened.journal.batch_synced(opened.next_position - 1);
    }

    fn watermark(&mut self) {
        let opened = self.opened();
        let batch = opened.journal.watermark_batch().expect("one is owed");
        opened.writer.write(&batch).expect("the disk takes it");
        opened.writer.sync().expect("the disk keeps it");
    }

    /// Makes room, from the next opening on, for several batches and their proofs.
    fn open_with_room(&mut self) {
        self.segment_bytes = 5 * 4096;
        self.open();
    }

    fn close(&mut self) {
        let opened = self.opened();
        opened.writer.close().expect("the disk keeps it");
        self.opened = None;
    }

    fn drop_oldest(&mut self) {
        self.opened().journal.drop_oldest();
        self.commit(&[]);
    }

    /// Leaves the end of the newest segment like a torn write.
    fn tear(&mut self, from_end: usize) {
        self.opened = None;
        let mut segments: Vec<PathBuf> = files(&self.path);
        segments.retain(|path| path.extension().is_some_and(|kind| kind == "segment"));
        let newest = segments.last().expect("there is one");
        let mut bytes = fs::read(newest).expect("it can be read");
        let used = bytes
            .iter()
            .rposition(|byte| *byte != 0)
            .expect("not empty")
            + 1;
        bytes[used - from_end..].fill(0);
        fs::write(newest, bytes).expect("it can be written");
    }
}

fn files(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).expect("a directory");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    files
}

type GoldenShape = (&'static str, fn(&mut Maker));

const SHAPES: &[GoldenShape] = &[
    ("empty", |_| {}),
    ("one-record", |maker| maker.commit(&[100])),
    ("one-segment", |maker| {
        maker.commit(&[0, 1, 64]);
        maker.commit(&[200]);
        maker.watermark();
    }),
    ("several-segments", |maker| {
        for bytes in [300, 400, 10, 450, 0, 350] {
            maker.commit(&[bytes, 5]);
        }
        maker.watermark();
    }),
    ("a-long-record-in-parts", |maker| {
        maker.commit(&[40]);
        maker.commit(&[3000]);
        maker.commit(&[50]);
    }),
    ("unproven-tail", |maker| {
        maker.commit(&[100, 100]);
        maker.commit(&[120]);
    }),
    ("torn-tail", |maker| {
        maker.commit(&[100]);
        maker.commit(&[120]);
        maker.tear(60);
    }),
    ("torn-long-record", |maker| {
        maker.commit(&[100]);
        maker.append(2000);
        maker.write(3);
    }),
    ("position-used-again-after-a-torn-long-record", |maker| {
        maker.commit(&[100]);
        maker.append(2000);
        maker.write(3);
        maker.open();
        maker.commit(&[70]);
        maker.commit(&[80]);
    }),
    ("several-epochs", |maker| {
        for bytes in [30, 40, 50] {
            maker.commit(&[bytes]);
            maker.watermark();
            maker.open();
        }
    }),
    ("written-again-after-a-crash", |maker| {
        maker.commit(&[30]);
        maker.commit(&[900, 60]);
        maker.open();
        maker.commit(&[70]);
    }),
    ("dropped-segments-and-a-spare", |maker| {
        for bytes in [400, 400, 400, 400, 400, 400] {
            maker.commit(&[bytes]);
        }
        maker.drop_oldest();
        maker.drop_oldest();
        maker.commit(&[20]);
    }),
    ("a-recycled-segment-with-ghosts", |maker| {
        for _ in 0..3 {
            for bytes in [430, 20, 430] {
                maker.commit(&[bytes]);
            }
            maker.drop_oldest();
        }
        maker.commit(&[33]);
    }),
    ("a-long-record-whose-beginning-was-dropped", |maker| {
        maker.commit(&[100]);
        maker.commit(&[3000]);
        maker.commit(&[50]);
        maker.drop_oldest();
        maker.commit(&[60]);
    }),
    ("proofs-at-the-next-page", |maker| {
        maker.open_with_room();
        for bytes in [100, 300, 50] {
            maker.commit(&[bytes]);
            maker.watermark();
        }
        maker.commit(&[20]);
    }),
    ("closed-in-order", |maker| {
        maker.open_with_room();
        maker.commit(&[100]);
        maker.commit(&[300]);
        maker.watermark();
        maker.close();
    }),
    ("closed-in-order-without-a-proof", |maker| {
        maker.commit(&[100]);
        maker.commit(&[300]);
        maker.close();
    }),
    ("closed-and-opened-again", |maker| {
        maker.commit(&[100]);
        maker.watermark();
        maker.close();
        maker.open_with_room();
        maker.commit(&[70]);
    }),
];

fn main() {
    let root = std::env::args().nth(1).expect("where to make them");
    let root = Path::new(&root).join(format!("format-{FORMAT_VERSION}"));
    for (name, make) in SHAPES {
        let shape = root.join(name);
        let mut maker = Maker {
            path: shape.join("journal"),
            segment_bytes: 4096 + 1024,
            opened: None,
        };
        maker.open();
        make(&mut maker);
        maker.opened = None;

        // Records that a reader must find, read by this program in a copy: opening changes a journal.
        let copy =
            std::env::temp_dir().join(format!("penstock-golden-{}-{name}", std::process::id()));
        fs::create_dir_all(&copy).expect("a directory for a copy");
        for file in files(&maker.path) {
            let name = file.file_name().expect("it has a name");
            fs::copy(&file, copy.join(name)).expect("it can be copied");
        }
        let mut expected = String::new();
        let storage = DiskStorage::open(&copy).expect("the copy");
        let opened = Journal::open(storage, JournalOptions::default(), &mut |record| {
            let checksum = crc32c::crc32c(record.bytes);
            let (position, length) = (record.position, record.bytes.len());
            expected.push_str(&format!("{position} {length} {checksum:08x}\n"));
            Ok(())
        });
        let report = opened.expect("it opens").report;
        expected.push_str(&format!(
            "torn batches {}, written again {}\n",
            report.torn_batches, report.rewritten_records
        ));
        fs::remove_dir_all(&copy).expect("the copy is no longer needed");
        fs::write(shape.join("expected.txt"), expected).expect("it can be written");
    }
}
