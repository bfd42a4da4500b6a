//! The fields that each message has.

use penstock_message::{MessageId, WallMs};

use crate::Position;
use crate::messages::shared_heads::SharedHeadId;
use crate::table::u48::U48;

/// Fields of each message.
#[derive(Debug)]
pub(crate) struct MessageEntry {
    pub(crate) id: MessageId,
    pub(super) number: U48,
    pub(super) base: U48,
    pub(super) enqueued_at: U48,
    pub(super) flags: u16,
    pub(super) shared_head: SharedHeadId,
    /// Location of a cold message's body in the journal, slot of a hot message's hot fields, or cause of a message's
    /// end.
    pub(super) packed: u64,
}

/// Location of a body in the record that is its message's base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyAt(pub(super) u64);

impl BodyAt {
    /// Maximum size of a body; the broker accepts no longer ones.
    pub(crate) const CAP_BYTES: usize = (1 << Self::LENGTH_BITS) - 1;
    const LENGTH_BITS: u32 = 28;

    pub(crate) fn new(offset: usize, length: usize) -> Self {
        assert!(
            length <= Self::CAP_BYTES && offset < 1 << (64 - Self::LENGTH_BITS),
            "a body of {length} bytes at {offset} can't be told in 64 bits"
        );
        Self((offset as u64) << Self::LENGTH_BITS | length as u64)
    }

    pub(crate) fn offset(self) -> u64 {
        self.0 >> Self::LENGTH_BITS
    }

    pub(crate) fn length(self) -> usize {
        (self.0 & Self::CAP_BYTES as u64) as usize
    }
}

pub(super) mod flag {
    /// The state, in three bits.
    pub(in crate::messages) const STATE: u16 = 3 | 256;
    pub(in crate::messages) const READY: u16 = 0;
    pub(in crate::messages) const DELAYED: u16 = 1;
    pub(in crate::messages) const HELD: u16 = 2;
    pub(in crate::messages) const LEASED: u16 = 3;
    pub(in crate::messages) const FAILED: u16 = 256;
    pub(in crate::messages) const ENDED: u16 = 257;
    pub(in crate::messages) const HOT: u16 = 4;
    pub(in crate::messages) const EXPIRES: u16 = 8;
    pub(in crate::messages) const REDELIVERED: u16 = 16;
    pub(in crate::messages) const COPIES: u16 = 32;
    pub(in crate::messages) const RECOVERED: u16 = 64;
    /// Set while the message can't yet be found by its id.
    pub(in crate::messages) const UNENTERED: u16 = 128;
    /// Set if its id says which member of which join it is.
    pub(in crate::messages) const MEMBER: u16 = 512;
    /// Set if it has extras besides that.
    pub(in crate::messages) const EXTRAS: u16 = 1024;
    /// Set if its hot entry has an [`Extra`](super::super::Extra).
    pub(in crate::messages) const EXTRA: u16 = 2048;
}

impl MessageEntry {
    pub(crate) fn number(&self) -> u64 {
        self.number.get()
    }

    /// Returns the record that holds its full state.
    pub(crate) fn base(&self) -> Position {
        Position(self.base.get())
    }

    pub(crate) fn enqueued_at(&self) -> WallMs {
        self.enqueued_at.get()
    }

    pub(crate) fn redelivered(&self) -> bool {
        self.flags & flag::REDELIVERED != 0
    }

    pub(crate) fn has_copies(&self) -> bool {
        self.flags & flag::COPIES != 0
    }

    /// Whether the message was read from the journal after an unclean end, in a state in which it could be handed out,
    /// and has not been handed out since. A grant whose record was lost may exist for it, and hold.
    pub(crate) fn recovered(&self) -> bool {
        self.flags & flag::RECOVERED != 0
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.flags & flag::STATE == flag::READY
    }

    pub(crate) fn is_delayed(&self) -> bool {
        self.flags & flag::STATE == flag::DELAYED
    }

    pub(crate) fn is_leased(&self) -> bool {
        self.flags & flag::STATE == flag::LEASED
    }

    pub(crate) fn is_held(&self) -> bool {
        self.flags & flag::STATE == flag::HELD
    }

    pub(crate) fn is_hot(&self) -> bool {
        self.flags & flag::HOT != 0
    }

    pub(crate) fn is_failed(&self) -> bool {
        self.flags & flag::STATE == flag::FAILED
    }

    /// Whether only its value is left.
    pub(crate) fn is_ended(&self) -> bool {
        self.flags & flag::STATE == flag::ENDED
    }

    pub(super) fn expires(&self) -> bool {
        self.flags & flag::EXPIRES != 0
    }

    pub(super) fn is_member(&self) -> bool {
        self.flags & flag::MEMBER != 0
    }

    pub(super) fn has_extras(&self) -> bool {
        self.flags & flag::EXTRAS != 0
    }

    /// Whether the message may have a place in a join.
    pub(crate) fn may_be_member(&self) -> bool {
        self.flags & (flag::EXTRAS | flag::MEMBER) != 0
    }

    /// Whether the message may have notes, a claim or a failure, or have been asked to stop.
    pub(crate) fn has_rare_fields(&self) -> bool {
        self.flags & flag::EXTRA != 0
    }

    pub(super) fn is_unentered(&self) -> bool {
        self.flags & flag::UNENTERED != 0
    }

    pub(super) fn set(&mut self, flag: u16, is_set: bool) {
        match is_set {
            true => self.flags |= flag,
            false => self.flags &= !flag,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_found_in_any_record() {
        let at = BodyAt::new((1 << 36) - 1, BodyAt::CAP_BYTES);
        assert_eq!(
            (at.offset(), at.length()),
            ((1 << 36) - 1, BodyAt::CAP_BYTES)
        );
    }
}
