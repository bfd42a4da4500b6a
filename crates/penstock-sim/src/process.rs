//! A process like those of users: the driver's own session, and a worker that uses the real worker's policy and inbox.
//! Only their surroundings are simulated: the socket, the clock, the children.
//!
//! Its slots are in pools of several kinds, each of which is a consumer with its own tasks and credit. The children
//! take packets as real ones do. An idle child claims the oldest packet of its pool and runs its jobs one by one. When
//! a job takes long, the jobs behind it that have not begun are taken back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use penstock_driver::encoded::Encoded;
use penstock_driver::session::{DriverSession, SessionConfig};
use penstock_driver::{DeliverySink, DriverError, ValueSink, WatchId};
use penstock_jobs::{DeliveryHead, Outcome, blame, lost, runs_alone, settle};
use penstock_journal::sim::Rng;
use penstock_message::{
    CancelOrder, Consume, Delivery, Durability, Key, KeyState, Lease, MessageId, Op, Query,
    RefusedWait, ReleaseReason, SeededState, SessionId, StatusQuery, TaskSelection, Tx,
    WorkerReport, WorkerState,
};
use penstock_wire::proto::ToClient;
use penstock_wire::{Decoder, MAX_FRAME_BYTES, Versions};
use penstock_worker::inbox::{Inbox, News};
use penstock_worker::job_bytes;
use penstock_worker::policy::{Credit, PacketEnd, Policy, TaskIndex};

mod parking;

use parking::{EndedWaits, InnerWait};

use crate::client::{Client, Stage};
use crate::model::Time;
use crate::work::{Author, Habits, TASKS, success};

/// Interval at which the supervisor looks at its packets.
const TICK_MS: u64 = 10;
/// Time that a call of a user's program usually waits.
const CALL_MS: u64 = 5_000;
/// Maximum number of open calls of a program: a caller does not continue forever without an answer.
const CALLS: usize = 32;

pub struct Process {
    is_dead: bool,
    is_connected: bool,
    /// Time of the steady clock at `base`, since the session needs instants.
    began_ms: u64,
    base: Instant,
    session: DriverSession,
    decoder: Decoder<ToClient>,
    author: Author,
    calls: Arc<Mutex<Calls>>,
    watcher: Arc<Watcher>,
    /// Leases of jobs that have waited for the end of their tree.
    have_asked: BTreeSet<Lease>,
    worker: Worker,
}

/// Calls of the user's program that have not finished.
#[derive(Default)]
struct Calls {
    open: usize,
    hopeless: Option<DriverError>,
}

/// Keys that the program waits for, without a deadline.
#[derive(Default)]
struct Watcher(Mutex<Vec<Key>>);

impl ValueSink for Watcher {
    fn value(&self, key: Key, _: KeyState) {
        let mut waiting = lock(&self.0);
        let place = waiting.iter().position(|waiting| *waiting == key);
        waiting.swap_remove(place.expect("a key is reported once"));
    }

    fn reachable(&self, _: bool) {}

    fn refused(&self, refused: RefusedWait) {
        self.value(refused.key, KeyState::Gone);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}

impl Process {
    /// Creates a process. `slots`: the number of slots of each pool.
    pub fn new(
        id: SessionId,
        heartbeat_ms: u64,
        slots: &[usize],
        habits: Habits,
        now: Time,
    ) -> Self {
        let base = Instant::now();
        let config = SessionConfig {
            versions: Versions::TODAY,
            takes_over: false,
            id,
            token: Bytes::new(),
            name: "simulated".to_string(),
            heartbeat: Duration::from_millis(heartbeat_ms),
            broker: "the simulated broker".to_string(),
            hash_seed: 0,
        };
        let mut worker = Worker::new(slots, habits.queues.clone(), habits.delays);
        worker.limit_parked(id, habits.short_of_slots);
        Self {
            is_dead: false,
            is_connected: false,
            began_ms: now.steady,
            base,
            session: DriverSession::new(config, base),
            decoder: Decoder::new(MAX_FRAME_BYTES),
            author: Author::new(habits),
            calls: Arc::default(),
            watcher: Arc::default(),
            have_asked: BTreeSet::new(),
            worker,
        }
    }

