//! The limit of open files, and errors of a system that is short of something.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process open as many files as the system allows it. Returns the limit from before, which is for
/// the processes that run jobs: programs of theirs may rely on it.
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

/// Descriptors, memory or processes have run out: this passes, so it ends nothing.
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
