//! Jobs that wait for a job of their own, inside their worker. As in the real worker, such a job is parked: its slot
//! is lent to others, and it has a slot back before any new job begins. If too many are parked it keeps its slot. When
//! all slots of a pool are kept like this, the broker learns of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use penstock_driver::encoded::Encoded;
use penstock_driver::session::DriverSession;
use penstock_driver::{ValueSink, WatchId};
use penstock_message::{
    Consume, DEFAULT_PRIORITY, Delivery, Durability, Key, KeyState, Lease, Message, MessageId, Op,
    RefusedWait, SessionId,
};
use penstock_worker::inbox::Inbox;
use penstock_worker::job_bytes;
use penstock_worker::policy::{PacketEnd, Turn};

use super::{Packet, Pool, Running, Worker, lock};
use crate::model::Time;
use crate::work::{QUEUES, TASKS};

/// Wait of a running job, inside its worker.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InnerWait {
    /// To begin: the job enqueues one and waits for it.
    Wanted,
    Begun(WatchId),
}

/// Leases of jobs whose waits are over.
pub(super) type EndedWaits = Arc<Mutex<Vec<Lease>>>;

/// Notes the end of one wait.
struct Waiter {
    lease: Lease,
    ended: EndedWaits,
}

impl ValueSink for Waiter {
    fn value(&self, _: Key, _: KeyState) {
        lock(&self.ended).push(self.lease);
    }

    fn reachable(&self, _: bool) {}

    /// The job fails, or whatever else its author draws.
    fn refused(&self, refused: RefusedWait) {
        self.value(refused.key, KeyState::Gone);
    }
}

/// Returns the job for which a job waits. Each run has another one.
fn awaited(job: &Delivery) -> (MessageId, Op) {
    let mut id = job.message.id;
    let tail = id.0[8..].try_into().expect("eight bytes");
    let run = job.lease.grant << 24 ^ u64::from(job.lease.epoch) << 56;
    let mixed = (u64::from_be_bytes(tail) ^ run).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = mixed ^ mixed >> 29;
    id.0[8..].copy_from_slice(&mixed.to_be_bytes());
    id.0[8] = 0x80 | id.0[8] & 0x3f;
    if id.is_join() {
        id.0[15] = 1;
    }
    let drawn = |from: &[&str], shift: u32| from[(mixed >> shift) as usize % from.len()].to_owned();
    let publish = Op::Publish {
        queues: vec![drawn(&QUEUES, 8)],
        message: Message {
            id,
            task: drawn(&TASKS, 16),
            priority: DEFAULT_PRIORITY,
            expires_at: None,
            result_ttl_ms: Some(86_400_000),
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Default::default(),
            extras: None,
        },
        due: None,
        unless_key: None,
    };
    (id, publish)
}

impl Worker {
    /// Sets the maximum number of parked jobs of each pool: none, few or many. `is_short`: none or one.
    pub(super) fn limit_parked(&mut self, id: SessionId, is_short: bool) {
        for (number, pool) in self.pools.iter_mut().enumerate() {
            let most = match is_short {
                true => [0, 0, 1, 0],
                false => [0, 16, 1, 2],
            };
            let most = most[(usize::from(id.0[0]) + number) % 4];
            pool.policy.set_max_parked(most);
            pool.waits_often = is_short;
        }
    }

    /// Handles the ends of waits: parked jobs want a slot, and others run on.
    pub(super) fn hear_ends_of_waits(&mut self, time: Time) {
        let ended = std::mem::take(&mut *lock(&self.ended));
        let ended: BTreeSet<Lease> = ended.into_iter().collect();
        if !ended.is_empty() {
            let pools = self.pools.iter_mut();
            pools.for_each(|pool| pool.waits_are_over(&ended, time));
        }
    }

    /// Continues parked jobs whose waits are over. Returns whether there were any.
    pub(super) fn resume(&mut self, time: Time) -> bool {
        let mut has_any = false;
        for pool in &mut self.pools {
            has_any |= pool.give_turns(time);
        }
        has_any
    }

    /// Begins the waits of jobs that want one. Returns whether there were any: jobs behind them wait again.
    pub(super) fn begin_waits(&mut self, session: &mut DriverSession) -> bool {
        let mut has_any = false;
        for pool in &mut self.pools {
            for child in 0..pool.children.len() {
                has_any |= pool.begin_wait(child, &self.ended, session);
            }
        }
        has_any
    }