    /// Makes some jobs of trees wait for the end of their own tree, which nearly always closes a circle. Chosen by id,
    /// so that all other draws stay the same.
    fn ask_for_roots(&mut self) {
        for job in self.worker.running() {
            let (id, extras) = (job.message.id, job.message.extras.as_ref());
            let root = extras.and_then(|extras| extras.workflow);
            let root = root.filter(|root| *root != id && self.author.roots.contains(root));
            let is_eager = (id.0[12] ^ id.0[15]).is_multiple_of(2);
            if let Some(root) = root.filter(|_| is_eager)
                && self.have_asked.insert(job.lease)
            {
                let key = Key::Result(root);
                lock(&self.watcher.0).push(key.clone());
                let sink = Arc::clone(&self.watcher);
                self.session.watch(vec![key], false, Some(id), None, sink);
            }
        }
    }

    fn instant(&self, time: Time) -> Instant {
        self.base + Duration::from_millis(time.steady - self.began_ms)
    }

    fn commit(&mut self, txs: Vec<Tx>, durability: Durability, deadline: Option<Instant>) {
        lock(&self.calls).open += 1;
        let calls = Arc::clone(&self.calls);
        let done = Box::new(move |receipts: Result<_, DriverError>| {
            let mut calls = lock(&calls);
            calls.open -= 1;
            match receipts {
                Err(error) if !error.is_transient() => calls.hopeless = Some(error),
                Ok(_) | Err(_) => {}
            }
        });
        let encoded = txs.into_iter().map(Encoded::new).collect();
        self.session.commit(encoded, durability, deadline, done);
    }

    /// Does the work of the driver's thread and of the supervisor's loop until neither has any left.
    fn turn(&mut self, rng: &mut Rng, time: Time) {
        loop {
            while let Some(event) = self.session.poll_event() {
                event.carry_out();
            }
            self.worker
                .turn(&mut self.session, &mut self.author, rng, time);
            if !self.session.has_events() {
                break;
            }
        }
        if let Some(error) = lock(&self.calls).hopeless.take() {
            panic!("an honest call ended so: {error}");
        }
    }
}

impl Client for Process {
    fn drop_habit(&mut self, name: &str) {
        self.author.habits.drop(name);
    }

    fn sees_running(&mut self, running: Vec<MessageId>) {
        self.author.running = running;
    }

    fn stage(&self) -> Stage {
        match (self.is_dead, self.is_connected, self.session.trouble()) {
            (true, ..) => Stage::Dead,
            (_, false, _) => Stage::Offline,
            (_, true, Some(_)) => Stage::Greeting,
            (_, true, None) => Stage::Open,
        }
    }

    fn connected(&mut self, time: Time) {
        self.is_connected = true;
        self.decoder = Decoder::new(MAX_FRAME_BYTES);
        let leases = self.worker.inbox.held_leases();
        self.session.connected(self.instant(time), leases);
    }

    fn disconnected(&mut self) {
        self.is_connected = false;
        self.session.disconnected("the network is simulated");
    }

    fn die(&mut self) {
        self.is_dead = true;
    }

    fn hears(&mut self, rng: &mut Rng, time: Time, bytes: &[u8]) -> bool {
        let now = self.instant(time);
        self.decoder.extend(bytes);
        while let Some(frame) = self
            .decoder
            .next_message()
            .expect("the checker has read it before")
        {
            if self.session.handle(now, frame).is_err() {
                return false;
            }
        }
        self.turn(rng, time);
        true
    }

