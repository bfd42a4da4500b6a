//! Runs the worker: a supervisor that takes jobs from a broker and runs them in forked children.
//!
//! ```text
//!     supervisor   this crate, in the `penstock worker` process; never runs the user's code
//!       └─ zygote     python -m penstock._worker.zygote: imports the app once, forks on command
//!            ├─ child    python/penstock/_worker/child.py: its slots pull packets and run jobs
//!            └─ child
//! ```
//!
//! Children whose slots are of one kind form a *pool*: a socket that they pull from, a consumer at the broker
//! with its own tasks and credit, and a policy. So jobs for one kind of slot never wait behind jobs for
//! another.
//!
//! | file | is about |
//! | --- | --- |
//! | policy.rs | what to hand out when, and how much to ask of the broker (decisions, no IO) |
//! | page.rs | the memory shared with children: claims, outcomes |
//! | order.rs | orders to a running job: its soft limit, its end |
//! | packet.rs | the bytes between supervisor and children |
//! | link.rs | a child's side, wrapped by the Python extension: slots, and their running jobs |
//! | fault.rs | the job of a process that caused a fatal signal |
//! | outstanding.rs | the packets that are out, and their jobs that can be taken back |
//! | memory.rs | the kernel's figures on the memory of processes |
//! | threads.rs | settings of the C library's allocator, for many threads and for a supervisor; counts threads |
//! | huge_pages.rs | why a supervisor has none, but the forked heap does |
//! | arenas.rs | where a loading app's memory lies, so that it fits into huge pages |
//! | warm.rs | pages that an isolated job is about to write to |
//! | zygote.rs | the process that forks, as the supervisor sees it |
//! | forks.rs | its own side of that link: forks, kills and deaths |
//! | orphans.rs | processes that jobs have left behind |
//! | output.rs | the flush of a process's output when it exits |
//! | systemd.rs | reports to a service manager |
//! | files.rs | the limit of open files, and errors that pass |
//! | question.rs | questions of people to a running worker, and its replies |
//! | inbox.rs | news from the driver's thread for the supervisor |
//! | supervisor.rs | the loop: sockets, bookkeeping, phases from loading to the goodbye |
//! | desk.rs | a worker without processes, for tests of applications |
//! | plants.rs | bugs that are planted for the tests to find |
//!
//! `policy` and `inbox` are public only for the simulator, whose workers use them to decide.

mod arenas;
mod config;
mod desk;
mod fault;
mod files;
mod forks;
mod holes;
#[cfg(feature = "hostile")]
pub mod hostile;
mod huge_pages;
#[doc(hidden)]
pub mod inbox;
mod limits;
mod link;
mod memory;
mod order;
mod orphans;
mod output;
mod outstanding;
mod packet;
mod page;
#[cfg(all(test, feature = "faults"))]
mod plants;
#[doc(hidden)]
pub mod policy;
mod progress;
mod question;
mod supervisor;
mod systemd;
mod threads;
mod warm;
mod zygote;

pub use arenas::gather_arenas;
pub use config::{
    ChildLog, Connect, Connected, DEFAULT_GRACE, DEFAULT_KILL_GRACE, MAX_PROCESSES, MAX_SLOTS,
    MemoryConfig, MemoryLimit, PoolConfig, RecycleConfig, SlotKind, WorkerConfig, worker_name,
};
pub use desk::{Desk, Left, TakeOutcome};
pub use forks::{ForkRequest, Forks, ZygoteTurn};
pub use huge_pages::collapse_heap;
pub use link::{Ended, Link, LongWait, Pulled, Resumed, Slot, Window};
pub use memory::{knows_memory, score_of_children, write_score};
pub use order::Order;
pub use output::flush_c_output;
pub use packet::{FailureView, JobView, Kind, Retried};
#[doc(hidden)]
pub use packet::{decode_steps, encode_steps, job_bytes};
pub use page::{SharedPages, steady_ns};
pub use progress::{Count, encode_progress};
pub use question::{Question, Reply, Sizes, Standing, state_name};
pub use threads::{has_one_thread, limit_arenas};
pub use warm::PageNotes;
pub use zygote::end_with_parent;

use std::ffi::c_void;
use std::process::ExitCode;

use supervisor::{End, Supervisor};

/// A signal stopped the worker, or its burst is over. Unfinished jobs were handed back.
pub const EXIT_IN_ORDER: u8 = 0;
/// Something the worker needs failed: the broker refused it, or the zygote can't be started.
pub const EXIT_FAILED: u8 = 1;
/// The engine behind the broker lacks a feature that a worker needs.
pub const EXIT_NOT_OFFERED: u8 = 75;
/// The worker's token or the broker's directory is wrong. Every other command exits with the same code.
pub const EXIT_UNUSABLE: u8 = 78;
/// The app can't be loaded, or one of its tasks is unfit to run.
pub const EXIT_APP: u8 = 3;
/// The memory limit is below the need of the loaded app.
pub const EXIT_NO_MEMORY: u8 = 5;
/// A second signal stopped the worker: running jobs were killed and handed back.
pub const EXIT_FORCED: u8 = 4;

/// Fills the holes of this process's heap, so that forks allocate without copying its pages. `allocate` is
/// `PyObject_Malloc`.
pub fn fill_holes(allocate: impl FnMut(usize) -> *mut c_void) {
    holes::fill_heap();
    if let Some(arenas) = arenas::gathered() {
        holes::fill_arenas(arenas, allocate);
    }
}

/// Runs a worker until it is asked to stop.
///
/// On SIGTERM, SIGINT, or SIGHUP unless that was ignored at the start, it takes no new jobs, lets running jobs
/// finish within the grace period, hands back the rest, and says goodbye. On a second signal it kills the
/// children and hands their jobs back at once.
///
/// With `burst` it stops automatically. By then no job is leased to it, every settlement is confirmed, and the
/// broker reports no ready job of the app's tasks in the unpaused queues that it serves. It does not wait for
/// delayed jobs (a countdown, a retry's backoff) or for jobs that other workers run.
pub fn run(config: WorkerConfig) -> ExitCode {
    huge_pages::avoid();
    threads::return_large_blocks();
    let end = Supervisor::new(config).and_then(Supervisor::run);
    ExitCode::from(match end {
        Ok(End::InOrder) => EXIT_IN_ORDER,
        Ok(End::Forced) => EXIT_FORCED,
        Ok(End::App) => EXIT_APP,
        Ok(End::Failed) => EXIT_FAILED,
        Ok(End::NoMemory) => EXIT_NO_MEMORY,
        Ok(End::NotOffered) => EXIT_NOT_OFFERED,
        Ok(End::Unusable) => EXIT_UNUSABLE,
        Err(error) => {
            tracing::error!("the worker can't go on: {error}");
            EXIT_FAILED
        }
    })
}
