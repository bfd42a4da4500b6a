//! Relays questions from one client to another: people ask a worker, and the broker passes the questions on unread.
//!
//! ```text
//!     Query::Ask ─▶ Output::Asks ─▶ the worker ─▶ Input::Reply ─▶ Answer::Asked
//! ```
//!
//! None of this is journaled: a question ends with either connection, when its time runs out, and with the broker. So
//! every question is answered once, and memory is bounded: in number by worker, by asker and in total, and in bytes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use penstock_message::{Answer, Ask, AskQuery, NoReply, WorkerReport};

use crate::held_effects::{Effect, SafeAfter};
use crate::{Broker, ConnId};

/// Maximum number of questions under way to one worker.
const ASKS_PER_WORKER: usize = 4;
/// Maximum number of questions under way from one client, and in total.
const ASKS_PER_CLIENT: usize = 16;
const MOST_ASKS: usize = 256;
/// Maximum bytes of questions that have not yet been sent to their workers.
const MOST_WAITING_BYTES: usize = 64 << 20;

#[derive(Debug, Default)]
pub(crate) struct Relay {
    /// Questions under way, by their numbers.
    asks: BTreeMap<u64, UnderWay>,
    numbers: u64,
    /// Deadlines on the monotonic clock, with the numbers of their questions.
    deadlines: BTreeSet<(u64, u64)>,
    /// Bytes of the questions that have not been sent.
    waiting_bytes: usize,
    /// Workers that are connected and have reported.
    workers: BTreeSet<(String, ConnId)>,
}

#[derive(Debug)]
struct UnderWay {
    from: ConnId,
    /// Id that the asker gave the question.
    id: u64,
    to: ConnId,
    deadline_ms: u64,
    /// Content of the question, until it is sent.
    question: Option<Bytes>,
}

impl Relay {
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Takes the next waiting question to send: one at a time, since each may fill a frame.
    pub(crate) fn take(&mut self, waiting: &mut VecDeque<u64>) -> Vec<Ask> {
        while let Some(id) = waiting.pop_front() {
            let question = self.asks.get_mut(&id).and_then(|ask| ask.question.take());
            if let Some(question) = question {
                self.waiting_bytes -= question.len();
                return vec![Ask { id, question }];
            }
        }
        Vec::new()
    }

    fn add(&mut self, ask: UnderWay) -> u64 {
        self.numbers += 1;
        let number = self.numbers;
        self.deadlines.insert((ask.deadline_ms, number));
        self.waiting_bytes += ask.question.as_ref().map_or(0, Bytes::len);
        self.asks.insert(number, ask);
        number
    }

    fn remove(&mut self, number: u64) -> Option<UnderWay> {
        let ask = self.asks.remove(&number)?;
        self.deadlines.remove(&(ask.deadline_ms, number));
        self.waiting_bytes -= ask.question.as_ref().map_or(0, Bytes::len);
        Some(ask)
    }

    fn numbers_where(&self, is_it: impl Fn(&UnderWay) -> bool) -> Vec<u64> {
        let asks = self.asks.iter();
        let found = asks.filter(|(_, ask)| is_it(ask));
        found.map(|(number, _)| *number).collect()
    }

    /// Returns the worker with this name.
    fn worker(&self, name: &str) -> Result<ConnId, NoReply> {
        let from = (name.to_owned(), ConnId(0));
        let mut found = self.workers.range(from..);
        let mut next = || {
            let (other, conn) = found.next()?;
            (other == name).then_some(*conn)
        };
        match (next(), next()) {
            (Some(conn), None) => Ok(conn),
            (Some(_), Some(_)) => Err(NoReply::SeveralWorkers),
            (None, _) => Err(NoReply::UnknownWorker),
        }
    }

    /// Whether one more question of this size may be under way.
    fn has_room(&self, from: ConnId, to: ConnId, bytes: usize) -> bool {
        let asks = self.asks.values();
        let (mut of_client, mut of_worker) = (0, 0);
        for ask in asks {
            of_client += usize::from(ask.from == from);
            of_worker += usize::from(ask.to == to);
        }
        of_client < ASKS_PER_CLIENT
            && of_worker < ASKS_PER_WORKER
            && self.asks.len() < MOST_ASKS
            && self.waiting_bytes + bytes <= MOST_WAITING_BYTES
    }
}

