//! Nouns of the model (a message, a value, a join and a session), with simple questions about them.

use std::collections::BTreeSet;

use bytes::Bytes;
use penstock_jobs::delay_after_crash_ms;
use penstock_message::{
    Due, JoinId, JoinOutcome as Outcome, JoinPolicy, Key, Lease, Member, Message, MessageId,
    SessionId, ValueStatus,
};

use crate::work::TASKS;

/// True time and wall-clock time, both in milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    pub steady: u64,
    pub wall: u64,
}

impl Time {
    /// Whether both clocks have advanced by the same amount.
    pub fn is_as_far_apart_as(self, other: Self) -> bool {
        self.wall.wrapping_sub(self.steady) == other.wall.wrapping_sub(other.steady)
    }
}

#[derive(Clone, Copy, Debug)]
pub enum When {
    Steady(u64),
    Wall(u64),
}

impl When {
    pub(super) fn resolve(due: Due, now: Time) -> Self {
        match due {
            Due::AfterMs(ms) => Self::Steady(now.steady + ms),
            Due::At(wall) => Self::Wall(wall),
        }
    }

    /// Returns the steady time at which it is due unless the wall clock is set.
    fn on_the_steady_clock(self, now: Time) -> u64 {
        match self {
            Self::Steady(at) => at,
            Self::Wall(at) => at.saturating_add(now.steady).saturating_sub(now.wall),
        }
    }

    pub(super) fn has_come(self, now: Time) -> bool {
        match self {
            Self::Steady(at) => at <= now.steady,
            Self::Wall(at) => at <= now.wall,
        }
    }
}

/// Message in one queue.
#[derive(Clone, Debug)]
pub struct Item {
    pub message: Message,
    pub queue: String,
    pub state: State,
    /// Place among others of its priority and task.
    pub place: u64,
    /// Whether it has been ready since it was published or moved, so that its place dates from then.
    pub in_order: bool,
    pub(super) due: Option<When>,
    pub(super) due_reached: bool,
    /// Latest time until which a crash may delay it that was unobserved or whose number is unknown; 0: it is not
    /// delayed.
    pub(super) delayed_at_most: u64,
    pub(super) expires: Option<When>,
    /// Minimum and maximum number of times that a worker died while running it.
    pub(super) crashes: (u8, u8),
    /// Time before which no crash beyond those already counted can come: a worker that held it was lost.
    pub(super) lost_at: u64,
    /// Number of times that it or another job killed their process; at least 1 if it certainly did so once.
    pub(super) suspects: u8,
    /// Observed leases, oldest first.
    pub(super) leases: Vec<(Lease, SessionId)>,
    /// Lease that its session gave up without an outcome. The broker ends it in a separate step; until then the session
    /// may come back with it.
    pub(super) comes_back: Option<(Lease, SessionId)>,
    /// Last lease that was settled; no earlier one can hold again.
    pub(super) settled: Option<Lease>,
    /// Whether it may have run since it entered this queue.
    pub(super) may_have_run: bool,
    /// Whether a worker has stored its result: a job that is acknowledged together with another has none.
    pub(super) has_result: bool,
    pub claim: Option<Key>,
    /// Whether the first hand-out ends its claim.
    pub(super) until_start: bool,
    /// Claim that its first hand-out has ended, kept while a crash may undo that.
    pub(super) started_claim: Option<Key>,
    /// Whether it was observed to have lost its key. A retry reclaims it.
    pub(super) lacks_key: bool,
    /// Minimum and maximum of the latest time at which it or its replacement is due.
    pub(super) latest: Option<(u64, u64)>,
    /// Whether another message may have taken its place.
    pub(super) may_be_superseded: bool,
    /// Its failure, if it is kept as a failed job and the start of that was observed.
    pub failure: Option<Failed>,
    /// Whether it may have lost its key unobserved: its first hand-out, or the deletion of the key, may have ended the
    /// claim.
    pub(super) claim_is_unsure: bool,
    /// Notes that it certainly has, in order; it may have more.
    pub(super) notes: Vec<Bytes>,
    /// Whether it has expired or its queue was purged: it may have ended, unless it is leased.
    pub(super) expiry_reached: bool,
    pub(super) purged: bool,
    /// Whether it may have been leased when its queue was purged.
    pub(super) end_is_unsure: bool,
    /// Whether its queue was purged while it ran. A lease that ends before the purge is over returns it to its old place,
    /// where the purge may still reach it.
    pub(super) ran_at_purge: bool,
    /// Earliest time at which it may have ended unobserved, if it may have.
    pub(super) may_have_ended_at: Option<u64>,
    /// The last hand-out overall, as (epoch, grant), when its worker was asked to stop it: it never starts after that.
    pub asked: Option<(u32, u64)>,
    /// The last hand-out overall, as (epoch, grant), when it was cancelled while it did not run: it never starts after
    /// that.
    pub(super) cancelled: Option<(u32, u64)>,
    /// Time until which, after a crash, it may be held for a session that got it unobserved.
    pub unsure_until: u64,
    /// Join that held it initially.
    pub(super) held_by: Option<JoinId>,
    /// Number of times that a person has retried it.
    pub(super) generation: u32,
    /// Transaction that put it in its current place.
    pub tx: u64,
}

