//! Receipts of transactions.

use penstock_message::{Applied, MessageId, MessageState, Receipt, Refusal};

use super::{RecordReader, state_of};
use crate::records::RecordError;

impl<'a> RecordReader<'a> {
    pub(super) fn receipt(&mut self) -> Result<Receipt, RecordError> {
        let at = self.at;
        let code = self.byte()?;
        match code {
            0 => {
                let count = self.varint()?;
                let mut skipped = Vec::new();
                for _ in 0..count {
                    skipped.push(self.small("operation")?);
                }
                return Ok(Receipt::skipped(skipped));
            }
            1 => return Ok(Receipt::Duplicate),
            2 => return Ok(Receipt::Unknown),
            10 => return self.applied(),
            13 => {
                let op = self.small("operation")?;
                let why = Refusal::TooLate(self.message_state()?);
                return Ok(Receipt::Refused { op, why });
            }
            14 => {
                let op = self.small("operation")?;
                let why = Refusal::Claimed(MessageId(self.array()?));
                return Ok(Receipt::Refused { op, why });
            }
            _ => {}
        }
        let op = self.small("operation")?;
        let text = self.text()?.to_owned();
        let why = match code {
            3 => Refusal::LeaseLost,
            4 => Refusal::GuardFailed,
            5 => Refusal::TooLarge(text),
            6 => Refusal::AlreadyExists,
            7 => Refusal::QueueFull(text),
            8 => Refusal::DiskFull,
            9 => Refusal::Invalid(text),
            11 => Refusal::NotOffered(text),
            12 => Refusal::NoSuchJob,
            _ => {
                return Err(RecordError::Malformed {
                    what: "receipt",
                    at,
                });
            }
        };
        Ok(Receipt::Refused { op, why })
    }

    pub(super) fn applied(&mut self) -> Result<Receipt, RecordError> {
        let mut applied = Applied::default();
        for _ in 0..self.varint()? {
            applied.skipped.push(self.small("operation")?);
        }
        for _ in 0..self.varint()? {
            let op = self.small("operation")?;
            applied.owners.push((op, MessageId(self.array()?)));
        }
        if self.bytes.get(self.at) == Some(&0) {
            self.at += 1;
        } else {
            let at = self.at;
            let state = self.byte()?.wrapping_sub(1);
            applied.found =
                Some(state_of(state).ok_or(RecordError::UnknownField { what: "state", at })?);
        }
        applied.operation = Some(self.varint()?).filter(|operation| *operation != 0);
        Ok(Receipt::Applied(applied))
    }

    pub(super) fn message_state(&mut self) -> Result<MessageState, RecordError> {
        let at = self.at;
        let state = state_of(self.byte()?);
        state.ok_or(RecordError::UnknownField { what: "state", at })
    }
}
