//! The loop between the broker and the children. It decides nothing about hand-out (policy.rs does) and
//! keeps the books: which job is in which packet, who has it, and how it ended.

use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, take};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use penstock_driver::{Driver, DriverError};
use penstock_jobs::{DeliveryHead, Outcome, settle};
use penstock_message::{Answer, Delivery, Durability, Lease, Op, Query, ReleaseReason, Tx};
use rustc_hash::FxHashSet;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, sendmsg, socketpair,
};

use crate::WorkerConfig;
use crate::inbox::{Inbox, News};
use crate::packet::{
    INLINE_PAYLOAD_BYTES, Kind, OutcomeFrame, PacketHeader, Reader, encode_job, job_bytes,
};
use crate::page::{Pages, RingReader, anonymous_file};
use crate::policy::{Credit, HandOut, PacketEnd, Policy, TaskIndex};
use crate::zygote::{self, Said, Zygote, describe_status};

const INBOX: Token = Token(0);
const STOP_SIGNALS: Token = Token(1);
const ZYGOTE: Token = Token(2);
const WORK: Token = Token(3);
/// The socket of slot n is `FIRST_SLOT + n`.
const FIRST_SLOT: usize = 16;

/// Outcomes in the midst of a packet are collected so often; those at its end at once.
const COLLECT_EVERY: Duration = Duration::from_millis(2);
/// How often packets are looked at. What waits behind a job that takes longer than this is taken back.
const TICK: Duration = Duration::from_millis(10);
/// A child that has been at one job for so many ticks is stuck: this worker should not hold work for it.
/// More than one, since on a busy machine a process can wait for a processor that long.
const STUCK_TICKS: u32 = 5;
/// How often the broker is told how many slots are busy, at most.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// How long after an answer that was not the last a burst asks again.
const BURST_ASKS_EVERY: Duration = Duration::from_millis(50);
/// Within this the broker must answer a question.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Children that have nothing to do get at least this long to end by themselves.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);
/// So long the broker may take to confirm the last settlements.
const CONFIRM_WITHIN: Duration = Duration::from_secs(5);
/// A zygote that has been told to kill its children is killed itself after this.
const KILL_WITHIN: Duration = Duration::from_secs(1);

/// How a worker ended; `lib.rs` says which exit code each becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Told to, or its burst is over; what had not ended was handed back.
    InOrder,
    /// Told twice: running jobs were killed and handed back.
    Forced,
    /// The app could not be loaded.
    App,
    /// Something that it needs failed; the log says what.
    Failed,
}

/// What this worker is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The zygote loads the app.
    Loading,
    Serving,
    /// Nothing new; what runs may end until then (`None`: however long it takes).
    Draining {
        until: Option<Instant>,
    },
    /// Nothing runs; children are to end by themselves until then.
    Leaving {
        until: Instant,
    },
    /// Children are being killed.
    Killing {
        until: Instant,
    },
}

/// A packet that was sent and is not done.
struct Packet {
    sequence: u32,
    task: TaskIndex,
    /// By index; `None` once it has ended or was taken back.
    jobs: Vec<Option<Delivery>>,
    /// How many are `Some`.
    open: usize,
    /// None of its jobs had to be taken back.
    whole: bool,
    slow: bool,
    /// How many had begun at the last tick; `None` before its first.
    begun_at_tick: Option<usize>,
    /// Ticks in a row at which nothing had begun since the one before.
    still_ticks: u32,
    stuck: bool,
}

enum Life {
    /// To be forked, not before this.
    Wanted {
        from: Instant,
    },
    Forking,
    Alive {
        pid: i32,
        since: Instant,
    },
    /// It ended when it was told to; no other follows.
    Gone,
}

struct Slot {
    life: Life,
    reply: Option<UnixStream>,
    ring: RingReader,
    incoming: BytesMut,
    /// Children in a row that died without having ended a job.
    failures: u32,
    ended_a_job: bool,
}

/// A packet that did not fit into the shared socket; sent as soon as there is room.
struct Unsent {
    bytes: Vec<u8>,
    file: Option<OwnedFd>,
}

/// Settlements of one pass.
#[derive(Default)]
struct Settlements {
    txs: Vec<Tx>,
    leases: Vec<Lease>,
}

impl Settlements {
    fn add(&mut self, delivery: Delivery, outcome: Outcome) {
        self.leases.push(delivery.lease);
        self.txs.push(settle(&head(delivery), outcome));
    }

    fn give_back(&mut self, deliveries: impl IntoIterator<Item = Delivery>) {
        for delivery in deliveries {
            self.add(delivery, Outcome::Returned);
        }
    }
}

/// What settling needs, without a copy.
fn head(delivery: Delivery) -> DeliveryHead {
    let message = delivery.message;
    DeliveryHead {
        lease: delivery.lease,
        task: message.task,
        queue: delivery.queue,
        result_ttl_ms: message.result_ttl_ms,
        attempt: message.attempt,
        crashes: message.crashes,
        max_deliveries: message.max_deliveries,
        redelivered: delivery.redelivered,
    }
}

