//! Telling of keys: level-triggered, so that a client that was away misses nothing.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{Key, KeyState, MessageId, Value, ValueStatus};

use crate::chores::BLOCKED;
use crate::commits::own_key;
use crate::effects::{Effect, Rests};
use crate::records::{How, Mark, MarkedFor};
use crate::state::State;
use crate::{Broker, ConnId};

impl Broker {
    pub(crate) fn watch(&mut self, conn: ConnId, keys: Vec<Key>) {
        let Some(session) = self
            .connections
            .get(&conn)
            .map(|connection| connection.session)
        else {
            return;
        };
        for key in keys {
            let (state, rests) = self.key_state(&key);
            if state == KeyState::Pending {
                self.state.keys.watch(own_key(key.clone()), session);
            }
            self.effect(rests, Effect::Value { conn, key, state });
        }
    }

    /// What a watcher of the key is told, and what that rests on.
    fn key_state(&self, key: &Key) -> (KeyState, Rests) {
        if let Some(stored) = self.state.keys.value(key) {
            let rests = match planted!("show-value-early") {
                true => Rests::default(),
                false => stored.rests,
            };
            let mut value = stored.value.clone();
            if let Some(run) = &stored.run {
                value.run = Some(self.describe_run(stored.group, run));
            }
            return (KeyState::Present(value), rests);
        }
        let mut is_pending = false;
        if let Key::Result(id) = key {
            if let Some(value) = self.derived_value(id) {
                return (KeyState::Present(value), self.staged);
            }
            let messages = &self.state.messages;
            // A failed job has had its value.
            is_pending = messages.copies(id).any(|slot| !messages[slot].is_failed());
        }
        let state = match is_pending || self.state.keys.owner(key).is_some() {
            true => KeyState::Pending,
            false => KeyState::Gone,
        };
        (state, self.staged)
    }

    /// The value of a message that the broker has ended, or is about to: no journal holds it.
    fn derived_value(&self, id: &MessageId) -> Option<Value> {
        let State {
            messages, queues, ..
        } = &self.state;
        if let Some(slot) = messages.find_ended(id) {
            let ttl_ms = messages.kind(slot).result_ttl_ms.unwrap_or(0);
            let over = messages.ended(slot).at.saturating_add(ttl_ms);
            return (over > self.clocks.steady()).then(|| self.ended_value(slot));
        }
        let mut copies = messages.copies(id);
        let slot = copies.next()?;
        if copies.next().is_some() || messages.kind(slot).result_ttl_ms.is_none() {
            return None;
        }
        if self.state.is_blocked(slot) {
            let reason = Bytes::from_static(BLOCKED.as_bytes());
            return Some(Value::new(ValueStatus::Cancelled, reason));
        }
        if self.state.is_purged(slot) {
            let queue = queues[messages.queue(slot)].name;
            let mut marks = self.state.marks.values();
            let is_it = |mark: &Mark| mark.what == MarkedFor::Purge && mark.queue == Some(queue);
            let (mark, _) = marks.find(|(mark, _)| is_it(mark))?;
            return Some(self.unrun_value(How::Purged, mark.reason));
        }
        None
    }

    /// Tells those who watch the key of a value that is not kept.
    pub(crate) fn tell_of_value(&mut self, key: &Key, value: Value) {
        if !self.state.keys.is_anything_watched() {
            return;
        }
        let rests = self.state.rests.and(self.staged);
        for session in self.state.keys.take_watchers(key) {
            let session = self.state.sessions.get(session);
            if let Some(conn) = session.and_then(|session| session.conn) {
                let (key, state) = (key.clone(), KeyState::Present(value.clone()));
                self.effect(rests, Effect::Value { conn, key, state });
            }
        }
    }

    /// Keys that the record has changed, and that are not pending any more.
    pub(crate) fn tell_watchers(&mut self) {
        if self.state.touched.is_empty() {
            return;
        }
        let mut touched = std::mem::take(&mut self.state.touched);
        for key in touched.drain(..) {
            if self.state.keys.watchers(&key).is_empty() {
                continue;
            }
            let (state, rests) = self.key_state(&key);
            if state == KeyState::Pending {
                continue;
            }
            for session in self.state.keys.take_watchers(&key) {
                match self.state.sessions.get(session).map(|session| session.conn) {
                    Some(Some(conn)) => {
                        let (key, state) = (key.clone(), state.clone());
                        self.effect(rests, Effect::Value { conn, key, state });
                    }
                    // It will ask again when it is back; until then the value must not be evicted.
                    Some(None) => self.state.keys.watch(key.clone(), session),
                    None => {}
                }
            }
        }
        self.state.touched = touched;
    }
}
