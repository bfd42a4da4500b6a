//! Transactions: checked whole, then applied whole.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    Condition, Due, Durability, HIGHEST_PRIORITY, JoinId, JoinPolicy, Key, Lease, Message, Op,
    Receipt, Refusal, ReleaseReason, Tx, Value, ValueStatus,
};

use crate::connections::NAME_CAP_BYTES;
use crate::effects::Rests;
use crate::messages::{BodyAt, State as MessagePlace};
use crate::records::{Change, Event, MessageHead, Place};
use crate::sessions::Staged;
use crate::{Broker, CloseReason, ConnId};

/// Each of a message's queues has an entry of its own, and the list is compared with itself.
const QUEUES_CAP: usize = 64;
const KEY_CAP_BYTES: usize = 1024;
/// A join keeps a bit for each member.
const JOIN_CAP: u32 = 1 << 24;

impl Broker {
    pub(crate) fn commit(
        &mut self,
        conn: ConnId,
        first_seq: u64,
        durability: Durability,
        txs: Vec<Tx>,
    ) {
        let Some(session) = self
            .connections
            .get(&conn)
            .map(|connection| connection.session)
        else {
            return;
        };
        if self.state.sessions[session].staged.is_some() {
            let reason = "a transaction came between the parts of a larger one".to_owned();
            return self.close(conn, CloseReason::Protocol(reason));
        }
        self.commit_whole(conn, session, first_seq, durability, txs);
    }

    pub(crate) fn commit_part(
        &mut self,
        conn: ConnId,
        seq: u64,
        durability: Durability,
        tx: Tx,
        last: bool,
    ) {
        let Some(session_index) = self
            .connections
            .get(&conn)
            .map(|connection| connection.session)
        else {
            return;
        };
        let session = &mut self.state.sessions[session_index];
        let staged = session.staged.get_or_insert_with(|| Staged {
            seq,
            ops: Vec::new(),
            bytes: 0,
            is_too_large: false,
        });
        if staged.seq != seq {
            let reason = format!(
                "a part of transaction {seq} came between the parts of {}",
                staged.seq
            );
            return self.close(conn, CloseReason::Protocol(reason));
        }
        let bytes: usize = tx.ops.iter().map(op_bytes).sum();
        // The place of a transaction that was applied before is known; its parts need not be kept.
        let is_resent = seq <= session.applied;
        if !is_resent && !staged.is_too_large {
            if self.staged_parts_bytes + bytes > self.options.staged_parts_cap_bytes {
                staged.is_too_large = true;
                self.staged_parts_bytes -= std::mem::take(&mut staged.bytes);
                staged.ops = Vec::new();
            } else {
                self.staged_parts_bytes += bytes;
                staged.bytes += bytes;
                staged.ops.extend(tx.ops);
            }
        }
        if !last {
            return;
        }
        let Some(staged) = session.staged.take() else {
            return;
        };
        self.staged_parts_bytes -= staged.bytes;
        if staged.is_too_large {
            let why = Refusal::TooLarge(format!(
                "with this transaction, those that are on their way in parts exceed the broker's {}",
                exact_bytes(self.options.staged_parts_cap_bytes)
            ));
            return self.refuse_whole(conn, session_index, seq, durability, why);
        }
        self.commit_whole(
            conn,
            session_index,
            seq,
            durability,
            vec![Tx { ops: staged.ops }],
        );
    }

    fn commit_whole(
        &mut self,
        conn: ConnId,
        session: u32,
        first_seq: u64,
        durability: Durability,
        txs: Vec<Tx>,
    ) {
        if txs.is_empty() || !self.is_in_sequence(conn, session, first_seq) {
            return;
        }
        let last_seq = first_seq + (txs.len() as u64 - 1);
        let applied = self.state.sessions[session].applied;
        let resent = (applied + 1)
            .saturating_sub(first_seq)
            .min(txs.len() as u64);
        self.answer_again(conn, session, first_seq, resent);
        if last_seq <= applied {
            if planted!("apply-again") {
                self.begin(durability);
                for tx in txs {
                    if self.check(session, &tx.ops).is_ok() {
                        self.apply(tx.ops);
                    }
                }
                self.seal(durability);
            }
            return;
        }
        self.begin(durability);
        let mut exceptions = Vec::new();
        for (index, tx) in txs.into_iter().enumerate().skip(resent as usize) {
            let receipt = match self.check(session, &tx.ops) {
                Ok(()) => Receipt::skipped(self.apply(tx.ops)),
                Err((op, why)) => {
                    self.counts.refused += 1;
                    if planted!("apply-half") {
                        let half = tx.ops.into_iter().take(op as usize).collect();
                        self.apply(half);
                    }
                    Receipt::Refused { op, why }
                }
            };
            if receipt != Receipt::applied() {
                exceptions.push((first_seq + index as u64, receipt));
            }
        }
        self.decide(
            session,
            first_seq + resent,
            last_seq,
            durability,
            exceptions,
        );
    }

