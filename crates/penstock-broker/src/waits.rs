//! Waits of running jobs for others, as `result()` inside a task makes them: which job waits for which, at what depth,
//! and whether in a circle.
//!
//! ```text
//! awaited[T]    depth, (waiter, session) ...        T is a job, or the result of a join
//! waiters[W]    (session, grant, T ...) ...
//! ```
//!
//! Waits are kept only in memory. A wait lives as long as the watch that made it, and as long as that watch's
//! connection. After a reconnect the client reports it again. It counts only under the lease that its job had at the
//! time: waits of an earlier run have no effect.
//!
//! The *dependents* of W are the jobs that wait for its result, and the joins of which it is a member, with all messages
//! that they hold. Nearly always these are few jobs. If W waited for one of its dependents, it would wait forever.

pub(crate) mod stalled_workers;

use std::collections::{BTreeSet, VecDeque};

use penstock_faults::planted;
use penstock_message::{
    JoinId, Key, MessageId, RefusedWait, SeededMap, SeededSet, SeededState, WaitRefusal, WaitingJob,
};
use rustc_hash::FxHashMap;

use crate::held_effects::Effect;
use crate::messages::EntryState;
use crate::state::BrokerState;
use crate::{Broker, ConnId};

/// Number of members of joins that are prioritized at a time.
const AT_ONCE: usize = 1024;
/// Maximum number of jobs to which a greater depth is passed on.
const RAISED_AT_ONCE: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct JobWaits {
    awaited: SeededMap<MessageId, AwaitedJob>,
    waiters: SeededMap<MessageId, Vec<WaitSite>>,
    by_session: FxHashMap<u32, BTreeSet<MessageId>>,
    /// Joins whose members are to be prioritized, and the index of the next of them.
    pub(crate) forward: VecDeque<(JoinId, u32)>,
    hashing: SeededState,
}

#[derive(Debug, Default)]
struct AwaitedJob {
    depth: u32,
    edges: Vec<WaitEdge>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WaitEdge {
    waiter: MessageId,
    session: u32,
}

/// A running job that waits, and the session through which it does.
#[derive(Debug)]
struct WaitSite {
    session: u32,
    /// Epoch and number of the lease that it ran under. `None`: the broker knew of none. The wait then does not count
    /// until the worker is back with a lease that was lost in a crash.
    grant: Option<(u32, u64)>,
    keys: SeededSet<MessageId>,
}

impl JobWaits {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            awaited: SeededMap::with_hasher(hashing),
            waiters: SeededMap::with_hasher(hashing),
            hashing,
            ..Self::default()
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Returns the length of the longest known chain of waits that leads to this job; 0 if no job waits for it.
    pub(crate) fn depth_of(&self, id: &MessageId) -> u32 {
        self.awaited.get(id).map_or(0, |awaited| awaited.depth)
    }

    /// Adds a wait. Returns the depth of the awaited job.
    fn add(
        &mut self,
        waiter: MessageId,
        session: u32,
        grant: Option<(u32, u64)>,
        key: MessageId,
    ) -> u32 {
        let edge = WaitEdge { waiter, session };
        self.end_earlier_run(edge, grant);
        let awaited = self.awaited.entry(key).or_default();
        if !awaited.edges.contains(&edge) {
            awaited.edges.push(edge);
        }
        let waiters = self.waiters.entry(waiter).or_default();
        let known = waiters.iter().position(|known| known.session == session);
        let place = known.unwrap_or_else(|| {
            waiters.push(WaitSite {
                session,
                grant,
                keys: SeededSet::with_hasher(self.hashing),
            });
            waiters.len() - 1
        });
        waiters[place].keys.insert(key);
        self.by_session.entry(session).or_default().insert(waiter);
        let depth = self.depth_of(&waiter).saturating_add(1);
        self.raise(key, depth);
        self.depth_of(&key)
    }

    /// Ends the waits of a job that were made under another lease.
    fn end_earlier_run(&mut self, edge: WaitEdge, grant: Option<(u32, u64)>) {
        let waiters = self.waiters.get_mut(&edge.waiter).into_iter().flatten();
        let mut earlier =
            waiters.filter(|waiter| waiter.session == edge.session && waiter.grant != grant);
        let Some(waiter) = earlier.next() else {
            return;
        };
        waiter.grant = grant;
        let none = SeededSet::with_hasher(self.hashing);
        for key in std::mem::replace(&mut waiter.keys, none) {
            self.remove_edge(edge, &key);
        }
    }

