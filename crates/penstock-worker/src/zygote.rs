//! Controls the process that loads the app and forks children on command (`python -m penstock._worker.zygote`).
//!
//! Both sides talk over one stream socket. Messages consist of a length (u32, little-endian) and text, whose
//! first word is the type:
//!
//! ```text
//!     to the zygote      fork CHILD POOL KIND SLOTS USE with the child's socket as a descriptor; USE is "once" for a
//!                                                       child that ends with its first job, "warm" for one that
//!                                                       will wait for that (see warm.rs), else "long"
//!                        kill                           SIGKILL to all children
//!                        kill CHILD                     SIGKILL to this one, if it is still there
//!                        nudge CHILD                    SIGURG to this one, if it is still there
//!     from the zygote    ready JSON         the app is loaded: its name, place and URL, its tasks, their queues and modules
//!                        failed TEXT        the app can't be loaded; it ends
//!                        warning TEXT       for the log
//!                        forked CHILD PID
//!                        unforked CHILD TEXT     the system refused
//!                        died CHILD PID STATUS PEAK   as wait4 gives it; PEAK is the most memory that it had, in KiB
//! ```
//!
//! The zygote exits, and its children with it, when the supervisor's end of that socket is closed.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, setrlimit};
use serde::Deserialize;

use crate::memory::{ZYGOTE_SCORE, score_above, write_score};
use crate::{ChildLog, SlotKind, systemd};

/// Settings of a zygote.
pub struct Start<'a> {
    pub python: &'a Path,
    pub apps: &'a [String],
    pub modules: &'a [String],
    /// Broker that the app uses unless it names one itself.
    pub url: Option<&'a str>,
    /// Name of the worker, for `job.info()`.
    pub name: &'a str,
    /// Sockets from which the children of each pool pull packets.
    pub work: Vec<BorrowedFd<'a>>,
    pub pages: BorrowedFd<'a>,
    pub log: ChildLog,
    /// Limit of open files for the app.
    pub open_files: Rlimit,
}

/// App that the zygote has loaded.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Loaded {
    pub app: String,
    /// Location: `module:app`.
    pub place: String,
    /// Broker that the app names itself.
    pub url: Option<String>,
    /// Queues that its tasks name.
    pub queues: Vec<String>,
    pub tasks: Vec<LoadedTask>,
    /// Modules with tasks, and the number of tasks in each.
    pub modules: Vec<(String, u32)>,
    /// Declarations of its schedules: operations of the protocol, in hexadecimal.
    #[serde(default)]
    pub schedules: Vec<String>,
}

/// Child to fork.
#[derive(Clone, Copy, Debug)]
pub struct Fork {
    pub child: u32,
    /// Index of the socket in [`Start::work`] that it pulls from.
    pub pool: usize,
    pub kind: SlotKind,
    pub slots: u32,
    /// Whether it exits after its first job.
    pub once: bool,
    /// Whether half of the slots are idle, so that a child which ends with its first job has time to prepare for it.
    pub warm: bool,
}

/// Name of a task, with the kind of slot that it asks for, if any.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LoadedTask(pub String, pub String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    Ready(Loaded),
    Failed(String),
    Warning(String),
    Forked {
        child: u32,
        pid: i32,
    },
    Unforked {
        child: u32,
        why: String,
    },
    Died {
        child: u32,
        pid: i32,
        status: i32,
        /// Maximum memory of the process, including shared memory; 0 if unknown.
        peak_bytes: u64,
    },
}

pub struct Zygote {
    process: Child,
    control: UnixStream,
    incoming: Vec<u8>,
}

/// Maximum size of a zygote's message; a longer one is damage.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

