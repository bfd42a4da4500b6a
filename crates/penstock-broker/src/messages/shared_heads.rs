//! Properties that many messages share, stored once.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use penstock_message::{SeededMap, SeededState};

use crate::queues::tally::{Counter, TallyCounts};
use crate::table::interner::Name;

/// Properties of a message that few messages have for themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SharedHead {
    pub(crate) queue: u32,
    pub(crate) task: Name,
    pub(crate) priority: u8,
    pub(crate) max_deliveries: u8,
    pub(crate) crashes: u8,
    /// Number of retries after it had failed for good, and the attempts that it had made by then.
    pub(crate) generation: u32,
    pub(crate) attempts_before: u32,
    pub(crate) attempt: u32,
    pub(crate) result_ttl_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedHeadId(NonZeroU32);

impl SharedHeadId {
    fn new(index: usize) -> Self {
        let id = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        Self(id.expect("fewer than 2^32 shared heads"))
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Number of unused heads that are kept, besides as many as are in use. If jobs come one at a time, each has the head
/// that was just released.
const UNUSED_KEPT: usize = 64;
/// Number of heads whose counts are added to the tallies at once, or as many as one input concerns: some 10 µs.
const COUNTED_AT_ONCE: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct SharedHeads {
    heads: Vec<CountedHead>,
    by_head: SeededMap<SharedHead, SharedHeadId>,
    free: Vec<SharedHeadId>,
    unused: usize,
    last: Option<SharedHeadId>,
    /// Number of heads of each queue, and of each task.
    of_queues: Vec<u32>,
    of_tasks: Vec<u32>,
    /// Heads with counts that are not yet in the tallies of their queues and tasks.
    counted: Vec<SharedHeadId>,
}

#[derive(Debug)]
struct CountedHead {
    head: SharedHead,
    /// Number of messages with this head; `None` if its slot is free.
    users: Option<u32>,
    /// Flow of ready messages with this head, once there has been one.
    flow: Option<u32>,
    /// Counts of messages with this head that are not in a tally yet. While there are any, the head is in `counted`.
    counts: TallyCounts,
    is_counted: bool,
}

fn adjust(counts: &mut Vec<u32>, index: usize, by: i32) {
    if counts.len() <= index {
        counts.resize(index + 1, 0);
    }
    counts[index] = counts[index]
        .checked_add_signed(by)
        .expect("shared heads are counted when they come and when they go");
}

impl SharedHeads {
    /// Creates an empty table. Clients choose times to live and attempts, so heads are hashed with a seed too.
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_head: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.by_head.hasher()
    }

    /// Adds a message with this head.
    pub(crate) fn add_message(&mut self, head: &SharedHead) -> SharedHeadId {
        // A burst of jobs has one head.
        let last = self
            .last
            .filter(|last| self.heads[last.index()].head == *head);
        let known = last.or_else(|| self.by_head.get(head).copied());
        let id = known.unwrap_or_else(|| self.add(*head));
        let users = self.heads[id.index()].users.as_mut();
        let users = users.expect("a shared head that is found is not free");
        self.unused -= usize::from(*users == 0);
        *users += 1;
        self.last = Some(id);
        id
    }

    fn add(&mut self, head: SharedHead) -> SharedHeadId {
        let counted = CountedHead {
            head,
            users: Some(0),
            flow: None,
            counts: TallyCounts::default(),
            is_counted: false,
        };
        self.unused += 1;
        adjust(&mut self.of_queues, head.queue as usize, 1);
        adjust(&mut self.of_tasks, head.task.index(), 1);
        let id = match self.free.pop() {
            Some(id) => {
                self.heads[id.index()] = counted;
                id
            }
            None => {
                self.heads.push(counted);
                SharedHeadId::new(self.heads.len() - 1)
            }
        };
        self.by_head.insert(head, id);
        id
    }

    /// Removes a message with this head.
    pub(crate) fn remove_message(&mut self, id: SharedHeadId) {
        let users = self.heads[id.index()].users.as_mut();
        let users = users.expect("a shared head in use is not free");
        *users -= 1;
        self.unused += usize::from(*users == 0);
    }

    /// Counts an event for the queue and the task of the head: see [`SharedHeads::next_counted`].
    #[inline]
    pub(crate) fn count(&mut self, id: SharedHeadId, what: Counter) {
        let counted = &mut self.heads[id.index()];
        counted.counts[what as usize] += 1;
        if !std::mem::replace(&mut counted.is_counted, true) {
            self.counted.push(id);
        }
    }

    /// Whether too many counts wait to be added to the tallies.
    pub(crate) fn has_many_counted(&self) -> bool {
        self.counted.len() > COUNTED_AT_ONCE
    }

    /// Takes a head, and the counts to add to the tallies of its queue and its task.
    pub(crate) fn next_counted(&mut self) -> Option<(SharedHead, TallyCounts)> {
        let counted = &mut self.heads[self.counted.pop()?.index()];
        counted.is_counted = false;
        Some((counted.head, std::mem::take(&mut counted.counts)))
    }

    /// Whether there are enough unused heads to drop them.
    pub(crate) fn has_many_unused(&self) -> bool {
        self.unused > UNUSED_KEPT + self.by_head.len() / 2
    }

    /// Whether the queue has messages in any state, or unused heads.
    pub(crate) fn any_of_queue(&self, queue: u32) -> bool {
        let heads = self.of_queues.get(queue as usize);
        heads.is_some_and(|heads| *heads > 0)
    }

    pub(crate) fn any_of_task(&self, task: Name) -> bool {
        let heads = self.of_tasks.get(task.index());
        heads.is_some_and(|heads| *heads > 0)
    }

    #[inline]
    pub(crate) fn flow(&self, id: SharedHeadId) -> Option<u32> {
        self.heads[id.index()].flow
    }

    pub(crate) fn set_flow(&mut self, id: SharedHeadId, flow: u32) {
        self.heads[id.index()].flow = Some(flow);
    }

    /// Counts the heads that use each flow.
    pub(crate) fn users_of_flows(&self) -> BTreeMap<u32, u32> {
        let mut users = BTreeMap::new();
        for flow in self.heads.iter().filter_map(|counted| counted.flow) {
            *users.entry(flow).or_insert(0) += 1;
        }
        users
    }

    /// Forgets unused heads. Returns their flows, each as often as it loses a user. Their counts must be in tallies.
    pub(crate) fn drop_unused(&mut self) -> Vec<u32> {
        let mut flows = Vec::new();
        if self.unused == 0 {
            return flows;
        }
        assert!(
            self.counted.is_empty(),
            "a shared head is dropped without counts"
        );
        for (index, counted) in self.heads.iter_mut().enumerate() {
            if counted.users == Some(0) {
                counted.users = None;
                self.by_head.remove(&counted.head);
                self.free.push(SharedHeadId::new(index));
                flows.extend(counted.flow.take());
                adjust(&mut self.of_queues, counted.head.queue as usize, -1);
                adjust(&mut self.of_tasks, counted.head.task.index(), -1);
            }
        }
        let used = |counted: &CountedHead| counted.users.is_some();
        let len = self.heads.iter().rposition(used).map_or(0, |last| last + 1);
        if len < self.heads.len() / 4 {
            self.heads.truncate(len);
            self.heads.shrink_to(2 * len);
            self.free.retain(|id| id.index() < len);
            self.free.shrink_to(2 * len);
        }
        if self.by_head.len() < self.by_head.capacity() / 8 {
            self.by_head.shrink_to(2 * self.by_head.len());
        }
        self.unused = 0;
        self.last = None;
        flows
    }

    /// Panics unless each head has this many messages.
    pub(crate) fn assert_counts(&self, expected: &SeededMap<SharedHead, u32>) {
        let mut in_use = 0;
        for counted in &self.heads {
            if let Some(users) = counted.users {
                let found = expected.get(&counted.head).copied().unwrap_or(0);
                assert_eq!(users, found, "the messages of {:?}", counted.head);
                in_use += usize::from(users > 0);
            }
        }
        assert_eq!(in_use, expected.len(), "shared heads in use");
        assert_eq!(
            self.by_head.len(),
            in_use + self.unused,
            "shared heads that are kept"
        );
    }
}

impl std::ops::Index<SharedHeadId> for SharedHeads {
    type Output = SharedHead;

    fn index(&self, id: SharedHeadId) -> &SharedHead {
        &self.heads[id.index()].head
    }
}
