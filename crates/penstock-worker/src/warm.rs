//! Pages that an isolated job is about to write to, copied before there is a job.
//!
//! A fork shares its memory until it writes, and each first write to a page is a fault and a copy. With an app of 300
//! mapped classes and pandas, a job of 2.9 ms dirties 1,600 pages, mostly by counting references, and takes 7.6 ms in a
//! fresh fork. Jobs of one app dirty much the same pages. So a process that has run a job notes them, and a process that
//! waits for a job copies them ahead of it.
//!
//! This saves time, but no work: copying the pages in advance takes a little more CPU than the faults. So only a process
//! that is forked while half of the slots are idle does it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::huge_pages::{memory, page_bytes};
use crate::page::Mapping;

const LIST_BYTES: usize = 64 * 1024;
const HEAD_BYTES: usize = 64;
const MAX_RUNS: usize = (LIST_BYTES - HEAD_BYTES) / size_of::<u64>();
/// Maximum bytes that a waiting process copies for its job.
const MAX_BYTES: u64 = 16 << 20;
/// Maximum size of a mapping that is examined, since there are 8 bytes to read for each of its pages. Larger ones are
/// mostly empty.
const MAX_MAPPING_BYTES: usize = 4 << 30;
/// An entry is the number of a run's first page times this, plus the number of its pages.
const RUN_PAGES: u64 = 1 << 12;
/// Pages between two runs that are copied with them: a call costs about as much.
const GAP_PAGES: u64 = 2;
/// Interval, in jobs, of noting the pages. Before that, they are noted after 1, 2, 4, 8 ... jobs.
const NOTED_OF: u32 = 256;

/// Pages that jobs write to; shared by the zygote's children.
///
/// There are two lists: one that children read, and one that is being written. If a child reads a mixture of both, no
/// harm is done: each entry names pages, and copying pages of its own memory changes no byte that a process sees.
pub struct PageNotes {
    shared: Mapping,
}

impl PageNotes {
    /// Maps the memory of the list. Call it before the forks, which share it.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            shared: Mapping::anonymous(2 * LIST_BYTES)?,
        })
    }

    fn jobs(&self) -> &AtomicU32 {
        self.shared.at(0)
    }

    /// Returns the word that says which of the two lists is read.
    fn newest(&self) -> &AtomicU32 {
        self.shared.at(size_of::<u32>())
    }

    /// Number of entries of a list.
    fn count(&self, list: u32) -> &AtomicU32 {
        self.shared
            .at(list as usize * LIST_BYTES + 2 * size_of::<u32>())
    }

    fn run(&self, list: u32, index: usize) -> &AtomicU64 {
        let offset = HEAD_BYTES + index * size_of::<u64>();
        self.shared.at(list as usize * LIST_BYTES + offset)
    }

    fn newest_list(&self) -> u32 {
        self.newest().load(Ordering::Acquire) & 1
    }

    /// Notes that a job has ended in this process, and, after some jobs, which pages it has written to.
    pub fn job_ended(&self) {
        let jobs = self.jobs().fetch_add(1, Ordering::Relaxed) + 1;
        if jobs.is_power_of_two() && jobs < NOTED_OF || jobs.is_multiple_of(NOTED_OF) {
            self.note(MAX_BYTES);
        }
    }

    fn note(&self, max_bytes: u64) {
        let page = page_bytes() as u64;
        let mut runs = PageRuns::default();
        let Ok(map) = File::open("/proc/self/pagemap") else {
            return;
        };
        for range in memory() {
            if range.len() > MAX_MAPPING_BYTES {
                continue;
            }
            let first = range.start as u64 / page;
            let mut entries = vec![0; range.len() / page as usize * size_of::<u64>()];
            if map.read_exact_at(&mut entries, first * 8).is_err() {
                continue;
            }
            let entries = entries.as_chunks().0.iter();
            for (number, entry) in (first..).zip(entries) {
                if is_own(u64::from_ne_bytes(*entry)) {
                    runs.add(number);
                }
            }
        }
        let mut bytes = 0;
        let fits = runs.0.iter().take(MAX_RUNS).take_while(|(_, pages)| {
            bytes += pages * page;
            bytes <= max_bytes
        });
        let list = 1 - self.newest_list();
        let mut count = 0;
        for (first, pages) in fits {
            let run = first * RUN_PAGES + pages;
            self.run(list, count as usize).store(run, Ordering::Relaxed);
            count += 1;
        }
        self.count(list).store(count, Ordering::Relaxed);
        self.newest().store(list, Ordering::Release);
    }

    /// Copies the noted pages. Returns their number.
    pub fn copy(&self) -> u64 {
        let page = page_bytes() as u64;
        let list = self.newest_list();
        let count = self.count(list).load(Ordering::Relaxed) as usize;
        let mut copied = 0;
        for index in 0..count.min(MAX_RUNS) {
            let run = self.run(list, index).load(Ordering::Relaxed);
            let (first, pages) = (run / RUN_PAGES, run % RUN_PAGES);
            copied += match copy(first * page, pages * page) {
                true => pages,
                false => 0,
            };
        }
        copied
    }
}

