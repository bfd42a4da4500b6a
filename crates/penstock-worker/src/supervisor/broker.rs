//! Exchanges deliveries, settlements, credit and queries with the broker.

use std::collections::HashSet;
use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::Interest;
use penstock_driver::{DriverError, ErrorKind};
use penstock_jobs::{DeliveryHead, Outcome, runs_alone, settle};
use penstock_message::{
    Answer, Consume, Delivery, Lease, Op, Query, ReleaseReason, StatusPage, StatusQuery,
    TaskSelection, Tx, WorkerReport, WorkerState,
};

use super::orders::over;
use super::{BROKER, End, Phase, Supervisor, TICK};
use crate::inbox::News;
use crate::packet::job_bytes;
use crate::policy::{Credit, PacketEnd};

/// Minimum interval between reports of busy slots to the broker.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// Interval of logging the broker's notices.
const NOTICES_EVERY: Duration = Duration::from_secs(5);
/// Delay after which a burst asks again, if the answer was not final.
const BURST_ASKS_EVERY: Duration = Duration::from_millis(50);
/// Time within which the broker must answer a query.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Interval of log lines that the broker is unreachable.
const MISSING_EVERY: Duration = Duration::from_secs(60);

/// Settlements of one pass, committed together.
#[derive(Default)]
pub(super) struct Settlements {
    txs: Vec<Tx>,
    leases: Vec<Lease>,
}

impl Settlements {
    pub(super) fn add(&mut self, delivery: Delivery, outcome: Outcome) {
        self.push(delivery.lease, settle(&head(delivery), outcome));
    }

    pub(super) fn give_back(&mut self, deliveries: impl IntoIterator<Item = Delivery>) {
        for delivery in deliveries {
            let outcome = match over(&delivery) {
                None => Outcome::Returned,
                // No worker has failed it yet. Reporting it as a crash counts it, and prevents another run if that is
                // not allowed.
                Some(reason) => Outcome::Crashed { reason },
            };
            self.add(delivery, outcome);
        }
    }

    fn push(&mut self, lease: Lease, tx: Tx) {
        self.leases.push(lease);
        self.txs.push(tx);
    }

    fn is_empty(&self) -> bool {
        self.txs.is_empty()
    }

    /// Drops the settlements of lost leases.
    fn forget(&mut self, lost: &HashSet<Lease>) {
        tracing::warn!(
            jobs = lost.len(),
            "this worker could not reach the broker for too long: its jobs were given to other workers. Jobs that \
             have begun here continue, but their outcomes are fenced off"
        );
        let Self { txs, leases } = take(self);
        for (tx, lease) in txs.into_iter().zip(leases) {
            if !lost.contains(&lease) {
                self.push(lease, tx);
            }
        }
    }
}

/// Parts of a delivery that a settlement needs, without a copy.
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

/// State of the queries whether a burst is over.
pub(super) struct Burst {
    /// A query is on its way.
    asked: bool,
    /// The broker knew this worker's tasks at the time of the query.
    is_subscribed: bool,
    ask_from: Instant,
    /// Number of deliveries before the query: if more have come since, the answer is out of date.
    deliveries: u64,
}

/// Whether the broker is reachable; if not, the log says each minute that this worker waits for it.
#[derive(Debug)]
pub(super) struct Contact {
    missing_since: Option<Instant>,
    was_there: bool,
    /// A query is on its way.
    is_asked: bool,
    ask_from: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    First,
    Again { after: Duration },
}

impl Contact {
    pub(super) fn missing_from(now: Instant) -> Self {
        Self {
            missing_since: Some(now),
            was_there: false,
            is_asked: false,
            ask_from: now,
        }
    }

    fn came(&mut self, now: Instant) -> Option<Came> {
        let since = self.missing_since.take()?;
        let after = now.saturating_duration_since(since);
        match std::mem::replace(&mut self.was_there, true) {
            false => Some(Came::First),
            true => Some(Came::Again { after }),
        }
    }

