//! Consumers as seen by an observer of their connections, and the promise that none is idle while it has work.

use std::collections::BTreeSet;

use penstock_broker::ConnId;
use penstock_message::TaskSelection;

use super::{Checker, View};
use crate::model::Verdict;
use crate::said::Consumer;

/// Consumer as seen by an observer of its connection. Until the next quiet moment, deliveries that it may no longer
/// receive can still arrive: they were handed out before, and their bodies are being read.
#[derive(Default)]
pub(super) struct ConsumerView {
    /// Number of deliveries that it has requested and not yet received.
    pub(super) credit: u64,
    /// Number of deliveries that it had requested before it was stopped.
    credit_before: u64,
    /// Number of deliveries since then that were charged to later requests, although they may have been handed out before.
    paid_since: u64,
    /// Number of requests that may still be open because of such deliveries.
    credit_at_most: u64,
    pub(super) queues: BTreeSet<String>,
    /// Tasks that it can run; `None`: any.
    pub(super) tasks: Option<Vec<String>>,
    /// Lists of tasks that it could run before.
    pub(super) tasks_before: Vec<Vec<String>>,
}

impl ConsumerView {
    pub(super) fn hears(&mut self, told: &Consumer) {
        let wish = &told.wish;
        if told.stop {
            self.credit_before += std::mem::take(&mut self.credit);
            return;
        }
        self.credit += u64::from(wish.add_credit);
        let tasks = match &wish.tasks {
            TaskSelection::Same => self.tasks.clone(),
            TaskSelection::Any => None,
            TaskSelection::Named(tasks) => Some(tasks.clone()),
        };
        if self.tasks != tasks {
            self.tasks_before
                .extend(std::mem::replace(&mut self.tasks, tasks));
        }
        if !wish.queues.is_empty() {
            self.queues = wish.queues.iter().cloned().collect();
        }
    }

    /// Deducts the cost of one delivery. Returns false if the consumer had requested none.
    pub(super) fn pays(&mut self) -> bool {
        self.paid_since += u64::from(self.credit > 0 && self.credit_before > 0);
        for credit in [
            &mut self.credit,
            &mut self.credit_before,
            &mut self.credit_at_most,
        ] {
            if *credit > 0 {
                *credit -= 1;
                return true;
            }
        }
        false
    }

    pub(super) fn may_be_given(&self) -> bool {
        self.credit + self.credit_before + self.credit_at_most > 0
    }

    pub(super) fn runs(&self, task: &String) -> bool {
        self.tasks.as_ref().is_none_or(|tasks| tasks.contains(task))
    }

    pub(super) fn quiet(&mut self) {
        let before = std::mem::take(&mut self.credit_before);
        self.credit_at_most += before.min(std::mem::take(&mut self.paid_since));
        self.tasks_before.clear();
    }
}

impl Checker {
    /// Checks that no job waits while a slot that may run it is idle. A consumer is a pool of slots, and its credit is
    /// the number of idle ones.
    pub(super) fn nobody_waits(&self) -> Verdict {
        let now = self.model.now;
        let is_open = |conn: &ConnId, view: &View| self.current.get(&view.session) == Some(conn);
        let open = self.views.iter().filter(|(conn, view)| is_open(conn, view));
        for (_, view) in open {
            for (number, consumer) in &view.consumers {
                if consumer.credit == 0 {
                    continue;
                }
                let mut live = self
                    .model
                    .live
                    .iter()
                    .map(|index| &self.model.items[*index]);
                let waiting = live.find(|item| {
                    item.is_ready(now)
                        && item.is_due(now)
                        && !item.may_be_dead()
                        && !(self.model.clock_is_doubtful && item.is_delayed())
                        && !self.model.paused.contains(&item.queue)
                        && consumer.queues.contains(&item.queue)
                        && consumer.runs(&item.message.task)
                });
                if let Some(item) = waiting {
                    return Err(format!(
                        "{} waits in {}, and consumer {number} of client {} has credit for {}",
                        item.message.id, item.queue, view.session.0[0], consumer.credit
                    ));
                }
            }
        }
        Ok(())
    }
}