    fn act(&mut self, rng: &mut Rng, time: Time) {
        let now = self.instant(time);
        if self.author.habits.publishes && lock(&self.calls).open < CALLS {
            let txs = (0..=rng.below(3)).map(|_| self.author.new_work(rng, time.wall));
            let txs: Vec<Tx> = txs.collect();
            let durability = self.author.durability(rng);
            let deadline = (!rng.one_in(4)).then(|| now + Duration::from_millis(CALL_MS));
            self.commit(txs, durability, deadline);
        }
        match rng.below(8) {
            0 if !self.author.wanted.is_empty() => {
                let keys = std::mem::take(&mut self.author.wanted);
                lock(&self.watcher.0).extend(keys.iter().cloned());
                // Sometimes the user's program is a job whose body waits for others.
                let leases = self.worker.inbox.held_leases();
                let first = leases.iter().map(|lease| lease.message).min();
                // One wait per key, so that each may be refused on its own.
                for key in keys {
                    // Chosen by id, so that no seed's draws change because of it.
                    let is_inside = matches!(key, Key::Result(id) if id.0[12] % 3 > 0);
                    let waiter = first.filter(|_| is_inside);
                    let sink = Arc::clone(&self.watcher);
                    self.session.watch(vec![key], false, waiter, None, sink);
                }
            }
            1 => {
                let deadline = now + Duration::from_millis(CALL_MS);
                self.session.query(
                    Query::Status(StatusQuery::default()),
                    deadline,
                    Box::new(drop),
                );
            }
            2 if self.author.habits.consumes && rng.one_in(20) => self.worker.begin_draining(),
            _ => {}
        }
        self.ask_for_roots();
        self.turn(rng, time);
    }

    fn tick(&mut self, rng: &mut Rng, time: Time) -> bool {
        let is_well = self.session.tick(self.instant(time)).is_ok();
        self.turn(rng, time);
        is_well
    }

    fn next_deadline_ms(&self) -> Option<u64> {
        if self.is_dead {
            return None;
        }
        let session = self.session.next_deadline().map(|deadline| {
            // A socket's sleep ends on the next whole millisecond.
            let after = deadline.saturating_duration_since(self.base);
            self.began_ms + after.as_millis() as u64
        });
        session
            .into_iter()
            .chain(self.worker.next_deadline_ms())
            .min()
    }

    fn finish(&mut self, rng: &mut Rng, time: Time) {
        self.worker.hurries = true;
        self.worker.is_draining = false;
        self.turn(rng, time);
    }

    fn is_idle(&self) -> bool {
        self.stage() == Stage::Open
            && self.session.is_settled()
            && self.worker.is_idle()
            && lock(&self.watcher.0).is_empty()
    }

    fn next_bytes(&mut self, time: Time) -> BytesMut {
        if !self.is_connected || self.is_dead {
            return BytesMut::new();
        }
        let now = self.instant(time);
        let mut out = BytesMut::new();
        loop {
            let more = self.session.next_bytes(now);
            if more.is_empty() {
                return out;
            }
            out.extend_from_slice(&more);
        }
    }
}

/// Bookkeeping of the supervisor.
struct Worker {
    queues: Vec<String>,
    inbox: Arc<Inbox>,
    pools: Vec<Pool>,
    settled: Vec<(Lease, Tx)>,
    /// Jobs whose waits are over.
    ended: EndedWaits,
    looks_at_ms: u64,
    /// Whether some jobs take long.
    may_be_slow: bool,
    is_draining: bool,
    /// Whether everything must finish soon.
    hurries: bool,
}

/// Slots of one kind, with the children that own them.
struct Pool {
    policy: Policy<Delivery>,
    /// Number of slots of a process.
    shared_by: usize,
    /// Pool for jobs of this one that must run alone, if a process has several slots.
    alone: Option<usize>,
    /// Whether its processes are for jobs that run alone.
    is_alone: bool,
    /// Tasks that run here, until the broker knows them.
    untold: Option<TaskSelection>,
    /// Packets that were sent, in that order.
    packets: BTreeMap<u64, Packet>,
    last_packet: u64,
    children: Vec<Option<Running>>,
    /// Jobs that wait for others and have lent their slots, by packet.
    parked: BTreeMap<u64, Running>,
    /// Whether most jobs wait.
    waits_often: bool,
    /// Jobs that hold all slots, as the broker was told.
    told_held: Vec<MessageId>,
    /// Watches of waits that were broken off.
    broken_off: Vec<WatchId>,
}

struct Packet {
    task: TaskIndex,
    waiting: VecDeque<Delivery>,
    begun: usize,
    is_claimed: bool,
    end: Option<PacketEnd>,
}

/// Current speed of jobs.
#[derive(Clone, Copy)]
struct Pace {
    time: Time,
    may_be_slow: bool,
    hurries: bool,
}

/// Job that a child runs.
struct Running {
    packet: u64,
    job: Option<Delivery>,
    began_ms: u64,
    ends_ms: u64,
    cost_ns: u64,
    is_cancelled: bool,
    wait: Option<InnerWait>,
}

impl Worker {
    fn new(slots: &[usize], queues: Vec<String>, may_be_slow: bool) -> Self {
        // A worker with one pool runs any task in it; several pools divide the tasks among themselves.
        let tasks = |number: usize| match slots.len() {
            1 => TaskSelection::Any,
            pools => {
                let tasks = TASKS.iter().skip(number).step_by(pools);
                TaskSelection::Named(tasks.map(|task| (*task).to_string()).collect())
            }
        };
        let pools = slots.iter().enumerate();
        let mut pools: Vec<Pool> = pools
            .map(|(number, slots)| Pool::new(*slots, tasks(number), may_be_slow))
            .collect();
        for number in 0..pools.len() {
            if pools[number].shared_by > 1 {
                pools[number].alone = Some(pools.len());
                pools.push(Pool::alone());
            }
        }
        Self {
            queues,
            inbox: Arc::new(Inbox::new(SeededState::default(), || ())),
            pools,
            settled: Vec::new(),
            ended: EndedWaits::default(),
            looks_at_ms: 0,
            may_be_slow,
            is_draining: false,
            hurries: false,
        }
    }

