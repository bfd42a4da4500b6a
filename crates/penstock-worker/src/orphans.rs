//! Finds and ends processes that jobs have started and left behind.
//!
//! A process that a job starts is in the process group of the job's child, and the zygote ends the group with
//! the child. A process that left the group stays in the worker's tree. When its parent dies it is adopted by
//! the zygote, or by the supervisor if that has died too. It ends with the worker, unless it has its own
//! session. Programs create a session to outlive their starter, as a local broker does.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, pidfd_open, pidfd_send_signal, waitpid,
};

/// Time that the kernel gets to end a process. A process stuck on a dead disk is then left to the kernel.
const END_WITHIN: Duration = Duration::from_secs(1);

/// Tree of this process. Everything in it belongs to jobs, except the processes that were there at the start.
pub struct Orphans {
    /// A shell may have started these before it became this program.
    strangers: HashSet<i32>,
}

/// Process, as `/proc` describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    parent: i32,
    session: i32,
    is_dead: bool,
}

impl Orphans {
    /// Makes this process the parent of all orphans in its tree from now on.
    pub fn adopt() -> Self {
        become_subreaper();
        let me = getpid().as_raw_nonzero().get();
        let all = processes();
        let strangers = all.iter().filter(|(_, entry)| entry.parent == me);
        Self {
            strangers: strangers.map(|(pid, _)| *pid).collect(),
        }
    }

    /// Asks the remaining processes to end, and kills those that have not within this time. Returns the number
    /// of kills.
    pub fn end(&self, patience: Duration) -> usize {
        let left = self.left();
        for (_, process) in &left {
            let _ = pidfd_send_signal(process, Signal::TERM);
        }
        wait_for(left.into_iter().map(|(_, process)| process), patience);
        self.kill()
    }

    /// Kills the remaining processes and their descendants. Returns how many there were.
    pub fn kill(&self) -> usize {
        let give_up_at = Instant::now() + END_WITHIN;
        let mut killed = HashSet::new();
        loop {
            let left = self.left();
            let patience = give_up_at.saturating_duration_since(Instant::now());
            if left.is_empty() || patience.is_zero() {
                reap(None);
                return killed.len();
            }
            for (pid, process) in &left {
                killed.insert(*pid);
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
            wait_for(left.into_iter().map(|(_, process)| process), patience);
        }
    }

    /// Returns the living processes that must end with this one.
    fn left(&self) -> Vec<(i32, OwnedFd)> {
        let me = getpid().as_raw_nonzero().get();
        let found = of_tree(&processes(), me, &self.strangers);
        let opened = found.into_iter().filter_map(|(pid, entry)| {
            let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
            // Check that it is still the same process: the number may have been reused.
            (read_entry(pid)? == entry).then_some((pid, process))
        });
        opened.collect()
    }
}

fn become_subreaper() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_child_subreaper(Some(getpid())) {
        tracing::debug!("orphans of jobs go to another process: {error}");
    }
}

/// Returns the living processes below `root` in its session, without strangers and their descendants.
fn of_tree(all: &HashMap<i32, Entry>, root: i32, strangers: &HashSet<i32>) -> Vec<(i32, Entry)> {
    let Some(session) = all.get(&root).map(|entry| entry.session) else {
        return Vec::new();
    };
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for (pid, entry) in all {
        children.entry(entry.parent).or_default().push(*pid);
    }
    let mut found = Vec::new();
    let mut next = vec![root];
    while let Some(parent) = next.pop() {
        for pid in children.remove(&parent).unwrap_or_default() {
            if strangers.contains(&pid) {
                continue;
            }
            next.push(pid);
            let entry = all[&pid];
            if entry.session == session && !entry.is_dead {
                found.push((pid, entry));
            }
        }
    }
    found
}

/// Returns all processes visible to this one; none without `/proc`.
fn processes() -> HashMap<i32, Entry> {
    let Ok(listing) = fs::read_dir("/proc") else {
        return HashMap::new();
    };
    let numbers = listing.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers
        .filter_map(|pid| Some((pid, read_entry(pid)?)))
        .collect()
}

fn read_entry(pid: i32) -> Option<Entry> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses `PID (NAME) STATE PARENT GROUP SESSION ...`, where the name may contain spaces and parentheses.
fn parse(stat: &str) -> Option<Entry> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_ascii_whitespace();
    let state = words.next()?;
    let parent = words.next()?.parse().ok()?;
    let session = words.nth(1)?.parse().ok()?;
    Some(Entry {
        parent,
        session,
        is_dead: matches!(state, "Z" | "X"),
    })
}

/// Waits until all have ended, up to this time.
fn wait_for(processes: impl Iterator<Item = OwnedFd>, patience: Duration) {
    let until = Instant::now() + patience;
    for process in processes {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut ended = [PollFd::new(&process, PollFlags::IN)];
        let _ = poll(&mut ended, Some(&timeout));
    }
}

/// Reaps every child of this process that has ended, up to one that other code waits for.
pub fn reap(other: Option<Pid>) {
    while let Some(pid) = ended_child()
        && Some(pid) != other
    {
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Returns a child that has ended; its number stays reserved until it is waited for.
pub fn ended_child() -> Option<Pid> {
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: all zeros is a valid `siginfo_t`. It belongs to this function, and only the call writes to it.
    let pid = unsafe {
        let mut ended: libc::siginfo_t = std::mem::zeroed();
        match libc::waitid(libc::P_ALL, 0, &mut ended, options) {
            0 => ended.si_pid(),
            _ => 0,
        }
    };
    Pid::from_raw(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(parent: i32, session: i32) -> Entry {
        Entry {
            parent,
            session,
            is_dead: false,
        }
    }

    #[test]
    fn a_name_may_hold_what_separates_fields() {
        let found = parse("42 (a) b) S 7 42 3 0 -1 4194304 100");
        assert_eq!(found, Some(entry(7, 3)));
        let dead = parse("42 (sleep) Z 7 42 3 0").unwrap();
        assert!(dead.is_dead);
        assert_eq!(parse("42 (sleep"), None);
        assert_eq!(parse("42 (sleep) S 7"), None);
    }

    #[test]
    fn what_ends_with_a_worker_is_below_it_and_in_its_session() {
        let dead = Entry {
            is_dead: true,
            ..entry(10, 5)
        };
        let all = HashMap::from([
            (1, entry(0, 1)),
            (10, entry(1, 5)),
            (11, entry(10, 5)),
            (12, entry(11, 5)),
            (13, entry(11, 13)), // a session of its own
            (14, entry(13, 5)),
            (15, dead),
            (20, entry(10, 5)), // was there before
            (21, entry(20, 5)),
            (30, entry(1, 5)), // of the same session, and not below
        ]);
        let found = of_tree(&all, 10, &HashSet::from([20]));
        let mut found: Vec<i32> = found.into_iter().map(|(pid, _)| pid).collect();
        found.sort_unstable();
        assert_eq!(found, [11, 12, 14]);
        assert!(of_tree(&all, 99, &HashSet::new()).is_empty());
    }
}
