//! A stored value, in little memory: there may be ten million.
//!
//! ```text
//!     values        96 bytes, which hold a body of up to 23
//!     index         8 and a tag, in a table that is at least half full
//!     order         12, in the list of its group
//!     expiry        12, in the list of its second
//!     base          4, and 16 for each record
//! ```

use bytes::Bytes;
use penstock_message::{Key, MessageId, Value, ValueStatus};

use crate::Position;
use crate::held_effects::SafeAfter;
use crate::records::RunHead;
use crate::table::interner::Name;
use crate::table::u48::U48;

/// A value, named by its slot and its number. The slot may be reused, the number never is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ValueHandle {
    pub(crate) slot: u32,
    pub(crate) number: U48,
}

#[derive(Debug)]
pub(crate) struct StoredValue {
    key: StoredKey,
    body: StoredBody,
    pub(crate) run: Option<StoredRun>,
    pub(crate) group: Name,
    /// Expiry on the steady clock; [`U48::MAX`] if it is kept for good.
    expires_at: U48,
    pub(crate) number: U48,
    base: U48,
    pub(crate) status: ValueStatus,
    needs: Needs,
}

/// State of the record at a value's base that the value waits for before it may be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    Written,
    OnDisk,
    Both,
}

impl Needs {
    fn new(disk: bool, os: bool) -> Self {
        match (disk, os) {
            (false, false) => Self::Nothing,
            (false, true) => Self::Written,
            (true, false) => Self::OnDisk,
            (true, true) => Self::Both,
        }
    }
}

/// A [`Key`] that takes less room if it is the usual one.
#[derive(Debug)]
enum StoredKey {
    Result(MessageId),
    Other(Box<Key>),
}

/// Size of a short body: it fits beside what tells the two cases apart.
const SHORT_BYTES: usize = 23;

/// Bytes of a value. Most results are so short that memory of their own would take more than they do.
#[derive(Debug)]
enum StoredBody {
    Short(u8, [u8; SHORT_BYTES]),
    Long(Bytes),
}

/// A [`RunHead`] in 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRun {
    queue: Name,
    attempt: u32,
    /// Time in the lower 48 bits, the generation above.
    ended: u64,
}

impl StoredRun {
    const TIME_BITS: u32 = 48;

    pub(crate) fn new(run: RunHead) -> Self {
        let time = run.ended_at & ((1 << Self::TIME_BITS) - 1);
        let generation = u64::from(run.generation.min(u32::from(u16::MAX)));
        Self {
            queue: run.queue,
            attempt: run.attempt,
            ended: generation << Self::TIME_BITS | time,
        }
    }

    pub(crate) fn head(self) -> RunHead {
        RunHead {
            queue: self.queue,
            attempt: self.attempt,
            generation: (self.ended >> Self::TIME_BITS) as u32,
            ended_at: self.ended & ((1 << Self::TIME_BITS) - 1),
        }
    }
}

impl StoredBody {
    fn new(body: Bytes) -> Self {
        if !is_short(&body) {
            return Self::Long(body);
        }
        let mut bytes = [0; SHORT_BYTES];
        bytes[..body.len()].copy_from_slice(&body);
        Self::Short(body.len() as u8, bytes)
    }

    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Short(len, bytes) => &bytes[..usize::from(*len)],
            Self::Long(bytes) => bytes,
        }
    }

    fn to_bytes(&self) -> Bytes {
        match self {
            Self::Short(..) => Bytes::copy_from_slice(self.as_slice()),
            Self::Long(bytes) => bytes.clone(),
        }
    }
}

/// Whether storing this body copies it, so that its memory may be that of a frame.
pub(crate) fn is_short(body: &[u8]) -> bool {
    body.len() <= SHORT_BYTES
}

