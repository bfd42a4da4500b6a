//! Sets of tasks that consumers can run. Equal sets of one app are stored once: a thousand workers share one.

use std::sync::Arc;

use penstock_message::{SeededMap, SeededState};

use crate::table::interner::{Interner, Name};
use crate::table::slab::Slab;

#[derive(Debug, Default)]
pub(crate) struct TaskSets {
    sets: Slab<TaskSet>,
    by_tasks: SeededMap<AppTasks, u32>,
}

/// An app's name, which may be empty, and the names of its tasks, in order.
type AppTasks = (Arc<str>, Arc<[Name]>);

#[derive(Debug)]
struct TaskSet {
    tasks: AppTasks,
    /// Number of consumers that can run these.
    users: usize,
}

impl TaskSets {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            sets: Slab::default(),
            by_tasks: SeededMap::with_hasher(hashing),
        }
    }

    /// Returns the set of these tasks of the app, and adds a user to it.
    pub(crate) fn acquire(&mut self, app: &str, mut tasks: Vec<Name>, names: &mut Interner) -> u32 {
        tasks.sort_unstable();
        tasks.dedup();
        let tasks: AppTasks = (app.into(), tasks.into());
        if let Some(set) = self.by_tasks.get(&tasks) {
            self.sets[*set].users += 1;
            return *set;
        }
        tasks.1.iter().for_each(|task| names.hold(*task));
        let set = self.sets.insert(TaskSet {
            tasks: tasks.clone(),
            users: 1,
        });
        self.by_tasks.insert(tasks, set);
        set
    }

    /// Returns the set of the same tasks of another app, and adds a user to it.
    pub(crate) fn acquire_for(&mut self, app: &str, set: u32, names: &mut Interner) -> u32 {
        let tasks = self.sets[set].tasks.1.to_vec();
        self.acquire(app, tasks, names)
    }

    /// Removes a user of the set.
    pub(crate) fn release(&mut self, set: Option<u32>, names: &mut Interner) {
        let Some(set) = set else {
            return;
        };
        self.sets[set].users -= 1;
        if self.sets[set].users == 0 {
            let TaskSet { tasks, .. } = self.sets.remove(set);
            self.by_tasks.remove(&tasks);
            tasks.1.iter().for_each(|task| names.release(*task));
        }
    }

    /// Returns the app whose tasks a set has.
    pub(crate) fn app(&self, set: u32) -> &str {
        &self.sets[set].tasks.0
    }

    /// Returns the tasks that two sets of different apps have in common: one of them, and how many others. Returns
    /// `None` if there are none, if the sets are of one app, or if either app has no name.
    pub(crate) fn shared(&self, one: u32, other: u32) -> Option<(Name, u64)> {
        let (one, other) = (&self.sets[one].tasks, &self.sets[other].tasks);
        if one.0 == other.0 || one.0.is_empty() || other.0.is_empty() {
            return None;
        }
        let is_in_other = |task: &&Name| other.1.binary_search(task).is_ok();
        let mut shared = one.1.iter().filter(is_in_other);
        let first = *shared.next()?;
        Some((first, shared.count() as u64))
    }

    /// Whether the set has the task; `None` is the set of all tasks.
    pub(crate) fn has(&self, set: Option<u32>, task: Name) -> bool {
        set.is_none_or(|set| self.sets[set].tasks.1.binary_search(&task).is_ok())
    }

    /// Returns the names of all sets.
    pub(crate) fn names(&self) -> impl Iterator<Item = Name> {
        let sets = self.sets.iter();
        sets.flat_map(|(_, set)| set.tasks.1.iter().copied())
    }

    /// Returns the number of sets, and their total number of users.
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
    fn tasks_of_two_apps_with_the_same_name_are_found() {
        let mut sets = TaskSets::default();
        let mut names = Interner::default();
        let [one, two, three] = ["one", "two", "three"].map(|text| names.intern(text));
        let shop = sets.acquire("shop", vec![one, two], &mut names);
        let mail = sets.acquire("mail", vec![two, three], &mut names);
        let new_shop = sets.acquire("shop", vec![one, two, three], &mut names);
        let unnamed = sets.acquire_for("", shop, &mut names);
        assert_eq!(sets.shared(shop, mail), Some((two, 0)));
        assert_eq!(
            sets.shared(mail, new_shop).map(|(_, others)| others),
            Some(1)
        );
        assert_eq!(sets.shared(shop, new_shop), None, "a deployment of one app");
        assert_eq!(sets.shared(unnamed, mail), None);
    }

    #[test]
    fn equal_lists_share_one_set_while_it_has_users() {
        let mut sets = TaskSets::default();
        let mut names = Interner::default();
        let [one, two, three] = ["one", "two", "three"].map(|text| names.intern(text));
        let first = sets.acquire("app", vec![two, one, two], &mut names);
        assert_eq!(sets.acquire("app", vec![one, two], &mut names), first);
        let other = sets.acquire("app", vec![three], &mut names);
        assert_eq!(sets.counts(), (2, 3));
        assert!(sets.has(Some(first), one) && !sets.has(Some(first), three));
        assert!(sets.has(Some(other), three) && sets.has(None, one));
        sets.release(Some(first), &mut names);
        assert_eq!(sets.counts(), (2, 2));
        names.assert_held(&[one, two, three].map(|name| (name, 1)).into());
        sets.release(Some(first), &mut names);
        sets.release(Some(other), &mut names);
        sets.release(None, &mut names);
        assert_eq!(sets.counts(), (0, 0));
        names.assert_held(&BTreeMap::new());
    }
}
