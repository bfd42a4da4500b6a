//! Waits at the pool's socket such that the first idle process gets the next packet.
//!
//! Processes that block in `recvmsg` take turns, so with 40 of them each runs now and then, with cold caches and its own
//! connections to databases. Exclusive waiters of `epoll` are asked in the order in which they registered: at low load
//! few processes run at all, and the others touch no memory (docs/internals/profile.md).

use std::io;
#[cfg(target_os = "linux")]
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

pub(super) struct FirstIdle {
    #[cfg(target_os = "linux")]
    epoll: OwnedFd,
}

#[cfg(target_os = "linux")]
impl FirstIdle {
    pub(super) fn new(socket: &OwnedFd) -> io::Result<Self> {
        use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
        let epoll = create(CreateFlags::CLOEXEC)?;
        let events = EventFlags::IN | EventFlags::EXCLUSIVE;
        add(&epoll, socket, EventData::new_u64(0), events)?;
        Ok(Self { epoll })
    }

    /// Waits until the socket has something to read, which another process may take first.
    pub(super) fn wait(&self) -> Result<(), Errno> {
        let mut events = [MaybeUninit::uninit()];
        rustix::event::epoll::wait(&self.epoll, &mut events, None).map(drop)
    }
}

/// Other systems have no such wait: processes block at the socket itself.
#[cfg(not(target_os = "linux"))]
impl FirstIdle {
    pub(super) fn new(_: &OwnedFd) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn wait(&self) -> Result<(), Errno> {
        Ok(())
    }
}
