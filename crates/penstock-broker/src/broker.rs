//! The broker: inputs come in here, and records and outputs leave here.

use std::collections::VecDeque;

use penstock_message::{
    Durability, Key, KeyState, Lease, MessageId, Notice, Query, Receipt, SessionId,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::clock::{Clocks, When};
use crate::commits::own_key;
use crate::connections::{Connection, Welcome};
use crate::effects::{Effect, Effects, Rests};
use crate::messages::State as MessagePlace;
use crate::queues::Service;
use crate::records::{Event, Grant, Record, RecordWriter};
use crate::state::State;
use crate::timers::Timer;
use crate::{BrokerOptions, CloseReason, ConnId, Input, Now, Output, Position};

/// How many bytes of bodies go into one output, unless one alone has more: others get their turn.
const OUTPUT_TARGET_BYTES: usize = 1 << 20;
/// No client gets there by counting; one that says it did would make numbers overflow.
const LAST_SEQ: u64 = 1 << 62;
/// A worker serves a few queues. The list is compared with itself, so it must not be long.
const QUEUES_CAP: usize = 1024;
/// Names of clients are shown to people; longer ones are cut.
const NAME_SHOWN_BYTES: usize = 255;
/// Names of queues, tasks and groups.
pub(crate) const NAME_CAP_BYTES: usize = 255;

#[derive(Debug)]
pub struct Broker {
    pub(crate) options: BrokerOptions,
    pub(crate) epoch: u32,
    last_life: LastLife,
    pub(crate) clocks: Clocks,
    pub(crate) state: State,
    pub(crate) connections: FxHashMap<ConnId, Connection>,
    pub(crate) effects: Effects,
    /// The record that is being written.
    pub(crate) writer: RecordWriter,
    records: VecDeque<Record>,
    next_position: Position,
    /// What an effect waits for that rests on everything decided so far.
    pub(crate) staged: Rests,
    /// Sessions with decisions that are not safe yet.
    unconfirmed: Vec<u32>,
    /// Connections that want work, in turn.
    pub(crate) ring: VecDeque<ConnId>,
    /// Connections that have something to be sent, in turn.
    line: VecDeque<ConnId>,
    /// Outputs that wait for nothing and belong before the others.
    pub(crate) outbox: VecDeque<Output>,
    pub(crate) staged_parts_bytes: usize,
    /// How many transactions were checked.
    pub(crate) checks: u64,
    pub(crate) new_ids: FxHashSet<MessageId>,
    /// Slots of the leases that the transaction at hand settles, in order.
    pub(crate) checked_slots: Vec<u32>,
}

/// What the journal tells of the broker that wrote it last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastLife {
    pub(crate) epoch: u32,
    /// The highest grant; those above it, of the same epoch, were lost.
    pub(crate) grants: u64,
}

impl Broker {
    pub(crate) fn recovered(
        options: BrokerOptions,
        state: State,
        clocks: Clocks,
        epoch: u32,
        last_life: LastLife,
        last: Position,
    ) -> Self {
        let mut broker = Self {
            options,
            epoch,
            last_life,
            clocks,
            state,
            connections: FxHashMap::default(),
            effects: Effects::new(last),
            writer: RecordWriter::default(),
            records: VecDeque::new(),
            next_position: Position(last.0 + 1),
            staged: Rests::default(),
            unconfirmed: Vec::new(),
            ring: VecDeque::new(),
            line: VecDeque::new(),
            outbox: VecDeque::new(),
            staged_parts_bytes: 0,
            checks: 0,
            new_ids: FxHashSet::default(),
            checked_slots: Vec::new(),
        };
        broker.watch_unserved();
        broker
    }

