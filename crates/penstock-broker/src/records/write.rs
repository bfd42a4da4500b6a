//! Writes events as bytes.

use penstock_message::{
    Due, Extras, JoinOutcome as Outcome, JoinPolicy, Key, MessageId, OnRunning, Overflow, Receipt,
    Refusal, ReleaseTimes, Retries, WallMs,
};

use super::{
    Change, ENDED_AT_ONCE, Failing, Grant, JoinProgress, MARKED_WORKFLOW, Mark, MessageHead,
    RecordEvent, RecordedState, Renumbered, VERSION, WorkflowHead, WorkflowProgress, also,
    also_join, changed, failed, has, join, later, limited, marked, moved, opened, stored, tag,
};
use crate::clock::ClockTime;
use crate::table::interner::{Interner, Name};

/// Writes the events of one record into bytes.
#[derive(Debug, Default)]
pub(crate) struct RecordWriter {
    pub(super) bytes: Vec<u8>,
    epoch: u32,
    pub(super) time: WallMs,
    number: u64,
    grant: u64,
    /// Record (by count) that last spelled out each name, and its index among the names there.
    spelled: Vec<(u64, u32)>,
    names_spelled: u32,
    records: u64,
}

impl RecordWriter {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Sets the epoch and the time of the next record.
    pub(crate) fn stamp(&mut self, epoch: u32, time: WallMs) {
        if self.bytes.is_empty() {
            self.epoch = epoch;
            self.time = time;
        }
    }

    pub(crate) fn time(&self) -> WallMs {
        self.time
    }

