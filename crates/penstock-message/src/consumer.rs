//! Consumers: how a client asks for work.

use crate::MessageId;

/// Queues, tasks and credit of a consumer of a connection from now on.
///
/// A connection may have several. Queues and tasks of one may change at any time; it keeps its credit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consume {
    /// Number of the consumer, which the client chooses.
    pub consumer: u32,
    /// App whose tasks it runs, for people; empty: as before.
    pub app: String,
    /// Queues that it takes from; none: as before.
    pub queues: Vec<String>,
    pub tasks: TaskSelection,
    /// Deliveries that it will take on top of its credit.
    pub add_credit: u32,
    /// Jobs that wait for others and hold every slot behind this consumer; an empty list: it has slots again. `None`: as
    /// before.
    pub held_by: Option<Vec<MessageId>>,
}

/// Tasks that a consumer can run. A job of any other is never sent to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TaskSelection {
    /// As before; of a new consumer: any.
    #[default]
    Same,
    Any,
    Named(Vec<String>),
}
