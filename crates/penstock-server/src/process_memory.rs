//! Memory of this process, its limit, and the memory of the machine.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::engine::MemoryUse;

/// Bytes read from clients, or time, after which memory is measured again.
const AFTER_BYTES: usize = 2 << 20;
const AFTER: Duration = Duration::from_millis(250);
/// Share of the machine's or the container's memory. The rest is for other programs, and for input that the broker must
/// read even when it accepts no new work.
const SHARE: (u64, u64) = (6, 10);

/// Memory below which the kernel killed a broker while it drained its backlog.
pub(crate) const SMALLEST_BYTES: u64 = 64 << 20;

/// Watches the memory of the process.
#[derive(Debug)]
pub(crate) struct Gauge {
    limit_bytes: u64,
    is_full: bool,
    read_bytes: usize,
    due: Instant,
    freed: FreedBytes,
}

impl Gauge {
    /// Makes a gauge; a limit of 0 means none.
    pub(crate) fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            is_full: false,
            read_bytes: 0,
            due: Instant::now(),
            freed: FreedBytes::default(),
        }
    }

    /// Counts bytes read from clients.
    pub(crate) fn read(&mut self, bytes: usize) {
        self.read_bytes += bytes;
        self.freed.is_busy = true;
    }

    /// Notes the bytes of the broker's state, and trims the heap if many were dropped.
    pub(crate) fn set_live_bytes(&mut self, bytes: u64) {
        if self.freed.is_worth_trimming(bytes, Instant::now()) {
            trim_heap();
        }
    }

    /// Returns the time of the next measurement if nothing is read: memory was full, or some can be freed.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let full = self.is_full.then_some(self.due);
        full.into_iter().chain(self.freed.due).min()
    }

    /// Measures the memory in use when it is time to.
    pub(crate) fn measure(&mut self) -> Option<MemoryUse> {
        if self.read_bytes < AFTER_BYTES && Instant::now() < self.due {
            return None;
        }
        self.read_bytes = 0;
        self.due = Instant::now() + AFTER;
        if self.is_full {
            trim_heap();
        }
        let bytes = held_bytes()?;
        // Room starts well below the limit, or work would be accepted and refused in turns.
        let limit_bytes = match self.is_full {
            true => self.limit_bytes / 16 * 15,
            false => self.limit_bytes,
        };
        self.is_full = self.limit_bytes > 0 && bytes > limit_bytes;
        Some(MemoryUse {
            bytes,
            limit_bytes: self.limit_bytes,
            is_full: self.is_full,
        })
    }
}

/// Bytes dropped from the broker's state since the heap was last trimmed.
#[derive(Debug, Default)]
struct FreedBytes {
    /// Maximum of live bytes since then.
    peak_bytes: u64,
    /// Whether bytes were read since the last check.
    is_busy: bool,
    /// Time of the next check if nothing is read until then.
    due: Option<Instant>,
}

impl FreedBytes {
    /// Bytes from which a busy broker trims the heap, if they are also half of the peak: it would soon need the memory
    /// again, which takes time. A quiet broker also trims less.
    const MUCH_BYTES: u64 = 128 << 20;
    const SOME_BYTES: u64 = 16 << 20;
    const QUIET: Duration = Duration::from_secs(3);

    fn is_worth_trimming(&mut self, live_bytes: u64, now: Instant) -> bool {
        self.peak_bytes = self.peak_bytes.max(live_bytes);
        let gone_bytes = self.peak_bytes - live_bytes;
        if std::mem::take(&mut self.is_busy) || gone_bytes < Self::SOME_BYTES {
            self.due = None;
        }
        if gone_bytes >= Self::SOME_BYTES {
            self.due.get_or_insert(now + Self::QUIET);
        }
        let is_worth_trimming_now = gone_bytes >= Self::MUCH_BYTES.max(self.peak_bytes / 2)
            || self.due.is_some_and(|due| due <= now);
        if is_worth_trimming_now {
            (self.peak_bytes, self.due) = (live_bytes, None);
        }
        is_worth_trimming_now
    }
}