    fn refuse_whole(
        &mut self,
        conn: ConnId,
        session: u32,
        seq: u64,
        durability: Durability,
        why: Refusal,
    ) {
        if !self.is_in_sequence(conn, session, seq) {
            return;
        }
        if seq <= self.state.sessions[session].applied {
            return self.answer_again(conn, session, seq, 1);
        }
        self.begin(durability);
        let receipt = Receipt::Refused { op: 0, why };
        self.decide(session, seq, seq, durability, vec![(seq, receipt)]);
    }

    /// Closes the connection when numbers are missing.
    fn is_in_sequence(&mut self, conn: ConnId, session: u32, first_seq: u64) -> bool {
        let session = &self.state.sessions[session];
        let expected = session.applied.max(session.may_skip_through) + 1;
        let reason = match first_seq {
            0 => "transactions are numbered from 1".to_owned(),
            _ if first_seq > expected => {
                format!("transaction {first_seq} came where {expected} was expected")
            }
            _ => return true,
        };
        self.close(conn, CloseReason::Protocol(reason));
        false
    }

    /// Transactions that were decided before are not applied again; their answers are told again once
    /// they are safe.
    fn answer_again(&mut self, conn: ConnId, session: u32, first_seq: u64, count: u64) {
        if count == 0 {
            return;
        }
        let session = &mut self.state.sessions[session];
        session.told = session.told.min(first_seq - 1);
        self.stand_in_line(conn);
    }

    /// Ends the record of what was decided for these numbers.
    fn decide(
        &mut self,
        index: u32,
        first: u64,
        last: u64,
        durability: Durability,
        exceptions: Vec<(u64, Receipt)>,
    ) {
        let session = self.state.sessions[index].number;
        self.record(&Event::Applied {
            session,
            through: last,
        });
        for (seq, receipt) in &exceptions {
            let receipt = receipt.clone();
            self.record(&Event::Answered {
                session,
                seq: *seq,
                receipt,
            });
        }
        let position = self.state.position;
        self.seal(durability);
        let rests = match exceptions.is_empty() {
            true => Rests::on(position, durability),
            // A refusal, or a skip, rests on all that was decided before it.
            false => self.staged,
        };
        let session = &mut self.state.sessions[index];
        for (seq, receipt) in exceptions {
            session.keep_receipt(seq, receipt);
        }
        session.decided(first, last, rests);
        self.confirm_when_safe(index);
    }

    // --- checking

    /// Whether all operations may be applied, judged by the state before the first of them. Notes the
    /// slots of the leases for `apply`.
    fn check(&mut self, session: u32, ops: &[Op]) -> Result<(), (u32, Refusal)> {
        self.checks += 1;
        self.checked_slots.clear();
        self.new_ids.clear();
        self.arrivals.clear();
        self.may_find_no_room = self.has_limits() && !ops.iter().any(Op::is_settlement);
        // In a long backlog the place of an id is far away. Looked for together, several are under way at a
        // time; and mostly none is held, so that is all.
        let messages = &self.state.messages;
        self.names_held = ops.len() == 1
            || ops.iter().any(|op| match op {
                Op::Publish { message, .. } => messages.holds(&message.id),
                Op::Hold { .. } => true,
                _ => false,
            });
        for (index, op) in ops.iter().enumerate() {
            self.check_op(session, op, ops.len() == 1)
                .map_err(|why| (index as u32, why))?;
        }
        Ok(())
    }

