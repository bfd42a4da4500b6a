//! The zygote's side of its link to the supervisor (see zygote.rs for the messages): takes commands, and reports how
//! children end.
//!
//! Rust spares memory that the zygote shares with its children. A process that writes to a shared page copies it, and
//! Python code writes to many, since it counts references. Served in Python, a fork and a death copied 165 pages in the
//! zygote, and split huge pages while at it; each further fork then took longer. For the same reason nothing is
//! allocated here between two forks: free blocks lie anywhere in the heap.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSliceMut, Write};
use std::mem::{MaybeUninit, forget, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Signal, kill_process, kill_process_group, setpgid};
use signal_hook::consts::SIGCHLD;

use crate::SlotKind;
use crate::orphans::ended_child;

/// Descriptors that may arrive with one piece of the supervisor's stream.
const DESCRIPTORS: usize = 16;
/// Commands and reports are short. A larger buffer would be more shared pages to copy.
const CHUNK_BYTES: usize = 512;
/// Number of children for which there is room from the start.
const USUAL_CHILDREN: usize = 256;

/// Children of this process, the zygote, and its link to the supervisor.
pub struct Forks {
    control: OwnedFd,
    incoming: Vec<u8>,
    /// Sockets of children to fork, in the order of their commands.
    replies: VecDeque<OwnedFd>,
    /// Readable when a child may have ended.
    bell: UnixStream,
    /// Socket that the handler of SIGCHLD writes to. It belongs to the handler.
    ringer: RawFd,
    /// Children, each with its process id.
    children: Vec<(i32, u32)>,
}

/// The next thing that the zygote has to do.
pub enum ZygoteTurn {
    Fork(ForkRequest),
    /// Handle a signal.
    Signal,
    /// Exit: the supervisor is gone, and the children have been killed.
    Leave,
}

/// Child that the supervisor asks for.
#[derive(Debug)]
pub struct ForkRequest {
    pub child: u32,
    /// Index of the socket from which it pulls jobs.
    pub pool: usize,
    pub kind: SlotKind,
    pub slots: u32,
    /// Whether it exits after its first job.
    pub once: bool,
    /// Whether it has time to prepare for that job.
    pub warm: bool,
    /// Its socket to the supervisor.
    pub reply: OwnedFd,
}

enum ZygoteCommand {
    Fork(ForkRequest),
    /// The system dropped the socket of a child to fork, for lack of descriptors.
    NoReply(u32),
    KillAll,
    Kill(u32),
    Nudge(u32),
}

impl Forks {
    /// Serves the supervisor at the other end of `control`. Sets the handler of SIGCHLD.
    pub fn new(control: OwnedFd) -> io::Result<Self> {
        let (bell, ringer) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        let ringer_fd = ringer.as_raw_fd();
        signal_hook::low_level::pipe::register(SIGCHLD, ringer)?;
        Ok(Self {
            control,
            incoming: Vec::with_capacity(2 * CHUNK_BYTES),
            replies: VecDeque::with_capacity(DESCRIPTORS),
            bell,
            ringer: ringer_fd,
            children: Vec::with_capacity(USUAL_CHILDREN),
        })
    }

