//! Converts the arguments of Python's calls to the driver's types.

use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_message::{Durability, MessageId, OnRunning, Op, Target, Tx};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::ClientError;
use crate::ids;
use crate::options::Options;
use crate::wait::deadline;

pub(crate) fn draw_ids(count: usize) -> PyResult<Vec<MessageId>> {
    ids::draw(count).map_err(no_random_bytes)
}

fn no_random_bytes(error: getrandom::Error) -> PyErr {
    pyo3::exceptions::PyOSError::new_err(format!("the system returned no random bytes: {error}"))
}

pub(crate) fn copied(body: &Bound<'_, PyBytes>) -> Bytes {
    Bytes::copy_from_slice(body.as_bytes())
}

pub(crate) fn job(id: &[u8]) -> Result<MessageId, ClientError> {
    id.try_into()
        .map(MessageId)
        .map_err(|_| ClientError::invalid(format!("a job id has 16 bytes, not {}", id.len())))
}

pub(crate) fn jobs(ids: &[Bound<'_, PyBytes>]) -> Result<Vec<MessageId>, ClientError> {
    ids.iter().map(|id| job(id.as_bytes())).collect()
}

pub(crate) fn running_of(name: &str) -> PyResult<OnRunning> {
    match name {
        "leave" => Ok(OnRunning::Leave),
        "ask" => Ok(OnRunning::Ask),
        "kill" => Ok(OnRunning::Kill),
        other => Err(PyValueError::new_err(format!("no treatment {other:?}"))),
    }
}

pub(crate) fn cancellation(job: MessageId, reason: String, running: &str) -> PyResult<Tx> {
    let running = running_of(running)?;
    let target = Target::Job(job);
    Ok(Tx::from(vec![Op::Cancel {
        target,
        reason,
        running,
    }]))
}

/// Puts many jobs into one transaction, with the highest durability of them.
pub(crate) fn publish_all(
    jobs: &[(Bound<'_, Options>, Bound<'_, PyBytes>)],
) -> PyResult<(Vec<MessageId>, Tx, Durability)> {
    let ids = draw_ids(jobs.len())?;
    let ops = ids
        .iter()
        .zip(jobs)
        .map(|(id, (options, body))| options.get().publish(*id, copied(body)))
        .collect();
    let durability = jobs
        .iter()
        .map(|(options, _)| options.get().durability)
        .max()
        .unwrap_or_default();
    Ok((ids, Tx { ops }, durability))
}

/// Returns the deadline of a query, which is always bounded.
pub(crate) fn query_deadline(timeout_s: f64) -> PyResult<Instant> {
    const LONGEST: Duration = Duration::from_secs(86_400);
    Ok(deadline(Some(timeout_s))?.unwrap_or_else(|| Instant::now() + LONGEST))
}
