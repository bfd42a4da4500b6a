//! Huge pages of the system: for the heap that a zygote shares with its children, and not for a supervisor.
//!
//! Most of what a fork costs is its copy of the page tables. A heap in pages of 2 MiB has 1/512 of the entries: fork to
//! end of a process takes 3.5 ms in place of 6.2 with an app of 150 MB, and 3.4 in place of 15.9 with a model of 200 MB
//! next to it (Linux 6.18, measured for the design of isolated slots). A child that writes copies 4 KiB all the same:
//! since Linux 5.8 the kernel splits a huge page that is shared.

use std::fs;
use std::ops::Range;

use rustix::mm::{Advice, madvise};

/// Below this a mapping has no huge page. Where they have another size, the kernel refuses, and everything stays as it is.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Has the memory of this process come in small pages. Its allocator asks for huge ones, which make a broker with millions
/// of jobs quicker; a supervisor has some hundred kilobytes in use, spread over what would be nine huge pages: 19 MB with
/// 400 slots.
pub fn avoid() {
    for memory in memory() {
        let len = memory.end - memory.start;
        if len >= HUGE_PAGE_BYTES {
            // SAFETY: it changes no bytes. A mapping that is gone by now is refused, and so is all of it by a system
            // without huge pages.
            let _ = unsafe {
                madvise(
                    std::ptr::with_exposed_provenance_mut(memory.start),
                    len,
                    Advice::LinuxNoHugepage,
                )
            };
        }
    }
}

/// Has the kernel move what this process holds in memory into huge pages. Returns the number of bytes that it did.
///
/// Chunk by chunk, as it refuses those that were never touched. A chunk of which less than half is in memory stays as it
/// is: there, a huge page would take more than it saves.
pub fn collapse_heap() -> usize {
    let chunks = memory().into_iter().flat_map(chunks);
    let collapsed = chunks.filter(|start| is_half_there(*start) && collapse(*start));
    collapsed.count() * HUGE_PAGE_BYTES
}

/// The mappings of this process that are its own.
fn memory() -> Vec<Range<usize>> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter_map(private_memory).collect()
}

/// Where a mapping is, if it is private memory of this process: `7f1c00000000-7f1c40000000 rw-p 00000000 00:00 0`.
fn private_memory(line: &str) -> Option<Range<usize>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let mode = words.next()?;
    let inode = words.nth(2)?;
    let is_heap = match words.next() {
        None | Some("[heap]") => true,
        Some(name) => name.starts_with("[anon"),
    };
    let address = |text| usize::from_str_radix(text, 16).ok();
    (mode == "rw-p" && inode == "0" && is_heap).then_some(address(start)?..address(end)?)
}

/// Where the huge pages begin that fit there.
fn chunks(memory: Range<usize>) -> impl Iterator<Item = usize> {
    let first = memory.start.next_multiple_of(HUGE_PAGE_BYTES);
    let starts = (first..memory.end).step_by(HUGE_PAGE_BYTES);
    starts.filter(move |start| memory.end - start >= HUGE_PAGE_BYTES)
}

#[cfg(target_os = "linux")]
fn is_half_there(start: usize) -> bool {
    // SAFETY: it asks for a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut pages = vec![0_u8; HUGE_PAGE_BYTES / page_bytes];
    // SAFETY: there is a byte for each page of the range. Where it is not mapped any more, the call fails.
    let told = unsafe { libc::mincore(start as *mut _, HUGE_PAGE_BYTES, pages.as_mut_ptr()) };
    let there = pages.iter().filter(|page| **page & 1 == 1).count();
    told == 0 && 2 * there >= pages.len()
}

#[cfg(target_os = "linux")]
fn collapse(start: usize) -> bool {
    /// From the kernel's `mman-common.h`, since Linux 6.1; not every C library knows it.
    const MADV_COLLAPSE: i32 = 25;
    // SAFETY: what the memory holds stays as it is, whoever uses it.
    unsafe { libc::madvise(start as *mut _, HUGE_PAGE_BYTES, MADV_COLLAPSE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_half_there(_start: usize) -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
fn collapse(_start: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_alone_is_meant() {
        let check = |line, expected| assert_eq!(private_memory(line), expected, "{line}");
        let range = Some(0x5000..0x9000);
        check("5000-9000 rw-p 00000000 00:00 0 ", range.clone());
        check("5000-9000 rw-p 00000000 00:00 0    [heap]", range.clone());
        check("5000-9000 rw-p 00000000 00:00 0  [anon: glibc]", range);
        check("5000-9000 rw-p 00000000 00:00 0  [stack]", None);
        check("5000-9000 r--p 00000000 00:00 0 ", None);
        check("5000-9000 rw-s 00000000 00:01 77  /memfd:x", None);
        check("5000-9000 rw-p 00001000 fe:00 77  /lib/libc.so.6", None);
        check(
            "7f1c000-7f1d000 r-xp 00001000 fe:00 1234 /lib/libc.so",
            None,
        );
        check("nonsense", None);
        check("", None);
    }

    #[test]
    fn only_whole_huge_pages_are_moved() {
        let starts = |memory| chunks(memory).collect::<Vec<_>>();
        assert!(starts(0x10_0000..0x30_0000).is_empty());
        assert_eq!(starts(0x10_0000..0x40_0000), [0x20_0000]);
        assert_eq!(starts(0x20_0000..0x7f_ffff), [0x20_0000, 0x40_0000]);
    }

    #[test]
    fn what_it_holds_is_the_same_afterwards() {
        let heap: Vec<u32> = (0..4 << 20).collect();
        collapse_heap();
        assert!(heap.iter().zip(0..).all(|(held, number)| *held == number));
    }
}