    fn is_idle(&self) -> bool {
        self.pools.iter().all(|pool| pool.policy.is_idle())
            && self.settled.is_empty()
            && self.inbox.unconfirmed() == 0
    }

    fn running(&self) -> impl Iterator<Item = &Delivery> {
        let children = self.pools.iter().flat_map(|pool| &pool.children);
        let parked = self.pools.iter().flat_map(|pool| pool.parked.values());
        let running = children.flatten().chain(parked);
        running.filter_map(|running| running.job.as_ref())
    }

    fn begin_draining(&mut self) {
        self.is_draining = true;
    }

    fn next_deadline_ms(&self) -> Option<u64> {
        let children = self.pools.iter().flat_map(|pool| &pool.children);
        let ends = children.flatten().filter(|running| running.wait.is_none());
        let ends = ends.map(|running| running.ends_ms);
        let looks = self.pools.iter().any(|pool| !pool.packets.is_empty());
        ends.chain(looks.then_some(self.looks_at_ms)).min()
    }

    fn turn(
        &mut self,
        session: &mut DriverSession,
        author: &mut Author,
        rng: &mut Rng,
        time: Time,
    ) {
        self.read_news(time);
        self.break_off_waits(session);
        self.hear_ends_of_waits(time);
        self.run_children(author, rng, time);
        if self.looks_at_ms <= time.steady {
            self.look(session, time);
        }
        if self.is_draining {
            for number in 0..self.pools.len() {
                let waiting = self.pools[number].policy.take_all();
                self.give_back(waiting);
            }
        }
        // Fast children want more, and so do lent slots.
        while self.resume(time)
            || self.hand_out(time)
            || self.begin_waits(session)
            || self.tell_held(session)
        {
            self.run_children(author, rng, time);
        }
        self.pools.iter().for_each(Pool::assert_nobody_waits);
        self.commit(session);
        if !self.is_draining && author.habits.consumes {
            self.ask(session);
        }
        let slots: usize = self.pools.iter().map(|pool| pool.children.len()).sum();
        let busy: usize = self.pools.iter().map(|pool| pool.policy.busy()).sum();
        let parked: usize = self.pools.iter().map(|pool| pool.policy.parked()).sum();
        session.report(WorkerReport {
            slots: slots as u32,
            busy: busy as u32,
            state: WorkerState::Serving,
            takes_asks: false,
            parked: parked as u32,
        });
    }

    /// Sends packets to idle children. Returns whether there were any.
    fn hand_out(&mut self, time: Time) -> bool {
        let mut has_any = false;
        for pool in &mut self.pools {
            has_any |= pool.hand_out();
        }
        if has_any {
            self.looks_at_ms = self.looks_at_ms.max(time.steady + TICK_MS);
        }
        has_any
    }

