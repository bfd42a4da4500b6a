//! Manages the processes: one zygote, the children of all pools, their messages and their deaths.

use std::collections::BTreeSet;
use std::io;
use std::mem::{replace, take};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use mio::{Interest, Token};
use penstock_driver::DriverError;
use penstock_jobs::{Blame, Outcome, blame, guilty_of_memory, lost};
use penstock_message::{Delivery, Op, Progress, Receipt, Tx};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::broker::Contact;
use super::memory::{ChildMemory, Death};
use super::pools::Pool;
use super::recycle::Closing;
use super::{End, FIRST_CHILD, LEAVE_WITHIN, Phase, Supervisor, TICK, ZYGOTE};
use crate::files::is_shortage;
use crate::inbox::refusal_text;
use crate::packet::{Frame, Kind, Malformed, OutcomeFrame, ProgressFrame, Reader, decode_steps};
use crate::page::RingReader;
use crate::policy::PacketEnd;
use crate::zygote::{self, Fork, Loaded, Said, Zygote};

/// Number of consecutive zygotes that may be lost before any job has ended; then the worker gives up.
const ZYGOTES_LOST: u32 = 5;

/// Pause after the system had no room for a zygote.
const ZYGOTE_PAUSE: Duration = Duration::from_millis(500);

pub(super) enum Life {
    /// To be forked, but not before this time.
    Wanted {
        from: Instant,
    },
    Forking,
    Alive {
        pid: i32,
    },
    /// Exited when asked to; no other follows.
    Gone,
    /// Unused number, for the successor of another child.
    Spare,
}

pub(super) struct Child {
    pub(super) pool: usize,
    pub(super) life: Life,
    /// Number of slots that it was forked with.
    pub(super) slots: u32,
    /// Number of its slots that can take jobs.
    pub(super) serving: u32,
    reply: Option<UnixStream>,
    ring: RingReader,
    incoming: BytesMut,
    /// Number of consecutive children that died without ending a job.
    pub(super) failures: u32,
    /// Number of jobs that have ended in it.
    pub(super) jobs: u64,
    pub(super) begun_at: Instant,
    /// Time at which to replace it because of its age.
    pub(super) old_at: Option<Instant>,
    pub(super) closing: Option<Closing>,
    /// Whether it waits for its turn to be replaced.
    pub(super) is_due: bool,
    pub(super) memory: ChildMemory,
    /// Task of the single job that it was for, which has ended; `None` for other children.
    pub(super) ran: Option<String>,
    /// Whether this worker has killed it.
    pub(super) is_killed: bool,
    /// Whether it was for one job, which has ended.
    is_spent: bool,
    /// Whether this supervisor had it killed because of a job in it.
    is_ended: bool,
    /// Whether its lost slot was already logged.
    is_told_lost: bool,
}

impl Child {
    pub(super) fn new(pool: usize, ring: RingReader, now: Instant) -> Self {
        Self {
            pool,
            life: Life::Wanted { from: now },
            slots: 0,
            serving: 0,
            reply: None,
            ring,
            incoming: BytesMut::new(),
            failures: 0,
            jobs: 0,
            begun_at: now,
            old_at: None,
            closing: None,
            is_due: false,
            memory: ChildMemory::default(),
            ran: None,
            is_killed: false,
            is_spent: false,
            is_ended: false,
            is_told_lost: false,
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        matches!(self.life, Life::Alive { .. })
    }

    pub(super) fn spare(ring: RingReader, now: Instant) -> Self {
        Self {
            life: Life::Spare,
            ..Self::new(0, ring, now)
        }
    }

    /// Whether its lost slot was not logged yet; from now on it counts as logged.
    pub(super) fn is_told_lost(&mut self) -> bool {
        !replace(&mut self.is_told_lost, true)
    }
}

impl Supervisor {
    pub(super) fn start_zygote(&mut self, now: Instant) -> io::Result<()> {
        self.zygote_from = None;
        let start = zygote::Start {
            python: &self.config.python,
            apps: &self.config.apps,
            modules: &self.config.modules,
            url: self.config.url.as_deref(),
            name: &self.config.name,
            work: self.pools.iter().map(Pool::socket).collect(),
            pages: self.outstanding.pages.as_fd(),
            log: self.config.log,
            open_files: self.open_files,
        };
        let zygote = match Zygote::start(&start) {
            Ok(zygote) => zygote,
            Err(error) if is_shortage(&error) => {
                self.start_zygote_later(now, &error);
                return Ok(());
            }
            Err(error) => {
                let python = self.config.python.display();
                let text = format!("cannot start {python}: {error}");
                return Err(io::Error::new(error.kind(), text));
            }
        };
        if let Err(error) = self.listen(&zygote, ZYGOTE, Interest::READABLE) {
            zygote.end();
            self.start_zygote_later(now, &error);
            return Ok(());
        }
        self.zygote = Some(zygote);
        for child in &mut self.children {
            if !matches!(child.life, Life::Spare) {
                child.life = Life::Wanted { from: now };
            }
        }
        Ok(())
    }

