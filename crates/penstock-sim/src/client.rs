//! Interface of the world to its clients, of whatever kind.
//!
//! [`crate::wild::Wild`] speaks the protocol by hand and does what no driver would; [`crate::process::Process`]
//! is the driver's own session and the worker's own policy.

use bytes::BytesMut;
use penstock_journal::sim::Rng;
use penstock_message::MessageId;

use crate::model::Time;
use crate::wild::Wild;

/// State of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Offline,
    /// The client has said hello.
    Greeting,
    Open,
    /// The client has died for good.
    Dead,
}

pub trait Client {
    fn stage(&self) -> Stage;

    /// Begins a connection: it says hello.
    fn connected(&mut self, time: Time);

    fn disconnected(&mut self);

    /// Ends its process without a word.
    fn die(&mut self);

    /// Handles bytes that have arrived. False: it closes this connection.
    fn hears(&mut self, rng: &mut Rng, time: Time, bytes: &[u8]) -> bool;

    /// Does something of its own accord.
    fn act(&mut self, rng: &mut Rng, time: Time);

    /// Handles the time that `next_deadline_ms` named, or any other. False as above.
    fn tick(&mut self, rng: &mut Rng, time: Time) -> bool;

    /// Returns the time of its next `tick`, on the steady clock.
    fn next_deadline_ms(&self) -> Option<u64>;

    /// Behaves as when all faults are over: takes all there is and finishes it, and begins nothing.
    fn finish(&mut self, rng: &mut Rng, time: Time);

    /// Whether it has nothing left to do or to receive.
    fn is_idle(&self) -> bool;

    /// Takes the bytes that it has written.
    fn next_bytes(&mut self, time: Time) -> BytesMut;

    fn drop_habit(&mut self, name: &str);

    /// Learns of some jobs that run, for it may want to cancel one.
    fn sees_running(&mut self, running: Vec<MessageId>);

    fn as_wild(&mut self) -> Option<&mut Wild> {
        None
    }
}
