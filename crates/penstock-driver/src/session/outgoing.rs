//! Writes frames from the waiting calls, as many as the socket is about to accept.

use std::sync::Arc;

use bytes::Bytes;
use penstock_message::{
    Feature, Features, Key, MessageId, NotOffered, Progress, Query, Receipt, Refusal,
};
use penstock_wire::{Addition, MAX_TRANSACTION_BYTES, Within, encode_frame, proto};
use prost::Message as _;

use super::{Call, CallDone, DriverSession, PendingTx, SessionEvent};
use crate::encoded::{Encoded, FRAME_TARGET_BYTES, Form};
use crate::{DriverError, ErrorKind};

/// Maximum number of sent and unconfirmed transactions; the rest wait here, in order.
pub(super) const MAX_IN_FLIGHT: usize = 1024;
/// Frames are built while fewer bytes than this wait for the socket. Frames built early may be out of date when
/// they are sent.
const OUT_TARGET_BYTES: usize = 256 << 10;
/// Number of keys per frame: a watch of a million keys is sent in portions.
const KEYS_A_FRAME: usize = 16 << 10;
/// Bytes around one part in its frame.
const FRAME_OVERHEAD_BYTES: usize = 64;

impl DriverSession {
    pub(super) fn last_seq(&self) -> u64 {
        self.window_first_seq + self.window.len() as u64 - 1
    }

