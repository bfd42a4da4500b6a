//! The broker: takes inputs, and returns records and outputs.

use std::collections::VecDeque;

use penstock_faults::perhaps;
use penstock_message::{
    Answer, BrokerCounts, Durability, JoinId, Key, KeyState, MessageId, Notice, Query, Receipt,
    SeededState, SessionId, Space,
};
use rustc_hash::FxHashMap;

use crate::bodies::reading::Reading;
use crate::bulk_operations::Operations;
use crate::chores::Chores;
use crate::clock::{ClockTime, Clocks};
use crate::commits::Checking;
use crate::connections::{ClientConnection, UnsentDelivery, Welcome};
use crate::consumers::QueueConsumers;
use crate::held_effects::{Effect, HeldEffects, SafeAfter};
use crate::queues::queue::Service;
use crate::queues::tally::TallyStep;
use crate::records::{ENDED_AT_ONCE, Record, RecordEvent, RecordWriter};
use crate::relay::Relay;
use crate::state::BrokerState;
use crate::timers::Timer;
use crate::{BrokerOptions, ConnId, Input, Now, Output, Position};

/// Maximum bytes of bodies in one output, unless a single body is larger: others get their turn.
const OUTPUT_TARGET_BYTES: usize = 1 << 20;
/// Maximum number of stop orders in one output.
const CANCELS_AT_ONCE: usize = 1024;

#[derive(Debug)]
pub struct Broker {
    pub(crate) options: BrokerOptions,
    pub(crate) epoch: u32,
    /// Last grant that the journal knew at the start, as (epoch, number). Later ones were lost.
    pub(crate) last_grant: (u32, u64),
    pub(crate) clocks: Clocks,
    pub(crate) state: BrokerState,
    pub(crate) connections: FxHashMap<ConnId, ClientConnection>,
    pub(crate) effects: HeldEffects,
    /// Writer of the current record.
    pub(crate) writer: RecordWriter,
    records: VecDeque<Record>,
    next_position: Position,
    /// Positions that all decisions so far depend on. New effects wait for them.
    pub(crate) everything: SafeAfter,
    /// Sessions with decisions that are not yet safe.
    unconfirmed: Vec<u32>,
    pub(crate) consumers: QueueConsumers,
    /// Connections that have output to send, in turn.
    output_queue: VecDeque<ConnId>,
    /// Outputs that wait for nothing and go before all others.
    pub(crate) outbox: VecDeque<Output>,
    pub(crate) reading: Reading,
    pub(crate) relay: Relay,
    pub(crate) pending_parts_bytes: usize,
    /// Number of checked transactions.
    pub(crate) checks: u64,
    /// Memory reused by the next check.
    pub(crate) checking: Option<Box<Checking>>,
    pub(crate) spare_leased: Vec<u32>,
    /// Members that the current transaction may have added to unsealed joins, by join.
    pub(crate) grown: Vec<(JoinId, u32)>,
    /// Messages that the current transaction has added to cancelled workflows, and those workflows.
    pub(crate) latecomers: Vec<(MessageId, MessageId)>,
    pub(crate) chores: Chores,
    pub(crate) operations: Operations,
    /// Work that may still be done before the next poll: see `chores.rs`.
    pub(crate) budget: usize,
    /// Number of events that the broker itself has added to the current record.
    pub(crate) added: usize,
    pub(crate) space: Space,
    /// Whether operations may continue even on the last reserve of the disk.
    pub(crate) steps_fit: bool,
    /// Fewest jobs that ran at a time since the disk has had no space for leases.
    pub(crate) fewest_running: Option<usize>,
    /// Bytes of records that fit on the disk, if the shell has checked.
    pub(crate) room_bytes: u64,
    /// Memory limit, while the process has reached it.
    pub(crate) memory_is_full: Option<u64>,
    pub(crate) counts: BrokerCounts,
    /// Whether the current record must be on disk, whatever durability its transactions requested.
    must_be_safe: bool,
}

