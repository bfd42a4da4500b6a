//! Answers questions from people, which come through the broker: to pause, resume, drain, stop or resize this
//! worker.
//!
//! A paused worker keeps its tasks, but begins no jobs: waiting ones go back to the broker, where this worker's
//! consumers have no credit. So other workers get the jobs, and the broker does not report that no worker has
//! the task.

use std::time::Instant;

use penstock_message::{Ask, WorkerState};

use super::{Phase, Supervisor};
use crate::policy::PacketEnd;
use crate::question::{Question, Reply, Standing};

impl Supervisor {
    /// Answers questions once they are carried out.
    pub(super) fn hear_asks(&mut self, asks: Vec<Ask>, now: Instant) {
        for ask in asks {
            let reply = match Question::decode(&ask.question) {
                Question::Pause => self.pause(),
                Question::Resume => self.resume(),
                Question::Drain => self.drain(),
                Question::Stop => self.stop(now),
                Question::Resize(sizes) => self.resize(sizes, now),
                Question::Unknown => Some(Reply::unknown()),
            };
            let reply = reply.unwrap_or_else(|| Reply::Done(self.standing(now)));
            if let Some(broker) = &self.broker {
                broker.driver.reply(ask.id, reply.encode());
            }
        }
    }

    fn standing(&self, now: Instant) -> Standing {
        let report = self.figures();
        let until = match self.phase {
            Phase::Draining { until: Some(until) }
            | Phase::Leaving { until }
            | Phase::Killing { until } => Some(until),
            Phase::Loading | Phase::Serving | Phase::Draining { until: None } => None,
        };
        let left = until.map(|until| until.saturating_duration_since(now));
        Standing {
            state: report.state,
            slots: report.slots,
            busy: report.busy,
            ends_within_ms: left.map(|left| left.as_millis() as u64),
        }
    }

    pub(super) fn state(&self) -> WorkerState {
        match self.phase {
            Phase::Loading | Phase::Serving if self.is_paused => WorkerState::Paused,
            Phase::Loading | Phase::Serving => WorkerState::Serving,
            Phase::Draining { until: None } => WorkerState::Draining,
            Phase::Draining { until: Some(_) } | Phase::Leaving { .. } | Phase::Killing { .. } => {
                WorkerState::Ending
            }
        }
    }

    /// Refuses to change the jobs of a worker that is about to exit.
    pub(super) fn refuse_when_ending(&self) -> Option<Reply> {
        (self.phase != Phase::Serving).then(|| {
            Reply::Refused(
                "it is stopping and takes no more jobs, which can't be undone: start another worker".to_owned(),
            )
        })
    }

    fn pause(&mut self) -> Option<Reply> {
        let refused = self.refuse_when_ending();
        if refused.is_some() || self.is_paused {
            return refused;
        }
        self.is_paused = true;
        for pool in 0..self.pools.len() {
            self.withdraw(pool);
            self.pools[pool].policy.revoke();
        }
        for place in self.outstanding.all_places() {
            self.take_back(place, PacketEnd::TakenBack);
        }
        for pool in &mut self.pools {
            self.settlements.give_back(pool.policy.take_all());
        }
        tracing::info!(
            running = self.busy(),
            "paused: no job starts until `penstock workers resume {}`; running jobs continue, and other workers take \
             the rest",
            self.config.name
        );
        None
    }

    fn resume(&mut self) -> Option<Reply> {
        let refused = self.refuse_when_ending();
        if refused.is_none() && std::mem::take(&mut self.is_paused) {
            tracing::info!("resumed: jobs start again");
        }
        refused
    }

    fn drain(&mut self) -> Option<Reply> {
        if self.phase == Phase::Serving {
            tracing::info!(
                running = self.busy(),
                "draining: this worker exits when its running jobs have ended, however long that takes"
            );
            self.leave_tasks();
            self.begin_draining(None);
        }
        None
    }

    /// Does the same as the first SIGTERM. A repeated question is not a second signal: it may be a resend.
    fn stop(&mut self, now: Instant) -> Option<Reply> {
        if matches!(self.phase, Phase::Serving | Phase::Draining { until: None }) {
            self.hear_stop(now);
        }
        None
    }
}
