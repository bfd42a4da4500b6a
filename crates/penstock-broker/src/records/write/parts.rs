//! Writes the parts of events: messages, joins, workflows, failures, changes, receipts.

use penstock_message::{
    Due, Extras, JoinOutcome as Outcome, JoinPolicy, MessageId, OnRunning, Receipt, Refusal,
    ReleaseTimes, Retries,
};

use super::RecordWriter;
use crate::records::{
    Change, ENDED_AT_ONCE, Failing, JoinProgress, MARKED_WORKFLOW, Mark, MessageHead,
    RecordedState, WorkflowHead, WorkflowProgress, also, also_join, changed, failed, has, join,
    later, marked, moved, opened,
};
use crate::table::interner::Interner;

impl RecordWriter {
    pub(super) fn head(
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

    pub(super) fn join_progress(
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

    pub(super) fn workflow_head(&mut self, head: &WorkflowHead<'_>) {
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

    pub(super) fn workflow_progress(&mut self, progress: Option<&WorkflowProgress>) {
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

    pub(super) fn ids(&mut self, ids: &[MessageId]) {
        self.varint(ids.len() as u64);
        for id in ids {
            self.bytes.extend_from_slice(&id.0);
        }
    }

    pub(in crate::records) fn rare(
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

    pub(super) fn failure(&mut self, names: &Interner, failure: &Failing<'_>) {
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

    pub(super) fn mark(&mut self, names: &Interner, mark: &Mark) {
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
    pub(super) fn numbers(&mut self, numbers: &[u64]) {
        debug_assert!(numbers.len() <= ENDED_AT_ONCE && numbers.is_sorted());
        let runs = numbers.chunk_by(|one, next| one + 1 == *next);
        self.varint(runs.clone().count() as u64);
        for run in runs {
            self.number(run[0]);
            self.varint(run.len() as u64);
            self.number = run[run.len() - 1];
        }
    }

    pub(super) fn change(&mut self, names: &Interner, change: &Change<'_>) {
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

    pub(super) fn receipt(&mut self, receipt: &Receipt) {
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
}