    fn start_zygote_later(&mut self, now: Instant, error: &io::Error) {
        self.zygote_from = Some(now + ZYGOTE_PAUSE);
        self.tell_of_shortage(now, "start the process that loads the app", error);
    }

    pub(super) fn hear_zygote(&mut self) {
        let Some(zygote) = &mut self.zygote else {
            return;
        };
        let (said, alive) = zygote.listen();
        let now = Instant::now();
        for said in said {
            match said {
                Said::Ready(loaded) => self.app_loaded(loaded, now),
                Said::Failed(text) => {
                    tracing::error!("{text}");
                    self.end = End::App;
                }
                Said::Warning(text) => tracing::warn!("{text}"),
                Said::Forked { child, pid } => self.child_forked(child, pid),
                Said::Unforked { child, why } => {
                    tracing::error!(process = child, "cannot start another process: {why}");
                    self.child_unforked(child, now);
                }
                Said::Died {
                    child,
                    pid,
                    status,
                    peak_bytes,
                } => {
                    if self.is_child(child, pid) {
                        let death = self.judge_death(child, status, peak_bytes);
                        self.child_died(child, pid, &death, now);
                    }
                }
            }
        }
        if alive {
            return;
        }
        self.lose_zygote(now);
        match self.phase {
            Phase::Loading | Phase::Serving if self.end == End::App => self.begin_killing(now),
            Phase::Serving if self.zygotes_lost <= ZYGOTES_LOST => {
                let pause = Duration::from_secs(self.zygotes_lost.saturating_sub(1).into());
                self.zygote_from = Some(now + pause);
            }
            Phase::Loading | Phase::Serving => {
                self.end = End::Failed;
                self.begin_killing(now);
            }
            Phase::Draining { .. } | Phase::Leaving { .. } | Phase::Killing { .. } => {}
        }
    }

    /// Kills the zygote and all children at once, and settles their jobs.
    pub(super) fn lose_zygote(&mut self, now: Instant) {
        let Some(zygote) = self.zygote.take() else {
            return;
        };
        self.ignore(&zygote);
        let how = zygote.end();
        // Its children die with it. This process adopts the processes that they started, and must end them.
        self.orphans.kill();
        if self.end != End::App && matches!(self.phase, Phase::Loading | Phase::Serving) {
            self.zygotes_lost += 1;
            tracing::error!("the zygote, which forks the processes that run jobs, was lost: {how}");
        }
        self.forking = None;
        let reason = format!("its worker's zygote was lost: {how}");
        for number in 0..self.children.len() as u32 {
            self.close_accounts(number);
            let is_over = self.has_successor(number)
                || matches!(self.children[number as usize].life, Life::Spare);
            let child = &mut self.children[number as usize];
            if !is_over {
                child.life = Life::Wanted { from: now };
            }
            child.serving = 0;
        }
        self.recycling.forget();
        self.is_unfit |= self.has_been_resized;
        self.evicted.clear();
        // All are dead. Jobs that had not begun are unaffected, and begun ones have crashed.
        for place in self.outstanding.all_places() {
            for job in self.take_lost(place) {
                self.settle_lost(job, Some(Blame::Guilty), &reason);
            }
        }
        self.alive = 0;
        for pool in &mut self.pools {
            pool.nobody_is_left();
        }
        self.forget_substitutes();
    }

