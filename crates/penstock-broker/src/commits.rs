//! Transactions: checked whole, then applied whole.
//!
//! [`check`](Broker::check) looks at the state before the first operation and returns a [`Checked`], which
//! only it can make and only [`apply`](Broker::apply) consumes.

use penstock_faults::planted;
use penstock_message::{
    Durability, Member, Message, MessageId, Op, Receipt, Refusal, SeededMap, SeededSet, Tx,
};

use crate::held_effects::SafeAfter;
use crate::queues::limits::Arrivals;
use crate::records::RecordEvent;
use crate::sessions::PendingParts;
use crate::{Broker, CloseReason, ConnId};

mod apply;
mod check;
mod grow;

pub(crate) use apply::own_key;

/// A transaction whose operations may all be applied.
#[must_use]
#[derive(Debug)]
pub(crate) struct Checked {
    ops: Vec<Op>,
    /// Messages whose leases the transaction settles, in the order of those operations.
    leased: Vec<u32>,
}

/// Notes taken while a transaction is checked. Kept between transactions to reuse the memory.
#[derive(Debug, Default)]
pub(crate) struct Checking {
    /// Ids of messages and joins that the transaction adds.
    new_ids: SeededSet<MessageId>,
    /// Joins that the transaction opens, and their numbers of members.
    new_joins: SeededMap<MessageId, u32>,
    leased: Vec<u32>,
    /// Messages that the transaction adds to queues with limits.
    arrivals: Vec<Arrivals>,
    /// Whether one of those joins is unsealed.
    has_unsealed: bool,
    /// Whether the transaction may be refused for lack of room.
    may_find_no_room: bool,
    /// Whether some of the added messages may already exist.
    names_held: bool,
    /// Whether the transaction has only one operation.
    is_alone: bool,
    /// Job that another step takes the place of.
    replaced: Option<ReplacedJob>,
    /// Members that the transaction adds to a group, by the ids that it gives them, and whether each was supplied.
    added: SeededMap<MessageId, bool>,
}

