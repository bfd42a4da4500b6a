//! Names the messages in a record, for people who inspect a journal.

use penstock_message::MessageId;

use crate::records::{RecordEvent, RecordReader};
use crate::table::interner::Interner;

/// A message that a record publishes, carries forward, or copies whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub id: MessageId,
    pub queue: String,
    pub task: String,
}

/// Lists the messages whose full state is in a record, as far as it can be read. The rest of a damaged record may end
/// anywhere and may be wrong.
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
