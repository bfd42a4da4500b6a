//! Reads the record of a failed attempt, as `python/penstock/_values/envelope.py` writes it.

use penstock_message::MessageInfo;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

/// Attempt that failed or crashed.
#[derive(Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Number from 1. A crashed attempt is started again under the same number.
    pub number: u64,
    /// Full type and message of the error, or the reason of a crash.
    pub error: String,
    /// Empty for a crash.
    pub traceback: String,
    pub worker: Option<String>,
    pub finished_at_ms: Option<u64>,
}

impl Attempt {
    /// Returns the past attempts of a job, oldest first.
    pub fn all_of(job: &MessageInfo) -> Vec<Self> {
        let mut number = 1;
        let attempt_of = |note: &bytes::Bytes| {
            let attempt = Self::read(note, number);
            if attempt.worker.is_some() {
                number = attempt.number + 1;
            }
            attempt
        };
        job.notes.iter().map(attempt_of).collect()
    }

    /// Whether the last attempt of a job ended in a crash. Its note is then the broker's own text.
    pub fn has_crashed(job: &MessageInfo) -> bool {
        let last = job.notes.last().filter(|_| job.crashes > 0);
        last.is_some_and(|note| note.first().is_none_or(|first| first & 0xf0 != 0x90))
    }

    /// Reads a record or text. No UTF-8 text begins with the first byte of a msgpack array, so anything else is
    /// the broker's own text.
    fn read(note: &[u8], number: u64) -> Self {
        let is_record = note.first().is_some_and(|first| first & 0xf0 == 0x90);
        let record = is_record
            .then(|| rmp_serde::from_slice::<Vec<RecordField>>(note).ok())
            .flatten();
        match record.as_deref() {
            // A newer worker may add fields.
            Some(
                [
                    RecordField::Text(module),
                    RecordField::Text(class),
                    RecordField::Text(message),
                    _,
                    RecordField::Text(traceback),
                    RecordField::Number(attempt),
                    RecordField::Text(worker),
                    _,
                    RecordField::Number(finished_ms),
                    ..,
                ],
            ) => {
                let class = match module.as_str() {
                    "builtins" => class.clone(),
                    module => format!("{module}.{class}"),
                };
                Self {
                    number: attempt + 1,
                    error: match message.is_empty() {
                        true => class,
                        false => format!("{class}: {message}"),
                    },
                    traceback: traceback.clone(),
                    worker: Some(worker.clone()),
                    finished_at_ms: Some(*finished_ms),
                }
            }
            _ => Self {
                number,
                error: match is_record {
                    true => {
                        "this program can't read the record: it was written by a worker of another version"
                            .to_owned()
                    }
                    false => String::from_utf8_lossy(note).into_owned(),
                },
                traceback: String::new(),
                worker: None,
                finished_at_ms: None,
            },
        }
    }

    pub fn as_json(&self) -> Value {
        json!({
            "attempt": self.number,
            "error": self.error,
            "traceback": self.traceback,
            "worker": self.worker,
            "finished_at_ms": self.finished_at_ms,
        })
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RecordField {
    Text(String),
    Number(u64),
    Other(IgnoredAny),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `msgspec.msgpack.encode(ErrorRecord("shop", "Gone", "no", b"\x01", "Traceback", 2, "w@h:1", 5, 1300))`
    const RECORD: &[u8] =
        b"\x99\xa4shop\xa4Gone\xa2no\xc4\x01\x01\xa9Traceback\x02\xa5w@h:1\x05\xcd\x05\x14";

    #[test]
    fn a_record_is_read_and_so_is_one_with_more_in_it() {
        let expected = Attempt {
            number: 3,
            error: "shop.Gone: no".to_owned(),
            traceback: "Traceback".to_owned(),
            worker: Some("w@h:1".to_owned()),
            finished_at_ms: Some(1300),
        };
        assert_eq!(Attempt::read(RECORD, 1), expected);
        let mut newer = RECORD.to_vec();
        newer[0] = 0x9a;
        newer.push(0xc0);
        assert_eq!(Attempt::read(&newer, 1), expected);
    }

    #[test]
    fn a_crash_is_the_brokers_text_and_nonsense_is_called_so() {
        assert_eq!(
            Attempt::read("signal 9 für immer".as_bytes(), 2).error,
            "signal 9 für immer"
        );
        assert!(
            Attempt::read(&RECORD[..9], 2)
                .error
                .contains("another version")
        );
    }
}