    /// Ends the waits of jobs that are to stop.
    pub(super) fn break_off_waits(&mut self, session: &mut DriverSession) {
        for pool in &mut self.pools {
            for watch in std::mem::take(&mut pool.broken_off) {
                session.unwatch(watch);
            }
        }
    }

    /// Reports pools to the broker whose slots are all kept by waiting jobs. Returns whether anything has changed.
    pub(super) fn tell_held(&mut self, session: &mut DriverSession) -> bool {
        let mut has_changed = false;
        for number in 0..self.pools.len() {
            let is_serving = !self.is_draining;
            let pool = &mut self.pools[number];
            has_changed |= pool.park_kept();
            let jobs = if is_serving {
                pool.keepers()
            } else {
                Vec::new()
            };
            if jobs == pool.told_held {
                continue;
            }
            has_changed = true;
            pool.policy.set_held(!jobs.is_empty());
            pool.told_held.clone_from(&jobs);
            let mut back = Vec::new();
            if !jobs.is_empty() {
                pool.take_back_unclaimed();
                back = pool.policy.take_all();
                pool.policy.revoke();
                session.stop_consumer(number as u32);
            }
            let consume = Consume {
                consumer: number as u32,
                held_by: Some(jobs),
                ..Consume::default()
            };
            let sink: Arc<Inbox> = Arc::clone(&self.inbox);
            session.consume(consume, sink);
            self.give_back(back);
        }
        has_changed
    }
}

impl Pool {
    /// Whether a job waits for one of its own. Chosen by id, so that all other draws stay the same. A wait belongs to a
    /// job, so one that was published to several queues does not wait.
    pub(super) fn waits(&self, job: &Delivery) -> bool {
        let (id, is_copy) = (job.message.id.0, job.message.max_deliveries == u8::MAX);
        !is_copy && (id[10] ^ id[14]) % if self.waits_often { 2 } else { 8 } == 1
    }

    fn waits_are_over(&mut self, ended: &BTreeSet<Lease>, time: Time) {
        let is_over = |job: Option<&Delivery>| job.is_some_and(|job| ended.contains(&job.lease));
        for running in self.children.iter_mut().flatten() {
            if running.wait.is_some() && is_over(running.job.as_ref()) {
                running.wait = None;
                running.ends_ms = time.steady;
            }
        }
        for (packet, running) in &mut self.parked {
            if is_over(running.job.as_ref()) {
                self.policy.want_turn(turn(*packet));
            }
        }
    }

    /// Continues parked jobs whose waits are over, as far as there are slots. Returns whether there were any.
    fn give_turns(&mut self, time: Time) -> bool {
        let mut has_any = false;
        loop {
            while let Some(turn) = self.policy.next_turn() {
                let resumed = self.unpark(turn, time);
                let mut idle = self.children.iter_mut().filter(|child| child.is_none());
                *idle.next().expect("a slot is free") = Some(resumed);
                has_any = true;
            }
            // Jobs that have not begun must give way to them, and so must jobs that wait and keep their slots.
            let Some(turn) = self.policy.first_turn() else {
                return has_any;
            };
            if self.take_back_unclaimed() {
                continue;
            }
            let Some(child) = (0..self.children.len()).find(|child| self.keeps(*child)) else {
                return has_any;
            };
            let resumed = self.unpark(turn, time);
            self.park(child);
            self.children[child] = Some(resumed);
            has_any = true;
        }
    }

    /// Ends the wait of a parked job, and returns it.
    fn unpark(&mut self, turn: Turn, time: Time) -> Running {
        let packet = turn.place as u64;
        let mut running = self.parked.remove(&packet).expect("it is parked");
        self.policy.unpark(self.packets[&packet].task, turn.place);
        running.wait = None;
        running.ends_ms = time.steady;
        running
    }

    /// Begins the wait of a child's job, and lends its slot. Returns whether the job wants to wait.
    fn begin_wait(
        &mut self,
        child: usize,
        ended: &EndedWaits,
        session: &mut DriverSession,
    ) -> bool {
        let wanted = self.children[child].as_ref();
        let wanted = wanted.filter(|running| running.wait == Some(InnerWait::Wanted));
        let Some(job) = wanted.and_then(|running| running.job.as_ref()) else {
            return false;
        };
        let (lease, waiter) = (job.lease, job.message.id);
        let (id, publish) = awaited(job);
        let tx = Encoded::new(vec![publish].into());
        session.commit(vec![tx], Durability::Disk, None, Box::new(drop));
        let sink = Arc::new(Waiter {
            lease,
            ended: Arc::clone(ended),
        });
        let watch = session.watch(vec![Key::Result(id)], false, Some(waiter), None, sink);
        if let Some(running) = &mut self.children[child] {
            running.wait = Some(InnerWait::Begun(watch));
        }
        self.take_back_behind(child);
        self.park(child);
        true
    }

