//! Converts failed jobs between Python values and the broker's types.

use penstock_driver::DriverError;
use penstock_message::{Applied, FailedJob, FailedPage, Filter, MessageId, Op, Receipt, Target};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::ClientError;

/// Filter as (queue, task, class, fingerprint, failed_from_ms, failed_before_ms, workflow).
pub(crate) type FilterTuple = (
    Option<String>,
    Option<String>,
    Option<String>,
    Option<u64>,
    Option<u64>,
    Option<u64>,
    Option<[u8; 16]>,
);

pub(crate) fn filter_of(given: FilterTuple) -> Filter {
    let (queue, task, class, fingerprint, failed_from, failed_before, workflow) = given;
    Filter {
        queue,
        task,
        workflow: workflow.map(MessageId),
        class,
        fingerprint,
        failed_from,
        failed_before,
    }
}

/// Returns the operation for one failed job, or for all that match.
pub(crate) fn order(
    order: &str,
    job: Option<MessageId>,
    filter: FilterTuple,
    queue: Option<String>,
) -> PyResult<Op> {
    let target = match job {
        Some(job) => Target::Job(job),
        None => Target::Filter(filter_of(filter)),
    };
    match order {
        "retry" => Ok(Op::RetryFailed { target, queue }),
        "remove" => Ok(Op::DropFailed { target }),
        _ => Err(PyValueError::new_err("an order is \"retry\" or \"remove\"")),
    }
}

/// Returns the receipt of a transaction with one operation.
pub(crate) fn applied(outcome: Result<Vec<Receipt>, DriverError>) -> Result<Applied, ClientError> {
    let receipts = outcome.map_err(ClientError::of_order)?;
    match receipts.into_iter().next() {
        Some(Receipt::Applied(applied)) => Ok(applied),
        Some(receipt) => ClientError::of_receipt(receipt).map(|()| Applied::default()),
        None => Ok(Applied::default()),
    }
}

/// Returns a page as (jobs, cursor of the next page).
pub(crate) fn page<'py>(
    py: Python<'py>,
    page: FailedPage,
) -> PyResult<(Bound<'py, PyList>, Option<u64>)> {
    let jobs: Vec<_> = page
        .jobs
        .into_iter()
        .map(|job| job_dict(py, job))
        .collect::<PyResult<_>>()?;
    Ok((PyList::new(py, jobs)?, page.next))
}

fn job_dict(py: Python<'_>, job: FailedJob) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("id", job.id.to_string())?;
    dict.set_item("task", job.task)?;
    dict.set_item("queue", job.queue)?;
    dict.set_item("attempt", job.attempt)?;
    dict.set_item("crashes", job.crashes)?;
    dict.set_item("generation", job.generation)?;
    dict.set_item("enqueued_at_ms", job.enqueued_at)?;
    dict.set_item("failed_at_ms", job.failed_at)?;
    dict.set_item("error", job.failure.class)?;
    dict.set_item("message", job.failure.message)?;
    dict.set_item("fingerprint", job.failure.fingerprint)?;
    dict.set_item("preview", String::from_utf8_lossy(&job.failure.preview))?;
    dict.set_item("body_bytes", job.body_bytes)?;
    Ok(dict)
}
