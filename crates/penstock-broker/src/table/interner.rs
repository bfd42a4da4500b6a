//! Interns names: queues, tasks and groups are named by texts outside the core and by small numbers inside.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use penstock_faults::perhaps;
use penstock_message::{SeededMap, SeededState};

/// An interned text. Equal texts have equal names while the name is held; after that another text may get the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(NonZeroU32);

impl Name {
    pub(crate) fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    /// Returns the name with this [`Name::index`].
    pub(crate) fn at(index: usize) -> Self {
        let number = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        Self(number.expect("fewer than 2^32 names"))
    }
}

/// Interned names, counted by their holders: queues, tasks, values, reasons, failure classes, sets of tasks, marks. A
/// name that is used only while an input is handled need not be held, since names are only forgotten between inputs.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    /// Names by text. As bytes, which take a step less to hash than text does.
    by_text: SeededMap<Arc<[u8]>, Name>,
    texts: Vec<Option<Arc<str>>>,
    /// Number of holders of each name.
    holders: Vec<u32>,
    /// Number of names without a holder.
    unheld: usize,
    free: Vec<Name>,
    /// Names that were interned last, by [`recent_index`]. A burst of jobs has few names, and comparing one costs less
    /// than hashing it.
    recent: [Option<Name>; RECENT],
}

const RECENT: usize = 16;
/// Number of names without a holder that are kept, besides half as many as are held: most are used again.
const UNHELD_KEPT: usize = 1024;

fn recent_index(text: &str) -> usize {
    let last = text.as_bytes().last().copied().unwrap_or(0);
    (text.len() + usize::from(last)) % RECENT
}

impl Interner {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_text: SeededMap::with_hasher(hashing),
            ..Self::default()
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.by_text.hasher()
    }

    pub(crate) fn intern(&mut self, text: &str) -> Name {
        let index = recent_index(text);
        if let Some(name) = self.recent[index]
            && self.text(name) == text
        {
            return name;
        }
        let name = match self.by_text.get(text.as_bytes()) {
            Some(name) => *name,
            None => self.add(text),
        };
        self.recent[index] = Some(name);
        name
    }

    fn add(&mut self, text: &str) -> Name {
        let text: Arc<str> = text.into();
        let name = self.free.pop().unwrap_or_else(|| {
            self.texts.push(None);
            self.holders.push(0);
            Name::at(self.texts.len() - 1)
        });
        self.texts[name.index()] = Some(text.clone());
        self.by_text.insert(text.into(), name);
        self.unheld += 1;
        name
    }

    pub(crate) fn find(&self, text: &str) -> Option<Name> {
        self.by_text.get(text.as_bytes()).copied()
    }

    pub(crate) fn text(&self, name: Name) -> &str {
        self.shared(name)
    }

    /// Returns the text, for others to share.
    pub(crate) fn shared(&self, name: Name) -> &Arc<str> {
        let text = self.texts[name.index()].as_ref();
        text.expect("a name that is in use has its text")
    }

    /// Adds a holder of the name.
    pub(crate) fn hold(&mut self, name: Name) {
        let holders = &mut self.holders[name.index()];
        self.unheld -= usize::from(*holders == 0);
        *holders += 1;
    }

    /// Removes a holder of the name.
    pub(crate) fn release(&mut self, name: Name) {
        let holders = &mut self.holders[name.index()];
        *holders -= 1;
        self.unheld += usize::from(*holders == 0);
    }

    /// Forgets names without a holder once there are many; the work is proportional to the number forgotten. Call it
    /// while no such name is in use.
    pub(crate) fn sweep(&mut self) {
        let held = self.texts.len() - self.free.len() - self.unheld;
        if self.unheld > UNHELD_KEPT + held / 2 || self.unheld > 0 && perhaps!("forget-names") {
            self.forget_unheld();
        }
    }

    fn forget_unheld(&mut self) {
        for (text, holders) in self.texts.iter_mut().zip(&self.holders) {
            if *holders == 0
                && let Some(text) = text.take()
            {
                self.by_text.remove(text.as_bytes());
            }
        }
        let last = self.texts.iter().rposition(Option::is_some);
        let len = last.map_or(0, |last| last + 1);
        self.texts.truncate(len);
        self.holders.truncate(len);
        // The lowest are used first, so that the highest become free.
        let free = (0..len).rev().filter(|index| self.texts[*index].is_none());
        self.free = free.map(Name::at).collect();
        if len < self.texts.capacity() / 4 {
            self.texts.shrink_to(2 * len);
            self.holders.shrink_to(2 * len);
        }
        if self.by_text.len() < self.by_text.capacity() / 4 {
            self.by_text.shrink_to(2 * self.by_text.len());
        }
        self.unheld = 0;
        self.recent = [None; RECENT];
    }

    /// Returns the number of names.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_text.len()
    }

    /// Panics unless the names are held as often as in `expected`.
    pub(crate) fn assert_held(&self, expected: &BTreeMap<Name, u32>) {
        let mut unheld = 0;
        for (index, holders) in self.holders.iter().enumerate() {
            let name = Name::at(index);
            let expected = expected.get(&name).copied().unwrap_or(0);
            let text = self.texts[index].as_deref();
            assert_eq!(*holders, expected, "what holds the name {text:?}");
            unheld += usize::from(*holders == 0 && text.is_some());
        }
        assert_eq!(self.unheld, unheld, "names that nobody holds");
        let last = expected.keys().next_back();
        assert!(last.is_none_or(|name| name.index() < self.holders.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_for_as_long_as_it_is_held_and_then_used_again() {
        let mut names = Interner::default();
        let kept = names.intern("kept");
        names.hold(kept);
        names.hold(kept);
        for turn in 0..3 {
            let passing: Vec<Name> = (0..100_000)
                .map(|number| names.intern(&format!("passing {turn} {number}")))
                .collect();
            for name in &passing {
                names.hold(*name);
            }
            names.sweep();
            assert_eq!(names.text(passing[99_999]), format!("passing {turn} 99999"));
            for name in passing {
                names.release(name);
            }
            names.sweep();
            assert_eq!((names.len(), names.texts.len()), (1, 1));
            assert!(names.texts.capacity() < 1000 && names.by_text.capacity() < 1000);
            assert_eq!(names.intern("kept"), kept);
            assert_eq!(names.text(kept), "kept");
            assert_eq!(names.find("passing 0 7"), None);
        }
        names.release(kept);
        names.assert_held(&BTreeMap::from([(kept, 1)]));
    }
}
