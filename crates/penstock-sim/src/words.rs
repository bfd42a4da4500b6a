//! Describes a run in words, for people who read its trace.

use penstock_message::{Condition, Hold, Key, MessageId, Op, Receipt, ReleaseReason, Tx};
use penstock_server::WriterTask;

/// Returns the part of an id that is enough to distinguish it from the others of a run.
pub fn id(id: MessageId) -> String {
    let [.., one, two, three, four, _, _] = id.0;
    format!("{one:02x}{two:02x}{three:02x}{four:02x}")
}

pub fn tx(tx: &Tx) -> String {
    let ops: Vec<String> = tx.ops.iter().map(op).collect();
    ops.join(" + ")
}

pub fn receipt(receipt: &Receipt) -> String {
    match receipt {
        Receipt::Applied(applied) if applied.is_plain() => "applied".to_string(),
        Receipt::Applied(applied) => {
            format!("applied but for operations {:?}", applied.skipped)
        }
        Receipt::Refused { op, why } => format!("refused for operation {op}: {why:?}"),
        other => format!("{other:?}"),
    }
}

pub fn task(task: &WriterTask) -> String {
    let done = match (&task.batch, task.sync) {
        (Some(_), true) => "written and synced",
        (Some(_), false) => "written",
        (None, _) => "synced",
    };
    let bytes = task.batch.as_ref().map_or(0, |batch| batch.bytes());
    format!("the disk: {done} through {}, {bytes} bytes", task.through)
}

fn op(op: &Op) -> String {
    match op {
        Op::Publish {
            queues,
            message,
            due,
            unless_key,
        } => {
            let mut words = format!("publish {} to {}", id(message.id), queues.join(", "));
            words.extend(due.map(|due| format!(" due {due:?}")));
            words.extend(
                unless_key
                    .as_ref()
                    .map(|claim| format!(" unless {}", key(&claim.key))),
            );
            if let Some(expires) = message.expires_at {
                words += &format!(" expiring {expires:?}");
            }
            words
        }
        Op::Ack { lease, .. } => format!("ack {}", id(lease.message)),
        Op::Replace { lease, .. } => format!("replace {}", id(lease.message)),
        Op::Release { lease, reason } => match reason {
            ReleaseReason::Returned => format!("hand back {}", id(lease.message)),
            ReleaseReason::Crashed(_) => format!("crash of {}", id(lease.message)),
            ReleaseReason::Suspected(_) => format!("crash by {} or another", id(lease.message)),
        },
        Op::Move {
            lease, queue, due, ..
        } => {
            let mut words = format!("move {}", id(lease.message));
            words.extend(queue.as_ref().map(|queue| format!(" to {queue}")));
            words.extend(due.map(|due| format!(" due {due:?}")));
            words
        }
        Op::Put {
            key: name, value, ..
        } => format!("put {} ({:?})", key(name), value.status),
        Op::Delete { key: name } => format!("delete {}", key(name)),
        Op::Guard {
            key: name,
            condition,
        } => match condition {
            Condition::Absent => format!("if there is no {}", key(name)),
            Condition::Present => format!("if there is {}", key(name)),
            Condition::Is(_) => format!("if {} has a certain value", key(name)),
        },
        Op::Hold(Hold {
            join,
            count,
            messages,
            policy,
            ..
        }) => {
            let held: Vec<String> = messages.iter().map(|(_, message)| id(message.id)).collect();
            let (join, held) = (id(*join), held.join(", "));
            format!("group {join} of {count} ({policy:?}) holds {held}")
        }
        Op::Join {
            join,
            index,
            succeeded,
        } => {
            let how = if *succeeded { "succeeded" } else { "failed" };
            format!("member {index} of group {} {how}", id(*join))
        }
        other => format!("{other:?}"),
    }
}

pub fn key(key: &Key) -> String {
    match key {
        Key::Result(message) => format!("the result of {}", id(*message)),
        Key::Named(name) | Key::Scoped(_, name) => String::from_utf8_lossy(name).into_owned(),
    }
}
