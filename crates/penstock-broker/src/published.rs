//! Names the messages of a record, for people who look at a journal.

use penstock_message::MessageId;

use crate::records::{RecordEvent, RecordReader};
use crate::table::interner::Interner;

/// A message that a record publishes, moves forward, or copies whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub id: MessageId,
    pub queue: String,
    pub task: String,
}

/// Lists the messages whose full state stands in a record, as far as it can be read: the rest of a
/// damaged one may end anywhere, and may be wrong.
pub fn published_in(record: &[u8]) -> Vec<Published> {
    let mut published = Vec::new();
    let mut names = Interner::default();
    let Ok(mut reader) = RecordReader::new(record) else {
        return published;
    };
    while let Ok(Some(event)) = reader.next(&mut names) {
        if let RecordEvent::Message { head, .. } = event {
            published.push(Published {
                id: head.id,
                queue: names.text(head.queue).to_owned(),
                task: names.text(head.task).to_owned(),
            });
        }
    }
    published
}