/// Facts of the moment at which a transaction was decided that no client can know.
#[derive(Clone, Debug, Default)]
pub struct Moment {
    /// Last hand-out by then, as (epoch, grant).
    pub grants: (u32, u64),
    /// Jobs that had failed, jobs that no longer existed, and jobs that had been handed out, among those that a
    /// cancellation by filter may match.
    pub failed: BTreeSet<MessageId>,
    pub gone: BTreeSet<MessageId>,
    pub handed_out: BTreeSet<MessageId>,
    /// Workflows of the jobs that it settles or cancels, if the broker had forgotten everything but those jobs.
    pub unlisted: BTreeSet<MessageId>,
}

/// Place of a failure among all failures, and its time.
#[derive(Clone, Copy, Debug)]
pub struct Failed {
    pub place: u64,
    pub steady_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// In its queue, ready or due later.
    Waiting,
    Held(JoinId),
    /// `safe`: its grant is certainly on disk.
    Leased {
        lease: Lease,
        session: SessionId,
        safe: bool,
    },
    /// Any of these leases may hold; or the message is back in its queue, or has failed.
    Adrift {
        maybe: Vec<(Lease, SessionId)>,
    },
    Ended(End),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Acked,
    /// Its worker reported the failure.
    Failed,
    /// Its workers died too often.
    Crashed,
    /// A person dropped it after it had failed.
    Dropped,
    /// Another message or a join has its id and its place.
    Replaced,
    /// Another message that claims its key has its place.
    Superseded,
    Expired,
    Purged,
    JoinFailed,
    /// Ended because the failure that it waited for did not happen.
    NotNeeded,
}

/// Work of a hand-out: everything that its result depends on, except the values themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    task: Option<&'static str>,
    attempt: u32,
    inputs: Option<JoinId>,
}

impl From<&Message> for Run {
    fn from(message: &Message) -> Self {
        let extras = message.extras.as_ref();
        Self {
            task: TASKS.into_iter().find(|task| *task == message.task),
            attempt: message.attempt,
            inputs: extras
                .and_then(|extras| extras.inputs)
                .map(|inputs| inputs.join),
        }
    }
}

