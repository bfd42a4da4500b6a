//! Converts the broker's answers to Python's objects.

use penstock_driver::DriverError;
use penstock_message::{
    Answer, Applied, KeyState, MessageId, MessageInfo, ProducingRun, Receipt, Refusal, Status,
};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict, PyList, PyTuple};

use crate::errors::{ClientError, state_name};

pub(crate) fn confirmed(outcome: Result<Vec<Receipt>, DriverError>) -> Result<(), ClientError> {
    let receipts = outcome.map_err(ClientError::of_commit)?;
    receipts.into_iter().try_for_each(ClientError::of_receipt)
}

/// Returns the owners of the keys of calls that enqueued no job, each with the index of its call.
pub(crate) fn owners(
    outcome: Result<Vec<Receipt>, DriverError>,
) -> Result<Vec<(u32, MessageId)>, ClientError> {
    let mut owners = Vec::new();
    for receipt in outcome.map_err(ClientError::of_commit)? {
        match receipt {
            Receipt::Applied(applied) => owners.extend(applied.owners),
            other => ClientError::of_receipt(other)?,
        }
    }
    Ok(owners)
}

/// Returns the state in which a cancellation found its job; `None` if the broker has no such job, or no longer
/// knows.
pub(crate) fn found(
    outcome: Result<Vec<Receipt>, DriverError>,
) -> Result<Option<&'static str>, ClientError> {
    match outcome.map_err(ClientError::of_change)?.pop() {
        Some(Receipt::Applied(Applied { found, .. })) => Ok(found.map(state_name)),
        // Resent after a reconnect: the broker no longer reports what it found.
        Some(Receipt::Duplicate) => Ok(None),
        Some(Receipt::Refused {
            why: Refusal::TooLate(state),
            ..
        }) => Ok(Some(state_name(state))),
        Some(Receipt::Refused {
            why: Refusal::NoSuchJob,
            ..
        })
        | None => Ok(None),
        Some(receipt) => Err(ClientError::of_receipt(receipt).err().unwrap_or_else(|| {
            ClientError::refused("the broker sent an answer of an unknown kind")
        })),
    }
}

pub(crate) fn id_list<'py>(py: Python<'py>, ids: &[MessageId]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, ids.iter().map(|id| PyBytes::new(py, &id.0)))
}

pub(crate) fn only(mut states: Vec<KeyState>) -> KeyState {
    states.pop().unwrap_or(KeyState::Gone)
}

/// Returns the end of a job as (status, body).
pub(crate) fn ended(py: Python<'_>, state: KeyState) -> PyResult<Bound<'_, PyTuple>> {
    match state {
        KeyState::Present(value) => {
            (value.status as u8, PyBytes::new(py, &value.body)).into_pyobject(py)
        }
        KeyState::Gone => Err(ClientError::result_expired().to_error(py)),
        KeyState::Pending => Err(ClientError::still_pending().to_error(py)),
    }
}

/// Returns the end of each job like [`ended`]; a value that is gone is (-1, b"").
pub(crate) fn all_ended(py: Python<'_>, states: Vec<KeyState>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for state in states {
        list.append(ended_or_gone(py, state)?)?;
    }
    Ok(list)
}

pub(crate) fn ended_or_gone(py: Python<'_>, state: KeyState) -> PyResult<Bound<'_, PyTuple>> {
    match state {
        KeyState::Present(_) => ended(py, state),
        KeyState::Gone | KeyState::Pending => (-1, PyBytes::new(py, b"")).into_pyobject(py),
    }
}

/// Returns the end like [`ended`], with the run that it came from; `None` for a job that has not ended.
pub(crate) fn state_now(py: Python<'_>, state: KeyState) -> PyResult<Option<Bound<'_, PyTuple>>> {
    let value = match state {
        KeyState::Pending => return Ok(None),
        KeyState::Gone => return Err(ClientError::result_expired().to_error(py)),
        KeyState::Present(value) => value,
    };
    let run = value.run.map(|run| {
        let ProducingRun {
            task,
            queue,
            attempt,
            generation,
            ended_at,
        } = *run;
        (task, queue, attempt, generation, ended_at)
    });
    let end = (value.status as u8, PyBytes::new(py, &value.body), run);
    end.into_pyobject(py).map(Some)
}

pub(crate) fn message_info(answer: Answer) -> Result<Option<MessageInfo>, ClientError> {
    match answer {
        Answer::Message(info) => Ok(info),
        other => Err(odd_answer(&other)),
    }
}

pub(crate) fn odd_answer(answer: &Answer) -> ClientError {
    match answer {
        Answer::Refused(why) => ClientError::refused(why),
        _ => ClientError::refused("the broker sent the answer to another query"),
    }
}

pub(crate) fn info_dict(
    py: Python<'_>,
    info: Option<MessageInfo>,
) -> PyResult<Option<Bound<'_, PyDict>>> {
    let Some(info) = info else {
        return Ok(None);
    };
    let notes: Vec<_> = info
        .notes
        .iter()
        .map(|note| PyBytes::new(py, note))
        .collect();
    let (failed_at, failure) = info.failed.map(|failed| *failed).unzip();
    let failure = failure.map(|failure| match failure.message.is_empty() {
        true => failure.class,
        false => format!("{}: {}", failure.class, failure.message),
    });
    let dict = PyDict::new(py);
    dict.set_item("task", info.task)?;
    dict.set_item("queue", info.queue)?;
    dict.set_item("state", state_name(info.state))?;
    dict.set_item("enqueued_at_ms", info.enqueued_at)?;
    dict.set_item("started_at_ms", info.started_at)?;
    dict.set_item("due_at_ms", info.due_at)?;
    dict.set_item("attempt", info.attempt)?;
    dict.set_item("crashes", info.crashes)?;
    dict.set_item("worker", info.worker)?;
    dict.set_item("notes", notes)?;
    dict.set_item("generation", info.generation)?;
    dict.set_item("failed_at_ms", failed_at)?;
    dict.set_item("failure", failure)?;
    let headers = info.headers.iter();
    let headers = headers.map(|(name, value)| (name, String::from_utf8_lossy(value)));
    dict.set_item("headers", headers.into_py_dict(py)?)?;
    dict.set_item("task_unknown", info.task_unknown)?;
    Ok(Some(dict))
}

/// Returns the figures for tests and benchmarks; `penstock status --json` has all of them.
pub(crate) fn status_dict<'py>(py: Python<'py>, status: &Status) -> PyResult<Bound<'py, PyDict>> {
    let ready = status.queues.iter().map(|queue| (&queue.name, queue.ready));
    let (process, others) = (&status.process, &status.others);
    let of_others = PyDict::new(py);
    of_others.set_item("queues", others.queues)?;
    of_others.set_item("tasks", others.tasks)?;
    of_others.set_item("enqueued", others.of_queues.enqueued)?;
    of_others.set_item("expired", others.of_queues.expired)?;
    let dict = PyDict::new(py);
    dict.set_item("ready", ready.into_py_dict(py)?)?;
    dict.set_item("others", of_others)?;
    dict.set_item("clients", status.clients)?;
    dict.set_item("results", status.results)?;
    dict.set_item("evicted", status.evicted)?;
    dict.set_item("broker_version", &process.version)?;
    dict.set_item("broker_pid", process.pid)?;
    dict.set_item("journal_bytes", process.journal_bytes)?;
    Ok(dict)
}
