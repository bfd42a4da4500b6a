//! Waits of running jobs for other jobs: which ones the broker must refuse, and which ones it may refuse.

use std::collections::{BTreeMap, BTreeSet};

use penstock_broker::ConnId;
use penstock_message::{Key, Lease, MessageId, RefusedWait, WaitRefusal};

use super::Checker;
use super::consumers::ConsumerView;
use crate::model::{Item, State, Verdict};
use crate::said::Said;

/// Waits as the sessions of the jobs report them.
#[derive(Default)]
pub(super) struct Waits {
    /// Waiting jobs by connection, each with the jobs that it waits for.
    open: BTreeMap<(ConnId, MessageId), Waiting>,
    /// Waits that have ended since the last quiet moment: the job, and what it waited for. A refusal on its way may
    /// concern one of these.
    ended: BTreeSet<(MessageId, MessageId)>,
    /// Waits that certainly closed a circle when they were reported, and have not been refused: the job, and what it
    /// waits for.
    missed: BTreeSet<(ConnId, MessageId, MessageId)>,
    /// Waiting jobs that hold all slots of a consumer, as its worker has said.
    holders: BTreeMap<(ConnId, u32), Vec<MessageId>>,
    /// Jobs that have done so since the last quiet moment.
    held_before: BTreeSet<MessageId>,
}

/// Wait of a job, with the lease under which it probably runs.
struct Waiting {
    lease: Option<Lease>,
    keys: BTreeSet<MessageId>,
}

impl Waits {
    fn end(&mut self, conn: ConnId, waiter: Option<MessageId>, key: &Key) {
        let Key::Result(key) = key else { return };
        for ((_, job), waiting) in self.open.range_mut(all_of(conn)) {
            if waiter.is_none_or(|waiter| waiter == *job) && waiting.keys.remove(key) {
                self.ended.insert((*job, *key));
            }
        }
    }

    pub(super) fn told(&mut self, conn: ConnId, key: &Key) {
        self.end(conn, None, key);
    }

    /// Ends all waits of a connection that closed.
    pub(super) fn closed(&mut self, conn: ConnId) {
        let all = std::mem::take(&mut self.open).into_iter();
        let (over, others): (BTreeMap<_, _>, _) = all.partition(|((of, _), _)| *of == conn);
        self.open = others;
        let ended = over.into_iter();
        let ended = ended.flat_map(|((_, job), waiting)| pairs(job, waiting));
        self.ended.extend(ended);
        self.missed.retain(|(of, ..)| *of != conn);
        let all = std::mem::take(&mut self.holders).into_iter();
        let (closed, others): (BTreeMap<_, _>, _) = all.partition(|((of, _), _)| *of == conn);
        self.holders = others;
        self.held_before.extend(closed.into_values().flatten());
    }

    fn consumer_is_held_by(&mut self, consumer: (ConnId, u32), jobs: &[MessageId]) {
        let before = self.holders.insert(consumer, jobs.to_vec());
        self.held_before.extend(before.into_iter().flatten());
    }

    /// Whether a run of the job holds, or held, one of the slots of a worker that had none left.
    fn may_hold_a_slot(&self, job: &MessageId) -> bool {
        let mut holders = self.holders.values().flatten();
        holders.any(|holder| holder == job) || self.held_before.contains(job)
    }

    /// Ends all waits because the broker has died.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn quiet(&mut self) {
        self.ended.clear();
        self.held_before.clear();
    }

    /// Returns all jobs that this job has waited for since the last quiet moment.
    fn perhaps_of(&self, job: MessageId) -> impl Iterator<Item = MessageId> {
        let open = self.open.iter().filter(move |((_, of), _)| *of == job);
        let open = open.flat_map(|(_, waiting)| waiting.keys.iter().copied());
        let ended = (job, MessageId([0; 16]))..=(job, MessageId([u8::MAX; 16]));
        open.chain(self.ended.range(ended).map(|(_, key)| *key))
    }
}

