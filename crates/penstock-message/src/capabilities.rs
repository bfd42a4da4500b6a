//! Capabilities of an engine, as it declares them.
//!
//! Engines differ: a broker in memory keeps nothing, others have no joins or only coarse delays. Clients and workers
//! check before they rely on a feature, and a missing feature is always the same error, [`NotOffered`].
//!
//! ```text
//! Features::of(&tx)                    the features that a transaction needs
//! capabilities.lacks(&tx, durability)  the first of them that the engine lacks
//! ```

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::{
    Claim, Conflict, Consume, DEFAULT_PRIORITY, Due, Durability, Key, Message, OnRunning, Op,
    Query, TaskSelection, Tx, Until,
};

/// Capabilities of an engine. Every field defaults to *not offered*, or to the weakest promise.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Name of the engine and its setup, for people: "Redis 7.0.15, appendfsync always".
    pub engine: String,
    /// Whether it is a double for tests: it accepts every durability up to `disk`, and keeps nothing longer than
    /// its process.
    pub is_double: bool,
    pub highest_durability: Durability,
    pub settlement: Settlement,
    /// Whether a lost lease prevents all changes.
    pub fencing: bool,
    pub dedupe: Dedupe,
    pub lease: LeaseLife,
    /// Precision of delays; `None`: there are none.
    pub delays: Option<Duration>,
    pub priorities: Priorities,
    /// Whether a message that is returned takes its old place.
    pub keeps_place: bool,
    /// Results.
    pub values: bool,
    /// Keys named by users: guards, locks, publishing under a key.
    pub keys: bool,
    pub joins: bool,
    /// Maximum number of members of a join; 0: there are no joins.
    pub max_group: u32,
    /// Whether a result that is on its way can be distinguished from one that will never come.
    pub pending: bool,
    pub purge: bool,
    pub pause: bool,
    /// Limits of how much may wait in a queue.
    pub limits: LimitSupport,
    /// Whether a single message can be inspected.
    pub inspect: bool,
    /// Whether failed jobs are listed, retried and dropped.
    pub failed_jobs: bool,
    pub cancel_waiting: bool,
    pub cancel_running: bool,
    /// Whether consumers name the tasks that they can run.
    pub tasks_of_consumers: bool,
    /// Whether a task with long jobs does not keep others from running.
    pub fair_flows: bool,
    /// Whether countdowns ignore changes of the wall clock.
    pub steady_clock: bool,
    pub workflows: bool,
    pub value_streams: bool,
    pub claims: bool,
    pub debounce: bool,
    /// Precision of the rate limits of tasks; `None`: there are none.
    pub rate_limits: Option<Duration>,
    /// Shares of tenants.
    pub fair_share: bool,
    pub batching: bool,
    pub schedules: bool,
    pub progress: bool,
    /// Whether the engine reports why a job waits.
    pub why: bool,
    /// Whether a running job can be parked until something happens.
    pub parking: bool,
    /// Whether clients can move the clock.
    pub movable_clock: bool,
    /// Whether questions are passed on to workers.
    pub asks: bool,
    pub remarks: Vec<Remark>,
}

/// Feature that an engine lacks in its present setup, and how to fix that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    pub feature: Feature,
    pub missing: String,
    pub remedy: String,
}

/// Atomicity of an acknowledgement, its result and the jobs that follow it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Settlement {
    /// The jobs that follow are published before the acknowledgement, and twice if a crash comes between.
    #[default]
    PublishThenAck,
    /// Copies are dropped within this window.
    Idempotent { window: Duration },
    /// Everything is applied at once, or nothing.
    OneStep,
}

/// Time for which an engine recognizes a resent transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dedupe {
    #[default]
    None,
    Window(Duration),
    /// As long as the client's session lives.
    Session,
}

