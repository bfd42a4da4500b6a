//! The memory that a zygote shares with its children, in large pages.
//!
//! Most of what a fork costs is its copy of the page tables. A heap in pages of 2 MiB has 1/512 of the entries: fork to
//! end of a process takes 3.5 ms in place of 6.2 with an app of 150 MB, and 3.4 in place of 15.9 with a model of 200 MB
//! next to it (Linux 6.18, measured for the design of isolated slots). A child that writes copies 4 KiB all the same:
//! since Linux 5.8 the kernel splits a large page that is shared.

use std::fs;
use std::ops::Range;

/// Size of a large page. Where it is another one, the kernel refuses, and everything stays as it is.
const LARGE_BYTES: usize = 2 << 20;

/// Has the kernel move what this process holds in memory into large pages. Returns the number of bytes that it did.
///
/// Chunk by chunk, as it refuses those that were never touched. A chunk of which less than half is in memory stays as it
/// is: there, a large page would take more than it saves.
pub fn use_large_pages() -> usize {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else {
        return 0;
    };
    let moved = maps.lines().filter_map(private_memory).flat_map(chunks);
    moved
        .filter(|start| is_half_there(*start) && collapse(*start))
        .count()
        * LARGE_BYTES
}

/// The addresses of a line of `/proc/self/maps`, if that is memory of this process alone, and of no file.
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

/// Where the large pages begin that fit there.
fn chunks(memory: Range<usize>) -> impl Iterator<Item = usize> {
    let first = memory.start.next_multiple_of(LARGE_BYTES);
    let starts = (first..memory.end).step_by(LARGE_BYTES);
    starts.filter(move |start| memory.end - start >= LARGE_BYTES)
}

#[cfg(target_os = "linux")]
fn is_half_there(start: usize) -> bool {
    // SAFETY: it asks for a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut pages = vec![0_u8; LARGE_BYTES / page_bytes];
    // SAFETY: there is a byte for each page of the range. Where it is not mapped any more, the call fails.
    let told = unsafe { libc::mincore(start as *mut _, LARGE_BYTES, pages.as_mut_ptr()) };
    let there = pages.iter().filter(|page| **page & 1 == 1).count();
    told == 0 && 2 * there >= pages.len()
}

#[cfg(target_os = "linux")]
fn collapse(start: usize) -> bool {
    /// Of the kernel's `mman-common.h`, since Linux 6.1; not every C library knows it.
    const MADV_COLLAPSE: i32 = 25;
    // SAFETY: what the memory holds stays as it is, whoever uses it.
    unsafe { libc::madvise(start as *mut _, LARGE_BYTES, MADV_COLLAPSE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_half_there(_start: usize) -> bool {
    false
}

#[cfg(not(target_os = "linux"))]
fn collapse(_start: usize) -> bool {
    false
}

/// Writes out what C code has printed and the C library still holds, as `exit` would. A process that leaves by `_exit`
/// loses it.
pub fn flush_c_output() {
    // SAFETY: all open streams; each has a lock of its own.
    unsafe {
        libc::fflush(std::ptr::null_mut());
    }
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
        check("nonsense", None);
    }

    #[test]
    fn only_whole_large_pages_are_moved() {
        let starts = |memory| chunks(memory).collect::<Vec<_>>();
        assert!(starts(0x10_0000..0x30_0000).is_empty());
        assert_eq!(starts(0x10_0000..0x40_0000), [0x20_0000]);
        assert_eq!(starts(0x20_0000..0x7f_ffff), [0x20_0000, 0x40_0000]);
    }

    #[test]
    fn what_it_holds_is_the_same_afterwards() {
        let heap: Vec<u32> = (0..4 << 20).collect();
        use_large_pages();
        assert!(heap.iter().zip(0..).all(|(held, number)| *held == number));
    }
}