    /// Takes back packets that no child has claimed: one may have died with a child between pulling and
    /// claiming. Taken back and sent again, it can't be lost, and can't run twice either.
    pub(super) fn take_back_unclaimed(&mut self) {
        for place in self.outstanding.places_of(None) {
            self.take_back(place, PacketEnd::TakenBack);
        }
    }

    fn app_loaded(&mut self, loaded: Loaded, now: Instant) {
        if self.phase == Phase::Loading {
            self.begin_serving(&loaded, now);
        }
        self.memory.forget();
        // The code on disk may differ from the code that an earlier zygote loaded.
        self.app = loaded.app;
        self.assign(&loaded.tasks);
    }

    fn begin_serving(&mut self, loaded: &Loaded, now: Instant) {
        let name = &self.config.name;
        let modules: Vec<String> = loaded
            .modules
            .iter()
            .map(|(module, tasks)| format!("{module} ({tasks})"))
            .collect();
        let tasks = match loaded.tasks.len() {
            1 => "1 task".to_owned(),
            tasks => format!("{tasks} tasks"),
        };
        tracing::info!(
            "{name} has loaded {}: {tasks} from {}",
            loaded.place,
            modules.join(", ")
        );
        for task in &loaded.tasks {
            tracing::debug!("task {}", task.0);
        }
        if !self.has_room_for_app() {
            return self.begin_killing(now);
        }
        let Some(connect) = self.config.connect.take() else {
            return;
        };
        match connect(loaded.url.as_deref()) {
            Ok(connected) => self.broker = Some(connected),
            Err(error) => {
                tracing::error!("the worker can't use its broker: {error}");
                self.end = End::Failed;
                return self.begin_killing(now);
            }
        }
        self.phase = Phase::Serving;
        self.contact = Contact::missing_from(now);
        self.place.clone_from(&loaded.place);
        let mut queues = loaded.queues.clone();
        // Without -Q, a worker serves the queues of its own tasks and leaves the rest to others: two apps may
        // share a broker.
        if queues.is_empty() {
            queues.push("default".to_owned());
        }
        self.queues = match self.config.queues.clone() {
            Some(given) => {
                warn_of_unnamed(&given, &queues);
                given
            }
            None => queues,
        };
        self.declare_schedules(&loaded.schedules);
        self.ask_status();
    }

    /// Sends the app's declared schedules to the broker, once, at the worker's start.
    fn declare_schedules(&self, declared: &[String]) {
        let Some(broker) = &self.broker else {
            return;
        };
        let ops = declared
            .iter()
            .filter_map(|text| penstock_wire::op_of_hex(text));
        let (names, txs): (Vec<_>, Vec<_>) = ops
            .filter_map(|op| match &op {
                // Each is sent separately, so that a refused one does not affect the others.
                Op::Schedule { schedule, .. } => Some((schedule.clone(), Tx::from(vec![op]))),
                _ => None,
            })
            .unzip();
        if txs.is_empty() {
            return;
        }
        let told = move |receipts: Result<Vec<Receipt>, DriverError>| match receipts {
            Ok(receipts) => {
                for (name, receipt) in names.iter().zip(receipts) {
                    if let Receipt::Refused { why, .. } = receipt {
                        tracing::error!(
                            "the broker refused the schedule {name}, which stays as it was; everything else \
                             continues: {}",
                            refusal_text(&why)
                        );
                    }
                }
            }
            Err(error) => tracing::error!("the schedules were not declared: {error}"),
        };
        broker.driver.settle(txs, None, Box::new(told));
    }

    /// Returns when to fork the next child.
    pub(super) fn next_fork(&self) -> Option<Instant> {
        // One at a time: the zygote does no more.
        let may_fork = self.phase == Phase::Serving && self.zygote.is_some();
        let is_wanted = || self.pools.iter().any(Pool::wants_process);
        if !may_fork || self.forking.is_some() || !is_wanted() {
            return None;
        }
        self.wanted_children().map(|(_, from)| from).min()
    }