/// Runs of neighbouring pages: number of the first page, and number of pages.
#[derive(Debug, Default)]
struct PageRuns(Vec<(u64, u64)>);

impl PageRuns {
    fn add(&mut self, number: u64) {
        if let Some((first, pages)) = self.0.last_mut()
            && number <= *first + *pages + GAP_PAGES
            && number - *first + 1 < RUN_PAGES
        {
            *pages = number - *first + 1;
        } else {
            self.0.push((number, 1));
        }
    }
}

/// Whether an entry of `/proc/self/pagemap` names a page that is in memory, and in this process alone.
fn is_own(entry: u64) -> bool {
    const HERE: u64 = 1 << 63;
    const EXCLUSIVE: u64 = 1 << 56;
    const OF_FILE: u64 = 1 << 61;
    entry & (HERE | EXCLUSIVE | OF_FILE) == HERE | EXCLUSIVE
}

#[cfg(target_os = "linux")]
fn copy(start: u64, len: u64) -> bool {
    /// From the kernel's `mman-common.h`, since Linux 5.14; not every C library knows it.
    const MADV_POPULATE_WRITE: i32 = 23;
    // SAFETY: it changes no bytes. Unmapped or read-only memory is refused.
    unsafe { libc::madvise(start as *mut _, len as usize, MADV_POPULATE_WRITE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn copy(_start: u64, _len: u64) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_near_are_one_run() {
        let mut runs = PageRuns::default();
        for number in [3, 4, 7, 11, 12] {
            runs.add(number);
        }
        assert_eq!(runs.0, [(3, 5), (11, 2)]);
        for number in 0..2 * RUN_PAGES {
            runs.add(100 + number);
        }
        assert!(runs.0.iter().all(|(_, pages)| *pages < RUN_PAGES));
        let last = runs.0.last().unwrap();
        assert_eq!(last.0 + last.1, 100 + 2 * RUN_PAGES);
    }

    #[test]
    fn a_process_notes_the_pages_that_it_has_written_to_and_copying_changes_nothing() {
        let written = PageNotes::new().unwrap();
        let page = page_bytes();
        // Larger than any allocator keeps at hand, so the memory is fresh and untouched.
        let mut heap = vec![0_u8; 256 << 20];
        let start = heap.as_ptr().align_offset(page);
        heap[start + 8 * page] = 7;
        // Other tests run in this process, and write to more than a child would copy.
        written.note(u64::MAX);
        let list = written.newest_list();
        let count = written.count(list).load(Ordering::Relaxed) as usize;
        let runs: Vec<_> = (0..count)
            .map(|index| written.run(list, index).load(Ordering::Relaxed))
            .map(|run| (run / RUN_PAGES, run % RUN_PAGES))
            .collect();
        let noted = |index: usize| {
            let number = (heap[start..].as_ptr() as usize / page + index) as u64;
            runs.iter()
                .any(|(first, pages)| (*first..first + pages).contains(&number))
        };
        assert!(noted(8));
        assert!(!noted(40_000), "never touched");
        assert!(written.copy() > 0);
        assert_eq!(heap[start + 8 * page], 7);
        // Pages that are gone, or were never there, are passed over.
        written.run(list, 0).store(RUN_PAGES + 1, Ordering::Relaxed);
        drop(heap);
        written.copy();
    }
}