    /// Waits for the next turn. Kills and interrupts children, and reports deaths, by itself.
    pub fn next_turn(&mut self) -> io::Result<ZygoteTurn> {
        loop {
            while let Some(command) = self.take_command()? {
                match command {
                    ZygoteCommand::Fork(request) => return Ok(ZygoteTurn::Fork(request)),
                    ZygoteCommand::NoReply(child) => {
                        self.refuse(child, &io::Error::from(Errno::MFILE))?;
                    }
                    ZygoteCommand::KillAll => self.kill_all(),
                    ZygoteCommand::Kill(child) => self.signal(child, Signal::KILL),
                    ZygoteCommand::Nudge(child) => self.signal(child, Signal::URG),
                }
            }
            let mut ready = [
                PollFd::new(&self.bell, PollFlags::IN),
                PollFd::new(&self.control, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                // Usually SIGCHLD, which this sees at the bell; but perhaps a signal that Python handles.
                Err(Errno::INTR) => return Ok(ZygoteTurn::Signal),
                polled => polled?,
            };
            let [bell, control] = ready.map(|each| !each.revents().is_empty());
            if bell {
                // Whatever this leaves in the socket makes it ready again.
                let _ = rustix::io::read(&self.bell, &mut [0; CHUNK_BYTES]);
                self.report_deaths()?;
            }
            if control && !self.receive()? {
                // The supervisor is gone, and its jobs already belong to another worker.
                self.kill_all();
                return Ok(ZygoteTurn::Leave);
            }
        }
    }

    /// Receives what has arrived. Returns false if there will be no more.
    fn receive(&mut self) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut attached = RecvAncillaryBuffer::new(&mut space);
        let mut chunk = [0; CHUNK_BYTES];
        let mut pieces = [IoSliceMut::new(&mut chunk)];
        let received = match recvmsg(
            &self.control,
            &mut pieces,
            &mut attached,
            RecvFlags::empty(),
        ) {
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::CONNRESET) => return Ok(false),
            received => received?.bytes,
        };
        for message in attached.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                for descriptor in descriptors {
                    fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
                    self.replies.push_back(descriptor);
                }
            }
        }
        self.incoming.extend_from_slice(&chunk[..received]);
        Ok(received > 0)
    }

    fn take_command(&mut self) -> io::Result<Option<ZygoteCommand>> {
        let Some((length, rest)) = self.incoming.split_first_chunk() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        let Some(text) = rest.get(..length) else {
            return Ok(None);
        };
        let replies = &mut self.replies;
        let command = std::str::from_utf8(text)
            .ok()
            .and_then(|text| read_command(text, || replies.pop_front()));
        self.incoming.drain(..size_of::<u32>() + length);
        match command {
            Some(command) => Ok(Some(command)),
            None => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a command of the supervisor can't be read",
            )),
        }
    }

    /// Notes and reports a child that was forked. Call it in this process, the parent.
    pub fn forked(&mut self, child: u32, pid: i32) -> io::Result<()> {
        lead_group(pid);
        self.children.push((pid, child));
        self.say(format_args!("forked {child} {pid}"))
    }

    /// Reports that the system refused to fork a child.
    pub fn refuse(&mut self, child: u32, why: &dyn fmt::Display) -> io::Result<()> {
        self.say(format_args!("unforked {child} {why}"))
    }

    /// Releases what a child must not share with this process. Call it in the child, before anything else.
    pub fn leave_in_child(self) -> io::Result<()> {
        lead_group(0);
        // SAFETY: the default action is not code of this process.
        if unsafe { libc::signal(SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
        let Self {
            control,
            incoming,
            mut replies,
            bell,
            ringer,
            children,
        } = self;
        // Closed, but not freed: that would copy pages of the heap.
        replies.drain(..).for_each(drop);
        // SAFETY: the signal handler was its only user.
        drop((control, bell, unsafe { OwnedFd::from_raw_fd(ringer) }));
        forget((incoming, replies, children));
        Ok(())
    }

    fn report_deaths(&mut self) -> io::Result<()> {
        // Orphans of jobs are reparented to this process. They are waited for as well.
        while let Some(pid) = ended_child() {
            let number = pid.as_raw_nonzero().get();
            let place = self.children.iter().position(|(pid, _)| *pid == number);
            let child = place.map(|place| self.children.swap_remove(place).1);
            if child.is_some() {
                kill_group(pid);
            }
            let (status, peak_kib) = reap(number)?;
            if let Some(child) = child {
                self.say(format_args!("died {child} {number} {status} {peak_kib}"))?;
            }
        }
        Ok(())
    }

    fn kill_all(&self) {
        for (pid, _) in &self.children {
            send(*pid, Signal::KILL);
        }
    }

    fn signal(&self, child: u32, signal: Signal) {
        if let Some((pid, _)) = self.children.iter().find(|(_, other)| *other == child) {
            send(*pid, signal);
        }
    }

    /// Sends a message, and cuts one that is far too long. Ignores that the supervisor is gone: the next turn will
    /// find out.
    fn say(&self, text: fmt::Arguments<'_>) -> io::Result<()> {
        let mut message = [0; CHUNK_BYTES];
        let (length, body) = message.split_at_mut(size_of::<u32>());
        let (room, mut left) = (body.len(), body);
        let _cut = left.write_fmt(text);
        let bytes = room - left.len();
        length.copy_from_slice(&(bytes as u32).to_le_bytes());
        let mut rest = &message[..size_of::<u32>() + bytes];
        while !rest.is_empty() {
            // Python ignores SIGPIPE.
            match rustix::io::write(&self.control, rest) {
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                written => rest = &rest[written?..],
            }
        }
        Ok(())
    }
}

fn read_command(text: &str, reply: impl FnOnce() -> Option<OwnedFd>) -> Option<ZygoteCommand> {
    let mut words = text.split(' ');
    let command = match words.next()? {
        "fork" => {
            let child = words.next()?.parse().ok()?;
            let pool = words.next()?.parse().ok()?;
            let kind = SlotKind::from_word(words.next()?)?;
            let slots = words.next()?.parse().ok()?;
            let how_long = words.next()?;
            match reply() {
                Some(reply) => ZygoteCommand::Fork(ForkRequest {
                    child,
                    pool,
                    kind,
                    slots,
                    once: how_long != "long",
                    warm: how_long == "warm",
                    reply,
                }),
                None => ZygoteCommand::NoReply(child),
            }
        }
        "kill" => match words.next() {
            None => ZygoteCommand::KillAll,
            Some(child) => ZygoteCommand::Kill(child.parse().ok()?),
        },
        "nudge" => ZygoteCommand::Nudge(words.next()?.parse().ok()?),
        _ => return None,
    };
    words.next().is_none().then_some(command)
}

/// Gives a child (0: this process) its own process group, so that processes started by its jobs end with it.
///
/// Both sides of the fork call this. Whichever is first, no signal is sent to a group that does not exist yet.
fn lead_group(pid: i32) {
    let pid = Pid::from_raw(pid);
    let _ = setpgid(pid, pid);
}

/// Sends a signal to a child, and SIGKILL to its group too. Its number can't belong to another process: a child is
/// waited for only when it leaves the list.
fn send(pid: i32, signal: Signal) {
    let Some(pid) = Pid::from_raw(pid) else {
        return;
    };
    let _ = kill_process(pid, signal);
    if signal == Signal::KILL {
        kill_group(pid);
    }
}

/// Kills all processes that a child's jobs started and left behind. The child must not have been waited for.
fn kill_group(child: Pid) {
    let _ = kill_process_group(child, Signal::KILL);
}

/// Waits for a child that has ended. Returns its wait status, and the most memory that it had, in KiB.
fn reap(pid: i32) -> io::Result<(i32, i64)> {
    let mut status = 0;
    // SAFETY: all zeros is a valid `rusage`. Both belong to this function, and only the call writes to them.
    let usage = unsafe {
        let mut usage: libc::rusage = zeroed();
        if libc::wait4(pid, &mut status, 0, &mut usage) != pid {
            return Err(io::Error::last_os_error());
        }
        usage
    };
    // macOS counts in bytes.
    let unit = if cfg!(target_os = "macos") { 1024 } else { 1 };
    Ok((status, usage.ru_maxrss / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_says_what_the_child_is_for() {
        let (reply, _) = UnixStream::pair().unwrap();
        let mut reply = Some(OwnedFd::from(reply));
        let read = read_command("fork 7 1 isolated 1 warm", || reply.take());
        let Some(ZygoteCommand::Fork(request)) = read else {
            panic!("it is a request");
        };
        assert_eq!((request.child, request.pool, request.slots), (7, 1, 1));
        assert_eq!(request.kind, SlotKind::Isolated);
        assert!(request.once && request.warm);
    }
}