    /// Something happened at this time.
    pub fn handle(&mut self, now: Now, input: Input) {
        self.handle_deadline(now);
        match input {
            Input::Connected {
                conn,
                session,
                name,
                heartbeat_ms,
                last_seq,
                leases,
            } => {
                self.connect(conn, session, &name, heartbeat_ms, last_seq, &leases);
            }
            Input::Disconnected { conn, clean } => self.disconnect(conn, clean),
            Input::Commit {
                conn,
                first_seq,
                durability,
                txs,
            } => {
                self.commit(conn, first_seq, durability, txs);
            }
            Input::CommitPart {
                conn,
                seq,
                durability,
                tx,
                last,
            } => {
                self.commit_part(conn, seq, durability, tx, last);
            }
            Input::Consume {
                conn,
                queues,
                add_credit,
            } => self.consume(conn, &queues, add_credit),
            Input::StopConsuming { conn } => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.credit = 0;
                }
            }
            Input::Watch { conn, keys } => self.watch(conn, keys),
            Input::Unwatch { conn, keys } => {
                if let Some(connection) = self.connections.get(&conn) {
                    for key in &keys {
                        self.state.keys.unwatch(key, connection.session);
                    }
                }
            }
            Input::Query { conn, id, query } => self.query(conn, id, &query),
            Input::Writable { conn, writable } => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.writable = writable;
                    self.seek_work(conn);
                    self.stand_in_line(conn);
                }
            }
            Input::Report { conn, slots, busy } => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    (connection.slots, connection.busy) = (slots, busy);
                    connection.is_worker = true;
                }
            }
        }
        self.watch_unserved();
        self.state.sweep();
    }

    /// The time that `next_deadline` named has come, or any other.
    pub fn handle_deadline(&mut self, now: Now) {
        self.clocks.advance(now);
        self.run_timers();
    }

    /// The journal has written all records up to this one to the operating system.
    pub fn handle_written(&mut self, through: Position) {
        assert!(
            through < self.next_position,
            "the journal wrote what it was never given"
        );
        self.effects.written = self.effects.written.max(through);
        self.release_effects();
    }

    /// The journal has synced all records up to this one to disk.
    pub fn handle_durable(&mut self, through: Position) {
        assert!(
            through < self.next_position,
            "the journal synced what it was never given"
        );
        self.effects.written = self.effects.written.max(through);
        self.effects.durable = self.effects.durable.max(through);
        self.release_effects();
    }

    /// The next record for the journal. To be called until `None` once inputs have been handled: this
    /// is when work is handed out.
    pub fn poll_record(&mut self) -> Option<Record> {
        if self.records.is_empty() {
            self.hand_out();
        }
        self.records.pop_front()
    }

    /// What to carry out next. To be called until `None` after records have been polled, and after
    /// the journal has come further.
    pub fn poll_output(&mut self) -> Option<Output> {
        if let Some(output) = self.outbox.pop_front() {
            return Some(output);
        }
        while let Some(conn) = self.line.front().copied() {
            if let Some(output) = self.output_of(conn) {
                return Some(output);
            }
            self.line.pop_front();
            if let Some(connection) = self.connections.get_mut(&conn) {
                connection.in_line = false;
            }
        }
        None
    }

    /// When `handle_deadline` wants to be called, on the monotonic clock. It changes with every call.
    pub fn next_deadline(&self) -> Option<u64> {
        self.state.timers.next_deadline(&self.clocks)
    }

    /// The position of the next record that will be polled or written.
    pub fn next_position(&self) -> Position {
        self.records
            .front()
            .map_or(self.next_position, |record| record.position)
    }

    /// What the journal needs to hold all that is alive, roughly.
    pub fn live_bytes(&self) -> u64 {
        self.state.live_bytes
    }

    /// What was decided on a transaction, whether or not its client may be told yet; `None`: nothing.
    /// For whoever watches the broker from beside it, as the simulator does.
    pub fn decision(&self, session: &SessionId, seq: u64) -> Option<Receipt> {
        let session = &self.state.sessions[self.state.sessions.find(session)?];
        (seq <= session.applied).then(|| session.receipt(seq))
    }

    // --- records

    /// What follows, until `seal`, stands in one record.
    pub(crate) fn begin(&mut self, durability: Durability) {
        debug_assert!(self.writer.is_empty());
        self.writer.stamp(self.epoch, self.clocks.wall());
        self.state.position = self.next_position;
        self.state.rests = Rests::on(self.next_position, durability);
    }

    pub(crate) fn record(&mut self, event: &Event<'_>) {
        self.writer.push(&self.state.names, event);
    }

    /// Ends the record, and tells watchers what it changed.
    pub(crate) fn seal(&mut self, durability: Durability) {
        if !self.writer.is_empty() {
            let position = self.next_position;
            self.records.push_back(Record {
                position,
                durability,
                bytes: self.writer.take(),
            });
            self.staged.add(position, durability);
            self.next_position = Position(position.0 + 1);
        }
        self.tell_watchers();
        self.watch_unserved();
    }

    /// Sets a timer for each queue that has come to have work and nobody to take it.
    fn watch_unserved(&mut self) {
        for queue in std::mem::take(&mut self.state.newly_unserved) {
            if let Service::Missing { generation } = self.state.queues[queue].service {
                let at = self.clocks.steady() + self.options.unserved_ms;
                self.state
                    .timers
                    .set(When::steady(at), Timer::Unserved { queue, generation });
            }
        }
    }

    // --- effects

    /// Lets the effect out as soon as it is safe.
    pub(crate) fn effect(&mut self, rests: Rests, effect: Effect) {
        if let Some(effect) = self.effects.hold(rests, effect) {
            self.let_out(effect);
        }
    }

    fn let_out(&mut self, effect: Effect) {
        let conn = match &effect {
            Effect::Deliver { conn, .. }
            | Effect::Value { conn, .. }
            | Effect::Answer { conn, .. } => *conn,
        };
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        match effect {
            Effect::Deliver { message, grant, .. } => {
                connection.deliveries.push_back((message, grant))
            }
            Effect::Value { key, state, .. } => {
                // It may have been answered meanwhile, by a record that waited for less.
                let is_stale = state == KeyState::Pending
                    && !self.state.keys.watchers(&key).contains(&connection.session);
                if !is_stale {
                    connection.values.push_back((key, state));
                }
            }
            Effect::Answer { id, answer, .. } => connection.answers.push_back((id, answer)),
        }
        self.stand_in_line(conn);
    }

    fn release_effects(&mut self) {
        while let Some(effect) = self.effects.release() {
            self.let_out(effect);
        }
        let mut unconfirmed = std::mem::take(&mut self.unconfirmed);
        unconfirmed.retain(|index| self.confirm(*index));
        self.unconfirmed = unconfirmed;
    }

    /// Tells the session what has become safe; true while there is more to come.
    fn confirm(&mut self, index: u32) -> bool {
        let Some(session) = self.state.sessions.get_mut(index) else {
            return false;
        };
        let has_news = session.confirm(&self.effects);
        let is_waiting = !session.is_all_confirmed();
        session.is_listed &= is_waiting;
        if has_news && let Some(conn) = session.conn {
            self.stand_in_line(conn);
        }
        is_waiting
    }

    /// After a decision was added to the session.
    pub(crate) fn confirm_when_safe(&mut self, index: u32) {
        if self.confirm(index)
            && !std::mem::replace(&mut self.state.sessions[index].is_listed, true)
        {
            self.unconfirmed.push(index);
        }
    }

    pub(crate) fn stand_in_line(&mut self, conn: ConnId) {
        if let Some(connection) = self.connections.get_mut(&conn)
            && !connection.in_line
        {
            connection.in_line = true;
            self.line.push_back(conn);
        }
    }

    /// The next thing that this connection can be sent.
    fn output_of(&mut self, conn: ConnId) -> Option<Output> {
        let connection = self.connections.get_mut(&conn)?;
        if let Some(Welcome {
            applied_through,
            forgotten,
            leases,
        }) = connection.welcome.take()
        {
            return Some(Output::Welcome {
                conn,
                applied_through,
                forgotten,
                leases,
            });
        }
        let session = &mut self.state.sessions[connection.session];
        if let Some(confirmation) = session.take_confirmation() {
            session.forget_receipts();
            return Some(Output::Confirm {
                conn,
                through: confirmation.through,
                receipts: confirmation.receipts,
                early: confirmation.early,
            });
        }
        if let Some((id, answer)) = connection.answers.pop_front() {
            return Some(Output::Answer { conn, id, answer });
        }
        if !connection.writable {
            return None;
        }
        if !connection.values.is_empty() {
            let mut bytes = 0;
            let mut values = Vec::with_capacity(connection.values.len().min(1024));
            while bytes < OUTPUT_TARGET_BYTES
                && let Some((key, state)) = connection.values.pop_front()
            {
                if let KeyState::Present(value) = &state {
                    bytes += value.body.len();
                }
                values.push((key, state));
            }
            return Some(Output::Values { conn, values });
        }
        let mut bytes = 0;
        let mut deliveries = Vec::with_capacity(connection.deliveries.len().min(1024));
        while bytes < OUTPUT_TARGET_BYTES
            && let Some((message, grant)) = connection.deliveries.pop_front()
        {
            // The lease may have ended before the delivery could leave.
            if let Some(delivery) = self.state.delivery(message, grant) {
                bytes += delivery.message.body.len();
                deliveries.push(delivery);
            }
        }
        (!deliveries.is_empty()).then_some(Output::Deliver { conn, deliveries })
    }

    // --- keys

    fn watch(&mut self, conn: ConnId, keys: Vec<Key>) {
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
            return (KeyState::Present(stored.value.clone()), stored.rests);
        }
        let is_pending = match key {
            // What is in the dead-letter queue has ended: it has had its value.
            Key::Result(id) => {
                let dead = self.state.dead;
                self.state
                    .messages
                    .copies(id)
                    .any(|slot| self.state.messages[slot].queue != dead)
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
    fn tell_watchers(&mut self) {
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

    // --- sessions

    fn connect(
        &mut self,
        conn: ConnId,
        id: SessionId,
        name: &str,
        heartbeat_ms: u64,
        last_seq: u64,
        presented: &[Lease],
    ) {
        if self.connections.contains_key(&conn) {
            return self.close(
                conn,
                CloseReason::Protocol("a connection says hello only once".to_owned()),
            );
        }
        if last_seq > LAST_SEQ {
            let reason = format!("transaction {last_seq} is past the last number, {LAST_SEQ}");
            self.outbox.push_back(Output::Close {
                conn,
                reason: CloseReason::Protocol(reason),
            });
            return;
        }
        let known = self.state.sessions.find(&id);
        if let Some(older) = known.and_then(|index| self.state.sessions[index].conn) {
            self.outbox.push_back(Output::Close {
                conn: older,
                reason: CloseReason::Fenced,
            });
            self.drop_connection(older);
        }
        self.begin(Durability::None);
        let heartbeat_ms = match heartbeat_ms {
            0 => self.options.default_heartbeat_ms,
            asked => asked,
        };
        let name = cut(name, NAME_SHOWN_BYTES);
        let (number, applied) = match known {
            Some(index) => (
                self.state.sessions[index].number,
                self.state.sessions[index].applied,
            ),
            None => (self.state.sessions.numbers + 1, last_seq),
        };
        self.record(&Event::SessionOpened {
            number,
            session: id,
            heartbeat_ms,
            applied,
            name,
        });
        let index = self
            .state
            .open_session(number, id, heartbeat_ms, applied, name);
        self.state.sessions.next_generation(index);
        if known.is_some() {
            self.state.keys.unwatch_all(index);
        }
        let leases = self.keep_leases(index, presented);
        let session = &mut self.state.sessions[index];
        session.conn = Some(conn);
        session.may_skip_through = last_seq;
        session.begin_connection();
        let welcome = Welcome {
            applied_through: session.told,
            forgotten: known.is_none() && last_seq > 0,
            leases,
        };
        self.connections
            .insert(conn, Connection::new(index, welcome));
        self.stand_in_line(conn);
        self.seal(Durability::None);
    }

    /// Of the leases that a client presents, those that hold. Those that it holds and does not present
    /// go back: it does not work on them.
    fn keep_leases(&mut self, session: u32, presented: &[Lease]) -> Vec<Lease> {
        let mut kept = Vec::with_capacity(presented.len());
        self.checks += 1;
        for lease in presented {
            if let Some(slot) = self.state.messages.find_lease(lease) {
                let entry = &mut self.state.messages[slot];
                if matches!(entry.state, MessagePlace::Leased(held) if held.session == session) {
                    entry.checked_by = self.checks;
                    kept.push(*lease);
                }
            } else if let Some(slot) = self.find_lost_grant(lease) {
                let number = self.state.messages[slot].number;
                let grant = Grant {
                    epoch: lease.epoch,
                    number: lease.grant,
                    started_at: self.clocks.wall(),
                };
                let session_number = self.state.sessions[session].number;
                self.record(&Event::Granted {
                    number,
                    session: session_number,
                    grant,
                });
                self.state.grant(slot, session, grant);
                self.state.messages[slot].checked_by = self.checks;
                kept.push(*lease);
            }
        }
        let checks = self.checks;
        let mut given_up = self.state.sessions[session].leases.clone();
        given_up.retain(|slot| self.state.messages[*slot].checked_by != checks);
        for slot in given_up {
            self.return_message(slot);
        }
        kept
    }

    /// A grant of before a crash, whose record was lost with it. Nobody else runs the message, so the
    /// client that does may go on.
    ///
    /// A grant that the journal knows of was not lost: its message has been settled, moved or handed
    /// back since, and the client only has not heard that yet. And of several copies nobody can tell
    /// which one it was.
    fn find_lost_grant(&self, lease: &Lease) -> Option<u32> {
        let LastLife { epoch, grants } = self.last_life;
        if lease.epoch != epoch || lease.grant <= grants {
            return None;
        }
        let copies = self.state.messages.copies(&lease.message);
        let mut candidates = copies.filter(|slot| {
            let entry = &self.state.messages[*slot];
            entry.recovered && entry.state == MessagePlace::Ready
        });
        let slot = candidates.next()?;
        candidates.next().is_none().then_some(slot)
    }

    fn disconnect(&mut self, conn: ConnId, clean: bool) {
        let Some(index) = self.drop_connection(conn) else {
            return;
        };
        self.begin(Durability::None);
        if clean {
            for slot in self.state.sessions[index].leases.clone() {
                self.return_message(slot);
            }
        }
        let left_at = self.clocks.steady();
        let number = self.state.sessions[index].number;
        self.record(&Event::SessionLeft {
            number,
            at: left_at,
        });
        self.state.sessions[index].left_at = Some(left_at);
        self.state
            .wait_for_session(index, left_at, left_at, self.options.session_memory_ms);
        if clean {
            self.state.keys.unwatch_all(index);
        }
        self.seal(Durability::None);
    }

    pub(crate) fn close(&mut self, conn: ConnId, reason: CloseReason) {
        self.disconnect(conn, false);
        self.outbox.push_back(Output::Close { conn, reason });
    }

    /// Forgets the connection. Deliveries that never left return at once: nobody can have begun them.
    fn drop_connection(&mut self, conn: ConnId) -> Option<u32> {
        let connection = self.connections.remove(&conn)?;
        for queue in connection.queues {
            self.state.queues[queue].consumers -= 1;
            self.state.review_service(queue);
        }
        let index = connection.session;
        let session = &mut self.state.sessions[index];
        session.conn = None;
        if let Some(staged) = session.staged.take() {
            self.staged_parts_bytes -= staged.bytes;
        }
        let mut unsent = session.leases.clone();
        unsent.retain(|slot| {
            matches!(self.state.messages[*slot].state, MessagePlace::Leased(lease) if !lease.sent)
        });
        self.begin(Durability::None);
        for slot in unsent {
            self.return_message(slot);
        }
        self.seal(Durability::None);
        Some(index)
    }

    /// A lease ends without anything having gone wrong.
    pub(crate) fn return_message(&mut self, slot: u32) {
        let entry = &self.state.messages[slot];
        let number = entry.number;
        let redelivered = matches!(entry.state, MessagePlace::Leased(lease) if lease.sent);
        self.record(&Event::Returned {
            number,
            redelivered,
        });
        self.state.return_message(slot, redelivered);
    }

    // --- consuming

    fn consume(&mut self, conn: ConnId, queues: &[String], add_credit: u32) {
        if let Err(reason) = check_queues(queues) {
            return self.close(conn, CloseReason::Protocol(reason));
        }
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        connection.is_worker = true;
        connection.credit += u64::from(add_credit);
        let state = &mut self.state;
        let is_same = connection.queues.len() == queues.len()
            && connection
                .queues
                .iter()
                .zip(queues)
                .all(|(index, name)| state.names.text(state.queues[*index].name) == name);
        if !is_same && !queues.is_empty() {
            let mut chosen = Vec::with_capacity(queues.len());
            for queue in queues {
                let name = state.names.intern(queue);
                let index = state.queues.find_or_create(name);
                if !chosen.contains(&index) {
                    chosen.push(index);
                    state.queues[index].consumers += 1;
                }
            }
            for index in std::mem::replace(&mut connection.queues, chosen) {
                state.queues[index].consumers -= 1;
                state.review_service(index);
            }
            for index in connection.queues.clone() {
                state.review_service(index);
            }
            connection.next_queue = 0;
        }
        self.seek_work(conn);
    }

    /// Puts the connection into the ring if it wants work.
    fn seek_work(&mut self, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if connection.wants_work() {
            self.state.has_new_work = true;
            if !std::mem::replace(&mut connection.in_ring, true) {
                self.ring.push_back(conn);
            }
        }
    }

    fn query(&mut self, conn: ConnId, id: u64, query: &Query) {
        let answer = match query {
            Query::Status => penstock_message::Answer::Status(self.status()),
            Query::Message(id) => penstock_message::Answer::Message(self.message_info(id)),
            Query::Stop => penstock_message::Answer::Refused(
                "only the process around a broker can end it".to_owned(),
            ),
        };
        self.effect(self.staged, Effect::Answer { conn, id, answer });
    }

    pub(crate) fn notice(&mut self, notice: Notice) {
        self.outbox.push_back(Output::Notice(notice));
    }
}

fn check_queues(queues: &[String]) -> Result<(), String> {
    if queues.len() > QUEUES_CAP {
        let asked = queues.len();
        return Err(format!(
            "a connection takes from {asked} queues; the limit is {QUEUES_CAP}"
        ));
    }
    match queues
        .iter()
        .find(|queue| queue.is_empty() || queue.len() > NAME_CAP_BYTES)
    {
        Some(queue) => Err(format!(
            "a queue's name has from 1 to {NAME_CAP_BYTES} bytes, not {}",
            queue.len()
        )),
        None => Ok(()),
    }
}

/// The longest beginning of the text that has no more than so many bytes.
fn cut(text: &str, bytes: usize) -> &str {
    let ends = (0..=bytes.min(text.len())).rev();
    let end = ends.into_iter().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}
