//! Handing out work, and what happens when a time has come.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    Delivery, Due, Durability, Key, Message, Notice, Space, Value, ValueStatus,
};

use crate::effects::{Effect, Rests};
use crate::messages::{Handle, State as MessagePlace};
use crate::queues::Service;
use crate::records::{Change, Event, Grant};
use crate::state::State;
use crate::timers::Timer;
use crate::{Broker, ConnId};

impl Broker {
    /// Gives ready messages to the connections that want work, one each in turn.
    pub(crate) fn hand_out(&mut self) {
        // What came due or expired while inputs were handled goes first: an expired message is not handed out.
        self.run_timers();
        // Without space on the disk, work stays where it is until there is some.
        if self.space >= Space::NoLeases || !std::mem::take(&mut self.state.has_new_work) {
            return;
        }
        // A message that may be delivered only once must not be handed out again because its grant was
        // lost in a crash; so its delivery waits for the grant. All other grants ride along for free.
        let mut durability = Durability::None;
        self.begin(durability);
        let mut unlucky = 0;
        while unlucky < self.ring.len() {
            let Some(conn) = self.ring.pop_front() else {
                break;
            };
            match self.hand_out_one(conn) {
                HandOut::Done { must_be_safe } => {
                    self.counts.delivered += 1;
                    unlucky = 0;
                    self.ring.push_back(conn);
                    if must_be_safe {
                        durability = Durability::Disk;
                    }
                }
                HandOut::NothingReady => {
                    unlucky += 1;
                    self.ring.push_back(conn);
                }
                HandOut::NotWanted => {}
            }
        }
        self.seal(durability);
    }

