//! Runs the loop between the broker and the children. It brings together events from the broker, from the
//! children and from the clock. Decisions about handing out jobs are in policy.rs, and the records of packets
//! in outstanding.rs.
//!
//! The rest of it is in children.rs (processes and their messages), orders.rs (limits and orders of running
//! jobs), lending.rs (slots of jobs that wait for others), questions.rs (orders from people) and broker.rs
//! (deliveries and settlements).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use penstock_driver::ReadSide;
use penstock_message::{Delivery, SeededState, WorkerReport};
use rustix::net::{RecvFlags, recv};
use rustix::process::Rlimit;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

use crate::WorkerConfig;
use crate::config::Connected;
use crate::files::raise_limit;
use crate::inbox::Inbox;
use crate::orphans::{Orphans, reap};
use crate::outstanding::{Left, NotSent, Outstanding};
use crate::packet::job_bytes;
use crate::policy::{Credit, HandOut, PacketEnd, TaskIndex};
use crate::systemd::Notifier;
use crate::zygote::Zygote;

use admission::Admission;
use advice::Advice;
use broker::{Burst, Contact, Settlements};
use children::Child;
use lending::Held;
use memory::Memory;
use orders::Evicted;
use pools::Pool;
use recycle::Recycling;
use resize::Room;

pub(crate) mod admission;
mod advice;
mod broker;
mod cancels;
mod children;
mod lending;
mod memory;
mod orders;
mod pools;
mod questions;
pub(crate) mod recycle;
mod resize;

const INBOX: Token = Token(0);
const STOP_SIGNALS: Token = Token(1);
const ZYGOTE: Token = Token(2);
const ENDS: Token = Token(3);
const BROKER: Token = Token(4);
/// Token of the first pool's socket: the children of pool n pull from `FIRST_POOL + n`.
const FIRST_POOL: usize = 5;
/// Token of the first child's socket: child n has `FIRST_CHILD + n`.
const FIRST_CHILD: usize = 16;

/// Interval of collecting outcomes in the middle of a packet; those at its end are collected at once.
const COLLECT_EVERY: Duration = Duration::from_millis(2);
/// Interval of checking packets. Jobs that wait behind a longer job are taken back.
const TICK: Duration = Duration::from_millis(10);
/// Minimum interval between log lines about a system short of resources.
const SHORTAGE_EVERY: Duration = Duration::from_secs(60);
/// Minimum time that idle children get to exit on their own.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);
/// Time that the broker gets to confirm the last settlements.
const CONFIRM_WITHIN: Duration = Duration::from_secs(5);
/// Time after which a zygote that was asked to kill its children is killed itself.
const KILL_WITHIN: Duration = Duration::from_secs(1);
/// Time after which an exited child of this process is waited for. Not at once, because another part of this
/// program may have started it, such as a local broker, and waits for it in a thread.
const REAP_AFTER: Duration = Duration::from_secs(1);
/// Time that processes left behind by jobs get to exit with the worker.
const ORPHANS_WITHIN: Duration = Duration::from_secs(1);

/// End of a worker; `lib.rs` maps each to an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The worker was asked to stop, or its burst is over; unfinished jobs were handed back.
    InOrder,
    /// The worker was asked twice: running jobs were killed and handed back.
    Forced,
    /// The app can't be loaded.
    App,
    /// A necessary part failed; the log says which.
    Failed,
    /// Its memory limit is below the need of the loaded app.
    NoMemory,
    /// The engine behind the broker lacks a feature that the worker needs; the log says which, and what to do.
    NotOffered,
    /// Its token or the broker's directory is wrong; the log says how to fix it.
    Unusable,
}

/// Phase of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The zygote is loading the app.
    Loading,
    Serving,
    /// No new jobs start; running ones may finish until then (`None`: without a limit).
    Draining {
        until: Option<Instant>,
    },
    /// Nothing runs; children should exit on their own until then.
    Leaving {
        until: Instant,
    },
    /// Children are being killed.
    Killing {
        until: Instant,
    },
}

