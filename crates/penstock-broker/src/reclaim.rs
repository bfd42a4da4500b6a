//! Carries live things forward, so that the journal's oldest segment can be deleted.

pub(crate) mod live_bases;

use penstock_faults::planted;
use penstock_message::Durability;

use crate::keys::stored_value::StoredRun;
use crate::messages::entry::BodyAt;
use crate::messages::{Asked, EntryState, UntilStart};
use crate::reclaim::live_bases::Entity;
use crate::records::{JoinProgress, KeptEnd, KeptEnds, RecordEvent, RecordedState};
use crate::state::Adjust;
use crate::{Broker, Position};

/// Progress of `carry_forward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarriedForward {
    All,
    /// There is more to do.
    Some,
    /// There may be more to do once the reads of `poll_reads` are done.
    ReadFirst,
}

impl Broker {
    /// Writes the live things before this position in the journal again, as records to be polled; about `max_bytes` of
    /// them. Once this is done and the polled records are durable, nothing before this position is needed any more.
    pub fn carry_forward(&mut self, before: Position, max_bytes: usize) -> CarriedForward {
        self.begin(Durability::Disk);
        let mut has_more = false;
        // Even if nothing is live: counters and positions continue from there.
        self.record(&RecordEvent::Counters {
            numbers: self.state.numbers,
            grants: self.state.grants,
            sessions: self.state.sessions.numbers,
            evicted: self.state.keys.evicted,
        });
        self.record_clocks();
        // Messages whose bodies have been read go first.
        for (slot, body) in std::mem::take(&mut self.reading.carried) {
            let Some(base) = self.reading.carrying.remove(&slot) else {
                continue;
            };
            let entity = Entity::Message { slot };
            if !self.state.is_current(base, &entity) {
                self.state.live_bases.popped_stale();
            } else if self.state.messages[slot].is_ended() {
                // It ended while its body was being read.
                self.carry_value(slot);
            } else {
                self.carry_before(slot, before);
                self.carry_message(slot, &body);
            }
        }
        let mut read_bytes: usize = 0;
        while let Some((base, entity)) = self.state.live_bases.pop_before(before) {
            if !self.state.is_current(base, &entity) {
                self.state.live_bases.popped_stale();
                continue;
            }
            match entity {
                Entity::Message { slot } if self.state.messages[slot].is_ended() => {
                    self.carry_value(slot);
                }
                Entity::Message { slot } if self.must_be_read(slot) => {
                    read_bytes += self.state.messages.body_at(slot).length();
                    self.reading.carry(slot, base);
                }
                _ => self.carry(entity, before),
            }
            if self.writer.len() + read_bytes + self.reading.ends.len() * 24 >= max_bytes {
                has_more = true;
                break;
            }
        }
        self.write_carried_values();
        self.seal(Durability::Disk);
        match (self.reading.carrying.is_empty(), has_more) {
            (true, false) => CarriedForward::All,
            (true, true) => CarriedForward::Some,
            (false, _) => CarriedForward::ReadFirst,
        }
    }

    fn must_be_read(&self, slot: u32) -> bool {
        let messages = &self.state.messages;
        messages.body(slot).is_none() && messages.body_at(slot).length() > 0
    }

