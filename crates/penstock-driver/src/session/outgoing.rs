//! What a session writes: frames of what waits, as much as the socket is about to take.

use bytes::Bytes;
use penstock_message::{Query, Receipt, Refusal};
use penstock_wire::{Later, MAX_TRANSACTION_BYTES, Within, encode_frame, proto};
use prost::Message as _;

use super::{CallDone, Session};
use crate::encoded::{Encoded, EncodedCommit, EncodedCommits, FRAME_TARGET_BYTES};
use crate::{DriverError, ErrorKind};

/// Transactions that are sent and not confirmed; the rest wait here, in order.
pub(super) const MAX_IN_FLIGHT: usize = 1024;
/// Frames are made while less than this is waiting for the socket; the more that is made early, the
/// more of it may be out of date when it leaves.
const OUT_TARGET_BYTES: usize = 256 << 10;
/// A watch of a million keys is sent in portions.
const KEYS_A_FRAME: usize = 16 << 10;
/// What surrounds one part in its frame.
const FRAME_OVERHEAD_BYTES: usize = 64;

impl Session {
    pub(super) fn last_seq(&self) -> u64 {
        self.window_first_seq + self.window.len() as u64 - 1
    }

    pub(super) fn write_commits(&mut self) {
        let mut frame = EncodedCommits::default();
        let mut frame_bytes = 0;
        while self.out.len() + frame_bytes < OUT_TARGET_BYTES {
            if self.unwritten.0 == self.window.len() && !self.admit() {
                break;
            }
            let (index, part) = self.unwritten;
            let pending = &mut self.window[index];
            let first_seq = self.window_first_seq + index as u64;
            let durability = proto::Durability::from(pending.durability).into();
            let mut kind = proto::Part::Whole;
            let bytes = match self.calls.get_mut(&pending.call) {
                // Its deadline passed between two connections.
                None if part == 0 => {
                    pending.tx = Encoded::Whole(Bytes::new());
                    Bytes::new()
                }
                call => {
                    if let Some(call) = call {
                        call.sent = true;
                    }
                    match &pending.tx {
                        Encoded::Whole(bytes) => bytes.clone(),
                        Encoded::Parts(parts) => {
                            kind = match part + 1 == parts.len() {
                                true => proto::Part::Last,
                                false => proto::Part::More,
                            };
                            parts[part].clone()
                        }
                    }
                }
            };
            self.unwritten = match kind {
                proto::Part::More => (index, part + 1),
                proto::Part::Whole | proto::Part::Last => (index + 1, 0),
            };

            if kind != proto::Part::Whole || frame_bytes + bytes.len() > FRAME_TARGET_BYTES {
                self.write_commit_frame(&mut frame);
                frame_bytes = 0;
            }
            frame_bytes += bytes.len();
            match frame.commits.last_mut() {
                Some(commit) if commit.durability == durability => commit.txs.push(bytes),
                _ => frame.commits.push(EncodedCommit {
                    first_seq,
                    durability,
                    txs: vec![bytes],
                    part: kind.into(),
                }),
            }
            if kind != proto::Part::Whole {
                self.write_commit_frame(&mut frame);
                frame_bytes = 0;
            }
        }
        self.write_commit_frame(&mut frame);
    }

    fn write_commit_frame(&mut self, frame: &mut EncodedCommits) {
        if !frame.commits.is_empty() {
            encode_frame(frame, &mut self.out);
            frame.commits.clear();
        }
    }

