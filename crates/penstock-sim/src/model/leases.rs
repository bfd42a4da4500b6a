//! Holders of leases: hand-outs, sessions that come and go, and the leases left after a crash. Nearly all of the
//! model's doubt is here.

use bytes::Bytes;
use penstock_jobs::delay_after_crash_ms;
use penstock_message::{
    Delivery, InputValue, InputValues, JoinId, Key, Lease, MessageId, SessionId, ValueStatus,
};

use super::item::{Attendance, Item, Run, State};
use super::{Model, Verdict, suspects};

impl Model {
    /// Notes that the message was handed to this session.
    pub fn delivered(&mut self, session: SessionId, delivery: &Delivery) -> Verdict {
        let Delivery {
            lease,
            queue,
            consumer: _,
            message,
            inputs,
            redelivered,
            deadline: _,
        } = delivery;
        self.seen.insert((*lease, session), Run::from(message));
        let copies = self.by_id.get(&lease.message).cloned().unwrap_or_default();
        for index in &copies {
            if self.may_let_go(*index) {
                self.was_let_go(*index);
            }
        }
        let here = copies.iter().copied().find(|index| {
            let item = &self.items[*index];
            item.queue == *queue
                && matches!(item.state, State::Waiting | State::Adrift { .. })
                && (item.crashes.0..=item.crashes.1).contains(&message.crashes)
        });
        let Some(index) = here else {
            let states: Vec<String> = copies
                .iter()
                .map(|index| {
                    format!(
                        "{:?} in {}, {:?} crashes",
                        self.items[*index].state,
                        self.items[*index].queue,
                        self.items[*index].crashes
                    )
                })
                .collect();
            if self.lenient {
                // The model is certain of less than was observed before the crash.
                let mut copies = copies.into_iter().filter(|index| {
                    !matches!(self.items[*index].state, State::Ended(_) | State::Held(_))
                });
                let first = copies.clone().next();
                if let Some(index) = copies
                    .find(|index| self.items[*index].queue == *queue)
                    .or(first)
                {
                    let (least, most) = self.items[index].crashes;
                    self.items[index].lend(*lease, session, (least, most.max(message.crashes)));
                }
                return Ok(());
            }
            return Err(format!(
                "{} must not be delivered from {queue} with {} crashes: it is {states:?}",
                lease.message, message.crashes
            ));
        };
        let id = lease.message;
        let item = &self.items[index];
        if !item.due_reached && !self.clock_is_doubtful {
            self.fail(format!("{id} was started before its time: {:?}", item.due))?;
        }
        let lost_at = item.lost_at;
        let has_crashed_since = lost_at > 0 && message.crashes > item.crashes.0;
        if has_crashed_since
            && self.now.steady < lost_at + delay_after_crash_ms(message.crashes)
            && !self.clock_is_doubtful
        {
            let crashes = message.crashes;
            self.fail(format!(
                "{id} was started at once after crash {crashes}, of {lost_at} or later"
            ))?;
        }
        let same = (
            &item.message.body,
            &item.message.task,
            item.message.priority,
            item.message.attempt,
        );
        if same
            != (
                &message.body,
                &message.task,
                message.priority,
                message.attempt,
            )
        {
            self.fail(format!(
                "{id} is not as it was sent: {message:?}, not {:?}",
                item.message
            ))?;
        }
        self.was_given(id, &self.items[index], inputs)?;
        let item = &self.items[index];
        let mut found = message.notes.iter();
        if !item
            .notes
            .iter()
            .all(|note| found.any(|other| other == note))
        {
            self.fail(format!("{id} lacks a note of {:?}", item.notes))?;
        }
        if item.suspects != suspects(message) {
            let (expected, found) = (item.suspects, suspects(message));
            self.fail(format!(
                "{id} was a suspect {expected} times, and says {found}"
            ))?;
        }
        if item.asked.is_some_and(|asked| order(lease) > asked) {
            let asked = item.asked;
            self.fail(format!(
                "{id} was asked to stop at grant {asked:?}, and starts again: {lease:?}"
            ))?;
        }
        if item
            .cancelled
            .is_some_and(|cancelled| order(lease) > cancelled)
        {
            let cancelled = item.cancelled;
            self.fail(format!(
                "{id} was cancelled at grant {cancelled:?}, and starts: {lease:?}"
            ))?;
        }
        if self.still.contains(queue) {
            self.fail(format!("{id} was delivered from {queue}, which is paused"))?;
        }
        if item.may_have_run && !redelivered {
            self.fail(format!("{id} may have run before, and does not say so"))?;
        }
        if !item
            .leases
            .iter()
            .all(|(before, _)| order(before) < order(lease))
        {
            self.fail(format!("{lease:?} is not newer than {:?}", item.leases))?;
        }
        let least = if self.lenient {
            item.crashes.0
        } else {
            message.crashes
        };
        let item = &mut self.items[index];
        // An unobserved crash has delayed it: its place dates from the end of the delay.
        let was_delayed = message.crashes > item.crashes.0;
        item.in_order &= !was_delayed || delay_after_crash_ms(message.crashes) == 0;
        item.lend(*lease, session, (least, message.crashes));
        Ok(())
    }