    fn wanted_children(&self) -> impl Iterator<Item = (usize, Instant)> {
        let children = self.children.iter().enumerate();
        children.filter_map(|(number, child)| match child.life {
            Life::Wanted { from } if self.pools[child.pool].wants_process() => Some((number, from)),
            _ => None,
        })
    }

    pub(super) fn fork_wanted(&mut self, now: Instant) {
        if self.next_fork().is_none_or(|at| at > now) {
            return;
        }
        let due = self.wanted_children().find(|(_, from)| *from <= now);
        let Some((number, _)) = due else {
            return;
        };
        // Noted before the request: a short-lived child may report its first outcome before the next line runs.
        let ring = self.outstanding.pages.fresh_ring(number as u32);
        let ours = match self.ask_for_fork(number) {
            Ok(ours) => ours,
            Err(error) => {
                // A dead zygote is soon noticed through its closed socket.
                self.children[number].life = Life::Wanted { from: now + TICK };
                if error.kind() != io::ErrorKind::BrokenPipe {
                    self.tell_of_shortage(now, "start another process", &error);
                }
                return;
            }
        };
        let Child { pool, failures, .. } = self.children[number];
        self.children[number] = Child {
            slots: self.pools[pool].config.slots,
            life: Life::Forking,
            reply: Some(ours),
            failures,
            ..Child::new(pool, ring, now)
        };
        self.forking = Some((number as u32, now));
    }

    /// Returns the socket of the next child.
    fn ask_for_fork(&mut self, number: usize) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // Registered first: a child must never run without the supervisor listening to it.
        self.listen(&ours, Token(FIRST_CHILD + number), Interest::READABLE)?;
        let pool = self.children[number].pool;
        let config = self.pools[pool].config;
        let fork = Fork {
            child: number as u32,
            pool,
            kind: config.kind,
            slots: config.slots,
            once: self.pools[pool].is_single_use(),
            warm: self.pools[pool].is_half_idle(),
        };
        match &mut self.zygote {
            Some(zygote) => zygote.fork(fork, theirs.into())?,
            None => return Err(io::ErrorKind::BrokenPipe.into()),
        }
        Ok(ours)
    }

    fn child_forked(&mut self, number: u32, pid: i32) {
        let Some((_, since)) = self.forking.take_if(|(forking, _)| *forking == number) else {
            return;
        };
        let now = Instant::now();
        self.recycling.forked_within(now - since);
        self.child_begins(number, now);
        self.child_gets_memory(number, now);
        self.alive += 1;
        let child = &mut self.children[number as usize];
        let pool = &mut self.pools[child.pool];
        child.life = Life::Alive { pid };
        child.serving = child.slots;
        pool.child_came(child.slots);
        self.is_unfit |= self.has_been_resized;
        if child.is_spent {
            // The child was faster than the message about it.
            self.retire(number);
        }
    }

    fn child_unforked(&mut self, number: u32, now: Instant) {
        if self
            .forking
            .take_if(|(forking, _)| *forking == number)
            .is_none()
        {
            return;
        }
        self.bury(number, &Death::of("it was never started"));
        let child = &mut self.children[number as usize];
        child.failures = child.failures.max(2) + 1;
        child.life = Life::Wanted {
            from: now + pause_before_fork(child.failures, false),
        };
    }

    fn is_child(&self, number: u32, pid: i32) -> bool {
        let child = self.children.get(number as usize);
        child.is_some_and(|child| matches!(child.life, Life::Alive { pid: known } if known == pid))
    }

