//! Fills the holes of the heap before the first fork, so that the memory that a child allocates lies together.
//!
//! Loading an app leaves freed blocks all over the heap, and allocators hand these out first. To a child, each lies on
//! another page that it shares with its parent and has to copy. So the zygote allocates the holes and never frees them.
//! A child then takes its blocks from the end of the heap, one page after another. It has no more memory of its own
//! than if it had copied the pages of the holes, and of an isolated job's 2,230 faults 170 are gone
//! (docs/internals/profile.md).

use std::ffi::c_void;

use crate::arenas::Range;

/// Both allocators have blocks of multiples of this.
const UNIT_BYTES: usize = 16;
/// Size of the largest blocks of Python's allocator, since Python 3.7, in units.
const MAX_UNITS: usize = 32;

/// Bytes that may be filled outside of the gathered arenas: the interpreter has few from before. More would show that the
/// blocks are not from arenas.
const MAX_ELSEWHERE_BYTES: usize = 4 << 20;

/// Fills the holes in the arenas of Python's allocator. `allocate` is Python's `PyObject_Malloc`, which returns
/// null if there is no memory.
///
/// Only those that `arenas` has placed are known. Without any, Python uses another allocator, or a small app fitted into
/// the arenas that existed before; then this does nothing.
pub(crate) fn fill_arenas(arenas: &Range, mut allocate: impl FnMut(usize) -> *mut c_void) {
    let used = arenas.used();
    if used.is_empty() {
        return;
    }
    let mut elsewhere_bytes = 0;
    // The largest blocks come first. They also use up the pools that can serve blocks of any size, so the others have to
    // begin theirs in a new arena.
    for bytes in (1..=MAX_UNITS).rev().map(|units| units * UNIT_BYTES) {
        loop {
            let block = allocate(bytes);
            if block.is_null() {
                return;
            }
            if !arenas.holds(block) {
                elsewhere_bytes += bytes;
                if elsewhere_bytes > MAX_ELSEWHERE_BYTES {
                    return;
                }
            } else if block.addr() >= used.end {
                break;
            }
        }
    }
}

/// Fills the holes in the heap of the C library: the main thread's, below its top.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn fill_heap() {
    /// Largest block to ask for. Far above it, the C library maps blocks one by one, and changes its mind about which
    /// when they are freed.
    const MAX_BYTES: usize = 64 << 10;
    /// Below this, there is a list of holes for each size.
    const SMALL_BYTES: usize = 1032;
    const SMALLEST_BYTES: usize = 24;

    // SAFETY: the name is a C string.
    let info = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mallinfo2".as_ptr()) };
    if info.is_null() {
        return; // a glibc before 2.33
    }
    // SAFETY: this is its type in the C library.
    let info: unsafe extern "C" fn() -> libc::mallinfo2 = unsafe { std::mem::transmute(info) };
    // SAFETY: any thread may call both at any time.
    let (info, end) = unsafe { (info(), libc::sbrk(0)) };
    // Blocks above this are not holes: they are of the free top of the heap, or elsewhere.
    let top = end.addr().saturating_sub(info.keepcost);
    let mut most_bytes = info.arena;
    let mut bytes = MAX_BYTES;
    while bytes >= SMALLEST_BYTES && bytes <= most_bytes {
        // SAFETY: any size may be asked for.
        let block = unsafe { libc::malloc(bytes) };
        if !block.is_null() && block.addr() < top {
            most_bytes -= bytes;
            continue;
        }
        // SAFETY: it was just allocated, or is null.
        unsafe { libc::free(block) };
        bytes = match bytes {
            ..=SMALL_BYTES => bytes - UNIT_BYTES,
            // What is left of a larger hole is filled by smaller blocks.
            _ => (bytes / 4 * 3).max(SMALL_BYTES),
        };
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn fill_heap() {}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::ptr::{null_mut, without_provenance_mut};

    use super::*;
    use crate::arenas::tests::{ARENA, range};

    #[test]
    fn every_hole_of_every_size_is_filled_and_one_block_of_each_is_new() {
        let arenas = range();
        let old = arenas.take(ARENA).expect("room");
        let mut new = None;
        // There are as many holes of each size as it has units.
        let mut blocks: HashMap<usize, usize> = HashMap::new();
        fill_arenas(&arenas, |bytes| {
            let of_size = blocks.entry(bytes).or_default();
            *of_size += 1;
            match *of_size <= bytes / UNIT_BYTES {
                true => old,
                false => *new.get_or_insert_with(|| arenas.take(ARENA).expect("room")),
            }
        });
        assert_eq!(blocks.len(), MAX_UNITS);
        for (bytes, blocks) in blocks {
            assert_eq!(blocks, bytes / UNIT_BYTES + 1, "of {bytes} bytes");
        }
    }

    #[test]
    fn an_allocator_that_takes_its_blocks_from_elsewhere_is_left_alone() {
        let elsewhere = without_provenance_mut(64);
        let (arenas, mut filled) = (range(), 0);
        let mut fill = |arenas: &Range| {
            fill_arenas(arenas, |bytes| {
                filled += bytes;
                elsewhere
            });
            filled
        };
        assert_eq!(fill(&arenas), 0, "there is no arena");
        arenas.take(ARENA).expect("room");
        assert!(fill(&arenas) <= MAX_ELSEWHERE_BYTES + MAX_UNITS * UNIT_BYTES);
    }

    #[test]
    fn filling_ends_where_there_is_no_more_memory() {
        let (arenas, mut asked) = (range(), 0);
        arenas.take(ARENA).expect("room");
        fill_arenas(&arenas, |_| {
            asked += 1;
            null_mut()
        });
        assert_eq!(asked, 1);
    }
}
