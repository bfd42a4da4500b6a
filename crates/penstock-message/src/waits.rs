//! Waits of running jobs for other jobs.

use std::fmt;

use crate::{Key, MessageId};

/// Wait of a running job that its broker ends, because it would never end otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedWait {
    pub key: Key,
    pub waiter: MessageId,
    pub why: WaitRefusal,
    /// Jobs of the chain: from the waiter on, each waits for the next; in a cycle the last one waits for the first. At
    /// most [`RefusedWait::MOST_JOBS`].
    pub jobs: Vec<WaitingJob>,
    /// Number of omitted jobs in the middle.
    pub left_out: u32,
}

/// Reason why a wait would never end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitRefusal {
    /// The job that it waits for waits for it in turn.
    Cycle,
    /// Every slot that could run the awaited job is held by a waiting job.
    NoSlotLeft,
}

/// Job in a chain of waits; or a group, which has no task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingJob {
    pub id: MessageId,
    pub task: String,
}

impl RefusedWait {
    /// Maximum number of named jobs.
    pub const MOST_JOBS: usize = 16;
}

impl fmt::Display for WaitingJob {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.task.is_empty() {
            true => write!(out, "group {}", self.id),
            false => write!(out, "job {} ({})", self.id, self.task),
        }
    }
}

/// Formats for people as "job A (shop.x) waits for job B (shop.y), which waits for A".
impl fmt::Display for RefusedWait {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.jobs.first() else {
            return write!(out, "job {} waits for itself", self.waiter);
        };
        let is_cycle = self.why == WaitRefusal::Cycle;
        if is_cycle && self.jobs.len() == 1 {
            return write!(out, "{first} waits for itself");
        }
        write!(out, "{first}")?;
        for (place, job) in self.jobs.iter().enumerate().skip(1) {
            if self.left_out > 0 && place == Self::MOST_JOBS / 2 {
                let more = self.left_out;
                write!(out, ", which waits for a chain of {more} more")?;
            }
            match place {
                1 => write!(out, " waits for {job}")?,
                _ => write!(out, ", which waits for {job}")?,
            }
        }
        match is_cycle {
            true => write!(out, ", which waits for {}", first.id),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(number: u8) -> WaitingJob {
        WaitingJob {
            id: MessageId([number; 16]),
            task: format!("shop.{number}"),
        }
    }

    fn told(why: WaitRefusal, jobs: Vec<WaitingJob>, left_out: u32) -> String {
        let key = Key::Result(MessageId([9; 16]));
        let waiter = jobs[0].id;
        let refused = RefusedWait {
            key,
            waiter,
            why,
            jobs,
            left_out,
        };
        refused.to_string()
    }

    #[test]
    fn a_cycle_is_told_from_the_waiter_round_to_it() {
        let id = |number: u8| MessageId([number; 16]).to_string();
        assert_eq!(
            told(WaitRefusal::Cycle, vec![job(1), job(2)], 0),
            format!(
                "job {} (shop.1) waits for job {} (shop.2), which waits for {}",
                id(1),
                id(2),
                id(1)
            )
        );
        assert_eq!(
            told(WaitRefusal::Cycle, vec![job(1)], 0),
            format!("job {} (shop.1) waits for itself", id(1))
        );
        let group = WaitingJob {
            id: MessageId([7; 16]),
            task: String::new(),
        };
        assert_eq!(
            told(WaitRefusal::NoSlotLeft, vec![job(1), group, job(2)], 0),
            format!(
                "job {} (shop.1) waits for group {}, which waits for job {} (shop.2)",
                id(1),
                id(7),
                id(2)
            )
        );
    }

    #[test]
    fn a_long_chain_says_how_many_it_leaves_out() {
        let jobs: Vec<WaitingJob> = (1..=RefusedWait::MOST_JOBS as u8).map(job).collect();
        let told = told(WaitRefusal::Cycle, jobs, 984);
        assert!(
            told.contains("(shop.8), which waits for a chain of 984 more, which"),
            "{told}"
        );
    }
}