/// Returns freed memory to the system. The allocator keeps free memory between blocks in use: a drained broker would
/// look full, and keep the memory of its largest backlog. (glibc maps large blocks separately only until it has seen
/// one freed.)
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn trim_heap() {
    unsafe extern "C" {
        fn malloc_trim(kept: usize) -> std::ffi::c_int;
    }
    // SAFETY: any thread may call this function of glibc at any time.
    unsafe {
        malloc_trim(0);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn trim_heap() {}

/// Returns the anonymous memory of the process: pages of files can be dropped at any time.
fn held_bytes() -> Option<u64> {
    kilobytes("/proc/self/status", "RssAnon:")
}

/// Returns the number after this word in one of the kernel's lists.
fn kilobytes(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let count: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(count << 10)
}

/// Returns the default limit: a share of the memory that this machine has, or that this process may use. 0: unknown.
pub(crate) fn default_limit() -> u64 {
    usable_bytes().unwrap_or(0) / SHARE.1 * SHARE.0
}

/// Returns the memory of this machine, or the part that this process may use.
pub(crate) fn usable_bytes() -> Option<u64> {
    kilobytes("/proc/meminfo", "MemTotal:")
        .into_iter()
        .chain(group_bytes())
        .min()
}

/// Returns a warning if this much memory is too little for a broker.
pub(crate) fn warning(usable_bytes: Option<u64>) -> Option<String> {
    let usable = usable_bytes.filter(|usable| *usable < SMALLEST_BYTES)?;
    Some(format!(
        "this machine or container has {} MiB of memory, and a broker needs at least {} MiB: the system may kill it \
         while it drains a backlog. What was confirmed is kept; give it more memory",
        usable >> 20,
        SMALLEST_BYTES >> 20
    ))
}

/// Returns the smallest limit of the control groups that this process is in.
fn group_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            "memory" => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        // A limit of an outer group also applies to the groups within. In a container, the process's group is the root.
        let group = Path::new(root).join(path.trim_start_matches('/'));
        let places = group
            .ancestors()
            .take_while(|place| place.starts_with(root));
        for place in places {
            let limit = fs::read_to_string(place.join(file)).ok();
            let limit: Option<u64> = limit.and_then(|text| text.trim().parse().ok());
            least = least.into_iter().chain(limit).min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_when_much_has_gone_or_some_and_nobody_is_there() {
        let mut freed = FreedBytes::default();
        let start = Instant::now();
        let mib = |count: u64| count << 20;
        let mut asked = |busy: bool, live_bytes, after_ms| {
            freed.is_busy = busy;
            let now = start + Duration::from_millis(after_ms);
            let is_worth_trimming_now = freed.is_worth_trimming(live_bytes, now);
            (is_worth_trimming_now, freed.due.is_some())
        };
        assert_eq!(asked(true, mib(1_000), 0), (false, false));
        assert_eq!(asked(true, mib(501), 10), (false, true));
        assert_eq!(asked(true, mib(500), 20), (true, false), "half of it");
        assert_eq!(asked(true, mib(499), 30), (false, false), "hardly anything");
        assert_eq!(asked(true, mib(400), 40), (false, true));
        assert_eq!(asked(true, mib(400), 9_000), (false, true), "it is busy");
        assert_eq!(asked(false, mib(400), 11_900), (false, true));
        assert_eq!(asked(false, mib(400), 12_100), (true, false), "it is quiet");
        assert_eq!(
            asked(true, mib(300), 13_000),
            (false, true),
            "much, but not half"
        );
        assert_eq!(asked(true, mib(100), 14_000), (true, false));
        assert_eq!(
            asked(false, mib(90), 99_000),
            (false, false),
            "a little is kept"
        );
    }

    #[test]
    fn too_little_memory_is_told_with_how_much_is_needed() {
        assert_eq!(warning(None), None, "not known");
        assert_eq!(warning(Some(64 << 20)), None);
        let told = warning(Some(48 << 20)).unwrap();
        assert!(told.contains("has 48 MiB"), "{told}");
        assert!(told.contains("at least 64 MiB"), "{told}");
    }

    #[test]
    fn a_process_knows_what_it_holds_and_what_it_may() {
        let (before, limit) = (held_bytes().unwrap(), default_limit());
        assert!(limit > 0);
        let large = std::hint::black_box(vec![1_u8; 32 << 20]);
        assert!(held_bytes().unwrap() >= before + (large.len() as u64 / 2));
        let mut gauge = Gauge::new(1 << 20);
        assert!(gauge.measure().unwrap().is_full);
        assert_eq!(gauge.measure(), None, "it was asked just now");
        gauge.read(AFTER_BYTES);
        assert!(gauge.measure().unwrap().is_full);
        assert!(!Gauge::new(0).measure().unwrap().is_full, "no limit");
    }
}