/// Value of a key.
#[derive(Clone, Debug)]
pub struct Stored {
    pub status: ValueStatus,
    /// Body of the value; `None`: any body is right.
    pub body: Option<Bytes>,
    /// Latest time at which it expires.
    pub until: Option<u64>,
    /// Milliseconds by which it may expire earlier, because its cause may have been observed late.
    pub late_ms: u64,
    pub tx: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct JoinModel {
    pub(super) count: u32,
    pub(super) policy: JoinPolicy,
    pub(super) arrived: BTreeSet<u32>,
    /// Number of members that have failed.
    pub(super) failures: u32,
    pub(super) over: bool,
    /// Whether it was over at the last quiet moment, and has been since.
    pub(super) was_over: bool,
    /// Whether it is over because too many members have failed.
    pub(super) has_failed: bool,
    /// Whether it may have been released, unobserved, before one of its members was retried.
    pub(super) may_have_gone_on: bool,
    /// Whether it may have failed, unobserved, before that: it has then released what waits for a failure.
    pub(super) may_have_failed_before: bool,
    /// Whether it reopened after that, unless the broker had dropped it.
    pub(super) was_reopened: bool,
    /// Whether the broker has dropped it.
    pub(super) was_dropped: bool,
    /// Its places in other joins.
    pub(super) then: Vec<Member>,
    /// Key of its outcome, and how long the outcome is kept.
    pub(super) outcome: Option<(Key, u64)>,
}

/// Job that was replaced, and the properties that its replacement inherits.
#[derive(Clone, Debug)]
pub(super) struct Replaced {
    pub(super) id: MessageId,
    pub(super) member: Option<Member>,
    pub(super) result_ttl_ms: Option<u64>,
    pub(super) claim: Option<Key>,
    pub(super) claim_is_unsure: bool,
    pub(super) generation: u32,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Attendance {
    pub(super) heartbeat_ms: u64,
    /// Time at which it disconnected; `None`: it is connected.
    pub(super) away_since: Option<u64>,
    pub(super) presented: Vec<Lease>,
}

impl Item {
    pub(super) fn lend(&mut self, lease: Lease, session: SessionId, crashes: (u8, u8)) {
        self.keep(lease, session);
        self.crashes = crashes;
        self.delayed_at_most = 0;
        self.may_have_run = true;
        // It left its place before the purge that was observed first.
        self.ran_at_purge |= std::mem::take(&mut self.purged);
        if self.until_start && self.claim.is_some() {
            self.started_claim = self.claim.take();
        }
    }

    /// Whether it was handed out.
    pub fn was_lent(&self) -> bool {
        !self.leases.is_empty()
    }

    /// Returns the queue, the priority and the task, which together determine its flow.
    pub(super) fn line(&self) -> (&str, u8, &str) {
        (&self.queue, self.message.priority, &self.message.task)
    }

    /// Returns the key that it owns or may own.
    pub(super) fn owned(&self) -> Option<&Key> {
        self.claim.as_ref().filter(|_| !self.lacks_key)
    }

    /// Whether a failed group has blocked it. In the model it has ended, until somebody retries the failed member.
    pub(super) fn is_blocked(&self) -> bool {
        self.state == State::Ended(End::JoinFailed)
    }

    /// Notes that its lease has ended without an outcome: it waits, or has ended if it was asked to stop.
    pub(super) fn come_back(&mut self) {
        if let State::Leased { lease, session, .. } = self.state {
            self.comes_back = Some((lease, session));
        }
        self.wait_in_old_place();
        self.purged |= self.asked.is_some();
    }

    /// Notes that it waits in the place that it had before it was handed out.
    pub(super) fn wait_in_old_place(&mut self) {
        self.state = State::Waiting;
        self.may_meet_purge();
    }

    fn may_meet_purge(&mut self) {
        self.purged |= self.ran_at_purge;
        self.end_is_unsure |= self.ran_at_purge;
    }

    /// Notes that this lease holds. If the message was published twice, the lease may belong to the first time.
    pub(super) fn keep(&mut self, lease: Lease, session: SessionId) {
        self.state = State::Leased {
            lease,
            session,
            safe: false,
        };
        self.comes_back = None;
        if !self.leases.contains(&(lease, session)) {
            self.leases.push((lease, session));
        }
    }

    /// Notes that this lease does not hold; another may.
    pub(super) fn give_up(&mut self, lease: &Lease) {
        match &mut self.state {
            State::Adrift { maybe } => maybe.retain(|(other, _)| other != lease),
            _ => self.set_adrift(Vec::new()),
        }
    }

    pub(super) fn set_adrift(&mut self, maybe: Vec<(Lease, SessionId)>) {
        self.state = State::Adrift { maybe };
        self.may_meet_purge();
        self.purged |= self.asked.is_some();
        self.crashes.1 = self.crashes.1.saturating_add(1);
    }

    /// Returns its place in a join.
    pub fn member(&self) -> Option<Member> {
        self.message.extras.as_ref()?.member
    }

    /// Returns the outcome of the join that holds it on which it is released.
    pub fn when(&self) -> Outcome {
        let extras = self.message.extras.as_ref();
        extras.map_or(Outcome::Succeeded, |extras| extras.when)
    }

    /// Returns the workflow that it belongs to.
    pub fn workflow(&self) -> Option<MessageId> {
        self.message.extras.as_ref()?.workflow
    }

    /// Whether it is kept as a failed job.
    pub fn has_failed(&self) -> bool {
        matches!(self.state, State::Ended(End::Failed | End::Crashed))
    }

