//! Connections: hello and goodbye, the leases that outlive them, their consumers, and the outputs that wait to be sent
//! on them.

use std::collections::VecDeque;

use penstock_faults::planted;
use penstock_message::{
    Answer, Durability, Key, KeyState, Lease, RefusedWait, SessionId, WorkerReport,
};

use crate::messages::Handle;
use crate::records::{Grant, RecordEvent};
use crate::{Broker, CloseReason, ConnId, Output};

/// Highest sequence number that a client may use: no client gets there by counting, and higher numbers could overflow.
const LAST_SEQ: u64 = 1 << 62;
/// Maximum number of messages on their way to one client, however many it asks for. The rest goes to others, which may
/// be quicker.
const UNSENT_CAP: u32 = 1 << 14;
/// Maximum bytes of a client's name that people are shown. Longer names are cut.
const NAME_SHOWN_BYTES: usize = 255;
/// Maximum bytes of the names of queues, tasks and groups.
pub(crate) const NAME_CAP_BYTES: usize = 255;

#[derive(Debug)]
pub(crate) struct ClientConnection {
    pub(crate) session: u32,
    pub(crate) writable: bool,
    pub(crate) consumers: Vec<u32>,
    /// Number of messages handed to the connection that have not left the broker.
    pub(crate) unsent: u32,
    /// Whether the connection is in the output queue of `poll_output`.
    pub(crate) is_enqueued: bool,
    /// Whether the client has asked for work or reported on it.
    pub(crate) is_worker: bool,
    /// Last report of the worker, if it has sent one.
    pub(crate) report: Option<WorkerReport>,
    pub(crate) welcome: Option<Welcome>,
    pub(crate) deliveries: VecDeque<UnsentDelivery>,
    /// Number of deliveries whose bodies were requested because they are not in memory, and their total bytes.
    pub(crate) ahead: usize,
    pub(crate) ahead_bytes: usize,
    /// Messages that the client must stop, each with the grant that the order refers to.
    pub(crate) cancels: VecDeque<(Handle, u64)>,
    pub(crate) values: VecDeque<(Key, KeyState)>,
    /// Refused waits of running jobs.
    pub(crate) refused: Vec<RefusedWait>,
    pub(crate) answers: VecDeque<(u64, Answer)>,
    /// Numbers of the questions to send to the worker. Some may be over.
    pub(crate) asks: VecDeque<u64>,
}

/// A delivery that waits to be sent.
#[derive(Debug)]
pub(crate) struct UnsentDelivery {
    pub(crate) consumer: u32,
    pub(crate) message: Handle,
    pub(crate) grant: u64,
    /// Bytes of its body, if that was requested.
    pub(crate) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct Welcome {
    pub(crate) applied_through: u64,
    pub(crate) forgotten: bool,
    pub(crate) leases: Vec<Lease>,
}

impl ClientConnection {
    pub(crate) fn new(session: u32, welcome: Welcome) -> Self {
        Self {
            session,
            writable: true,
            consumers: Vec::new(),
            unsent: 0,
            is_enqueued: false,
            is_worker: false,
            report: None,
            welcome: Some(welcome),
            deliveries: VecDeque::new(),
            ahead: 0,
            ahead_bytes: 0,
            cancels: VecDeque::new(),
            values: VecDeque::new(),
            refused: Vec::new(),
            answers: VecDeque::new(),
            asks: VecDeque::new(),
        }
    }

    /// Whether the connection has as many messages on their way as it may.
    pub(crate) fn is_backlogged(&self) -> bool {
        self.unsent >= UNSENT_CAP
    }

