//! Turns outputs of the core into frames for clients.

use penstock_broker::{Answer, CloseReason, ConnId, Input, Notice, Output};
use penstock_message::{Delivery, Key, KeyState, ProcessStatus};
use penstock_wire::proto::{self, ToClient, close::Why};
use penstock_wire::{MAX_FRAME_BYTES, native};

use super::Engine;
use crate::connection::{Connection, ConnectionStage};

/// Size of a frame up to which items of a list are added; the rest goes into further frames.
const FRAME_TARGET_BYTES: usize = 1 << 20;

impl Engine {
    pub(super) fn carry_out(&mut self, output: Output) {
        match output {
            Output::Welcome {
                conn,
                applied_through,
                forgotten,
                leases,
            } => {
                let Some(connection) = self.connections.get_mut(&conn) else {
                    return;
                };
                let ConnectionStage::Open {
                    heartbeat_ms,
                    version,
                } = connection.stage
                else {
                    return;
                };
                connection.welcomed = true;
                let capabilities = match self.options.is_double {
                    true => native::in_memory(),
                    false => native::on_disk(),
                };
                let welcome = proto::Welcome {
                    protocol_version: version,
                    broker_version: env!("CARGO_PKG_VERSION").to_owned(),
                    heartbeat_ms,
                    max_frame_bytes: MAX_FRAME_BYTES as u64,
                    max_body_bytes: self.options.broker.max_body_bytes as u64,
                    applied_through,
                    forgotten,
                    leases: leases.into_iter().map(Into::into).collect(),
                    journal_format: self.journal_format,
                    capabilities: Some(capabilities.into()),
                };
                let frame = ToClient {
                    welcome: Some(welcome),
                    ..ToClient::default()
                };
                self.send_frame(conn, &frame);
            }
            Output::Confirm {
                conn,
                through,
                receipts,
                early,
            } => {
                let confirm = proto::Confirm {
                    through,
                    receipts: receipts.into_iter().map(Into::into).collect(),
                    early,
                };
                let frame = ToClient {
                    confirm: Some(confirm),
                    ..ToClient::default()
                };
                self.send_frame(conn, &frame);
            }
            Output::Deliver { conn, deliveries } => {
                for portion in portions(deliveries, delivery_bytes) {
                    let frame = ToClient {
                        deliveries: portion.into_iter().map(Into::into).collect(),
                        ..ToClient::default()
                    };
                    self.send_frame(conn, &frame);
                }
            }
            Output::Cancels { conn, cancels } => {
                let frame = ToClient {
                    cancels: cancels.into_iter().map(Into::into).collect(),
                    ..ToClient::default()
                };
                self.send_frame(conn, &frame);
            }
            Output::Asks { conn, asks } => {
                let frame = ToClient {
                    asks: asks.into_iter().map(Into::into).collect(),
                    ..ToClient::default()
                };
                self.send_frame(conn, &frame);
            }
            Output::Values { conn, values } => {
                for portion in portions(values, value_bytes) {
                    let frame = ToClient {
                        values: portion.into_iter().map(Into::into).collect(),
                        ..ToClient::default()
                    };
                    self.send_frame(conn, &frame);
                }
            }
            Output::RefusedWaits { conn, refused } => {
                let frame = ToClient {
                    refused_waits: refused.into_iter().map(Into::into).collect(),
                    ..ToClient::default()
                };
                self.send_frame(conn, &frame);
            }
            Output::Answer { conn, id, answer } => self.answer(conn, id, answer),
            Output::Notice(notice) => self.send_notice(notice),
            Output::Close { conn, reason } => {
                let (why, text) = match reason {
                    CloseReason::Fenced => (
                        Why::Fenced,
                        "a newer connection of this session took over".to_owned(),
                    ),
                    CloseReason::Protocol(text) => (Why::Protocol, text),
                };
                self.close(conn, why, text);
            }
        }
    }