    /// Raises an awaited job to at least this depth, and the jobs that it waits for accordingly. This is a hint: no
    /// more are raised than there is time for.
    fn raise(&mut self, key: MessageId, depth: u32) {
        let mut raised = vec![(key, depth)];
        let mut left = RAISED_AT_ONCE;
        while let Some((key, depth)) = raised.pop()
            && left > 0
        {
            left -= 1;
            let Some(awaited) = self.awaited.get_mut(&key) else {
                continue;
            };
            if awaited.depth >= depth {
                continue;
            }
            awaited.depth = depth;
            let waits = self.waiters.get(&key).into_iter().flatten();
            let keys = waits.flat_map(|waiter| waiter.keys.iter());
            raised.extend(keys.take(left).map(|key| (*key, depth.saturating_add(1))));
        }
    }

    /// Ends all waits for this key, which has arrived.
    pub(crate) fn end_key(&mut self, key: &MessageId) {
        let awaited = self.awaited.remove(key);
        for edge in awaited.into_iter().flat_map(|awaited| awaited.edges) {
            self.remove_waiter(edge, key);
        }
    }

    /// Ends a wait of a job, or all waits of the session for the key if no job is named.
    pub(crate) fn end_wait(&mut self, session: u32, key: &MessageId, waiter: Option<MessageId>) {
        let Some(awaited) = self.awaited.get_mut(key) else {
            return;
        };
        let ends = |edge: &WaitEdge| {
            edge.session == session && waiter.is_none_or(|waiter| edge.waiter == waiter)
        };
        let ended: Vec<WaitEdge> = awaited.edges.extract_if(.., |edge| ends(edge)).collect();
        if awaited.edges.is_empty() {
            self.awaited.remove(key);
        }
        for edge in ended {
            self.remove_waiter(edge, key);
        }
    }

    /// Ends all waits of an unreachable session.
    pub(crate) fn end_session(&mut self, session: u32) {
        for waiter in self.by_session.remove(&session).unwrap_or_default() {
            let waiters = self.waiters.get_mut(&waiter);
            let gone = waiters.map(|waiters| {
                let gone = waiters.extract_if(.., |waiter| waiter.session == session);
                gone.flat_map(|waiter| waiter.keys).collect()
            });
            let gone: Vec<MessageId> = gone.unwrap_or_default();
            if self.waiters.get(&waiter).is_some_and(Vec::is_empty) {
                self.waiters.remove(&waiter);
            }
            for key in gone {
                self.remove_edge(WaitEdge { waiter, session }, &key);
            }
        }
    }

    fn remove_edge(&mut self, edge: WaitEdge, key: &MessageId) {
        if let Some(awaited) = self.awaited.get_mut(key) {
            awaited.edges.retain(|other| *other != edge);
            if awaited.edges.is_empty() {
                self.awaited.remove(key);
            }
        }
    }

    fn remove_waiter(&mut self, edge: WaitEdge, key: &MessageId) {
        let WaitEdge { waiter, session } = edge;
        let Some(waiters) = self.waiters.get_mut(&waiter) else {
            return;
        };
        let Some(place) = waiters.iter().position(|known| known.session == session) else {
            return;
        };
        let keys = &mut waiters[place].keys;
        keys.remove(key);
        if keys.is_empty() {
            waiters.swap_remove(place);
            if waiters.is_empty() {
                self.waiters.remove(&waiter);
            }
            if let Some(all) = self.by_session.get_mut(&session) {
                all.remove(&waiter);
                if all.is_empty() {
                    self.by_session.remove(&session);
                }
            }
        }
    }

