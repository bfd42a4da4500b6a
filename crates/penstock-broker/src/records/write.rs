//! Writes events as bytes.

mod parts;
mod values;

use penstock_message::{JoinPolicy, OnRunning, Overflow, WallMs};

use super::{RecordEvent, Renumbered, VERSION, limited, stored, tag};
use crate::table::interner::Interner;

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
}
