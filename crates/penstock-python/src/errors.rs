//! Turns every fault into an error of `penstock.errors`, only here.

use std::fmt;

use penstock_driver::{DriverError, ErrorKind};
use penstock_message::{MessageId, MessageState, Receipt, Refusal, RefusedWait, WaitRefusal};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Error without an interpreter, so that any thread can create it.
#[derive(Clone, Debug)]
pub(crate) struct ClientError {
    kind: ErrorClass,
    text: String,
    /// Whether the call was sent, so that a broker may have carried it out.
    maybe_accepted: bool,
    /// Job that owns the key of a refused one.
    owner: Option<MessageId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ErrorClass {
    BrokerUnavailable,
    CallTimeout,
    ResultTimeout,
    Unauthorized,
    InvalidConfiguration,
    ClientClosed,
    QueueFull,
    DiskFull,
    PayloadTooLarge,
    ResultExpired,
    NotOffered,
    NoSuchJob,
    TooLate,
    JobExists,
    WaitCycle,
    TooManyWaiting,
    /// Fault that a caller can do nothing about.
    Penstock,
}

impl ClientError {
    fn new(kind: ErrorClass, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
            maybe_accepted: false,
            owner: None,
        }
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::new(ErrorClass::InvalidConfiguration, text)
    }

    pub(crate) fn closed() -> Self {
        Self::of_commit(DriverError::closed())
    }

    pub(crate) fn result_expired() -> Self {
        Self::new(
            ErrorClass::ResultExpired,
            "there is no result and none is on its way: it was not stored, has outlived its result_ttl, was evicted, or the broker does not know the job",
        )
    }

    /// Returns the error for a query that the broker refused.
    pub(crate) fn refused(why: impl Into<String>) -> Self {
        Self::new(ErrorClass::Penstock, why)
    }

    /// Returns the error for a wait inside a job that would never end.
    pub(crate) fn of_refused_wait(refused: &RefusedWait) -> Self {
        match refused.why {
            WaitRefusal::Cycle => Self::new(
                ErrorClass::WaitCycle,
                format!(
                    "{refused}. None of these jobs would ever end. They were not cancelled: only the wait was refused, and jobs that wait \
                     for this one continue when it ends"
                ),
            ),
            WaitRefusal::NoSlotLeft => Self::new(
                ErrorClass::TooManyWaiting,
                format!(
                    "{refused}, and no slot is left to run that job: every slot of its workers is held by a job that waits for \
                     others, and the limit of --max-parked is reached. Nothing was lost: the awaited job is still enqueued. Raise \
                     --max-parked of the workers, or make the jobs steps of a workflow, which hold no slot while they wait"
                ),
            ),
        }
    }

    pub(crate) fn still_pending() -> Self {
        Self::new(
            ErrorClass::ResultTimeout,
            "the job did not end in time. It was not cancelled; ask for its result again later",
        )
    }

    /// Returns the error for an unanswered query, which changes nothing.
    pub(crate) fn unanswered(trouble: Option<String>) -> Self {
        match trouble {
            Some(trouble) => Self::new(
                ErrorClass::BrokerUnavailable,
                format!("{trouble}. Nothing was changed; try again once a broker is reachable."),
            ),
            None => Self::new(
                ErrorClass::CallTimeout,
                "the broker did not answer in time. Nothing was changed; try again, or give it more time with \
                 App(call_timeout=...)",
            ),
        }
    }

    /// Returns the error for a query or a wait, which can't have been accepted.
    pub(crate) fn of_query(error: DriverError) -> Self {
        match error.kind {
            ErrorKind::Silent => Self::unanswered(None),
            ErrorKind::Unavailable => Self::unanswered(Some(error.reason)),
            _ => Self::of_commit(DriverError {
                maybe_accepted: false,
                ..error
            }),
        }
    }

