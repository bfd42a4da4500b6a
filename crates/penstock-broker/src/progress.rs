//! Progress of running jobs: the latest that each has reported. Kept only in memory, so a restart of the broker forgets
//! it.
//!
//! It is kept apart from the jobs, so that a job that reports none pays nothing. Progress starts anew with each lease.
//! The latest progress of recently ended jobs is kept for a while, for clients that ask shortly after the end.

use std::collections::VecDeque;

use bytes::Bytes;
use penstock_message::{MessageId, Progress, SeededMap, SeededState};

use crate::state::BrokerState;
use crate::{Broker, ConnId};

/// Number of ended jobs whose last progress is kept.
const ENDED_KEPT: usize = 1000;
/// Maximum total bytes of the progress of running jobs. Progress beyond that is dropped.
const ALL_CAP_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub(crate) struct JobsProgress {
    /// Progress of running jobs, by the numbers of their grants.
    running: SeededMap<u64, Bytes>,
    bytes: usize,
    ended: SeededMap<MessageId, (u64, Bytes)>,
    /// Ended jobs, oldest first; some may be gone.
    order: VecDeque<(u64, MessageId)>,
    ends: u64,
}

impl JobsProgress {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            running: SeededMap::with_hasher(hashing),
            bytes: 0,
            ended: SeededMap::with_hasher(hashing),
            order: VecDeque::new(),
            ends: 0,
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.ended.hasher()
    }

    fn note(&mut self, grant: u64, body: Bytes) {
        let known = self.running.get(&grant).map_or(0, Bytes::len);
        if body.len() > Progress::CAP_BYTES || self.bytes - known + body.len() > ALL_CAP_BYTES {
            return;
        }
        self.bytes = self.bytes - known + body.len();
        // A copy, since the bytes are a slice of a frame, which may be large.
        self.running.insert(grant, Bytes::copy_from_slice(&body));
    }

    /// Whether no job has reported any progress for a while. If so, ends of leases need not be noted.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.ended.is_empty()
    }

    /// Notes that a lease has ended, whatever happens to its job.
    pub(crate) fn lease_ended(&mut self, grant: u64, job: &MessageId) {
        self.ended.remove(job);
        let Some(body) = self.running.remove(&grant) else {
            return;
        };
        self.bytes -= body.len();
        self.ends += 1;
        self.ended.insert(*job, (self.ends, body));
        self.order.push_back((self.ends, *job));
        while self.order.len() > ENDED_KEPT
            && let Some((number, job)) = self.order.pop_front()
        {
            if self.ended.get(&job).is_some_and(|(at, _)| *at == number) {
                self.ended.remove(&job);
            }
        }
    }
}

impl BrokerState {
    /// Returns the latest progress of a running job, or the last of an ended one. A job that waits for another attempt
    /// has none.
    pub(crate) fn progress_of(&self, job: &MessageId) -> Option<Bytes> {
        let messages = &self.messages;
        let mut waits = false;
        for slot in messages.copies(job) {
            if let Some(lease) = messages.lease_state(slot) {
                return self.progress.running.get(&lease.grant.number).cloned();
            }
            waits |= !messages[slot].is_failed();
        }
        let ended = self.progress.ended.get(job).filter(|_| !waits);
        ended.map(|(_, body)| body.clone())
    }
}

impl Broker {
    pub(crate) fn note_progress(&mut self, conn: ConnId, progress: Progress) {
        let Some(connection) = self.connections.get(&conn) else {
            return;
        };
        let session = connection.session;
        let Progress { lease, body } = progress;
        let state = &mut self.state;
        let Some(slot) = state.messages.find_lease(&lease) else {
            return;
        };
        let held = state.messages.lease_state(slot);
        if held.is_some_and(|held| held.session == session) {
            state.progress.note(lease.grant, body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_bounded() {
        let mut progress = JobsProgress::new(SeededState::default());
        let body = Bytes::from(vec![0; Progress::CAP_BYTES]);
        let fitting = (ALL_CAP_BYTES / Progress::CAP_BYTES) as u64;
        for grant in 0..fitting + 10 {
            progress.note(grant, body.clone());
        }
        assert_eq!(progress.running.len() as u64, fitting);
        assert_eq!(progress.bytes, ALL_CAP_BYTES);
        // The new text fits into the place of the earlier one.
        progress.note(7, Bytes::from_static(b"short"));
        progress.note(fitting, Bytes::from_static(b"short"));
        assert_eq!(progress.running.len() as u64, fitting + 1);
        for grant in 0..fitting + 10 {
            progress.lease_ended(grant, &MessageId(u128::from(grant).to_le_bytes()));
        }
        assert_eq!((progress.running.len(), progress.bytes), (0, 0));
        assert_eq!(
            (progress.ended.len(), progress.order.len()),
            (ENDED_KEPT, ENDED_KEPT)
        );
        // A job that runs again and again takes one entry.
        for grant in 0..5_000 {
            progress.note(grant, Bytes::from_static(b"again"));
            progress.lease_ended(grant, &MessageId([1; 16]));
        }
        assert_eq!(
            (progress.ended.len(), progress.order.len()),
            (1, ENDED_KEPT)
        );
    }
}
