//! Unique keys: who may own one, and the possible outcomes of a claim.
//!
//! A key has at most one live owner. The model may be unsure who that is: a job whose claim ends with its first hand-out
//! may have been handed out unseen. A receipt that names an owner, or a quiet moment, resolves the doubt.

use penstock_message::{Claim, Conflict, Key, MessageId, Refusal, Until, ValueStatus};

use super::item::{End, Item, State, Stored, When};
use super::{Model, Verdict};

/// Message whose place another message takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Predecessor {
    index: usize,
    /// Whether its place was certainly taken: it may have lost the key before.
    is_sure: bool,
    may_be_ready: bool,
    is_ready: bool,
}

impl Model {
    /// Returns the keys that live messages claim.
    pub fn claimed_keys(&self) -> Vec<Key> {
        let live = self.live.iter().map(|index| &self.items[*index]);
        let mut keys: Vec<Key> = live.filter_map(|item| item.owned().cloned()).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    /// Returns the places of live items that own or may own the key.
    pub fn claimants<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = usize> + 'a {
        self.live.iter().copied().filter(move |index| {
            let item = &self.items[*index];
            item.owned() == Some(key) && !matches!(item.state, State::Ended(_))
        })
    }

    /// Whether a claimant owns its key for certain.
    pub(super) fn surely_owns(&self, index: usize) -> bool {
        let item = &self.items[index];
        // A failed group blocks the messages that it holds, which frees their keys.
        let may_be_blocked = matches!(item.state, State::Held(join) if self.may_have_failed(join));
        let may_have_started = item.until_start
            && (item.state != State::Waiting || self.moment.handed_out.contains(&item.message.id));
        item.ending().is_none()
            && !item.may_be_dead()
            && !item.claim_is_unsure
            && !may_be_blocked
            && !may_have_started
    }

    /// Returns the job for which a value keeps the key, and whether the value may have expired.
    fn kept_for(&self, key: &Key) -> Option<(MessageId, bool)> {
        let stored = self.value(key).filter(|_| matches!(key, Key::Scoped(..)))?;
        let id = stored.body.as_ref()?[..].try_into().ok().map(MessageId)?;
        Some((id, self.may_be_over(stored)))
    }

    /// Whether a job may be named as the owner of a key.
    pub(super) fn may_own(&self, id: MessageId, key: &Key) -> bool {
        let is_kept = self.kept_for(key).is_some_and(|(kept, _)| kept == id);
        is_kept
            || self
                .claimants(key)
                .any(|at| self.items[at].message.id == id)
    }

    /// Whether the retry of a job may be refused because another job may have its key.
    pub(super) fn key_may_be_taken(&self, id: MessageId) -> bool {
        let claims = self.with_id(id).filter_map(|item| item.claim.as_ref());
        claims
            .into_iter()
            .any(|key| self.key_exists(key) != Some(false))
    }

    /// Whether the retry of a job must be refused because of its key.
    pub(super) fn key_is_surely_taken(&self, item: &Item) -> bool {
        let is_sure = item.has_failed() && !item.claim_is_unsure && !item.until_start;
        let key = item.claim.as_ref().filter(|_| is_sure);
        key.is_some_and(|key| self.key_exists(key) == Some(true))
    }

    /// Whether another message can certainly take the place of this one.
    fn is_replaceable(&self, index: usize) -> bool {
        let item = &self.items[index];
        let id = item.message.id;
        let extras = item.message.extras.as_ref();
        let is_step = extras.is_some_and(|extras| {
            extras.workflow.is_some() || extras.inputs.is_some() || extras.member.is_some()
        });
        item.state == State::Waiting
            && self.surely_waits(index)
            && self.surely_owns(index)
            && !self.moment.handed_out.contains(&id)
            && item.asked.is_none()
            && item.cancelled.is_none()
            && item.suspects == 0
            && self.operations.is_empty()
            && self.with_id(id).count() == 1
            && !is_step
    }