pub struct Supervisor {
    config: WorkerConfig,
    /// Connection to the broker; none before the app is loaded, since the app may name its broker.
    broker: Option<Connected>,
    /// Connection that this thread reads, instead of the driver's.
    reading: Option<ReadSide>,
    contact: Contact,
    /// Location of the app.
    place: String,
    inbox: Arc<Inbox>,
    poll: Poll,
    stop_signals: UnixStream,
    /// Pipe on which the system reports exited children of this process.
    ends: UnixStream,
    orphans: Orphans,
    reap_at: Option<Instant>,
    manager: Notifier,
    phase: Phase,
    end: End,
    /// Whether it starts no jobs until it is resumed.
    is_paused: bool,

    zygote: Option<Zygote>,
    /// Earliest time to start the next zygote, if there is none.
    zygote_from: Option<Instant>,
    /// Number of consecutive zygotes that were lost before a job ended.
    zygotes_lost: u32,
    pools: Vec<Pool>,
    children: Vec<Child>,
    alive: usize,
    /// Child that is being forked, with the start time.
    forking: Option<(u32, Instant)>,
    recycling: Recycling,
    room: Room,
    /// Maximum number of evicted processes at a time.
    evictions: usize,
    has_been_resized: bool,
    /// Whether pools may have more or fewer children than they should.
    is_unfit: bool,
    memory: Memory,
    advice: Advice,
    admission: Admission,
    /// Number of jobs sent so far that run alone.
    alone_sent: u64,
    /// Single-use children whose job has ended, with the time by which they must have exited: number and
    /// process.
    leaving: VecDeque<(Instant, u32, i32)>,
    /// Children with a job that does not end, replaced by others.
    evicted: Vec<Evicted>,
    /// By place: jobs that wait for others and keep their slots.
    held: BTreeMap<usize, Held>,
    /// Time of the last log line about it.
    held_logged: Option<Instant>,

    outstanding: Outstanding,
    settlements: Settlements,
    queues: Vec<String>,
    /// Name of the app.
    app: String,
    /// Number of jobs received.
    deliveries: u64,
    /// Whether the broker is reachable, so that our leases surely still hold.
    in_reach: bool,

    /// Time until which nothing is sent to children, because the system was short of resources.
    send_from: Option<Instant>,
    /// Time of the last log line about it.
    shortage_logged: Option<Instant>,
    /// Limit of open files for the processes that run jobs.
    open_files: Rlimit,

    collect_at: Option<Instant>,
    tick_at: Option<Instant>,
    burst: Burst,
    reported: Option<WorkerReport>,
    reported_at: Instant,
    report_from: Instant,
    notices_from: Instant,
    ring_buffer: Vec<u8>,
    socket_buffer: Vec<u8>,
}

/// Whether the starter of this process wants it to survive the signal, as `nohup` does with SIGHUP.
fn is_ignored(signal: i32) -> bool {
    // SAFETY: all zeros is a valid `sigaction`, and without a new action the call only returns the old one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let told = libc::sigaction(signal, std::ptr::null(), &mut action);
        told == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}