    fn lost(&mut self, now: Instant) {
        if self.missing_since.is_none() {
            self.missing_since = Some(now);
            // Most outages are shorter: a restart is not worth a log line.
            self.ask_from = now + MISSING_EVERY - ANSWER_WITHIN;
        }
    }

    /// Handles an unanswered query; logs for how long the broker has been unreachable.
    fn still_missing(&mut self, now: Instant) -> Option<Duration> {
        self.ask_from = now + MISSING_EVERY - ANSWER_WITHIN;
        Some(now.saturating_duration_since(self.missing_since?))
    }

    fn ask_from(&self) -> Option<Instant> {
        (self.missing_since.is_some() && !self.is_asked).then_some(self.ask_from)
    }
}

impl Burst {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            asked: false,
            is_subscribed: false,
            ask_from: now,
            deliveries: 0,
        }
    }
}

/// Whether the broker has nothing for this idle worker. If it still counts a lease, that job is on its way: its body
/// may be read back slowly.
fn nothing_is_left(page: &StatusPage) -> bool {
    page.own_ready == 0 && page.own_leases == 0
}

impl Supervisor {
    pub(super) fn read_news(&mut self, now: Instant) {
        let News {
            deliveries,
            cancels,
            lost,
            refused,
            answers,
            asks,
            in_reach,
            failed,
        } = self.inbox.take();
        self.deliveries += deliveries.len() as u64;
        if !deliveries.is_empty() {
            self.tick_at.get_or_insert(now + TICK);
        }
        let takes_jobs = self.phase == Phase::Serving && !self.is_paused;
        for delivery in deliveries {
            if takes_jobs {
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
            } else {
                self.settlements.add(delivery, Outcome::Returned);
            }
        }
        if !lost.is_empty() {
            self.forget(&lost.into_iter().collect());
        }
        if !cancels.is_empty() {
            self.cancel(cancels, now);
        }
        if let Some(in_reach) = in_reach {
            self.in_reach = in_reach;
            self.stop_reading();
            match in_reach {
                true => {
                    self.begin_reading();
                    self.broker_answers();
                }
                false => {
                    self.contact.lost(now);
                    self.begin_nothing();
                }
            }
        }
        for (lease, why) in refused {
            tracing::error!(job = %lease.message, "the broker refused this job's outcome: {why}");
            let reason = ReleaseReason::Crashed(format!("the broker refused its outcome: {why}"));
            self.settlements
                .push(lease, vec![Op::Release { lease, reason }].into());
        }
        for answer in answers {
            self.hear_answer(answer, now);
        }
        self.hear_asks(asks, now);
        // Logged once: the driver keeps trying until the end.
        if let Some(error) = failed
            && !matches!(self.phase, Phase::Killing { .. })
        {
            tracing::error!("the broker can't be used any more: {error}");
            self.end = end_of(&error);
            self.begin_killing(now);
        }
    }

    /// Reads the broker's connection in this thread from now on, so that a delivery wakes one thread instead of two.
    fn begin_reading(&mut self) {
        let Some(broker) = &self.broker else {
            return;
        };
        self.reading = broker.driver.read_elsewhere();
        if let Some(side) = &self.reading
            && let Err(error) = self.listen(side, BROKER, Interest::READABLE)
        {
            tracing::error!(%error, "the worker cannot watch its connection to the broker");
            self.stop_reading();
        }
    }

    pub(super) fn stop_reading(&mut self) {
        if let (Some(broker), Some(side)) = (&self.broker, self.reading.take()) {
            self.ignore(&side);
            broker.driver.leave_reading(side);
        }
    }

    /// Reads what the broker has sent; the news follow in this pass.
    pub(super) fn read_broker(&mut self) {
        if let (Some(broker), Some(side)) = (&self.broker, &self.reading)
            && !self
                .inbox
                .without_waking(|| broker.driver.read_arrived(side))
        {
            self.stop_reading();
        }
    }

