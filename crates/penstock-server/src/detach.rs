//! Detaches a local broker from the process that started it.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;

/// Makes this process independent of its parent: its own session (no terminal can end it), `/` as the working directory
/// (it keeps no file system busy), and no inherited files. Standard error stays open until [`release_stderr`], since it
/// reports why a start failed. Returns the former standard input.
///
/// # Safety
///
/// Closes every file but the standard streams. Call it before this process has opened any, and while it has one thread.
pub unsafe fn detach() -> io::Result<OwnedFd> {
    match rustix::process::setsid() {
        // A group leader, such as a shell's child, keeps its parent's session.
        Err(rustix::io::Errno::PERM) => {}
        outcome => drop(outcome?),
    }
    rustix::process::chdir("/")?;
    for fd in inherited_files()? {
        // SAFETY: the caller states that this process has opened no file yet, so nobody owns it.
        unsafe { rustix::io::close(fd) };
    }
    let input = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&nothing)?;
    rustix::stdio::dup2_stdout(&nothing)?;
    Ok(input)
}

pub fn release_stderr() -> io::Result<()> {
    let nothing = File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stderr(&nothing)?;
    Ok(())
}

fn inherited_files() -> io::Result<Vec<i32>> {
    let mut open = Vec::new();
    for entry in fs::read_dir("/dev/fd")? {
        let number: Option<i32> = entry?
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        open.extend(number.filter(|fd| *fd > 2));
    }
    // One of them was the listing itself, which is closed by now.
    open.retain(|fd| fs::symlink_metadata(format!("/dev/fd/{fd}")).is_ok());
    Ok(open)
}
