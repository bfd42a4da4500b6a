//! Values of a join, for the jobs that have them as inputs.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    InputShape, InputValue, InputValues, Inputs, JoinId, JoinOutcome as Outcome, Key, MessageId,
    ValueStatus, read_gathered,
};

use crate::endings::upstream;
use crate::state::BrokerState;

/// Maximum bytes of values sent with a delivery. The worker asks for larger ones.
const INLINE_BYTES: usize = 256 << 10;
/// Bytes that a value takes in addition to its own.
const VALUE_BYTES: usize = 8;
/// Maximum number of levels of nested joins whose values are sent along.
const DEEPEST: usize = 128;

impl BrokerState {
    /// Returns the encoded values for a job; empty for a job without inputs.
    pub(crate) fn inputs_to_send(&self, inputs: Option<Inputs>, when: Outcome) -> Bytes {
        let Some(inputs) = inputs else {
            return Bytes::new();
        };
        let mut room = INLINE_BYTES;
        let values = self.given(inputs, when, &mut room);
        let mut bytes = Vec::new();
        values.encode_into(&mut bytes);
        bytes.into()
    }

    fn given(&self, inputs: Inputs, when: Outcome, room: &mut usize) -> InputValues {
        let join = inputs.join;
        let Some(slot) = self.joins.find(&join) else {
            // Only a repaired journal can have lost it.
            return InputValues {
                join,
                count: 1,
                values: Some(vec![InputValue::Gone]),
            };
        };
        let state = &self.joins[slot];
        let is_one = state.count == 1 && inputs.shape == InputShape::One;
        // A person may have retried the failed jobs since this job was released for the failure.
        let was_retried = !state.is_over && (when == Outcome::Failed || !state.is_released);
        if state.is_over && !is_one || was_retried {
            // Other members may still run: only the failed ones are known.
            let failed = InputValue::Of(ValueStatus::Upstream, upstream(&state.causes));
            return InputValues {
                join,
                count: 1,
                values: Some(vec![failed]),
            };
        }
        self.given_of(join, state.count, room, 0)
    }

    fn given_of(&self, join: JoinId, count: u32, room: &mut usize, level: usize) -> InputValues {
        let mut given = InputValues {
            join,
            count,
            values: None,
        };
        if level > DEEPEST || count as usize * VALUE_BYTES > *room {
            return given;
        }
        let mut values = Vec::with_capacity(count as usize);
        for index in 0..count {
            let of = match planted!("mix-up-values") {
                true => count - 1 - index,
                false => index,
            };
            let value = self.input_value(MessageId::member(join, of), room, level);
            let bytes = match &value {
                InputValue::Of(_, body) => VALUE_BYTES + body.len(),
                InputValue::Gathered(_) | InputValue::Gone => VALUE_BYTES,
            };
            match room.checked_sub(bytes) {
                Some(left) => *room = left,
                None => return given,
            }
            values.push(value);
        }
        given.values = Some(values);
        given
    }

    fn input_value(&self, id: MessageId, room: &mut usize, level: usize) -> InputValue {
        let key = Key::Result(id);
        if let Some(stored) = self.keys.value(&key) {
            let inner = match stored.status {
                ValueStatus::Gathered => read_gathered(stored.body()),
                _ => None,
            };
            return match inner {
                Some((join, count)) => {
                    InputValue::Gathered(self.given_of(join, count, room, level + 1))
                }
                None => InputValue::Of(stored.status, stored.value().body),
            };
        }
        if let Some(slot) = self.messages.find_ended(&id) {
            let ended = self.messages.ended(slot);
            let value = self.unrun_value(ended.how, ended.reason);
            return InputValue::Of(value.status, value.body);
        }
        let mut copies = self.messages.copies(&id);
        match copies.find(|slot| self.is_blocked(*slot)) {
            Some(slot) => InputValue::Of(ValueStatus::Upstream, upstream(&self.causes_of(slot))),
            // It failed, its group continued without it, and a person has retried it since.
            None if self.is_pending(&id) => InputValue::Of(ValueStatus::Upstream, upstream(&[id])),
            None => InputValue::Gone,
        }
    }

    /// Whether the job has yet to end.
    fn is_pending(&self, id: &MessageId) -> bool {
        let mut copies = self.messages.copies(id);
        copies.any(|slot| !self.messages[slot].is_failed())
    }
}
