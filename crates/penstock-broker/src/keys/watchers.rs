//! Watchers of keys, found from either side. A changed key finds its watchers, and a departing session finds its keys,
//! even next to a million keys that others watch.
//!
//! ```text
//!     keys[slot].watchers      (session, link) ...       eight bytes each
//!     links[session]           (slot, watcher) ...       eight bytes each
//! ```
//!
//! Each half of a pair stores the index of the other half, so either is removed without a search.

use penstock_message::{Key, SeededState};

use crate::table::slab::Slab;
use crate::table::slot_index::SlotIndex;

#[derive(Debug, Default)]
pub(crate) struct Watchers {
    keys: Slab<WatchedKey>,
    by_key: SlotIndex,
    links: Vec<Vec<WatchLink>>,
}

#[derive(Debug)]
struct WatchedKey {
    key: Key,
    watchers: Vec<KeyWatcher>,
}

#[derive(Clone, Copy, Debug)]
struct KeyWatcher {
    session: u32,
    /// Index in the session's list.
    link: u32,
}

#[derive(Clone, Copy, Debug)]
struct WatchLink {
    slot: u32,
    /// Index in the key's list.
    watcher: u32,
}

impl Watchers {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_key: SlotIndex::new(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        self.by_key.hashing()
    }

    fn find(&self, key: &Key) -> Option<u32> {
        let is_it = |slot: u32| self.keys[slot].key == *key;
        self.by_key.find(self.by_key.hash(key), is_it)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.keys.len() == 0
    }

    pub(crate) fn is_watched(&self, key: &Key) -> bool {
        self.find(key).is_some()
    }

    pub(crate) fn watches(&self, session: u32, key: &Key) -> bool {
        self.find(key)
            .is_some_and(|slot| self.place(slot, session).is_some())
    }

    fn place(&self, slot: u32, session: u32) -> Option<usize> {
        let mut watchers = self.keys[slot].watchers.iter();
        watchers.position(|watcher| watcher.session == session)
    }

    pub(crate) fn watch(&mut self, key: Key, session: u32) {
        let slot = self.find(&key).unwrap_or_else(|| {
            let hash = self.by_key.hash(&key);
            let slot = self.keys.insert(WatchedKey {
                key,
                // Most keys have one watcher.
                watchers: Vec::with_capacity(1),
            });
            self.by_key.insert(hash, slot);
            slot
        });
        if self.place(slot, session).is_some() {
            return;
        }
        let index = session as usize;
        if self.links.len() <= index {
            self.links.resize_with(index + 1, Vec::new);
        }
        let (links, watchers) = (&mut self.links[index], &mut self.keys[slot].watchers);
        let watcher = KeyWatcher {
            session,
            link: links.len() as u32,
        };
        links.push(WatchLink {
            slot,
            watcher: watchers.len() as u32,
        });
        watchers.push(watcher);
    }

    pub(crate) fn unwatch(&mut self, key: &Key, session: u32) {
        let Some(slot) = self.find(key) else {
            return;
        };
        if let Some(place) = self.place(slot, session) {
            let watcher = self.keys[slot].watchers[place];
            self.remove_watcher(slot, place);
            self.remove_link(watcher);
        }
    }

    /// Removes all watches of a session. Takes time in proportion to the keys that it watches.
    pub(crate) fn unwatch_all(&mut self, session: u32) {
        let Some(links) = self.links.get_mut(session as usize) else {
            return;
        };
        for link in std::mem::take(links) {
            self.remove_watcher(link.slot, link.watcher as usize);
        }
    }

    /// Takes the sessions that watched the key.
    pub(crate) fn take(&mut self, key: &Key) -> Vec<u32> {
        let Some(slot) = self.find(key) else {
            return Vec::new();
        };
        self.forget(slot);
        let WatchedKey { watchers, .. } = self.keys.remove(slot);
        for watcher in &watchers {
            self.remove_link(*watcher);
        }
        watchers.iter().map(|watcher| watcher.session).collect()
    }