fn all_of(conn: ConnId) -> std::ops::RangeInclusive<(ConnId, MessageId)> {
    (conn, MessageId([0; 16]))..=(conn, MessageId([u8::MAX; 16]))
}

fn pairs(job: MessageId, waiting: Waiting) -> impl Iterator<Item = (MessageId, MessageId)> {
    waiting.keys.into_iter().map(move |key| (job, key))
}

impl Checker {
    /// Notes the waits that a session reports, and the waits that it reports as over.
    pub(super) fn heard_of_waits(&mut self, conn: ConnId, said: &Said) {
        if let Some(waiter) = said.waiter {
            let results = said.watch.iter().filter_map(|key| match key {
                Key::Result(id) => Some(*id),
                Key::Named(_) | Key::Scoped(..) => None,
            });
            let keys: BTreeSet<MessageId> = results.collect();
            self.awaited.extend(keys.iter().copied());
            let reported = keys.clone();
            let lease = self.lease_of(waiter);
            let waiting = self.waits.open.remove(&(conn, waiter));
            let waiting = match waiting {
                Some(mut waiting) if waiting.lease == lease => {
                    waiting.keys.extend(keys);
                    waiting
                }
                earlier => {
                    let ended = earlier
                        .into_iter()
                        .flat_map(|earlier| pairs(waiter, earlier));
                    self.waits.ended.extend(ended);
                    Waiting { lease, keys }
                }
            };
            self.waits.open.insert((conn, waiter), waiting);
            let circles = self.circles_of(waiter, reported);
            let circles = circles.into_iter().map(|key| (conn, waiter, key));
            self.waits.missed.extend(circles);
        }
        for consumer in &said.consumers {
            if let Some(jobs) = &consumer.wish.held_by {
                let number = consumer.wish.consumer;
                self.waits.consumer_is_held_by((conn, number), jobs);
            }
        }
        for key in &said.wait_over {
            self.waits.end(conn, said.waiter, key);
        }
        for key in &said.unwatch {
            self.waits.end(conn, None, key);
        }
    }

    /// Returns the lease under which the job runs. `None`: this is unknown, or the job has several copies.
    fn lease_of(&self, job: MessageId) -> Option<Lease> {
        let mut items = self.model.with_id(job);
        let item = items.next()?;
        match item.state {
            State::Leased { lease, .. } if items.next().is_none() => Some(lease),
            _ => None,
        }
    }

    /// Checks a refusal: the job that it waits for must be waiting for it.
    pub(super) fn refused_wait(&mut self, conn: ConnId, refused: &RefusedWait) -> Verdict {
        let RefusedWait {
            key,
            waiter,
            why,
            jobs,
            ..
        } = refused;
        self.counts.circles += 1;
        let &Key::Result(awaited) = key else {
            return Err(format!("{waiter} was refused to wait for {key:?}"));
        };
        if *why == WaitRefusal::NoSlotLeft {
            // A run that has lost its lease may hold one elsewhere, so the job's wait is refused in all of its runs.
            if !self.waits.may_hold_a_slot(waiter) {
                return Err(format!(
                    "{waiter} was told that no slot is left, and no worker has said that it holds one"
                ));
            }
            self.waits.end(conn, Some(*waiter), key);
            return Ok(());
        }
        let step = |job| self.perhaps_awaited_by(job);
        let named: Vec<MessageId> = jobs.iter().map(|job| job.id).take(2).collect();
        if named != [*waiter, awaited] && awaited != *waiter || !leads_to(*waiter, awaited, step) {
            return Err(format!(
                "{waiter} was refused to wait for {awaited}, which does not wait for it: {jobs:?}"
            ));
        }
        self.waits.end(conn, Some(*waiter), key);
        self.waits.missed.remove(&(conn, *waiter, awaited));
        Ok(())
    }

