//! Selects the allocator of this program.
//!
//! Most blocks are small and short-lived, and mimalloc is faster with those: a broker spends 2.0 µs on the
//! delivery and settlement of a job, where it spent 2.7 with glibc alone. But the system allocates tables that
//! grow to hundreds of megabytes. glibc grows them by moving pages (`mremap`). mimalloc copies them into pages
//! that must be zeroed first, which made bulk enqueues cost 2.5 µs instead of 1.0.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use mimalloc::MiMalloc;

/// Size from which the system's allocator is used. glibc maps blocks of this size separately.
const USUAL_LARGE_BYTES: usize = 128 << 10;

/// The same in a worker, which is to keep little.
///
/// mimalloc puts blocks of 8 to 64 KiB into pages of 512 KiB by size, and larger ones into pages of 4 MiB. A page stays
/// in memory, as far as it was ever used, while one of its blocks lives. In a worker, which has a few buffers of each of
/// these sizes, that was most of what a million jobs left behind: 1.6 to 4.2 MB with a size of 128 KiB here, 0.7 to 2.1
/// with 64, and 0.4 to 1.7 with 32. A broker would keep more with 32: glibc returns only the end of its heap, unless it is
/// asked to (66 MiB after a drained backlog of 300,000, and 45 as it is).
const LARGE_BYTES_OF_WORKER: usize = 32 << 10;

/// Size that this process uses; 0: not decided yet. It is decided once, by the first block to which it matters, since a
/// block is freed by the allocator that made it.
static LARGE_BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static MEMORY: BySize = BySize;

struct BySize;

/// Returns freed memory of this thread, which the allocators still keep, to the system.
pub fn give_back() {
    unsafe extern "C" {
        fn mi_collect(force: bool);
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        fn malloc_trim(kept: usize) -> std::ffi::c_int;
    }
    // SAFETY: these functions of the two allocators may be called by any thread at any time.
    unsafe {
        mi_collect(true);
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        malloc_trim(0);
    }
}

/// Makes this process keep little freed memory, as a worker should. Call it first of all: it has no effect after the
/// first block to which it would matter.
pub fn keep_little() {
    decide(LARGE_BYTES_OF_WORKER);
}

/// Decides the size of large blocks, unless that has been done. Returns it.
fn decide(bytes: usize) -> usize {
    match LARGE_BYTES.compare_exchange(0, bytes, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => bytes,
        Err(decided) => decided,
    }
}

fn large_bytes() -> usize {
    match LARGE_BYTES.load(Ordering::Relaxed) {
        0 => decide(USUAL_LARGE_BYTES),
        decided => decided,
    }
}

fn is_large(bytes: usize) -> bool {
    // Most blocks are smaller than either, and need no look at the decision.
    bytes >= LARGE_BYTES_OF_WORKER && bytes >= large_bytes()
}

// SAFETY: both allocators keep the contract, and the size in a block's layout tells which one owns it: the size at which
// they part does not change any more once there is a block to which it matters.
unsafe impl GlobalAlloc for BySize {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match is_large(layout.size()) {
            true => unsafe { System.alloc(layout) },
            false => unsafe { MiMalloc.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match is_large(layout.size()) {
            true => unsafe { System.alloc_zeroed(layout) },
            false => unsafe { MiMalloc.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match is_large(layout.size()) {
            true => unsafe { System.dealloc(block, layout) },
            false => unsafe { MiMalloc.dealloc(block, layout) },
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        match (is_large(layout.size()), is_large(bytes)) {
            (true, true) => unsafe { System.realloc(block, layout, bytes) },
            (false, false) => unsafe { MiMalloc.realloc(block, layout, bytes) },
            // The block moves from one allocator to the other.
            _ => unsafe {
                let moved = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
                if !moved.is_null() {
                    ptr::copy_nonoverlapping(block, moved, layout.size().min(bytes));
                    self.dealloc(block, layout);
                }
                moved
            },
        }
    }
}
