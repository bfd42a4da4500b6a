//! Advises on tasks whose jobs mostly wait, each occupying a process.

use std::collections::BTreeMap;

/// Number of jobs of a task that are measured before it is judged.
const JOBS: u64 = 32;
/// Mean run time below which a task is not mentioned: 5 ms. Its waits are too short to matter.
const SHORTEST_NS: u64 = 5_000_000;
/// Maximum share of CPU time of a task that is mentioned. With more, its jobs would delay each other in one
/// process.
const MOST_CPU_PERCENT: u64 = 5;

/// Measurements of tasks that run in processes, by name.
#[derive(Debug, Default)]
pub(super) struct Advice {
    tasks: BTreeMap<String, Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    jobs: u64,
    run_ns: u64,
    cpu_ns: u64,
    /// Whether there is nothing more to say: it was mentioned, or its author has chosen a process.
    is_settled: bool,
}

impl Advice {
    /// Excludes a task that asks for processes.
    pub(super) fn spare(&mut self, task: &str) {
        self.measured(task).is_settled = true;
    }

    /// Adds a job's run time and CPU time. Returns the share of its time that the task waits, in per cent,
    /// once, if it is at least 95 %.
    pub(super) fn observe(&mut self, task: &str, run_ns: u64, cpu_ns: u64) -> Option<u64> {
        let measured = self.measured(task);
        if measured.is_settled {
            return None;
        }
        measured.jobs += 1;
        measured.run_ns = measured.run_ns.saturating_add(run_ns);
        // The two clocks are read one after the other.
        measured.cpu_ns = measured.cpu_ns.saturating_add(cpu_ns.min(run_ns));
        if measured.jobs < JOBS {
            return None;
        }
        let Measured { run_ns, cpu_ns, .. } = std::mem::take(measured);
        let cpu_percent = cpu_ns.div_ceil((run_ns / 100).max(1));
        let mostly_waits = run_ns / JOBS >= SHORTEST_NS && cpu_percent <= MOST_CPU_PERCENT;
        measured.is_settled = mostly_waits;
        mostly_waits.then(|| 100 - cpu_percent)
    }

    fn measured(&mut self, task: &str) -> &mut Measured {
        if !self.tasks.contains_key(task) {
            self.tasks.insert(task.to_owned(), Measured::default());
        }
        self.tasks.get_mut(task).expect("it is there now")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Returns the advice after this many jobs of one kind.
    fn said(advice: &mut Advice, jobs: u64, run_ns: u64, cpu_ns: u64) -> Vec<u64> {
        let observed = (0..jobs).map(|_| advice.observe("shop.fetch", run_ns, cpu_ns));
        observed.flatten().collect()
    }

    #[test]
    fn a_task_that_waits_is_named_once() {
        let mut advice = Advice::default();
        assert!(said(&mut advice, JOBS - 1, 50 * MS, MS).is_empty());
        assert_eq!(said(&mut advice, 1, 50 * MS, MS), [98]);
        assert!(said(&mut advice, 10 * JOBS, 50 * MS, MS).is_empty());
    }

    #[test]
    fn nothing_is_said_of_tasks_that_compute_or_are_short_or_have_asked_for_processes() {
        assert!(said(&mut Advice::default(), 3 * JOBS, 50 * MS, 10 * MS).is_empty());
        assert!(said(&mut Advice::default(), 3 * JOBS, MS, 1).is_empty());
        let mut advice = Advice::default();
        advice.spare("shop.fetch");
        assert!(said(&mut advice, 3 * JOBS, 50 * MS, MS).is_empty());
    }

    #[test]
    fn what_the_first_jobs_did_is_forgotten() {
        let mut advice = Advice::default();
        assert!(said(&mut advice, JOBS, 50 * MS, 50 * MS).is_empty());
        assert_eq!(said(&mut advice, JOBS, 50 * MS, MS), [98]);
    }

    #[test]
    fn no_figures_of_a_child_that_has_gone_wild_make_it_fail() {
        let mut advice = Advice::default();
        assert!(said(&mut advice, 2 * JOBS, 0, u64::MAX).is_empty());
        assert!(said(&mut advice, 2 * JOBS, u64::MAX, u64::MAX).is_empty());
    }
}