    /// Returns the keys that certainly wait for the job, if the job certainly waits for them.
    fn circles_of(&self, waiter: MessageId, keys: BTreeSet<MessageId>) -> Vec<MessageId> {
        let mut surely: BTreeMap<MessageId, Vec<MessageId>> = BTreeMap::new();
        for ((conn, job), waiting) in &self.waits.open {
            let session = self.views.get(conn).map(|view| view.session);
            let is_there = session.is_some_and(|session| {
                self.current.get(&session) == Some(conn) && self.model.is_there(session)
            });
            if is_there && waiting.lease.is_some() && waiting.lease == self.lease_of(*job) {
                // A wait that closed a circle has ended in the broker, although its refusal may still be on its way.
                let is_refused =
                    |key: &&MessageId| self.waits.missed.contains(&(*conn, *job, **key));
                let keys = waiting.keys.iter().filter(|key| !is_refused(key));
                surely.entry(*job).or_default().extend(keys);
            }
        }
        if !surely.contains_key(&waiter) {
            return Vec::new();
        }
        let step = |job| {
            let mut next = self.model.surely_waits_for(job);
            next.extend(surely.get(&job).into_iter().flatten());
            next
        };
        let mut circles: Vec<MessageId> = keys.into_iter().collect();
        circles.retain(|key| leads_to(waiter, *key, step));
        circles
    }

    /// Whether this job may wait for one whose countdown the broker may have hours behind, directly or through others.
    pub(super) fn may_wait_for_a_late_job(&self, job: MessageId) -> bool {
        let is_late = |job| self.model.with_id(job).any(|item| self.may_be_late(item));
        leads_to_any(is_late, job, |job| self.perhaps_awaited_by(job))
    }

    /// Whether jobs that may wait for such a one hold all slots that may run this message: then it waits as long.
    pub(super) fn slots_may_wait_for_late_jobs(&self, item: &Item) -> bool {
        let is_held = |consumer: &(ConnId, u32)| {
            let jobs = self.waits.holders.get(consumer);
            let waits = |job: &MessageId| self.may_wait_for_a_late_job(*job);
            jobs.is_some_and(|jobs| !jobs.is_empty() && jobs.iter().all(waits))
        };
        let views = self.views.iter();
        let consumers = views.flat_map(|(conn, view)| {
            let consumers = view.consumers.iter();
            let takes = |view: &ConsumerView| {
                view.queues.contains(&item.queue) && view.runs(&item.message.task)
            };
            let takers = consumers.filter(move |(_, view)| takes(view));
            takers.map(|(number, _)| (*conn, *number))
        });
        let consumers: Vec<(ConnId, u32)> = consumers.collect();
        !consumers.is_empty() && consumers.iter().all(is_held)
    }

    /// Returns all jobs that this one has waited for since the last quiet moment, wherever it waits.
    fn perhaps_awaited_by(&self, job: MessageId) -> Vec<MessageId> {
        let mut next = self.model.perhaps_waits_for(job);
        next.extend(self.waits.perhaps_of(job));
        next
    }

    /// Checks, at a quiet moment, that every wait that would have closed a circle was refused.
    pub(super) fn no_circle_was_missed(&self) -> Verdict {
        match self.waits.missed.first() {
            None => Ok(()),
            Some((_, waiter, key)) => Err(format!(
                "{waiter} waits for {key}, which waits for it, and nobody was told"
            )),
        }
    }
}

/// Whether waits lead from one job to another.
fn leads_to(to: MessageId, from: MessageId, step: impl Fn(MessageId) -> Vec<MessageId>) -> bool {
    leads_to_any(|job| job == to, from, step)
}

/// Whether waits lead from a job to one of these.
fn leads_to_any(
    is_one: impl Fn(MessageId) -> bool,
    from: MessageId,
    step: impl Fn(MessageId) -> Vec<MessageId>,
) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(job) = next.pop() {
        if is_one(job) {
            return true;
        }
        if seen.insert(job) {
            next.extend(step(job));
        }
    }
    false
}