    fn child_died(&mut self, number: u32, pid: i32, death: &Death, now: Instant) {
        let is_closing = self.children[number as usize].closing.is_some();
        let jobs = self.bury(number, death);
        self.learn_from_end(number, death);
        let reason = &death.reason;
        self.alive -= 1;
        self.is_unfit |= self.has_been_resized;
        self.forget_evicted(number);
        let child = &mut self.children[number as usize];
        self.pools[child.pool].child_went(take(&mut child.serving));
        // A child for one job has pulled no other.
        if !self.children[number as usize].is_spent {
            self.take_back_unclaimed();
        }
        if matches!(self.phase, Phase::Leaving { .. } | Phase::Killing { .. }) {
            self.children[number as usize].life = Life::Gone;
            return;
        }
        let is_ended = self.children[number as usize].is_ended;
        let was_told_to = is_closing || is_ended || self.children[number as usize].is_spent;
        if jobs == 0 && !was_told_to {
            tracing::error!(pid, process = number, "an idle process was lost: {reason}");
        }
        if self.has_successor(number) || self.is_substitute_no_more(number) {
            return;
        }
        let child = &mut self.children[number as usize];
        child.failures = match child.jobs {
            // The job in it has exceeded its time.
            0 if !child.is_ended => child.failures + 1,
            _ => 0,
        };
        child.life = Life::Wanted {
            from: now + pause_before_fork(child.failures, jobs > 0),
        };
    }

    pub(super) fn pid_of(&self, number: u32) -> Option<i32> {
        match self.children.get(number as usize)?.life {
            Life::Alive { pid } => Some(pid),
            _ => None,
        }
    }

    /// Kills a child because of a job in it. Only the condemned jobs are to blame.
    pub(super) fn end_child(&mut self, number: u32) {
        let child = &mut self.children[number as usize];
        child.is_ended = true;
        if child.is_alive() {
            self.kill(number);
        }
    }

    /// Settles the jobs of a dead child: its outcomes count, jobs that had not begun are unaffected, and each
    /// running job is judged. Returns how many were running.
    fn bury(&mut self, number: u32, death: &Death) -> usize {
        self.close_accounts(number);
        let places = self.outstanding.places_of(Some(number));
        let guilty = self.outstanding.pages.fault(number);
        let guilty = guilty.filter(|guilty| places.contains(guilty));
        let is_ended = self.children[number as usize].is_ended;
        let mut begun = Vec::new();
        for place in places {
            let condemned = self.why_condemned(place);
            let jobs = self.take_lost(place);
            match condemned {
                Some(condemned) => self.settle_condemned(condemned, jobs),
                None => begun.extend(jobs.into_iter().map(|job| (place, job))),
            }
        }
        let jobs = begun.len();
        let guilty = guilty.or_else(|| {
            let tasks = begun.iter().map(|(_, job)| job.message.task.as_str());
            let peaks = death.is_for_memory.then(|| self.usual_peaks(tasks))?;
            Some(begun[guilty_of_memory(&peaks)?].0)
        });
        let reason = match &begun[..] {
            [(place, job)] => self.learn_from_death(death, *place, &job.message.task),
            _ => death.reason.clone(),
        };
        let reason = reason.as_str();
        let (mut spared, mut suspects) = (0, BTreeSet::new());
        for (place, delivery) in begun {
            // In a process that was killed because of one job, the others are innocent.
            let is_named = match death.is_innocent {
                true => Some(false),
                false => guilty.map(|guilty| guilty == place),
            };
            let is_named = is_named.or(is_ended.then_some(false));
            let blame = blame(jobs, is_named);
            match blame {
                Some(Blame::Guilty) => {}
                Some(Blame::Suspected) => {
                    suspects.insert(delivery.message.task.clone());
                }
                None => spared += 1,
            }
            self.settle_lost(delivery, blame, reason);
        }
        let is_killing = matches!(self.phase, Phase::Killing { .. });
        if death.is_innocent && jobs > 0 && !is_killing {
            tracing::warn!(
                jobs,
                "the kernel killed a process though another had far more memory: its jobs were interrupted and handed back; \
                 no crash is counted for them"
            );
        } else if spared > 0 && !is_killing {
            tracing::warn!(
                jobs = spared,
                "the other jobs of its process were interrupted and handed back; no crash is counted for them"
            );
        }
        if !suspects.is_empty() && !is_killing {
            let tasks: Vec<String> = suspects.into_iter().collect();
            tracing::error!(
                jobs,
                "a process with several jobs ({}) was lost: {reason}. It is unknown which of them is guilty: each is \
                 handed back, and runs alone next; no crash is counted for them",
                tasks.join(", ")
            );
        }
        jobs
    }