    /// Requests as many jobs as there are idle slots of each kind.
    fn ask(&mut self, session: &mut DriverSession) {
        for number in 0..self.pools.len() {
            if let Some(alone) = self.pools[number].alone {
                let waiting = self.pools[alone].policy.waiting();
                self.pools[number].policy.set_passed(waiting);
            }
            let pool = &mut self.pools[number];
            if pool.is_alone {
                continue;
            }
            let Credit::Add(credit) = pool.policy.grant() else {
                continue;
            };
            let sink: Arc<Inbox> = Arc::clone(&self.inbox);
            let consume = Consume {
                consumer: number as u32,
                queues: self.queues.clone(),
                tasks: pool.untold.take().unwrap_or_default(),
                add_credit: credit,
                ..Consume::default()
            };
            session.consume(consume, sink);
        }
    }

    fn run_children(&mut self, author: &mut Author, rng: &mut Rng, time: Time) {
        let pace = Pace {
            time,
            may_be_slow: self.may_be_slow,
            hurries: self.hurries,
        };
        for pool in &mut self.pools {
            for child in 0..pool.children.len() {
                let settled = &mut self.settled;
                pool.run_child(child, settled, author, rng, pace);
            }
        }
    }

    /// Releases cancelled jobs that have not begun; running ones will stop soon.
    fn cancel(&mut self, orders: &[CancelOrder], time: Time) {
        let leases: BTreeSet<Lease> = orders.iter().map(|order| order.lease).collect();
        for number in 0..self.pools.len() {
            let unbegun = self.pools[number].cancel(&leases, time);
            self.give_back(unbegun);
        }
    }

    fn read_news(&mut self, time: Time) {
        let News {
            deliveries,
            cancels,
            lost,
            refused,
            failed,
            ..
        } = self.inbox.take();
        for delivery in deliveries {
            let bytes = job_bytes(&delivery);
            let mut pool = &mut self.pools[delivery.consumer as usize];
            if let Some(alone) = pool.alone
                && runs_alone(&delivery.message)
            {
                pool.policy.pass_by();
                pool = &mut self.pools[alone];
            }
            let task = pool.policy.task(&delivery.message.task);
            pool.policy.arrive(task, delivery, bytes);
        }
        if !lost.is_empty() {
            for pool in &mut self.pools {
                pool.forget(&lost);
            }
            self.settled.retain(|(lease, _)| !lost.contains(lease));
        }
        if !cancels.is_empty() {
            self.cancel(&cancels, time);
        }
        for (lease, why) in refused {
            let reason = ReleaseReason::Crashed(format!("the broker refused its outcome: {why}"));
            self.settled
                .push((lease, vec![Op::Release { lease, reason }].into()));
        }
        if let Some(error) = failed {
            panic!("settlements have no deadline, and ended so: {error}");
        }
    }

    /// Takes back jobs that wait behind a long one, and returns surplus jobs to the broker.
    fn look(&mut self, session: &mut DriverSession, time: Time) {
        self.looks_at_ms = time.steady + TICK_MS;
        for number in 0..self.pools.len() {
            let pool = &mut self.pools[number];
            pool.take_back_behind_long_ones(time);
            let surplus = match pool.is_alone {
                true => Vec::new(),
                false => pool.policy.surplus(),
            };
            if pool.policy.withdraw() == Credit::Withdraw {
                session.stop_consumer(number as u32);
            }
            self.give_back(surplus);
        }
    }

    fn give_back(&mut self, jobs: Vec<Delivery>) {
        for job in jobs {
            let tx = settle(&DeliveryHead::from(&job), Outcome::Returned);
            self.settled.push((job.lease, tx));
        }
    }

    fn commit(&mut self, session: &mut DriverSession) {
        if self.settled.is_empty() {
            return;
        }
        let (leases, txs): (Vec<Lease>, Vec<Tx>) = self.settled.drain(..).unzip();
        self.inbox.committing(leases.len());
        let inbox = Arc::clone(&self.inbox);
        let encoded = txs.into_iter().map(Encoded::new).collect();
        let done = Box::new(move |receipts| inbox.confirmed(&leases, receipts));
        session.commit(encoded, Durability::Disk, None, done);
    }
}

impl Pool {
    fn new(slots: usize, tasks: TaskSelection, may_be_slow: bool) -> Self {
        let mut policy = Policy::default();
        // One slot or two per process.
        let shared_by = if may_be_slow { 1 } else { 2 };
        policy.set_slots(slots, slots.div_ceil(shared_by));
        Self {
            policy,
            shared_by,
            alone: None,
            is_alone: false,
            untold: Some(tasks),
            packets: BTreeMap::new(),
            last_packet: 0,
            children: (0..slots).map(|_| None).collect(),
            parked: BTreeMap::new(),
            waits_often: false,
            told_held: Vec::new(),
            broken_off: Vec::new(),
        }
    }

