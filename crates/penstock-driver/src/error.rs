use std::fmt;

use penstock_message::NotOffered;
use thiserror::Error;

/// Error of a call.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{reason}")]
pub struct DriverError {
    pub kind: ErrorKind,
    /// Text for people: what happened, and what to do about it.
    pub reason: String,
    /// Whether the call was sent, so that a broker may have carried it out or may still do so.
    pub maybe_accepted: bool,
}

/// Kind of an error, by what the caller can do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// No broker was reachable in time. A retry may succeed.
    Unavailable,
    /// The broker is connected, but did not answer in time. A retry may succeed.
    Silent,
    Unauthorized,
    TooLarge,
    /// The URL, the directory or an option is wrong; the reason says which, and how to fix it.
    Invalid,
    /// The broker is too old for the call, or its engine lacks the feature.
    NotOffered(Box<NotOffered>),
    /// The client was closed before the call or before its answer.
    Closed,
}

impl From<NotOffered> for DriverError {
    fn from(lacking: NotOffered) -> Self {
        let reason = lacking.to_string();
        Self::new(ErrorKind::NotOffered(Box::new(lacking)), reason)
    }
}

impl DriverError {
    /// Creates the error of a call that was not sent.
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

    /// Returns the error for a connected broker that did not answer in time.
    pub(crate) fn silent(broker: impl fmt::Display) -> Self {
        let reason = format!("the broker at {broker} did not answer");
        Self::new(ErrorKind::Silent, reason)
    }

    /// Whether a retry may succeed without any change.
    pub fn is_transient(&self) -> bool {
        matches!(self.kind, ErrorKind::Unavailable | ErrorKind::Silent)
    }

    pub fn invalid(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, reason)
    }
}
