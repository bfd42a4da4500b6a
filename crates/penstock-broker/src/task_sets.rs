//! Sets of tasks that consumers can run. Equal ones are kept once: a thousand workers of an app share one.

use penstock_message::{SeededMap, SeededSet, SeededState};

use crate::names::Name;
use crate::slab::Slab;

#[derive(Debug, Default)]
pub(crate) struct TaskSets {
    sets: Slab<TaskSet>,
    by_names: SeededMap<Vec<Name>, u32>,
}

#[derive(Debug)]
struct TaskSet {
    /// In order; the key of `by_names`.
    names: Vec<Name>,
    members: SeededSet<Name>,
    /// Consumers that can run these.
    users: usize,
}

impl TaskSets {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            sets: Slab::default(),
            by_names: SeededMap::with_hasher(hashing),
        }
    }

    /// The set of these tasks, which has one user more.
    pub(crate) fn take(&mut self, mut names: Vec<Name>) -> u32 {
        names.sort_unstable();
        names.dedup();
        if let Some(set) = self.by_names.get(&names) {
            self.sets[*set].users += 1;
            return *set;
        }
        let mut members = SeededSet::with_hasher(*self.by_names.hasher());
        members.extend(names.iter().copied());
        let set = self.sets.insert(TaskSet {
            names: names.clone(),
            members,
            users: 1,
        });
        self.by_names.insert(names, set);
        set
    }

    /// A set has one user less.
    pub(crate) fn give(&mut self, set: Option<u32>) {
        let Some(set) = set else {
            return;
        };
        self.sets[set].users -= 1;
        if self.sets[set].users == 0 {
            let TaskSet { names, .. } = self.sets.remove(set);
            self.by_names.remove(&names);
        }
    }

    /// `None`: a set of all tasks.
    pub(crate) fn has(&self, set: Option<u32>, task: Name) -> bool {
        set.is_none_or(|set| self.sets[set].members.contains(&task))
    }

    /// How many sets there are, and how many users they have in all.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (usize, usize) {
        let users = self.sets.iter().map(|(_, set)| set.users).sum();
        (self.sets.len(), users)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lists_are_one_set_for_as_long_as_anybody_has_it() {
        let mut sets = TaskSets::default();
        let [one, two, three] = [0, 1, 2].map(Name::at);
        let first = sets.take(vec![two, one, two]);
        assert_eq!(sets.take(vec![one, two]), first);
        let other = sets.take(vec![three]);
        assert_eq!(sets.counts(), (2, 3));
        assert!(sets.has(Some(first), one) && !sets.has(Some(first), three));
        assert!(sets.has(Some(other), three) && sets.has(None, one));
        sets.give(Some(first));
        assert_eq!(sets.counts(), (2, 2));
        sets.give(Some(first));
        sets.give(Some(other));
        sets.give(None);
        assert_eq!(sets.counts(), (0, 0));
    }
}