    /// Reads the last outcomes of a dead child.
    fn close_accounts(&mut self, number: u32) {
        self.collect(number);
        if let Some(reply) = self.children[number as usize].reply.take() {
            self.ignore(&reply);
        }
    }

    /// Removes the jobs that a dead child had begun; the others wait again.
    fn take_lost(&mut self, place: usize) -> Vec<Delivery> {
        self.take_back(place, PacketEnd::TakenBack);
        self.forget_wait(place);
        let Some(left) = self.outstanding.take_begun(place) else {
            return Vec::new();
        };
        if let Some(end) = left.end {
            self.release(place);
            self.pools[left.pool].policy.packet_ended(left.task, end);
        }
        left.jobs
    }

    /// Handles the loss of the process that ran this job.
    fn settle_lost(&mut self, delivery: Delivery, blame: Option<Blame>, reason: &str) {
        let job = delivery.message.id;
        let task = &delivery.message.task;
        if matches!(self.phase, Phase::Killing { .. }) {
            tracing::warn!(%job, "{task}: stopped, and handed back");
            return self.settlements.add(delivery, Outcome::Returned);
        }
        let may_run_once = delivery.message.max_deliveries == 1;
        let outcome = lost(blame, delivery.message.max_deliveries, reason);
        match &outcome {
            Outcome::Suspected { .. } if may_run_once => {
                tracing::error!(%job, "{task}: its process was lost, and it may not run again: it fails");
            }
            Outcome::Crashed { reason } => {
                tracing::error!(%job, "{task}: the process that ran it was lost: {reason}");
            }
            _ => {
                tracing::debug!(%job, "{task}: the process that ran it and others was lost: {reason}")
            }
        }
        self.settlements.add(delivery, outcome);
    }

    /// Reads a child's outcomes. Reads its socket first and then its ring, because a bell follows the outcomes
    /// that it announces.
    pub(super) fn collect(&mut self, number: u32) {
        let Some(child) = self.children.get_mut(number as usize) else {
            return;
        };
        if let Some(reply) = &child.reply {
            read_all(reply, &mut self.socket_buffer, &mut child.incoming);
        }
        let mut incoming = take(&mut child.incoming);
        let mut ring = take(&mut self.ring_buffer);
        ring.clear();
        let mut is_sound = child.ring.read(&self.outstanding.pages, &mut ring).is_ok();
        if is_sound && !ring.is_empty() {
            // One copy for all: values are slices of it.
            let outcomes = Bytes::copy_from_slice(&ring);
            is_sound = self.take_outcomes(number, &outcomes) == Some(outcomes.len());
        }
        self.ring_buffer = ring;
        if is_sound && !incoming.is_empty() {
            let whole = whole_frames(&incoming);
            is_sound = whole.is_some_and(|whole| {
                let outcomes = incoming.split_to(whole).freeze();
                self.take_outcomes(number, &outcomes) == Some(whole)
            });
        }
        if is_sound {
            self.children[number as usize].incoming = incoming;
        } else {
            self.kill_child(number);
        }
    }

    /// Settles jobs by the frames in `bytes`, all of them whole. Returns how many bytes were valid.
    fn take_outcomes(&mut self, number: u32, bytes: &Bytes) -> Option<usize> {
        let mut reader = Reader(bytes);
        while let Some(frame) = reader.frame().ok()? {
            match frame {
                Frame::Bell => {}
                Frame::Serving(slots) => self.child_serves(number, slots),
                Frame::Wait(wait) => self.hear_wait(number, wait, Instant::now()),
                Frame::Progress(progress) => self.hear_progress(&progress),
                Frame::Outcome(outcome) => self.take_outcome(number, &outcome, bytes)?,
            }
        }
        Some(bytes.len() - reader.0.len())
    }

    /// Handles the progress of a job. Ignores that of a job that has ended.
    fn hear_progress(&self, frame: &ProgressFrame<'_>) {
        let lease = self
            .outstanding
            .lease(frame.place.into(), frame.sequence, frame.index.into());
        if let (Some(lease), Some(broker)) = (lease, &self.broker) {
            let body = Bytes::copy_from_slice(frame.body);
            broker.driver.progress(Progress { lease, body });
        }
    }

