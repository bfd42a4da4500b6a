//! Implements a worker's side of a connection without worker processes. Tests of applications use it to run
//! jobs in the process that enqueued them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_driver::DeliverySink;
use penstock_jobs::Outcome;
use penstock_message::{
    Answer, Consume, Delivery, Extras, Failure as JobFailure, Progress, Query, StatusQuery,
    TaskSelection, Tx,
};
use penstock_worker::{Desk, Kind, Left, TakeOutcome};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::answers::{confirmed, odd_answer};
use crate::child::extras_to_python;
use crate::client::{Client, wait_for_end};
use crate::errors::ClientError;
use crate::progress::{Number, encode};
use crate::requests::job;
use crate::wait::{SLICE, deadline};

/// Time that a broker with more jobs for this consumer has to send them before it is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(5);

/// Takes jobs from a client's broker, one per call. Shares the client's connection, so that it works with
/// `memory:`, which has no second one.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Consumer {
    client: Py<Client>,
    app: String,
    desk: Arc<Desk>,
    /// Held while sending credit to the broker, which must arrive in the order in which it was decided. Only
    /// taken without the interpreter lock.
    telling: Mutex<()>,
}

#[pymethods]
impl Consumer {
    /// Create a consumer. `app` is shown to people.
    #[new]
    fn new(client: Py<Client>, app: String) -> Self {
        Self {
            client,
            app,
            desk: Arc::default(),
            telling: Mutex::default(),
        }
    }

    /// Start taking jobs of these tasks from these queues.
    fn serve(&self, py: Python<'_>, queues: Vec<String>, tasks: Vec<String>) -> PyResult<()> {
        let driver = self.client.get().driver()?;
        let consume = Consume {
            app: self.app.clone(),
            queues,
            tasks: TaskSelection::Named(tasks),
            ..Consume::default()
        };
        let desk = Arc::clone(&self.desk);
        py.detach(move || driver.consume(consume, desk));
        Ok(())
    }

    /// Take the next job. Without `wait`, return `None` once the broker says that none is ready; with it, once
    /// `stop` was called.
    fn take<'py>(
        &self,
        py: Python<'py>,
        wait: bool,
        timeout_s: f64,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let driver = self.client.get().driver()?;
        py.detach(|| {
            let _telling = self.telling.lock().unwrap();
            let add_credit = self.desk.begin_take();
            if add_credit > 0 {
                let consume = Consume {
                    add_credit,
                    ..Consume::default()
                };
                driver.consume(consume, Arc::clone(&self.desk) as Arc<dyn DeliverySink>);
            }
        });
        let taken = self.wait_for_job(py, wait, timeout_s);
        py.detach(|| {
            let _telling = self.telling.lock().unwrap();
            if self.desk.end_take() {
                driver.stop_consuming();
            }
        });
        match taken? {
            Some(delivery) => job_to_python(py, &delivery).map(Some),
            None => Ok(None),
        }
    }

    /// Report to the broker how a taken job ended, as `Runner.run` states it, and wait until that is confirmed.
    #[expect(
        clippy::too_many_arguments,
        reason = "an outcome, as ChildLink.finish takes it, of a job"
    )]
    fn finish(
        &self,
        py: Python<'_>,
        job_id: &[u8],
        kind: u8,
        delay_ms: u64,
        value: Option<&[u8]>,
        note: Option<&[u8]>,
        failure: Option<(PyBackedStr, PyBackedStr, u64, PyBackedBytes)>,
        timeout_s: f64,
    ) -> PyResult<()> {
        let kind = Kind::from_number(kind)
            .ok_or_else(|| PyValueError::new_err("a job ends in one of eight ways"))?;
        let value = value.map(Bytes::copy_from_slice);
        let note = Bytes::copy_from_slice(note.unwrap_or_default());
        let steps = match kind {
            Kind::Replaced | Kind::Spawned => penstock_worker::decode_steps(&note)
                .map_err(|_| PyValueError::new_err("the steps can't be read"))?,
            _ => Vec::new(),
        };
        let outcome = |cost_us| match kind {
            Kind::Succeeded => Outcome::Succeeded { value, cost_us },
            Kind::Retry => Outcome::Retry {
                delay_ms,
                note,
                cost_us,
            },
            Kind::Failed => Outcome::Failed {
                value,
                note,
                failure: failure.map_or_else(JobFailure::default, listed),
                cost_us,
            },
            Kind::Lost => Outcome::Crashed {
                reason: String::from_utf8_lossy(&note).into_owned(),
            },
            Kind::Cancelled => Outcome::Cancelled,
            Kind::Replaced => Outcome::Replaced { steps, cost_us },
            Kind::Spawned => Outcome::Spawned {
                value,
                steps,
                cost_us,
            },
            Kind::GivenBack => Outcome::Returned,
            Kind::Deferred => Outcome::Deferred {
                delay_ms,
                note,
                cost_us,
            },
        };
        let settled = self.desk.finish(job(job_id)?, outcome);
        let tx = settled
            .ok_or_else(|| PyRuntimeError::new_err("no such job was taken, or it was settled"))?;
        self.settle(py, vec![tx], timeout_s)
    }

    /// Report the progress of a taken job. False: no such job was taken, or it was settled.
    #[pyo3(signature = (job_id, done, total, message))]
    fn progress(
        &self,
        job_id: &[u8],
        done: Number,
        total: Option<Number>,
        message: &str,
    ) -> PyResult<bool> {
        let body = encode(done, total, message)?.into();
        let Some(lease) = self.desk.lease(job(job_id)?) else {
            return Ok(false);
        };
        let driver = self.client.get().driver()?;
        driver.progress(Progress { lease, body });
        Ok(true)
    }

    /// Return the number of jobs for this consumer as (ready, taken and not settled).
    fn left(&self, py: Python<'_>, timeout_s: f64) -> PyResult<(u64, u64)> {
        let Left { ready, leased } = self.ask_left(py, timeout_s)?;
        Ok((ready, leased))
    }

    /// End every `take`, and hand back jobs that arrived and were not taken.
    fn stop(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let driver = self.client.get().driver()?;
        let left = py.detach(|| {
            let _telling = self.telling.lock().unwrap();
            let left = self.desk.stop();
            driver.stop_consuming();
            left
        });
        match left.is_empty() {
            true => Ok(()),
            false => self.settle(py, left, timeout_s),
        }
    }
}