    /// Removes one half of a pair: the caller removes the other, or already has.
    fn remove_watcher(&mut self, slot: u32, place: usize) {
        let watchers = &mut self.keys[slot].watchers;
        watchers.swap_remove(place);
        if let Some(moved) = watchers.get(place) {
            let links = &mut self.links[moved.session as usize];
            // The list that `unwatch_all` has taken contains each key once, so this watcher is another's.
            links[moved.link as usize].watcher = place as u32;
        }
        if watchers.is_empty() {
            self.forget(slot);
            self.keys.remove(slot);
        }
    }

    fn remove_link(&mut self, watcher: KeyWatcher) {
        let links = &mut self.links[watcher.session as usize];
        let place = watcher.link as usize;
        links.swap_remove(place);
        if let Some(moved) = links.get(place) {
            self.keys[moved.slot].watchers[moved.watcher as usize].link = place as u32;
        }
        if links.capacity() > 64 && links.len() < links.capacity() / 8 {
            links.shrink_to(2 * links.len());
        }
    }

    fn forget(&mut self, slot: u32) {
        let Self { keys, by_key, .. } = self;
        by_key.remove(by_key.hash(&keys[slot].key), |other| other == slot);
    }

    /// Panics unless both halves of each pair store where the other is.
    pub(crate) fn assert_paired(&self) {
        let mut watchers = 0;
        for (slot, watched) in self.keys.iter() {
            assert_eq!(self.find(&watched.key), Some(slot), "a key that is watched");
            assert!(!watched.watchers.is_empty(), "a key that nobody watches");
            for (place, watcher) in watched.watchers.iter().enumerate() {
                let link = self.links[watcher.session as usize][watcher.link as usize];
                assert_eq!(
                    (link.slot, link.watcher as usize),
                    (slot, place),
                    "the link of a watcher"
                );
                watchers += 1;
            }
        }
        let links: usize = self.links.iter().map(Vec::len).sum();
        assert_eq!(links, watchers, "links of all sessions");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn key(number: u8) -> Key {
        Key::Named(vec![number].into())
    }

    #[derive(Clone, Debug)]
    enum WatchStep {
        Watch(u8, u32),
        Unwatch(u8, u32),
        UnwatchAll(u32),
        Take(u8),
    }

    fn step() -> impl Strategy<Value = WatchStep> {
        let (key, session) = (0..6_u8, 0..5_u32);
        prop_oneof![
            8 => (key.clone(), session.clone()).prop_map(|(key, session)| WatchStep::Watch(key, session)),
            3 => (key.clone(), session.clone()).prop_map(|(key, session)| WatchStep::Unwatch(key, session)),
            1 => session.prop_map(WatchStep::UnwatchAll),
            2 => key.prop_map(WatchStep::Take),
        ]
    }

    proptest! {
        #[test]
        fn keys_and_sessions_agree_on_who_watches_what(steps in prop::collection::vec(step(), 0..200)) {
            let mut watchers = Watchers::default();
            let mut expected: BTreeMap<u8, BTreeSet<u32>> = BTreeMap::new();
            for step in steps {
                match step {
                    WatchStep::Watch(number, session) => {
                        watchers.watch(key(number), session);
                        expected.entry(number).or_default().insert(session);
                    }
                    WatchStep::Unwatch(number, session) => {
                        watchers.unwatch(&key(number), session);
                        expected.entry(number).or_default().remove(&session);
                    }
                    WatchStep::UnwatchAll(session) => {
                        watchers.unwatch_all(session);
                        for sessions in expected.values_mut() {
                            sessions.remove(&session);
                        }
                    }
                    WatchStep::Take(number) => {
                        let taken: BTreeSet<u32> = watchers.take(&key(number)).into_iter().collect();
                        prop_assert_eq!(taken, expected.remove(&number).unwrap_or_default());
                    }
                }
                expected.retain(|_, sessions| !sessions.is_empty());
                watchers.assert_paired();
                prop_assert_eq!(watchers.is_empty(), expected.is_empty());
                for number in 0..6 {
                    let sessions = expected.get(&number);
                    prop_assert_eq!(watchers.is_watched(&key(number)), sessions.is_some());
                    for session in 0..5 {
                        let watches = sessions.is_some_and(|sessions| sessions.contains(&session));
                        prop_assert_eq!(watchers.watches(session, &key(number)), watches);
                    }
                }
            }
        }
    }
}