impl Supervisor {
    pub fn new(config: WorkerConfig) -> io::Result<Self> {
        let orphans = Orphans::adopt();
        let open_files = raise_limit();
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), INBOX)?;
        let hashing = SeededState::new(getrandom::u64().map_err(io::Error::other)?);
        let inbox = Arc::new(Inbox::new(hashing, move || {
            if let Err(error) = waker.wake() {
                tracing::error!(%error, "the worker's loop cannot be woken");
            }
        }));

        let (stop_signals, raised) = UnixStream::pair()?;
        stop_signals.set_nonblocking(true)?;
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            if signal != SIGHUP || !is_ignored(SIGHUP) {
                signal_hook::low_level::pipe::register(signal, raised.try_clone()?)?;
            }
        }
        let (ends, ended) = UnixStream::pair()?;
        ends.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(SIGCHLD, ended)?;
        let layout = pools::lay_out(&config.pools);
        let spares = recycle::spares(&layout);
        let room = Room::of(&layout, spares);
        let evictions = spares.0 as usize;
        let all = lending::room(
            &layout,
            config.max_parked,
            (room.children + spares.0, room.places + spares.1),
        );
        let (outstanding, sockets) = Outstanding::new(layout.len(), all)?;
        let now = Instant::now();
        let mut pools: Vec<Pool> = std::iter::zip(&layout, sockets)
            .map(|(pool, socket)| Pool::new(*pool, socket, hashing))
            .collect();
        for (pool, layout) in std::iter::zip(&mut pools, &layout) {
            let most = layout.max_parked(config.max_parked);
            pool.policy.set_max_parked(most as usize);
        }
        let pages = &outstanding.pages;
        let mut children: Vec<Child> = pools::of_children(&layout)
            .zip(0..)
            .map(|(pool, child)| Child::new(pool, pages.ring(child), now))
            .collect();
        let spares = (children.len() as u32..all.0).map(|child| pages.ring(child));
        children.extend(spares.map(|ring| Child::spare(ring, now)));
        let recycling = Recycling::new(config.recycle, now);
        let memory = Memory::new(config.memory);
        let supervisor = Self {
            config,
            broker: None,
            reading: None,
            contact: Contact::missing_from(now),
            place: String::new(),
            inbox,
            poll,
            stop_signals,
            ends,
            orphans,
            reap_at: None,
            manager: Notifier::from_environment(now),
            phase: Phase::Loading,
            end: End::InOrder,
            is_paused: false,
            zygote: None,
            zygote_from: Some(now),
            zygotes_lost: 0,
            pools,
            children,
            alive: 0,
            forking: None,
            recycling,
            room,
            evictions,
            has_been_resized: false,
            is_unfit: false,
            memory,
            advice: Advice::default(),
            admission: Admission::default(),
            alone_sent: 0,
            leaving: VecDeque::new(),
            evicted: Vec::new(),
            held: BTreeMap::new(),
            held_logged: None,
            outstanding,
            settlements: Settlements::default(),
            queues: Vec::new(),
            app: String::new(),
            deliveries: 0,
            in_reach: true,
            send_from: None,
            shortage_logged: None,
            open_files,
            collect_at: None,
            tick_at: None,
            burst: Burst::new(now),
            reported: None,
            reported_at: now,
            report_from: now,
            notices_from: now,
            ring_buffer: Vec::new(),
            socket_buffer: vec![0; 64 * 1024],
        };
        supervisor.listen(&supervisor.stop_signals, STOP_SIGNALS, Interest::READABLE)?;
        supervisor.listen(&supervisor.ends, ENDS, Interest::READABLE)?;
        Ok(supervisor)
    }

    fn listen(&self, socket: &impl AsFd, token: Token, interest: Interest) -> io::Result<()> {
        let registry = self.poll.registry();
        registry.register(&mut SourceFd(&socket.as_fd().as_raw_fd()), token, interest)
    }

    fn ignore(&self, socket: &impl AsFd) {
        let registry = self.poll.registry();
        // Deregistering fails if the socket was not registered, which is fine.
        let _ = registry.deregister(&mut SourceFd(&socket.as_fd().as_raw_fd()));
    }

    pub fn run(mut self) -> io::Result<End> {
        self.start_zygote(Instant::now())?;
        let mut events = Events::with_capacity(256);
        loop {
            let timeout = self
                .next_deadline()
                .map(|at| at.saturating_duration_since(Instant::now()));
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != io::ErrorKind::Interrupted
            {
                return Err(error);
            }
            for event in &events {
                match event.token() {
                    INBOX => {}
                    STOP_SIGNALS => self.hear_signals(),
                    ZYGOTE => self.hear_zygote(),
                    ENDS => self.hear_ends(),
                    BROKER => self.read_broker(),
                    // They are sent with the packets below.
                    Token(..FIRST_CHILD) => self.send_from = Some(Instant::now()),
                    Token(number) => self.collect((number - FIRST_CHILD) as u32),
                }
            }
            let now = Instant::now();
            self.read_news(now);
            self.keep_time(now)?;
            self.fit(now);
            self.recycle(now);
            self.let_go();
            self.lend(now);
            self.fork_wanted(now);
            self.send_packets(now);
            self.commit();
            self.report(now);
            if self.phase == Phase::Serving {
                self.log_notices(now);
                self.look_at_burst(now);
                self.look_for_broker(now);
            }
            if self.is_over() {
                self.leave();
                return Ok(self.end);
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let phase = match self.phase {
            Phase::Loading | Phase::Serving => None,
            Phase::Draining { until } => until,
            Phase::Leaving { until } | Phase::Killing { until } => Some(until),
        };
        let serving = self.phase == Phase::Serving;
        let notices = serving.then_some(self.notices_from);
        [
            phase,
            self.next_report(),
            notices,
            self.next_fork(),
            self.next_question(),
            self.next_look(),
            self.next_overdue(),
            self.recycling.next(),
            self.next_lending(),
            self.memory.look_at,
            self.next_limit(),
            self.manager.next_ping(),
            self.reap_at,
            self.zygote_from,
            self.send_from,
            self.collect_at,
            self.tick_at,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Handles the passing of time: ticks and phases.
    fn keep_time(&mut self, now: Instant) -> io::Result<()> {
        self.manager.ping(now);
        if self.reap_at.is_some_and(|at| at <= now) {
            self.reap_at = None;
            reap(self.zygote.as_ref().and_then(Zygote::pid));
        }
        if self.zygote_from.is_some_and(|from| from <= now) {
            self.start_zygote(now)?;
        }
        if self.next_overdue().is_some_and(|at| at <= now) {
            self.kill_overdue(now);
        }
        if self.next_limit().is_some_and(|at| at <= now) {
            self.keep_limits(now);
        }
        if self.collect_at.is_some_and(|at| at <= now) {
            for owner in self.outstanding.owners_of_large() {
                self.collect(owner);
            }
            self.collect_at = self.outstanding.any_large().then(|| now + COLLECT_EVERY);
        }
        if self.tick_at.is_some_and(|at| at <= now) {
            self.tick_at = None;
            self.tick(now);
        }
        if self.memory.look_at.is_some_and(|at| at <= now) {
            self.look_at_memory(now);
        }
        match self.phase {
            Phase::Draining { .. } if self.has_nothing() => self.begin_leaving(now),
            Phase::Draining { until: Some(until) } if until <= now => {
                tracing::warn!(
                    running = self.busy() + self.parked(),
                    "the grace is over: running jobs are stopped and handed back"
                );
                self.begin_killing(now);
            }
            Phase::Leaving { until } if until <= now => self.begin_killing(now),
            Phase::Killing { until } if until <= now => self.lose_zygote(now),
            _ => {}
        }
        Ok(())
    }

    fn send_packets(&mut self, now: Instant) {
        let is_due = match self.send_from {
            Some(from) if from > now => return,
            Some(_) => true,
            None => false,
        };
        self.send_from = None;
        for pool in 0..self.pools.len() {
            let unsent = match is_due {
                true => self.outstanding.send_unsent(pool),
                false => Ok(()),
            };
            let sent = unsent.and_then(|()| self.send_packets_of(pool, now));
            if let Err(error) = sent.and_then(|()| self.await_room(pool)) {
                self.send_later(now, &error);
            }
        }
    }

    /// Listens for room in a pool's socket while that is full. Not always: each packet that a slot takes makes room, and
    /// would wake this process.
    fn await_room(&mut self, pool: usize) -> io::Result<()> {
        let is_full = !self.outstanding.is_sent(pool);
        if is_full == self.pools[pool].awaits_room {
            return Ok(());
        }
        let Some(socket) = self.outstanding.socket(pool) else {
            return Ok(());
        };
        match is_full {
            true => self.listen(&socket, Token(FIRST_POOL + pool), Interest::WRITABLE)?,
            false => self.ignore(&socket),
        }
        self.pools[pool].awaits_room = is_full;
        Ok(())
    }

    fn send_packets_of(&mut self, pool: usize, now: Instant) -> io::Result<()> {
        while self.in_reach && self.outstanding.has_room(pool) && self.may_send(pool) {
            if self.is_kept(pool, now) {
                break;
            }
            if self.is_next_held(pool, now) {
                continue;
            }
            let Some(hand_out) = self.pools[pool].policy.next_packet() else {
                break;
            };
            if hand_out.jobs.len() > 1 {
                self.collect_at.get_or_insert(now + COLLECT_EVERY);
            }
            self.tick_at.get_or_insert(now + TICK);
            if self.pools[pool].is_alone {
                self.alone_sent += 1;
                self.pools[pool].turn = self.alone_sent;
            }
            self.reserve(pool, &hand_out);
            let task = self.pools[pool].policy.task_name(hand_out.task);
            if let Err(NotSent { error, hand_out }) = self.outstanding.send(pool, task, hand_out) {
                if let Some(HandOut { task, jobs }) = hand_out {
                    if let Some(place) = self.outstanding.next_place() {
                        self.release(place);
                    }
                    self.put_back(pool, task, jobs);
                    let policy = &mut self.pools[pool].policy;
                    policy.packet_ended(task, PacketEnd::TakenBack);
                }
                return Err(error);
            }
            self.memory.begin(now);
        }
        Ok(())
    }

    /// Sends packets. A job that can't be sent at the moment waits; running ones continue.
    fn send_later(&mut self, now: Instant, error: &io::Error) {
        self.send_from = Some(now + TICK);
        self.tell_of_shortage(now, "send jobs to the processes that run them", error);
    }

    fn tell_of_shortage(&mut self, now: Instant, what: &str, error: &io::Error) {
        let logged = self.shortage_logged;
        if logged.is_none_or(|logged| logged + SHORTAGE_EVERY <= now) {
            self.shortage_logged = Some(now);
            tracing::warn!(
                "the worker can't {what} at the moment: {error}; it keeps trying, nothing is lost, and running jobs \
                 continue"
            );
        }
    }

    fn put_back(&mut self, pool: usize, task: TaskIndex, jobs: Vec<Delivery>) {
        let with_bytes = jobs.into_iter().map(|job| {
            let bytes = job_bytes(&job);
            (job, bytes)
        });
        let pool = &mut self.pools[pool];
        pool.policy.put_back(task, with_bytes);
        // A death takes back what no process has claimed. Counted as a turn, each death of one kind's process
        // would use up a turn of the other kind.
        pool.turn = 0;
    }

    /// Takes back the jobs of a packet that have not begun: to be sent again, or handed back at the end.
    fn take_back(&mut self, place: usize, end: PacketEnd) {
        let Some(left) = self.outstanding.take_back(place, end) else {
            return;
        };
        let Left {
            pool,
            task,
            jobs,
            end,
        } = left;
        let may_begin = matches!(self.phase, Phase::Loading | Phase::Serving) && !self.is_paused;
        if may_begin {
            self.put_back(pool, task, jobs);
        } else {
            self.settlements.give_back(jobs);
        }
        if let Some(end) = end {
            self.release(place);
            self.memory.forget_place(place);
            self.pools[pool].policy.packet_ended(task, end);
        }
    }

    /// Finds slots that have had the same job for a while, takes back the jobs behind it, and hands surplus
    /// jobs back to the broker.
    fn tick(&mut self, now: Instant) {
        self.find_reserved();
        for pool in 0..self.pools.len() {
            self.measure_begun(pool);
            let look = self
                .outstanding
                .look(pool, self.pools[pool].slots_or_more());
            for place in look.slow {
                self.take_back(place, PacketEnd::Slow);
            }
            let is_alone = self.pools[pool].is_alone;
            let policy = &mut self.pools[pool].policy;
            policy.set_stuck(self.outstanding.stuck(pool));
            // They would come straight back while no other worker has a slot for them.
            let surplus = match is_alone {
                true => Vec::new(),
                false => policy.surplus(),
            };
            let credit = policy.withdraw();
            if credit == Credit::Withdraw {
                self.withdraw(pool);
            }
            // While nothing changes, there is nothing to look for until a packet is sent or an outcome comes
            // in.
            if look.again || !surplus.is_empty() || credit != Credit::Keep {
                self.tick_at = Some(now + TICK);
            }
            self.settlements.give_back(surplus);
        }
    }

    /// Handles an exited child: an orphan of a job, or the zygote, whose closed socket reports its end.
    fn hear_ends(&mut self) {
        let mut heard = [0; 64];
        while let Ok((_, 1..)) = recv(&self.ends, &mut heard[..], RecvFlags::empty()) {}
        self.reap_at.get_or_insert(Instant::now() + REAP_AFTER);
    }

    // From the first signal to the goodbye.

    fn hear_signals(&mut self) {
        let mut heard = [0; 16];
        let now = Instant::now();
        while let Ok((_, count)) = recv(&self.stop_signals, &mut heard[..], RecvFlags::empty())
            && count > 0
        {
            for _ in 0..count {
                self.hear_stop(now);
            }
        }
    }

    fn hear_stop(&mut self, now: Instant) {
        match self.phase {
            Phase::Loading => self.begin_killing(now),
            // A drain has no limit, and this is the first signal.
            Phase::Serving | Phase::Draining { until: None } => {
                let running = self.busy() + self.parked();
                let grace = self.config.grace;
                if running > 0 {
                    tracing::info!(
                        running,
                        "stopping: running jobs have {} s to end; signal again to stop at once",
                        grace.as_secs_f32()
                    );
                } else {
                    tracing::info!("stopping");
                }
                self.begin_draining(Some(now + grace));
            }
            Phase::Draining { .. } | Phase::Leaving { .. } => {
                if !self.has_nothing() {
                    self.end = End::Forced;
                }
                self.begin_killing(now);
            }
            Phase::Killing { .. } => {}
        }
    }

    /// Stops taking new jobs; jobs that have not begun are handed back.
    fn begin_draining(&mut self, until: Option<Instant>) {
        let was_draining = matches!(self.phase, Phase::Draining { .. });
        self.phase = Phase::Draining { until };
        if until.is_some() {
            // A drain has no limit, but a service manager would apply its own.
            self.manager.stopping();
        }
        if was_draining {
            return;
        }
        self.zygote_from = None;
        self.stop_consuming();
        for pool in &mut self.pools {
            pool.policy.close();
            self.settlements.give_back(pool.policy.take_all());
        }
        for place in self.outstanding.all_places() {
            self.take_back(place, PacketEnd::TakenBack);
        }
    }

    /// Closes the socket that children pull from: each exits when it notices.
    fn begin_leaving(&mut self, now: Instant) {
        let grace = match self.phase {
            Phase::Draining { until: Some(until) } => until,
            _ => now,
        };
        self.manager.stopping();
        self.phase = Phase::Leaving {
            until: grace.max(now + LEAVE_WITHIN),
        };
        self.close_work();
    }

    fn close_work(&mut self) {
        for (_, socket) in self.outstanding.sockets() {
            self.ignore(&socket);
        }
        self.outstanding.close();
    }

    fn begin_killing(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::Draining { .. } | Phase::Leaving { .. }) {
            self.begin_draining(None);
        }
        self.manager.stopping();
        self.phase = Phase::Killing {
            until: now + KILL_WITHIN,
        };
        self.close_work();
        let told = self.zygote.as_mut().map(Zygote::kill_children);
        if self.alive == 0 || told.is_none_or(|told| told.is_err()) {
            self.lose_zygote(now);
        }
    }

    fn is_over(&self) -> bool {
        match self.phase {
            Phase::Loading | Phase::Serving => false,
            Phase::Draining { .. } => self.zygote.is_none(),
            Phase::Leaving { .. } | Phase::Killing { .. } => {
                (self.alive == 0 && self.forking.is_none()) || self.zygote.is_none()
            }
        }
    }

    /// Settles the remaining jobs, and says goodbye to the broker.
    fn leave(&mut self) {
        if let Some(zygote) = self.zygote.take() {
            zygote.leave();
        }
        let left = self.inbox.take().deliveries;
        self.settlements.give_back(left);
        self.commit();
        self.stop_reading();
        if let Some(broker) = &self.broker {
            // Don't wait for a query that an unreachable broker has not answered.
            let patience = match self.inbox.unconfirmed() {
                0 => Duration::ZERO,
                _ => CONFIRM_WITHIN,
            };
            broker.driver.close(Instant::now() + patience);
        }
        let unconfirmed = self.inbox.unconfirmed();
        if unconfirmed > 0 {
            tracing::warn!(
                unconfirmed,
                "the broker did not confirm the outcomes of the last jobs: they may run again"
            );
        }
        let killed = self.orphans.end(ORPHANS_WITHIN);
        if killed > 0 {
            tracing::warn!(
                killed,
                "processes that jobs have started did not end with the worker, and were killed. A process that should \
                 outlive the worker needs its own session (start_new_session=True)"
            );
        }
    }
}