    /// Lends the slot of a waiting job, unless too many are parked.
    fn park(&mut self, child: usize) -> bool {
        let waiting = self.children[child].take().expect("its job waits");
        let is_parked = self.policy.park(self.packets[&waiting.packet].task);
        match is_parked {
            true => drop(self.parked.insert(waiting.packet, waiting)),
            false => self.children[child] = Some(waiting),
        }
        is_parked
    }

    /// Parks jobs that had to keep their slots, once others are no longer parked. Returns whether there were any.
    fn park_kept(&mut self) -> bool {
        let mut has_any = false;
        for child in 0..self.children.len() {
            if self.keeps(child) && self.policy.parked() < self.policy.max_parked() {
                has_any |= self.park(child);
            }
        }
        has_any
    }

    fn keeps(&self, child: usize) -> bool {
        let running = self.children[child].as_ref();
        running.is_some_and(|running| matches!(running.wait, Some(InnerWait::Begun(_))))
    }

    /// Returns the jobs that keep all slots while they wait; none if a slot is free of them.
    fn keepers(&self) -> Vec<MessageId> {
        let all = (0..self.children.len()).all(|child| self.keeps(child));
        if !all || self.policy.has_turns() {
            return Vec::new();
        }
        let running = self.children.iter().flatten();
        let jobs = running.filter_map(|running| running.job.as_ref());
        jobs.map(|job| job.message.id).collect()
    }

    /// Ends the waits of jobs that are to stop.
    pub(super) fn break_off(&mut self, is_cancelled: impl Fn(&Delivery) -> bool) {
        for running in self.children.iter_mut().flatten() {
            if let (Some(InnerWait::Begun(watch)), Some(job)) = (running.wait, &running.job)
                && is_cancelled(job)
            {
                running.wait = None;
                self.broken_off.push(watch);
            }
        }
        for (packet, running) in &mut self.parked {
            if let (Some(InnerWait::Begun(watch)), Some(job)) = (running.wait, &running.job)
                && is_cancelled(job)
            {
                running.is_cancelled = true;
                self.broken_off.push(watch);
                self.policy.want_turn(turn(*packet));
            }
        }
    }

    /// Takes back the jobs of packets that no child has claimed. Returns whether there were any.
    fn take_back_unclaimed(&mut self) -> bool {
        let all = std::mem::take(&mut self.packets).into_iter();
        let (others, unclaimed): (BTreeMap<u64, Packet>, BTreeMap<u64, Packet>) =
            all.partition(|(_, packet)| packet.is_claimed);
        self.packets = others;
        let packets: Vec<Packet> = unclaimed.into_values().collect();
        for packet in packets.iter().rev() {
            let jobs = packet.waiting.iter().cloned();
            let jobs: Vec<(Delivery, usize)> = jobs.map(with_bytes).collect();
            self.policy.put_back(packet.task, jobs.into_iter());
            self.policy.packet_ended(packet.task, PacketEnd::TakenBack);
        }
        !packets.is_empty()
    }

    /// Takes back the jobs behind a child's job: one of them may be awaited.
    pub(super) fn take_back_behind(&mut self, child: usize) {
        let Some(running) = &self.children[child] else {
            return;
        };
        let packet = self.packets.get_mut(&running.packet).expect("it is out");
        if packet.waiting.is_empty() {
            return;
        }
        let back = std::mem::take(&mut packet.waiting).into_iter();
        let back: Vec<(Delivery, usize)> = back.map(with_bytes).collect();
        packet.end = Some(PacketEnd::Slow);
        let task = packet.task;
        self.policy.put_back(task, back.into_iter());
    }
}

fn with_bytes(job: Delivery) -> (Delivery, usize) {
    let bytes = job_bytes(&job);
    (job, bytes)
}

fn turn(packet: u64) -> Turn {
    Turn {
        place: packet as usize,
        wait: 1,
        is_on_loop: false,
    }
}