/// Event that ends a lease, unless it is settled before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseLife {
    #[default]
    Connection,
    /// The lease outlives connections, and restarts of the broker.
    Session,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priorities {
    #[default]
    None,
    /// Higher levels are preferred, not always first.
    Levels(u8),
    /// The highest of this many levels always goes first.
    Strict(u8),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitSupport {
    #[default]
    None,
    /// Only when the queue is created.
    AtDeclaration,
    Live,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self::NOTHING
    }
}

impl Capabilities {
    /// Engine that offers nothing beyond accepting jobs and handing them out.
    pub const NOTHING: Self = Self {
        engine: String::new(),
        is_double: false,
        highest_durability: Durability::None,
        settlement: Settlement::PublishThenAck,
        fencing: false,
        dedupe: Dedupe::None,
        lease: LeaseLife::Connection,
        delays: None,
        priorities: Priorities::None,
        keeps_place: false,
        values: false,
        keys: false,
        joins: false,
        max_group: 0,
        pending: false,
        purge: false,
        pause: false,
        limits: LimitSupport::None,
        inspect: false,
        failed_jobs: false,
        cancel_waiting: false,
        cancel_running: false,
        tasks_of_consumers: false,
        fair_flows: false,
        steady_clock: false,
        workflows: false,
        value_streams: false,
        claims: false,
        debounce: false,
        rate_limits: None,
        fair_share: false,
        batching: false,
        schedules: false,
        progress: false,
        why: false,
        parking: false,
        movable_clock: false,
        asks: false,
        remarks: Vec::new(),
    };

    pub fn offers(&self, feature: Feature) -> bool {
        match feature {
            Feature::ReplicatedDurability => self.takes(Durability::Replicated),
            Feature::DiskDurability => self.takes(Durability::Disk),
            Feature::OsDurability => self.takes(Durability::Os),
            Feature::OneStepSettlement => self.settlement == Settlement::OneStep,
            Feature::Fencing => self.fencing,
            Feature::Dedupe => self.dedupe == Dedupe::Session,
            Feature::LeasesOfSessions => self.lease == LeaseLife::Session,
            Feature::Delays => self.delays.is_some(),
            Feature::Priorities => self.priorities != Priorities::None,
            Feature::KeepsPlace => self.keeps_place,
            Feature::Values => self.values,
            Feature::Keys => self.keys,
            Feature::Joins => self.joins,
            Feature::Pending => self.pending,
            Feature::Purge => self.purge,
            Feature::Pause => self.pause,
            Feature::Limits => self.limits == LimitSupport::Live,
            Feature::Inspection => self.inspect,
            Feature::FailedJobs => self.failed_jobs,
            Feature::CancelWaiting => self.cancel_waiting,
            Feature::CancelRunning => self.cancel_running,
            Feature::TasksOfConsumers => self.tasks_of_consumers,
            Feature::FairFlows => self.fair_flows,
            Feature::SteadyClock => self.steady_clock,
            Feature::Workflows => self.workflows,
            Feature::ValueStreams => self.value_streams,
            Feature::Claims => self.claims,
            Feature::Debounce => self.debounce,
            Feature::RateLimits => self.rate_limits.is_some(),
            Feature::FairShare => self.fair_share,
            Feature::Batching => self.batching,
            Feature::Schedules => self.schedules,
            Feature::Progress => self.progress,
            Feature::Why => self.why,
            Feature::Parking => self.parking,
            Feature::MovableClock => self.movable_clock,
            Feature::Asks => self.asks,
        }
    }