    fn check_op(&mut self, session: u32, op: &Op, is_alone: bool) -> Result<(), Refusal> {
        match op {
            Op::Ack { lease, .. } | Op::Release { lease, .. } => self.check_lease(session, lease),
            Op::Move {
                lease,
                queue,
                patch,
                ..
            } => {
                if let Some(queue) = queue {
                    check_name("a queue's name", queue)?;
                }
                if let Some(note) = &patch.note {
                    self.check_body("a note", note.len())?;
                }
                self.check_lease(session, lease)
            }
            Op::Publish {
                queues,
                message,
                due,
                unless_key,
            } => {
                if queues.is_empty() {
                    return Err(Refusal::Invalid(
                        "a message is published to no queue".to_owned(),
                    ));
                }
                if queues.len() > QUEUES_CAP {
                    return Err(Refusal::Invalid(format!(
                        "a message is published to {} queues; the limit is {QUEUES_CAP}",
                        queues.len()
                    )));
                }
                for (index, queue) in queues.iter().enumerate() {
                    check_name("a queue's name", queue)?;
                    if queues[..index].contains(queue) {
                        return Err(Refusal::Invalid(format!("queue {queue:?} is named twice")));
                    }
                }
                self.check_shape(message)?;
                if let Some(key) = unless_key {
                    check_key(key)?;
                    // It will be skipped, so it may well be here already. (Unless what comes before it here
                    // takes the key away: `apply` looks again.)
                    if self.key_exists(key) {
                        return Ok(());
                    }
                }
                self.check_is_new(message, is_alone)?;
                match self.may_find_no_room {
                    true => {
                        self.check_admission()?;
                        self.check_room(queues, message.body.len() as u64, due.is_some())
                    }
                    false => Ok(()),
                }
            }
            Op::Put {
                key, value, group, ..
            } => {
                check_key(key)?;
                check_name("a group's name", group)?;
                self.check_body("a value", value.body.len())
            }
            Op::Delete { key } => check_key(key),
            Op::Guard { key, condition } => {
                check_key(key)?;
                let holds = match condition {
                    Condition::Absent => !self.key_exists(key),
                    Condition::Present => self.key_exists(key),
                    Condition::Is(body) => self
                        .state
                        .keys
                        .value(key)
                        .is_some_and(|stored| stored.value.body == *body),
                };
                if holds || planted!("pass-every-guard") {
                    Ok(())
                } else {
                    Err(Refusal::GuardFailed)
                }
            }
            Op::Hold {
                join,
                count,
                messages,
                ..
            } => {
                if *count == 0 || *count > JOIN_CAP {
                    return Err(Refusal::Invalid(format!(
                        "a join has from 1 to {JOIN_CAP} members, not {count}"
                    )));
                }
                if self.state.joins.find(join).is_some() || !self.new_ids.insert(*join) {
                    return Err(Refusal::AlreadyExists);
                }
                for (queue, message) in messages {
                    check_name("a queue's name", queue)?;
                    self.check_shape(message)?;
                    self.check_is_new(message, false)?;
                }
                match self.may_find_no_room {
                    true => self.check_admission(),
                    false => Ok(()),
                }
            }
            Op::Join { join, index, .. } => match self.state.joins.find(join) {
                Some(slot) if *index >= self.state.joins[slot].count => {
                    let count = self.state.joins[slot].count;
                    Err(Refusal::Invalid(format!(
                        "member {index} of a join of {count}"
                    )))
                }
                _ => Ok(()),
            },
            Op::Purge { queue }
            | Op::Pause { queue }
            | Op::Resume { queue }
            | Op::Limit { queue, .. } => check_name("a queue's name", queue),
            Op::Fail { .. }
            | Op::Cancel { .. }
            | Op::RetryFailed { .. }
            | Op::DropFailed { .. }
            | Op::Unnamed => Err(Refusal::NotOffered(
                "this broker does not know the operation: it is older than its client".to_owned(),
            )),
        }
    }

    fn check_lease(&mut self, session: u32, lease: &Lease) -> Result<(), Refusal> {
        let slot = self
            .state
            .messages
            .find_lease(lease)
            .ok_or(Refusal::LeaseLost)?;
        let messages = &mut self.state.messages;
        let held = messages.lease_state(slot);
        // One transaction settles a lease once.
        if held.is_none_or(|held| held.session != session)
            || messages.checked_by(slot) == self.checks
        {
            return Err(Refusal::LeaseLost);
        }
        messages.set_checked_by(slot, self.checks);
        self.checked_slots.push(slot);
        Ok(())
    }

    /// What holds of a message wherever it is to go.
    fn check_shape(&self, message: &Message) -> Result<(), Refusal> {
        check_name("a task's name", &message.task)?;
        let notes: usize = message.notes.iter().map(Bytes::len).sum();
        self.check_body("a message", message.body.len() + notes)?;
        if message.priority > HIGHEST_PRIORITY {
            let priority = message.priority;
            return Err(Refusal::Invalid(format!(
                "priorities run from 0 to {HIGHEST_PRIORITY}, not {priority}"
            )));
        }
        if message.max_deliveries == 0 {
            return Err(Refusal::Invalid("max_deliveries is at least 1".to_owned()));
        }
        Ok(())
    }