/// Asking the broker whether a burst is over.
struct Burst {
    /// A question is on its way.
    asked: bool,
    ask_from: Instant,
    /// Deliveries so far when it was asked: if more came since, the answer is out of date.
    deliveries: u64,
}

pub struct Supervisor {
    config: WorkerConfig,
    driver: Arc<dyn Driver>,
    inbox: Arc<Inbox>,
    poll: Poll,
    stop_signals: UnixStream,
    stops_asked: u32,
    phase: Phase,
    end: End,

    zygote: Option<Zygote>,
    queues: Vec<String>,
    /// Where packets go in; children pull from the other end, kept for later zygotes. No child has this
    /// end, so that all of them see the supervisor's death.
    work: Option<OwnedFd>,
    work_children: OwnedFd,
    pages: Pages,
    slots: Vec<Slot>,
    alive: usize,
    forking: Option<u32>,

    policy: Policy<Delivery>,
    packets: Vec<Option<Packet>>,
    free_places: Vec<usize>,
    last_sequence: u32,
    unsent: Option<Unsent>,
    /// Packets of more than one job that are out: their outcomes are collected on the way.
    large_out: usize,
    settlements: Settlements,
    deliveries: u64,

    collect_at: Option<Instant>,
    tick_at: Option<Instant>,
    burst: Burst,
    reported: Option<(u32, u32)>,
    report_from: Instant,
    scratch: Vec<u8>,
    chunk: Vec<u8>,
}

impl Supervisor {
    pub fn new(config: WorkerConfig) -> io::Result<Self> {
        let poll = Poll::new()?;
        let inbox = Arc::new(Inbox::new(Waker::new(poll.registry(), INBOX)?));

        let (stop_signals, raised) = UnixStream::pair()?;
        stop_signals.set_nonblocking(true)?;
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            signal_hook::low_level::pipe::register(signal, raised.try_clone()?)?;
        }
        poll.registry().register(
            &mut SourceFd(&stop_signals.as_raw_fd()),
            STOP_SIGNALS,
            Interest::READABLE,
        )?;

        // macOS has no SOCK_SEQPACKET for Unix sockets; its SOCK_DGRAM between a pair keeps packets apart,
        // and their order, just as well.
        #[cfg(target_os = "linux")]
        let kind = SocketType::SEQPACKET;
        #[cfg(not(target_os = "linux"))]
        let kind = SocketType::DGRAM;
        let (work, work_children) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        poll.registry()
            .register(&mut SourceFd(&work.as_raw_fd()), WORK, Interest::WRITABLE)?;

