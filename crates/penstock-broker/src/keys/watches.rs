//! Notifies watchers of keys. Level-triggered, so that a client that was away misses nothing.

use penstock_faults::planted;
use penstock_message::{Key, KeyState, MessageId, Value, ValueStatus};

use crate::commits::own_key;
use crate::endings::upstream;
use crate::held_effects::{Effect, SafeAfter};
use crate::records::{Mark, MarkedFor, UnrunCause};
use crate::state::BrokerState;
use crate::{Broker, ConnId};

impl Broker {
    pub(crate) fn watch(&mut self, conn: ConnId, keys: Vec<Key>, waiter: Option<MessageId>) {
        let Some(session) = self
            .connections
            .get(&conn)
            .map(|connection| connection.session)
        else {
            return;
        };
        let mut awaited = Vec::new();
        for key in keys {
            let (mut state, safe_after) = self.key_state(&key);
            if self.is_unsure(&key, &state) {
                state = KeyState::Pending;
            }
            if state == KeyState::Pending {
                if let (Key::Result(id), Some(_)) = (&key, waiter) {
                    awaited.push(*id);
                }
                let key = own_key(&mut key.clone());
                self.state.keys.watchers.watch(key, session);
            }
            self.effect(safe_after, Effect::Value { conn, key, state });
        }
        if let Some(waiter) = waiter {
            self.begin_waits(conn, waiter, &awaited);
        }
    }

    /// Returns the state of the key for a watcher, and the records that it depends on.
    fn key_state(&self, key: &Key) -> (KeyState, SafeAfter) {
        if let Some(stored) = self.state.keys.value(key) {
            let safe_after = match planted!("show-value-early") {
                true => SafeAfter::default(),
                false => stored.safe_after(),
            };
            let mut value = stored.value();
            if let Some(run) = stored.run {
                value.run = Some(self.describe_run(stored.group, &run.head()));
            }
            return (KeyState::Present(value), safe_after);
        }
        let mut is_pending = false;
        if let Key::Result(id) = key {
            if let Some(value) = self.derived_value(id) {
                return (KeyState::Present(value), self.everything);
            }
            let messages = &self.state.messages;
            // A failed job already has its value.
            is_pending = messages.copies(id).any(|slot| !messages[slot].is_failed())
                || self.state.joins.awaits(id);
        }
        let state = match is_pending || self.state.keys.owner(key).is_some() {
            true => KeyState::Pending,
            false => KeyState::Gone,
        };
        (state, self.everything)
    }

    /// Returns the value of a message that the broker has ended, or is about to end. The journal does not contain it.
    fn derived_value(&self, id: &MessageId) -> Option<Value> {
        let BrokerState {
            messages, queues, ..
        } = &self.state;
        if let Some(slot) = messages.find_ended(id) {
            let ttl_ms = messages.shared_head(slot).result_ttl_ms.unwrap_or(0);
            let over = messages.ended(slot).at.saturating_add(ttl_ms);
            let now = self.clocks.steady();
            let is_kept = over > now || self.state.joins.is_pinned(&Key::Result(*id), now);
            return is_kept.then(|| self.ended_value(slot));
        }
        let mut copies = messages.copies(id);
        let slot = copies.next()?;
        if copies.next().is_some() || messages.shared_head(slot).result_ttl_ms.is_none() {
            return None;
        }
        if self.state.is_blocked(slot) {
            let body = upstream(&self.state.causes_of(slot));
            return Some(Value::new(ValueStatus::Upstream, body));
        }
        if self.state.is_purged(slot) {
            let queue = queues[messages.queue(slot)].name;
            let mut marks = self.state.marks.values();
            let is_it = |mark: &Mark| mark.what == MarkedFor::Purge && mark.queue == Some(queue);
            let (mark, _) = marks.find(|(mark, _)| is_it(mark))?;
            return Some(self.state.unrun_value(UnrunCause::Purged, mark.reason));
        }
        None
    }

    /// Notifies the watchers of a key of a value that is not kept.
    pub(crate) fn notify_of_value(&mut self, key: &Key, value: Value) {
        if self.state.keys.watchers.is_empty() {
            return;
        }
        let safe_after = self.state.safe_after.and(self.everything);
        self.state.end_waits_for(key);
        for session in self.state.keys.watchers.take(key) {
            let session = self.state.sessions.get(session);
            if let Some(conn) = session.and_then(|session| session.conn) {
                let (key, state) = (key.clone(), KeyState::Present(value.clone()));
                self.effect(safe_after, Effect::Value { conn, key, state });
            }
        }
    }