    pub(super) fn write_commits(&mut self) {
        let mut frame = proto::ToBroker::default();
        let mut frame_bytes = 0;
        let settle_at = self.capabilities.settle_at();
        while self.out.len() + frame_bytes < OUT_TARGET_BYTES {
            if self.unwritten.0 == self.window.len() && !self.admit() {
                break;
            }
            let (index, part) = self.unwritten;
            let pending = &mut self.window[index];
            let first_seq = self.window_first_seq + index as u64;
            let durability = pending.durability.unwrap_or(settle_at);
            let durability = proto::Durability::from(durability).into();
            let mut kind = proto::Part::Whole;
            let bytes = match self.calls.get_mut(&pending.call) {
                // Its deadline passed between two connections.
                None if part == 0 => {
                    pending.tx = Encoded::nothing();
                    Bytes::new()
                }
                call => {
                    if let Some(call) = call {
                        call.sent = true;
                    }
                    match &pending.tx.form {
                        Form::Whole(bytes) => bytes.clone(),
                        Form::Parts(parts) => {
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
                _ => frame.commits.push(proto::Commit {
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

    fn write_commit_frame(&mut self, frame: &mut proto::ToBroker) {
        if !frame.commits.is_empty() {
            encode_frame(frame, &mut self.out);
            frame.commits.clear();
        }
    }

    /// Moves the next transaction with a waiting caller into the window, which assigns its number.
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
                    "one operation has {bytes} bytes, more than the broker's limit of {} bytes per frame",
                    self.max_frame_bytes
                );
                self.end_call(pending.call, DriverError::new(ErrorKind::TooLarge, reason));
                continue;
            }
            // The broker would only find this out after receiving all of it.
            let bytes = pending.tx.bytes();
            if bytes > MAX_TRANSACTION_BYTES {
                let reason = format!(
                    "this call has {bytes} bytes, more than the limit of {MAX_TRANSACTION_BYTES}. Nothing \
                     was sent: split it into several calls"
                );
                let why = Refusal::TooLarge(reason);
                let refused = Receipt::Refused { op: 0, why };
                self.settle(pending.call, pending.index, refused);
                continue;
            }
            if let Some(lacking) = self.lacking(&pending) {
                self.refuse(pending.call, pending.index, lacking);
                continue;
            }
            self.window.push_back(pending);
            return true;
        }
        false
    }

    /// Ends watches of keys that the engine does not store: their values would never arrive.
    fn refuse_watches(&mut self) {
        let all = Features::NONE.with(Feature::Values).with(Feature::Keys);
        if all.minus(self.offered).is_empty() || self.unsent_keys.is_empty() {
            return;
        }
        let offered = self.offered;
        let lacking = |keys: &[Key]| Features::of_watch(keys).minus(offered).first();
        let refused = self.watches.iter();
        let refused: Vec<_> = refused
            .filter_map(|(id, watch)| Some((*id, lacking(&watch.keys)?)))
            .collect();
        for (id, missing) in refused {
            let sink = Arc::clone(&self.watches[&id].sink);
            let error = self.not_offered(missing).into();
            self.events.push_back(SessionEvent::Failed(sink, error));
            self.unwatch(id);
        }
        // The broker was never asked for these keys.
        self.unsent_unwatched
            .retain(|key| lacking(std::slice::from_ref(key)).is_none());
    }

    pub(super) fn write_progress(&mut self) {
        let offered = self.capabilities.progress;
        while let Some((lease, body)) = self.unsent_progress.pop_first() {
            if offered {
                // One frame per job: a broker that is behind can then process them one at a time.
                let progress = vec![Progress { lease, body }.into()];
                let frame = proto::ToBroker {
                    progress,
                    ..proto::ToBroker::default()
                };
                encode_frame(&frame, &mut self.out);
            }
        }
    }

    pub(super) fn write_requests(&mut self) {
        self.refuse_watches();
        while !self.unsent_keys.is_empty() && self.out.len() < OUT_TARGET_BYTES {
            let waiter = self.unsent_keys[0].1;
            let portion = self.unsent_keys.iter().take(KEYS_A_FRAME);
            let portion = portion.take_while(|(_, other)| *other == waiter).count();
            let (watchers, watches) = (&self.watchers, &self.watches);
            // The watch was given up or resolved before it was sent.
            let is_wanted = |key: &Key| {
                watchers.get(key).is_some_and(|ids| {
                    let mut ids = ids.iter().filter_map(|id| watches.get(id));
                    waiter.is_none() || ids.any(|watch| watch.waiter == waiter)
                })
            };
            let keys = self.unsent_keys.drain(..portion).map(|(key, _)| key);
            let keys: Vec<proto::KeyRef> = keys.filter(is_wanted).map(Into::into).collect();
            if !keys.is_empty() {
                self.write_watch(proto::Watch {
                    keys,
                    waiter: waiter_bytes(waiter),
                    ..proto::Watch::default()
                });
            }
        }
        if self.unsent_keys.is_empty() && !self.unsent_unwatched.is_empty() {
            let unwatch = self.unsent_unwatched.drain().map(Into::into).collect();
            self.write_watch(proto::Watch {
                unwatch,
                ..proto::Watch::default()
            });
        }
        if self.unsent_keys.is_empty() && !self.unsent_over.is_empty() {
            let over: Vec<_> = self.unsent_over.drain().collect();
            for (key, waiter) in over {
                self.write_watch(proto::Watch {
                    waiter: waiter_bytes(Some(waiter)),
                    wait_over: vec![key.into()],
                    ..proto::Watch::default()
                });
            }
        }

        let mut frame = proto::ToBroker::default();
        while let Some(id) = self.unsent_queries.pop_front() {
            let Some(call) = self.calls.get(&id) else {
                continue;
            };
            let CallDone::Query { query, .. } = &call.done else {
                continue;
            };
            let needs = Features::of_query(query);
            let query: proto::Query = (id, Query::clone(query)).into();
            let encoded = || query.encode_to_vec().into();
            let lacking = self.too_new(Within::Query, encoded).or_else(|| {
                let missing = needs.minus(self.offered).first()?;
                Some(self.not_offered(missing))
            });
            if let Some(lacking) = lacking {
                self.end_call(id, lacking.into());
                continue;
            }
            frame.queries.push(query);
            if let Some(call) = self.calls.get_mut(&id) {
                call.sent = true;
            }
        }
        for (missing, sink) in self.consumers.refuse_beyond(self.offered) {
            let missing = missing.first().map(|missing| self.not_offered(missing));
            let failed = missing.map(|lacking| SessionEvent::ConsumerFailed(sink, lacking.into()));
            self.events.extend(failed);
        }
        frame.consumers = self.consumers.take_changes();
        if std::mem::take(&mut self.report_changed) {
            frame.report = self.report;
        }
        while self.out.len() < OUT_TARGET_BYTES
            && let Some(reply) = self.unsent_replies.pop_front()
        {
            // A reply may be large, so each has its own frame.
            let frame = proto::ToBroker {
                replies: vec![reply],
                ..Default::default()
            };
            encode_frame(&frame, &mut self.out);
        }
        if frame != proto::ToBroker::default() {
            encode_frame(&frame, &mut self.out);
        }
    }

    /// Returns a feature that the transaction needs and the broker or its engine lacks. A broker refuses an
    /// operation that it does not know, but silently drops an unknown field.
    pub(super) fn lacking(&self, pending: &PendingTx) -> Option<NotOffered> {
        let PendingTx { tx, durability, .. } = pending;
        let missing = match durability {
            Some(wanted) if !self.capabilities.takes(*wanted) => {
                Some(Feature::of_durability(*wanted))
            }
            _ => tx.needs.minus(self.offered).first(),
        };
        if let Some(missing) = missing {
            return Some(self.not_offered(missing));
        }
        let mut parts = tx.parts().iter();
        parts.find_map(|part| self.too_new(Within::Tx, || part.clone()))
    }

    fn not_offered(&self, feature: Feature) -> NotOffered {
        let mut lacking = self.capabilities.not_offered(feature);
        lacking.engine += &format!(" at {}", self.config.broker);
        lacking
    }

    /// Ends a call of one transaction with full details. In a call of several, the other transactions may
    /// continue.
    fn refuse(&mut self, id: u64, index: usize, lacking: NotOffered) {
        let is_one = |call: &Call| matches!(&call.done, CallDone::Commit { receipts, .. } if receipts.len() == 1);
        match self.calls.get(&id).is_some_and(is_one) {
            true => self.end_call(id, lacking.into()),
            false => self.settle(id, index, refused(&lacking)),
        }
    }

    /// Returns an addition that this broker is too old for. Costs nothing while both sides have the same
    /// version.
    fn too_new(&self, within: Within, encoded: impl FnOnce() -> Bytes) -> Option<NotOffered> {
        let versions = &self.config.versions;
        if self.version >= versions.highest {
            return None;
        }
        let Addition { what, since, .. } = *versions.too_new(self.version, within, &encoded())?;
        Some(NotOffered {
            feature: what.into(),
            engine: format!(
                "the broker at {}, which speaks version {} of the protocol",
                self.config.broker, self.version
            ),
            remedy: format!(
                "that needs version {since}. Upgrade penstock on the broker's machine, and restart the broker"
            ),
        })
    }

    fn write_watch(&mut self, watch: proto::Watch) {
        let frame = proto::ToBroker {
            watch: Some(watch),
            ..Default::default()
        };
        encode_frame(&frame, &mut self.out);
    }
}

fn waiter_bytes(waiter: Option<MessageId>) -> Bytes {
    waiter.map_or_else(Bytes::new, |waiter| Bytes::copy_from_slice(&waiter.0))
}

pub(super) fn refused(lacking: &NotOffered) -> Receipt {
    let why = Refusal::NotOffered(lacking.to_string());
    Receipt::Refused { op: 0, why }
}
