//! Cancellations: of one job, and those that run and are asked to stop.

use penstock_message::{MessageId, MessageState, Running};

use super::item::{End, State};
use super::{Model, Verdict};

impl Model {
    /// Ends the copies of a message that wait, wherever they do; those that run may be asked to stop.
    pub(super) fn cancel(
        &mut self,
        id: MessageId,
        found: Option<MessageState>,
        running: Running,
    ) -> Verdict {
        let copies = self.by_id.get(&id).cloned().unwrap_or_default();
        let is_alone = copies.len() == 1;
        for index in copies {
            if running != Running::Leave && !matches!(self.items[index].state, State::Ended(_)) {
                self.items[index].asked = Some(self.grants);
            }
            if is_alone && found == Some(MessageState::Cancelling) {
                self.was_asked_to_stop(index)?;
            } else if is_alone && self.surely_waits(index) {
                self.end(index, End::Purged);
            } else if self.may_wait(index) || matches!(self.items[index].state, State::Held(_)) {
                self.items[index].purged = true;
                self.items[index].end_is_unsure = true;
            }
        }
        Ok(())
    }

    /// Notes that a message is run by somebody, seen or not, who is to stop it.
    fn was_asked_to_stop(&mut self, index: usize) -> Verdict {
        if let State::Held(join) = self.items[index].state
            && self.may_be_released(join)
        {
            self.was_released(join);
        }
        let item = &mut self.items[index];
        match item.state {
            State::Leased { .. } => Ok(()),
            // Where nobody runs it any more, it has ended.
            State::Waiting | State::Adrift { .. } => {
                item.purged = true;
                Ok(())
            }
            State::Held(_) | State::Ended(_) => {
                let (id, state) = (item.message.id, item.state.clone());
                self.fail(format!("{id} was asked to stop, and can't run: {state:?}"))
            }
        }
    }

    /// Ends an item whose lease has ended without a success, if it was asked to stop.
    pub(super) fn ends_if_asked(&mut self, index: usize) -> bool {
        let is_asked = self.items[index].asked.is_some();
        if is_asked {
            self.end(index, End::Purged);
        }
        is_asked
    }
}
