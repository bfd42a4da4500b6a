//! Encodes the progress of jobs as JSON, [done, total or null, message], which the broker keeps and any
//! language can read.

use penstock_message::Progress;
use serde_json::Value;

/// Maximum length of a message in bytes, if nothing in it needs escaping.
const MESSAGE_BYTES: usize = 3900;
/// Maximum length of any encoded message: an escaped byte takes six.
const ESCAPED_BYTES: usize = MESSAGE_BYTES / 6;

/// Number of a job's progress. A number that is not finite becomes null.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Count {
    Whole(i64),
    Real(f64),
}

impl From<Count> for Value {
    fn from(count: Count) -> Self {
        match count {
            Count::Whole(number) => number.into(),
            Count::Real(number) => number.into(),
        }
    }
}

/// Encodes a job's progress. Truncates a long message.
pub fn encode_progress(done: Count, total: Option<Count>, message: &str) -> Vec<u8> {
    let (done, total) = (Value::from(done), Value::from(total));
    let encoded = |message: String| format!("[{done},{total},{}]", Value::from(message));
    let mut text = encoded(shortened(message, MESSAGE_BYTES));
    if text.len() > Progress::CAP_BYTES {
        text = encoded(shortened(message, ESCAPED_BYTES));
    }
    text.into_bytes()
}

fn shortened(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let mut end = most - '…'.len_utf8();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_shortened_to_fit() {
        for text in ["a", "é", "\u{1}", "\"", "😀"] {
            let long = text.repeat(10_000);
            let body = encode_progress(Count::Whole(i64::MIN), Some(Count::Real(1e300)), &long);
            assert!(body.len() <= Progress::CAP_BYTES, "{}", body.len());
            let read: Value = serde_json::from_slice(&body).unwrap();
            assert!(read[2].as_str().unwrap().ends_with('…'));
            assert!(body.len() > 600);
        }
        let body = encode_progress(Count::Whole(3), None, "x");
        assert_eq!(body, b"[3,null,\"x\"]");
    }
}