    /// Moves the next transaction that somebody still waits for into the window, where it has a number.
    fn admit(&mut self) -> bool {
        while self.window.len() < MAX_IN_FLIGHT {
            let Some(pending) = self.waiting.pop_front() else {
                return false;
            };
            if !self.calls.contains_key(&pending.call) {
                continue;
            }
            let bytes = pending.tx.largest_part_bytes();
            if bytes + FRAME_OVERHEAD_BYTES > self.max_frame_bytes {
                let reason = format!(
                    "one operation of {bytes} bytes is over the broker's limit of {} for a frame",
                    self.max_frame_bytes
                );
                self.end_call(pending.call, DriverError::new(ErrorKind::TooLarge, reason));
                continue;
            }
            // The broker would find that out only when all of it has been sent.
            let bytes = pending.tx.bytes();
            if bytes > MAX_TRANSACTION_BYTES {
                let reason = format!(
                    "this call has {bytes} bytes, and one call may have {MAX_TRANSACTION_BYTES} at most. Nothing of \
                     it was sent: split it into several"
                );
                let why = Refusal::TooLarge(reason);
                let refused = Receipt::Refused { op: 0, why };
                self.settle(pending.call, pending.index, refused);
                continue;
            }
            if let Some(refused) = self.too_new_for_broker(&pending.tx) {
                self.settle(pending.call, pending.index, refused);
                continue;
            }
            self.window.push_back(pending);
            return true;
        }
        false
    }

    pub(super) fn write_requests(&mut self) {
        while !self.unsent_keys.is_empty() && self.out.len() < OUT_TARGET_BYTES {
            let portion = self.unsent_keys.len().min(KEYS_A_FRAME);
            let keys: Vec<proto::KeyRef> = self
                .unsent_keys
                .drain(..portion)
                // Given up, or told, before it was asked for.
                .filter(|key| self.watchers.contains_key(key))
                .map(Into::into)
                .collect();
            if !keys.is_empty() {
                self.write_watch(proto::Watch {
                    keys,
                    unwatch: Vec::new(),
                });
            }
        }
        if self.unsent_keys.is_empty() && !self.unsent_unwatched.is_empty() {
            let unwatch = self.unsent_unwatched.drain().map(Into::into).collect();
            self.write_watch(proto::Watch {
                keys: Vec::new(),
                unwatch,
            });
        }

        let mut frame = proto::ToBroker::default();
        while let Some(id) = self.unsent_queries.pop_front() {
            let Some(call) = self.calls.get(&id) else {
                continue;
            };
            let CallDone::Query { query, .. } = &call.done else {
                continue;
            };
            let query: proto::Query = (id, Query::clone(query)).into();
            let encoded = || query.encode_to_vec().into();
            if let Some(reason) = self.not_offered(Within::Query, encoded) {
                self.end_call(id, DriverError::new(ErrorKind::NotOffered, reason));
                continue;
            }
            frame.queries.push(query);
            if let Some(call) = self.calls.get_mut(&id) {
                call.sent = true;
            }
        }
        frame.consumers = self.consumers.take_changes();
        if std::mem::take(&mut self.report_changed) {
            frame.report = self.report;
        }
        if frame != proto::ToBroker::default() {
            encode_frame(&frame, &mut self.out);
        }
    }

    /// What a transaction comes to that the broker is too old for. It would refuse an operation that it
    /// can't name, but drop a field without a trace.
    pub(super) fn too_new_for_broker(&self, tx: &Encoded) -> Option<Receipt> {
        let reason = tx
            .parts()
            .iter()
            .find_map(|part| self.not_offered(Within::Tx, || part.clone()))?;
        let why = Refusal::NotOffered(reason);
        Some(Receipt::Refused { op: 0, why })
    }

    /// Why this is not sent to this broker, for people. Costs nothing while both are of one version.
    fn not_offered(&self, within: Within, encoded: impl FnOnce() -> Bytes) -> Option<String> {
        let versions = &self.config.versions;
        if self.version >= versions.highest {
            return None;
        }
        let Later { what, since, .. } = versions.too_new(self.version, within, &encoded())?;
        Some(format!(
            "the broker at {} speaks version {} of the protocol, and {what} came with version {since}: \
             install a newer penstock where the broker runs, and start it again",
            self.config.broker, self.version
        ))
    }

    fn write_watch(&mut self, watch: proto::Watch) {
        let frame = proto::ToBroker {
            watch: Some(watch),
            ..Default::default()
        };
        encode_frame(&frame, &mut self.out);
    }
}