    /// Panics unless waits are found from both of their ends, and by their sessions.
    pub(crate) fn assert_paired(&self) {
        let mut edges = 0;
        for (key, awaited) in &self.awaited {
            assert!(
                !awaited.edges.is_empty() && awaited.depth > 0,
                "{key} is awaited"
            );
            for edge in &awaited.edges {
                let mut waiters = self.waiters[&edge.waiter].iter();
                let waiter = waiters.find(|waiter| waiter.session == edge.session);
                assert!(waiter.is_some_and(|waiter| waiter.keys.contains(key)));
                edges += 1;
            }
        }
        let waiters = self.waiters.values().flatten();
        let keys: usize = waiters.map(|waiter| waiter.keys.len()).sum();
        assert_eq!(keys, edges, "waits");
        let mut of_sessions = 0;
        for (waiter, sessions) in &self.waiters {
            for one in sessions {
                assert!(self.by_session[&one.session].contains(waiter));
                of_sessions += 1;
            }
        }
        let listed: usize = self.by_session.values().map(BTreeSet::len).sum();
        assert_eq!(listed, of_sessions, "waiters of sessions");
    }
}

/// Jobs and joins that wait for a job, the job first.
pub(crate) struct Dependents {
    nodes: Vec<DependencyNode>,
    places: SeededMap<MessageId, usize>,
}

/// A job, or the outcome of a join.
#[derive(Clone, Copy)]
struct DependencyNode {
    id: MessageId,
    join: Option<u32>,
    /// Index of the node that it waits for.
    waits_for: usize,
    /// Whether it is a running job, which waits for that node's value.
    runs: bool,
}

impl Dependents {
    fn add(&mut self, id: MessageId, join: Option<u32>, waits_for: usize, runs: bool) {
        let place = self.nodes.len();
        if let std::collections::hash_map::Entry::Vacant(entry) = self.places.entry(id) {
            entry.insert(place);
            self.nodes.push(DependencyNode {
                id,
                join,
                waits_for,
                runs,
            });
        }
    }

    /// Returns the path from a dependent of the job to the job; `None` if it is not a dependent. A join is on the path
    /// only if a job waits for its outcome: people know no others.
    fn path_from(&self, id: &MessageId) -> Option<Vec<MessageId>> {
        let mut place = *self.places.get(id)?;
        let mut way = Vec::new();
        let mut is_read = true;
        while place > 0 {
            let node = self.nodes[place];
            if node.join.is_none() || is_read {
                way.push(node.id);
            }
            is_read = node.runs;
            place = node.waits_for;
        }
        Some(way)
    }
}

impl BrokerState {
    /// Returns the lease under which a job runs.
    fn grant_of(&self, id: &MessageId) -> Option<(u32, u64)> {
        let mut copies = self.messages.copies(id);
        copies.find_map(|slot| {
            let lease = self.messages.lease_state(slot)?;
            Some((lease.grant.epoch, lease.grant.number))
        })
    }

    /// Whether the job still has the lease under which it began to wait.
    fn still_waits(&self, waiter: &WaitSite, grant: Option<(u32, u64)>) -> bool {
        grant.is_some() && waiter.grant == grant
    }

    /// Returns the keys that a running job waits for; empty if it does not wait.
    pub(crate) fn awaited_by(&self, id: &MessageId) -> Vec<MessageId> {
        let grant = self.grant_of(id);
        self.awaited_where(id, |waiter| self.still_waits(waiter, grant))
    }

    /// Returns the keys that any run of a job waits for, even one whose lease was lost: it still holds its slot.
    pub(crate) fn awaited_in_any_run(&self, id: &MessageId) -> Vec<MessageId> {
        self.awaited_where(id, |_| true)
    }

    fn awaited_where(&self, id: &MessageId, counts: impl Fn(&WaitSite) -> bool) -> Vec<MessageId> {
        let waiters = self.waits.waiters.get(id).into_iter().flatten();
        let waiters = waiters.filter(|waiter| counts(waiter));
        let mut keys: Vec<MessageId> = waiters
            .flat_map(|waiter| waiter.keys.iter().copied())
            .collect();
        keys.sort_unstable();
        keys
    }

    /// Finds everything that waits for this job.
    fn dependents(&self, job: MessageId) -> Dependents {
        let mut found = Dependents {
            nodes: Vec::new(),
            places: SeededMap::with_hasher(self.waits.hashing),
        };
        found.add(job, None, 0, true);
        self.find_dependents(&mut found);
        found
    }

