//! Sends orders to running jobs, from their limits and from people, and ends jobs that don't obey.
//!
//! An order is written where the job's child looks, and the child is signalled (with SIGURG, which a program
//! that does not know it ignores). A job that has not ended within the kill grace after its stop is condemned:
//!
//! ```text
//!     alone in its process     the process is killed, and replaced
//!     among others             the process is evicted: it takes nothing more and is replaced at once; its other jobs may
//!                              end, within the grace of a worker that stops; then it is killed
//! ```
//!
//! A condemned job is settled by its order. A job whose time had passed goes to a child once more, which fails
//! it without running it, as only Python can (retries, the record of the error). Its neighbours are handed
//! back.

use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_jobs::Outcome;
use penstock_message::{Delivery, Extras, Lease};
use rustix::process::{Pid, Signal, kill_process};

use super::{Phase, Supervisor};
use crate::limits::{Limits, Step};
use crate::order::Order;
use crate::outstanding::{Given, RunningAt};
use crate::policy::TaskIndex;

/// Header that makes a child fail a job instead of running it, because its limit has passed; the value says why. It
/// never leaves this worker.
pub(super) const OVER: &str = "penstock.over";

/// Interval of checking an evicted child.
const LOOK_AT_EVICTED: Duration = Duration::from_millis(50);

/// Result of an order to the job of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OrderResult {
    /// The job is running, and has its order.
    Running,
    /// The job is waiting here, and has not begun.
    Waiting,
    /// This worker does not have the job.
    NotHere,
}

/// Job that did not end when it was ordered to, and whose process has.
#[derive(Debug)]
pub(super) struct Condemned {
    pool: usize,
    task: TaskIndex,
    order: Order,
    why: String,
}

/// Child that takes no more jobs, and must exit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Evicted {
    number: u32,
    /// Time until which its jobs may end.
    until: Instant,
    look_at: Instant,
}

impl Supervisor {
    /// Orders the job that has this lease to stop, or to clean up. May be repeated. A job that has ended, or is
    /// just ending, is unaffected, and the job after it is never hit.
    pub(super) fn order(&mut self, lease: &Lease, order: Order, now: Instant) -> OrderResult {
        if let Some((place, index)) = self.outstanding.find(lease) {
            let grace = self.config.kill_grace;
            return match self.outstanding.order(place, index, order, now, grace) {
                Given::Now(running) => {
                    self.signal(running.child);
                    OrderResult::Running
                }
                Given::Before => OrderResult::Running,
                Given::NotRunning => OrderResult::Waiting,
            };
        }
        let is_it = |job: &Delivery| job.lease == *lease;
        match self.pools.iter().any(|pool| pool.policy.any(is_it)) {
            true => OrderResult::Waiting,
            false => OrderResult::NotHere,
        }
    }

    /// Cancels the remaining time of a job that was ordered to stop.
    pub(super) fn hasten(&mut self, lease: &Lease, now: Instant) {
        if let Some((place, index)) = self.outstanding.find(lease) {
            self.outstanding.hasten(place, index, now);
        }
    }