impl Zygote {
    pub fn start(start: &Start<'_>) -> io::Result<Self> {
        let (control, theirs) = UnixStream::pair()?;
        let work: Vec<i32> = start.work.iter().map(AsRawFd::as_raw_fd).collect();
        let mut inherited = vec![theirs.as_raw_fd(), start.pages.as_raw_fd()];
        inherited.extend_from_slice(&work);
        let work: Vec<String> = work.iter().map(i32::to_string).collect();
        let mut command = Command::new(start.python);
        command
            .args(["-m", "penstock._worker.zygote", start.name])
            .arg(theirs.as_raw_fd().to_string())
            .arg(work.join(","))
            .arg(start.pages.as_raw_fd().to_string())
            .arg(start.log.level)
            .arg(if start.log.json { "json" } else { "text" })
            .args(start.apps)
            .arg("")
            .args(start.modules)
            .stdin(Stdio::null())
            // Its own process group: Ctrl-C on the terminal reaches only the supervisor, which decides about
            // running jobs and the processes that they started.
            .process_group(0);
        for variable in systemd::VARIABLES {
            command.env_remove(variable);
        }
        if let Some(url) = start.url {
            command.env("PENSTOCK_URL", url);
        }
        let supervisor = rustix::process::getpid();
        let open_files = start.open_files;
        let score = score_above(ZYGOTE_SCORE).map(|score| score.to_string());
        // SAFETY: only async-signal-safe system calls and no allocation between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for fd in inherited.iter().copied() {
                    fcntl_setfd(BorrowedFd::borrow_raw(fd), FdFlags::empty())?;
                }
                // If the system refuses, it keeps the supervisor's value.
                let _ = setrlimit(Resource::Nofile, open_files);
                if let Some(score) = &score {
                    write_score(score.as_bytes());
                }
                // Orphans of jobs come to it, not to another reaper on this machine.
                #[cfg(target_os = "linux")]
                rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
                end_with_parent(supervisor)
            });
        }
        let process = command.spawn()?;
        control.set_nonblocking(true)?;
        Ok(Self {
            process,
            control,
            incoming: Vec::new(),
        })
    }

    pub fn fork(&mut self, fork: Fork, reply: OwnedFd) -> io::Result<()> {
        let Fork {
            child,
            pool,
            kind,
            slots,
            once,
            warm,
        } = fork;
        let kind = kind.word();
        let how_long = match (once, warm) {
            (true, true) => "warm",
            (true, false) => "once",
            (false, _) => "long",
        };
        self.say(
            &format!("fork {child} {pool} {kind} {slots} {how_long}"),
            &[reply.as_fd()],
        )
    }

    pub fn kill_children(&mut self) -> io::Result<()> {
        self.say("kill", &[])
    }

    /// Kills a child through the zygote, which knows which process numbers still belong to its children: it has
    /// not waited for them.
    pub fn kill_child(&mut self, child: u32) -> io::Result<()> {
        self.say(&format!("kill {child}"), &[])
    }

    /// Interrupts a child that waits for a job.
    pub fn nudge_child(&mut self, child: u32) -> io::Result<()> {
        self.say(&format!("nudge {child}"), &[])
    }

    fn say(&mut self, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut message = (text.len() as u32).to_le_bytes().to_vec();
        message.extend_from_slice(text.as_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        // The zygote gets one short command at a time, so its socket has room for a whole one.
        let sent = sendmsg(
            &self.control,
            &[IoSlice::new(&message)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        if sent < message.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(())
    }

    /// Returns the messages that arrived, and whether the zygote can still send more.
    pub fn listen(&mut self) -> (Vec<Said>, bool) {
        let mut chunk = [0; 4096];
        let alive = loop {
            match recv(&self.control, &mut chunk[..], RecvFlags::empty()) {
                Ok((_, 0)) => break false,
                Ok((_, received)) => self.incoming.extend_from_slice(&chunk[..received]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break true,
                Err(_) => break false,
            }
        };
        let mut said = Vec::new();
        loop {
            match next_message(&self.incoming) {
                Ok(Some((message, used))) => {
                    said.push(message);
                    self.incoming.drain(..used);
                }
                Ok(None) => return (said, alive),
                Err(()) => return (said, false),
            }
        }
    }

    /// Kills the zygote, and its children with it; returns how it ended (perhaps on its own).
    pub fn end(mut self) -> String {
        // Its number stays reserved until `wait`, even when it is already dead, so no stranger is hit.
        let group = self.pid();
        if group.is_none_or(|group| kill_process_group(group, Signal::KILL).is_err()) {
            let _ = self.process.kill();
        }
        match self.process.wait() {
            Ok(status) => {
                use std::os::unix::process::ExitStatusExt;
                describe_status(status.into_raw())
            }
            Err(error) => format!("could not be waited for: {error}"),
        }
    }

    pub fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.process.id() as i32)
    }

    /// Waits until it exits on its own.
    pub fn leave(mut self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        let _ = self.process.wait();
    }
}

impl AsFd for Zygote {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}

fn next_message(bytes: &[u8]) -> Result<Option<(Said, usize)>, ()> {
    let Some((len, rest)) = bytes.split_first_chunk() else {
        return Ok(None);
    };
    let len = u32::from_le_bytes(*len) as usize;
    if len > MAX_MESSAGE_BYTES {
        return Err(());
    }
    let Some(text) = rest.get(..len) else {
        return Ok(None);
    };
    let text = std::str::from_utf8(text).map_err(|_| ())?;
    Ok(Some((read_message(text).ok_or(())?, 4 + len)))
}

fn read_message(text: &str) -> Option<Said> {
    let end = text.find([' ', '\n']).unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    let rest = rest.get(1..).unwrap_or_default();
    let mut numbers = rest.split(' ').map(str::parse::<i32>);
    let mut number = || numbers.next()?.ok();
    Some(match word {
        "ready" => Said::Ready(serde_json::from_str(rest).ok()?),
        "failed" => Said::Failed(rest.to_owned()),
        "warning" => Said::Warning(rest.to_owned()),
        "forked" => Said::Forked {
            child: number()?.try_into().ok()?,
            pid: number()?,
        },
        "unforked" => Said::Unforked {
            child: number()?.try_into().ok()?,
            why: rest.split_once(' ')?.1.to_owned(),
        },
        "died" => Said::Died {
            child: number()?.try_into().ok()?,
            pid: number()?,
            status: number()?,
            peak_bytes: u64::try_from(number()?).ok()? << 10,
        },
        _ => return None,
    })
}

/// Makes Linux kill this process when its parent dies: a last line of defence for a parent killed by SIGKILL.
/// Elsewhere, only the closed socket shows it.
pub fn end_with_parent(parent: Pid) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    if rustix::process::getppid() != Some(parent) {
        // The parent died before the request.
        return Err(io::Error::from(Errno::CHILD));
    }
    Ok(())
}

