//! What is known of a connection for as long as it lasts, and what waits to be sent on it.

use std::collections::VecDeque;

use penstock_message::{Answer, Key, KeyState, Lease};

use crate::messages::Handle;

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) session: u32,
    pub(crate) writable: bool,
    pub(crate) credit: u64,
    pub(crate) queues: Vec<u32>,
    /// The queue that is asked first next time.
    pub(crate) next_queue: usize,
    /// Whether it stands in the ring of those that want work.
    pub(crate) in_ring: bool,
    /// Whether it stands in line for `poll_output`.
    pub(crate) in_line: bool,
    /// It has asked for work or reported on it.
    pub(crate) is_worker: bool,
    pub(crate) slots: u32,
    pub(crate) busy: u32,
    pub(crate) welcome: Option<Welcome>,
    pub(crate) deliveries: VecDeque<(Handle, u64)>,
    pub(crate) values: VecDeque<(Key, KeyState)>,
    pub(crate) answers: VecDeque<(u64, Answer)>,
}

#[derive(Debug)]
pub(crate) struct Welcome {
    pub(crate) applied_through: u64,
    pub(crate) forgotten: bool,
    pub(crate) leases: Vec<Lease>,
}

impl Connection {
    pub(crate) fn new(session: u32, welcome: Welcome) -> Self {
        Self {
            session,
            writable: true,
            credit: 0,
            queues: Vec::new(),
            next_queue: 0,
            in_ring: false,
            in_line: false,
            is_worker: false,
            slots: 0,
            busy: 0,
            welcome: Some(welcome),
            deliveries: VecDeque::new(),
            values: VecDeque::new(),
            answers: VecDeque::new(),
        }
    }

    pub(crate) fn wants_work(&self) -> bool {
        self.writable && self.credit > 0 && !self.queues.is_empty()
    }
}
