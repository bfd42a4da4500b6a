//! Reads the memory of processes as the kernel counts it, and the processes it killed for lack of memory. Only
//! Linux reports these. Elsewhere every function reports that nothing is known.

use std::fs;
use std::path::{Path, PathBuf};

use penstock_faults::planted;

/// Memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Anonymous memory. Pages of files can be dropped at any time, so they don't count.
    pub anonymous: u64,
    /// All resident pages, including shared ones.
    pub resident: u64,
    /// Maximum of the resident pages since the process began, or since [`forget_peak`].
    pub peak: u64,
}

impl Figures {
    pub fn of(pid: i32) -> Option<Self> {
        Self::read(&format!("/proc/{pid}/status"))
    }

    pub fn of_this_process() -> Option<Self> {
        Self::read("/proc/self/status")
    }

    /// Takes some 20 µs. A sum that also shows memory shared by processes (`smaps_rollup`) takes 2.6 ms for a heap of
    /// 200 MB, during which the process can't allocate.
    fn read(file: &str) -> Option<Self> {
        let text = fs::read_to_string(file).ok()?;
        let named = |name| kilobytes(&text, name);
        Some(Self {
            anonymous: named("RssAnon:")?,
            resident: named("VmRSS:")?,
            peak: named("VmHWM:")?,
        })
    }

    /// Returns the maximum anonymous memory since the reset, assuming the current number of file pages.
    pub fn anonymous_peak(self) -> u64 {
        (self.peak + self.anonymous).saturating_sub(self.resident)
    }
}

/// Whether this system reports the memory of processes.
pub fn knows_memory() -> bool {
    Figures::of_this_process().is_some()
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let count: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(count << 10)
}

/// Makes the kernel measure the peak of a process from now on.
pub fn forget_peak(pid: i32) {
    // If this is refused, the peak covers all jobs of the process.
    let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
}

/// Control group that accounts for this process's memory, and its cgroup version.
#[derive(Clone, Debug)]
struct Group {
    directory: PathBuf,
    root: &'static str,
    is_v1: bool,
}

impl Group {
    fn find() -> Option<Self> {
        Self::among(&fs::read_to_string("/proc/self/cgroup").ok()?)
    }

    fn among(groups: &str) -> Option<Self> {
        let found = |wanted: &str, root, is_v1, file| {
            let path = groups.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let is_it = fields.next()?.split(',').any(|name| name == wanted);
                is_it.then(|| fields.next())?
            })?;
            let group = Path::new(root).join(path.trim_start_matches('/'));
            // In a container, the process's own group is the root of the visible tree.
            let mut places = group.ancestors().take_while(|at| at.starts_with(root));
            let directory = places.find(|at| at.join(file).exists())?.to_owned();
            Some(Self {
                directory,
                root,
                is_v1,
            })
        };
        let v1 = "/sys/fs/cgroup/memory";
        found("memory", v1, true, "memory.oom_control")
            .or_else(|| found("", "/sys/fs/cgroup", false, "memory.events"))
    }

    /// Returns the smallest limit of this group and its ancestors.
    fn limit(&self) -> Option<u64> {
        let file = match self.is_v1 {
            true => "memory.limit_in_bytes",
            false => "memory.max",
        };
        let places = self.directory.ancestors();
        let places = places.take_while(|at| at.starts_with(self.root));
        let limits = places.filter_map(|at| fs::read_to_string(at.join(file)).ok());
        limits.filter_map(|text| text.trim().parse().ok()).min()
    }

    /// Returns the number of processes that the kernel has killed for lack of memory.
    fn kills(&self) -> Option<u64> {
        let files: &[&str] = match self.is_v1 {
            true => &["memory.oom_control"],
            // The first counts this group alone, and needs Linux 5.2.
            false => &["memory.events.local", "memory.events"],
        };
        let mut texts = files
            .iter()
            .filter_map(|file| fs::read_to_string(self.directory.join(file)).ok());
        count_of_kills(&texts.next()?)
    }
}

/// Reads `oom_kill 3` from one of the kernel's lists.
fn count_of_kills(text: &str) -> Option<u64> {
    let mut counts = text
        .lines()
        .filter_map(|line| line.strip_prefix("oom_kill "));
    counts.next()?.trim().parse().ok()
}

/// Returns the memory of this machine, or of the container of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub bytes: u64,
    pub is_container: bool,
}

/// Memory of this machine or container, and the kernel's kills for lack of it.
#[derive(Debug)]
pub struct Host {
    group: Option<Group>,
}

impl Host {
    pub fn find() -> Self {
        Self {
            group: Group::find(),
        }
    }

    pub fn room(&self) -> Option<Room> {
        let text = fs::read_to_string("/proc/meminfo").ok()?;
        let machine = kilobytes(&text, "MemTotal:")?;
        let limit = self.group.as_ref().and_then(Group::limit);
        let limit = limit.filter(|limit| *limit < machine);
        Some(Room {
            bytes: limit.unwrap_or(machine),
            is_container: limit.is_some(),
        })
    }

    /// Returns the number of processes that the kernel has killed for lack of memory: in this group or, if that
    /// is unknown, on the machine.
    pub fn kills(&self) -> Option<u64> {
        let of_group = self.group.as_ref().and_then(Group::kills);
        of_group.or_else(|| count_of_kills(&fs::read_to_string("/proc/vmstat").ok()?))
    }
}