/// Whether a wait status is that of a process killed by SIGKILL.
pub fn is_kill(status: i32) -> bool {
    use std::os::unix::process::ExitStatusExt;
    std::process::ExitStatus::from_raw(status).signal() == Some(libc::SIGKILL)
}

/// Describes a wait status for people; follows "it was" or stands alone.
pub fn describe_status(status: i32) -> String {
    use std::os::unix::process::ExitStatusExt;
    let status = std::process::ExitStatus::from_raw(status);
    match (status.signal(), status.code()) {
        (Some(9), _) => "killed by signal 9 (SIGKILL); the system may be out of memory".to_owned(),
        (Some(signal), _) => match signal_name(signal) {
            Some(name) => format!("killed by signal {signal} ({name})"),
            None => format!("killed by signal {signal}"),
        },
        (None, Some(1)) => {
            "exited with status 1 (os._exit, or an exception between two jobs, whose traceback is in the log)"
                .to_owned()
        }
        (None, Some(code)) => {
            format!("exited with status {code} (os._exit or sys.exit in C code?)")
        }
        (None, None) => format!("ended in an unknown way ({status})"),
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    use signal_hook::consts as s;
    Some(match signal {
        s::SIGABRT => "SIGABRT",
        s::SIGALRM => "SIGALRM",
        s::SIGBUS => "SIGBUS",
        s::SIGFPE => "SIGFPE",
        s::SIGHUP => "SIGHUP",
        s::SIGILL => "SIGILL",
        s::SIGINT => "SIGINT",
        s::SIGPIPE => "SIGPIPE",
        s::SIGQUIT => "SIGQUIT",
        s::SIGSEGV => "SIGSEGV",
        s::SIGSYS => "SIGSYS",
        s::SIGTERM => "SIGTERM",
        s::SIGTRAP => "SIGTRAP",
        s::SIGUSR1 => "SIGUSR1",
        s::SIGUSR2 => "SIGUSR2",
        s::SIGXCPU => "SIGXCPU",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, said: Option<Said>) {
        assert_eq!(read_message(text), said, "{text:?}");
    }

    #[test]
    fn what_a_zygote_says_is_understood_or_refused() {
        check(
            r#"ready {"app": "shop", "place": "shop:app", "url": null, "queues": ["default", "mail\nfor you"],
                "tasks": [["shop.send", "thread"]], "modules": [["shop", 1]], "schedules": ["0a"]}"#,
            Some(Said::Ready(Loaded {
                app: "shop".into(),
                place: "shop:app".into(),
                url: None,
                queues: vec!["default".into(), "mail\nfor you".into()],
                tasks: vec![LoadedTask("shop.send".into(), "thread".into())],
                modules: vec![("shop".into(), 1)],
                schedules: vec!["0a".into()],
            })),
        );
        check("ready", None);
        check(r#"ready {"app": "shop"}"#, None);
        check(
            "failed Traceback\n  File",
            Some(Said::Failed("Traceback\n  File".into())),
        );
        check("forked 3 400", Some(Said::Forked { child: 3, pid: 400 }));
        check(
            "died 3 400 139 2048",
            Some(Said::Died {
                child: 3,
                pid: 400,
                status: 139,
                peak_bytes: 2 << 20,
            }),
        );
        check(
            "unforked 3 no room: try later",
            Some(Said::Unforked {
                child: 3,
                why: "no room: try later".into(),
            }),
        );
        check("died 3 400", None);
        check("forked -1 400", None);
        check("sang", None);
    }

    #[test]
    fn messages_are_taken_whole() {
        let mut bytes = 12_u32.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"forked 1 999and more");
        let (said, used) = next_message(&bytes).unwrap().unwrap();
        assert_eq!((said, used), (Said::Forked { child: 1, pid: 999 }, 16));
        assert_eq!(next_message(&bytes[..15]), Ok(None));
        assert_eq!(next_message(&[0xff; 8]), Err(()));
    }

    #[test]
    fn a_death_is_told_in_words() {
        assert_eq!(describe_status(11), "killed by signal 11 (SIGSEGV)");
        assert_eq!(
            describe_status(9),
            "killed by signal 9 (SIGKILL); the system may be out of memory"
        );
        assert_eq!(
            describe_status(3 << 8),
            "exited with status 3 (os._exit or sys.exit in C code?)"
        );
        assert_eq!(describe_status(64), "killed by signal 64");
    }
}
