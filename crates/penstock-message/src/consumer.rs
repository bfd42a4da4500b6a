//! Consumers: how a client asks for work.

use crate::MessageId;

/// Queues, tasks and credit of a consumer of a connection from now on.
///
/// A connection may have several consumers. Their queues and tasks may change at any time; credit is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consume {
    /// Number of the consumer, chosen by the client.
    pub consumer: u32,
    /// App whose tasks it runs, for people; empty: unchanged.
    pub app: String,
    /// Queues that it takes from; none: unchanged.
    pub queues: Vec<String>,
    pub tasks: TaskSelection,
    /// Deliveries to add to its credit.
    pub add_credit: u32,
    /// Waiting jobs that hold every slot behind this consumer; an empty list: it has free slots again. `None`:
    /// unchanged.
    pub held_by: Option<Vec<MessageId>>,
}

/// Tasks that a consumer can run. Jobs of other tasks are never sent to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TaskSelection {
    /// Unchanged; for a new consumer: any.
    #[default]
    Same,
    Any,
    Named(Vec<String>),
}