/// A job that a transaction replaces.
#[derive(Debug)]
struct ReplacedJob {
    job: MessageId,
    member: Option<Member>,
    has_heir: bool,
}

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
        if self.state.sessions[session].pending_parts.is_some() {
            let reason = "a transaction arrived between the parts of a larger one".to_owned();
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
        let pending_parts = session.pending_parts.get_or_insert_with(|| PendingParts {
            seq,
            ops: Vec::new(),
            bytes: 0,
            is_too_large: false,
        });
        if pending_parts.seq != seq {
            let reason = format!(
                "a part of transaction {seq} arrived between the parts of {}",
                pending_parts.seq
            );
            return self.close(conn, CloseReason::Protocol(reason));
        }
        let bytes: usize = tx.ops.iter().map(op_bytes).sum();
        // An already applied transaction has its answer; its parts need not be kept.
        let is_resent = seq <= session.applied;
        if !is_resent && !pending_parts.is_too_large {
            if self.pending_parts_bytes + bytes > self.options.staged_parts_cap_bytes {
                pending_parts.is_too_large = true;
                self.pending_parts_bytes -= std::mem::take(&mut pending_parts.bytes);
                pending_parts.ops = Vec::new();
            } else {
                self.pending_parts_bytes += bytes;
                pending_parts.bytes += bytes;
                pending_parts.ops.extend(tx.ops);
            }
        }
        if !last {
            return;
        }
        let Some(pending_parts) = session.pending_parts.take() else {
            return;
        };
        self.pending_parts_bytes -= pending_parts.bytes;
        if pending_parts.is_too_large {
            let why = Refusal::TooLarge(format!(
                "together with this one, the transactions that are being sent in parts exceed the broker's {}",
                exact_bytes(self.options.staged_parts_cap_bytes)
            ));
            return self.refuse_whole(conn, session_index, seq, durability, why);
        }
        self.commit_whole(
            conn,
            session_index,
            seq,
            durability,
            vec![Tx {
                ops: pending_parts.ops,
            }],
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
        self.state.sessions[session].is_forgotten = false;
        if durability == Durability::Replicated {
            // Refused one by one, so that a client that resends a transaction receives the same answer.
            let why = "this broker keeps one copy: \"replicated\" is for engines that keep several";
            for seq in first_seq..first_seq + txs.len() as u64 {
                let why = Refusal::NotOffered(why.to_owned());
                self.refuse_whole(conn, session, seq, Durability::Disk, why);
            }
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
                    if let Ok(checked) = self.check(session, tx.ops) {
                        self.apply(session, checked);
                    }
                }
                self.seal(durability);
            }
            return;
        }
        self.begin(durability);
        let mut exceptions = Vec::new();
        let mut has_outcomes_only = true;
        for (index, tx) in txs.into_iter().enumerate().skip(resent as usize) {
            has_outcomes_only &= tx.ops.iter().any(Op::is_settlement);
            let receipt = match self.check(session, tx.ops) {
                Ok(checked) => {
                    let applied = self.apply(session, checked);
                    if applied.is_plain() {
                        continue;
                    }
                    Receipt::Applied(applied)
                }
                Err(Unchecked { op, why, half }) => {
                    self.counts.refused += 1;
                    if planted!("apply-half") {
                        self.apply(session, half);
                    }
                    Receipt::Refused { op, why }
                }
            };
            exceptions.push((first_seq + index as u64, receipt));
        }
        // The disk was checked for these transactions only.
        self.room_bytes = u64::MAX;
        self.decide(
            session,
            first_seq + resent,
            last_seq,
            durability,
            exceptions,
            has_outcomes_only,
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
        self.decide(session, seq, seq, durability, vec![(seq, receipt)], false);
    }

    /// Closes the connection when sequence numbers are missing.
    fn is_in_sequence(&mut self, conn: ConnId, session: u32, first_seq: u64) -> bool {
        let session = &self.state.sessions[session];
        let expected = session.applied.max(session.may_skip_through) + 1;
        let reason = match first_seq {
            0 => "transactions are numbered from 1".to_owned(),
            _ if first_seq > expected => {
                format!("transaction {first_seq} arrived instead of {expected}")
            }
            _ => return true,
        };
        self.close(conn, CloseReason::Protocol(reason));
        false
    }

    /// Answers transactions that were decided before. They are not applied again; their answers are repeated once they
    /// are safe.
    fn answer_again(&mut self, conn: ConnId, session: u32, first_seq: u64, count: u64) {
        if count == 0 {
            return;
        }
        let session = &mut self.state.sessions[session];
        session.told = session.told.min(first_seq - 1);
        self.enqueue_output(conn);
    }

    /// Ends the record of the decisions for these numbers.
    fn decide(
        &mut self,
        index: u32,
        first: u64,
        last: u64,
        durability: Durability,
        exceptions: Vec<(u64, Receipt)>,
        has_outcomes_only: bool,
    ) {
        let session = self.state.sessions[index].number;
        self.record(&RecordEvent::Applied {
            session,
            through: last,
        });
        for (seq, receipt) in &exceptions {
            let receipt = receipt.clone();
            self.record(&RecordEvent::Answered {
                session,
                seq: *seq,
                receipt,
            });
        }
        let position = self.state.position;
        self.seal_as(durability, has_outcomes_only && exceptions.is_empty());
        let safe_after = match exceptions.is_empty() {
            true => SafeAfter::on(position, durability),
            // A refusal or a skip depends on all earlier decisions.
            false => self.everything,
        };
        let session = &mut self.state.sessions[index];
        for (seq, receipt) in exceptions {
            session.keep_receipt(seq, receipt);
        }
        session.decided(first, last, safe_after);
        self.confirm_when_safe(index);
    }
}

/// Reason why a transaction is refused.
#[derive(Debug)]
pub(crate) struct Unchecked {
    op: u32,
    why: Refusal,
    /// Operations before the refused one, for a bug that the simulator plants.
    half: Checked,
}

/// Formats bytes exactly: a refused size may exceed the limit by one byte, and round limits are easier to read.
fn exact_bytes(bytes: usize) -> String {
    const MIB: usize = 1 << 20;
    match (bytes / MIB, bytes % MIB) {
        (1.., 0) => format!("{bytes} bytes ({} MiB)", bytes / MIB),
        _ => format!("{bytes} bytes"),
    }
}

/// Returns roughly how much memory an operation takes.
fn op_bytes(op: &Op) -> usize {
    let message_bytes = |message: &Message| {
        let notes: usize = message.notes.iter().map(bytes::Bytes::len).sum();
        size_of::<Message>() + message.task.len() + message.body.len() + notes
    };
    size_of::<Op>()
        + match op {
            Op::Publish {
                queues, message, ..
            } => queues.iter().map(String::len).sum::<usize>() + message_bytes(message),
            Op::Put { value, group, .. } => value.body.len() + group.len(),
            Op::Hold(hold) => hold
                .messages
                .iter()
                .map(|(queue, message)| queue.len() + message_bytes(message))
                .sum(),
            Op::Move { patch, .. } => patch.note.as_ref().map_or(0, bytes::Bytes::len),
            Op::Fail {
                value,
                note,
                failure,
                ..
            } => value.as_ref().map_or(0, bytes::Bytes::len) + note.len() + failure.preview.len(),
            _ => 0,
        }
}
