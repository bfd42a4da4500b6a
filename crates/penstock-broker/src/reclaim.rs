//! Carrying live things forward, so that the journal's oldest segment can go.

use penstock_faults::planted;
use penstock_message::Durability;

use crate::ledger::Entity;
use crate::messages::State as MessagePlace;
use crate::records::{Event, Place};
use crate::{Broker, Position};

/// How far `carry_forward` has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    All,
    /// There is more to do.
    Some,
    /// There may be more to do, once what `poll_reads` gives has been read.
    ReadFirst,
}

impl Broker {
    /// Writes anew, as records to be polled, what lives and stands in the journal before this position;
    /// about as many bytes as named here. Once it is done, and what was polled is durable, nothing before
    /// this position is needed any more.
    pub fn carry_forward(&mut self, before: Position, max_bytes: usize) -> Carried {
        self.begin(Durability::Disk);
        let mut has_more = false;
        // Also when nothing lives: what was counted goes on from there, and so do the positions.
        self.record(&Event::Counters {
            numbers: self.state.numbers,
            grants: self.state.grants,
            sessions: self.state.sessions.numbers,
            evicted: self.state.keys.evicted,
        });
        self.record_clocks();
        // Those first whose bodies have been read.
        for (slot, body) in std::mem::take(&mut self.reading.carried) {
            let Some(base) = self.reading.carrying.remove(&slot) else {
                continue;
            };
            let entity = Entity::Message { slot };
            if self.state.is_current(base, &entity) {
                self.carry_before(slot, before);
                self.carry_message(slot, &body);
            } else {
                self.state.ledger.popped_stale();
            }
        }
        let mut read_bytes: usize = 0;
        while let Some((base, entity)) = self.state.ledger.pop_before(before) {
            if !self.state.is_current(base, &entity) {
                self.state.ledger.popped_stale();
                continue;
            }
            match entity {
                Entity::Message { slot } if self.must_be_read(slot) => {
                    read_bytes += self.state.messages.body_at(slot).length();
                    self.reading.carry(slot, base);
                }
                _ => self.carry(entity, before),
            }
            if self.writer.len() + read_bytes >= max_bytes {
                has_more = true;
                break;
            }
        }
        self.seal(Durability::Disk);
        match (self.reading.carrying.is_empty(), has_more) {
            (true, false) => Carried::All,
            (true, true) => Carried::Some,
            (false, _) => Carried::ReadFirst,
        }
    }

    fn must_be_read(&self, slot: u32) -> bool {
        let messages = &self.state.messages;
        messages.body(slot).is_none() && messages.body_at(slot).length() > 0
    }

    /// Writes the full state of one thing, and before it what it refers to.
    fn carry(&mut self, entity: Entity, before: Position) {
        let position = self.state.position;
        match entity {
            Entity::Message { slot } => {
                self.carry_before(slot, before);
                let body = self.state.messages.body(slot).cloned();
                return self.carry_message(slot, &body.unwrap_or_default());
            }
            Entity::Value { slot, .. } => {
                let stored = self.state.keys.get_mut(slot);
                stored.base = position;
                let event = Event::Stored {
                    key: stored.key.clone(),
                    status: stored.value.status,
                    body: &stored.value.body,
                    group: stored.group,
                    expires_at: stored.expires_at,
                };
                if !planted!("carry-no-value") {
                    self.writer.push(&self.state.names, &event);
                }
            }
            Entity::Session { .. } if planted!("carry-no-session") => {}
            Entity::Session { index, .. } => return self.carry_session(index),
            Entity::Join { slot, .. } => return self.carry_join(slot),
            Entity::Queue { index } => {
                let queue = self.state.queues[index].name;
                let paused = !planted!("carry-no-pause");
                self.record(&Event::Paused { queue, paused });
                self.state.queues[index].base = position;
            }
            Entity::Limits { index } => {
                let queue = &mut self.state.queues[index];
                queue.limits_base = position;
                let (queue, limits) = (queue.name, queue.limits);
                self.record(&Event::Limited { queue, limits });
            }
        }
        self.state.ledger.add(position, entity);
    }

