//! Places the arenas of Python's allocator side by side, so that the loaded app can lie in huge pages.
//!
//! Python takes its memory in arenas of 256 KiB or 1 MiB, and the kernel places each in the nearest gap. With an app of
//! many libraries, half of them end up between libraries, where no huge page fits: of 57 MB only 27 could be moved into
//! huge pages, and 43 or more side by side (docs/internals/profile.md).
//!
//! The arenas of a loading app come from one reserved range. What is left of it is given back before the first fork, so
//! that children allocate as they would without this.

use std::ffi::c_void;
use std::ops;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use crate::huge_pages::HUGE_PAGE_BYTES;

/// Bytes of address space reserved while an app is loaded. Arenas beyond it are placed by the kernel.
const RESERVED_BYTES: usize = 16 << 30;
/// All arenas are multiples of this. Python also takes blocks for its frames here, of 16 KiB or more, which come and go:
/// with them in between, 26 MB of those 57 would not fit into huge pages.
const ARENA_UNIT_BYTES: usize = 256 << 10;

type Alloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, *mut c_void, usize);

/// `PyObjectArenaAllocator` of Python's C API, the same since Python 3.4.
#[repr(C)]
struct ArenaAllocator {
    context: *mut c_void,
    alloc: Alloc,
    free: Free,
}

/// Address range for arenas, used from its start.
pub(crate) struct Range {
    start: usize,
    /// End of what may be used; of what was used, once the range is closed.
    end: AtomicUsize,
    /// Start of the unused part.
    next: AtomicUsize,
    /// Python's allocator before this one. It serves what is not placed here, and frees those that are not of this range.
    before: ArenaAllocator,
}

// SAFETY: Python calls its arena allocator from any thread, so that of `before` may be shared.
unsafe impl Send for Range {}
// SAFETY: the same.
unsafe impl Sync for Range {}

static RANGE: OnceLock<Range> = OnceLock::new();

impl Range {
    fn reserve(before: ArenaAllocator) -> rustix::io::Result<Self> {
        let bytes = RESERVED_BYTES + HUGE_PAGE_BYTES;
        // SAFETY: it is a new mapping.
        let reserved = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let reserved = reserved.expose_provenance();
        let start = reserved.next_multiple_of(HUGE_PAGE_BYTES);
        Ok(Self {
            start,
            end: AtomicUsize::new(reserved + bytes),
            next: AtomicUsize::new(start),
            before,
        })
    }

    /// Returns memory that nothing else uses. `None` if it is not for an arena, the range is used up, or the kernel
    /// refuses.
    pub(crate) fn take(&self, bytes: usize) -> Option<*mut c_void> {
        if !bytes.is_multiple_of(ARENA_UNIT_BYTES) {
            return None;
        }
        let end = self.end.load(Ordering::Relaxed);
        let fits = |next: usize| next.checked_add(bytes).filter(|after| *after <= end);
        let taken = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .ok()?;
        let arena = std::ptr::with_exposed_provenance_mut(taken);
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the update made this part of the mapping ours.
        unsafe { mprotect(arena, bytes, access) }.ok()?;
        Some(arena)
    }

    /// Whether an address lies in this range.
    pub(crate) fn holds(&self, place: *mut c_void) -> bool {
        (self.start..self.end.load(Ordering::Relaxed)).contains(&place.addr())
    }

    /// Returns the addresses of the arenas so far.
    pub(crate) fn used(&self) -> ops::Range<usize> {
        self.start..self.next.load(Ordering::Relaxed)
    }

    /// Gives the unused part back: further arenas are placed by the kernel.
    fn close(&self) {
        let end = self.end.load(Ordering::Relaxed);
        let unused = self.next.swap(end, Ordering::Relaxed);
        if unused < end {
            // The kernel may place anything there, which is not for us to free.
            self.end.store(unused, Ordering::Relaxed);
            let unused_bytes = end - unused;
            // SAFETY: nothing was taken from this part, and nothing will be.
            let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(unused), unused_bytes) };
        }
    }
}

unsafe extern "C" fn alloc(_context: *mut c_void, bytes: usize) -> *mut c_void {
    let Some(range) = RANGE.get() else {
        return std::ptr::null_mut();
    };
    match range.take(bytes) {
        Some(arena) => arena,
        // SAFETY: Python called us like this.
        None => unsafe { (range.before.alloc)(range.before.context, bytes) },
    }
}

