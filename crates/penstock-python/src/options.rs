use bytes::Bytes;
use penstock_message::{
    Claim, Conflict, DEFAULT_PRIORITY, Due, Durability, Extras, HIGHEST_PRIORITY, Key, Message,
    MessageId, Op, Retries, Scope, Until,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::errors::ClientError;

/// Settings of a job without its body, checked and frozen: created once for a task and for each `options()`.
#[derive(Clone)]
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Options {
    task: String,
    queue: String,
    priority: u8,
    due: Option<Due>,
    expires_at: Option<Due>,
    result_ttl_ms: Option<u64>,
    max_crashes: u8,
    retries: Option<Retries>,
    headers: Vec<(String, Bytes)>,
    timeout_ms: Option<u64>,
    soft_timeout_ms: Option<u64>,
    pub(crate) durability: Durability,
    /// Unique key of one call; the options of a task have none.
    claim: Option<Box<Claim>>,
}

impl Options {
    pub(crate) fn publish(&self, id: MessageId, body: Bytes) -> Op {
        let (queue, message, due) = self.message(id, body);
        Op::Publish {
            queues: vec![queue],
            message,
            due,
            unless_key: self.claim.clone(),
        }
    }

    /// Builds the message, with its queue and due time.
    pub(crate) fn message(&self, id: MessageId, body: Bytes) -> (String, Message, Option<Due>) {
        let message = Message {
            id,
            task: self.task.clone(),
            priority: self.priority,
            expires_at: self.expires_at,
            result_ttl_ms: self.result_ttl_ms,
            max_deliveries: self.max_crashes,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body,
            extras: self.extras(),
        };
        (self.queue.clone(), message, self.due)
    }

    fn extras(&self) -> Option<Box<Extras>> {
        let has_limits = self.timeout_ms.is_some() || self.soft_timeout_ms.is_some();
        if self.retries.is_none() && self.headers.is_empty() && !has_limits {
            return None;
        }
        Extras {
            retries: self.retries.clone(),
            headers: self.headers.clone(),
            timeout_ms: self.timeout_ms,
            soft_timeout_ms: self.soft_timeout_ms,
            ..Extras::default()
        }
        .boxed()
    }
}

/// Retries of a job: a number, or a list of delays in milliseconds.
#[derive(FromPyObject)]
pub(crate) enum RetriesGiven {
    AtMost(u32),
    After(Vec<u64>),
}

#[pymethods]
impl Options {
    #[new]
    #[pyo3(signature = (
        task, *, queue = "default", priority = u32::from(DEFAULT_PRIORITY), countdown_ms = None, eta_ms = None,
        expires_after_ms = None, expires_at_ms = None, result_ttl_ms = Some(86_400_000), max_crashes = 3,
        durability = "disk", retries = None, headers = Vec::new(), timeout_ms = None, soft_timeout_ms = None,
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords in Python, each with its name"
    )]
    fn new(
        task: &str,
        queue: &str,
        priority: u32,
        countdown_ms: Option<u64>,
        eta_ms: Option<u64>,
        expires_after_ms: Option<u64>,
        expires_at_ms: Option<u64>,
        result_ttl_ms: Option<u64>,
        max_crashes: u32,
        durability: &str,
        retries: Option<RetriesGiven>,
        headers: Vec<(String, String)>,
        timeout_ms: Option<u64>,
        soft_timeout_ms: Option<u64>,
    ) -> Result<Self, ClientError> {
        named("task", task)?;
        named("queue", queue)?;
        let priority = u8::try_from(priority)
            .ok()
            .filter(|priority| *priority <= HIGHEST_PRIORITY)
            .ok_or_else(|| {
                ClientError::invalid(format!(
                    "priority is {priority}; give 0 to {HIGHEST_PRIORITY}, higher first"
                ))
            })?;
        let max_crashes = u8::try_from(max_crashes)
            .ok()
            .filter(|crashes| *crashes > 0)
            .ok_or_else(|| {
                ClientError::invalid(format!("max_crashes is {max_crashes}; give 1 to 255"))
            })?;
        let durability = match durability {
            "replicated" => Durability::Replicated,
            "disk" => Durability::Disk,
            "os" => Durability::Os,
            "none" => Durability::None,
            other => {
                return Err(ClientError::invalid(format!(
                    "durability is {other:?}; give \"replicated\", \"disk\", \"os\" or \"none\""
                )));
            }
        };
        Ok(Self {
            task: task.to_owned(),
            queue: queue.to_owned(),
            priority,
            due: one_of(("countdown", countdown_ms), ("eta", eta_ms))?,
            expires_at: one_of(
                ("expires_after", expires_after_ms),
                ("expires_at", expires_at_ms),
            )?,
            result_ttl_ms,
            max_crashes,
            retries: retries.map(checked_retries).transpose()?,
            headers: checked_headers(headers)?,
            timeout_ms,
            soft_timeout_ms,
            durability,
            claim: None,
        })
    }

    /// Return the options of a call that claims a key. `until`: "start", "end", or a time in `for_ms`. The job
    /// is due after `wait_ms`; the last of several calls is due after `max_wait_ms` at the latest.
    #[pyo3(signature = (key, *, is_own, until, for_ms = None, conflict = "return", wait_ms = None, max_wait_ms = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords in Python, each with its name"
    )]
    fn claimed(
        &self,
        key: &[u8],
        is_own: bool,
        until: &str,
        for_ms: Option<u64>,
        conflict: &str,
        wait_ms: Option<u64>,
        max_wait_ms: Option<u64>,
    ) -> Result<Self, ClientError> {
        let scope = match is_own {
            true => Scope::Idempotency,
            false => Scope::Unique,
        };
        let until = match (until, for_ms) {
            ("start", None) => Until::Started,
            ("end", None) => Until::Ended,
            ("time", Some(ms)) => Until::ForMs(ms),
            _ => {
                return Err(ClientError::invalid(format!(
                    "a key is not kept until {until:?}"
                )));
            }
        };
        let conflict = match conflict {
            "return" => Conflict::Skip,
            "raise" => Conflict::Refuse,
            "replace" => Conflict::Replace { max_wait_ms },
            other => {
                return Err(ClientError::invalid(format!(
                    "no conflict is solved by {other:?}"
                )));
            }
        };
        let claim = Claim {
            key: Key::Scoped(scope, Bytes::copy_from_slice(key)),
            until,
            conflict,
        };
        Ok(Self {
            due: wait_ms.map(Due::AfterMs).or(self.due),
            claim: Some(Box::new(claim)),
            ..self.clone()
        })
    }

    /// Return the same options with these headers in place of their own.
    fn with_headers(&self, headers: Vec<(String, String)>) -> Result<Self, ClientError> {
        Ok(Self {
            headers: checked_headers(headers)?,
            ..self.clone()
        })
    }

    /// Return the same options without a countdown or an eta.
    fn at_once(&self) -> Self {
        Self {
            due: None,
            ..self.clone()
        }
    }

    /// Return the options that have no getter, by the names that `new` takes.
    fn details<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let details = PyDict::new(py);
        let (countdown_ms, eta_ms) = after_or_at(self.due);
        let (expires_after_ms, expires_at_ms) = after_or_at(self.expires_at);
        details.set_item("priority", self.priority)?;
        details.set_item("countdown_ms", countdown_ms)?;
        details.set_item("eta_ms", eta_ms)?;
        details.set_item("expires_after_ms", expires_after_ms)?;
        details.set_item("expires_at_ms", expires_at_ms)?;
        details.set_item("result_ttl_ms", self.result_ttl_ms)?;
        details.set_item("max_crashes", self.max_crashes)?;
        details.set_item("durability", durability_name(self.durability))?;
        details.set_item("timeout_ms", self.timeout_ms)?;
        details.set_item("soft_timeout_ms", self.soft_timeout_ms)?;
        Ok(details)
    }

    #[getter]
    fn task(&self) -> &str {
        &self.task
    }

    #[getter]
    fn queue(&self) -> &str {
        &self.queue
    }

    #[getter]
    fn retries<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        retries_to_python(py, self.retries.as_ref())
    }

    #[getter]
    fn headers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let headers = PyDict::new(py);
        for (name, value) in &self.headers {
            headers.set_item(name, String::from_utf8_lossy(value))?;
        }
        Ok(headers)
    }
}