    /// Writes what a message refers to.
    fn carry_before(&mut self, slot: u32, before: Position) {
        match self.state.messages.state(slot) {
            MessagePlace::Leased(lease) if self.state.sessions[lease.session].base < before => {
                self.carry_session(lease.session);
            }
            MessagePlace::Held(join) => {
                if let Some(join) = self.state.joins.find(&join)
                    && self.state.joins[join].base < before
                {
                    self.carry_join(join);
                }
            }
            _ => {}
        }
    }

    /// Writes the full state of a message, which is its base from now on. (Without its body, if that is
    /// lost.)
    pub(crate) fn carry_message(&mut self, slot: u32, body: &[u8]) {
        let position = self.state.position;
        self.state.live_bytes -= self.state.messages.journal_bytes(slot);
        let mut head = self.state.head(slot);
        if planted!("carry-no-delay") && matches!(head.place, Place::Delayed(_)) {
            head.place = Place::Ready;
        }
        let body_at = self.record_message(&head, body);
        let messages = &self.state.messages;
        let (writer, names, number) = (&mut self.writer, &self.state.names, head.number);
        for note in messages.notes(slot) {
            writer.push(names, &Event::Noted { number, note });
        }
        if let Some(key) = messages.claim(slot).cloned()
            && self.state.keys.owner(&key) == Some(number)
            && !planted!("carry-no-claim")
        {
            writer.push(names, &Event::Claimed { number, key });
        }
        let was_bytes = messages.body_bytes(slot);
        self.state.messages.set_base(slot, position, body_at);
        self.state
            .queues
            .body_was_lost(&self.state.messages, slot, was_bytes);
        self.state.live_bytes += self.state.messages.journal_bytes(slot);
        self.state.ledger.add(position, Entity::Message { slot });
    }

    fn carry_session(&mut self, index: u32) {
        let position = self.state.position;
        let session = &mut self.state.sessions[index];
        session.base = position;
        let number = session.number;
        let (writer, names) = (&mut self.writer, &self.state.names);
        writer.push(
            names,
            &Event::SessionOpened {
                number,
                session: session.id,
                heartbeat_ms: session.heartbeat_ms,
                applied: session.applied,
                name: &session.name,
            },
        );
        let receipts = session
            .receipts()
            .filter(|_| !planted!("carry-no-receipts"));
        for (seq, receipt) in receipts {
            let receipt = receipt.clone();
            writer.push(
                names,
                &Event::Answered {
                    session: number,
                    seq: *seq,
                    receipt,
                },
            );
        }
        if let Some(at) = session.left_at {
            writer.push(names, &Event::SessionLeft { number, at });
        }
        // Grants of before name the session, and may now stand before it; so they are told again.
        for slot in &session.leases {
            if let Some(lease) = self.state.messages.lease_state(*slot) {
                writer.push(
                    names,
                    &Event::Granted {
                        number: self.state.messages[*slot].number(),
                        session: number,
                        grant: lease.grant,
                    },
                );
            }
        }
        self.state
            .ledger
            .add(position, Entity::Session { index, number });
    }

    fn carry_join(&mut self, slot: u32) {
        let position = self.state.position;
        let join = &mut self.state.joins[slot];
        join.base = position;
        let (writer, names, id, number) =
            (&mut self.writer, &self.state.names, join.id, join.number);
        writer.push(
            names,
            &Event::JoinOpened {
                join: id,
                count: join.count,
                policy: join.policy,
            },
        );
        for index in join.arrived().filter(|_| !planted!("carry-no-arrivals")) {
            writer.push(names, &Event::Joined { join: id, index });
        }
        self.state
            .ledger
            .add(position, Entity::Join { slot, number });
    }
}
