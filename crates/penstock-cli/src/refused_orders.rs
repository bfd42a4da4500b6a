//! Reports orders for several jobs or workflows, some of which were refused.

use penstock_message::MessageId;
use serde_json::{Value, json};

use crate::exit::CommandError;

pub type RefusedOrders = Vec<(MessageId, CommandError)>;

pub fn as_json(refused: &RefusedOrders) -> Value {
    let refused = refused.iter();
    refused
        .map(|(id, failure)| json!({ "id": id.to_string(), "why": failure.message }))
        .collect()
}

/// Fails if any order was refused, with one line for each. `done` is the participle, such as "cancelled".
pub fn report(refused: &RefusedOrders, done: &str) -> Result<(), CommandError> {
    let Some((_, first)) = refused.first() else {
        return Ok(());
    };
    let why = refused.iter();
    let why = why.map(|(id, failure)| format!("{id} was not {done}: {}", failure.message));
    Err(CommandError::new(
        first.code,
        why.collect::<Vec<_>>().join("\n"),
    ))
}