    /// Writes the full state of one thing, preceded by the things that it refers to.
    fn carry(&mut self, entity: Entity, before: Position) {
        let position = self.state.position;
        match entity {
            Entity::Message { slot } => {
                self.carry_before(slot, before);
                let body = self.state.messages.body(slot).cloned();
                return self.carry_message(slot, &body.unwrap_or_default());
            }
            Entity::Value { slot } => {
                let stored = self.state.keys.get_mut(slot);
                let is_safe = self.effects.is_safe(stored.safe_after());
                stored.move_to(position, is_safe);
                let event = RecordEvent::Stored {
                    key: stored.key(),
                    status: stored.status,
                    body: stored.body(),
                    group: stored.group,
                    expires_at: stored.expires_at(),
                    run: stored.run.map(StoredRun::head),
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
                self.record(&RecordEvent::Paused { queue, paused });
                self.state.queues[index].rare_mut().base = position;
            }
            Entity::Mark { number } => {
                if let Some((mark, base)) = self.state.marks.get_mut(&number)
                    && !planted!("carry-no-mark")
                {
                    *base = position;
                    let mark = *mark;
                    self.record(&RecordEvent::Marked { mark });
                }
            }
            Entity::Workflow { number } => self.carry_workflow(number),
            Entity::Schedule { number } => self.carry_schedule(number),
            Entity::Limits { index } => {
                let queue = &mut self.state.queues[index];
                queue.rare_mut().limits_base = position;
                let (queue, limits) = (queue.name, queue.rare().limits);
                self.record(&RecordEvent::Limited { queue, limits });
            }
        }
        self.state.live_bases.add(position, entity);
    }

    /// Writes the value of a message that the broker has ended, together with others that are alike.
    fn carry_value(&mut self, slot: u32) {
        let position = self.state.position;
        let messages = &mut self.state.messages;
        messages.set_base_of_ended(slot, position);
        self.state
            .live_bases
            .add(position, Entity::Message { slot });
        if !planted!("carry-no-value") {
            self.reading.ends.push(slot);
        }
    }

    fn write_carried_values(&mut self) {
        let slots = std::mem::take(&mut self.reading.ends);
        let messages = &self.state.messages;
        let is_alike = |one: &u32, other: &u32| {
            let (ended, next) = (messages.ended(*one), messages.ended(*other));
            (ended.how, ended.reason) == (next.how, next.reason)
                && messages.shared_head(*one) == messages.shared_head(*other)
        };
        for slots in slots.chunk_by(is_alike) {
            let (shared_head, ended) = (messages.shared_head(slots[0]), messages.ended(slots[0]));
            let ends = slots.iter().map(|slot| KeptEnd {
                number: messages[*slot].number(),
                id: messages[*slot].id,
                at: messages.ended(*slot).at,
            });
            let ends = KeptEnds {
                how: ended.how,
                reason: ended.reason,
                queue: self.state.queues[shared_head.queue].name,
                task: shared_head.task,
                attempt: shared_head.attempt,
                generation: shared_head.generation,
                result_ttl_ms: shared_head.result_ttl_ms.unwrap_or(0),
                ends: ends.collect(),
            };
            let event = RecordEvent::KeptEnds { ends };
            self.writer.push(&self.state.names, &event);
        }
    }

    /// Writes the things that a message refers to.
    fn carry_before(&mut self, slot: u32, before: Position) {
        match self.state.messages.state(slot) {
            EntryState::Leased(lease) if self.state.sessions[lease.session].base < before => {
                self.carry_session(lease.session);
            }
            EntryState::Held(join) => {
                if let Some(join) = self.state.joins.find(&join)
                    && self.state.joins[join].base < before
                {
                    self.carry_join(join);
                }
            }
            _ => {}
        }
    }

    /// Writes the full state of a message, which becomes its base. (Without its body, if that is lost.)
    pub(crate) fn carry_message(&mut self, slot: u32, body: &[u8]) {
        let position = self.state.position;
        self.state.live_bytes -= self.state.messages.journal_bytes(slot);
        self.state.count_held(slot, Adjust::Subtract);
        let mut head = self.state.head(slot);
        if planted!("carry-no-delay") && matches!(head.state, RecordedState::Delayed(_)) {
            head.state = RecordedState::Ready;
        }
        let extras = self.state.messages.whole_extras(slot);
        let event = RecordEvent::Message {
            head,
            extras: extras.map(std::borrow::Cow::Owned),
            failure: self.state.failing(slot),
            body,
        };
        self.writer.push(&self.state.names, &event);
        let body_at = BodyAt::new(self.writer.len() - body.len(), body.len());
        let messages = &self.state.messages;
        let (writer, names, number) = (&mut self.writer, &self.state.names, head.number);
        for note in messages.notes(slot) {
            writer.push(names, &RecordEvent::Noted { number, note });
        }
        if let Some(key) = messages.claim(slot).cloned()
            // A failed job owns no key, and takes its own back when it is retried.
            && (messages[slot].is_failed()
                || self.state.keys.owner(&key) == Some(messages.handle(slot)))
            && !planted!("carry-no-claim")
        {
            let claimed = match messages.until_start(slot) {
                Some(UntilStart { latest }) => RecordEvent::ClaimedUntilStart {
                    number,
                    key,
                    latest,
                },
                None => RecordEvent::Claimed { number, key },
            };
            writer.push(names, &claimed);
        }
        if let Some(Asked { reason, kill }) = messages.asked(slot)
            && !planted!("carry-no-cancel")
        {
            let asked = RecordEvent::CancelAsked {
                number,
                kill,
                reason,
            };
            writer.push(names, &asked);
        }
        let was_bytes = messages.body_bytes(slot);
        self.state.messages.set_base(slot, position, body_at);
        self.state
            .queues
            .body_was_lost(&self.state.messages, slot, was_bytes);
        self.state.live_bytes += self.state.messages.journal_bytes(slot);
        self.state.count_held(slot, Adjust::Add);
        self.state.recount_failed(slot);
        self.state
            .live_bases
            .add(position, Entity::Message { slot });
    }

    fn carry_session(&mut self, index: u32) {
        let position = self.state.position;
        let session = &mut self.state.sessions[index];
        session.base = position;
        let number = session.number;
        let (writer, names) = (&mut self.writer, &self.state.names);
        writer.push(
            names,
            &RecordEvent::SessionOpened {
                number,
                session: session.id,
                heartbeat_ms: session.heartbeat_ms,
                applied: session.applied,
                name: &session.name,
            },
        );
        if !session.is_forgotten {
            // Without it, a reader would believe that the session was opened at that number.
            writer.push(
                names,
                &RecordEvent::Applied {
                    session: number,
                    through: session.applied,
                },
            );
        }
        let receipts = session
            .receipts()
            .filter(|_| !planted!("carry-no-receipts"));
        for (seq, receipt) in receipts {
            let receipt = receipt.clone();
            writer.push(
                names,
                &RecordEvent::Answered {
                    session: number,
                    seq: *seq,
                    receipt,
                },
            );
        }
        if let Some(at) = session.left_at {
            writer.push(names, &RecordEvent::SessionLeft { number, at });
        }
        // Earlier grants may now precede this session record, so repeat them.
        for slot in &session.leases {
            if let Some(lease) = self.state.messages.lease_state(*slot) {
                writer.push(
                    names,
                    &RecordEvent::Granted {
                        number: self.state.messages[*slot].number(),
                        session: number,
                        grant: lease.grant,
                    },
                );
            }
        }
        self.state
            .live_bases
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
            &RecordEvent::JoinState {
                join: id,
                count: join.count,
                policy: join.policy,
                over_at: join.is_over.then_some(join.over_at),
                arrived: match planted!("carry-no-arrivals") {
                    true => Vec::new(),
                    false => join.arrived(),
                }
                .into(),
                progress: JoinProgress {
                    failures: match planted!("carry-no-failures") {
                        true => 0,
                        false => join.failures,
                    },
                    is_released: join.is_released,
                    causes: join.causes.clone().into(),
                    expects: join.expects.clone().into(),
                    has_needless: join.has_needless,
                    is_needless: join.is_needless,
                    then: join.then.clone().into(),
                    result_ttl_ms: join.result_ttl_ms,
                    unsealed: join.growth.as_deref().copied(),
                },
            },
        );
        if self.chores.reopens(&id) {
            writer.push(names, &RecordEvent::JoinReopened { join: id });
        }
        self.state
            .live_bases
            .add(position, Entity::Join { slot, number });
    }
}