    fn check_is_new(&mut self, message: &Message, is_alone: bool) -> Result<(), Refusal> {
        let is_held = self.names_held && self.state.messages.holds(&message.id);
        let is_new = !is_held && (is_alone || self.new_ids.insert(message.id));
        if is_new {
            Ok(())
        } else {
            Err(Refusal::AlreadyExists)
        }
    }

    fn check_body(&self, what: &str, bytes: usize) -> Result<(), Refusal> {
        let limit = self.options.max_body_bytes.min(BodyAt::CAP_BYTES);
        if bytes <= limit {
            return Ok(());
        }
        let text = format!(
            "{what} of {} is larger than the limit of {}",
            exact_bytes(bytes),
            exact_bytes(limit)
        );
        Err(Refusal::TooLarge(text))
    }

    fn key_exists(&self, key: &Key) -> bool {
        self.state.keys.find(key).is_some()
            || self.state.keys.owner(key).is_some()
            || matches!(key, Key::Result(id) if self.state.messages.holds(id))
    }

    // --- applying

    /// Applies operations that were checked; returns those that were skipped.
    fn apply(&mut self, ops: Vec<Op>) -> Vec<u32> {
        let mut skipped = Vec::new();
        let slots = std::mem::take(&mut self.checked_slots);
        let mut leased = slots.iter().copied();
        let mut next_lease = || leased.next().expect("each lease was checked");
        for (index, op) in ops.into_iter().enumerate() {
            match op {
                Op::Ack { cost_us, .. } => {
                    let slot = next_lease();
                    let number = self.state.messages[slot].number();
                    self.counts.settled += 1;
                    self.record(&Event::Settled { number });
                    self.state.settle_message(slot, Some(cost_us));
                }
                Op::Release { reason, .. } => match reason {
                    ReleaseReason::Returned => self.return_message(next_lease()),
                    ReleaseReason::Crashed(reason) => self.crash(next_lease(), reason.into()),
                },
                Op::Move {
                    queue,
                    due,
                    patch,
                    cost_us,
                    ..
                } => {
                    let slot = next_lease();
                    let number = self.state.messages[slot].number();
                    let change = Change {
                        to: self.state.numbers + 1,
                        queue: match queue {
                            Some(queue) => self.state.names.intern(&queue),
                            None => self.state.queues[self.state.messages.queue(slot)].name,
                        },
                        due: due.map(|due| self.clocks.resolve_start(due)),
                        next_attempt: patch.next_attempt,
                        crashed: false,
                        note: patch.note.as_deref(),
                        expires_at: patch.expires_at.map(|due| self.clocks.resolve(due)),
                    };
                    self.record(&Event::Moved { number, change });
                    let note = patch.note.clone().map(own);
                    self.state.move_message(slot, &change, note, Some(cost_us));
                    let queue = self.state.messages.queue(slot);
                    self.make_room(queue);
                }
                Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key,
                } => {
                    // By the same transaction a key may have come or gone since it was checked, and the
                    // message's id was not checked if there was a key then.
                    let is_skipped = unless_key.as_ref().is_some_and(|key| {
                        self.key_exists(key) || self.state.messages.holds(&message.id)
                    });
                    if is_skipped {
                        skipped.push(index as u32);
                        continue;
                    }
                    self.publish(&queues, message, due, unless_key);
                }
                Op::Put {
                    key,
                    value,
                    ttl_ms,
                    group,
                } => {
                    let group = self.state.names.intern(&group);
                    let value = Value::new(value.status, own(value.body));
                    self.put(own_key(key), value, ttl_ms, group);
                }
                Op::Delete { key } => {
                    self.record(&Event::Removed { key: key.clone() });
                    self.state.remove_key(&key);
                }
                Op::Guard { .. } => {}
                Op::Hold {
                    join,
                    count,
                    messages,
                    policy,
                } => {
                    self.record(&Event::JoinOpened {
                        join,
                        count,
                        policy,
                    });
                    self.state.open_join(join, count, policy);
                    for (queue, message) in messages {
                        self.insert(&queue, message, Place::Held(join));
                    }
                }
                Op::Join {
                    join,
                    index,
                    succeeded,
                } => self.join(join, index, succeeded),
                Op::Fail { .. }
                | Op::Cancel { .. }
                | Op::RetryFailed { .. }
                | Op::DropFailed { .. }
                | Op::Unnamed => unreachable!("it was refused"),
                Op::Purge { queue } => self.purge(&queue),
                Op::Pause { queue } => self.pause(&queue, true),
                Op::Resume { queue } => self.pause(&queue, false),
                Op::Limit { queue, limits } => self.limit(&queue, limits),
            }
        }
        self.checked_slots = slots;
        skipped
    }

    fn publish(
        &mut self,
        queues: &[String],
        message: Message,
        due: Option<Due>,
        unless_key: Option<Key>,
    ) {
        let place = match due {
            Some(due) => Place::Delayed(self.clocks.resolve_start(due)),
            None => Place::Ready,
        };
        let slot = self.insert(&queues[0], message, place);
        let source = self.state.messages[slot].number();
        if let Some(key) = unless_key
            && !planted!("forget-claim")
        {
            self.record(&Event::Claimed {
                number: source,
                key: key.clone(),
            });
            self.state.claim(slot, own_key(key));
        }
        let copies = queues.len() - usize::from(queues.len() > 1 && planted!("lose-copy"));
        for queue in &queues[1..copies] {
            let queue = self.state.names.intern(queue);
            let number = self.state.numbers + 1;
            self.record(&Event::Copied {
                number,
                source,
                queue,
            });
            self.state.copy_message(slot, number, queue);
        }
        if self.state.queues.limited > 0 {
            for queue in queues {
                let name = self.state.names.intern(queue);
                let queue = self.state.queues.find_or_create(name);
                self.make_room(queue);
            }
        }
    }

    fn insert(&mut self, queue: &str, message: Message, place: Place) -> u32 {
        self.counts.published += 1;
        let head = MessageHead {
            number: self.state.numbers + 1,
            id: message.id,
            queue: self.state.names.intern(queue),
            task: self.state.names.intern(&message.task),
            priority: message.priority,
            max_deliveries: message.max_deliveries,
            crashes: message.crashes,
            redelivered: false,
            has_copies: false,
            attempt: message.attempt,
            enqueued_at: self.writer.time(),
            expires_at: message.expires_at.map(|due| self.clocks.resolve(due)),
            result_ttl_ms: message.result_ttl_ms,
            place,
        };
        let body_at = self.record_message(&head, &message.body);
        let kept = self.state.keeps_body(head.queue, place);
        let slot = self
            .state
            .insert_message(&head, body_at, kept.then(|| own(message.body)));
        for note in message.notes {
            self.record(&Event::Noted {
                number: head.number,
                note: &note,
            });
            self.state.add_note(slot, own(note));
        }
        slot
    }

    /// Records the full state of a message, but for what follows it; returns where its body stands.
    pub(crate) fn record_message(&mut self, head: &MessageHead, body: &[u8]) -> BodyAt {
        self.record(&Event::Message { head: *head, body });
        // The body is the last thing of the event.
        BodyAt::new(self.writer.len() - body.len(), body.len())
    }

    fn join(&mut self, id: JoinId, index: u32, succeeded: bool) {
        // The join may be over: its last member has arrived, or one that failed.
        let Some(slot) = self.state.joins.find(&id) else {
            return;
        };
        if !self.state.arrive(slot, index) {
            return;
        }
        let join = &mut self.state.joins[slot];
        let is_last = join.arrivals == join.count;
        let has_failed = !succeeded && join.policy == JoinPolicy::AllSucceeded;
        let held = std::mem::take(&mut join.held);
        self.record(&Event::Joined { join: id, index });
        if has_failed {
            for handle in &held {
                let messages = &self.state.messages;
                if messages.get(*handle).is_some()
                    && messages.state(handle.slot) == MessagePlace::Held(id)
                {
                    self.cancel(
                        handle.slot,
                        "a member of the group it waited for has failed",
                    );
                }
            }
        }
        self.state.joins[slot].held = held;
        if is_last || has_failed {
            let released = !has_failed;
            self.record(&Event::JoinEnded { join: id, released });
            let held = self.state.joins[slot].held.clone();
            self.state.end_join(slot, released);
            if planted!("release-twice") && released {
                for handle in held {
                    let queue = self.state.queues[self.state.messages.kind(handle.slot).queue].name;
                    let (source, number) = (handle.number, self.state.numbers + 1);
                    self.record(&Event::Copied {
                        number,
                        source,
                        queue,
                    });
                    self.state.copy_message(handle.slot, number, queue);
                }
            }
        }
    }

    fn purge(&mut self, queue: &str) {
        let Some(queue) = self
            .state
            .names
            .find(queue)
            .and_then(|name| self.state.queues.find(name))
        else {
            return;
        };
        let waiting = &self.state.queues[queue];
        if waiting.ready + waiting.delayed == 0 {
            return;
        }
        let messages = &self.state.messages;
        let waiting: Vec<u32> = messages
            .iter()
            .filter(|(_, entry)| entry.is_ready() || entry.is_delayed())
            .filter(|(_, entry)| messages.kind_of(entry).queue == queue)
            .map(|(slot, _)| slot)
            .collect();
        for slot in waiting {
            self.cancel(slot, "its queue was purged");
        }
    }

    /// Ends a message that waits, for a reason that whoever waits for its result is told.
    pub(crate) fn cancel(&mut self, slot: u32, reason: &'static str) {
        let number = self.state.messages[slot].number();
        // What is dead has had its value.
        if self.state.messages.queue(slot) != self.state.dead {
            self.end_with(
                slot,
                ValueStatus::Cancelled,
                Bytes::from_static(reason.as_bytes()),
            );
        }
        if !planted!("lose-purge") {
            self.record(&Event::Settled { number });
        }
        self.state.settle_message(slot, None);
    }

    fn pause(&mut self, queue: &str, paused: bool) {
        let name = self.state.names.intern(queue);
        let queue = self.state.queues.find_or_create(name);
        self.record(&Event::Paused {
            queue: name,
            paused,
        });
        self.state.pause(queue, paused);
    }
}