impl Consumer {
    fn ask_left(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Left> {
        let deadline = deadline(Some(timeout_s))?;
        let deadline = deadline.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        let driver = self.client.get().driver()?;
        let query = Query::Status(StatusQuery::first(1));
        let answer = wait_for_end(py, &*driver, |done| driver.query(query, deadline, done))?;
        match answer.map_err(ClientError::of_query)? {
            Answer::Status(page) => Ok(Left {
                ready: page.own_ready,
                leased: page.own_leases.into(),
            }),
            other => Err(odd_answer(&other).into()),
        }
    }

    fn settle(&self, py: Python<'_>, txs: Vec<Tx>, timeout_s: f64) -> PyResult<()> {
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.client.get().driver()?;
        let outcome = wait_for_end(py, &*driver, |done| driver.settle(txs, deadline, done))?;
        Ok(confirmed(outcome)?)
    }

    fn wait_for_job(
        &self,
        py: Python<'_>,
        wait: bool,
        timeout_s: f64,
    ) -> PyResult<Option<Box<Delivery>>> {
        let begun = Instant::now();
        loop {
            let none_will_come = match wait {
                true => false,
                false => self.desk.nothing_is_left(self.ask_left(py, timeout_s)?),
            };
            let patience = if wait { SLICE } else { ASK_AGAIN };
            let looked = py.detach(|| self.desk.look(patience, none_will_come));
            match looked.map_err(ClientError::of_query)? {
                TakeOutcome::Job(delivery) => return Ok(Some(delivery)),
                TakeOutcome::Nothing => return Ok(None),
                TakeOutcome::NotYet if !wait && begun.elapsed().as_secs_f64() > timeout_s => {
                    let why = "the broker has ready jobs, but sends none";
                    return Err(ClientError::refused(why).into());
                }
                TakeOutcome::NotYet => py.check_signals()?,
            }
        }
    }
}

fn listed(failure: (PyBackedStr, PyBackedStr, u64, PyBackedBytes)) -> JobFailure {
    let (class, message, fingerprint, preview) = failure;
    JobFailure {
        class: class.to_string(),
        message: message.to_string(),
        fingerprint,
        preview: Bytes::copy_from_slice(&preview),
    }
}

/// Converts a delivery to the tuple that a worker's child receives.
fn job_to_python<'py>(py: Python<'py>, delivery: &Delivery) -> PyResult<Bound<'py, PyTuple>> {
    let message = &delivery.message;
    let notes = message.notes.iter().map(|note| PyBytes::new(py, note));
    let none = Extras::default();
    let extras = message.extras.as_deref().unwrap_or(&none);
    let headers = extras
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), &value[..]));
    (
        &message.task,
        PyBytes::new(py, &message.id.0),
        message.attempt,
        message.crashes,
        delivery.redelivered,
        message.result_ttl_ms.is_some(),
        message.enqueued_at,
        PyBytes::new(py, &message.body),
        PyList::new(py, notes)?,
        extras_to_python(
            py,
            (extras.generation, extras.attempts_before),
            extras.retries.as_ref(),
            headers,
            (extras.timeout_ms, extras.soft_timeout_ms),
            extras
                .inputs
                .filter(|_| !delivery.inputs.is_empty())
                .map(|inputs| (inputs.shape, delivery.inputs.clone())),
            (
                extras.workflow.map(|id| id.0),
                delivery.deadline,
                extras.member.map(|_| message.id),
            ),
        )?,
    )
        .into_pyobject(py)
}
