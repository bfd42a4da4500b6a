//! What many messages have in common, kept once.

use std::num::NonZeroU32;

use penstock_message::{SeededMap, SeededState};

use crate::names::Name;

/// All of a message that few messages have for themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub(crate) queue: u32,
    pub(crate) task: Name,
    pub(crate) priority: u8,
    pub(crate) max_deliveries: u8,
    pub(crate) crashes: u8,
    /// How often it was retried after it had failed for good, and the attempts it had made by then.
    pub(crate) generation: u32,
    pub(crate) attempts_before: u32,
    pub(crate) attempt: u32,
    pub(crate) result_ttl_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KindId(NonZeroU32);

impl KindId {
    fn new(index: usize) -> Self {
        let id = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        Self(id.expect("fewer than 2^32 kinds"))
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Unused kinds are kept up to so many and as many as are used: a lone job at a time is always of the
/// kind that was just let go.
const UNUSED_KEPT: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Kinds {
    kinds: Vec<Counted>,
    by_kind: SeededMap<Kind, KindId>,
    free: Vec<KindId>,
    unused: usize,
    last: Option<KindId>,
}

#[derive(Debug)]
struct Counted {
    kind: Kind,
    /// `None`: its place is free.
    users: Option<u32>,
}

impl Kinds {
    /// Clients choose times to live and attempts, so kinds are hashed with a seed too.
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_kind: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.by_kind.hasher()
    }

    /// One more message is of this kind.
    pub(crate) fn take(&mut self, kind: &Kind) -> KindId {
        // A burst of jobs is of one kind.
        let last = self
            .last
            .filter(|last| self.kinds[last.index()].kind == *kind);
        let known = last.or_else(|| self.by_kind.get(kind).copied());
        let id = known.unwrap_or_else(|| self.add(*kind));
        let users = self.kinds[id.index()].users.as_mut();
        let users = users.expect("a kind that is found is not free");
        self.unused -= usize::from(*users == 0);
        *users += 1;
        self.last = Some(id);
        id
    }

    fn add(&mut self, kind: Kind) -> KindId {
        let counted = Counted {
            kind,
            users: Some(0),
        };
        self.unused += 1;
        let id = match self.free.pop() {
            Some(id) => {
                self.kinds[id.index()] = counted;
                id
            }
            None => {
                self.kinds.push(counted);
                KindId::new(self.kinds.len() - 1)
            }
        };
        self.by_kind.insert(kind, id);
        id
    }

    /// One message of this kind less.
    pub(crate) fn give(&mut self, id: KindId) {
        let users = self.kinds[id.index()].users.as_mut();
        let users = users.expect("a kind in use is not free");
        *users -= 1;
        if *users == 0 {
            self.unused += 1;
            if self.unused > UNUSED_KEPT + self.by_kind.len() / 2 {
                self.drop_unused();
            }
        }
    }

    fn drop_unused(&mut self) {
        for (index, counted) in self.kinds.iter_mut().enumerate() {
            if counted.users == Some(0) {
                counted.users = None;
                self.by_kind.remove(&counted.kind);
                self.free.push(KindId::new(index));
            }
        }
        if self.by_kind.len() < self.by_kind.capacity() / 8 {
            self.by_kind.shrink_to(2 * self.by_kind.len());
        }
        self.unused = 0;
        self.last = None;
    }

    /// Panics unless each kind is counted as often as here.
    pub(crate) fn assert_counts(&self, expected: &SeededMap<Kind, u32>) {
        let mut in_use = 0;
        for counted in &self.kinds {
            if let Some(users) = counted.users {
                let found = expected.get(&counted.kind).copied().unwrap_or(0);
                assert_eq!(users, found, "the messages of {:?}", counted.kind);
                in_use += usize::from(users > 0);
            }
        }
        assert_eq!(in_use, expected.len(), "kinds in use");
        assert_eq!(
            self.by_kind.len(),
            in_use + self.unused,
            "kinds that are kept"
        );
    }
}

impl std::ops::Index<KindId> for Kinds {
    type Output = Kind;

    fn index(&self, id: KindId) -> &Kind {
        &self.kinds[id.index()].kind
    }
}
