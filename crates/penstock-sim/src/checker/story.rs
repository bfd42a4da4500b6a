//! Story of the model, replayed without the decisions that a crash took back.

use std::collections::BTreeMap;

use penstock_broker::Broker;
use penstock_message::{
    Delivery, JoinId, Key, Lease, MessageId, ScheduleName, SchedulePlan, SessionId,
};

use super::{Checker, Decided};
use crate::model::{Moment, Time, Verdict};
use crate::words;

/// Number of events from which a story counts as long, and restarts when it can.
pub(super) const IS_LONG: usize = 200;

/// Event that the model has seen.
pub(super) enum Event {
    Time(Time),
    Decided(u64),
    Delivered(SessionId, Box<Delivery>),
    Hello(SessionId, u64, Vec<Lease>),
    Welcomed(SessionId, Vec<Lease>),
    Left {
        session: SessionId,
        clean: bool,
    },
    /// The broker was observed to keep the message as a failed job.
    Failed(MessageId),
    /// Members of a join that were observed to have reported, and whether the join has failed; `None`: it has ended.
    Join(JoinId, Option<(Vec<u32>, bool)>),
    /// The broker has created a job of a schedule, by this plan.
    Scheduled(ScheduleName, MessageId, Box<SchedulePlan>),
    /// A schedule's job must stop because this time has come. The decision is in a record up to this position.
    MakesWay(ScheduleName, u64, u64, MessageId, Box<Moment>),
    /// A job of a schedule was observed to have ended; only its result is left.
    Gone(MessageId),
    /// Live message that was observed to own a key.
    Owner(Key, Option<MessageId>),
    /// The deadline of a workflow was observed to have passed.
    Overdue {
        workflow: MessageId,
        moment: Box<Moment>,
        /// Last record that the broker had made by then.
        position: u64,
    },
    /// A quiet moment. `goes_on`: an operation on many jobs had not finished.
    Quiet {
        goes_on: bool,
    },
    Restarted(u64),
}

impl Event {
    fn in_words(&self, txs: &BTreeMap<u64, Decided>) -> Option<String> {
        match self {
            Self::Decided(number) => {
                let Decided {
                    session,
                    seq,
                    receipt,
                    ..
                } = &txs[number];
                Some(format!(
                    "client {} seq {seq} is transaction {number}: {}",
                    session.0[0],
                    words::receipt(receipt)
                ))
            }
            Self::Delivered(session, delivery) => {
                let Delivery {
                    lease,
                    queue,
                    consumer: _,
                    redelivered,
                    inputs: _,
                    deadline: _,
                    message,
                } = &**delivery;
                let (crashes, attempt) = (message.crashes, message.attempt);
                let again = if *redelivered { ", again" } else { "" };
                let to = session.0[0];
                Some(format!(
                    "client {to} is given {lease:?} from {queue}{again}: attempt {attempt}, {crashes} crashes"
                ))
            }
            Self::Welcomed(session, leases) => Some(format!(
                "client {} is welcome and holds {leases:?}",
                session.0[0]
            )),
            Self::Left { session, clean } => {
                Some(format!("client {} has left; clean: {clean}", session.0[0]))
            }
            Self::Hello(session, ..) => {
                Some(format!("client {} was heard to say hello", session.0[0]))
            }
            Self::MakesWay(name, time, _, job, _) => {
                Some(format!("{name} cancels job {job} for that of {time}"))
            }
            Self::Scheduled(name, job, _) => Some(format!("{name} has made job {job}")),
            Self::Overdue { workflow, .. } => Some(format!("the deadline of {workflow} has come")),
            Self::Quiet { .. } => Some("all is quiet".to_string()),
            Self::Time(_)
            | Self::Restarted(_)
            | Self::Failed(_)
            | Self::Join(..)
            | Self::Gone(_)
            | Self::Owner(..) => None,
        }
    }
}
impl Checker {
    pub(super) fn begin_story(&mut self) {
        self.story.clear();
        self.looked_at = 0;
        self.base = self.model.clone();
        self.base_tx = self.told;
    }

    /// Forgets that deadlines were observed to pass, if a crash has taken that back. Returns whether any were forgotten.
    /// A new broker may have ended the same workflows again by itself, which the next crash may take back too, so that is
    /// observed anew.
    pub(super) fn forget_deadlines(&mut self, broker: &Broker, found_through: u64) -> bool {
        let events = self.story.len();
        self.looked_at = 0;
        self.story.retain(|event| match event {
            Event::Overdue {
                workflow, position, ..
            } => {
                let was_found = *position <= found_through;
                was_found && broker.workflow_is_overdue(workflow)
                    || broker.workflow(workflow).is_none()
            }
            _ => true,
        });
        self.story.len() < events
    }

    /// Replays the story to the model without these transactions.
    pub(super) fn retell_until(&mut self, lost: u64) {
        self.txs.split_off(&lost);
        self.looked_at = 0;
        self.by_seq.retain(|_, number| *number < lost);
        self.story
            .retain(|event| !matches!(event, Event::Decided(number) if *number >= lost));
        let before = std::mem::replace(&mut self.model, self.base.clone());
        self.model.clock_is_doubtful = before.clock_is_doubtful;
        self.model.clock_is_off_by_ms = before.clock_is_off_by_ms;
        self.model.has_dropped_failed = before.has_dropped_failed;
        self.model.seen = before.seen;
        self.model.lenient = true;
        for event in std::mem::take(&mut self.story) {
            self.tell(event)
                .expect("a lenient model objects to nothing");
        }
        self.model.lenient = false;
    }

    pub(super) fn tell(&mut self, event: Event) -> Verdict {
        if let Some(words) = &mut self.words
            && !self.model.lenient
        {
            words.extend(event.in_words(&self.txs));
        }
        let verdict = match &event {
            Event::Time(now) => {
                self.model.advance(*now);
                Ok(())
            }
            Event::Decided(number) => {
                let Decided {
                    session,
                    seq,
                    tx,
                    receipt,
                    moment,
                    ..
                } = &self.txs[number];
                let verdict = self.model.decided(*number, *session, tx, receipt, moment);
                verdict.map_err(|what| format!("transaction {number} (seq {seq}): {what}"))
            }
            Event::Delivered(session, delivery) => self.model.delivered(*session, delivery),
            Event::Hello(session, heartbeat_ms, leases) => {
                self.model.hello(*session, *heartbeat_ms, leases);
                Ok(())
            }
            Event::Welcomed(session, leases) => self.model.welcomed(*session, leases),
            Event::Left { session, clean } => {
                self.model.left(*session, *clean);
                Ok(())
            }
            Event::Failed(id) => self.model.has_failed(*id),
            Event::Join(id, members) => self.model.saw_join(*id, members.as_ref()),
            Event::Scheduled(name, job, plan) => self.model.was_scheduled(name, *job, plan),
            Event::MakesWay(_, _, _, job, moment) => {
                self.model.makes_way(*job, moment);
                Ok(())
            }
            Event::Gone(job) => {
                self.model.has_ended_unseen(*job);
                Ok(())
            }
            Event::Owner(key, owner) => self.model.saw_owner(key, *owner),
            Event::Overdue {
                workflow, moment, ..
            } => self.model.overdue(*workflow, moment),
            Event::Quiet { goes_on } => {
                self.model.quiet(*goes_on);
                Ok(())
            }
            Event::Restarted(heartbeat_ms) => {
                self.model.restarted(*heartbeat_ms);
                Ok(())
            }
        };
        self.story.push(event);
        verdict
    }
}