    /// Compares the values that a job receives with those that the members of its join are known to have stored.
    fn was_given(&self, id: MessageId, item: &Item, inputs: &Bytes) -> Verdict {
        let extras = item.message.extras.as_deref();
        let Some(join) = extras
            .and_then(|extras| extras.inputs)
            .map(|inputs| inputs.join)
        else {
            return Ok(());
        };
        let given = match InputValues::decode(inputs) {
            Ok(given) => given,
            Err(_) => return self.fail(format!("{id} was given {inputs:?} for its inputs")),
        };
        self.given_is_right(id, join, &given)
    }

    /// Compares values with those of the members of a join.
    fn given_is_right(&self, id: MessageId, join: JoinId, given: &InputValues) -> Verdict {
        let count = self.joins.get(&join).map_or(given.count, |join| join.count);
        if given.join != join || given.count != count {
            return self.fail(format!(
                "{id} was given {given:?} of {join}, which has {count}"
            ));
        }
        let values = given.values.iter().flatten();
        for (index, value) in (0..).zip(values) {
            if let (Some(inner), InputValue::Gathered(values)) =
                (self.by_place.get(&(join, index)), value)
            {
                self.given_is_right(id, *inner, values)?;
                continue;
            }
            let key = Key::Result(MessageId::member(join, index));
            let Some(stored) = self.values.get(&key) else {
                continue;
            };
            let is_right = match (stored.status, &stored.body) {
                (ValueStatus::Succeeded, Some(body)) => {
                    *value == InputValue::Of(stored.status, body.clone())
                }
                (ValueStatus::Gathered, _) => false,
                _ => continue,
            };
            if !is_right {
                return self.fail(format!(
                    "{id} was given {value:?} as value {index} of {join}, not {stored:?}"
                ));
            }
        }
        Ok(())
    }

    /// Notes a session's hello; messages with leases that it holds but does not present return to their queues.
    pub fn hello(&mut self, session: SessionId, heartbeat_ms: u64, presented: &[Lease]) {
        let presented = presented.to_vec();
        for index in &self.live {
            let item = &mut self.items[*index];
            // As when a session disconnects: this may be its second connection.
            item.end_is_unsure |= item.purged;
            if let State::Leased {
                lease,
                session: holder,
                ..
            } = item.state
                && holder == session
                && !presented.contains(&lease)
            {
                item.come_back();
            }
        }
        self.keys_may_be_free();
        let attendance = Attendance {
            heartbeat_ms,
            away_since: None,
            presented,
        };
        self.sessions.insert(session, attendance);
    }

    /// Notes which leases the session's welcome named.
    pub fn welcomed(&mut self, session: SessionId, named: &[Lease]) -> Verdict {
        let presented = self
            .sessions
            .get_mut(&session)
            .map(|attendance| std::mem::take(&mut attendance.presented));
        for lease in named {
            match self
                .holder(lease, session)
                .map(|(index, _)| index)
                .or_else(|| self.not_ended_yet(lease, session))
                .or_else(|| self.published_again(lease, session))
            {
                Some(index) => {
                    self.items[index].keep(*lease, session);
                }
                None => self.fail(format!("{lease:?} was said to hold, and can't"))?,
            }
        }
        for lease in presented.unwrap_or_default() {
            if !named.contains(&lease)
                && let Some((index, certain)) = self.holder(&lease, session)
            {
                if certain {
                    self.fail(format!("{lease:?} held, and was taken away"))?;
                }
                self.items[index].give_up(&lease);
            }
        }
        Ok(())
    }