    /// Handles the loss of the broker: no job begins, because the broker may already have given this worker's jobs to
    /// others. Running jobs continue.
    fn begin_nothing(&mut self) {
        for place in self.outstanding.all_places() {
            self.take_back(place, PacketEnd::TakenBack);
        }
    }

    /// Drops jobs whose leases are lost. Those that have not begun will not begin. Running jobs continue, and
    /// their outcomes will be refused unless the lease is restored.
    fn forget(&mut self, lost: &HashSet<Lease>) {
        tracing::warn!(
            jobs = lost.len(),
            "this worker could not reach the broker for too long: its jobs were given to other workers. Jobs that \
             have begun here continue, but their outcomes are fenced off"
        );
        for place in self.outstanding.places_with(lost) {
            self.take_back(place, PacketEnd::TakenBack);
        }
        for pool in &mut self.pools {
            pool.policy.retain(|job| !lost.contains(&job.lease));
        }
        self.settlements.forget(lost);
    }

    /// Sends the settlements, and grants the broker credit for idle slots.
    pub(super) fn commit(&mut self) {
        let consumes = self.credit_to_grant();
        let Some(broker) = &self.broker else {
            return;
        };
        let sink = Arc::clone(&self.inbox);
        let Settlements { txs, leases } = take(&mut self.settlements);
        if txs.is_empty() {
            for consume in consumes {
                broker.driver.consume(consume, Arc::clone(&sink) as _);
            }
            return;
        }
        self.inbox.committing(leases.len());
        let inbox = Arc::clone(&self.inbox);
        broker.driver.settle_and_consume(
            txs,
            Box::new(move |receipts| inbox.confirmed(&leases, receipts)),
            consumes,
            sink,
        );
    }

    fn credit_to_grant(&mut self) -> Vec<Consume> {
        let mut consumes = Vec::new();
        if self.broker.is_none() || self.phase != Phase::Serving {
            return consumes;
        }
        for number in 0..self.pools.len() {
            if let Some(alone) = self.pools[number].alone {
                let waiting = self.pools[alone].policy.waiting();
                self.pools[number].policy.set_passed(waiting);
            }
            let pool = &mut self.pools[number];
            let granted = match pool.is_needed() && !self.is_paused {
                true => pool.policy.grant(),
                false => Credit::Keep,
            };
            let tasks = pool.unsubscribed.take();
            if tasks.is_none() && !matches!(granted, Credit::Add(_)) {
                continue;
            }
            let mut consume = Consume {
                consumer: number as u32,
                ..Consume::default()
            };
            if let Credit::Add(credit) = granted {
                consume.add_credit = credit;
            }
            if tasks.is_some() {
                let tasks = self.wanted_tasks(number);
                consume.app.clone_from(&self.app);
                consume.queues.clone_from(&self.queues);
                consume.tasks = TaskSelection::Named(tasks);
            }
            consumes.push(consume);
        }
        consumes
    }

    /// Withdraws the credit that the broker has for a pool.
    pub(super) fn withdraw(&self, pool: usize) {
        if let Some(broker) = &self.broker {
            broker.driver.stop_consumer(pool as u32);
        }
    }

    /// Informs the broker that this worker no longer runs any of its tasks. It may stay for a long time, and people
    /// should learn of waiting jobs that no worker takes.
    pub(super) fn leave_tasks(&self) {
        let Some(broker) = &self.broker else {
            return;
        };
        let pools = (0..self.pools.len()).filter(|pool| self.pools[*pool].is_needed());
        // Consumers of held tasks are numbered after those of the pools.
        let held = self.is_holding().then_some(self.pools.len());
        for number in pools.chain(held) {
            let consume = Consume {
                consumer: number as u32,
                tasks: TaskSelection::Named(Vec::new()),
                ..Consume::default()
            };
            let inbox = Arc::clone(&self.inbox);
            broker.driver.consume(consume, inbox);
        }
    }

    pub(super) fn stop_consuming(&self) {
        if let Some(broker) = &self.broker {
            broker.driver.stop_consuming();
        }
    }