impl Broker {
    pub(crate) fn recovered(
        options: BrokerOptions,
        state: BrokerState,
        clocks: Clocks,
        epoch: u32,
        last_grant: (u32, u64),
        last: Position,
    ) -> Self {
        let hashing = SeededState::new(options.hash_seed);
        let mut broker = Self {
            options,
            epoch,
            last_grant,
            clocks,
            state,
            connections: FxHashMap::default(),
            effects: HeldEffects::new(last),
            writer: RecordWriter::default(),
            records: VecDeque::new(),
            next_position: Position(last.0 + 1),
            everything: SafeAfter::default(),
            unconfirmed: Vec::new(),
            consumers: QueueConsumers::default(),
            output_queue: VecDeque::new(),
            outbox: VecDeque::new(),
            reading: Reading::default(),
            relay: Relay::default(),
            pending_parts_bytes: 0,
            checks: 0,
            checking: Some(Box::new(Checking::new(hashing))),
            spare_leased: Vec::new(),
            grown: Vec::new(),
            latecomers: Vec::new(),
            chores: Chores::default(),
            operations: Operations::default(),
            budget: ENDED_AT_ONCE,
            added: 0,
            space: Space::Plenty,
            steps_fit: false,
            fewest_running: None,
            room_bytes: u64::MAX,
            memory_is_full: None,
            counts: BrokerCounts::default(),
            must_be_safe: false,
        };
        broker.resume_use();
        broker.resume_chores();
        broker.resume_schedules();
        broker.state.resume_charges();
        broker.watch_unserved();
        broker
    }

