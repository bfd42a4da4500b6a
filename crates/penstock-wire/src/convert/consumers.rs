//! Consumers: their queues, tasks and credit.

use penstock_message::{Consume, MessageId, TaskSelection};

use super::id_bytes;
use crate::proto;
use crate::proto::consumer::tasks::Task;

impl From<Consume> for proto::Consumer {
    fn from(consume: Consume) -> Self {
        Self {
            consumer: consume.consumer,
            app: consume.app,
            queues: consume.queues,
            tasks: match consume.tasks {
                TaskSelection::Same => None,
                TaskSelection::Any => Some(proto::consumer::Tasks {
                    any: true,
                    ..proto::consumer::Tasks::default()
                }),
                TaskSelection::Named(names) => Some(proto::consumer::Tasks {
                    tasks: names.into_iter().map(|name| Task { name }).collect(),
                    any: false,
                }),
            },
            add_credit: consume.add_credit,
            stop: false,
            held: consume.held_by.map(|jobs| proto::consumer::Held {
                jobs: jobs.into_iter().map(id_bytes).collect(),
            }),
        }
    }
}

/// Ignores `stop`: the caller checks it first.
impl From<proto::Consumer> for Consume {
    fn from(wire: proto::Consumer) -> Self {
        Self {
            consumer: wire.consumer,
            app: wire.app,
            queues: wire.queues,
            tasks: match wire.tasks {
                None => TaskSelection::Same,
                Some(tasks) if tasks.any => TaskSelection::Any,
                Some(tasks) => {
                    let names = tasks.tasks.into_iter().map(|task| task.name);
                    TaskSelection::Named(names.collect())
                }
            },
            add_credit: wire.add_credit,
            // Bytes that are not an id name no job.
            held_by: wire.held.map(|held| {
                let ids = held.jobs.iter().map(|id| <[u8; 16]>::try_from(&id[..]));
                ids.filter_map(|id| id.ok().map(MessageId)).collect()
            }),
        }
    }
}