    /// Removes a feature; for a durability, also the stronger ones.
    pub fn without(mut self, feature: Feature) -> Self {
        let cap = |highest: Durability| self.highest_durability.min(highest);
        match feature {
            Feature::ReplicatedDurability => self.highest_durability = cap(Durability::Disk),
            Feature::DiskDurability => self.highest_durability = cap(Durability::Os),
            Feature::OsDurability => self.highest_durability = cap(Durability::None),
            Feature::OneStepSettlement => self.settlement = Settlement::PublishThenAck,
            Feature::Fencing => self.fencing = false,
            Feature::Dedupe => self.dedupe = Dedupe::None,
            Feature::LeasesOfSessions => self.lease = LeaseLife::Connection,
            Feature::Delays => self.delays = None,
            Feature::Priorities => self.priorities = Priorities::None,
            Feature::KeepsPlace => self.keeps_place = false,
            Feature::Values => self.values = false,
            Feature::Keys => self.keys = false,
            Feature::Joins => (self.joins, self.max_group) = (false, 0),
            Feature::Pending => self.pending = false,
            Feature::Purge => self.purge = false,
            Feature::Pause => self.pause = false,
            Feature::Limits => self.limits = LimitSupport::None,
            Feature::Inspection => self.inspect = false,
            Feature::FailedJobs => self.failed_jobs = false,
            Feature::CancelWaiting => self.cancel_waiting = false,
            Feature::CancelRunning => self.cancel_running = false,
            Feature::TasksOfConsumers => self.tasks_of_consumers = false,
            Feature::FairFlows => self.fair_flows = false,
            Feature::SteadyClock => self.steady_clock = false,
            Feature::Workflows => self.workflows = false,
            Feature::ValueStreams => self.value_streams = false,
            Feature::Claims => self.claims = false,
            Feature::Debounce => self.debounce = false,
            Feature::RateLimits => self.rate_limits = None,
            Feature::FairShare => self.fair_share = false,
            Feature::Batching => self.batching = false,
            Feature::Schedules => self.schedules = false,
            Feature::Progress => self.progress = false,
            Feature::Why => self.why = false,
            Feature::Parking => self.parking = false,
            Feature::MovableClock => self.movable_clock = false,
            Feature::Asks => self.asks = false,
        }
        if matches!(
            feature,
            Feature::ReplicatedDurability | Feature::DiskDurability | Feature::OsDurability
        ) {
            // A double only imitates offered features.
            self.is_double = false;
        }
        self
    }

    /// Returns all offered features, as a set to compare with required ones.
    pub fn features(&self) -> Features {
        let offered = Feature::ALL.into_iter().filter(|one| self.offers(*one));
        offered.fold(Features::NONE, Features::with)
    }

    /// Whether a commit of this durability is accepted.
    pub fn takes(&self, durability: Durability) -> bool {
        durability <= self.highest_durability || (self.is_double && durability <= Durability::Disk)
    }

    /// Returns the durability to settle with: disk, or the strongest one offered.
    pub fn settle_at(&self) -> Durability {
        self.highest_durability.min(Durability::Disk)
    }

    /// Returns the first operation that this engine can't apply, and the feature it lacks.
    pub fn lacks(&self, tx: &Tx, durability: Durability) -> Option<(u32, Feature)> {
        if !self.takes(durability) {
            return Some((0, Feature::of_durability(durability)));
        }
        let offered = self.features();
        tx.ops.iter().zip(0..).find_map(|(op, index)| {
            let needs = Features::NONE.of_op(op);
            Some((index, needs.minus(offered).first()?))
        })
    }

    /// Returns the error for a feature that is not offered.
    pub fn not_offered(&self, feature: Feature) -> NotOffered {
        let engine = match self.engine.is_empty() {
            true => "this broker".to_owned(),
            false => self.engine.clone(),
        };
        let remark = self.remarks.iter().find(|remark| remark.feature == feature);
        let remedy = match (remark, feature) {
            (Some(Remark { missing, remedy, .. }), _) => format!("{missing}. {remedy}"),
            (None, Feature::ReplicatedDurability) if self.takes(Durability::Disk) => {
                "no current engine stores a job on more than one machine; \"disk\" is the safest level".to_owned()
            }
            (
                None,
                Feature::ReplicatedDurability | Feature::DiskDurability | Feature::OsDurability,
            ) => format!(
                "\"{}\" is its safest level",
                self.highest_durability.name()
            ),
            (None, Feature::MovableClock) => {
                "only the clock of a memory: broker, a double for tests, can be moved".to_owned()
            }
            (None, _) => "do without it, or use a broker that has it".to_owned(),
        };
        NotOffered {
            feature: feature.name().into(),
            engine,
            remedy,
        }
    }
}