    fn take_outcome(&mut self, number: u32, frame: &OutcomeFrame<'_>, bytes: &Bytes) -> Option<()> {
        let (place, index) = (frame.place.into(), frame.index.into());
        self.forget_wait(place);
        let ended = self.outstanding.end_job(place, frame.sequence, index)?;
        if ended.end.is_some() {
            self.measure_ended(place, &ended.jobs.message.task);
            self.release(place);
        }
        let policy = &mut self.pools[ended.pool].policy;
        policy.observe(ended.task, frame.cost_ns);
        policy.set_stuck(self.outstanding.stuck(ended.pool));
        if let Some(end) = ended.end {
            policy.packet_ended(ended.task, end);
            self.keep_for_turns(ended.pool);
        }
        self.child_ended_job(number, ended.end.is_some());
        let child = &self.children[number as usize];
        if self.pools[child.pool].is_single_use() {
            self.children[number as usize].ran = Some(ended.jobs.message.task.clone());
            self.spend(number);
        }
        self.zygotes_lost = 0;
        if frame.cpu_ns > 0 && self.pools[ended.pool].lends_processes() {
            let task = &ended.jobs.message.task;
            if let Some(share) = self.advice.observe(task, frame.cost_ns, frame.cpu_ns) {
                tracing::info!(
                    "{task} spends {share} % of its time waiting, with a process to itself: --threads N runs N such \
                     jobs in one process, for a fraction of the memory; slot=\"process\" declares that it needs its own"
                );
            }
        }

        let cost_us = frame.cost_ns.div_ceil(1000);
        let value = frame.value.map(|value| bytes.slice_ref(value));
        let note = || bytes.slice_ref(frame.note);
        let outcome = match frame.kind {
            Kind::Succeeded => Outcome::Succeeded { value, cost_us },
            Kind::Replaced | Kind::Spawned => match (decode_steps(&note()), frame.kind) {
                (Ok(steps), Kind::Replaced) => Outcome::Replaced { steps, cost_us },
                (Ok(steps), _) => Outcome::Spawned {
                    value,
                    steps,
                    cost_us,
                },
                (Err(Malformed), _) => Outcome::Crashed {
                    reason: "it returned steps that can't be read".to_owned(),
                },
            },
            Kind::Retry => Outcome::Retry {
                delay_ms: frame.delay_ms,
                note: note(),
                cost_us,
            },
            Kind::Failed => Outcome::Failed {
                value,
                note: note(),
                failure: frame.failure.map(Into::into).unwrap_or_default(),
                cost_us,
            },
            Kind::GivenBack => Outcome::Returned,
            Kind::Deferred => Outcome::Deferred {
                delay_ms: frame.delay_ms,
                note: note(),
                cost_us,
            },
            Kind::Cancelled => Outcome::Cancelled,
            Kind::Lost => {
                let reason = String::from_utf8_lossy(frame.note).into_owned();
                let (job, task) = (ended.jobs.message.id, &ended.jobs.message.task);
                tracing::error!(%job, "{task}: {reason}; a new thread takes its slot, and the other jobs continue");
                Outcome::Crashed { reason }
            }
        };
        self.settlements.add(ended.jobs, outcome);
        if self.is_evicted(number) {
            self.look_at_evicted(number, Instant::now());
        }
        Some(())
    }

    /// Notes that the job of a single-use child has ended: the child takes no other, and must exit.
    fn spend(&mut self, number: u32) {
        let child = &mut self.children[number as usize];
        if std::mem::replace(&mut child.is_spent, true) {
            return;
        }
        // Nothing more is expected from it, and its end comes from the zygote: the end of its socket need not wake this
        // process, too.
        if let Some(reply) = &self.children[number as usize].reply {
            self.ignore(reply);
        }
        self.retire(number);
    }

    fn retire(&mut self, number: u32) {
        let child = &mut self.children[number as usize];
        self.pools[child.pool].child_changed(take(&mut child.serving), 0);
        if let Life::Alive { pid } = child.life {
            let until = Instant::now() + LEAVE_WITHIN;
            self.leaving.push_back((until, number, pid));
        }
    }