    pub(super) fn answer(&mut self, conn: ConnId, id: u64, mut answer: Answer) {
        if let Answer::Status(page) = &mut answer {
            let status = &mut page.status;
            *status.process = ProcessStatus {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: self.options.pid,
                uptime_ms: self.now.mono_ms,
                sync_p50_us: self.syncs.quantile(0.5),
                sync_p99_us: self.syncs.quantile(0.99),
                journal_bytes: self.journal.total_bytes(),
                unsynced_records: self.disk.appended - self.disk.synced,
                unsynced_bytes: self.journal.waiting_bytes() as u64,
                batch_records: self
                    .batches
                    .records
                    .checked_div(self.batches.count)
                    .unwrap_or(0),
                batch_bytes: self
                    .batches
                    .bytes
                    .checked_div(self.batches.count)
                    .unwrap_or(0),
                reclaim_debt_bytes: self
                    .journal
                    .total_bytes()
                    .saturating_sub(self.broker.live_bytes()),
                reserves: self.journal.spares_ready(),
                memory_bytes: self.memory.bytes,
                memory_limit_bytes: self.memory.limit_bytes,
                full_connections: self
                    .connections
                    .values()
                    .filter(|connection| connection.full)
                    .count() as u64,
                blocked: self.blocked.len() as u64,
                cost_ns: {
                    let counts = &status.counts;
                    let inputs = counts.published + counts.settled + counts.delivered;
                    self.worked_ns.checked_div(inputs).unwrap_or(0)
                },
            };
        }
        let frame = ToClient {
            answers: vec![(id, answer).into()],
            ..ToClient::default()
        };
        self.send_frame(conn, &frame);
    }

    fn send_notice(&mut self, notice: Notice) {
        tracing::warn!("{notice}");
        let frame = ToClient {
            notices: vec![notice.into()],
            ..ToClient::default()
        };
        // For a client, any frame before its welcome breaks the protocol.
        let is_welcome = |connection: &Connection| connection.is_open() && connection.welcomed;
        for conn in self.connections_where(is_welcome) {
            self.send_frame(conn, &frame);
        }
    }

    pub(super) fn send_frame(&mut self, conn: ConnId, frame: &ToClient) {
        let Some(connection) = self.connections.get_mut(&conn) else {
            return;
        };
        if connection.is_closing() {
            return;
        }
        connection.send_frame(self.now.mono_ms, frame);
        if !connection.listed {
            connection.listed = true;
            self.to_transmit.push_back(conn);
        }
        if connection.is_open() && connection.has_become_full() {
            connection.full = true;
            let writable = false;
            self.input(Input::Writable { conn, writable });
        }
    }
}

/// Splits a list so that each part fits into a frame: at most [`FRAME_TARGET_BYTES`], or one item.
fn portions<T>(mut items: Vec<T>, bytes_of: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut cuts = Vec::new();
    let mut bytes = 0;
    for (index, item) in items.iter().enumerate() {
        bytes += bytes_of(item);
        if bytes > FRAME_TARGET_BYTES && index > 0 {
            bytes = bytes_of(item);
            cuts.push(index);
        }
    }
    let mut cut_off: Vec<Vec<T>> = cuts
        .into_iter()
        .rev()
        .map(|cut| items.split_off(cut))
        .collect();
    cut_off.push(items);
    cut_off.reverse();
    cut_off
}

/// Returns the bytes that a delivery takes in a frame, rounded up.
fn delivery_bytes(delivery: &Delivery) -> usize {
    let message = &delivery.message;
    let notes: usize = message.notes.iter().map(|note| note.len() + 8).sum();
    128 + delivery.queue.len()
        + message.task.len()
        + message.body.len()
        + notes
        + delivery.inputs.len()
}

/// Returns the bytes that a key and its state take in a frame, rounded up.
fn value_bytes((key, state): &(Key, KeyState)) -> usize {
    let key = match key {
        Key::Result(_) => 16,
        Key::Named(name) | Key::Scoped(_, name) => name.len(),
    };
    let body = match state {
        KeyState::Present(value) => value.body.len(),
        KeyState::Pending | KeyState::Gone => 0,
    };
    48 + key + body
}