/// Feature that an engine offers or lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Feature {
    ReplicatedDurability,
    DiskDurability,
    OsDurability,
    OneStepSettlement,
    Fencing,
    Dedupe,
    LeasesOfSessions,
    Delays,
    Priorities,
    KeepsPlace,
    Values,
    Keys,
    Joins,
    Pending,
    Purge,
    Pause,
    Limits,
    Inspection,
    FailedJobs,
    CancelWaiting,
    CancelRunning,
    TasksOfConsumers,
    FairFlows,
    SteadyClock,
    Workflows,
    ValueStreams,
    Claims,
    Debounce,
    RateLimits,
    FairShare,
    Batching,
    Schedules,
    Progress,
    Why,
    Parking,
    MovableClock,
    Asks,
}

impl Feature {
    pub const ALL: [Self; 37] = [
        Self::ReplicatedDurability,
        Self::DiskDurability,
        Self::OsDurability,
        Self::OneStepSettlement,
        Self::Fencing,
        Self::Dedupe,
        Self::LeasesOfSessions,
        Self::Delays,
        Self::Priorities,
        Self::KeepsPlace,
        Self::Values,
        Self::Keys,
        Self::Joins,
        Self::Pending,
        Self::Purge,
        Self::Pause,
        Self::Limits,
        Self::Inspection,
        Self::FailedJobs,
        Self::CancelWaiting,
        Self::CancelRunning,
        Self::TasksOfConsumers,
        Self::FairFlows,
        Self::SteadyClock,
        Self::Workflows,
        Self::ValueStreams,
        Self::Claims,
        Self::Debounce,
        Self::RateLimits,
        Self::FairShare,
        Self::Batching,
        Self::Schedules,
        Self::Progress,
        Self::Why,
        Self::Parking,
        Self::MovableClock,
        Self::Asks,
    ];

    /// Returns the feature that a commit of this durability needs.
    pub fn of_durability(durability: Durability) -> Self {
        match durability {
            Durability::Replicated => Self::ReplicatedDurability,
            Durability::Disk => Self::DiskDurability,
            Durability::Os | Durability::None => Self::OsDurability,
        }
    }

    /// Returns the name for people, as the subject of "... is not offered".
    pub fn name(self) -> &'static str {
        match self {
            Self::ReplicatedDurability => "durability=\"replicated\"",
            Self::DiskDurability => "durability=\"disk\"",
            Self::OsDurability => "durability=\"os\"",
            Self::OneStepSettlement => "settling a job in one step",
            Self::Fencing => "fencing of lost leases",
            Self::Dedupe => "recognizing duplicates",
            Self::LeasesOfSessions => "leases that outlive a connection",
            Self::Delays => "delaying a job",
            Self::Priorities => "priority of jobs",
            Self::KeepsPlace => "returning a job to its old place",
            Self::Values => "keeping results",
            Self::Keys => "named keys",
            Self::Joins => "joining jobs",
            Self::Pending => "telling a pending result from none",
            Self::Purge => "purging a queue",
            Self::Pause => "pausing a queue",
            Self::Limits => "limiting a queue",
            Self::Inspection => "looking at a job",
            Self::FailedJobs => "keeping failed jobs",
            Self::CancelWaiting => "cancelling a waiting job",
            Self::CancelRunning => "cancelling a running job",
            Self::TasksOfConsumers => "naming the tasks of a worker",
            Self::FairFlows => "fairness between tasks",
            Self::SteadyClock => "a clock that can't be set",
            Self::Workflows => "workflows",
            Self::ValueStreams => "streams of values",
            Self::Claims => "unique jobs",
            Self::Debounce => "debouncing",
            Self::RateLimits => "limiting rates",
            Self::FairShare => "fair shares",
            Self::Batching => "batching",
            Self::Schedules => "schedules",
            Self::Progress => "progress of jobs",
            Self::Why => "saying why a job waits",
            Self::Parking => "parking jobs",
            Self::MovableClock => "moving the clock",
            Self::Asks => "asking a worker",
        }
    }
}

