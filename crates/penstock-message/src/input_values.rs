//! Values of a join, on their way to the job that has them as its inputs.
//!
//! ```text
//!     values    kind u8 (0: they follow, 1: they are too large, and are asked for by the members' ids), join 16 bytes,
//!               count u32, and for kind 0 as many values, in the order of the members:
//!     value     status u8 (255: it is gone), length u32, that many bytes; the bytes of a gathered value
//!               (`ValueStatus::Gathered`) are `values` again
//! ```
//!
//! All numbers are little-endian. Brokers write these bytes, and workers' children read them; a supervisor passes them
//! on.

use bytes::{BufMut, Bytes};

use crate::{JoinId, MessageId, ValueStatus};

/// Maximum number of failed jobs that a value with [`ValueStatus::Upstream`] names.
pub const UPSTREAM_IDS: usize = 64;

const INLINE: u8 = 0;
const BY_REFERENCE: u8 = 1;
const GONE: u8 = 255;
const HEAD_BYTES: usize = 1 + 16 + 4;
/// Maximum nesting of joins within joins.
const DEEPEST: usize = 160;

/// Values of a join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputValues {
    pub join: JoinId,
    pub count: u32,
    /// Values of the members; `None`: they are too large to be included.
    pub values: Option<Vec<InputValue>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputValue {
    /// Value of a job, whatever its outcome.
    Of(ValueStatus, Bytes),
    /// Values of a join that is itself a member.
    Gathered(InputValues),
    /// The value was not kept.
    Gone,
}

/// Error for bytes that are not values of a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadInputValues;

/// Returns the body of a value that reports a join's success.
pub fn gathered(join: JoinId, count: u32) -> Bytes {
    let mut body = Vec::with_capacity(20);
    body.put_slice(&join.0);
    body.put_u32_le(count);
    body.into()
}

/// Reads the body of a value that reports a join's success.
pub fn read_gathered(body: &[u8]) -> Option<(JoinId, u32)> {
    let (join, count) = body.split_first_chunk::<16>()?;
    let count = u32::from_le_bytes(count.try_into().ok()?);
    Some((MessageId(*join), count))
}

impl InputValues {
    /// Appends the bytes.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        out.push(match self.values {
            Some(_) => INLINE,
            None => BY_REFERENCE,
        });
        out.put_slice(&self.join.0);
        out.put_u32_le(self.count);
        for value in self.values.iter().flatten() {
            match value {
                InputValue::Of(status, body) => {
                    out.push(*status as u8);
                    out.put_u32_le(body.len() as u32);
                    out.put_slice(body);
                }
                InputValue::Gathered(values) => {
                    out.push(ValueStatus::Gathered as u8);
                    let length_at = out.len();
                    out.put_u32_le(0);
                    values.encode_into(out);
                    let length = (out.len() - length_at - 4) as u32;
                    out[length_at..length_at + 4].copy_from_slice(&length.to_le_bytes());
                }
                InputValue::Gone => {
                    out.push(GONE);
                    out.put_u32_le(0);
                }
            }
        }
    }

    /// Reads the bytes, all of them.
    pub fn decode(bytes: &Bytes) -> Result<Self, BadInputValues> {
        Self::decode_level(bytes, 0)
    }

    fn decode_level(bytes: &Bytes, level: usize) -> Result<Self, BadInputValues> {
        if bytes.len() < HEAD_BYTES || level > DEEPEST {
            return Err(BadInputValues);
        }
        let mut join = [0; 16];
        join.copy_from_slice(&bytes[1..17]);
        let (join, count) = (MessageId(join), u32_at(bytes, 17)?);
        let mut values = match bytes[0] {
            INLINE => Vec::new(),
            BY_REFERENCE if bytes.len() == HEAD_BYTES => {
                let values = None;
                return Ok(Self {
                    join,
                    count,
                    values,
                });
            }
            _ => return Err(BadInputValues),
        };
        let mut at = HEAD_BYTES;
        while at < bytes.len() {
            let status = bytes[at];
            let length = u32_at(bytes, at + 1)? as usize;
            let end = (at + 5).checked_add(length).ok_or(BadInputValues)?;
            if end > bytes.len() {
                return Err(BadInputValues);
            }
            let body = bytes.slice(at + 5..end);
            values.push(match status {
                GONE => InputValue::Gone,
                status => match ValueStatus::ALL.get(usize::from(status)).copied() {
                    Some(ValueStatus::Gathered) => {
                        InputValue::Gathered(Self::decode_level(&body, level + 1)?)
                    }
                    Some(status) => InputValue::Of(status, body),
                    None => return Err(BadInputValues),
                },
            });
            at = end;
        }
        match values.len() == count as usize {
            true => Ok(Self {
                join,
                count,
                values: Some(values),
            }),
            false => Err(BadInputValues),
        }
    }
}

fn u32_at(bytes: &Bytes, at: usize) -> Result<u32, BadInputValues> {
    let bytes = bytes.get(at..at + 4).ok_or(BadInputValues)?;
    Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> InputValues {
        let of = |status, body: &'static [u8]| InputValue::Of(status, Bytes::from_static(body));
        let by_reference = InputValues {
            join: MessageId([3; 16]),
            count: 70_000,
            values: None,
        };
        let inner = InputValues {
            join: MessageId([2; 16]),
            count: 2,
            values: Some(vec![of(ValueStatus::Succeeded, b"x"), InputValue::Gone]),
        };
        InputValues {
            join: MessageId([1; 16]),
            count: 4,
            values: Some(vec![
                of(ValueStatus::Succeeded, b"one"),
                InputValue::Gathered(inner),
                of(ValueStatus::Expired, b""),
                InputValue::Gathered(by_reference),
            ]),
        }
    }

    #[test]
    fn values_come_back_as_they_went() {
        let mut bytes = Vec::new();
        values().encode_into(&mut bytes);
        assert_eq!(InputValues::decode(&bytes.into()), Ok(values()));
    }

    #[test]
    fn bytes_that_were_cut_or_changed_are_refused_or_read_without_a_panic() {
        let mut bytes = Vec::new();
        values().encode_into(&mut bytes);
        for length in 0..bytes.len() {
            let cut = Bytes::copy_from_slice(&bytes[..length]);
            assert_eq!(
                InputValues::decode(&cut),
                Err(BadInputValues),
                "{length} bytes"
            );
        }
        for at in 0..bytes.len() {
            for flip in [1, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[at] ^= flip;
                let _ = InputValues::decode(&changed.into());
            }
        }
    }

    #[test]
    fn a_gathered_value_names_its_join() {
        let join = MessageId([9; 16]);
        assert_eq!(read_gathered(&gathered(join, 155)), Some((join, 155)));
        assert_eq!(read_gathered(b"short"), None);
    }
}