    /// Returns the error for an order on existing jobs.
    pub(crate) fn of_order(error: DriverError) -> Self {
        match (&error.kind, error.maybe_accepted) {
            (ErrorKind::Unavailable, true) => Self {
                maybe_accepted: true,
                ..Self::new(
                    ErrorClass::BrokerUnavailable,
                    format!(
                        "{}. The order may have been carried out; giving it again is safe.",
                        error.reason
                    ),
                )
            },
            _ => Self::of_query(error),
        }
    }

    /// Returns the error for a transaction that publishes.
    pub(crate) fn of_commit(error: DriverError) -> Self {
        let DriverError {
            kind,
            reason,
            maybe_accepted,
        } = error;
        const MAYBE: &str =
            "The job may have been accepted anyway: enqueueing it again could run it twice.";
        let (kind, reason, advice) = match kind {
            ErrorKind::Unavailable | ErrorKind::Silent => (
                match kind {
                    ErrorKind::Silent => ErrorClass::CallTimeout,
                    _ => ErrorClass::BrokerUnavailable,
                },
                reason,
                ". The job was not accepted; enqueue it again once a broker is reachable.",
            ),
            ErrorKind::Unauthorized => (ErrorClass::Unauthorized, reason, ""),
            ErrorKind::TooLarge => (ErrorClass::PayloadTooLarge, reason, ""),
            ErrorKind::Invalid => (ErrorClass::InvalidConfiguration, reason, ""),
            ErrorKind::NotOffered(_) => (ErrorClass::NotOffered, reason, ". Nothing was sent"),
            ErrorKind::Closed => (
                ErrorClass::ClientClosed,
                reason,
                "; create a new App, or a new Client",
            ),
        };
        let text = match maybe_accepted {
            true => format!("{reason}. {MAYBE}"),
            false => format!("{reason}{advice}"),
        };
        Self {
            maybe_accepted,
            ..Self::new(kind, text)
        }
    }

    /// Returns the error for a transaction that changes a job and publishes none.
    pub(crate) fn of_change(error: DriverError) -> Self {
        let maybe_accepted = error.maybe_accepted;
        if error.is_transient() {
            let advice = match maybe_accepted {
                true => {
                    "The change may have been made, or may still be made: check the job's info, or try again"
                }
                false => "Nothing was changed; try again once a broker is reachable",
            };
            let text = format!("{}. {advice}.", error.reason);
            let kind = match error.kind {
                ErrorKind::Silent => ErrorClass::CallTimeout,
                _ => ErrorClass::BrokerUnavailable,
            };
            return Self {
                maybe_accepted,
                ..Self::new(kind, text)
            };
        }
        Self::of_commit(DriverError {
            maybe_accepted: false,
            ..error
        })
    }

    /// Returns the error in a receipt, unless the transaction was applied.
    pub(crate) fn of_receipt(receipt: Receipt) -> Result<(), Self> {
        let (op, why) = match receipt {
            Receipt::Applied { .. } | Receipt::Duplicate => return Ok(()),
            Receipt::Unknown => {
                return Err(Self::of_commit(DriverError {
                    kind: ErrorKind::Unavailable,
                    reason: "the broker was unreachable for so long that it no longer remembers this client"
                        .into(),
                    maybe_accepted: true,
                }));
            }
            Receipt::Refused { op, why } => (op, why),
        };
        Err(match why {
            Refusal::TooLarge(text) => Self::new(ErrorClass::PayloadTooLarge, text),
            Refusal::QueueFull(text) => Self::new(
                ErrorClass::QueueFull,
                format!(
                    "{text}. No job of this call was accepted; enqueue it again once workers have caught up"
                ),
            ),
            Refusal::DiskFull => Self::new(
                ErrorClass::DiskFull,
                "the broker accepts no new jobs: its disk is nearly full, or has too little space for a call of this size. \
                 No job of this call was accepted, and no accepted job is lost. Free some space on the \
                 broker's machine, or let workers drain the queues, and enqueue it again",
            ),
            Refusal::Invalid(text) => Self::invalid(text),
            Refusal::AlreadyExists => Self::new(
                ErrorClass::Penstock,
                format!(
                    "the broker already has a job with the id of number {op}; nothing was accepted"
                ),
            ),
            Refusal::GuardFailed => Self::new(
                ErrorClass::Penstock,
                format!("the condition of operation {op} did not hold; nothing was changed"),
            ),
            Refusal::NotOffered(text) => Self::new(
                ErrorClass::NotOffered,
                format!("{text}. Nothing was changed"),
            ),
            Refusal::NoSuchJob => Self::new(
                ErrorClass::NoSuchJob,
                "the broker has no such job: it has ended, or never existed; nothing was changed",
            ),
            Refusal::TooLate(state) => Self::new(
                ErrorClass::TooLate,
                format!(
                    "the job is already {}, so it is too late for that; nothing was changed",
                    state_name(state)
                ),
            ),
            Refusal::Claimed(owner) => Self {
                owner: Some(owner),
                ..Self::new(
                    ErrorClass::JobExists,
                    format!("job {owner} already has its unique key; nothing was accepted"),
                )
            },
            Refusal::LeaseLost => Self::new(
                ErrorClass::Penstock,
                "the job's lease was lost to another worker; nothing was changed",
            ),
        })
    }