    /// Notifies watchers of keys that the record has changed and that are no longer pending.
    pub(crate) fn notify_watchers(&mut self) {
        if self.state.touched.is_empty() {
            return;
        }
        let mut touched = std::mem::take(&mut self.state.touched);
        for key in touched.drain(..) {
            if !self.state.keys.watchers.is_watched(&key) {
                continue;
            }
            let (state, safe_after) = self.key_state(&key);
            if state == KeyState::Pending || self.is_unsure(&key, &state) {
                continue;
            }
            self.state.end_waits_for(&key);
            for session in self.state.keys.watchers.take(&key) {
                match self.state.sessions.get(session).map(|session| session.conn) {
                    Some(Some(conn)) => {
                        let (key, state) = (key.clone(), state.clone());
                        self.effect(safe_after, Effect::Value { conn, key, state });
                    }
                    // The client asks again when it reconnects; until then the value must not be evicted.
                    Some(None) => self.state.keys.watchers.watch(key.clone(), session),
                    None => {}
                }
            }
        }
        self.state.touched = touched;
    }
}

#[cfg(test)]
mod tests {
    use penstock_message::{DEFAULT_PRIORITY, Durability, Message, MessageId, Op, SessionId, Tx};

    use super::*;
    use crate::table::slab::looks;
    use crate::{BrokerOptions, Input, Now, Position, Recovery};

    const NOW: Now = Now {
        mono_ms: 1_000,
        wall_ms: 1_700_000_000_000,
        boot: None,
    };

    fn run(broker: &mut Broker, input: Input) {
        broker.handle(NOW, input);
        let mut last = Position(0);
        while let Some(record) = broker.poll_record() {
            last = record.position;
        }
        broker.handle_durable(last);
        while broker.poll_output().is_some() {}
    }

    fn hello(broker: &mut Broker, conn: u64) {
        let input = Input::Connected {
            conn: ConnId(conn),
            session: SessionId([conn as u8; 16]),
            name: String::new(),
            heartbeat_ms: 15_000,
            last_seq: 0,
            leases: Vec::new(),
        };
        run(broker, input);
    }

    fn bye(broker: &mut Broker, conn: u64) {
        let conn = ConnId(conn);
        run(broker, Input::Disconnected { conn, clean: true });
    }

    /// In an earlier version each hello and goodbye walked all keys that anybody watched: 42 ms with a million.
    #[test]
    fn a_connection_that_comes_and_goes_touches_no_key_that_others_watch() {
        let mut broker = Recovery::new(BrokerOptions::default()).finish(NOW, 1);
        hello(&mut broker, 1);
        let ids: Vec<MessageId> = (0..100_000_u128)
            .map(|number| MessageId((number + 1).to_be_bytes()))
            .collect();
        let publish = |id: &MessageId| Op::Publish {
            queues: vec!["default".to_owned()],
            message: Message {
                id: *id,
                task: "task".to_owned(),
                priority: DEFAULT_PRIORITY,
                expires_at: None,
                result_ttl_ms: Some(60_000),
                max_deliveries: 3,
                attempt: 0,
                crashes: 0,
                enqueued_at: 0,
                notes: Vec::new(),
                body: bytes::Bytes::new(),
                extras: None,
            },
            due: None,
            unless_key: None,
        };
        let commit = Input::Commit {
            conn: ConnId(1),
            first_seq: 1,
            durability: Durability::Disk,
            txs: ids.iter().map(|id| Tx::from(vec![publish(id)])).collect(),
        };
        run(&mut broker, commit);
        let watch = |conn: u64, ids: &[MessageId]| Input::Watch {
            conn: ConnId(conn),
            keys: ids.iter().copied().map(Key::Result).collect(),
            waiter: None,
        };
        run(&mut broker, watch(1, &ids));
        let all_watched = |broker: &Broker| {
            let watchers = &broker.state.keys.watchers;
            ids.iter().all(|id| watchers.watches(0, &Key::Result(*id)))
        };
        assert!(all_watched(&broker), "the first session watches them all");

        // The tables of messages, keys, watchers and sessions are slabs. Ids and keys are found in one step.
        let looks = looks::count(|| {
            hello(&mut broker, 2);
            bye(&mut broker, 2);
        });
        assert!(looks < 100, "{looks} entries, though it watched nothing");
        let looks = looks::count(|| {
            hello(&mut broker, 3);
            run(&mut broker, watch(3, &ids[..10]));
            bye(&mut broker, 3);
        });
        assert!(looks < 300, "{looks} entries, though it watched ten keys");
        assert!(all_watched(&broker), "the first session still does");
        broker.assert_consistent();

        bye(&mut broker, 1);
        assert!(broker.state.keys.watchers.is_empty());
    }
}
