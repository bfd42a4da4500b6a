//! Finds the job of a process that caused a fatal signal.
//!
//! A process with many slots dies as a whole, and by default all its jobs would be charged with the crash. But
//! a processor fault or an `abort` is raised in the thread that caused it. A signal handler writes the place of
//! that thread's packet into shared memory, where the supervisor finds it. Then it lets the signal do what it
//! would have done.
//!
//! The handler takes no lock, allocates nothing, and reads no thread-local variable, which might be created at
//! its first use. It looks up its thread's number in a table. It runs on its own stack, since the thread may
//! have exhausted the normal one.

use std::io;
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Signals that are raised in the thread that caused them.
const FATAL: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGABRT,
];

/// Larger than any handler below needs; only written pages are used.
const STACK_BYTES: usize = 64 * 1024;

/// Thread of a slot, and the place of the packet whose job it runs plus one; 0 if none.
#[derive(Default)]
struct Entry {
    thread: AtomicI32,
    place: AtomicU32,
}

struct Table {
    /// Word in shared memory: the guilty place plus one.
    fault: &'static AtomicU64,
    entries: Vec<Entry>,
    before: [libc::sigaction; FATAL.len()],
}

// SAFETY: `sigaction` only contains pointers to code.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

static TABLE: OnceLock<Table> = OnceLock::new();

/// Makes fatal signals of the threads that [`watch_thread`] registers write to `fault` from now on.
pub fn install(fault: &'static AtomicU64, slots: usize) -> io::Result<()> {
    let mut before: [libc::sigaction; FATAL.len()] =
        // SAFETY: all zeros is a valid `sigaction`.
        unsafe { zeroed() };
    for (signal, before) in std::iter::zip(FATAL, &mut before) {
        // SAFETY: without a new action, the call only returns the old one.
        if unsafe { libc::sigaction(signal, null(), before) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let table = Table {
        fault,
        entries: (0..slots).map(|_| Entry::default()).collect(),
        before,
    };
    if TABLE.set(table).is_err() {
        return Err(io::Error::other("a process is one child only"));
    }
    for signal in FATAL {
        // SAFETY: the handler does only what a signal handler may do.
        let set = unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigaction(signal, &action, null_mut())
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn own_thread() -> i32 {
    // SAFETY: it takes no arguments and always succeeds.
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// Registers the calling thread as this slot's, and gives it a stack for the handler.
pub fn watch_thread(slot: usize) -> io::Result<()> {
    let Some(entry) = TABLE.get().and_then(|table| table.entries.get(slot)) else {
        return Ok(());
    };
    // SAFETY: a fresh private mapping aliases nothing. It stays as long as the process, because the thread may
    // end at any time.
    unsafe {
        let start = libc::mmap(
            null_mut(),
            STACK_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = libc::stack_t {
            ss_sp: start,
            ss_flags: 0,
            ss_size: STACK_BYTES,
        };
        if libc::sigaltstack(&stack, null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    entry.place.store(0, Ordering::Relaxed);
    entry.thread.store(own_thread(), Ordering::Release);
    Ok(())
}

/// Notes that the slot's thread runs a job of the packet at this place, or none.
pub fn set_place(slot: usize, place: Option<u16>) {
    if let Some(entry) = TABLE.get().and_then(|table| table.entries.get(slot)) {
        let place = place.map_or(0, |place| u32::from(place) + 1);
        entry.place.store(place, Ordering::Relaxed);
    }
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(table) = TABLE.get() else {
        return;
    };
    let thread = own_thread();
    // SAFETY: the system passes it to a handler that asks for it, and these signals have these fields.
    let is_own = unsafe { (*info).si_code > 0 || (*info).si_pid() == libc::getpid() };
    let own = |entry: &&Entry| entry.thread.load(Ordering::Acquire) == thread;
    // A signal from another process is not the fault of a job here.
    if is_own && let Some(entry) = table.entries.iter().find(own) {
        let place = u64::from(entry.place.load(Ordering::Relaxed));
        // The first signal is the cause.
        let _ = table
            .fault
            .compare_exchange(0, place, Ordering::AcqRel, Ordering::Relaxed);
    }
    let Some(at) = FATAL.iter().position(|fatal| *fatal == signal) else {
        return;
    };
    let before = &table.before[at];
    // SAFETY: calls the previous handler as the system would have. `sigaction` and `raise` may be called in
    // handlers.
    unsafe {
        match before.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => {
                let mut action: libc::sigaction = zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &action, null_mut());
                libc::raise(signal);
            }
            handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
            handler => {
                let handler: extern "C" fn(i32) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}