    /// Makes a child look for orders.
    pub(super) fn signal(&self, number: u32) {
        // Even if its number were another process's by now, that would ignore this signal, unless it uses
        // SIGURG itself.
        if let Some(pid) = self.pid_of(number).and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::URG);
        }
    }

    /// Returns when to check the next limit.
    pub(super) fn next_limit(&self) -> Option<Instant> {
        let evicted = self.evicted.iter().map(|evicted| evicted.look_at);
        match self.phase {
            Phase::Serving | Phase::Draining { .. } => self
                .outstanding
                .next_alarm()
                .into_iter()
                .chain(evicted)
                .min(),
            Phase::Loading | Phase::Leaving { .. } | Phase::Killing { .. } => None,
        }
    }

    pub(super) fn keep_limits(&mut self, now: Instant) {
        while let Some(place) = self.outstanding.pop_alarm(now) {
            let Some((running, step)) = self.outstanding.look_at_limits(place, now) else {
                continue;
            };
            match step {
                Step::Nothing => {}
                Step::Give(order) => {
                    let (index, grace) = (running.job.index, self.config.kill_grace);
                    let given = self.outstanding.order(place, index, order, now, grace);
                    if let Given::Now(running) = given {
                        self.signal(running.child);
                    }
                }
                Step::Remind => self.signal(running.child),
                Step::Condemn => self.condemn(running, now),
            }
        }
        let evicted: Vec<u32> = self.evicted.iter().map(|evicted| evicted.number).collect();
        for number in evicted {
            self.look_at_evicted(number, now);
        }
    }

    /// Ends the process of a job that did not end when it was ordered to.
    fn condemn(&mut self, running: RunningAt, now: Instant) {
        let RunningAt { place, child, job } = running;
        let delivery = self.outstanding.job(place, job.index);
        let Some(delivery) = delivery.filter(|_| !self.is_evicted(child)) else {
            return;
        };
        let id = delivery.message.id;
        let why = self.why(delivery, place);
        let (_, neighbours) = self.count_condemned(child);
        // Perhaps it is replaced anyway.
        let is_closing = self.children[child as usize].closing.is_some();
        if neighbours == 0 {
            tracing::error!(job = %id, "{why}: its process is killed, and another takes its place");
            self.end_child(child);
        } else if is_closing || self.evict(child, now) {
            self.evicted.push(Evicted {
                number: child,
                until: now + self.config.grace,
                look_at: now + LOOK_AT_EVICTED,
            });
            tracing::error!(
                job = %id,
                "{why}: its process takes no more jobs, and another takes its place. The {neighbours} other jobs in \
                 it have {} s to end; then it is killed, and the unfinished ones are handed back",
                self.config.grace.as_secs()
            );
        } else if self.children[child as usize].is_told_lost() {
            tracing::error!(
                job = %id,
                "{why}: its slot is lost for now, because this worker already waits for other processes that had such \
                 jobs"
            );
        }
    }

    /// Describes for people what went wrong with a condemned job.
    fn why(&self, delivery: &Delivery, place: usize) -> String {
        let grace = self.config.kill_grace.as_secs_f32();
        let task = &delivery.message.task;
        match self.outstanding.condemned(place) {
            Some((_, Order::Cancel)) if self.outstanding.is_hastened(place) => {
                format!("{task} was cancelled without a grace")
            }
            Some((_, Order::Cancel)) => {
                format!("{task} was cancelled, and did not end within {grace} s")
            }
            _ => {
                let hard = Limits::of(&delivery.message).hard.unwrap_or_default();
                format!(
                    "{task} ran longer than its timeout of {} s, and did not end within {grace} s after that",
                    hard.as_secs_f32()
                )
            }
        }
    }

    /// Returns how many of a child's jobs are condemned, and how many are not.
    fn count_condemned(&self, child: u32) -> (usize, usize) {
        let places = self.outstanding.places_of(Some(child)).into_iter();
        let running = places.filter_map(|place| self.outstanding.running(place));
        let is_condemned = |running: &RunningAt| {
            let condemned = self.outstanding.condemned(running.place);
            condemned.is_some_and(|(index, _)| index == running.job.index)
        };
        let (condemned, others): (Vec<_>, Vec<_>) = running.partition(is_condemned);
        (condemned.len(), others.len())
    }

    pub(super) fn is_evicted(&self, number: u32) -> bool {
        self.evicted.iter().any(|evicted| evicted.number == number)
    }

    /// Ends an evicted child as soon as nothing in it is worth waiting for.
    pub(super) fn look_at_evicted(&mut self, number: u32, now: Instant) {
        let (condemned, neighbours) = self.count_condemned(number);
        if condemned == 0 {
            // Its jobs have ended after all, and the process exits on its own.
            return self.forget_evicted(number);
        }
        let is_it = |evicted: &&mut Evicted| evicted.number == number;
        let Some(evicted) = self.evicted.iter_mut().find(is_it) else {
            return;
        };
        evicted.look_at = now + LOOK_AT_EVICTED;
        if evicted.until <= now || neighbours == 0 {
            self.end_child(number);
        }
    }

    pub(super) fn forget_evicted(&mut self, number: u32) {
        self.evicted.retain(|evicted| evicted.number != number);
    }

    /// Returns the condemned job at a place, if it is still running: its pool, its order, and what went wrong.
    pub(super) fn why_condemned(&self, place: usize) -> Option<Condemned> {
        let running = self.outstanding.running(place)?;
        let (index, order) = self.outstanding.condemned(place)?;
        let delivery = self.outstanding.job(place, index)?;
        let (pool, task) = self.outstanding.task(place)?;
        (index == running.job.index).then(|| Condemned {
            pool,
            task,
            order,
            why: self.why(delivery, place),
        })
    }

    /// Settles a condemned job whose process is dead.
    pub(super) fn settle_condemned(&mut self, condemned: Condemned, jobs: Vec<Delivery>) {
        let Condemned {
            pool,
            task,
            order,
            why,
        } = condemned;
        for mut delivery in jobs {
            if order == Order::Cancel {
                self.settlements.add(delivery, Outcome::Cancelled);
                continue;
            }
            let extras = delivery.message.extras.get_or_insert_with(Box::default);
            let over = (OVER.to_owned(), Bytes::from(why.clone()));
            extras.headers.push(over);
            match self.phase {
                Phase::Serving => self.put_back(pool, task, vec![delivery]),
                _ => self.settlements.give_back([delivery]),
            }
        }
    }
}

/// Returns why a job's time had passed, if it had, so that it is not simply run again.
pub(super) fn over(delivery: &Delivery) -> Option<String> {
    let extras: &Extras = delivery.message.extras.as_deref()?;
    let (_, why) = extras.headers.iter().find(|(name, _)| name == OVER)?;
    Some(String::from_utf8_lossy(why).into_owned())
}