    /// Pool for jobs that run alone, one at a time.
    fn alone() -> Self {
        Self {
            policy: Policy::one_by_one(SeededState::default(), 1),
            is_alone: true,
            untold: None,
            ..Self::new(1, TaskSelection::Any, true)
        }
    }

    /// Checks that a job waits here only while each child has one. Jobs that wait in a packet behind a long one are
    /// taken back at the next look.
    fn assert_nobody_waits(&self) {
        let idle = self.children.iter().filter(|child| child.is_none()).count();
        let waiting = self.policy.waiting();
        assert!(
            waiting == 0 || idle == 0,
            "{waiting} jobs wait beside {idle} idle slots"
        );
    }

    fn hand_out(&mut self) -> bool {
        let before = self.last_packet;
        while let Some(hand_out) = self.policy.next_packet() {
            self.last_packet += 1;
            let packet = Packet {
                task: hand_out.task,
                waiting: hand_out.jobs.into(),
                begun: 0,
                is_claimed: false,
                end: None,
            };
            self.packets.insert(self.last_packet, packet);
        }
        self.last_packet > before
    }

    /// Forgets jobs whose leases are lost; running ones run to their end.
    fn forget(&mut self, lost: &[Lease]) {
        let held = |job: &Delivery| !lost.contains(&job.lease);
        self.policy.retain(held);
        for packet in self.packets.values_mut() {
            packet.waiting.retain(held);
        }
        self.end_packets();
    }

    /// Stops running jobs soon, and returns those that have not begun.
    fn cancel(&mut self, leases: &BTreeSet<Lease>, time: Time) -> Vec<Delivery> {
        let goes_on = |job: &Delivery| !leases.contains(&job.lease);
        let mut unbegun = self.policy.retain(goes_on);
        for packet in self.packets.values_mut() {
            let waiting = std::mem::take(&mut packet.waiting);
            let (others, cancelled): (Vec<_>, Vec<_>) = waiting.into_iter().partition(goes_on);
            packet.waiting = others.into();
            unbegun.extend(cancelled);
        }
        self.break_off(|job| !goes_on(job));
        for running in self.children.iter_mut().flatten() {
            if running.job.as_ref().is_some_and(|job| !goes_on(job)) {
                running.is_cancelled = true;
                running.ends_ms = running.ends_ms.min(time.steady + TICK_MS);
            }
        }
        self.end_packets();
        unbegun
    }

    /// Ends this child's current job when its time is up, and begins the next one.
    fn run_child(
        &mut self,
        child: usize,
        settled: &mut Vec<(Lease, Tx)>,
        author: &mut Author,
        rng: &mut Rng,
        pace: Pace,
    ) {
        let time = pace.time;
        loop {
            if let Some(running) = &mut self.children[child] {
                if running.ends_ms > time.steady || running.wait.is_some() {
                    return;
                }
                let (number, cost_ns) = (running.packet, running.cost_ns);
                // Most stop when asked to. Others have just ended, or ignore it.
                let stops = running.is_cancelled && !rng.one_in(3);
                let task = self.packets[&number].task;
                let may_die = running.job.is_some() && (self.shared_by > 1 || self.is_alone);
                if may_die && !pace.hurries && rng.one_in(24) {
                    self.lose_process(child, settled, rng);
                } else if let Some(job) = running.job.take() {
                    self.policy.observe(task, cost_ns);
                    let tx = match (stops, pace.hurries) {
                        (true, _) => settle(&DeliveryHead::from(&job), Outcome::Returned),
                        (false, true) => success(&job),
                        (false, false) => author.settlement(&job, rng, time.wall),
                    };
                    settled.push((job.lease, tx));
                }
                let packet = self.packets.get_mut(&number).expect("its child has it");
                match packet.waiting.pop_front() {
                    Some(job) => {
                        packet.begun += 1;
                        self.begin(child, number, job, rng, pace);
                    }
                    None => {
                        self.children[child] = None;
                        self.end_packets();
                    }
                }
                continue;
            }
            let mut unclaimed = self
                .packets
                .iter_mut()
                .filter(|(_, packet)| !packet.is_claimed);
            let Some((number, packet)) = unclaimed.next() else {
                return;
            };
            let number = *number;
            packet.is_claimed = true;
            packet.begun += 1;
            let job = packet.waiting.pop_front().expect("no empty packet is out");
            self.begin(child, number, job, rng, pace);
        }
    }