unsafe extern "C" fn free(_context: *mut c_void, arena: *mut c_void, bytes: usize) {
    let Some(range) = RANGE.get() else {
        return;
    };
    if range.holds(arena) {
        // SAFETY: Python has no object in this arena any more.
        let _ = unsafe { munmap(arena, bytes) };
    } else {
        // SAFETY: it came from there.
        unsafe { (range.before.free)(range.before.context, arena, bytes) }
    }
}

/// Places Python's further arenas side by side, until [`close`]. Returns whether it does: not without Python in this
/// process, nor if the address space is limited.
///
/// Call it with the interpreter attached.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub fn gather_arenas() -> bool {
    type Access = unsafe extern "C" fn(*mut ArenaAllocator);
    // Not part of the stable ABI of Python, so they are looked up.
    // SAFETY: the names are C strings.
    let (get, set) = unsafe {
        (
            libc::dlsym(libc::RTLD_DEFAULT, c"PyObject_GetArenaAllocator".as_ptr()),
            libc::dlsym(libc::RTLD_DEFAULT, c"PyObject_SetArenaAllocator".as_ptr()),
        )
    };
    if get.is_null() || set.is_null() || RANGE.get().is_some() {
        return false;
    }
    // SAFETY: both have this type in all versions of Python since 3.4.
    let [get, set] = unsafe { std::mem::transmute::<[*mut c_void; 2], [Access; 2]>([get, set]) };
    let mut before = ArenaAllocator {
        context: std::ptr::null_mut(),
        alloc,
        free,
    };
    // SAFETY: the interpreter is attached, so no arena is allocated meanwhile.
    unsafe { get(&raw mut before) };
    let Ok(range) = Range::reserve(before) else {
        return false;
    };
    if RANGE.set(range).is_err() {
        return false;
    }
    let mut ours = ArenaAllocator {
        context: std::ptr::null_mut(),
        alloc,
        free,
    };
    // SAFETY: Python copies it, and our functions free what it allocated before.
    unsafe { set(&raw mut ours) };
    true
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
pub fn gather_arenas() -> bool {
    false
}

/// Returns the range of arenas; `None` if they are not gathered.
pub(crate) fn gathered() -> Option<&'static Range> {
    RANGE.get()
}

/// Lets the kernel place further arenas, and gives the rest of the range back.
pub(crate) fn close() {
    if let Some(range) = RANGE.get() {
        range.close();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const ARENA: usize = 1 << 20;

    unsafe extern "C" fn none(_: *mut c_void, _: usize) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe extern "C" fn keep(_: *mut c_void, _: *mut c_void, _: usize) {}

    /// Returns a range that is not in use.
    pub(crate) fn range() -> Range {
        let before = ArenaAllocator {
            context: std::ptr::null_mut(),
            alloc: none,
            free: keep,
        };
        Range::reserve(before).expect("address space")
    }

    #[test]
    fn arenas_lie_side_by_side_from_the_start_of_a_huge_page() {
        let range = range();
        let arenas: Vec<_> = (0..5).map(|_| range.take(ARENA).expect("room")).collect();
        assert!(arenas[0].addr().is_multiple_of(HUGE_PAGE_BYTES));
        for (first, next) in arenas.iter().zip(&arenas[1..]) {
            assert_eq!(next.addr() - first.addr(), ARENA);
        }
        for arena in arenas {
            // SAFETY: it was taken, and nothing else uses it.
            unsafe { arena.cast::<u8>().write_bytes(7, ARENA) };
        }
    }

    #[test]
    fn a_closed_range_has_no_room_but_keeps_its_arenas() {
        let range = range();
        let arena = range.take(ARENA).expect("room").cast::<u8>();
        range.close();
        assert!(range.take(ARENA).is_none());
        // SAFETY: it was taken, and nothing else uses it.
        unsafe { arena.write(7) };
        assert!(range.holds(arena.cast()));
        assert!(
            !range.holds(arena.wrapping_add(ARENA).cast()),
            "given back, so no longer ours"
        );
        range.close();
        assert!(range.take(ARENA).is_none());
        assert!(range.holds(arena.cast()));
    }

    #[test]
    fn what_does_not_fit_is_left_to_the_kernel() {
        let range = range();
        assert!(range.take(16 << 10).is_none(), "frames, not an arena");
        assert!(range.take(usize::MAX - ARENA_UNIT_BYTES + 1).is_none());
        assert!(range.take(2 * RESERVED_BYTES).is_none());
        assert!(range.take(ARENA).is_some());
    }

    #[test]
    fn without_python_nothing_changes() {
        assert!(!gather_arenas());
        close();
    }
}
