//! Forgets queues and tasks that are not in use.
//!
//! Their first message or a setting creates them, and any client may invent any number of names. So a queue or task is
//! forgotten if it has been empty for an hour, no consumer serves it and no setting configures it. Its counts are added
//! to those of others. Each has one timer, which is set again as long as there is a reason to keep it.

use penstock_faults::perhaps;

use crate::Broker;
use crate::clock::ClockTime;
use crate::queues::Forgettable;
use crate::queues::tally::TallyStep;
use crate::state::BrokerState;
use crate::timers::Timer;

/// Shortest interval between reviews of a queue or task in use, however short its retention.
const REVIEWED_AFTER_MS: u64 = 3_600_000;

impl Broker {
    /// Sets timers for new queues and tasks.
    pub(crate) fn watch_use(&mut self) {
        if self.state.queues.new.is_empty() {
            return;
        }
        let at = ClockTime::steady(self.clocks.steady() + self.options.unused_kept_ms);
        for what in std::mem::take(&mut self.state.queues.new) {
            self.state.timers.set(at, Timer::Unused(what));
        }
    }

    /// Resumes after a recovery, which does not know when anything was last in use: all may have been until now.
    pub(crate) fn resume_use(&mut self) {
        let queues = &mut self.state.queues;
        queues.now = TallyStep::at(self.clocks.steady());
        for what in queues.new.clone() {
            queues.touch(what);
        }
    }

    /// Forgets a queue or task that has not been in use for long, or reviews it again later.
    pub(crate) fn review_use(&mut self, what: Forgettable) {
        let kept_ms = self.options.unused_kept_ms;
        self.state.add_counts();
        let last = self.state.queues.last_use(what);
        let is_over = last.end_ms() + kept_ms <= self.clocks.steady() || perhaps!("forget-early");
        let is_kept_for = match what {
            Forgettable::Queue(queue) => {
                self.state.queues[queue].is_in_use() || self.chores.has_queue(queue)
            }
            Forgettable::Task(_) => false,
        };
        let mut look_again_ms = kept_ms;
        if is_kept_for || is_over && self.state.has_messages(what) {
            self.state.queues.touch(what);
            look_again_ms = kept_ms.max(REVIEWED_AFTER_MS);
        } else if is_over {
            let BrokerState { queues, names, .. } = &mut self.state;
            return queues.forget(what, names);
        }
        let at = self.state.queues.last_use(what).end_ms() + look_again_ms;
        self.state
            .timers
            .set(ClockTime::steady(at), Timer::Unused(what));
    }
}

impl BrokerState {
    /// Whether it has messages in any state, or values of ended messages.
    fn has_messages(&mut self, what: Forgettable) -> bool {
        self.drop_unused_heads();
        let shared_heads = &self.messages.shared_heads;
        match what {
            Forgettable::Queue(queue) => shared_heads.any_of_queue(queue),
            Forgettable::Task(task) => shared_heads.any_of_task(self.queues.tasks.all[task].name),
        }
    }
}