    /// Checks the outcome of a claim. `owner`: the job that the receipt names.
    pub(super) fn claim_is_right(
        &mut self,
        claim: &Claim,
        skipped: bool,
        owner: Option<MessageId>,
    ) -> Verdict {
        let key = &claim.key;
        let exists = self.key_exists(key);
        let owners: Vec<usize> = self.claimants(key).collect();
        let sure: Vec<usize> = owners
            .iter()
            .copied()
            .filter(|at| self.surely_owns(*at))
            .collect();
        let is_right = match claim.conflict {
            Conflict::Skip | Conflict::Refuse => exists.is_none_or(|exists| exists == skipped),
            Conflict::Replace { .. } if skipped => {
                exists != Some(false) && !sure.iter().any(|at| self.is_replaceable(*at))
            }
            Conflict::Replace { .. } => {
                let runs = |at: &usize| matches!(self.items[*at].state, State::Leased { .. });
                let is_kept = self
                    .value(key)
                    .is_some_and(|stored| !self.may_be_over(stored));
                !sure.iter().any(runs) && !is_kept
            }
        };
        if !is_right {
            let owners: Vec<&Item> = owners.iter().map(|at| &self.items[*at]).collect();
            self.fail(format!(
                "skipped is {skipped}, but {claim:?} decides otherwise; its owners: {owners:?}"
            ))?;
        }
        if !skipped {
            return Ok(());
        }
        let is_kept = self.kept_for(key).is_some();
        let is_named = match (owner, &sure[..]) {
            (Some(owner), [at]) if !is_kept => self.items[*at].message.id == owner,
            (Some(owner), _) => self.may_own(owner, key),
            // The value of an application's own key names no owner.
            (None, sure) => matches!(key, Key::Named(_)) && sure.is_empty(),
        };
        if !is_named {
            let owners: Vec<&Item> = owners.iter().map(|at| &self.items[*at]).collect();
            self.fail(format!(
                "{owner:?} is said to own {key:?}; the owners are {owners:?}"
            ))?;
        }
        if let Some(owner) = owner {
            self.owner_was_seen(key, owner);
        }
        Ok(())
    }

    /// Describes the jobs that are said to own a key.
    pub(super) fn who_claims(&self, why: &Refusal) -> String {
        match why {
            Refusal::Claimed(owner) => {
                let items: Vec<&Item> = self.with_id(*owner).collect();
                format!("; the owner is {items:?}")
            }
            _ => String::new(),
        }
    }

    /// Notes that a job owns a key.
    fn owner_was_seen(&mut self, key: &Key, owner: MessageId) {
        for index in self.claimants(key).collect::<Vec<_>>() {
            let item = &mut self.items[index];
            if item.message.id == owner {
                item.claim_is_unsure = false;
            } else {
                item.lacks_key = true;
            }
        }
    }

    /// Compares, at a quiet moment, the live owner of a key.
    pub fn saw_owner(&mut self, key: &Key, owner: Option<MessageId>) -> Verdict {
        self.moment = super::Moment::default();
        let claimants: Vec<usize> = self.claimants(key).collect();
        let is_other = |at: &usize| Some(self.items[*at].message.id) != owner;
        let mut sure = claimants.iter().filter(|at| self.surely_owns(**at));
        if let Some(wronged) = sure
            .find(|at| is_other(at))
            .filter(|_| !self.clock_is_doubtful)
        {
            let id = self.items[*wronged].message.id;
            self.fail(format!(
                "{id} has the key {key:?}, and its owner is {owner:?}"
            ))?;
        }
        if let Some(owner) = owner
            && claimants.iter().all(is_other)
        {
            self.fail(format!(
                "{owner} owns {key:?}, and has lost it or never had it"
            ))?;
        }
        for index in claimants {
            let item = &mut self.items[index];
            match Some(item.message.id) == owner {
                true => item.claim_is_unsure = false,
                false => item.lacks_key = true,
            }
        }
        Ok(())
    }