    fn hand_out_one(&mut self, conn: ConnId) -> HandOut {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return HandOut::NotWanted;
        };
        if !connection.wants_work() {
            connection.in_ring = false;
            return HandOut::NotWanted;
        }
        let State {
            queues,
            messages,
            sessions,
            ..
        } = &mut self.state;
        let mut taken = None;
        for _ in 0..connection.queues.len() {
            let queue = connection.queues[connection.next_queue];
            connection.next_queue = (connection.next_queue + 1) % connection.queues.len();
            taken = queues.pop_ready(queue, messages);
            if taken.is_some() {
                break;
            }
        }
        let Some((slot, estimate_us)) = taken else {
            return HandOut::NothingReady;
        };
        connection.credit -= 1;
        connection.unsent += 1;
        let session = connection.session;
        let session_number = sessions[session].number;
        let number = messages[slot].number();
        let must_be_safe = messages.kind(slot).max_deliveries == 1 && !planted!("lend-unsafely");
        let mut rests = match planted!("deliver-before-durable") {
            true => Rests::default(),
            false => messages.rests(slot),
        };
        if must_be_safe {
            rests.add(self.state.position, Durability::Disk);
        }
        let grant = Grant {
            epoch: self.epoch,
            number: self.state.grants + 1,
            started_at: self.clocks.wall(),
        };
        self.record(&Event::Granted {
            number,
            session: session_number,
            grant,
        });
        self.state.lease(slot, session, grant, estimate_us, false);
        let message = Handle { number, slot };
        self.effect(
            rests,
            Effect::Deliver {
                conn,
                message,
                grant: grant.number,
            },
        );
        HandOut::Done { must_be_safe }
    }

    pub(crate) fn run_timers(&mut self) {
        let mut is_begun = false;
        let mut durability = Durability::None;
        while let Some(timer) = self.state.timers.pop(&self.clocks) {
            if !is_begun {
                // Whatever a timer ends may be waited for, so effects rest on the disk.
                is_begun = true;
                self.begin(Durability::Disk);
            }
            if self.run_timer(timer) {
                durability = Durability::Disk;
            }
        }
        if is_begun {
            self.seal(durability);
            self.reading.near.sort();
        }
    }

    /// True when what it changed should be on disk before anybody sees it.
    fn run_timer(&mut self, timer: Timer) -> bool {
        match timer {
            Timer::Due { number, slot } => {
                if self.state.messages.get(Handle { number, slot }).is_some()
                    && let MessagePlace::Delayed(when) = self.state.messages.state(slot)
                {
                    debug_assert!(self.clocks.has_come(when));
                    self.state.come_due(slot);
                }
                false
            }
            Timer::Near { number, slot } => {
                if self.state.messages.get(Handle { number, slot }).is_some()
                    && let MessagePlace::Delayed(when) = self.state.messages.state(slot)
                {
                    self.state.timers.set(when, Timer::Due { number, slot });
                    self.comes_near(Handle { number, slot });
                }
                false
            }
            Timer::Expiry { number, slot } => self.expire(Handle { number, slot }),
            Timer::ValueExpiry { slot, number } => {
                if !planted!("keep-key")
                    && let Some(key) = self
                        .state
                        .keys
                        .get(slot, number)
                        .map(|stored| stored.key.clone())
                {
                    self.state.drop_value(&key);
                }
                false
            }
            Timer::LeasesLost {
                session,
                generation,
            } => {
                let is_away = |session: &crate::sessions::Session| {
                    session.generation == generation && !planted!("keep-leases")
                };
                self.state.sessions.get(session).is_some_and(is_away) && self.lose_leases(session)
            }
            Timer::Forget {
                session: index,
                generation,
            } => {
                let Some(session) = self.state.sessions.get(index) else {
                    return false;
                };
                if session.generation != generation {
                    return false;
                }
                let number = session.number;
                let lost_leases = self.lose_leases(index);
                self.record(&Event::SessionForgotten { number });
                self.state.keys.watchers.unwatch_all(index);
                self.state.forget_session(index);
                lost_leases
            }
            Timer::Unserved {
                queue: index,
                generation,
            } => {
                let queue = &mut self.state.queues[index];
                if queue.service == (Service::Missing { generation }) {
                    queue.service = Service::Told;
                    let notice = Notice::Unserved {
                        queue: self.state.names.text(queue.name).to_owned(),
                        waiting: queue.ready,
                        for_ms: self.options.unserved_ms,
                    };
                    self.notice(notice);
                }
                false
            }
        }
    }

    /// A message that is no longer worth starting ends here, unless it runs.
    fn expire(&mut self, handle: Handle) -> bool {
        let State { messages, dead, .. } = &mut self.state;
        if messages.get(handle).is_none() || planted!("deliver-expired") {
            return false;
        }
        if let Some(lease) = messages.lease_state_mut(handle.slot) {
            lease.expired = true;
            return false;
        }
        // What is dead has had its value; it is only cleared away.
        if messages.queue(handle.slot) != *dead {
            self.end_with(handle.slot, ValueStatus::Expired, Bytes::new());
        }
        self.counts.expired += 1;
        self.record(&Event::Settled {
            number: handle.number,
        });
        self.state.settle_message(handle.slot, None);
        true
    }

    /// The worker did not come back in time.
    fn lose_leases(&mut self, session: u32) -> bool {
        let heartbeat_ms = self.state.sessions[session].heartbeat_ms;
        let seconds = heartbeat_ms as f64 / 1000.0;
        let reason = Bytes::from(format!("worker lost: no heartbeat for {seconds} s"));
        let lost = self.state.sessions[session].leases.clone();
        for slot in &lost {
            self.crash(*slot, reason.clone());
        }
        self.state.keys.watchers.unwatch_all(session);
        !lost.is_empty()
    }

    /// The worker died under the message: it goes back to its place, or to the dead letters when that was
    /// once too often.
    pub(crate) fn crash(&mut self, slot: u32, reason: Bytes) {
        let number = self.state.messages[slot].number();
        let kind = self.state.messages.kind(slot);
        // What is dead has had its result, and stays where it is.
        let is_dead = kind.queue == self.state.dead;
        if is_dead || kind.crashes.saturating_add(1) < kind.max_deliveries {
            self.record(&Event::Crashed {
                number,
                reason: &reason,
            });
            self.state.crash_message(slot, reason);
            return;
        }
        self.set_aside(slot, true, &reason);
    }

    /// Moves it to the dead letters, with the reason as its note. Whoever waits for its result is told that,
    /// unless it was dead before.
    pub(crate) fn set_aside(&mut self, slot: u32, crashed: bool, reason: &Bytes) {
        let dead = self.state.dead;
        if self.state.messages.queue(slot) != dead {
            self.end_with(slot, ValueStatus::Crashed, reason.clone());
        }
        let expires_at = self
            .clocks
            .resolve(Due::AfterMs(self.options.dead_letters_kept_ms));
        let change = Change {
            to: self.state.numbers + 1,
            queue: self.state.queues[dead].name,
            due: None,
            next_attempt: false,
            crashed,
            note: Some(reason),
            expires_at: Some(expires_at),
        };
        let number = self.state.messages[slot].number();
        if planted!("lose-dead-letter") && crashed {
            self.record(&Event::Settled { number });
            self.state.settle_message(slot, None);
            return;
        }
        self.record(&Event::Moved { number, change });
        self.state
            .move_message(slot, &change, Some(reason.clone()), None);
    }

    /// Stores how a message ended that will not get to say so itself, if anybody reads its result.
    pub(crate) fn end_with(&mut self, slot: u32, status: ValueStatus, body: Bytes) {
        let kind = self.state.messages.kind(slot);
        let Some(ttl_ms) = kind.result_ttl_ms else {
            return;
        };
        let (key, group) = (Key::Result(self.state.messages[slot].id), kind.task);
        self.put(key, Value { status, body }, Some(ttl_ms), group);
    }

    pub(crate) fn put(
        &mut self,
        key: Key,
        value: Value,
        ttl_ms: Option<u64>,
        group: crate::names::Name,
    ) {
        let expires_at = ttl_ms.map(|ttl_ms| self.clocks.steady().saturating_add(ttl_ms));
        let stored = Event::Stored {
            key,
            status: value.status,
            body: &value.body,
            group,
            expires_at,
        };
        self.writer.push(&self.state.names, &stored);
        let Event::Stored { key, .. } = stored else {
            unreachable!("it was made above")
        };
        self.state.store(key, value, group, expires_at);
        let cap_bytes = self.options.results_cap_bytes;
        while let Some(key) = self.state.keys.next_to_evict(group, cap_bytes) {
            if self.state.keys.tell_eviction(group) {
                let group = self.state.names.text(group).to_owned();
                self.notice(Notice::Evicting { group, cap_bytes });
            }
            self.record(&Event::Evicted { key: key.clone() });
            self.state.drop_value(&key);
            self.state.keys.evicted += 1;
        }
    }
}