        let slots = config.slots;
        // Each child has one packet and at most one more waits for it.
        let places = 2 * slots as usize;
        let pages = Pages::new(slots, places)?;
        let now = Instant::now();
        let slots = (0..slots)
            .map(|slot| Slot {
                life: Life::Wanted { from: now },
                reply: None,
                ring: pages.fresh_ring(slot),
                incoming: BytesMut::new(),
                failures: 0,
                ended_a_job: false,
            })
            .collect();
        Ok(Self {
            driver: Arc::clone(&config.driver),
            config,
            inbox,
            poll,
            stop_signals,
            stops_asked: 0,
            phase: Phase::Loading,
            end: End::InOrder,
            zygote: None,
            queues: Vec::new(),
            work: Some(work),
            work_children,
            pages,
            slots,
            alive: 0,
            forking: None,
            policy: Policy::default(),
            packets: (0..places).map(|_| None).collect(),
            free_places: (0..places).rev().collect(),
            last_sequence: 0,
            unsent: None,
            large_out: 0,
            settlements: Settlements::default(),
            deliveries: 0,
            collect_at: None,
            tick_at: None,
            burst: Burst {
                asked: false,
                ask_from: now,
                deliveries: 0,
            },
            reported: None,
            report_from: now,
            scratch: Vec::new(),
            chunk: vec![0; 64 * 1024],
        })
    }

    pub fn run(mut self) -> io::Result<End> {
        self.start_zygote()?;
        self.ask_status();
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
                    WORK => self.send_unsent()?,
                    STOP_SIGNALS => self.hear_signals(),
                    ZYGOTE => self.hear_zygote()?,
                    Token(number) => self.collect((number - FIRST_SLOT) as u32),
                }
            }
            let now = Instant::now();
            self.read_news(now);
            self.keep_time(now);
            self.fork_wanted(now)?;
            self.send_packets()?;
            self.commit();
            self.grant();
            if self.phase == Phase::Serving {
                self.report(now);
                self.look_at_burst(now);
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
        let fork = self
            .slots
            .iter()
            .filter_map(|slot| match slot.life {
                Life::Wanted { from } => Some(from),
                _ => None,
            })
            .min()
            .filter(|_| self.phase == Phase::Serving && self.forking.is_none());
        let serving = self.phase == Phase::Serving;
        let report = (serving && self.reported != Some(self.figures())).then_some(self.report_from);
        let burst = (serving && self.config.burst && !self.burst.asked && self.is_idle())
            .then_some(self.burst.ask_from);
        [phase, fork, report, burst, self.collect_at, self.tick_at]
            .into_iter()
            .flatten()
            .min()
    }

    /// The passing of time: ticks and phases.
    fn keep_time(&mut self, now: Instant) {
        if self.collect_at.is_some_and(|at| at <= now) {
            self.collect_at = None;
            self.collect_large();
        }
        if self.tick_at.is_some_and(|at| at <= now) {
            self.tick_at = None;
            self.tick(now);
        }
        match self.phase {
            Phase::Draining { .. } if self.policy.is_idle() => {
                self.begin_leaving(now);
            }
            Phase::Draining { until: Some(until) } if until <= now => {
                tracing::warn!(
                    running = self.policy.busy(),
                    "the grace is over: jobs that still run are stopped and handed back"
                );
                self.begin_killing(now);
            }
            Phase::Leaving { until } if until <= now => self.begin_killing(now),
            Phase::Killing { until } if until <= now => self.lose_zygote(now),
            _ => {}
        }
    }

    // The zygote and its children.

    fn start_zygote(&mut self) -> io::Result<()> {
        let start = zygote::Start {
            python: &self.config.python,
            app: &self.config.app,
            name: &self.config.name,
            work: self.work_children.as_fd(),
            pages: self.pages.as_fd(),
            log: self.config.log,
        };
        let zygote = Zygote::start(&start).map_err(|error| {
            let python = self.config.python.display();
            io::Error::new(error.kind(), format!("cannot start {python}: {error}"))
        })?;
        self.poll.registry().register(
            &mut SourceFd(&zygote.as_fd().as_raw_fd()),
            ZYGOTE,
            Interest::READABLE,
        )?;
        self.zygote = Some(zygote);
        Ok(())
    }

    fn hear_zygote(&mut self) -> io::Result<()> {
        let Some(zygote) = &mut self.zygote else {
            return Ok(());
        };
        let (said, alive) = zygote.listen();
        let now = Instant::now();
        for said in said {
            match said {
                Said::Ready { queues } => self.begin_serving(queues),
                Said::Failed(text) => {
                    tracing::error!("{text}");
                    self.end = End::App;
                }
                Said::Warning(text) => tracing::warn!("{text}"),
                Said::Forked { slot, pid } => self.child_forked(slot, pid, now),
                Said::Unforked { slot, why } => {
                    tracing::error!(slot, "cannot start another process: {why}");
                    self.child_unforked(slot, now);
                }
                Said::Died { slot, pid, status } => self.child_died(slot, pid, status, now),
            }
        }
        if alive {
            return Ok(());
        }
        self.lose_zygote(now);
        match self.phase {
            Phase::Loading | Phase::Serving if self.end == End::App => self.begin_killing(now),
            Phase::Loading => {
                self.end = End::Failed;
                self.begin_killing(now);
            }
            Phase::Serving => self.start_zygote()?,
            Phase::Draining { .. } | Phase::Leaving { .. } | Phase::Killing { .. } => {}
        }
        Ok(())
    }

    /// Ends the zygote and all children at once, and settles what they ran.
    fn lose_zygote(&mut self, now: Instant) {
        let Some(zygote) = self.zygote.take() else {
            return;
        };
        let _ = self
            .poll
            .registry()
            .deregister(&mut SourceFd(&zygote.as_fd().as_raw_fd()));
        let how = zygote.end();
        if self.end != End::App && matches!(self.phase, Phase::Loading | Phase::Serving) {
            tracing::error!("the zygote, which forks the processes that run jobs, was lost: {how}");
        }
        self.forking = None;
        let reason = format!("its worker's zygote was lost: {how}");
        for slot in 0..self.slots.len() as u32 {
            self.bury(slot, &reason);
            self.slots[slot as usize].life = Life::Wanted { from: now };
        }
        self.alive = 0;
        self.policy.set_children(0);
    }

    fn begin_serving(&mut self, queues: Vec<String>) {
        if self.phase != Phase::Loading {
            return;
        }
        self.phase = Phase::Serving;
        self.queues = self.config.queues.clone().unwrap_or_else(|| {
            let mut queues: Vec<String> = queues;
            queues.push("default".to_owned());
            queues.sort();
            queues.dedup();
            queues
        });
        tracing::info!(
            "{} runs {} on {} {} from {}; queues: {}",
            self.config.name,
            self.config.app,
            self.config.slots,
            if self.config.slots == 1 {
                "slot"
            } else {
                "slots"
            },
            self.config.broker,
            self.queues.join(", ")
        );
    }

    /// One fork at a time: the zygote does no more, and a slot that can't live holds up no other for long.
    fn fork_wanted(&mut self, now: Instant) -> io::Result<()> {
        if self.phase != Phase::Serving || self.forking.is_some() {
            return Ok(());
        }
        let due = self
            .slots
            .iter()
            .position(|slot| matches!(slot.life, Life::Wanted { from } if from <= now));
        let (Some(number), Some(zygote)) = (due, &mut self.zygote) else {
            return Ok(());
        };
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        if zygote.fork(number as u32, theirs.into()).is_err() {
            // It is dead; its closed socket tells so in a moment.
            return Ok(());
        }
        self.poll.registry().register(
            &mut SourceFd(&ours.as_raw_fd()),
            Token(FIRST_SLOT + number),
            Interest::READABLE,
        )?;
        let ring = self.pages.fresh_ring(number as u32);
        let slot = &mut self.slots[number];
        slot.ring = ring;
        slot.incoming.clear();
        slot.reply = Some(ours);
        slot.life = Life::Forking;
        slot.ended_a_job = false;
        self.forking = Some(number as u32);
        Ok(())
    }

    fn child_forked(&mut self, slot: u32, pid: i32, now: Instant) {
        if self.forking != Some(slot) {
            return;
        }
        self.forking = None;
        self.slots[slot as usize].life = Life::Alive { pid, since: now };
        self.alive += 1;
        self.policy.set_children(self.alive);
    }

    fn child_unforked(&mut self, number: u32, now: Instant) {
        if self.forking != Some(number) {
            return;
        }
        self.forking = None;
        let slot = &mut self.slots[number as usize];
        slot.failures = (slot.failures + 1).max(3);
        slot.life = Life::Wanted {
            from: now + pause_before_fork(slot.failures, Duration::ZERO),
        };
    }

    fn child_died(&mut self, number: u32, pid: i32, status: i32, now: Instant) {
        let Some(slot) = self.slots.get(number as usize) else {
            return;
        };
        let Life::Alive { pid: known, since } = slot.life else {
            return;
        };
        if known != pid {
            return;
        }
        let reason = describe_status(status);
        let charged = self.bury(number, &reason);
        self.alive -= 1;
        self.policy.set_children(self.alive);
        // Any packet that nobody has claimed may have died with this child, between pulling and
        // claiming. Taken back and sent again it can't be lost, and it can't run twice either.
        for place in 0..self.packets.len() {
            if self.packets[place].is_some() && self.pages.claim(place).read().owner.is_none() {
                self.take_back(place, false);
            }
        }
        let leaving = matches!(self.phase, Phase::Leaving { .. } | Phase::Killing { .. });
        let slot = &mut self.slots[number as usize];
        if leaving {
            slot.life = Life::Gone;
            return;
        }
        if !charged {
            tracing::error!(pid, slot = number, "an idle process was lost: {reason}");
        }
        slot.failures = if slot.ended_a_job {
            0
        } else {
            slot.failures + 1
        };
        slot.life = Life::Wanted {
            from: now + pause_before_fork(slot.failures, now - since),
        };
    }

    /// Settles what a dead child leaves: its outcomes count, its running job crashed, and what it had
    /// not begun is as good as new. Says whether a job was charged.
    fn bury(&mut self, number: u32, reason: &str) -> bool {
        self.collect(number);
        if let Some(reply) = self.slots[number as usize].reply.take() {
            let _ = self
                .poll
                .registry()
                .deregister(&mut SourceFd(&reply.as_raw_fd()));
        }
        let mut charged = false;
        for place in 0..self.packets.len() {
            if self.packets[place].is_none() || self.pages.claim(place).read().owner != Some(number)
            {
                continue;
            }
            self.take_back(place, false);
            let Some(mut packet) = self.packets[place].take() else {
                continue;
            };
            for delivery in take(&mut packet.jobs).into_iter().flatten() {
                charged = true;
                let job = delivery.message.id;
                let task = &delivery.message.task;
                if matches!(self.phase, Phase::Killing { .. }) {
                    tracing::warn!(%job, "{task}: stopped, and handed back");
                    self.settlements.add(delivery, Outcome::Returned);
                } else {
                    tracing::error!(%job, "{task}: the process that ran it was lost: {reason}");
                    let reason = reason.to_owned();
                    self.settlements.add(delivery, Outcome::Crashed { reason });
                }
            }
            self.packet_is_done(place, &packet, PacketEnd::TakenBack);
        }
        charged
    }

    // Packets.

    fn send_packets(&mut self) -> io::Result<()> {
        while self.unsent.is_none()
            && !self.free_places.is_empty()
            && let Some(hand_out) = self.policy.next_packet()
        {
            self.send_packet(hand_out)?;
        }
        Ok(())
    }

    fn send_packet(&mut self, hand_out: HandOut<Delivery>) -> io::Result<()> {
        let Some(place) = self.free_places.pop() else {
            return Ok(());
        };
        self.last_sequence = self.last_sequence.wrapping_add(1);
        let sequence = self.last_sequence;
        let jobs = &hand_out.jobs;
        let payload_bytes: usize = jobs.iter().map(|job| job_bytes(&job.message)).sum();
        let header = PacketHeader {
            sequence,
            place: place as u16,
            jobs: jobs.len() as u16,
            payload_bytes: payload_bytes as u32,
            in_file: payload_bytes > INLINE_PAYLOAD_BYTES,
            task: self.policy.task_name(hand_out.task),
        };
        let mut bytes = take(&mut self.scratch);
        bytes.clear();
        header.encode_into(&mut bytes);
        let file = if header.in_file {
            let mut payload = Vec::with_capacity(payload_bytes);
            for job in jobs {
                encode_job(&job.message, &mut payload);
            }
            let file = anonymous_file("penstock-packet")?;
            io::Write::write_all(&mut std::fs::File::from(file.try_clone()?), &payload)?;
            Some(file)
        } else {
            for job in jobs {
                encode_job(&job.message, &mut bytes);
            }
            None
        };
        self.pages.claim(place).offer(sequence, jobs.len());
        if jobs.len() > 1 {
            self.large_out += 1;
            self.collect_at
                .get_or_insert_with(|| Instant::now() + COLLECT_EVERY);
        }
        self.tick_at.get_or_insert_with(|| Instant::now() + TICK);
        self.packets[place] = Some(Packet {
            sequence,
            task: hand_out.task,
            open: hand_out.jobs.len(),
            jobs: hand_out.jobs.into_iter().map(Some).collect(),
            whole: true,
            slow: false,
            begun_at_tick: None,
            still_ticks: 0,
            stuck: false,
        });
        self.unsent = Some(Unsent { bytes, file });
        self.send_unsent()
    }

    fn send_unsent(&mut self) -> io::Result<()> {
        let (Some(unsent), Some(work)) = (self.unsent.take(), &self.work) else {
            return Ok(());
        };
        match send_message(work.as_fd(), &unsent) {
            Ok(()) => self.scratch = unsent.bytes,
            // Told when there is room.
            Err(Errno::AGAIN | Errno::NOBUFS) => self.unsent = Some(unsent),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Takes back what has not begun of a packet. `slow`: because a job of it takes so long.
    fn take_back(&mut self, place: usize, slow: bool) {
        let Some(packet) = &mut self.packets[place] else {
            return;
        };
        let claim = self.pages.claim(place).take_back();
        // A child can write there: its numbers are only indices to be checked.
        let begun = claim.begun.min(packet.jobs.len());
        let back: Vec<Delivery> = packet.jobs[begun..]
            .iter_mut()
            .filter_map(Option::take)
            .collect();
        if back.is_empty() {
            return;
        }
        packet.open -= back.len();
        packet.whole = false;
        packet.slow |= slow && claim.owner.is_some();
        let task = packet.task;
        let is_done = packet.open == 0;
        if matches!(self.phase, Phase::Loading | Phase::Serving) {
            self.policy.put_back(
                task,
                back.into_iter().map(|job| {
                    let bytes = job_bytes(&job.message);
                    (job, bytes)
                }),
            );
        } else {
            self.settlements.give_back(back);
        }
        if is_done {
            self.finish_packet(place);
        }
    }

    fn finish_packet(&mut self, place: usize) {
        let Some(packet) = self.packets[place].take() else {
            return;
        };
        let end = if packet.whole {
            PacketEnd::Ran {
                jobs: packet.jobs.len(),
            }
        } else if packet.slow {
            PacketEnd::Slow
        } else {
            PacketEnd::TakenBack
        };
        self.packet_is_done(place, &packet, end);
    }

    fn packet_is_done(&mut self, place: usize, packet: &Packet, end: PacketEnd) {
        // Whoever still has its sequence number can neither claim it nor begin anything.
        self.pages.claim(place).take_back();
        self.free_places.push(place);
        if packet.jobs.len() != 1 {
            self.large_out -= 1;
        }
        self.policy.packet_ended(packet.task, end);
        if packet.stuck {
            self.count_stuck();
        }
    }

    fn count_stuck(&mut self) {
        let stuck = self.packets.iter().flatten().filter(|packet| packet.stuck);
        self.policy.set_stuck(stuck.count());
    }

    /// Looks for children that have been at one job for a while, takes back what waits behind it, and
    /// hands what is too much here back to the broker.
    fn tick(&mut self, now: Instant) {
        let mut look_again = false;
        let mut claimed = 0;
        let mut still = Vec::new();
        for (place, packet) in self.packets.iter_mut().enumerate() {
            let Some(packet) = packet else {
                continue;
            };
            let claim = self.pages.claim(place).read();
            let is_claimed = claim.owner.is_some();
            if packet.begun_at_tick == Some(claim.begun) {
                packet.still_ticks = packet.still_ticks.saturating_add(1);
                still.push((place, is_claimed, packet.still_ticks));
            } else {
                packet.still_ticks = 0;
            }
            packet.begun_at_tick = Some(claim.begun);
            packet.stuck = is_claimed && packet.still_ticks >= STUCK_TICKS;
            look_again |= packet.still_ticks < STUCK_TICKS;
            claimed += usize::from(is_claimed);
        }
        for (place, is_claimed, still_ticks) in still {
            // A packet that waits to be pulled is left alone while there may be a child for it.
            if is_claimed || (claimed >= self.alive && still_ticks >= STUCK_TICKS) {
                self.take_back(place, true);
            }
        }
        self.count_stuck();
        let surplus = self.policy.surplus();
        let credit = self.policy.withdraw();
        look_again |= !surplus.is_empty() || credit != Credit::Keep;
        if credit == Credit::Withdraw {
            self.driver.stop_consuming();
        }
        self.settlements.give_back(surplus);
        // While nothing moves there is nothing to look for until something is sent or comes in.
        if look_again {
            self.tick_at = Some(now + TICK);
        }
    }

    // Outcomes.

    fn collect_large(&mut self) {
        for place in 0..self.packets.len() {
            let is_large = self.packets[place]
                .as_ref()
                .is_some_and(|packet| packet.jobs.len() > 1);
            if is_large && let Some(owner) = self.pages.claim(place).read().owner {
                self.collect(owner);
            }
        }
        if self.large_out > 0 {
            self.collect_at = Some(Instant::now() + COLLECT_EVERY);
        }
    }

    /// Reads a child's outcomes: what is on its socket first, then its ring, since a bell follows what it
    /// rings for.
    fn collect(&mut self, number: u32) {
        let Some(slot) = self.slots.get_mut(number as usize) else {
            return;
        };
        if let Some(reply) = &slot.reply {
            read_all(reply, &mut self.chunk, &mut slot.incoming);
        }
        let mut incoming = take(&mut slot.incoming);
        let mut ring = take(&mut self.scratch);
        ring.clear();
        let mut is_sound = slot.ring.read(&self.pages, &mut ring).is_ok();
        if is_sound && !ring.is_empty() {
            // One copy for all: values are slices of it.
            let outcomes = Bytes::copy_from_slice(&ring);
            is_sound = self.take_outcomes(number, &outcomes) == Some(outcomes.len());
        }
        self.scratch = ring;
        if is_sound && !incoming.is_empty() {
            let whole = whole_frames(&incoming);
            is_sound = whole.is_some_and(|whole| {
                let outcomes = incoming.split_to(whole).freeze();
                self.take_outcomes(number, &outcomes) == Some(whole)
            });
        }
        if is_sound {
            self.slots[number as usize].incoming = incoming;
        } else {
            self.kill_child(number);
        }
    }

    /// Settles by the frames in `bytes`, all of them whole. Gives how many bytes made sense.
    fn take_outcomes(&mut self, number: u32, bytes: &Bytes) -> Option<usize> {
        let mut reader = Reader(bytes);
        while let Some(frame) = reader.frame().ok()? {
            if let Some(outcome) = frame {
                self.take_outcome(number, &outcome, bytes)?;
            }
        }
        Some(bytes.len() - reader.0.len())
    }

    fn take_outcome(&mut self, number: u32, frame: &OutcomeFrame<'_>, bytes: &Bytes) -> Option<()> {
        let place = usize::from(frame.place);
        let packet = self.packets.get_mut(place)?.as_mut()?;
        if packet.sequence != frame.sequence {
            return None;
        }
        let delivery = packet.jobs.get_mut(usize::from(frame.index))?.take()?;
        packet.open -= 1;
        packet.still_ticks = 0;
        let is_done = packet.open == 0;
        let was_stuck = std::mem::replace(&mut packet.stuck, false);
        self.policy.observe(packet.task, frame.cost_ns);
        if was_stuck {
            self.count_stuck();
        }
        let slot = &mut self.slots[number as usize];
        slot.ended_a_job = true;

        let cost_us = frame.cost_ns.div_ceil(1000);
        let value = frame.value.map(|value| bytes.slice_ref(value));
        let note = || bytes.slice_ref(frame.note);
        let outcome = match frame.kind {
            Kind::Succeeded => Outcome::Succeeded { value, cost_us },
            Kind::Retry => Outcome::Retry {
                delay_ms: frame.delay_ms,
                note: note(),
                cost_us,
            },
            Kind::Failed => Outcome::Failed {
                value,
                note: note(),
                cost_us,
            },
            Kind::GivenBack => Outcome::Returned,
        };
        self.settlements.add(delivery, outcome);
        if is_done {
            self.finish_packet(place);
        }
        Some(())
    }

    /// A child that has damaged its outcomes is not to be trusted with more.
    fn kill_child(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        if let Life::Alive { pid, .. } = slot.life
            && let Some(pid) = rustix::process::Pid::from_raw(pid)
        {
            tracing::error!(
                slot = number,
                "the memory in which a child reports its outcomes is damaged, by C code perhaps: it is killed"
            );
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }

    // The broker.

    fn read_news(&mut self, now: Instant) {
        let News {
            deliveries,
            lost,
            refused,
            answers,
            failed,
        } = self.inbox.take();
        self.deliveries += deliveries.len() as u64;
        if !deliveries.is_empty() {
            self.tick_at.get_or_insert(now + TICK);
        }
        let serving = self.phase == Phase::Serving;
        for delivery in deliveries {
            if serving {
                let bytes = job_bytes(&delivery.message);
                let task = delivery.message.task.clone();
                self.policy.arrive(&task, delivery, bytes);
            } else {
                self.settlements.add(delivery, Outcome::Returned);
            }
        }
        if !lost.is_empty() {
            self.forget(&lost.into_iter().collect());
        }
        for (lease, why) in refused {
            tracing::error!(job = %lease.message, "the broker refused this job's outcome: {why}");
            let reason = ReleaseReason::Crashed(format!("the broker refused its outcome: {why}"));
            self.settlements.leases.push(lease);
            self.settlements
                .txs
                .push(vec![Op::Release { lease, reason }].into());
        }
        for answer in answers {
            self.hear_answer(answer, now);
        }
        if let Some(error) = failed {
            tracing::error!("the broker can't be used any more: {error}");
            self.end = End::Failed;
            self.begin_killing(now);
        }
    }

    /// These jobs are no longer ours: what has not begun does not begin. What runs goes on, and its
    /// outcome will be refused unless the lease comes back to life.
    fn forget(&mut self, lost: &FxHashSet<Lease>) {
        for place in 0..self.packets.len() {
            let concerns = self.packets[place].as_ref().is_some_and(|packet| {
                let mut open = packet.jobs.iter().flatten();
                open.any(|job| lost.contains(&job.lease))
            });
            if concerns {
                self.take_back(place, false);
            }
        }
        self.policy.retain(|job| !lost.contains(&job.lease));
        let (txs, leases) = (
            take(&mut self.settlements.txs),
            take(&mut self.settlements.leases),
        );
        for (tx, lease) in txs.into_iter().zip(leases) {
            if !lost.contains(&lease) {
                self.settlements.txs.push(tx);
                self.settlements.leases.push(lease);
            }
        }
    }

    fn commit(&mut self) {
        let Settlements { txs, leases } = take(&mut self.settlements);
        if txs.is_empty() {
            return;
        }
        self.inbox.committing(leases.len());
        let inbox = Arc::clone(&self.inbox);
        self.driver.commit(
            txs,
            Durability::Disk,
            None,
            Box::new(move |receipts| inbox.confirmed(&leases, receipts)),
        );
    }

    fn grant(&mut self) {
        if self.phase != Phase::Serving {
            return;
        }
        if let Credit::Add(credit) = self.policy.grant() {
            let inbox = Arc::clone(&self.inbox);
            self.driver.consume(&self.queues, credit, inbox);
        }
    }

    fn figures(&self) -> (u32, u32) {
        (self.config.slots, self.policy.busy() as u32)
    }

    fn report(&mut self, now: Instant) {
        if self.report_from > now || self.reported == Some(self.figures()) {
            return;
        }
        let (slots, busy) = self.figures();
        self.driver.report(slots, busy);
        self.reported = Some((slots, busy));
        self.report_from = now + REPORT_EVERY;
    }

    /// Asks for the broker's state: at the start, so that one that can't be had is told of at once; and
    /// to know whether a burst is over.
    fn ask_status(&mut self) {
        self.burst.asked = true;
        self.burst.deliveries = self.deliveries;
        let inbox = Arc::clone(&self.inbox);
        self.driver.query(
            Query::Status,
            Instant::now() + ANSWER_WITHIN,
            Box::new(move |answer| inbox.answered(answer)),
        );
    }

    fn hear_answer(&mut self, answer: Result<Answer, DriverError>, now: Instant) {
        self.burst.asked = false;
        self.burst.ask_from = now + BURST_ASKS_EVERY;
        match answer {
            Ok(Answer::Status(status)) => {
                let nothing_ready = status
                    .queues
                    .iter()
                    .filter(|queue| !queue.paused && self.queues.contains(&queue.name))
                    .all(|queue| queue.ready == 0);
                let is_current = self.burst.deliveries == self.deliveries;
                let serving = self.phase == Phase::Serving && self.alive > 0;
                if self.config.burst && serving && nothing_ready && is_current && self.is_idle() {
                    tracing::info!("the queues are empty: the burst is over");
                    self.begin_draining(None);
                }
            }
            Ok(_) => {}
            Err(error @ DriverError::Unavailable { .. }) => {
                tracing::warn!("no broker at {} yet: {error}", self.config.broker);
            }
            Err(error) => {
                if matches!(self.phase, Phase::Loading | Phase::Serving) {
                    tracing::error!(
                        "the broker at {} can't be used: {error}",
                        self.config.broker
                    );
                    self.end = End::Failed;
                    self.begin_killing(now);
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.policy.is_idle() && self.settlements.txs.is_empty() && self.inbox.unconfirmed() == 0
    }

    fn look_at_burst(&mut self, now: Instant) {
        let may_ask = self.config.burst && !self.burst.asked && self.burst.ask_from <= now;
        if may_ask && self.alive > 0 && self.is_idle() {
            self.ask_status();
        }
    }

    // The end.

    fn hear_signals(&mut self) {
        let mut heard = [0; 16];
        let now = Instant::now();
        while let Ok((_, count)) = recv(&self.stop_signals, &mut heard[..], RecvFlags::empty())
            && count > 0
        {
            for _ in 0..count {
                self.stops_asked += 1;
                self.hear_stop(now);
            }
        }
    }

    fn hear_stop(&mut self, now: Instant) {
        match self.phase {
            Phase::Loading => self.begin_killing(now),
            Phase::Serving => {
                let running = self.policy.busy();
                let grace = self.config.grace;
                if running > 0 {
                    tracing::info!(
                        running,
                        "stopping: running jobs have {} s to end; once more to end at once",
                        grace.as_secs_f32()
                    );
                } else {
                    tracing::info!("stopping");
                }
                self.begin_draining(Some(now + grace));
            }
            Phase::Draining { .. } | Phase::Leaving { .. } => {
                if !self.policy.is_idle() {
                    self.end = End::Forced;
                }
                self.begin_killing(now);
            }
            Phase::Killing { .. } => {}
        }
    }

    /// Nothing new from here on; what has not begun goes back.
    fn begin_draining(&mut self, until: Option<Instant>) {
        self.phase = Phase::Draining { until };
        self.driver.stop_consuming();
        self.policy.close();
        let waiting = self.policy.take_all();
        self.settlements.give_back(waiting);
        for place in 0..self.packets.len() {
            self.take_back(place, false);
        }
    }

    /// Closes the socket that children pull from: each ends when it finds it so.
    fn begin_leaving(&mut self, now: Instant) {
        let grace = match self.phase {
            Phase::Draining { until: Some(until) } => until,
            _ => now,
        };
        self.phase = Phase::Leaving {
            until: grace.max(now + LEAVE_WITHIN),
        };
        self.close_work();
    }

    fn close_work(&mut self) {
        if let Some(work) = self.work.take() {
            let _ = self
                .poll
                .registry()
                .deregister(&mut SourceFd(&work.as_raw_fd()));
        }
    }

    fn begin_killing(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::Draining { .. } | Phase::Leaving { .. }) {
            self.begin_draining(None);
        }
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

    /// What is left is settled, and the broker told goodbye.
    fn leave(&mut self) {
        if let Some(zygote) = self.zygote.take() {
            zygote.leave();
        }
        let left = self.inbox.take().deliveries;
        self.settlements.give_back(left);
        self.commit();
        self.driver.close(Instant::now() + CONFIRM_WITHIN);
        let unconfirmed = self.inbox.unconfirmed();
        if unconfirmed > 0 {
            tracing::warn!(
                unconfirmed,
                "the broker did not confirm the outcomes of the last jobs: they may run again"
            );
        }
    }
}

/// Deaths in a row of a slot's children, none of which had ended a job: the third waits for a tenth of a
/// second, then twice as long each time, up to 5 s. One that had lived for long is replaced at once.
fn pause_before_fork(failures: u32, lived: Duration) -> Duration {
    if failures < 3 || lived > Duration::from_secs(10) {
        return Duration::ZERO;
    }
    Duration::from_millis(100 << (failures - 3).min(6)).min(Duration::from_secs(5))
}

fn send_message(socket: BorrowedFd<'_>, unsent: &Unsent) -> rustix::io::Result<()> {
    let file = unsent.file.as_ref().map(|file| [file.as_fd()]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if let Some(file) = &file {
        ancillary.push(SendAncillaryMessage::ScmRights(file));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(
            socket,
            &[IoSlice::new(&unsent.bytes)],
            &mut ancillary,
            flags,
        ) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

/// Reads until nothing more is there. A closed socket is no news: deaths are told by the zygote.
fn read_all(socket: &UnixStream, chunk: &mut [u8], into: &mut BytesMut) {
    loop {
        match recv(socket, &mut *chunk, RecvFlags::empty()) {
            Ok((_, received)) if received > 0 => {
                into.extend_from_slice(&chunk[..received]);
                if received < chunk.len() {
                    return;
                }
            }
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

/// How many of the first bytes are whole frames; `None`: they are none.
fn whole_frames(bytes: &[u8]) -> Option<usize> {
    let mut reader = Reader(bytes);
    while reader.frame().ok()?.is_some() {}
    Some(bytes.len() - reader.0.len())
}