    /// Ends the message whose place is taken by a new one that claims its key, or notes that it may have ended that
    /// way. Returns that message.
    pub(super) fn supersede(
        &mut self,
        number: u64,
        claim: &Claim,
        by: MessageId,
    ) -> Option<Predecessor> {
        if !matches!(claim.conflict, Conflict::Replace { .. }) {
            return None;
        }
        let owners: Vec<usize> = self.claimants(&claim.key).collect();
        let mut predecessor = None;
        for index in owners {
            // A replayed story may lack the hand-out that ended its claim.
            let is_sure = !self.lenient && self.is_replaceable(index);
            let now = self.now;
            let item = &self.items[index];
            let is_ready = is_sure && item.is_ready(now) && item.is_due(now) && item.in_order;
            let may_be_ready = !is_sure || item.due_reached || self.clock_is_doubtful;
            predecessor = Some(Predecessor {
                index,
                is_sure,
                may_be_ready,
                is_ready,
            });
            let item = &mut self.items[index];
            if is_sure {
                if let Some(ttl_ms) = item.message.result_ttl_ms {
                    let stored = Stored {
                        status: ValueStatus::Replaced,
                        body: Some(by.0.to_vec().into()),
                        until: Some(now.steady + ttl_ms),
                        late_ms: 0,
                        tx: Some(number),
                    };
                    let key = Key::Result(item.message.id);
                    self.values.insert(key, stored);
                }
                self.finish(index, End::Superseded);
            } else {
                // It has lost the key in this way or in another.
                item.lacks_key = true;
                item.may_be_superseded = true;
                if !matches!(item.state, State::Leased { .. }) {
                    item.purged = true;
                    item.end_is_unsure = true;
                }
            }
        }
        predecessor
    }

    /// Assigns the claimed key to the message that was published last, with the place and the times of its predecessor.
    pub(super) fn enter_claim(
        &mut self,
        number: u64,
        claim: &Claim,
        predecessor: Option<Predecessor>,
    ) {
        let now = self.now;
        let own_latest = match claim.conflict {
            Conflict::Replace {
                max_wait_ms: Some(ms),
            } => Some(now.steady + ms),
            _ => None,
        };
        let own = self.items.last().map(Item::line);
        let before = predecessor.map(|it| {
            let item = &self.items[it.index];
            let is_same_line = Some(item.line()) == own;
            (
                it,
                item.latest.filter(|_| item.until_start),
                item.place,
                is_same_line,
            )
        });
        let has_operations = !self.operations.is_empty();
        let Some(item) = self.items.last_mut() else {
            return;
        };
        let id = item.message.id;
        item.latest = own_latest.map(|at| (at, at));
        if let Some((it, latest, place, is_same_line)) = before {
            // The predecessor may not have counted.
            item.latest = match (latest, item.latest) {
                (Some(first), Some(own)) if !it.is_sure => {
                    Some((first.0.min(own.0), first.1.max(own.1)))
                }
                (Some(first), None) if !it.is_sure => Some((first.0, u64::MAX)),
                (first, own) => first.or(own),
            };
            let latest = item.latest;
            if is_same_line && it.may_be_ready {
                item.place = place;
                item.in_order &= it.is_ready && !has_operations;
            }
            if let Some(When::Steady(at)) = item.due {
                // The first of several waits as long as it asked to.
                let at_most = match latest.filter(|_| it.is_sure) {
                    Some(latest) => at.min(latest.1),
                    None => at,
                };
                let at_least = latest.map_or(at, |latest| at.min(latest.0));
                if latest.is_some() && it.may_be_ready {
                    // It may have been due at once.
                    item.due = None;
                    item.due_reached = true;
                    item.delayed_at_most = if it.is_ready { 0 } else { at_most };
                } else {
                    item.due = Some(When::Steady(at_least));
                    item.due_reached = at_least <= now.steady;
                    item.delayed_at_most = if at_most > at_least { at_most } else { 0 };
                }
            }
        }
        match claim.until {
            Until::Ended => item.claim = Some(claim.key.clone()),
            Until::Started => {
                item.claim = Some(claim.key.clone());
                item.until_start = true;
            }
            Until::ForMs(ms) => {
                let stored = Stored {
                    status: ValueStatus::Succeeded,
                    body: Some(id.0.to_vec().into()),
                    until: Some(now.steady + ms),
                    late_ms: 0,
                    tx: Some(number),
                };
                self.values.insert(claim.key.clone(), stored);
            }
        }
    }

    /// Notes that messages on their way to a session may have been handed out unobserved, so their keys may be free.
    pub(super) fn keys_may_be_free(&mut self) {
        let now = self.now;
        for index in &self.live {
            let item = &mut self.items[*index];
            if item.until_start && item.due.is_none_or(|due| due.has_come(now)) {
                item.claim_is_unsure = true;
            }
        }
    }
}