impl Broker {
    /// Notes a worker's report on itself. From its first report on, the worker can be asked.
    pub(crate) fn note_report(&mut self, conn: ConnId, report: WorkerReport) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        connection.is_worker = true;
        if connection.report.replace(report).is_none() {
            let name = &self.state.sessions[connection.session].name;
            self.relay.workers.insert((name.clone(), conn));
        }
    }

    pub(crate) fn ask(&mut self, from: ConnId, id: u64, query: &AskQuery) {
        if !self.connections.contains_key(&from) {
            return;
        }
        let to = match self.addressee(from, query) {
            Ok(to) => to,
            Err(why) => return self.answer_ask(from, id, Err(why)),
        };
        let longest_ms = AskQuery::MOST_PATIENCE.as_millis() as u64;
        let patience_ms = match query.patience_ms {
            0 => longest_ms,
            patience_ms => patience_ms.min(longest_ms),
        };
        let number = self.relay.add(UnderWay {
            from,
            id,
            to,
            deadline_ms: self.clocks.mono() + patience_ms,
            question: Some(query.question.clone()),
        });
        if let Some(worker) = self.connections.get_mut(&to) {
            // Many of them may be over if the worker does not read its socket.
            let relay = &self.relay;
            worker.asks.retain(|ask| relay.asks.contains_key(ask));
            worker.asks.push_back(number);
        }
        self.enqueue_output(to);
    }

    /// Returns the worker to which a question may be sent now.
    fn addressee(&self, from: ConnId, query: &AskQuery) -> Result<ConnId, NoReply> {
        let bytes = query.question.len();
        if bytes > AskQuery::MOST_BYTES {
            return Err(NoReply::TooLarge);
        }
        let to = self.relay.worker(&query.worker)?;
        let report = self.connections[&to].report;
        if !report.is_some_and(|report| report.takes_asks) {
            return Err(NoReply::TooOld);
        }
        match self.relay.has_room(from, to, bytes) {
            true => Ok(to),
            false => Err(NoReply::Busy),
        }
    }

    /// Handles a worker's reply. Drops it if nobody waits for it any more.
    pub(crate) fn reply(&mut self, conn: ConnId, number: u64, reply: Bytes) {
        let is_its_own = |ask: &UnderWay| ask.to == conn && ask.question.is_none();
        if !self.relay.asks.get(&number).is_some_and(is_its_own) {
            return;
        }
        let outcome = match reply.len() > AskQuery::MOST_BYTES {
            true => Err(NoReply::TooLarge),
            false => Ok(reply),
        };
        self.end_ask(number, outcome);
    }

    /// Ends the questions whose time has run out.
    pub(crate) fn end_late_asks(&mut self) {
        let now = self.clocks.mono();
        while let Some((_, number)) = self.relay.deadlines.first().filter(|(at, _)| *at <= now) {
            self.end_ask(*number, Err(NoReply::Silent));
        }
    }

    /// Ends the questions from and to a closed connection.
    pub(crate) fn drop_asks(&mut self, conn: ConnId, session: u32) {
        for number in self.relay.numbers_where(|ask| ask.from == conn) {
            self.relay.remove(number);
        }
        for number in self.relay.numbers_where(|ask| ask.to == conn) {
            self.end_ask(number, Err(NoReply::Lost));
        }
        let name = self.state.sessions[session].name.clone();
        self.relay.workers.remove(&(name, conn));
    }

    fn end_ask(&mut self, number: u64, outcome: Result<Bytes, NoReply>) {
        if let Some(ask) = self.relay.remove(number) {
            self.answer_ask(ask.from, ask.id, outcome);
        }
    }

    fn answer_ask(&mut self, conn: ConnId, id: u64, outcome: Result<Bytes, NoReply>) {
        let answer = Box::new(Answer::Asked(outcome));
        // The answer depends on no record.
        self.effect(SafeAfter::default(), Effect::Answer { conn, id, answer });
    }
}
