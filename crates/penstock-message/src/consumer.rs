//! Consumers: how a client asks for work.

/// What a consumer of a connection takes from now on.
///
/// A connection may have several. Queues and tasks of one may change at any time; it keeps its credit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consume {
    /// Its number, which the client chooses.
    pub consumer: u32,
    /// The app whose tasks it runs, for people; empty: as before.
    pub app: String,
    /// The queues that it takes from; none: those that it had.
    pub queues: Vec<String>,
    pub tasks: Tasks,
    /// How many deliveries more it will take.
    pub add_credit: u32,
}

/// The tasks that a consumer can run. A job of any other is never sent to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tasks {
    /// Those it had; of a new consumer: any.
    #[default]
    Same,
    Any,
    Named(Vec<String>),
}
