//! The smallest parts of events: numbers, texts, keys and names.

use bytes::Bytes;
use penstock_message::{Key, MessageId, Scope};

use super::RecordReader;
use crate::clock::{ClockTime, WhichClock};
use crate::records::{Grant, RecordError};
use crate::table::interner::{Interner, Name};

impl<'a> RecordReader<'a> {
    pub(in crate::records) fn byte(&mut self) -> Result<u8, RecordError> {
        let byte = *self
            .bytes
            .get(self.at)
            .ok_or(RecordError::Truncated { at: self.at })?;
        self.at += 1;
        Ok(byte)
    }

    pub(super) fn flag(&mut self) -> Result<bool, RecordError> {
        let at = self.at;
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(RecordError::Malformed { what: "flag", at }),
        }
    }

    pub(in crate::records) fn varint(&mut self) -> Result<u64, RecordError> {
        let at = self.at;
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(RecordError::Malformed {
            what: "integer",
            at,
        })
    }

    pub(in crate::records) fn small(&mut self, what: &'static str) -> Result<u32, RecordError> {
        let at = self.at;
        u32::try_from(self.varint()?).map_err(|_| RecordError::Malformed { what, at })
    }

    pub(in crate::records) fn difference(&mut self, from: u64) -> Result<u64, RecordError> {
        let zigzag = self.varint()?;
        let difference = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
        Ok(from.wrapping_add(difference as u64))
    }

    pub(super) fn number(&mut self) -> Result<u64, RecordError> {
        self.number = self.difference(self.number)?;
        Ok(self.number)
    }

    pub(super) fn grant(&mut self) -> Result<Grant, RecordError> {
        let epoch = self.small("epoch")?;
        self.grant = self.difference(self.grant)?;
        Ok(Grant {
            epoch,
            number: self.grant,
            started_at: self.difference(self.time)?,
        })
    }

    pub(super) fn when(&mut self) -> Result<ClockTime, RecordError> {
        let clock = match self.flag()? {
            false => WhichClock::Steady,
            true => WhichClock::Wall,
        };
        Ok(ClockTime {
            at: self.varint()?,
            clock,
        })
    }

    pub(in crate::records) fn slice(&mut self) -> Result<&'a [u8], RecordError> {
        let at = self.at;
        let length = self.varint()?;
        let rest = &self.bytes[self.at..];
        let length = usize::try_from(length)
            .ok()
            .filter(|length| *length <= rest.len());
        let slice = &rest[..length.ok_or(RecordError::Truncated { at })?];
        self.at += slice.len();
        Ok(slice)
    }

    pub(in crate::records) fn array(&mut self) -> Result<[u8; 16], RecordError> {
        let at = self.at;
        let array = self.bytes[at..]
            .first_chunk()
            .ok_or(RecordError::Truncated { at })?;
        self.at += array.len();
        Ok(*array)
    }

    pub(in crate::records) fn text(&mut self) -> Result<&'a str, RecordError> {
        let at = self.at;
        std::str::from_utf8(self.slice()?).map_err(|_| RecordError::Malformed { what: "text", at })
    }

    pub(super) fn key(&mut self) -> Result<Key, RecordError> {
        let at = self.at;
        Ok(match self.byte()? {
            0 => Key::Result(MessageId(self.array()?)),
            1 => Key::Named(Bytes::copy_from_slice(self.slice()?)),
            2 => {
                let at = self.at;
                let number = self.byte()?;
                let mut known = Scope::ALL.into_iter();
                let scope = known.find(|scope| *scope as u8 == number);
                let what = "scope of a key";
                let scope = scope.ok_or(RecordError::UnknownField { what, at })?;
                Key::Scoped(scope, Bytes::copy_from_slice(self.slice()?))
            }
            _ => return Err(RecordError::UnknownField { what: "key", at }),
        })
    }

    pub(super) fn name(&mut self, names: &mut Interner) -> Result<Name, RecordError> {
        let at = self.at;
        let index = self.varint()?;
        if index == 0 {
            let name = names.intern(self.text()?);
            self.spelled.push(name);
            return Ok(name);
        }
        usize::try_from(index - 1)
            .ok()
            .and_then(|index| self.spelled.get(index).copied())
            .ok_or(RecordError::Malformed { what: "name", at })
    }
}
