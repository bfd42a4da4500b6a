use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

/// Sixteen bytes that name a message (and the job in it) for its whole life: retries, moves and
/// dead-lettering keep it.
///
/// The layout is UUID version 7 (RFC 9562): 48 bits of Unix milliseconds, then random bits, so
/// ids sort roughly by age. Ids are made by clients, in Rust, from one random seed a process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct MessageId(pub [u8; 16]);

/// Sixteen random bytes, drawn anew by each client process (and after a fork).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct SessionId(pub [u8; 16]);

/// What a new [`MessageId`] is made from; the caller owns the clock and the randomness.
#[derive(Clone, Copy, Debug)]
pub struct IdSource {
    pub unix_ms: u64,
    pub random: [u8; 10],
}

impl MessageId {
    pub fn new(from: IdSource) -> Self {
        let mut bytes = [0; 16];
        bytes[..6].copy_from_slice(&from.unix_ms.to_be_bytes()[2..]);
        bytes[6..].copy_from_slice(&from.random);
        bytes[6] = 0x70 | (bytes[6] & 0x0f);
        bytes[8] = 0x80 | (bytes[8] & 0x3f);
        Self(bytes)
    }
}

// A derived `Hash` would write the length, too: a step more for each of the look-ups that a job takes.

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
}