    /// Ends the process to which this child's slot belongs, through the fault of its job. The system may say which job
    /// that was. The guilty job is known here, and the verdict is checked against it.
    fn lose_process(&mut self, child: usize, settled: &mut Vec<(Lease, Tx)>, rng: &mut Rng) {
        let first = child / self.shared_by * self.shared_by;
        let last = (first + self.shared_by).min(self.children.len());
        let mut died = Vec::new();
        for slot in first..last {
            let running = self.children[slot].as_mut();
            if let Some(job) = running.and_then(|running| running.job.take()) {
                died.push((slot, job));
            }
        }
        let is_named = rng.bool();
        for (slot, job) in &died {
            let is_guilty = *slot == child;
            let blame = blame(died.len(), is_named.then_some(is_guilty));
            let outcome = lost(blame, job.message.max_deliveries, "killed by signal 9");
            let is_charged = matches!(outcome, Outcome::Crashed { .. });
            assert!(
                is_guilty || !is_charged || job.message.max_deliveries == 1,
                "{} was charged with a death that was another's",
                job.lease.message
            );
            assert!(
                is_charged || !is_guilty || died.len() > 1,
                "{} killed its process, and was not charged",
                job.lease.message
            );
            settled.push((job.lease, settle(&DeliveryHead::from(job), outcome)));
        }
    }

    fn begin(&mut self, child: usize, packet: u64, job: Delivery, rng: &mut Rng, pace: Pace) {
        let suspects = (job.message.extras.as_ref()).map_or(0, |extras| extras.suspects);
        assert!(
            self.is_alone == (suspects > 0) || self.shared_by == 1 && !self.is_alone,
            "{} runs in the wrong process: it was a suspect {suspects} times",
            job.lease.message
        );
        let took_us = match rng.below(40) {
            // Longer than any heartbeat, because a lease does not end just because a job takes long.
            0 if pace.may_be_slow && !pace.hurries => rng.below(20_000_000),
            1..4 if pace.may_be_slow => rng.below(200_000),
            4..8 => rng.below(20_000),
            _ => rng.below(100),
        };
        // Those that share a process with others may die with them, which is complicated enough.
        let waits = self.shared_by == 1 && !self.is_alone && !pace.hurries && self.waits(&job);
        self.children[child] = Some(Running {
            packet,
            job: Some(job),
            began_ms: pace.time.steady,
            ends_ms: pace.time.steady + took_us / 1_000,
            cost_ns: took_us * 1_000,
            is_cancelled: false,
            wait: waits.then_some(InnerWait::Wanted),
        });
    }

    fn take_back_behind_long_ones(&mut self, time: Time) {
        let mut stuck = 0;
        for child in 0..self.children.len() {
            let began_ms = match &self.children[child] {
                Some(running) if running.began_ms + TICK_MS <= time.steady => running.began_ms,
                _ => continue,
            };
            stuck += usize::from(began_ms + 5 * TICK_MS <= time.steady);
            self.take_back_behind(child);
        }
        self.policy.set_stuck(stuck);
    }

    /// Forgets packets that are finished.
    fn end_packets(&mut self) {
        let running: Vec<u64> = self
            .children
            .iter()
            .flatten()
            .chain(self.parked.values())
            .map(|running| running.packet)
            .collect();
        let policy = &mut self.policy;
        self.packets.retain(|number, packet| {
            let is_over = packet.waiting.is_empty() && !running.contains(number);
            if is_over {
                let end = packet.end.unwrap_or(match packet.begun {
                    0 => PacketEnd::TakenBack,
                    jobs => PacketEnd::Ran { jobs },
                });
                policy.packet_ended(packet.task, end);
            }
            !is_over
        });
    }
}