/// Set of features. Made for each transaction, so it is a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    pub const NONE: Self = Self(0);

    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | 1 << feature as u8)
    }

    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn first(self) -> Option<Feature> {
        let index = self.0.trailing_zeros();
        Feature::ALL.get(index as usize).copied()
    }

    pub fn iter(self) -> impl Iterator<Item = Feature> {
        let has = move |one: &Feature| self.0 & 1 << *one as u8 != 0;
        Feature::ALL.into_iter().filter(has)
    }

    /// Returns the features that a transaction requires, apart from its durability. Settling a job requires none: any
    /// engine can.
    pub fn of(tx: &Tx) -> Self {
        tx.ops.iter().fold(Self::NONE, Self::of_op)
    }

    fn of_op(self, op: &Op) -> Self {
        match op {
            Op::Publish {
                message,
                due,
                unless_key,
                ..
            } => self
                .of_message(message)
                .of_due(due.as_ref())
                .of_claim(unless_key.as_deref()),
            Op::Move { due, .. } => self.of_due(due.as_ref()),
            Op::Put { key, .. } | Op::Delete { key } | Op::Guard { key, .. } => self.of_key(key),
            Op::Hold(hold) => hold
                .messages
                .iter()
                .fold(self, |needs, (_, message)| needs.of_message(message))
                .with(Feature::Joins),
            Op::Join { .. } | Op::Seal { .. } | Op::Grow { .. } => self.with(Feature::Joins),
            Op::Open(_) | Op::Replace { .. } => self.with(Feature::Workflows),
            Op::Schedule { .. } | Op::Unschedule { .. } => self.with(Feature::Schedules),
            Op::Cancel { running, .. } => self
                .with(Feature::CancelWaiting)
                .when(*running != OnRunning::Leave, Feature::CancelRunning),
            Op::RetryFailed { .. } | Op::DropFailed { .. } => self.with(Feature::FailedJobs),
            Op::Purge { .. } => self.with(Feature::Purge),
            Op::Pause { .. } | Op::Resume { .. } => self.with(Feature::Pause),
            Op::Limit { .. } => self.with(Feature::Limits),
            Op::Ack { .. } | Op::Release { .. } | Op::Fail { .. } | Op::Unnamed => self,
        }
    }

    fn of_message(self, message: &Message) -> Self {
        let member = message
            .extras
            .as_ref()
            .is_some_and(|extras| extras.member.is_some());
        self.when(message.priority != DEFAULT_PRIORITY, Feature::Priorities)
            .when(member, Feature::Joins)
    }

    fn of_claim(self, claim: Option<&Claim>) -> Self {
        let Some(claim) = claim else {
            return self;
        };
        let is_debounce = matches!(
            claim.conflict,
            Conflict::Replace {
                max_wait_ms: Some(_)
            }
        );
        let is_plain = claim.until == Until::Ended && claim.conflict == Conflict::Skip;
        self.with(match claim.key {
            Key::Scoped(..) => Feature::Claims,
            Key::Named(_) | Key::Result(_) => Feature::Keys,
        })
        .when(!is_plain, Feature::Claims)
        .when(is_debounce, Feature::Debounce)
    }

    fn of_due(self, due: Option<&Due>) -> Self {
        self.when(due.is_some(), Feature::Delays)
    }

    fn of_key(self, key: &Key) -> Self {
        self.with(match key {
            Key::Result(_) => Feature::Values,
            Key::Named(_) => Feature::Keys,
            Key::Scoped(..) => Feature::Claims,
        })
    }

    pub fn of_query(query: &Query) -> Self {
        let needs = Self::NONE;
        match query {
            Query::Message(_) => needs.with(Feature::Inspection),
            Query::Failed(_) => needs.with(Feature::FailedJobs),
            Query::Workflows(_) => needs.with(Feature::Workflows),
            Query::Schedules(_) => needs.with(Feature::Schedules),
            Query::SetClock { .. } => needs.with(Feature::MovableClock),
            Query::Progress(_) => needs.with(Feature::Progress),
            Query::Ask(_) => needs.with(Feature::Asks),
            Query::Status(_) | Query::Operation(_) | Query::Unnamed | Query::Stop => needs,
        }
    }

    /// Returns the features that watching these keys requires.
    pub fn of_watch(keys: &[Key]) -> Self {
        keys.iter().fold(Self::NONE, Self::of_key)
    }

    pub fn of_consumer(consume: &Consume) -> Self {
        let names = matches!(consume.tasks, TaskSelection::Named(_));
        Self::NONE.when(names, Feature::TasksOfConsumers)
    }

    const fn when(self, needed: bool, feature: Feature) -> Self {
        match needed {
            true => self.with(feature),
            false => self,
        }
    }
}

