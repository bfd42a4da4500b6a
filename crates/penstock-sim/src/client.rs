//! What the world needs of a client, whatever kind it is.
//!
//! [`crate::wild::Wild`] speaks the protocol by hand and does what no driver would; [`crate::process::Process`]
//! is the driver's own session and the worker's own policy.

use bytes::BytesMut;
use penstock_journal::sim::Rng;

use crate::model::Time;
use crate::wild::Wild;

/// Whether it has a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Offline,
    /// It has said hello.
    Greeting,
    Open,
    /// It will never be heard of again.
    Dead,
}

pub trait Client {
    fn stage(&self) -> Stage;

    /// A connection stands: it says hello.
    fn connected(&mut self, time: Time);

    fn disconnected(&mut self);

    /// Its process ends without a word.
    fn die(&mut self);

    /// Bytes have arrived. False: it has had enough of this connection.
    fn hears(&mut self, rng: &mut Rng, time: Time, bytes: &[u8]) -> bool;

    /// Something of its own accord.
    fn act(&mut self, rng: &mut Rng, time: Time);

    /// The time that `next_deadline_ms` named has come, or any other. False as above.
    fn tick(&mut self, rng: &mut Rng, time: Time) -> bool;

    /// On the steady clock.
    fn next_deadline_ms(&self) -> Option<u64>;

    /// As when all faults are over: takes all there is and finishes it, and begins nothing.
    fn finish(&mut self, rng: &mut Rng, time: Time);

    /// Nothing is left that it would have to do or hear.
    fn is_idle(&self) -> bool;

    /// What it has said.
    fn take_out(&mut self, time: Time) -> BytesMut;

    fn drop_habit(&mut self, name: &str);

    fn as_wild(&mut self) -> Option<&mut Wild> {
        None
    }
}