enum HandOut {
    Done { must_be_safe: bool },
    NothingReady,
    NotWanted,
}

impl State {
    /// Whether the message is handed out and can't be sent before its body was read back.
    pub(crate) fn awaits_body(&self, message: Handle) -> bool {
        let messages = &self.messages;
        messages.get(message).is_some()
            && self.lacks_body(message.slot)
            && (messages.lease_state(message.slot)).is_some_and(|lease| !lease.sent)
    }

    /// Whether it has a body that is not in memory.
    pub(crate) fn lacks_body(&self, slot: u32) -> bool {
        self.messages.body(slot).is_none() && self.messages.body_at(slot).length() > 0
    }

    /// What has been sent need not be in memory, if it can be read again.
    fn body_to_send(&mut self, slot: u32) -> Bytes {
        let can_be_read =
            self.resident_limit.is_some() && self.messages[slot].base() <= self.durable;
        let body = match can_be_read {
            true => self.messages.take_body(slot),
            false => self.messages.body(slot).cloned(),
        };
        body.unwrap_or_default()
    }

    /// What is sent for a hand-out that still holds; from here on the job may have begun.
    pub(crate) fn delivery(&mut self, message: Handle, grant: u64) -> Option<Delivery> {
        self.messages.get(message)?;
        let slot = message.slot;
        let lease = self.messages.lease(slot)?;
        if lease.grant != grant {
            return None;
        }
        let body = self.body_to_send(slot);
        if let Some(held) = self.messages.lease_state_mut(slot) {
            held.sent = true;
        }
        let entry = &self.messages[slot];
        let kind = self.messages.kind(slot);
        let expires_at = self.messages.expires_at(slot);
        Some(Delivery {
            lease,
            queue: self.names.text(self.queues[kind.queue].name).to_owned(),
            redelivered: entry.redelivered(),
            message: Message {
                id: entry.id,
                task: self.names.text(kind.task).to_owned(),
                priority: kind.priority,
                expires_at: expires_at.map(|when| Due::At(when.at)),
                result_ttl_ms: kind.result_ttl_ms,
                max_deliveries: kind.max_deliveries,
                attempt: kind.attempt,
                crashes: kind.crashes,
                enqueued_at: entry.enqueued_at(),
                notes: self.messages.notes(slot).to_vec(),
                body,
            },
        })
    }
}