    /// Returns the running jobs that wait for the outcome of this join, or for messages that it holds, at any distance.
    fn running_behind(&self, join: JoinId) -> Vec<MessageId> {
        let mut found = Dependents {
            nodes: Vec::new(),
            places: SeededMap::with_hasher(self.waits.hashing),
        };
        self.add_join(join, 0, &mut found);
        self.find_dependents(&mut found);
        let running = found.nodes.iter().filter(|node| node.runs);
        running.map(|node| node.id).collect()
    }

    fn find_dependents(&self, found: &mut Dependents) {
        let mut next = 0;
        while let Some(node) = found.nodes.get(next).copied() {
            let awaited = self.waits.awaited.get(&node.id);
            for edge in awaited.into_iter().flat_map(|awaited| &awaited.edges) {
                let grant = self.grant_of(&edge.waiter);
                let mut waiters = self.waits.waiters[&edge.waiter].iter();
                let is_it = |waiter: &&WaitSite| waiter.session == edge.session;
                let waiter = waiters.find(is_it);
                if waiter.is_some_and(|waiter| self.still_waits(waiter, grant)) {
                    found.add(edge.waiter, None, next, true);
                }
            }
            if planted!("cycle-missed-through-join") {
                next += 1;
                continue;
            }
            match node.join {
                Some(slot) => {
                    let join = &self.joins[slot];
                    for handle in &join.held {
                        let is_held = self.messages.get(*handle).is_some()
                            && self.messages.state(handle.slot) == EntryState::Held(join.id);
                        if is_held {
                            found.add(self.messages[handle.slot].id, None, next, false);
                        }
                    }
                    for place in &join.then {
                        self.add_join(place.join, next, found);
                    }
                }
                None => {
                    for slot in self.messages.copies(&node.id) {
                        if let Some(member) = self.messages.member(slot) {
                            self.add_join(member.join, next, found);
                        }
                    }
                }
            }
            next += 1;
        }
    }

    fn add_join(&self, id: JoinId, waits_for: usize, found: &mut Dependents) {
        if let Some(slot) = self.joins.find(&id)
            && !self.joins[slot].is_decided()
        {
            for id in self.joins[slot].result_ids() {
                found.add(id, Some(slot), waits_for, false);
            }
        }
    }

    /// Describes a chain of waits for people.
    fn chain(&self, ids: &[MessageId]) -> (Vec<WaitingJob>, u32) {
        let describe = |id: &MessageId| {
            let task = self.messages.copies(id).next();
            let task = task.map(|slot| self.names.text(self.messages.shared_head(slot).task));
            WaitingJob {
                id: *id,
                task: task.unwrap_or_default().to_owned(),
            }
        };
        let half = RefusedWait::MOST_JOBS / 2;
        let left_out = ids.len().saturating_sub(RefusedWait::MOST_JOBS);
        let (first, rest) = ids.split_at(half.min(ids.len()));
        let jobs = first.iter().chain(&rest[left_out..]);
        (jobs.map(describe).collect(), left_out as u32)
    }

    /// Returns the chain of jobs that starts at this one: each waits for the next, and the last does not wait.
    fn path_to_end(&self, job: MessageId) -> Vec<MessageId> {
        let mut way = vec![job];
        let mut seen = SeededSet::with_hasher(self.waits.hashing);
        seen.insert(job);
        while let Some(id) = way.last()
            && let Some(next) = self.waits_next_for(id)
            && seen.insert(next)
        {
            way.push(next);
        }
        way
    }

    fn waits_next_for(&self, id: &MessageId) -> Option<MessageId> {
        if let Some(awaited) = self.awaited_by(id).first() {
            return Some(*awaited);
        }
        let slot = self.messages.copies(id).next();
        let join = match slot.map(|slot| self.messages.state(slot)) {
            Some(EntryState::Held(join)) => self.joins.find(&join),
            Some(_) => None,
            None => self.joins.of_result(id),
        };
        let join = &self.joins[join?];
        let mut left = (0..join.count).filter(|index| !join.has_arrived(*index));
        let index = left.next().filter(|_| join.id.is_join())?;
        Some(MessageId::member(join.id, index))
    }