/// Feature that the engine lacks, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotOffered {
    /// Name of the feature, such as `durability="replicated"`.
    pub feature: Cow<'static, str>,
    /// Name of the engine and its setup.
    pub engine: String,
    pub remedy: String,
}

impl fmt::Display for NotOffered {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            feature,
            engine,
            remedy,
        } = self;
        write!(out, "{feature} is not offered by {engine}: {remedy}")
    }
}

impl std::error::Error for NotOffered {}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::{Extras, Lease, Member, MessageId, Value, ValueStatus};

    fn everything() -> Capabilities {
        Capabilities {
            engine: "Test 1".to_owned(),
            highest_durability: Durability::Replicated,
            settlement: Settlement::OneStep,
            fencing: true,
            dedupe: Dedupe::Session,
            lease: LeaseLife::Session,
            delays: Some(Duration::from_millis(1)),
            priorities: Priorities::Strict(10),
            keeps_place: true,
            values: true,
            keys: true,
            joins: true,
            max_group: 9,
            pending: true,
            purge: true,
            pause: true,
            limits: LimitSupport::Live,
            inspect: true,
            failed_jobs: true,
            cancel_waiting: true,
            cancel_running: true,
            tasks_of_consumers: true,
            fair_flows: true,
            steady_clock: true,
            workflows: true,
            value_streams: true,
            claims: true,
            debounce: true,
            rate_limits: Some(Duration::from_millis(1)),
            fair_share: true,
            batching: true,
            schedules: true,
            progress: true,
            why: true,
            parking: true,
            movable_clock: true,
            asks: true,
            ..Capabilities::default()
        }
    }

    #[test]
    fn nothing_is_offered_unless_it_is_declared() {
        assert_eq!(Capabilities::default().features(), Features::NONE);
        assert_eq!(Capabilities::default().settle_at(), Durability::None);
        for feature in Feature::ALL {
            assert!(everything().offers(feature), "{feature:?}");
        }
    }

    #[test]
    fn each_feature_can_be_taken_away_and_nothing_else_goes_with_it() {
        for (index, feature) in Feature::ALL.into_iter().enumerate() {
            assert_eq!(
                feature as usize, index,
                "the set is in the order of the enum"
            );
            let left = everything().without(feature);
            let gone = everything().features().minus(left.features());
            let mut expected = Features::NONE.with(feature);
            if matches!(feature, Feature::DiskDurability | Feature::OsDurability) {
                expected = expected.with(Feature::ReplicatedDurability);
            }
            if feature == Feature::OsDurability {
                expected = expected.with(Feature::DiskDurability);
            }
            assert_eq!(gone, expected, "{feature:?}");
        }
    }

    #[test]
    fn a_double_takes_what_a_disk_would_but_no_more() {
        let double = Capabilities {
            is_double: true,
            ..Capabilities::default()
        };
        assert!(double.takes(Durability::Disk));
        assert!(!double.takes(Durability::Replicated));
        assert_eq!(double.settle_at(), Durability::None);
    }

    fn message(priority: u8) -> Message {
        Message {
            id: MessageId([1; 16]),
            task: "t".to_owned(),
            priority,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::new(),
            extras: None,
        }
    }

    fn publish(message: Message, due: Option<Due>) -> Op {
        Op::Publish {
            queues: vec!["q".to_owned()],
            message,
            due,
            unless_key: None,
        }
    }

    #[test]
    fn a_transaction_names_the_first_thing_that_is_lacking() {
        let plain = || publish(message(DEFAULT_PRIORITY), None);
        let lease = Lease {
            message: MessageId([1; 16]),
            epoch: 1,
            grant: 1,
        };
        let ack = Op::Ack { lease, cost_us: 1 };
        let put = |key| Op::Put {
            key,
            value: Value::new(ValueStatus::Succeeded, Bytes::new()),
            ttl_ms: None,
            group: "t".to_owned(),
        };
        let member = Member {
            join: MessageId([2; 16]),
            index: 0,
        };
        let in_join = Message {
            extras: Extras {
                member: Some(member),
                ..Extras::default()
            }
            .boxed(),
            ..message(DEFAULT_PRIORITY)
        };
        let check = |ops: Vec<Op>, expected: Option<(u32, Feature)>| {
            let tx = Tx { ops };
            let nothing = Capabilities::default();
            assert_eq!(nothing.lacks(&tx, Durability::None), expected, "{tx:?}");
            assert_eq!(everything().lacks(&tx, Durability::Disk), None);
        };
        check(vec![plain(), ack], None);
        check(
            vec![plain(), publish(message(9), None)],
            Some((1, Feature::Priorities)),
        );
        check(
            vec![publish(message(DEFAULT_PRIORITY), Some(Due::AfterMs(1)))],
            Some((0, Feature::Delays)),
        );
        check(vec![publish(in_join, None)], Some((0, Feature::Joins)));
        let result = Key::Result(MessageId([1; 16]));
        check(vec![put(result)], Some((0, Feature::Values)));
        let named = Key::Named(Bytes::from_static(b"k"));
        check(vec![put(named)], Some((0, Feature::Keys)));

        let tx = Tx::from(vec![plain()]);
        let lacking = Capabilities::default().lacks(&tx, Durability::Os);
        assert_eq!(lacking, Some((0, Feature::OsDurability)));
    }

    #[test]
    fn the_error_names_the_feature_the_engine_and_what_to_do() {
        let mut engine = everything().without(Feature::ReplicatedDurability);
        let said = |engine: &Capabilities, feature| engine.not_offered(feature).to_string();
        assert_eq!(
            said(&engine, Feature::ReplicatedDurability),
            "durability=\"replicated\" is not offered by Test 1: no current engine stores a job on more than one \
             machine; \"disk\" is the safest level"
        );
        let of_everysec = engine.clone().without(Feature::OsDurability);
        assert_eq!(
            said(&of_everysec, Feature::DiskDurability),
            "durability=\"disk\" is not offered by Test 1: \"none\" is its safest level"
        );
        engine.remarks.push(Remark {
            feature: Feature::Delays,
            missing: "it needs the plugin".to_owned(),
            remedy: "Install it".to_owned(),
        });
        assert_eq!(
            said(&engine, Feature::Delays),
            "delaying a job is not offered by Test 1: it needs the plugin. Install it"
        );
    }
}
