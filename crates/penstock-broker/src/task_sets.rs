//! Sets of tasks that consumers can run. Equal ones are kept once: a thousand workers of an app share one.

use penstock_message::{SeededMap, SeededState};

use crate::names::{Name, Names};
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
    pub(crate) fn take(&mut self, mut tasks: Vec<Name>, names: &mut Names) -> u32 {
        tasks.sort_unstable();
        tasks.dedup();
        if let Some(set) = self.by_names.get(&tasks) {
            self.sets[*set].users += 1;
            return *set;
        }
        tasks.iter().for_each(|task| names.hold(*task));
        let set = self.sets.insert(TaskSet {
            names: tasks.clone(),
            users: 1,
        });
        self.by_names.insert(tasks, set);
        set
    }

    /// A set has one user less.
    pub(crate) fn give(&mut self, set: Option<u32>, names: &mut Names) {
        let Some(set) = set else {
            return;
        };
        self.sets[set].users -= 1;
        if self.sets[set].users == 0 {
            let TaskSet { names: tasks, .. } = self.sets.remove(set);
            self.by_names.remove(&tasks);
            tasks.iter().for_each(|task| names.let_go(*task));
        }
    }

    /// `None`: a set of all tasks.
    pub(crate) fn has(&self, set: Option<u32>, task: Name) -> bool {
        set.is_none_or(|set| self.sets[set].names.binary_search(&task).is_ok())
    }

    /// The names of all sets.
    pub(crate) fn names(&self) -> impl Iterator<Item = Name> {
        let sets = self.sets.iter();
        sets.flat_map(|(_, set)| set.names.iter().copied())
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
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn equal_lists_are_one_set_for_as_long_as_anybody_has_it() {
        let mut sets = TaskSets::default();
        let mut names = Names::default();
        let [one, two, three] = ["one", "two", "three"].map(|text| names.intern(text));
        let first = sets.take(vec![two, one, two], &mut names);
        assert_eq!(sets.take(vec![one, two], &mut names), first);
        let other = sets.take(vec![three], &mut names);
        assert_eq!(sets.counts(), (2, 3));
        assert!(sets.has(Some(first), one) && !sets.has(Some(first), three));
        assert!(sets.has(Some(other), three) && sets.has(None, one));
        sets.give(Some(first), &mut names);
        assert_eq!(sets.counts(), (2, 2));
        names.assert_held(&[one, two, three].map(|name| (name, 1)).into());
        sets.give(Some(first), &mut names);
        sets.give(Some(other), &mut names);
        sets.give(None, &mut names);
        assert_eq!(sets.counts(), (0, 0));
        names.assert_held(&BTreeMap::new());
    }
}