    /// Handles an input that happened at time `now`.
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
            Input::Consume { conn, consume } => self.consume(conn, &consume),
            Input::StopConsuming { conn, consumer } => self.stop_consuming(conn, consumer),
            Input::Watch { conn, keys, waiter } => self.watch(conn, keys, waiter),
            Input::WaitOver { conn, keys, waiter } => self.end_waits(conn, Some(waiter), &keys),
            Input::Unwatch { conn, keys } => {
                self.end_waits(conn, None, &keys);
                if let Some(connection) = self.connections.get(&conn) {
                    for key in &keys {
                        self.state.keys.watchers.unwatch(key, connection.session);
                    }
                }
            }
            Input::Query { conn, id, query } => self.query(conn, id, &query),
            Input::Writable { conn, writable } => {
                if let Some(connection) = self.connections.get_mut(&conn) {
                    connection.writable = writable;
                    self.join_rings_of(conn);
                    self.enqueue_output(conn);
                }
            }
            Input::Space(space) => self.space_changed(space),
            Input::StepsFit(fit) => self.steps_fit = fit,
            Input::Room { bytes } => self.room_bytes = bytes,
            Input::Memory {
                is_full,
                limit_bytes,
            } => self.memory_changed(is_full, limit_bytes),
            Input::Report { conn, report } => {
                self.note_report(conn, report);
            }
            Input::Progress { conn, progress } => self.note_progress(conn, progress),
            Input::Reply { conn, ask, reply } => self.reply(conn, ask, reply),
        }
        self.watch_unserved();
        self.state.sweep();
    }

    /// Handles the time that `next_deadline` returned, or any other.
    pub fn handle_deadline(&mut self, now: Now) {
        self.clocks.advance(now);
        self.state.queues.now_ms = self.clocks.steady();
        // No name is in use between inputs.
        self.state.names.sweep();
        let now = TallyStep::at(self.clocks.steady());
        if self.state.queues.now != now {
            self.state.add_counts();
            self.state.queues.now = now;
        }
        if self.clocks.have_stepped() {
            self.clocks.journaled();
            // Synced although no client waits for it: after a crash all countdowns depend on it.
            self.begin(Durability::Disk);
            self.record_clocks();
            self.seal(Durability::Disk);
            self.state.schedules.review();
        }
        self.run_timers();
        self.end_late_asks();
        self.refuse_stalled_waits();
    }

    /// Notes that the journal has written all records up to `through` to the operating system.
    pub fn handle_written(&mut self, through: Position) {
        assert!(
            through < self.next_position,
            "the journal wrote what it was never given"
        );
        self.effects.written = self.effects.written.max(through);
        self.release_effects();
    }

    /// Notes that the journal has synced all records up to `through` to disk.
    pub fn handle_durable(&mut self, through: Position) {
        assert!(
            through < self.next_position,
            "the journal synced what it was never given"
        );
        self.effects.written = self.effects.written.max(through);
        self.effects.durable = self.effects.durable.max(through);
        self.state.durable = self.effects.durable;
        self.state.cool();
        self.reading.advance();
        self.release_effects();
    }

    /// Returns the next record for the journal. Call it until it returns `None` once inputs have been handled: this is
    /// when work is handed out.
    #[must_use = "the record is returned once"]
    pub fn poll_record(&mut self) -> Option<Record> {
        if self.records.is_empty() {
            self.hand_out();
        }
        if self.records.is_empty() {
            self.step();
        }
        self.records.pop_front()
    }

    /// Returns the last record that an output waits for: a value that somebody watches, a delivery, an answer. Those
    /// before it must not wait either.
    pub fn awaited(&self) -> Position {
        self.effects.awaited
    }

    /// Returns the next output to carry out. Call it until it returns `None` after records have been polled, and
    /// whenever the journal has progressed.
    #[must_use = "the output is returned once"]
    pub fn poll_output(&mut self) -> Option<Output> {
        if let Some(output) = self.outbox.pop_front() {
            return Some(output);
        }
        while let Some(conn) = self.output_queue.front().copied() {
            if let Some(output) = self.output_of(conn) {
                return Some(output);
            }
            self.output_queue.pop_front();
            if let Some(connection) = self.connections.get_mut(&conn) {
                connection.is_enqueued = false;
            }
        }
        self.budget = ENDED_AT_ONCE;
        None
    }

    /// Returns the time to call `handle_deadline`, on the monotonic clock. Any call may change it.
    pub fn next_deadline(&self) -> Option<u64> {
        // A broker that has just started may have found another boot of the machine. It must not wait for a client before
        // it records that: should the wall clock be set and the broker be killed, its successor would continue from the
        // wall clock.
        if self.has_chores() || self.clocks.is_unrecorded() {
            return Some(self.clocks.mono());
        }
        let asks = self.relay.next_deadline();
        let looks = self.consumers.next_look;
        let asks = asks.into_iter().chain(looks).min();
        if self.space == Space::NoSettlements {
            // Timers may need space. They are checked again once there is some.
            return asks;
        }
        let timers = self.state.timers.next_deadline(&self.clocks);
        timers.into_iter().chain(asks).min()
    }

    /// Returns the position of the last record that was made, whether or not it was polled. For the simulator.
    pub fn last_position(&self) -> Position {
        Position(self.next_position.0 - 1)
    }

    /// Returns the position of the next record to be polled or written.
    pub fn next_position(&self) -> Position {
        self.records
            .front()
            .map_or(self.next_position, |record| record.position)
    }

    /// Returns roughly how many bytes the journal needs to hold all live things.
    pub fn live_bytes(&self) -> u64 {
        self.state.live_bytes
    }

    /// Returns the decision on a transaction, whether or not its client may learn it yet; `None` if there is none. For
    /// observers such as the simulator.
    pub fn decision(&self, session: &SessionId, seq: u64) -> Option<Receipt> {
        let session = &self.state.sessions[self.state.sessions.find(session)?];
        (seq <= session.applied).then(|| session.receipt(seq))
    }

    /// Whether the message has been handed out, even if its delivery still waits for its body or the disk. For
    /// observers such as the simulator.
    pub fn is_handed_out(&self, id: &MessageId) -> bool {
        let messages = &self.state.messages;
        messages.copies(id).any(|slot| messages[slot].is_leased())
    }

    /// Returns the epoch and number of the last hand-out. For the simulator.
    pub fn last_hand_out(&self) -> (u32, u64) {
        (self.epoch, self.state.grants)
    }

    /// Whether a message with this id is kept as a failed job. For tests and the simulator.
    pub fn has_failed(&self, id: &MessageId) -> bool {
        let messages = &self.state.messages;
        messages.copies(id).any(|slot| messages[slot].is_failed())
    }

    /// Whether a message with this id exists, in any state. For the simulator.
    pub fn holds(&self, id: &MessageId) -> bool {
        self.state.messages.holds(id)
    }

    /// Returns the queue, the task and the priority of an existing message. For the simulator.
    pub fn line_of(&self, id: &MessageId) -> Option<(&str, &str, u8)> {
        let (messages, names) = (&self.state.messages, &self.state.names);
        let slot = messages.copies(id).next()?;
        let head = messages.shared_head(slot);
        let queue = names.text(self.state.queues[head.queue].name);
        Some((queue, names.text(head.task), head.priority))
    }

    /// Returns how often an existing message may be delivered. For the simulator.
    pub fn max_deliveries_of(&self, id: &MessageId) -> Option<u8> {
        let messages = &self.state.messages;
        let slot = messages.copies(id).next()?;
        Some(messages.shared_head(slot).max_deliveries)
    }

    /// Whether the worker of this message was asked to stop it. For the simulator.
    pub fn is_to_stop(&self, id: &MessageId) -> bool {
        let messages = &self.state.messages;
        messages
            .copies(id)
            .any(|slot| messages.asked(slot).is_some())
    }

    /// Whether a message with this id is there, or its result.
    pub fn knows(&self, id: &MessageId) -> bool {
        let messages = &self.state.messages;
        let has_result = self.state.keys.value(&Key::Result(*id)).is_some();
        has_result || messages.holds(id) || messages.find_ended(id).is_some()
    }

    /// Returns the live message that owns a key. For the simulator.
    pub fn owner_of(&self, key: &Key) -> Option<MessageId> {
        let owner = self.state.keys.owner(key)?;
        self.state.messages.get(owner).map(|entry| entry.id)
    }

    /// Returns the members of a join that have reported their ends, and whether any of them has failed the join.
    /// Returns `None` if the join does not exist or has released the messages it held. For the simulator.
    pub fn join_members(&self, id: &JoinId) -> Option<(Vec<u32>, bool)> {
        let join = &self.state.joins[self.state.joins.find(id)?];
        if join.is_released {
            return None;
        }
        let words = join.arrived().into_iter();
        let arrived = words.flat_map(|(word, bits)| {
            let bits = (0..64).filter(move |bit| bits >> bit & 1 == 1);
            bits.map(move |bit| word * 64 + bit)
        });
        Some((arrived.collect(), join.is_over))
    }

    /// Whether failed jobs were dropped since the broker started: for lack of space, for their age, or because there
    /// were too many. For the simulator.
    pub fn has_dropped_failed(&self) -> bool {
        self.state.failed.dropped > 0
    }

    // --- records

    /// Begins a record. Everything until `seal` goes into it.
    pub(crate) fn begin(&mut self, durability: Durability) {
        debug_assert!(self.writer.is_empty());
        self.added = 0;
        self.writer.stamp(self.epoch, self.clocks.wall());
        self.state.position = self.next_position;
        self.state.safe_after = SafeAfter::on(self.next_position, durability);
    }

    pub(crate) fn record(&mut self, event: &RecordEvent<'_>) {
        self.writer.push(&self.state.names, event);
    }

    /// Records everything that the next broker needs to continue the steady clock.
    pub(crate) fn record_clocks(&mut self) {
        let steady = self.clocks.steady();
        self.record(&RecordEvent::ClockSet { steady });
        if let Some(boot) = self.clocks.boot() {
            self.record(&RecordEvent::ClockBoot { boot });
        }
    }

    /// Makes changes from here on visible only once the current record is on disk.
    pub(crate) fn must_be_safe(&mut self) {
        self.must_be_safe = true;
        self.state
            .safe_after
            .add(self.next_position, Durability::Disk);
    }

    /// Ends the record, and notifies watchers of its changes.
    pub(crate) fn seal(&mut self, durability: Durability) {
        self.seal_as(durability, false);
    }

    /// Ends the record like [`Broker::seal`], and states whether it may wait: see [`Record::may_wait`].
    pub(crate) fn seal_as(&mut self, mut durability: Durability, mut may_wait: bool) {
        self.settle_workflows();
        assert!(
            self.added <= ENDED_AT_ONCE,
            "the broker has added {} events to a record by itself",
            self.added
        );
        if std::mem::take(&mut self.must_be_safe) {
            durability = Durability::Disk;
            may_wait = false;
        }
        if !self.writer.is_empty() {
            let position = self.next_position;
            self.records.push_back(Record {
                position,
                durability,
                may_wait,
                bytes: self.writer.take(),
            });
            self.everything.add(position, durability);
            self.next_position = Position(position.0 + 1);
        }
        self.state.close_unread_joins(ENDED_AT_ONCE);
        self.notify_watchers();
        self.watch_unserved();
    }

    /// Sets a timer for each queue that now has work and no consumer.
    fn watch_unserved(&mut self) {
        for queue in std::mem::take(&mut self.state.newly_unserved) {
            let found = self.state.queues.get(queue);
            let Some(found) = found else { continue };
            if let Service::Missing { generation } = found.service {
                let at = self.clocks.steady() + self.options.patience_ms(found.was_served);
                self.state
                    .timers
                    .set(ClockTime::steady(at), Timer::Unserved { queue, generation });
            }
        }
        for queue in std::mem::take(&mut self.state.newly_unknown) {
            let found = self.state.queues.get(queue);
            if let Some(generation) = found.and_then(|queue| queue.rare().unknown_timer) {
                let at = ClockTime::steady(self.clocks.steady() + self.options.unknown_ms);
                let timer = Timer::Unknown { queue, generation };
                self.state.timers.set(at, timer);
            }
        }
        self.watch_use();
    }

    // --- effects

    /// Emits the effect as soon as it is safe.
    pub(crate) fn effect(&mut self, safe_after: SafeAfter, effect: Effect) {
        if let Some(effect) = self.effects.hold(safe_after, effect) {
            self.emit(effect);
        }
    }

    fn emit(&mut self, effect: Effect) {
        let conn = match &effect {
            Effect::Deliver { conn, .. }
            | Effect::Cancel { conn, .. }
            | Effect::Value { conn, .. }
            | Effect::Refused { conn, .. }
            | Effect::Answer { conn, .. } => *conn,
        };
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        match effect {
            Effect::Deliver {
                consumer,
                message,
                grant,
                ..
            } => {
                connection.deliveries.push_back(UnsentDelivery {
                    consumer,
                    message,
                    grant,
                    bytes: 0,
                });
                self.read_ahead(conn);
            }
            Effect::Cancel { message, grant, .. } => {
                connection.cancels.push_back((message, grant));
            }
            Effect::Value { key, state, .. } => {
                // A record that waited for less may already have answered it.
                let is_stale = state == KeyState::Pending
                    && !self.state.keys.watchers.watches(connection.session, &key);
                if !is_stale {
                    connection.values.push_back((key, state));
                }
            }
            Effect::Refused { refused, .. } => connection.refused.push(*refused),
            Effect::Answer { id, answer, .. } => connection.answers.push_back((id, *answer)),
        }
        self.enqueue_output(conn);
    }

    fn release_effects(&mut self) {
        while let Some(effect) = self.effects.release() {
            self.emit(effect);
        }
        let mut unconfirmed = std::mem::take(&mut self.unconfirmed);
        unconfirmed.retain(|index| self.confirm(*index));
        self.unconfirmed = unconfirmed;
    }

    /// Confirms safe transactions to the session. Returns whether more will follow.
    fn confirm(&mut self, index: u32) -> bool {
        let Some(session) = self.state.sessions.get_mut(index) else {
            return false;
        };
        let has_news = session.confirm(&self.effects);
        let is_waiting = !session.is_all_confirmed();
        session.is_listed &= is_waiting;
        if has_news && let Some(conn) = session.conn {
            self.enqueue_output(conn);
        }
        is_waiting
    }

    /// Confirms transactions once they are safe, after a decision was added to the session.
    pub(crate) fn confirm_when_safe(&mut self, index: u32) {
        if self.confirm(index)
            && !std::mem::replace(&mut self.state.sessions[index].is_listed, true)
        {
            self.unconfirmed.push(index);
        }
    }

    pub(crate) fn enqueue_output(&mut self, conn: ConnId) {
        if let Some(connection) = self.connections.get_mut(&conn)
            && !connection.is_enqueued
        {
            connection.is_enqueued = true;
            self.output_queue.push_back(conn);
        }
    }

    /// Returns the next output for this connection.
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
        let mut cancels = Vec::new();
        for _ in 0..connection.cancels.len().min(CANCELS_AT_ONCE) {
            let (message, grant) = connection.cancels.pop_front().expect("it was counted");
            match self.state.is_unsent(message) {
                true => connection.cancels.push_back((message, grant)),
                false => cancels.extend(self.state.cancel_order(message, grant)),
            }
        }
        if !cancels.is_empty() {
            return Some(Output::Cancels { conn, cancels });
        }
        let asks = self.relay.take(&mut connection.asks);
        if !asks.is_empty() {
            return Some(Output::Asks { conn, asks });
        }
        if !connection.values.is_empty() {
            let mut bytes = 0;
            let mut values = Vec::with_capacity(connection.values.len().min(1024));
            while bytes < OUTPUT_TARGET_BYTES
                && (values.is_empty() || !perhaps!("say-little"))
                && let Some((key, state)) = connection.values.pop_front()
            {
                if let KeyState::Present(value) = &state {
                    bytes += value.body.len();
                }
                values.push((key, state));
            }
            return Some(Output::Values { conn, values });
        }
        if !connection.refused.is_empty() {
            let refused = std::mem::take(&mut connection.refused);
            return Some(Output::RefusedWaits { conn, refused });
        }
        let mut bytes = 0;
        let was_laden = connection.is_backlogged();
        let mut deliveries = Vec::with_capacity(connection.deliveries.len().min(1024));
        while bytes < OUTPUT_TARGET_BYTES
            && (deliveries.is_empty() || !perhaps!("say-little"))
            && let Some(first) = connection.deliveries.front()
            // If its body is being read, the connection enters the queue when the body arrives.
            && !self.state.awaits_body(first.message)
            && let Some(first) = connection.deliveries.pop_front()
        {
            // Deliveries that were not examined have no bytes counted here.
            connection.ahead = connection.ahead.saturating_sub(1);
            connection.ahead_bytes -= first.bytes;
            connection.unsent -= 1;
            // The lease may have ended before the delivery could leave.
            if let Some(delivery) = self.state.delivery(&first, &self.clocks) {
                bytes += delivery.message.body.len() + delivery.inputs.len();
                deliveries.push(delivery);
            }
        }
        self.read_ahead(conn);
        if was_laden {
            self.join_rings_of(conn);
        }
        (!deliveries.is_empty()).then_some(Output::Deliver { conn, deliveries })
    }

    // --- queries

    fn query(&mut self, conn: ConnId, id: u64, query: &Query) {
        self.state.add_counts();
        let answer = match query {
            Query::Status(query) => Answer::Status(self.status_page(conn, query)),
            Query::Message(id) => Answer::Message(self.message_info(id)),
            Query::Failed(query) => Answer::Failed(self.failed_page(query)),
            Query::Operation(operation) => Answer::Operation(self.operation_status(*operation)),
            Query::Workflows(query) => Answer::Workflows(self.workflows_page(query)),
            Query::Schedules(query) => Answer::Schedules(self.schedules_page(query)),
            Query::Progress(job) => Answer::Progress(self.state.progress_of(job)),
            Query::Ask(ask) => return self.ask(conn, id, ask),
            Query::Unnamed => Answer::Refused(
                "this broker is older than its client and does not know the question: upgrade the broker"
                    .to_owned(),
            ),
            Query::Stop => Answer::Refused(
                "only the process that hosts the broker can stop it".to_owned(),
            ),
            Query::SetClock { .. } => Answer::Refused(
                "only the process that hosts the broker can move its clock".to_owned(),
            ),
        };
        // Status must be available even while the disk is full or slow, so it waits for nothing.
        let safe_after = match query {
            Query::Status(_) | Query::Operation(_) => SafeAfter::default(),
            _ => self.everything,
        };
        let answer = Box::new(answer);
        self.effect(safe_after, Effect::Answer { conn, id, answer });
    }

    pub(crate) fn notice(&mut self, notice: Notice) {
        self.outbox.push_back(Output::Notice(notice));
    }
}