    /// Whether consumers of the connection may receive work.
    pub(crate) fn takes_work(&self) -> bool {
        self.writable && !self.is_backlogged()
    }
}

impl Broker {
    pub(crate) fn connect(
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
                CloseReason::Protocol("a connection can send only one hello".to_owned()),
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
        if let Some(older) = known.and_then(|index| self.state.sessions[index].conn)
            && !planted!("keep-old-connection")
        {
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
        let name = truncate(name, NAME_SHOWN_BYTES);
        let (number, applied) = match known {
            Some(index) => (
                self.state.sessions[index].number,
                self.state.sessions[index].applied,
            ),
            None => (self.state.sessions.numbers + 1, last_seq),
        };
        self.record(&RecordEvent::SessionOpened {
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
            self.state.keys.watchers.unwatch_all(index);
        }
        let leases = self.keep_leases(index, presented);
        let session = &mut self.state.sessions[index];
        session.judged_in = self.epoch;
        session.conn = Some(conn);
        session.may_skip_through = last_seq;
        session.is_forgotten |= known.is_none() && last_seq > 0;
        session.begin_connection();
        let welcome = Welcome {
            applied_through: session.told,
            forgotten: session.is_forgotten,
            leases,
        };
        self.connections
            .insert(conn, ClientConnection::new(index, welcome));
        self.enqueue_output(conn);
        if !planted!("cancel-forgotten-at-reconnect") {
            let leases = &self.state.sessions[index].leases;
            let asked = leases.iter().copied();
            let asked = asked.filter(|slot| self.state.messages.asked(*slot).is_some());
            for slot in asked.collect::<Vec<u32>>() {
                self.order_to_stop(slot);
            }
        }
        self.seal(Durability::None);
    }

    /// Returns the presented leases that still hold. Other messages leased to the client return to their queues: it
    /// does not work on them.
    fn keep_leases(&mut self, session: u32, presented: &[Lease]) -> Vec<Lease> {
        let mut kept = Vec::with_capacity(presented.len());
        self.checks += 1;
        for lease in presented {
            if let Some(slot) = self.state.messages.find_lease(lease) {
                let messages = &mut self.state.messages;
                let held = messages.lease_state(slot);
                if held.is_some_and(|held| held.session == session) {
                    messages.set_checked_by(slot, self.checks);
                    kept.push(*lease);
                }
            } else if let Some(slot) = self.find_lost_grant(session, lease) {
                let number = self.state.messages[slot].number();
                let grant = Grant {
                    epoch: lease.epoch,
                    number: lease.grant,
                    started_at: self.clocks.wall(),
                };
                if !planted!("keep-claim-of-lost-grant") {
                    self.end_claim_at_start(slot);
                }
                let session_number = self.state.sessions[session].number;
                self.record(&RecordEvent::Granted {
                    number,
                    session: session_number,
                    grant,
                });
                self.state.grant(slot, session, grant);
                self.state.charge_run(slot);
                self.state.messages.set_checked_by(slot, self.checks);
                kept.push(*lease);
                self.review_waits(lease.message);
            }
        }
        let checks = self.checks;
        let mut given_up = self.state.sessions[session].leases.clone();
        given_up.retain(|slot| self.state.messages.checked_by(*slot) != checks);
        self.chores.forget_leases(session);
        self.end_leases(session, given_up, None);
        kept
    }

    /// Finds a grant from before a crash whose record was lost with it. No other client runs the message, so this
    /// client may continue.
    ///
    /// A grant that the journal knows was not lost: its message has been settled, moved or returned since, and the
    /// client has not learned that yet. A grant unknown to the journal was not lost either if the journal knows later
    /// ones, or a later hello of the session. The broker that made those has judged it, and its answer to the client
    /// must stay true.
    fn find_lost_grant(&self, session: u32, lease: &Lease) -> Option<u32> {
        let is_judged = self.state.sessions[session].judged_in > lease.epoch;
        let is_known = (lease.epoch, lease.grant) <= self.last_grant;
        if (is_known || is_judged) && !planted!("believe-lost-grant") || lease.epoch >= self.epoch {
            return None;
        }
        let mut copies = self.state.messages.copies(&lease.message);
        copies.find(|slot| {
            let entry = &self.state.messages[*slot];
            entry.recovered() && entry.is_ready()
        })
    }

    pub(crate) fn disconnect(&mut self, conn: ConnId, clean: bool) {
        let Some(index) = self.drop_connection(conn) else {
            return;
        };
        self.begin(Durability::None);
        if clean {
            let leases = self.state.sessions[index].leases.clone();
            self.chores.forget_leases(index);
            self.end_leases(index, leases, None);
            // It says that nothing more comes.
            let number = self.state.sessions[index].number;
            self.state.joins.abandon(|growth| growth.session == number);
        }
        let left_at = self.clocks.steady();
        let number = self.state.sessions[index].number;
        self.record(&RecordEvent::SessionLeft {
            number,
            at: left_at,
        });
        self.state.sessions[index].left_at = Some(left_at);
        self.state
            .wait_for_session(index, left_at, left_at, self.options.session_memory_ms);
        if clean {
            self.state.keys.watchers.unwatch_all(index);
        }
        self.seal(Durability::None);
    }

    pub(crate) fn close(&mut self, conn: ConnId, reason: CloseReason) {
        self.disconnect(conn, false);
        self.outbox.push_back(Output::Close { conn, reason });
    }

    /// Forgets the connection. Deliveries that never left return at once: no client can have begun them.
    fn drop_connection(&mut self, conn: ConnId) -> Option<u32> {
        let connection = self.connections.remove(&conn)?;
        let index = connection.session;
        self.drop_asks(conn, index);
        self.drop_consumers(connection.consumers);
        self.state.waits.end_session(index);
        let session = &mut self.state.sessions[index];
        session.conn = None;
        if let Some(pending_parts) = session.pending_parts.take() {
            self.pending_parts_bytes -= pending_parts.bytes;
        }
        let mut unsent = session.leases.clone();
        unsent.retain(|slot| {
            let lease = self.state.messages.lease_state(*slot);
            lease.is_some_and(|lease| !lease.sent || planted!("forget-leases"))
        });
        self.end_leases(index, unsent, None);
        Some(index)
    }

    /// Returns a message to its queue when its lease ends although nothing went wrong.
    pub(crate) fn return_message(&mut self, slot: u32) {
        if self.end_if_asked(slot) {
            return;
        }
        if self.state.is_behind_mark(slot) || self.is_spared(slot) {
            return self.renumber(slot, None, None);
        }
        let number = self.state.messages[slot].number();
        let lease = self.state.messages.lease_state(slot);
        let redelivered = lease.is_some_and(|lease| lease.sent);
        self.record(&RecordEvent::Returned {
            number,
            redelivered,
        });
        self.state.return_message(slot, redelivered);
    }
}

/// Returns the longest prefix of the text with at most this many bytes.
pub(crate) fn truncate(text: &str, bytes: usize) -> &str {
    let ends = (0..=bytes.min(text.len())).rev();
    let end = ends.into_iter().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}
