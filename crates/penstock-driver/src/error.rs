use std::fmt;

use penstock_message::NotOffered;
use thiserror::Error;

/// How a call ended that did not end well.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{reason}")]
pub struct DriverError {
    pub kind: ErrorKind,
    /// For people: what happened, and what to do about it.
    pub reason: String,
    /// The call had been sent, so a broker may have carried it out, or may still do so.
    pub maybe_accepted: bool,
}

/// Next step for a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// No broker was within reach in time. Another try may succeed.
    Unavailable,
    /// The broker is connected, and did not answer in time. Another try may succeed.
    Silent,
    Unauthorized,
    TooLarge,
    /// The URL, the directory or an option is wrong; the reason says which and how to fix it.
    Invalid,
    /// The broker is too old for this, or its engine has no such thing.
    NotOffered(Box<NotOffered>),
    /// The client was closed before the call, or before its answer.
    Closed,
}

impl From<NotOffered> for DriverError {
    fn from(lacking: NotOffered) -> Self {
        let reason = lacking.to_string();
        Self::new(ErrorKind::NotOffered(Box::new(lacking)), reason)
    }
}

impl DriverError {
    /// An error of a call that was not sent.
    pub fn new(kind: ErrorKind, reason: impl Into<String>) -> Self {
        Self {
            kind,
            reason: reason.into(),
            maybe_accepted: false,
        }
    }

    pub fn closed() -> Self {
        Self::new(ErrorKind::Closed, "this client was closed")
    }

    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, reason)
    }

    /// The broker at this URL is connected, and did not answer in time.
    pub(crate) fn silent(broker: impl fmt::Display) -> Self {
        let reason = format!("the broker at {broker} did not answer");
        Self::new(ErrorKind::Silent, reason)
    }

    /// Nothing is wrong but the time: another try may succeed.
    pub fn may_pass(&self) -> bool {
        matches!(self.kind, ErrorKind::Unavailable | ErrorKind::Silent)
    }

    pub fn invalid(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, reason)
    }
}
