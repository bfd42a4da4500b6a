use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use crate::JoinId;

/// Sixteen bytes that name a message (and its job) for its whole life: retries, moves and failures keep it.
///
/// The layout is UUID version 7 (RFC 9562), so ids sort roughly by age. Clients make ids, in Rust, from one random seed
/// per process.
///
/// ```text
///     bits   48            4   12       2   38       24
///            milliseconds  7   random   2   random   tail
/// ```
///
/// The tail distinguishes ids of jobs from ids of joins, and derives one from the other:
///
/// | id | tail |
/// | --- | --- |
/// | of a job | random, never zero |
/// | of a join | zero |
/// | of the member with index `i` of a join | `i` + 1, after the other bits of the join |
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct MessageId(pub [u8; 16]);

/// Sixteen random bytes, drawn anew by each client process (and after a fork).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct SessionId(pub [u8; 16]);

/// Time and randomness of a new [`MessageId`]; the caller owns the clock and the generator.
#[derive(Clone, Copy, Debug)]
pub struct IdSource {
    pub unix_ms: u64,
    pub random: [u8; 10],
}

/// Maximum number of members of a join: their ids must fit next to its own.
pub const JOIN_CAP: u32 = (1 << TAIL_BITS) - 1;
const TAIL_BITS: u32 = 24;

impl MessageId {
    /// Makes the id of a job.
    pub fn new(from: IdSource) -> Self {
        let drawn = Self::draw(from);
        match drawn.tail() {
            0 => drawn.with_tail(1),
            _ => drawn,
        }
    }

    /// Makes the id of a join.
    pub fn new_join(from: IdSource) -> Self {
        Self::draw(from).with_tail(0)
    }

    /// Derives the id of a member. Its index must be below [`JOIN_CAP`].
    pub fn member(join: JoinId, index: u32) -> Self {
        assert!(
            join.is_join() && index < JOIN_CAP,
            "{join} is no join with a member {index}"
        );
        join.with_tail(index + 1)
    }

    pub fn is_join(self) -> bool {
        self.tail() == 0
    }

    /// Returns the id of the join if this is the id of a member. No bit says whether it is one.
    pub fn join_of(self) -> JoinId {
        self.with_tail(0)
    }

    /// Returns the index of a member in its join; `None` for the id of a join.
    pub fn index_in_join(self) -> Option<u32> {
        self.tail().checked_sub(1)
    }

    fn tail(self) -> u32 {
        let [.., high, middle, low] = self.0;
        u32::from_be_bytes([0, high, middle, low])
    }

    fn with_tail(mut self, tail: u32) -> Self {
        self.0[13..].copy_from_slice(&tail.to_be_bytes()[1..]);
        self
    }

    fn draw(from: IdSource) -> Self {
        let mut bytes = [0; 16];
        bytes[..6].copy_from_slice(&from.unix_ms.to_be_bytes()[2..]);
        bytes[6..].copy_from_slice(&from.random);
        bytes[6] = 0x70 | (bytes[6] & 0x0f);
        bytes[8] = 0x80 | (bytes[8] & 0x3f);
        Self(bytes)
    }
}

// A derived `Hash` would also write the length: an extra step for each of a job's look-ups.

impl Hash for MessageId {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write(&self.0);
    }
}

impl Hash for SessionId {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write(&self.0);
    }
}

fn write_uuid(bytes: &[u8; 16], out: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            out.write_str("-")?;
        }
        write!(out, "{byte:02x}")?;
    }
    Ok(())
}

impl fmt::Display for MessageId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(&self.0, out)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(&self.0, out)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(&self.0, out)
    }
}

impl FromStr for MessageId {
    type Err = &'static str;

    /// Reads 32 hexadecimal digits, with or without the UUID's hyphens.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "a job id is 32 hexadecimal digits, with or without hyphens";
        let mut bytes = [0; 16];
        let mut digits = text.bytes().filter(|byte| *byte != b'-');
        for byte in &mut bytes {
            let mut nibble = || {
                let digit = digits.next().ok_or(WRONG)?;
                char::from(digit).to_digit(16).ok_or(WRONG)
            };
            *byte = (nibble()? << 4 | nibble()?) as u8;
        }
        if digits.next().is_some() {
            return Err(WRONG);
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_id_is_a_version_7_uuid_and_reads_back_from_its_text() {
        let id = MessageId::new(IdSource {
            unix_ms: 0x0123_4567_89ab,
            random: [0xff; 10],
        });
        assert_eq!(id.to_string(), "01234567-89ab-7fff-bfff-ffffffffffff");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("0123".parse::<MessageId>().is_err());
    }

    fn source() -> impl Strategy<Value = IdSource> {
        // Tails of zero occur by chance once in 16 million draws.
        let tail = prop_oneof![any::<[u8; 3]>(), Just([0; 3])];
        (0..1_u64 << 48, any::<[u8; 10]>(), tail).prop_map(|(unix_ms, mut random, tail)| {
            random[7..].copy_from_slice(&tail);
            IdSource { unix_ms, random }
        })
    }

    fn assert_version_7(id: MessageId, from: IdSource) {
        assert_eq!(id.0[..6], from.unix_ms.to_be_bytes()[2..], "milliseconds");
        assert_eq!(id.0[6] >> 4, 7, "the version");
        assert_eq!(id.0[8] >> 6, 2, "the variant");
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    proptest! {
        #[test]
        fn an_id_says_whether_it_is_a_jobs_or_a_joins(from in source()) {
            let (job, join) = (MessageId::new(from), MessageId::new_join(from));
            assert_version_7(job, from);
            assert_version_7(join, from);
            prop_assert!(!job.is_join() && job.index_in_join().is_some());
            prop_assert!(join.is_join() && join.index_in_join().is_none());
            // A job's id contains everything that was drawn, except for a tail of zero.
            let mut drawn = from.random;
            drawn[0] = 0x70 | drawn[0] & 0x0f;
            drawn[2] = 0x80 | drawn[2] & 0x3f;
            prop_assert_eq!(&job.0[6..13], &drawn[..7]);
            if drawn[7..] != [0; 3] {
                prop_assert_eq!(&job.0[13..], &drawn[7..]);
            }
        }

        #[test]
        fn a_member_and_its_join_find_each_other(
            from in source(),
            index in prop_oneof![0..JOIN_CAP, Just(0), Just(JOIN_CAP - 1)],
        ) {
            let join = MessageId::new_join(from);
            let member = MessageId::member(join, index);
            assert_version_7(member, from);
            prop_assert_eq!(
                u128::from_be_bytes(member.0),
                u128::from_be_bytes(join.0) + u128::from(index) + 1
            );
            prop_assert_eq!(member.join_of(), join);
            prop_assert_eq!(join.join_of(), join);
            prop_assert_eq!(member.index_in_join(), Some(index));
        }
    }

    #[test]
    #[should_panic(expected = "no join with a member 16777215")]
    fn a_join_has_no_member_past_the_last() {
        let from = IdSource {
            unix_ms: 1,
            random: [1; 10],
        };
        MessageId::member(MessageId::new_join(from), JOIN_CAP);
    }

    #[test]
    #[should_panic(expected = "is no join")]
    fn a_job_has_no_members() {
        let from = IdSource {
            unix_ms: 1,
            random: [0; 10],
        };
        MessageId::member(MessageId::new(from), 0);
    }
}