/// Distinguishes out-of-memory kills from other deaths. Each rise of the kernel's count explains one death, and only
/// for a short time.
#[derive(Debug, Default)]
pub struct Kills {
    /// Count of kills that are explained; and the count at the last look, which replaces it at the next one.
    known: Option<u64>,
    looked: Option<u64>,
}

impl Kills {
    /// Takes another look, each second. A death may be reported some time after the count rises, so a rise
    /// counts for one more look.
    pub fn look(&mut self, count: Option<u64>) {
        self.known = self.looked.max(self.known);
        self.looked = count;
    }

    /// Starts to look, or starts again.
    pub fn begin(&mut self, count: Option<u64>) {
        (self.known, self.looked) = (count, count);
    }

    /// Decides whether the kernel killed a process for lack of memory, given the present count. `None`:
    /// unknown.
    pub fn explain(&mut self, count: Option<u64>) -> Option<bool> {
        let (known, count) = (self.known?, count?);
        let is_explained = count > known;
        if is_explained && !planted!("kill-explains-two-deaths") {
            self.known = Some(known + 1);
        }
        Some(is_explained)
    }
}

/// Formats a size: `430 MiB`, `1.5 GiB`.
pub fn in_words(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    match bytes / MIB {
        0..10 => format!("{:.1} MiB", bytes as f64 / MIB as f64),
        mib @ 10..10_240 => format!("{mib} MiB"),
        mib => format!("{:.1} GiB", mib as f64 / 1024.0),
    }
}

/// Added to the supervisor's own `oom_score_adj`: the kernel should kill a process that runs jobs first, and
/// the supervisor last.
pub const ZYGOTE_SCORE: i32 = 100;
const CHILD_SCORE: i32 = 300;

/// Returns the value for a process with this much more weight than the supervisor.
pub fn score_above(more: i32) -> Option<i32> {
    let own = fs::read_to_string("/proc/self/oom_score_adj").ok()?;
    Some((own.trim().parse::<i32>().ok()? + more).min(1000))
}

/// Returns the value for the forks of this process, the zygote.
pub fn score_of_children() -> Option<String> {
    score_above(CHILD_SCORE - ZYGOTE_SCORE).map(|score| score.to_string())
}

/// Sets this process's `oom_score_adj`, with system calls only. Does nothing on systems without one.
pub fn write_score(score: &[u8]) {
    use rustix::fs::{Mode, OFlags, open};
    if let Ok(file) = open(c"/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty()) {
        let _ = rustix::io::write(file, score);
    }
}

/// Returns freed memory that the allocator keeps to the system.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(kept: usize) -> std::ffi::c_int;
        }
        // SAFETY: it is a glibc function that any thread may call at any time.
        unsafe {
            malloc_trim(0);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn a_process_has_its_figures() {
        let before = Figures::of_this_process().unwrap();
        let large = std::hint::black_box(vec![1_u8; 64 << 20]);
        let pid = std::process::id() as i32;
        let after = Figures::of(pid).unwrap();
        assert!(after.anonymous >= before.anonymous + (large.len() as u64) / 2);
        assert!(after.anonymous_peak() >= after.anonymous);
        drop(large);
        let peak = Figures::of(pid).unwrap().anonymous_peak();
        assert!(peak >= after.anonymous - (4 << 20), "{peak}");
        assert_eq!(Figures::of(0), None);
    }

    #[test]
    pub(crate) fn a_kill_explains_one_death_and_an_old_one_none() {
        let mut kills = Kills::default();
        assert_eq!(kills.explain(Some(1)), None, "nobody has looked");
        kills.begin(Some(7));
        assert_eq!(kills.explain(Some(7)), Some(false));
        assert_eq!(kills.explain(Some(8)), Some(true));
        assert_eq!(kills.explain(Some(8)), Some(false), "another's");
        // The count rose before the death was reported.
        kills.look(Some(9));
        assert_eq!(kills.explain(Some(9)), Some(true));
        kills.look(Some(9));
        assert_eq!(kills.explain(Some(9)), Some(false));
        // A program that a job started, perhaps.
        kills.look(Some(10));
        kills.look(Some(10));
        assert_eq!(kills.explain(Some(10)), Some(false));
        assert_eq!(kills.explain(Some(12)), Some(true));
        assert_eq!(kills.explain(Some(12)), Some(true), "two at once");
        assert_eq!(kills.explain(None), None);
    }

    #[test]
    fn counts_are_found_in_the_kernel_s_lists() {
        let v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        let v2 = "low 0\nhigh 0\nmax 9\noom 4\noom_kill 2\noom_group_kill 0\n";
        assert_eq!(count_of_kills(v1), Some(3));
        assert_eq!(count_of_kills(v2), Some(2));
        assert_eq!(count_of_kills("low 0\n"), None);
        assert_eq!(kilobytes("VmHWM:\t  1024 kB\n", "VmHWM:"), Some(1 << 20));
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(in_words(5 << 19), "2.5 MiB");
        assert_eq!(in_words(512 << 20), "512 MiB");
        assert_eq!(in_words(24 << 30), "24.0 GiB");
    }
}