    /// Panics if a waiting job is in a circle of waits. Walks from the waiter, while `dependents` walks towards it.
    pub(crate) fn assert_no_circle(&self) {
        for waiter in self.waits.waiters.keys() {
            let mut seen = BTreeSet::new();
            let mut next = self.awaited_by(waiter);
            while let Some(id) = next.pop() {
                assert_ne!(id, *waiter, "a job waits for itself in the end");
                if !seen.insert(id) {
                    continue;
                }
                next.extend(self.awaited_by(&id));
                let held = self.messages.copies(&id).filter_map(|slot| {
                    let EntryState::Held(join) = self.messages.state(slot) else {
                        return None;
                    };
                    self.joins.find(&join)
                });
                for slot in held.chain(self.joins.of_result(&id)) {
                    let join = &self.joins[slot];
                    if !join.is_decided() && join.id.is_join() && join.count < 4096 {
                        let left = (0..join.count).filter(|index| !join.has_arrived(*index));
                        next.extend(left.map(|index| MessageId::member(join.id, index)));
                    }
                }
            }
        }
    }

    /// Prioritizes a job that a running one waits for. If it is held, prioritizes the jobs that it waits for.
    fn prioritize(&mut self, id: &MessageId, depth: u32) {
        let slots: Vec<u32> = self.messages.copies(id).collect();
        if slots.is_empty()
            && let Some(join) = self.joins.of_result(id)
        {
            self.prioritize_join(join, depth);
        }
        for slot in slots {
            match self.messages.state(slot) {
                EntryState::Ready => self.queues.prioritize(&self.messages, slot, depth),
                EntryState::Held(join) => {
                    if let Some(join) = self.joins.find(&join) {
                        self.prioritize_join(join, depth);
                    }
                }
                // It is prioritized when it becomes ready.
                EntryState::Delayed(_)
                | EntryState::Leased(_)
                | EntryState::Failed
                | EntryState::Ended => {}
            }
        }
    }

    fn prioritize_join(&mut self, slot: u32, depth: u32) {
        let join = &mut self.joins[slot];
        if join.awaited < depth && !join.is_decided() {
            join.awaited = depth;
            // A member's id is derived from that of its join, unless an old client chose that.
            if join.id.is_join() {
                self.waits.forward.push_back((join.id, 0));
            }
        }
    }

    /// Prioritizes members of joins that running jobs wait for, up to a limit. Returns whether all are done.
    pub(crate) fn prioritize_members(&mut self) -> bool {
        let mut left = AT_ONCE;
        while let Some((id, first)) = self.waits.forward.pop_front() {
            let Some(slot) = self.joins.find(&id) else {
                continue;
            };
            let join = &self.joins[slot];
            let (count, depth) = (join.count, join.awaited);
            if join.is_decided() {
                continue;
            }
            let next = count.min(first.saturating_add(left as u32));
            for index in first..next {
                if !self.joins[slot].has_arrived(index) {
                    self.prioritize(&MessageId::member(id, index), depth);
                }
            }
            left -= (next - first) as usize;
            if next < count {
                self.waits.forward.push_front((id, next));
                return false;
            }
        }
        true
    }

    /// Ends the waits for a key that has arrived.
    pub(crate) fn end_waits_for(&mut self, key: &Key) {
        if let (false, Key::Result(id)) = (self.waits.is_empty(), key) {
            self.waits.end_key(id);
        }
    }

