//! Queues, tasks and groups are named by texts outside and by small numbers inside.

use std::num::NonZeroU32;

use penstock_message::{SeededMap, SeededState};

/// A text that was interned. Equal texts have equal names, for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(NonZeroU32);

impl Name {
    pub(crate) fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    /// The name that [`Name::index`] was of.
    pub(crate) fn at(index: usize) -> Self {
        let number = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        Self(number.expect("fewer than 2^32 names"))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Names {
    /// As bytes, which take a step less to hash than a text does.
    by_text: SeededMap<Box<[u8]>, Name>,
    texts: Vec<Box<str>>,
    /// Names that were asked for last, by [`recent_place`]: a burst of jobs is of a few names, and to compare one
    /// costs less than to hash it.
    recent: [Option<Name>; RECENT],
}

const RECENT: usize = 16;

fn recent_place(text: &str) -> usize {
    let last = text.as_bytes().last().copied().unwrap_or(0);
    (text.len() + usize::from(last)) % RECENT
}

impl Names {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_text: SeededMap::with_hasher(hashing),
            texts: Vec::new(),
            recent: [None; RECENT],
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.by_text.hasher()
    }

    pub(crate) fn intern(&mut self, text: &str) -> Name {
        let place = recent_place(text);
        if let Some(name) = self.recent[place]
            && self.text(name) == text
        {
            return name;
        }
        let name = match self.by_text.get(text.as_bytes()) {
            Some(name) => *name,
            None => self.add(text),
        };
        self.recent[place] = Some(name);
        name
    }

    fn add(&mut self, text: &str) -> Name {
        let name = Name::at(self.texts.len());
        self.texts.push(text.into());
        self.by_text.insert(text.as_bytes().into(), name);
        name
    }

    pub(crate) fn find(&self, text: &str) -> Option<Name> {
        self.by_text.get(text.as_bytes()).copied()
    }

    pub(crate) fn text(&self, name: Name) -> &str {
        &self.texts[name.index()]
    }
}