fn check_name(what: &str, name: &str) -> Result<(), Refusal> {
    match name.len() {
        0 => Err(Refusal::Invalid(format!("{what} is empty"))),
        1..=NAME_CAP_BYTES => Ok(()),
        bytes => Err(Refusal::TooLarge(format!(
            "{what} has {bytes} bytes; the limit is {NAME_CAP_BYTES}"
        ))),
    }
}

fn check_key(key: &Key) -> Result<(), Refusal> {
    match key {
        Key::Named(name) if name.is_empty() => Err(Refusal::Invalid("a key is empty".to_owned())),
        Key::Named(name) if name.len() > KEY_CAP_BYTES => {
            let bytes = name.len();
            Err(Refusal::TooLarge(format!(
                "a key has {bytes} bytes; the limit is {KEY_CAP_BYTES}"
            )))
        }
        _ => Ok(()),
    }
}

/// Exact, because what is refused may be larger than the limit by a byte; round limits read better too.
fn exact_bytes(bytes: usize) -> String {
    const MIB: usize = 1 << 20;
    match (bytes / MIB, bytes % MIB) {
        (1.., 0) => format!("{bytes} bytes ({} MiB)", bytes / MIB),
        _ => format!("{bytes} bytes"),
    }
}

/// Bytes that came in a frame share its memory, which may be much larger and would then live for as
/// long as they do. A part of a frame that is large itself may as well share it.
fn own(bytes: Bytes) -> Bytes {
    const SHARED_FROM_BYTES: usize = 256 << 10;
    match bytes.len() {
        0..SHARED_FROM_BYTES => Bytes::copy_from_slice(&bytes),
        _ => bytes,
    }
}

pub(crate) fn own_key(key: Key) -> Key {
    match key {
        Key::Result(id) => Key::Result(id),
        Key::Named(name) => Key::Named(own(name)),
    }
}

/// What an operation takes in memory, roughly.
fn op_bytes(op: &Op) -> usize {
    let message_bytes = |message: &Message| {
        let notes: usize = message.notes.iter().map(Bytes::len).sum();
        size_of::<Message>() + message.task.len() + message.body.len() + notes
    };
    size_of::<Op>()
        + match op {
            Op::Publish {
                queues, message, ..
            } => queues.iter().map(String::len).sum::<usize>() + message_bytes(message),
            Op::Put { value, group, .. } => value.body.len() + group.len(),
            Op::Hold { messages, .. } => messages
                .iter()
                .map(|(queue, message)| queue.len() + message_bytes(message))
                .sum(),
            Op::Move { patch, .. } => patch.note.as_ref().map_or(0, Bytes::len),
            _ => 0,
        }
}
