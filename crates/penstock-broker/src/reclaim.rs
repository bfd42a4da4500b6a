//! Carrying live things forward, so that the journal's oldest segment can go.

use penstock_message::Durability;

use crate::ledger::Entity;
use crate::messages::State as MessagePlace;
use crate::records::Event;
use crate::{Broker, Position};

impl Broker {
    /// Writes anew, as records to be polled, what lives and stands in the journal before this position;
    /// about as many bytes as named here. True: there is more to do. When it is false, and what was
    /// polled is durable, nothing before this position is needed any more.
    pub fn carry_forward(&mut self, before: Position, max_bytes: usize) -> bool {
        self.begin(Durability::Disk);
        let mut has_more = false;
        // Also when nothing lives: what was counted goes on from there, and so do the positions.
        self.record(&Event::Counters {
            numbers: self.state.numbers,
            grants: self.state.grants,
            sessions: self.state.sessions.numbers,
            evicted: self.state.keys.evicted,
        });
        let steady = self.clocks.steady();
        self.record(&Event::ClockSet { steady });
        while let Some((base, entity)) = self.state.ledger.pop_before(before) {
            if !self.state.is_current(base, &entity) {
                self.state.ledger.popped_stale();
                continue;
            }
            self.carry(entity, before);
            if self.writer.len() >= max_bytes {
                has_more = true;
                break;
            }
        }
        self.seal(Durability::Disk);
        has_more
    }

    /// Writes the full state of one thing, and before it what it refers to.
    fn carry(&mut self, entity: Entity, before: Position) {
        let position = self.state.position;
        match entity {
            Entity::Message { slot } => {
                match self.state.messages[slot].state {
                    MessagePlace::Leased(lease)
                        if self.state.sessions[lease.session].base < before =>
                    {
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
                let head = self.state.head(slot);
                let entry = &self.state.messages[slot];
                let (writer, names, number) = (&mut self.writer, &self.state.names, entry.number);
                writer.push(
                    names,
                    &Event::Message {
                        head,
                        body: &entry.body,
                    },
                );
                for note in entry.notes() {
                    writer.push(names, &Event::Noted { number, note });
                }
                if let Some(key) = entry.extra.as_ref().and_then(|extra| extra.claim.clone())
                    && self.state.keys.owner(&key) == Some(number)
                {
                    writer.push(names, &Event::Claimed { number, key });
                }
                self.state.messages[slot].base = position;
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
                self.writer.push(&self.state.names, &event);
            }
            Entity::Session { index, .. } => return self.carry_session(index),
            Entity::Join { slot, .. } => return self.carry_join(slot),
            Entity::Queue { index } => {
                let queue = self.state.queues[index].name;
                self.record(&Event::Paused {
                    queue,
                    paused: true,
                });
                self.state.queues[index].base = position;
            }
        }
        self.state.ledger.add(position, entity);
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
        for (seq, receipt) in session.receipts() {
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
            let entry = &self.state.messages[*slot];
            if let MessagePlace::Leased(lease) = entry.state {
                writer.push(
                    names,
                    &Event::Granted {
                        number: entry.number,
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
        for index in join.arrived() {
            writer.push(names, &Event::Joined { join: id, index });
        }
        self.state
            .ledger
            .add(position, Entity::Join { slot, number });
    }
}
