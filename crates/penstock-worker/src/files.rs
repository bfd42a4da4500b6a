//! Raises the limit of open files, and recognises errors of a system that is short of resources.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises this process's limit of open files to the maximum. Returns the previous limit, for the processes that
/// run jobs: programs may rely on it.
pub fn raise_limit() -> Rlimit {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: before.maximum,
        maximum: before.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("the limit of open files could not be raised: {error}");
    }
    before
}

/// Whether descriptors, memory or processes have run out. This passes, so it must not stop anything.
pub fn is_shortage(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        number,
        Some(
            Errno::MFILE
                | Errno::NFILE
                | Errno::NOMEM
                | Errno::NOBUFS
                | Errno::AGAIN
                | Errno::NOSPC
                | Errno::TOOMANYREFS
        )
    )
}
