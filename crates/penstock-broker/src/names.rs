//! Queues, tasks and groups are named by texts outside and by small numbers inside.

use penstock_message::{SeededMap, SeededState};

/// A text that was interned. Equal texts have equal names, for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Name(u32);

impl Name {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// The name that [`Name::index`] was of.
    pub(crate) fn at(index: usize) -> Self {
        Self(index as u32)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Names {
    /// As bytes, which take a step less to hash than a text does.
    by_text: SeededMap<Box<[u8]>, Name>,
    texts: Vec<Box<str>>,
}

impl Names {
    pub(crate) fn new(hashing: SeededState) -> Self {
        Self {
            by_text: SeededMap::with_hasher(hashing),
            texts: Vec::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn hashing(&self) -> SeededState {
        *self.by_text.hasher()
    }

    pub(crate) fn intern(&mut self, text: &str) -> Name {
        if let Some(name) = self.by_text.get(text.as_bytes()) {
            return *name;
        }
        let name = Name(u32::try_from(self.texts.len()).expect("fewer than 2^32 names"));
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