    /// Returns the exception to raise or pass on.
    pub(crate) fn to_error(&self, py: Python<'_>) -> PyErr {
        match self.kind.class(py) {
            Err(error) => error,
            Ok(class) if self.kind.ends_calls() => {
                PyErr::from_type(class.clone(), (self.text.clone(), self.maybe_accepted))
            }
            Ok(class) => match self.owner {
                Some(owner) => {
                    PyErr::from_type(class.clone(), (self.text.clone(), owner.to_string()))
                }
                None => PyErr::from_type(class.clone(), (self.text.clone(),)),
            },
        }
    }
}

/// Returns the state of a held job, as Python's `JobInfo` spells it.
pub(crate) fn state_name(state: MessageState) -> &'static str {
    match state {
        MessageState::Ready => "ready",
        MessageState::Delayed => "delayed",
        MessageState::Running => "running",
        MessageState::Held => "held",
        MessageState::Failed => "failed",
        MessageState::Blocked => "blocked",
        MessageState::Cancelling => "cancelling",
        MessageState::Parked => "parked",
    }
}

impl fmt::Display for ClientError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl From<ClientError> for PyErr {
    fn from(failure: ClientError) -> Self {
        Python::attach(|py| failure.to_error(py))
    }
}

impl ErrorClass {
    /// Whether the class takes `maybe_accepted`. Other errors come from an answer, which says what was done.
    fn ends_calls(self) -> bool {
        matches!(
            self,
            Self::BrokerUnavailable
                | Self::CallTimeout
                | Self::ResultTimeout
                | Self::Unauthorized
                | Self::InvalidConfiguration
                | Self::ClientClosed
                | Self::PayloadTooLarge
                | Self::NotOffered
        )
    }

    fn class(self, py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
        macro_rules! class {
            ($name:literal) => {{
                static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
                CLASS.import(py, "penstock.errors", $name)
            }};
        }
        match self {
            Self::BrokerUnavailable => class!("BrokerUnavailable"),
            Self::CallTimeout => class!("CallTimeout"),
            Self::ResultTimeout => class!("ResultTimeout"),
            Self::Unauthorized => class!("Unauthorized"),
            Self::InvalidConfiguration => class!("InvalidConfiguration"),
            Self::ClientClosed => class!("ClientClosed"),
            Self::QueueFull => class!("QueueFull"),
            Self::DiskFull => class!("DiskFull"),
            Self::PayloadTooLarge => class!("PayloadTooLarge"),
            Self::ResultExpired => class!("ResultExpired"),
            Self::NotOffered => class!("NotOffered"),
            Self::NoSuchJob => class!("NoSuchJob"),
            Self::TooLate => class!("TooLate"),
            Self::JobExists => class!("JobExists"),
            Self::WaitCycle => class!("WaitCycle"),
            Self::TooManyWaiting => class!("TooManyWaiting"),
            Self::Penstock => class!("PenstockError"),
        }
    }
}
