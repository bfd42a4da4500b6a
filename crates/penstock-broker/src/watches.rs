//! Telling of keys: level-triggered, so that a client that was away misses nothing.

use penstock_faults::planted;
use penstock_message::{Key, KeyState};

use crate::commits::own_key;
use crate::effects::{Effect, Rests};
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
            return (KeyState::Present(stored.value.clone()), rests);
        }
        let is_pending = match key {
            // What is in the dead-letter queue has ended: it has had its value.
            Key::Result(id) => {
                let dead = self.state.dead;
                self.state
                    .messages
                    .copies(id)
                    .any(|slot| self.state.messages.queue(slot) != dead)
            }
            Key::Named(_) => false,
        };
        let state = match is_pending || self.state.keys.owner(key).is_some() {
            true => KeyState::Pending,
            false => KeyState::Gone,
        };
        (state, self.staged)
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