    /// Takes the finished record. The next event begins another.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        let capacity = self.bytes.len().min(64 << 10);
        std::mem::replace(&mut self.bytes, Vec::with_capacity(capacity))
    }

    pub(crate) fn push(&mut self, names: &Interner, event: &RecordEvent<'_>) {
        if self.bytes.is_empty() {
            self.begin();
        }
        match event {
            RecordEvent::Counters {
                numbers,
                grants,
                sessions,
                evicted,
            } => {
                self.tag(tag::COUNTERS);
                for counter in [numbers, grants, sessions, evicted] {
                    self.varint(*counter);
                }
            }
            RecordEvent::ClockSet { steady } => {
                self.tag(tag::CLOCK_SET);
                self.difference(*steady, self.time);
            }
            RecordEvent::ClockBoot { boot } => {
                self.tag(tag::CLOCK_BOOT);
                self.bytes.extend_from_slice(&boot.id);
                self.varint(boot.ms);
            }
            RecordEvent::SessionOpened {
                number,
                session,
                heartbeat_ms,
                applied,
                name,
            } => {
                self.tag(tag::SESSION_OPENED);
                self.varint(*number);
                self.bytes.extend_from_slice(&session.0);
                self.varint(*heartbeat_ms);
                self.varint(*applied);
                self.text(name);
            }
            RecordEvent::SessionLeft { number, at } => {
                self.tag(tag::SESSION_LEFT);
                self.varint(*number);
                self.varint(*at);
            }
            RecordEvent::SessionForgotten { number } => {
                self.tag(tag::SESSION_FORGOTTEN);
                self.varint(*number);
            }
            RecordEvent::Applied { session, through } => {
                self.tag(tag::APPLIED);
                self.varint(*session);
                self.varint(*through);
            }
            RecordEvent::Answered {
                session,
                seq,
                receipt,
            } => {
                self.tag(tag::ANSWERED);
                self.varint(*session);
                self.varint(*seq);
                self.receipt(receipt);
            }
            RecordEvent::Message {
                head,
                extras,
                failure,
                body,
            } => {
                self.tag(tag::MESSAGE);
                self.head(names, head, extras.as_deref(), failure.as_ref());
                self.slice(body);
            }
            RecordEvent::Copied {
                number,
                source,
                queue,
            } => {
                self.tag(tag::COPIED);
                self.number(*source);
                self.number(*number);
                self.name(names, *queue);
            }
            RecordEvent::Noted { number, note } => {
                self.tag(tag::NOTED);
                self.number(*number);
                self.slice(note);
            }
            RecordEvent::Granted {
                number,
                session,
                grant,
            } => {
                self.tag(tag::GRANTED);
                self.number(*number);
                self.varint(*session);
                self.grant(grant);
            }
            RecordEvent::Returned {
                number,
                redelivered,
            } => {
                self.tag(tag::RETURNED);
                self.number(*number);
                self.tag(u8::from(*redelivered));
            }
            RecordEvent::Crashed { number, reason } => {
                self.tag(tag::CRASHED);
                self.number(*number);
                self.slice(reason);
            }
            RecordEvent::Suspected { number, reason } => {
                self.tag(tag::SUSPECTED);
                self.number(*number);
                self.slice(reason);
            }
            RecordEvent::CancelAsked {
                number,
                kill,
                reason,
            } => {
                self.tag(tag::CANCEL_ASKED);
                self.number(*number);
                self.tag(match kill {
                    false => OnRunning::Ask,
                    true => OnRunning::Kill,
                } as u8);
                self.name(names, *reason);
            }
            RecordEvent::Moved { number, change } => {
                self.tag(tag::MOVED);
                self.number(*number);
                self.change(names, change);
            }
            RecordEvent::Settled { number } => {
                self.tag(tag::SETTLED);
                self.number(*number);
            }
            RecordEvent::Replaced { number } => {
                self.tag(tag::REPLACED);
                self.number(*number);
            }
            RecordEvent::Stored {
                key,
                status,
                body,
                group,
                expires_at,
                run,
            } => {
                self.tag(tag::STORED);
                self.key(key);
                let mut flags = *status as u8;
                for (flag, is_set) in [
                    (stored::EXPIRY, expires_at.is_some()),
                    (stored::RUN, run.is_some()),
                ] {
                    flags |= if is_set { flag } else { 0 };
                }
                self.tag(flags);
                self.name(names, *group);
                if let Some(at) = expires_at {
                    self.varint(*at);
                }
                if let Some(run) = run {
                    self.name(names, run.queue);
                    self.varint(u64::from(run.attempt));
                    self.varint(u64::from(run.generation));
                    self.difference(run.ended_at, self.time);
                }
                self.slice(body);
            }
            RecordEvent::Removed { key } => {
                self.tag(tag::REMOVED);
                self.key(key);
            }
            RecordEvent::Evicted { key } => {
                self.tag(tag::EVICTED);
                self.key(key);
            }
            RecordEvent::Claimed { number, key } => {
                self.tag(tag::CLAIMED);
                self.number(*number);
                self.key(key);
            }
            RecordEvent::ClaimedUntilStart {
                number,
                key,
                latest,
            } => {
                self.tag(tag::CLAIMED_UNTIL_START);
                self.number(*number);
                self.key(key);
                self.tag(latest.is_some().into());
                if let Some(latest) = latest {
                    self.varint(*latest);
                }
            }
            RecordEvent::Unclaimed { number } => {
                self.tag(tag::UNCLAIMED);
                self.number(*number);
            }
            RecordEvent::JoinOpened {
                join,
                count,
                policy,
            } => {
                self.tag(tag::JOIN_OPENED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*count));
                self.tag((*policy != JoinPolicy::AllSucceeded).into());
            }
            RecordEvent::Joined { join, index } => {
                self.tag(tag::JOINED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*index));
            }
            RecordEvent::MemberFailed {
                join,
                index,
                causes,
            } => {
                self.tag(tag::MEMBER_FAILED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*index));
                self.ids(causes);
            }
            RecordEvent::MemberNotNeeded { join, index } => {
                self.tag(tag::MEMBER_NOT_NEEDED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*index));
            }
            RecordEvent::JoinEnded {
                join,
                released,
                renumbered,
                at,
            } => {
                self.tag(tag::JOIN_ENDED);
                self.bytes.extend_from_slice(&join.0);
                let renumbers = u8::from(renumbered.is_some()) << 1;
                self.tag(u8::from(*released) | renumbers | u8::from(at.is_some()) << 2);
                if let Some(Renumbered { first, to, count }) = renumbered {
                    self.number(*first);
                    self.number(*to);
                    self.varint(*count);
                }
                if let Some(at) = at {
                    self.difference(*at, self.time);
                }
            }
            RecordEvent::JoinState {
                join,
                count,
                policy,
                over_at,
                arrived,
                progress,
            } => {
                self.tag(tag::JOIN_STATE);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*count));
                self.join_progress(*policy, *over_at, progress);
                self.varint(arrived.len() as u64);
                let mut before = 0;
                for (word, bits) in arrived.iter() {
                    self.difference(u64::from(*word), before);
                    self.bytes.extend_from_slice(&bits.to_le_bytes());
                    before = u64::from(*word);
                }
            }
            RecordEvent::JoinGrown { join, by } => {
                self.tag(tag::JOIN_GROWN);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*by));
            }
            RecordEvent::JoinSealed {
                join,
                count,
                cancelled,
            } => {
                self.tag(tag::JOIN_SEALED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*count));
                self.tag(u8::from(*cancelled));
            }
            RecordEvent::JoinOver { join, at } => {
                self.tag(tag::JOIN_OVER);
                self.bytes.extend_from_slice(&join.0);
                self.difference(*at, self.time);
            }
            RecordEvent::MemberRevived {
                join,
                index,
                causes,
            } => {
                self.tag(tag::MEMBER_REVIVED);
                self.bytes.extend_from_slice(&join.0);
                self.varint(u64::from(*index));
                self.ids(causes);
            }
            RecordEvent::JoinReopened { join } => {
                self.tag(tag::JOIN_REOPENED);
                self.bytes.extend_from_slice(&join.0);
            }
            RecordEvent::EndedMany {
                how,
                reason,
                at,
                kept,
                numbers,
            } => {
                self.tag(tag::ENDED_MANY);
                self.tag((*how as u8) << 1 | u8::from(*kept));
                self.name(names, *reason);
                self.difference(*at, self.time);
                self.numbers(numbers);
            }
            RecordEvent::Failed { number, failure } => {
                self.tag(tag::FAILED);
                self.number(*number);
                self.failure(names, failure);
            }
            RecordEvent::FailedDropped { through } => {
                self.tag(tag::FAILED_DROPPED);
                self.varint(*through);
            }
            RecordEvent::Revived { number, to, queue } => {
                self.tag(tag::REVIVED);
                self.number(*number);
                self.number(*to);
                self.name(names, *queue);
            }
            RecordEvent::Marked { mark } => {
                self.tag(tag::MARKED);
                self.mark(names, mark);
            }
            RecordEvent::MarkOver { mark } => {
                self.tag(tag::MARK_OVER);
                self.varint(*mark);
            }
            RecordEvent::KeptEnds { ends } => {
                self.tag(tag::KEPT_ENDS);
                self.tag(ends.how as u8);
                for name in [ends.reason, ends.queue, ends.task] {
                    self.name(names, name);
                }
                for field in [
                    u64::from(ends.attempt),
                    u64::from(ends.generation),
                    ends.result_ttl_ms,
                    ends.ends.len() as u64,
                ] {
                    self.varint(field);
                }
                let mut before = self.time;
                for end in ends.ends.iter() {
                    self.number(end.number);
                    self.bytes.extend_from_slice(&end.id.0);
                    self.difference(end.at, before);
                    before = end.at;
                }
            }
            RecordEvent::KeptDropped { numbers } => {
                self.tag(tag::KEPT_DROPPED);
                self.numbers(numbers);
            }
            RecordEvent::Paused { queue, paused } => {
                self.tag(tag::PAUSED);
                self.name(names, *queue);
                self.tag(u8::from(*paused));
            }
            RecordEvent::WorkflowOpened {
                workflow,
                head,
                progress,
            } => {
                self.tag(tag::WORKFLOW_OPENED);
                self.bytes.extend_from_slice(&workflow.0);
                self.workflow_head(head);
                self.workflow_progress(Some(progress));
            }
            RecordEvent::WorkflowChanged { workflow, progress } => {
                self.tag(tag::WORKFLOW_CHANGED);
                self.bytes.extend_from_slice(&workflow.0);
                self.workflow_progress(progress.as_ref());
            }
            RecordEvent::ScheduleSet {
                schedule,
                head,
                progress,
            } => {
                self.tag(tag::SCHEDULE_SET);
                self.schedule_name(schedule);
                self.schedule_head(names, head);
                self.schedule_progress(Some(progress));
            }
            RecordEvent::ScheduleFired { schedule, progress } => {
                self.tag(tag::SCHEDULE_FIRED);
                self.schedule_name(schedule);
                self.schedule_progress(progress.as_ref());
            }
            RecordEvent::Limited { queue, limits } => {
                self.tag(tag::LIMITED);
                self.name(names, *queue);
                let mut flags = 0;
                let drops = limits.overflow == Overflow::DropOldest;
                for (flag, is_set) in [
                    (limited::LENGTH, limits.max_length.is_some()),
                    (limited::BYTES, limits.max_bytes.is_some()),
                    (limited::DROP_OLDEST, drops),
                ] {
                    flags |= if is_set { flag } else { 0 };
                }
                self.tag(flags);
                for limit in [limits.max_length, limits.max_bytes].into_iter().flatten() {
                    self.varint(limit);
                }
            }
        }
    }

    fn begin(&mut self) {
        self.records += 1;
        self.names_spelled = 0;
        self.number = 0;
        self.grant = 0;
        self.tag(VERSION);
        self.varint(u64::from(self.epoch));
        self.varint(self.time);
    }

    fn head(
        &mut self,
        names: &Interner,
        head: &MessageHead,
        extras: Option<&Extras>,
        failure: Option<&Failing<'_>>,
    ) {
        let is_rare = extras.is_some()
            || failure.is_some()
            || head.generation != 0
            || head.attempts_before != 0;
        let has_history = head.attempt != 0 || head.crashes != 0;
        let state = match head.state {
            RecordedState::Ready => has::READY,
            RecordedState::Delayed(_) => has::DELAYED,
            RecordedState::Held(_) => has::HELD,
            RecordedState::Leased { .. } => has::LEASED,
        };
        let mut flags = state << has::STATE_SHIFT;
        for (flag, is_set) in [
            (has::EXPIRY, head.expires_at.is_some()),
            (has::RESULT, head.result_ttl_ms.is_some()),
            (has::HISTORY, has_history),
            (has::REDELIVERED, head.redelivered),
            (has::COPIES, head.has_copies),
            (has::ALSO, is_rare),
        ] {
            if is_set {
                flags |= flag;
            }
        }
        self.tag(flags);
        self.number(head.number);
        self.bytes.extend_from_slice(&head.id.0);
        self.name(names, head.queue);
        self.name(names, head.task);
        self.tag(head.priority);
        self.tag(head.max_deliveries);
        self.difference(head.enqueued_at, self.time);
        if let Some(when) = head.expires_at {
            self.when(when);
        }
        if let Some(ttl_ms) = head.result_ttl_ms {
            self.varint(ttl_ms);
        }
        if has_history {
            self.varint(u64::from(head.attempt));
            self.tag(head.crashes);
        }
        match head.state {
            RecordedState::Ready => {}
            RecordedState::Delayed(when) => self.when(when),
            RecordedState::Held(join) => self.bytes.extend_from_slice(&join.0),
            RecordedState::Leased { session, grant } => {
                self.varint(session);
                self.grant(&grant);
            }
        }
        if is_rare {
            let counts = [head.generation, head.attempts_before];
            self.rare(names, counts, extras, failure);
        }
    }

    fn join_progress(
        &mut self,
        policy: JoinPolicy,
        over_at: Option<u64>,
        progress: &JoinProgress<'_>,
    ) {
        let mut also = 0;
        for (flag, is_set) in [
            (also_join::EXPECTS, !progress.expects.is_empty()),
            (also_join::HAS_NEEDLESS, progress.has_needless),
            (also_join::NEEDLESS, progress.is_needless),
            (also_join::UNSEALED, progress.unsealed.is_some()),
        ] {
            also |= if is_set { flag } else { 0 };
        }
        let mut flags = 0;
        for (flag, is_set) in [
            (join::ALL_ENDED, policy == JoinPolicy::AllEnded),
            (join::OVER, over_at.is_some()),
            (join::MAX_FAILURES, matches!(policy, JoinPolicy::UpTo(_))),
            (join::RELEASED, progress.is_released),
            (
                join::FAILURES,
                progress.failures > 0 || !progress.causes.is_empty(),
            ),
            (join::THEN, !progress.then.is_empty()),
            (join::RESULT, progress.result_ttl_ms.is_some()),
            (join::ALSO, also != 0),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        if let Some(at) = over_at {
            self.difference(at, self.time);
        }
        if let JoinPolicy::UpTo(failures) = policy {
            self.varint(u64::from(failures));
        }
        if flags & join::FAILURES != 0 {
            self.varint(u64::from(progress.failures));
            self.ids(&progress.causes);
        }
        if !progress.then.is_empty() {
            self.varint(progress.then.len() as u64);
            for place in progress.then.iter() {
                self.bytes.extend_from_slice(&place.join.0);
                self.varint(u64::from(place.index));
            }
        }
        if let Some(ttl_ms) = progress.result_ttl_ms {
            self.varint(ttl_ms);
        }
        if also != 0 {
            self.varint(also);
        }
        if !progress.expects.is_empty() {
            self.varint(progress.expects.len() as u64);
            for (index, when) in progress.expects.iter() {
                self.varint(u64::from(*index));
                self.tag(*when as u8);
            }
        }
        if let Some(growth) = progress.unsealed {
            self.bytes.extend_from_slice(&growth.workflow.0);
            self.varint(growth.session);
            self.varint(growth.grant);
            self.varint(u64::from(growth.members));
        }
    }

    fn workflow_head(&mut self, head: &WorkflowHead<'_>) {
        let mut flags = 0;
        for (flag, is_set) in [
            (opened::DEADLINE, head.deadline.is_some()),
            (opened::KEPT, head.kept_ms.is_some()),
            (opened::PARENT, head.parent.is_some()),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        self.text(head.name);
        self.slice(head.description);
        self.difference(head.opened_at, self.time);
        if let Some(deadline) = head.deadline {
            self.when(deadline);
        }
        if let Some(kept_ms) = head.kept_ms {
            self.varint(kept_ms);
        }
        if let Some(parent) = head.parent {
            self.bytes.extend_from_slice(&parent.0);
        }
    }

    fn workflow_progress(&mut self, progress: Option<&WorkflowProgress>) {
        let Some(progress) = progress else {
            return self.tag(changed::FORGOTTEN);
        };
        let counts = [progress.succeeded, progress.failed, progress.cancelled];
        let mut flags = progress.outcome as u8;
        for (flag, is_set) in [
            (changed::ENDED, progress.ended_at.is_some()),
            (changed::COUNTS, counts != [0; 3]),
            (changed::CANCELLED, progress.is_cancelled),
            (changed::OVERDUE, progress.overdue_before.is_some()),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        if let Some(at) = progress.ended_at {
            self.difference(at, self.time);
        }
        if counts != [0; 3] {
            counts.into_iter().for_each(|count| self.varint(count));
        }
        if let Some(number) = progress.overdue_before {
            self.number(number);
        }
    }

    fn ids(&mut self, ids: &[MessageId]) {
        self.varint(ids.len() as u64);
        for id in ids {
            self.bytes.extend_from_slice(&id.0);
        }
    }

    pub(super) fn rare(
        &mut self,
        names: &Interner,
        [generation, attempts_before]: [u32; 2],
        extras: Option<&Extras>,
        failure: Option<&Failing<'_>>,
    ) {
        let unset = Extras::default();
        let extras = extras.unwrap_or(&unset);
        let mut flags = 0;
        for (flag, is_set) in [
            (also::MEMBER, extras.member.is_some()),
            (also::INPUTS, extras.inputs.is_some()),
            (also::WORKFLOW, extras.workflow.is_some()),
            (also::KEY, extras.key.is_some()),
            (also::HEADERS, !extras.headers.is_empty()),
            (also::GENERATION, generation != 0),
            (also::RETRIES, extras.retries.is_some()),
            (also::TIMEOUT, extras.timeout_ms.is_some()),
            (also::SOFT_TIMEOUT, extras.soft_timeout_ms.is_some()),
            (also::SUSPECTS, extras.suspects != 0),
            (also::PARENT, extras.parent.is_some()),
            (also::FAILED, failure.is_some()),
            (also::ARGS_HASH, extras.args_hash.is_some()),
            (also::ATTEMPTS_BEFORE, attempts_before != 0),
            (also::WHEN, extras.when != Outcome::Succeeded),
            (also::LATER, extras.later.is_some()),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.varint(flags);
        if let Some(member) = &extras.member {
            self.bytes.extend_from_slice(&member.join.0);
            self.varint(u64::from(member.index));
        }
        if let Some(inputs) = &extras.inputs {
            self.bytes.extend_from_slice(&inputs.join.0);
            self.tag(inputs.shape as u8);
        }
        if let Some(workflow) = &extras.workflow {
            self.bytes.extend_from_slice(&workflow.0);
        }
        if let Some(key) = &extras.key {
            self.slice(key);
        }
        if !extras.headers.is_empty() {
            self.varint(extras.headers.len() as u64);
            for (name, value) in &extras.headers {
                self.text(name);
                self.slice(value);
            }
        }
        if generation != 0 {
            self.varint(u64::from(generation));
        }
        // The first byte says which: 0 for a number, 1 for a list of delays.
        match &extras.retries {
            None => {}
            Some(Retries::AtMost(count)) => {
                self.tag(0);
                self.varint(u64::from(*count));
            }
            Some(Retries::After(delays)) => {
                self.tag(1);
                self.varint(delays.len() as u64);
                for delay_ms in delays {
                    self.varint(*delay_ms);
                }
            }
        }
        for ms in [extras.timeout_ms, extras.soft_timeout_ms]
            .into_iter()
            .flatten()
        {
            self.varint(ms);
        }
        if extras.suspects != 0 {
            self.tag(extras.suspects);
        }
        if let Some(parent) = &extras.parent {
            self.bytes.extend_from_slice(&parent.0);
        }
        if let Some(failure) = failure {
            self.failure(names, failure);
        }
        if let Some(hash) = extras.args_hash {
            self.bytes.extend_from_slice(&hash.to_le_bytes());
        }
        if attempts_before != 0 {
            self.varint(u64::from(attempts_before));
        }
        if extras.when != Outcome::Succeeded {
            self.tag(extras.when as u8);
        }
        if let Some(later) = &extras.later {
            self.later(later);
        }
    }

    fn later(&mut self, times: &ReleaseTimes) {
        let (due, ms) = match times.due {
            None => (0, None),
            Some(Due::AfterMs(ms)) => (later::AFTER, Some(ms)),
            Some(Due::At(ms)) => (later::AT, Some(ms)),
        };
        let expires = match times.expires_after_ms {
            None => 0,
            Some(_) => later::EXPIRES,
        };
        self.tag(due | expires);
        for ms in [ms, times.expires_after_ms].into_iter().flatten() {
            self.varint(ms);
        }
    }

    fn failure(&mut self, names: &Interner, failure: &Failing<'_>) {
        let mut flags = 0;
        for (flag, is_set) in [
            (failed::CRASHED, failure.crashed),
            (failed::DISPLACED, failure.is_displaced),
            (failed::NOTE, failure.note.is_some()),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        self.number(failure.to);
        self.name(names, failure.class);
        self.text(failure.message);
        self.bytes
            .extend_from_slice(&failure.fingerprint.to_le_bytes());
        self.slice(failure.preview);
        if let Some(note) = failure.note {
            self.slice(note);
        }
        self.difference(failure.at, self.time);
    }

    fn mark(&mut self, names: &Interner, mark: &Mark) {
        self.varint(mark.number);
        match mark.workflow {
            None => self.tag(mark.what as u8),
            Some(workflow) => {
                self.tag(mark.what as u8 | MARKED_WORKFLOW);
                self.bytes.extend_from_slice(&workflow.0);
            }
        }
        self.varint(mark.before);
        self.name(names, mark.reason);
        let mut flags = 0;
        for (flag, is_set) in [
            (marked::QUEUE, mark.queue.is_some()),
            (marked::TASK, mark.task.is_some()),
            (marked::CLASS, mark.class.is_some()),
            (marked::FINGERPRINT, mark.fingerprint.is_some()),
            (marked::FROM, mark.failed_from.is_some()),
            (marked::BEFORE, mark.failed_before.is_some()),
            (marked::TARGET, mark.target.is_some()),
            (marked::RUNNING, mark.running != OnRunning::Leave),
        ] {
            flags |= if is_set { flag } else { 0 };
        }
        self.tag(flags);
        for name in [mark.queue, mark.task, mark.class].into_iter().flatten() {
            self.name(names, name);
        }
        if let Some(fingerprint) = mark.fingerprint {
            self.bytes.extend_from_slice(&fingerprint.to_le_bytes());
        }
        for at in [mark.failed_from, mark.failed_before].into_iter().flatten() {
            self.varint(at);
        }
        if let Some(target) = mark.target {
            self.name(names, target);
        }
        if mark.running != OnRunning::Leave {
            self.tag(mark.running as u8);
        }
    }

    /// Writes ascending numbers as runs: how many, then for each the gap before it and its length.
    fn numbers(&mut self, numbers: &[u64]) {
        debug_assert!(numbers.len() <= ENDED_AT_ONCE && numbers.is_sorted());
        let runs = numbers.chunk_by(|one, next| one + 1 == *next);
        self.varint(runs.clone().count() as u64);
        for run in runs {
            self.number(run[0]);
            self.varint(run.len() as u64);
            self.number = run[run.len() - 1];
        }
    }

    fn change(&mut self, names: &Interner, change: &Change<'_>) {
        let mut flags = 0;
        for (flag, is_set) in [
            (moved::DUE, change.due.is_some()),
            (moved::NEXT_ATTEMPT, change.next_attempt),
            (moved::CRASHED, change.crashed),
            (moved::REDELIVERED, change.redelivered),
            (moved::SENT, change.was_sent),
            (moved::NOTE, change.note.is_some()),
            (moved::EXPIRY, change.expires_at.is_some()),
        ] {
            if is_set {
                flags |= flag;
            }
        }
        self.tag(flags);
        self.number(change.to);
        self.name(names, change.queue);
        if let Some(when) = change.due {
            self.when(when);
        }
        if let Some(note) = change.note {
            self.slice(note);
        }
        if let Some(when) = change.expires_at {
            self.when(when);
        }
    }

    fn receipt(&mut self, receipt: &Receipt) {
        match receipt {
            Receipt::Applied(applied) => {
                // Code 0 was all that format 1 could express.
                let has_more = !applied.owners.is_empty()
                    || applied.found.is_some()
                    || applied.operation.is_some();
                self.tag(if has_more { 10 } else { 0 });
                self.varint(applied.skipped.len() as u64);
                for op in &applied.skipped {
                    self.varint(u64::from(*op));
                }
                if has_more {
                    self.varint(applied.owners.len() as u64);
                    for (op, owner) in &applied.owners {
                        self.varint(u64::from(*op));
                        self.bytes.extend_from_slice(&owner.0);
                    }
                    self.tag(applied.found.map_or(0, |state| state as u8 + 1));
                    self.varint(applied.operation.unwrap_or(0));
                }
            }
            Receipt::Duplicate => self.tag(1),
            Receipt::Unknown => self.tag(2),
            Receipt::Refused { op, why } => {
                let (code, text) = match why {
                    Refusal::LeaseLost => (3, ""),
                    Refusal::GuardFailed => (4, ""),
                    Refusal::TooLarge(text) => (5, text.as_str()),
                    Refusal::AlreadyExists => (6, ""),
                    Refusal::QueueFull(text) => (7, text.as_str()),
                    Refusal::DiskFull => (8, ""),
                    Refusal::Invalid(text) => (9, text.as_str()),
                    Refusal::NotOffered(text) => (11, text.as_str()),
                    Refusal::NoSuchJob => (12, ""),
                    Refusal::TooLate(_) => (13, ""),
                    Refusal::Claimed(_) => (14, ""),
                };
                self.tag(code);
                self.varint(u64::from(*op));
                match why {
                    Refusal::TooLate(state) => self.tag(*state as u8),
                    Refusal::Claimed(owner) => self.bytes.extend_from_slice(&owner.0),
                    _ => self.text(text),
                }
            }
        }
    }

    pub(super) fn tag(&mut self, byte: u8) {
        self.bytes.push(byte);
    }

    /// Writes a number, most of which are small.
    #[inline]
    pub(super) fn varint(&mut self, value: u64) {
        match value {
            0..0x80 => self.bytes.push(value as u8),
            _ => self.long_varint(value),
        }
    }

    fn long_varint(&mut self, mut value: u64) {
        let (mut bytes, mut length) = ([0; 10], 0);
        while value >= 0x80 {
            bytes[length] = value as u8 | 0x80;
            value >>= 7;
            length += 1;
        }
        bytes[length] = value as u8;
        self.bytes.extend_from_slice(&bytes[..=length]);
    }

    pub(super) fn difference(&mut self, value: u64, from: u64) {
        let difference = value.wrapping_sub(from) as i64;
        self.varint(((difference << 1) ^ (difference >> 63)) as u64);
    }

    fn number(&mut self, number: u64) {
        self.difference(number, self.number);
        self.number = number;
    }

    fn grant(&mut self, grant: &Grant) {
        self.varint(u64::from(grant.epoch));
        self.difference(grant.number, self.grant);
        self.grant = grant.number;
        self.difference(grant.started_at, self.time);
    }

    fn when(&mut self, when: ClockTime) {
        self.tag(when.clock as u8);
        self.varint(when.at);
    }

    pub(super) fn slice(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.slice(text.as_bytes());
    }

    fn key(&mut self, key: &Key) {
        match key {
            Key::Result(id) => {
                self.tag(0);
                self.bytes.extend_from_slice(&id.0);
            }
            Key::Named(name) => {
                self.tag(1);
                self.slice(name);
            }
            Key::Scoped(scope, key) => {
                self.tag(2);
                self.tag(*scope as u8);
                self.slice(key);
            }
        }
    }

    /// Writes zero and the text the first time, and later its index, from 1.
    fn name(&mut self, names: &Interner, name: Name) {
        if self.spelled.len() <= name.index() {
            self.spelled.resize(name.index() + 1, (0, 0));
        }
        let (record, index) = self.spelled[name.index()];
        if record == self.records {
            self.varint(u64::from(index));
            return;
        }
        self.names_spelled += 1;
        self.spelled[name.index()] = (self.records, self.names_spelled);
        self.varint(0);
        self.text(names.text(name));
    }
}