impl StoredValue {
    /// Returns a value whose base is the record at `at`, and that may be seen once the records of `safe_after` are
    /// safe: that one, or none.
    pub(crate) fn new(
        key: Key,
        value: Value,
        group: Name,
        expires_at: Option<u64>,
        run: Option<RunHead>,
        (at, safe_after): (Position, SafeAfter),
    ) -> Self {
        let depends_on = |position: Position| {
            debug_assert!(position == at || position == Position::default());
            position == at
        };
        let mut stored = Self {
            key: match key {
                Key::Result(id) => StoredKey::Result(id),
                other => StoredKey::Other(Box::new(other)),
            },
            body: StoredBody::new(value.body),
            run: run.map(StoredRun::new),
            group,
            expires_at: U48::new(expires_at.unwrap_or(U48::MAX).min(U48::MAX)),
            number: U48::new(0),
            base: U48::new(0),
            status: value.status,
            needs: Needs::new(depends_on(safe_after.disk), depends_on(safe_after.os)),
        };
        stored.set_base(at);
        stored
    }

    pub(crate) fn key(&self) -> Key {
        match &self.key {
            StoredKey::Result(id) => Key::Result(*id),
            StoredKey::Other(key) => (**key).clone(),
        }
    }

    pub(crate) fn has_key(&self, key: &Key) -> bool {
        match (key, &self.key) {
            (Key::Result(id), StoredKey::Result(own)) => id == own,
            (Key::Result(_), _) | (_, StoredKey::Result(_)) => false,
            (key, StoredKey::Other(own)) => *key == **own,
        }
    }

    pub(crate) fn is_result(&self) -> bool {
        matches!(self.key, StoredKey::Result(_))
    }

    pub(crate) fn expires_at(&self) -> Option<u64> {
        Some(self.expires_at.get()).filter(|at| *at != U48::MAX)
    }

    pub(crate) fn body(&self) -> &[u8] {
        self.body.as_slice()
    }

    pub(crate) fn value(&self) -> Value {
        Value::new(self.status, self.body.to_bytes())
    }

    /// Returns the record that holds it.
    pub(crate) fn base(&self) -> Position {
        Position(self.base.get())
    }

    fn set_base(&mut self, base: Position) {
        assert!(base.0 <= U48::MAX, "more records than 48 bits can count");
        self.base = U48::new(base.0);
    }

    /// Sets another record that holds it from now on.
    pub(crate) fn move_to(&mut self, base: Position, is_safe: bool) {
        self.set_base(base);
        if is_safe {
            self.needs = Needs::Nothing;
        }
    }

    /// Returns the records that must be safe before the value may be seen.
    pub(crate) fn safe_after(&self) -> SafeAfter {
        let at = |needs: bool| match needs {
            true => self.base(),
            false => Position::default(),
        };
        SafeAfter {
            disk: at(matches!(self.needs, Needs::OnDisk | Needs::Both)),
            os: at(matches!(self.needs, Needs::Written | Needs::Both)),
        }
    }

    /// Returns the bytes that the value counts against the cap, roughly those it takes in the journal.
    pub(crate) fn bytes(&self) -> u64 {
        let key = match &self.key {
            StoredKey::Result(id) => id.0.len(),
            StoredKey::Other(key) => match &**key {
                Key::Result(id) => id.0.len(),
                Key::Named(name) | Key::Scoped(_, name) => name.len(),
            },
        };
        (48 + key + self.body().len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::slab::Slab;

    #[test]
    fn a_value_takes_96_bytes_with_a_short_body() {
        assert_eq!(Slab::<StoredValue>::slot_bytes(), 96);
    }

    #[test]
    fn a_body_is_the_same_however_it_is_stored() {
        for len in [0, 1, 23, 24, 1000] {
            let body = Bytes::from(vec![7; len]);
            let stored = StoredBody::new(body.clone());
            assert_eq!(stored.as_slice(), &body[..]);
            assert_eq!(stored.to_bytes(), body);
            assert_eq!(is_short(&body), matches!(stored, StoredBody::Short(..)));
        }
    }
}