    pub(super) fn next_overdue(&self) -> Option<Instant> {
        self.leaving.front().map(|(until, ..)| *until)
    }

    /// Kills single-use children that did not exit in time, because their next jobs wait for that.
    pub(super) fn kill_overdue(&mut self, now: Instant) {
        while let Some((until, number, pid)) = self.leaving.front().copied()
            && until <= now
        {
            self.leaving.pop_front();
            let child = &self.children[number as usize];
            if matches!(child.life, Life::Alive { pid: alive } if alive == pid) {
                tracing::warn!(
                    pid,
                    "a process for a single job did not exit within {} s after it, and is killed: the job may have \
                     left a thread",
                    LEAVE_WITHIN.as_secs()
                );
                self.kill(number);
            }
        }
    }

    /// Notes that a child has lost slots, or has them again.
    fn child_serves(&mut self, number: u32, slots: u32) {
        let child = &mut self.children[number as usize];
        if child.closing.is_some() {
            if slots == 0 {
                self.closing_is_heard(number);
            }
            return;
        }
        let pool = &mut self.pools[child.pool];
        // Trusted only as far as possible: a child can't have more slots.
        let slots = slots.min(child.slots);
        if matches!(child.life, Life::Alive { .. }) && !child.is_spent {
            pool.child_changed(child.serving, slots);
            child.serving = slots;
        }
        match slots {
            // A child that has closed on its own may have pulled a packet without claiming it, and begins no
            // jobs that it did claim.
            0 => {
                self.take_back_unclaimed();
                self.take_back_unbegun(number);
            }
            _ => self.child_is_ready(number, Instant::now()),
        }
    }

    /// Kills a child that has damaged its outcomes: it can't be trusted.
    fn kill_child(&mut self, number: u32) {
        let child = &self.children[number as usize];
        if let Life::Alive { pid } = child.life {
            tracing::error!(
                pid,
                process = number,
                "the memory in which a child reports its outcomes is damaged, perhaps by C code: the child is killed"
            );
            self.kill(number);
        }
    }

    /// Kills a child, for a reason that is logged elsewhere.
    pub(super) fn kill(&mut self, number: u32) {
        self.children[number as usize].is_killed = true;
        if let Some(zygote) = &mut self.zygote {
            // A zygote that can't be reached is dead, and its children with it.
            let _ = zygote.kill_child(number);
        }
    }
}

/// Warns of -Q queues that no task names, since a name may be mistyped. Calls may still send jobs there.
fn warn_of_unnamed(given: &[String], named: &[String]) {
    let unnamed: Vec<_> = given
        .iter()
        .filter(|queue| !named.contains(queue))
        .collect();
    if !unnamed.is_empty() {
        tracing::warn!(
            "no task of the app names the queue {}; its tasks name {}. Only jobs that are sent there with \
             options(queue=...) will run",
            unnamed
                .iter()
                .map(|queue| format!("{queue:?}"))
                .collect::<Vec<_>>()
                .join(" or "),
            named.join(", ")
        );
    }
}

/// Returns the pause before a fork. `failures`: number of consecutive deaths of children with one number, none of which
/// had ended a job. From the third on, they are replaced after a tenth of a second. If no job is to blame, which would
/// be given up in time, each pause doubles, up to 5 s.
fn pause_before_fork(failures: u32, ran_a_job: bool) -> Duration {
    match failures {
        0..3 => Duration::ZERO,
        _ if ran_a_job => Duration::from_millis(100),
        _ => Duration::from_millis(100 << (failures - 3).min(6)).min(Duration::from_secs(5)),
    }
}

/// Reads until there is nothing more. Ignores a closed socket: the zygote reports deaths.
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

/// Returns how many of the first bytes are whole frames; `None` if they are invalid.
fn whole_frames(bytes: &[u8]) -> Option<usize> {
    let mut reader = Reader(bytes);
    while reader.frame().ok()?.is_some() {}
    Some(bytes.len() - reader.0.len())
}
