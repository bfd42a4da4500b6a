//! Deaths of workers, failed jobs, and their retries by people.

use penstock_message::{Key, MessageId, ValueStatus};

use super::item::{End, State};
use super::{Failed, Item, Model, Verdict};

impl Model {
    /// Finds a copy that has failed, or must have failed if the current operation was applied.
    pub(super) fn failed_copy(&mut self, id: MessageId) -> Option<usize> {
        let copies = self.by_id.get(&id)?.clone();
        let failed = copies.iter().find(|index| self.items[**index].has_failed());
        let unseen = || {
            copies
                .iter()
                .find(|index| self.items[**index].may_be_dead())
        };
        let index = *failed.or_else(unseen)?;
        if !self.items[index].has_failed() {
            self.bury(index);
        }
        Some(index)
    }

    /// Returns a failed message to the end of its queue, with its attempts and notes.
    pub(super) fn retry(&mut self, number: u64, id: MessageId, queue: Option<&str>) {
        let Some(index) = self.failed_copy(id) else {
            return;
        };
        if let Some(stored) = self.values.remove(&Key::Result(id)) {
            self.on_their_way.insert(Key::Result(id), stored);
        }
        self.retried.insert(id);
        let place = self.next_place();
        let item = &mut self.items[index];
        item.state = State::Waiting;
        item.tx = number;
        item.place = place;
        item.in_order = true;
        item.lacks_key = false;
        if item.until_start {
            item.claim = None;
        }
        item.due = None;
        item.due_reached = true;
        item.delayed_at_most = 0;
        item.expires = None;
        item.expiry_reached = false;
        item.purged = false;
        item.end_is_unsure = false;
        item.ran_at_purge = false;
        item.may_have_ended_at = None;
        item.unsure_until = 0;
        item.crashes = (0, 0);
        item.failure = None;
        item.suspects = 0;
        item.asked = None;
        item.cancelled = None;
        item.may_have_run = false;
        item.message.attempt += 1;
        item.generation += 1;
        if let Some(queue) = queue {
            queue.clone_into(&mut item.queue);
        }
        if !self.live.contains(&index) {
            self.live.push(index);
        }
        let queue = self.items[index].queue.clone();
        self.may_drop(&queue, &(index..index + 1));
        if let Some(place) = self.items[index].member() {
            self.revive_member(place);
        }
    }

    pub(super) fn crash_item(&mut self, index: usize) {
        let (place, now) = (self.next_place(), self.now);
        let item = &mut self.items[index];
        item.crashes = (item.crashes.0 + 1, item.crashes.1 + 1);
        item.wait_in_old_place();
        item.is_delayed_by_crash(place, now);
        if item.crashes.0 >= item.message.max_deliveries {
            self.bury(index);
            self.saw_failure(index);
        } else if item.crashes.1 >= item.message.max_deliveries {
            item.state = State::Adrift { maybe: Vec::new() };
        }
    }

    /// Notes that a message has just failed.
    pub(super) fn saw_failure(&mut self, index: usize) {
        let place = self.next_place();
        let steady_ms = self.now.steady;
        self.items[index].failure = Some(Failed { place, steady_ms });
    }

    /// Notes that this item or another one has killed the worker that ran both.
    pub(super) fn suspect_item(&mut self, index: usize) {
        let item = &mut self.items[index];
        item.suspects += 1;
        item.wait_in_old_place();
        if item.suspects >= 3 || item.message.max_deliveries == 1 {
            self.bury(index);
        }
    }

    /// Fails a message whose workers have died too often.
    fn bury(&mut self, index: usize) {
        self.store_end(index, ValueStatus::Crashed);
        self.finish(index, End::Crashed);
    }

    /// Notes that the broker lists this message among the failed jobs, which the model may not have known.
    pub fn has_failed(&mut self, id: MessageId) -> Verdict {
        let copies = self.by_id.get(&id).cloned().unwrap_or_default();
        let is_known = copies.iter().any(|index| self.items[*index].has_failed());
        let died = copies.iter().copied().filter(|index| {
            let item = &self.items[*index];
            item.may_be_dead() || self.may_have_died_when_released(item)
        });
        // Of several copies, the one that is known to have been handed out.
        let died = died.max_by_key(|index| self.items[*index].leases.len());
        match died {
            Some(index) => {
                self.was_let_go(index);
                self.ended_at = self.items[index].may_have_ended_at;
                self.bury(index);
                self.ended_at = None;
                Ok(())
            }
            None if is_known => Ok(()),
            None => {
                let items: Vec<&Item> = self.with_id(id).collect();
                self.fail(format!("{id} has failed, and nothing says so: {items:?}"))
            }
        }
    }
}