    pub(super) fn figures(&self) -> WorkerReport {
        WorkerReport {
            slots: self.wanted_slots(),
            busy: self.busy() as u32,
            state: self.state(),
            takes_asks: true,
            parked: self.parked() as u32,
        }
    }

    /// Returns when to report changed figures. A new state is reported at once.
    pub(super) fn next_report(&self) -> Option<Instant> {
        let is_told = matches!(self.phase, Phase::Serving | Phase::Draining { .. });
        let figures = self.figures();
        let reported = self.reported.filter(|_| is_told);
        match reported {
            Some(reported) if reported == figures => None,
            Some(reported) if reported.state != figures.state => Some(self.reported_at),
            _ => is_told.then_some(self.report_from),
        }
    }

    pub(super) fn report(&mut self, now: Instant) {
        if self.next_report().is_none_or(|at| at > now) {
            return;
        }
        let figures = self.figures();
        if let Some(broker) = &self.broker {
            broker.driver.report(figures);
        }
        let (slots, busy) = (figures.slots, figures.busy);
        let shown = match figures.state {
            WorkerState::Paused => format!("paused; {busy} jobs running"),
            WorkerState::Draining => format!("draining; {busy} jobs running"),
            WorkerState::Ending => format!("stopping; {busy} jobs running"),
            WorkerState::Serving | WorkerState::Unsaid => format!(
                "running {}: {busy} of {slots} slots busy; broker: {}",
                self.place,
                self.shown()
            ),
        };
        self.manager.status(shown);
        self.reported = Some(figures);
        self.reported_at = now;
        self.report_from = now + REPORT_EVERY;
    }

    pub(super) fn log_notices(&mut self, now: Instant) {
        if self.notices_from <= now {
            self.notices_from = now + NOTICES_EVERY;
            for notice in self
                .broker
                .iter()
                .flat_map(|broker| broker.driver.take_notices())
            {
                tracing::warn!("{notice}");
            }
        }
    }

    /// Asks for the broker's state: at the start, so that an unreachable one is logged at once; and to know
    /// whether a burst is over.
    pub(super) fn ask_status(&mut self) {
        let Some(broker) = &self.broker else {
            return;
        };
        self.burst.asked = true;
        self.contact.is_asked = true;
        self.burst.is_subscribed = self.phase == Phase::Serving && self.is_subscribed();
        self.burst.deliveries = self.deliveries;
        let inbox = Arc::clone(&self.inbox);
        broker.driver.query(
            Query::Status(StatusQuery::first(1)),
            Instant::now() + ANSWER_WITHIN,
            Box::new(move |answer| inbox.answered(answer)),
        );
    }

    fn hear_answer(&mut self, answer: Result<Answer, DriverError>, now: Instant) {
        self.burst.asked = false;
        self.burst.ask_from = now + BURST_ASKS_EVERY;
        self.contact.is_asked = false;
        match answer {
            Ok(Answer::Status(page)) => {
                self.broker_answers();
                let is_current =
                    self.burst.is_subscribed && self.burst.deliveries == self.deliveries;
                let serving = self.phase == Phase::Serving && self.is_staffed();
                let idle = serving && is_current && self.is_idle();
                if self.config.burst && idle && nothing_is_left(&page) {
                    tracing::info!("nothing is left for this worker: the burst is over");
                    self.begin_draining(None);
                }
            }
            Ok(_) => {}
            Err(error) if error.is_transient() => self.broker_is_missing(&error, now),
            Err(error) => {
                if matches!(self.phase, Phase::Loading | Phase::Serving) {
                    tracing::error!("can't use the broker: {error}");
                    self.end = end_of(&error);
                    self.begin_killing(now);
                }
            }
        }
    }

    fn shown(&self) -> &str {
        self.broker.as_ref().map_or("", |broker| &broker.shown)
    }