    pub fn left(&mut self, session: SessionId, clean: bool) {
        self.keys_may_be_free();
        let now = self.now.steady;
        if let Some(attendance) = self.sessions.get_mut(&session) {
            attendance.away_since.get_or_insert(now);
        }
        for index in &self.live {
            let item = &mut self.items[*index];
            // It may have been on its way to this session when its queue was purged.
            item.end_is_unsure |= item.purged;
            if clean
                && matches!(item.state, State::Leased { session: holder, .. } if holder == session)
            {
                item.come_back();
            }
        }
    }

    /// Notes that the broker has died and restarted: grants may be lost, or may have been made unobserved.
    pub fn restarted(&mut self, longest_heartbeat_ms: u64) {
        let now = self.now.steady;
        // An operation continues, but each broker counts for itself.
        self.operations.clear();
        for index in &self.live {
            let item = &mut self.items[*index];
            let safe_and_present = match item.state {
                State::Leased { session, safe, .. } => {
                    safe && self.sessions[&session].away_since.is_none()
                }
                _ => false,
            };
            if matches!(item.state, State::Ended(_)) || safe_and_present {
                continue;
            }
            item.unsure_until = now + longest_heartbeat_ms;
            // The hand-out that ended its claim may be lost, or may have been made unobserved.
            item.claim = item.started_claim.take().or(item.claim.take());
            item.claim_is_unsure |= item.until_start;
            item.end_is_unsure |= item.purged;
            if item.leases.is_empty() {
                item.crashes.1 = item.crashes.1.saturating_add(1);
                let most_ms = delay_after_crash_ms(item.crashes.1);
                if most_ms > 0 {
                    item.in_order = false;
                    item.delayed_at_most = item.unsure_until + most_ms;
                }
            } else {
                let may_hold = |(lease, _): &&(Lease, SessionId)| {
                    item.settled
                        .is_none_or(|settled| order(lease) > order(&settled))
                };
                let maybe = item.leases.iter().filter(may_hold).copied().collect();
                item.set_adrift(maybe);
            }
        }
        for attendance in self.sessions.values_mut() {
            attendance.away_since.get_or_insert(now);
        }
    }

    /// Finds the item of this lease, if it may hold, and whether it certainly does.
    pub(super) fn holder(&self, lease: &Lease, session: SessionId) -> Option<(usize, bool)> {
        let copies = self.by_id.get(&lease.message)?;
        copies
            .iter()
            .find_map(|index| match &self.items[*index].state {
                State::Leased {
                    lease: held,
                    session: holder,
                    ..
                } if held == lease && *holder == session => Some((*index, true)),
                State::Adrift { maybe } if maybe.contains(&(*lease, session)) => {
                    Some((*index, false))
                }
                _ => None,
            })
    }

    /// Finds a message whose lease the session gave up, and which the broker had not yet taken back when the session
    /// reconnected.
    fn not_ended_yet(&self, lease: &Lease, session: SessionId) -> Option<usize> {
        let copies = self.by_id.get(&lease.message)?;
        copies.iter().copied().find(|index| {
            let item = &self.items[*index];
            item.state == State::Waiting && item.comes_back == Some((*lease, session))
        })
    }

    /// Finds a message whose publishing and hand-out were lost in a crash, and which was then sent again: a session
    /// that holds it may continue.
    fn published_again(&self, lease: &Lease, session: SessionId) -> Option<usize> {
        let copies = self.by_id.get(&lease.message)?;
        let may_hold = |item: &Item| {
            item.unsure_until > 0 && matches!(item.state, State::Waiting | State::Adrift { .. })
        };
        let index = copies
            .iter()
            .copied()
            .find(|index| may_hold(&self.items[*index]))?;
        self.seen.contains_key(&(*lease, session)).then_some(index)
    }
}

/// Returns the key that sorts grants in the order in which they are made.
fn order(lease: &Lease) -> (u32, u64) {
    (lease.epoch, lease.grant)
}