    /// Prioritizes a message again that has become ready, if a running job waits for it.
    pub(crate) fn reprioritize(&mut self, slot: u32) {
        if self.waits.is_empty() {
            return;
        }
        let waited = self.waits.depth_of(&self.messages[slot].id);
        let member = self.messages.member(slot);
        let join = member.and_then(|member| self.joins.find(&member.join));
        let join = join.filter(|join| !self.joins[*join].is_decided());
        let depth = waited.max(join.map_or(0, |join| self.joins[join].awaited));
        if depth > 0 {
            self.queues.prioritize(&self.messages, slot, depth);
        }
    }
}

impl Broker {
    /// Notes that a running job waits for these pending keys. Refuses waits that would never end.
    pub(crate) fn begin_waits(&mut self, conn: ConnId, waiter: MessageId, keys: &[MessageId]) {
        let Some(connection) = self.connections.get(&conn) else {
            return;
        };
        let session = connection.session;
        if keys.is_empty() {
            return;
        }
        let before = self.state.dependents(waiter);
        let grant = self.state.grant_of(&waiter);
        let slots: Vec<u32> = self.state.messages.copies(&waiter).collect();
        for slot in slots {
            if let Some(flow) = self.state.messages.flow(slot) {
                self.state.queues.note_waiting(flow);
            }
        }
        for key in keys {
            let by_mistake = || planted!("refuse-any-wait").then(|| vec![*key]);
            if let Some(way) = before.path_from(key).or_else(by_mistake)
                && grant.is_some()
            {
                self.refuse_wait(conn, waiter, *key, WaitRefusal::Cycle, &way);
                continue;
            }
            let depth = self.state.waits.add(waiter, session, grant, *key);
            self.state.prioritize(key, depth);
        }
        self.state.prioritize_members();
        self.state.has_new_work = true;
    }

    /// Checks again for circles through a job that is known to run again: in the meantime its waits did not count.
    pub(crate) fn review_waits(&mut self, waiter: MessageId) {
        let grant = self.state.grant_of(&waiter);
        let Some(waiters) = self.state.waits.waiters.get_mut(&waiter) else {
            return;
        };
        for waiter in waiters {
            waiter.grant = waiter.grant.or(grant);
        }
        self.end_circles(waiter);
    }

    /// Looks for circles through a join that waits again for a member: while it was over, its messages waited for
    /// nothing.
    pub(crate) fn review_waits_behind(&mut self, join: JoinId) {
        if self.state.waits.is_empty() {
            return;
        }
        for waiter in self.state.running_behind(join) {
            self.end_circles(waiter);
        }
    }

    /// Ends the waits of a job for its own dependents.
    fn end_circles(&mut self, waiter: MessageId) {
        let keys = self.state.awaited_by(&waiter);
        if keys.is_empty() {
            return;
        }
        let before = self.state.dependents(waiter);
        for key in keys {
            if let Some(way) = before.path_from(&key) {
                self.end_wait(waiter, key, WaitRefusal::Cycle, &way);
            }
        }
    }

    /// Refuses a wait of a job that would never end.
    pub(crate) fn end_wait_of(&mut self, waiter: MessageId, why: WaitRefusal) {
        let Some(key) = self.state.awaited_in_any_run(&waiter).first().copied() else {
            return;
        };
        let way = self.state.path_to_end(key);
        self.end_wait(waiter, key, why, &way);
    }

    fn end_wait(&mut self, waiter: MessageId, key: MessageId, why: WaitRefusal, way: &[MessageId]) {
        let waiters = self.state.waits.waiters[&waiter].iter();
        let waiters = waiters.filter(|waiter| waiter.keys.contains(&key));
        let sessions: Vec<u32> = waiters.map(|waiter| waiter.session).collect();
        for session in sessions {
            self.state.waits.end_wait(session, &key, Some(waiter));
            if let Some(conn) = self.state.sessions[session].conn {
                self.refuse_wait(conn, waiter, key, why, way);
            }
        }
    }

    /// Sends a refusal. `way`: the jobs from the awaited one on, each of which waits for the next.
    fn refuse_wait(
        &mut self,
        conn: ConnId,
        waiter: MessageId,
        key: MessageId,
        why: WaitRefusal,
        way: &[MessageId],
    ) {
        let chain: Vec<MessageId> = [waiter].into_iter().chain(way.iter().copied()).collect();
        let (jobs, left_out) = self.state.chain(&chain);
        let refused = Box::new(RefusedWait {
            key: Key::Result(key),
            waiter,
            why,
            jobs,
            left_out,
        });
        self.effect(self.everything, Effect::Refused { conn, refused });
    }

    /// Notes that the job no longer waits for these keys.
    pub(crate) fn end_waits(&mut self, conn: ConnId, waiter: Option<MessageId>, keys: &[Key]) {
        let Some(connection) = self.connections.get(&conn) else {
            return;
        };
        if self.state.waits.is_empty() {
            return;
        }
        for key in keys {
            if let Key::Result(key) = key {
                let session = connection.session;
                self.state.waits.end_wait(session, key, waiter);
            }
        }
    }
}