    /// Notes an answer of the broker, the first one or a later one.
    fn broker_answers(&mut self) {
        if self.phase != Phase::Serving {
            return;
        }
        match self.contact.came(Instant::now()) {
            None => {}
            Some(Came::First) => {
                tracing::info!(
                    "{} is connected and runs {} on {} from {}; queues: {}",
                    self.config.name,
                    self.place,
                    self.slots_in_words(),
                    self.shown(),
                    self.queues.join(", ")
                );
                self.manager.ready();
            }
            Some(Came::Again { after }) => tracing::info!(
                "reconnected to the broker at {} after {} s",
                self.shown(),
                after.as_secs()
            ),
        }
    }

    fn broker_is_missing(&mut self, error: &DriverError, now: Instant) {
        if let Some(waited) = self.contact.still_missing(now) {
            let shown = format!("waiting for the broker at {}", self.shown());
            self.manager.status(shown);
            tracing::warn!(
                "this worker has waited {} s for the broker at {}, and keeps trying: {error}",
                waited.as_secs(),
                self.shown()
            );
        }
    }

    /// Returns when to query an unreachable broker again: that it is unreachable is logged each minute.
    pub(super) fn next_look(&self) -> Option<Instant> {
        (self.phase == Phase::Serving).then(|| self.contact.ask_from())?
    }

    pub(super) fn look_for_broker(&mut self, now: Instant) {
        if self.next_look().is_some_and(|at| at <= now) {
            self.ask_status();
        }
    }

    fn is_idle(&self) -> bool {
        self.has_nothing() && self.settlements.is_empty() && self.inbox.unconfirmed() == 0
    }

    /// Returns when a burst must ask the broker again.
    pub(super) fn next_question(&self) -> Option<Instant> {
        let may_ask = self.config.burst && !self.burst.asked && self.is_staffed();
        (may_ask && self.phase == Phase::Serving && self.is_idle()).then_some(self.burst.ask_from)
    }

    pub(super) fn look_at_burst(&mut self, now: Instant) {
        if self.next_question().is_some_and(|at| at <= now) {
            self.ask_status();
        }
    }
}

/// Maps a driver error to the end of a worker whose broker can't be used.
fn end_of(error: &DriverError) -> End {
    match error.kind {
        ErrorKind::NotOffered(_) => End::NotOffered,
        ErrorKind::Invalid | ErrorKind::Unauthorized => End::Unusable,
        _ => End::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The queue of a burst may be empty while its jobs are on their way to the worker, whose goodbye would put
    /// them back.
    #[test]
    fn a_broker_that_is_missing_is_told_of_each_minute_and_when_it_is_there() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut contact = Contact::missing_from(start);
        assert_eq!(contact.ask_from(), Some(start));
        contact.is_asked = true;
        assert_eq!(contact.ask_from(), None, "one question at a time");
        contact.is_asked = false;
        assert_eq!(contact.still_missing(at(5)), Some(Duration::from_secs(5)));
        // The answer to the next query is as late again: a minute later.
        assert_eq!(contact.ask_from(), Some(at(60)));
        assert_eq!(contact.still_missing(at(65)), Some(Duration::from_secs(65)));
        assert_eq!(contact.came(at(70)), Some(Came::First));
        assert_eq!((contact.came(at(71)), contact.ask_from()), (None, None));
        contact.lost(at(100));
        contact.lost(at(110));
        assert_eq!(contact.ask_from(), Some(at(155)));
        let after = Duration::from_secs(20);
        assert_eq!(contact.came(at(120)), Some(Came::Again { after }));
    }

    #[test]
    fn a_burst_is_over_when_nothing_is_ready_and_nothing_is_on_its_way() {
        let check = |own_ready, own_leases, expected| {
            let page = StatusPage {
                own_ready,
                own_leases,
                ..StatusPage::default()
            };
            assert_eq!(nothing_is_left(&page), expected, "{page:?}");
        };
        check(0, 0, true);
        check(1, 0, false);
        check(0, 365, false);
    }
}