    /// Whether too many workers may have died while running it.
    pub fn may_be_dead(&self) -> bool {
        // From then on, the failed jobs list it.
        let was_unsure = self.state == State::Waiting && self.unsure_until > 0;
        (was_unsure || matches!(self.state, State::Adrift { .. }))
            && self.asked.is_none()
            && self.crashes.1 >= self.message.max_deliveries
    }

    /// Notes whether it may have ended unobserved. If that is new, it may have happened at any time since the clocks
    /// were last read.
    pub(super) fn note_unseen_end(&mut self, looked: Time, now: Time) {
        let may_have_ended =
            self.ending().is_some() || self.may_be_dead() || self.may_have_died_unseen();
        if !may_have_ended {
            self.may_have_ended_at = None;
            return;
        }
        let expires_at = match self.expires.filter(|_| !self.purged) {
            Some(expires) if self.ending().is_some() => expires.on_the_steady_clock(now),
            _ => 0,
        };
        let at = expires_at.clamp(looked.steady, now.steady);
        self.may_have_ended_at.get_or_insert(at);
    }

    /// Whether it would have failed if it had been ready since, with every hand-out unobserved.
    pub(super) fn may_have_died_unseen(&self) -> bool {
        self.unsure_until > 0
            && self.asked.is_none()
            && self.crashes.1 >= self.message.max_deliveries
    }

    /// Returns how it may have ended; at the next quiet moment it certainly has.
    pub fn ending(&self) -> Option<End> {
        match self.state {
            State::Leased { .. } | State::Ended(_) => None,
            _ if self.purged => Some(End::Purged),
            _ => self.expiry_reached.then_some(End::Expired),
        }
    }

    pub(super) fn may_have_ended_as(&self, end: End, clock_is_doubtful: bool) -> bool {
        let ending = self.ending();
        ending == Some(end) || ending.is_some() && (clock_is_doubtful || self.end_is_unsure)
    }

    /// Whether a session may hold a lease of it that nobody observed, or that may have ended.
    pub(super) fn is_unsure(&self, now: Time) -> bool {
        matches!(self.state, State::Adrift { .. })
            || self.unsure_until > now.steady
            || self.comes_back.is_some()
    }

    pub fn is_delayed(&self) -> bool {
        let is_adrift = matches!(self.state, State::Adrift { .. });
        let may_have_crashed = is_adrift && delay_after_crash_ms(self.crashes.1) > 0;
        self.due.is_some() || self.delayed_at_most > 0 || may_have_crashed
    }

    /// Whether it is due by the current clocks. The next broker checks again: a wall clock that was set back may show
    /// an earlier time.
    pub fn is_due(&self, now: Time) -> bool {
        // Milliseconds are rounded down, so a countdown is over when the next one has begun.
        let is_due = self.due.is_none_or(|due| match due {
            When::Steady(at) => at < now.steady,
            When::Wall(_) => due.has_come(now),
        });
        is_due && (self.delayed_at_most == 0 || self.delayed_at_most < now.steady)
    }

    /// Notes a crash at one of several possible times, which delays it at least until after the first of them.
    pub(super) fn is_delayed_by_crash(&mut self, place: u64, now: Time) {
        let (least_ms, most_ms) = (
            delay_after_crash_ms(self.crashes.0),
            delay_after_crash_ms(self.crashes.1),
        );
        if most_ms == 0 {
            return;
        }
        self.in_order = false;
        self.delayed_at_most = now.steady + most_ms;
        if least_ms > 0 {
            // Otherwise it may be in its old place.
            self.place = place;
            self.due = Some(When::Steady(now.steady + least_ms));
            self.due_reached = false;
        }
    }

    /// Whether it is certainly in its queue, ready for any worker that asks.
    pub fn is_ready(&self, now: Time) -> bool {
        self.state == State::Waiting
            && self.due_reached
            && self.ending().is_none()
            && self.unsure_until <= now.steady
    }
}

impl Attendance {
    pub(super) fn is_over(&self, now: Time) -> bool {
        self.ends_at().is_some_and(|at| now.steady >= at)
    }

    /// Returns the time at which its leases end if it stays away.
    pub(super) fn ends_at(&self) -> Option<u64> {
        self.away_since.map(|since| since + self.heartbeat_ms)
    }
}
