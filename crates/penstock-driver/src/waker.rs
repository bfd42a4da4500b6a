//! Wakes a thread that is waiting in `poll`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub struct Waker {
    #[cfg(target_os = "linux")]
    event: OwnedFd,
    #[cfg(not(target_os = "linux"))]
    ends: (OwnedFd, OwnedFd),
}

#[cfg(target_os = "linux")]
impl Waker {
    pub fn new() -> io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event })
    }

    /// Makes the descriptor readable until [`Self::clear`].
    pub fn wake(&self) {
        // Writing fails only when the count is full, and then the descriptor is already readable.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    pub fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

#[cfg(target_os = "linux")]
impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(not(target_os = "linux"))]
impl Waker {
    pub fn new() -> io::Result<Self> {
        let ends = rustix::pipe::pipe()?;
        for end in [&ends.0, &ends.1] {
            rustix::io::fcntl_setfd(end, rustix::io::FdFlags::CLOEXEC)?;
            rustix::io::ioctl_fionbio(end, true)?;
        }
        Ok(Self { ends })
    }

    /// Makes the descriptor readable until [`Self::clear`].
    pub fn wake(&self) {
        // Writing fails only when the pipe is full, and then the descriptor is already readable.
        let _ = rustix::io::write(&self.ends.1, &[1]);
    }

    pub fn clear(&self) {
        while matches!(rustix::io::read(&self.ends.0, &mut [0; 64]), Ok(64)) {}
    }
}

#[cfg(not(target_os = "linux"))]
impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ends.0.as_fd()
    }
}