fn named(what: &str, name: &str) -> Result<(), ClientError> {
    const LONGEST: usize = 255;
    match name.len() {
        0 => Err(ClientError::invalid(format!(
            "the name of the {what} is empty"
        ))),
        1..=LONGEST => Ok(()),
        length => Err(ClientError::invalid(format!(
            "the name of the {what} takes {length} bytes; {LONGEST} is the limit"
        ))),
    }
}

/// Returns a number, or the milliseconds before each retry.
pub(crate) fn retries_to_python<'py>(
    py: Python<'py>,
    retries: Option<&Retries>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(match retries {
        None => None,
        Some(Retries::AtMost(retries)) => Some(retries.into_pyobject(py)?.into_any()),
        Some(Retries::After(delays)) => Some(PyTuple::new(py, delays)?.into_any()),
    })
}

fn checked_retries(given: RetriesGiven) -> Result<Retries, ClientError> {
    match given {
        RetriesGiven::AtMost(retries) => Ok(Retries::AtMost(retries)),
        RetriesGiven::After(delays) if delays.len() <= Retries::DELAYS_CAP => {
            Ok(Retries::After(delays))
        }
        RetriesGiven::After(delays) => Err(ClientError::invalid(format!(
            "retries has {} delays; {} is the limit",
            delays.len(),
            Retries::DELAYS_CAP
        ))),
    }
}

fn checked_headers(given: Vec<(String, String)>) -> Result<Vec<(String, Bytes)>, ClientError> {
    let bytes: usize = given
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if bytes > Extras::HEADERS_CAP_BYTES {
        return Err(ClientError::invalid(format!(
            "the headers take {bytes} bytes, names included; {} is the limit: pass large data as an argument",
            Extras::HEADERS_CAP_BYTES
        )));
    }
    if let Some((name, _)) = given.iter().find(|(name, _)| name.starts_with("penstock.")) {
        return Err(ClientError::invalid(format!(
            "the header {name:?} begins with \"penstock.\", which is reserved; give it another name"
        )));
    }
    let headers = given.into_iter().map(|(name, value)| (name, value.into()));
    Ok(headers.collect())
}

fn after_or_at(due: Option<Due>) -> (Option<u64>, Option<u64>) {
    match due {
        None => (None, None),
        Some(Due::AfterMs(ms)) => (Some(ms), None),
        Some(Due::At(ms)) => (None, Some(ms)),
    }
}

fn durability_name(durability: Durability) -> &'static str {
    match durability {
        Durability::Replicated => "replicated",
        Durability::Disk => "disk",
        Durability::Os => "os",
        Durability::None => "none",
    }
}

fn one_of(after: (&str, Option<u64>), at: (&str, Option<u64>)) -> Result<Option<Due>, ClientError> {
    match (after, at) {
        ((after, Some(_)), (at, Some(_))) => Err(ClientError::invalid(format!(
            "give {after} or {at}, not both"
        ))),
        ((_, Some(ms)), _) => Ok(Some(Due::AfterMs(ms))),
        (_, (_, Some(ms))) => Ok(Some(Due::At(ms))),
        _ => Ok(None),
    }
}
