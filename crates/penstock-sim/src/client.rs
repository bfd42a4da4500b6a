//! Defines the interface between the world and both kinds of clients.
//!
//! [`crate::wild::Wild`] speaks the protocol by hand and does things that no driver would do.
//! [`crate::process::Process`] consists of the driver's own session and the worker's own policy.

use bytes::BytesMut;
use penstock_journal::sim::Rng;
use penstock_message::MessageId;

use crate::model::Time;
use crate::wild::Wild;

/// State of a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Offline,
    /// The client has said hello.
    Greeting,
    Open,
    /// The client has died permanently.
    Dead,
}

pub trait Client {
    fn stage(&self) -> Stage;

    /// Begins a connection, with a hello.
    fn connected(&mut self, time: Time);

    fn disconnected(&mut self);

    /// Kills its process without notice.
    fn die(&mut self);

    /// Handles bytes that have arrived. Returns false if it closes this connection.
    fn hears(&mut self, rng: &mut Rng, time: Time, bytes: &[u8]) -> bool;

    /// Takes an action of its own.
    fn act(&mut self, rng: &mut Rng, time: Time);

    /// Handles the time that `next_deadline_ms` named, or any other time. Returns false if it closes this
    /// connection.
    fn tick(&mut self, rng: &mut Rng, time: Time) -> bool;

    /// Returns the time of its next `tick`, on the steady clock.
    fn next_deadline_ms(&self) -> Option<u64>;

    /// Behaves as after the last fault: accepts and finishes all jobs, and begins nothing new.
    fn finish(&mut self, rng: &mut Rng, time: Time);

    /// Whether it has nothing left to do or to receive.
    fn is_idle(&self) -> bool;

    /// Takes the bytes that the client has written.
    fn next_bytes(&mut self, time: Time) -> BytesMut;

    fn drop_habit(&mut self, name: &str);

    /// Learns of some running jobs, one of which it may want to cancel.
    fn sees_running(&mut self, running: Vec<MessageId>);

    fn as_wild(&mut self) -> Option<&mut Wild> {
        None
    }
}
