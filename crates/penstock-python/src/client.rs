use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_driver::{Done, Driver, DriverConfig, DriverError};
use penstock_message::{
    Answer, Durability, FailedQuery, Filter, KeyState, MessageId, Op, Query, Receipt, Refusal,
    ScheduleName, SchedulesQuery, Status, StatusQuery, Target, Tx, WorkflowsPage, WorkflowsQuery,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::answers::{
    all_ended, confirmed, ended, found, id_list, info_dict, message_info, odd_answer, only, owners,
    state_now, status_dict,
};
use crate::errors::ClientError;
use crate::failed;
use crate::graph::Graph;
use crate::loan::Loan;
use crate::options::Options;
use crate::port::{CallEnd, Port};
use crate::read_ahead;
use crate::requests::{
    cancellation, copied, draw_ids, job, jobs, publish_all, query_deadline, running_of,
};
use crate::schedules::{self, Timing};
use crate::values::{Each, Gather};
use crate::wait::{ValueSlot, deadline};
use crate::workflows;

/// Maximum number of failed jobs in a workflow's status.
const FAILURES_SHOWN: u64 = 100;
/// Times of a schedule, with the call that it makes.
type ScheduledCall<'py> = (Bound<'py, Timing>, Bound<'py, Options>, Bound<'py, PyBytes>);

/// Time for which the broker keeps the leases of a silent client.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Time that a goodbye waits for other threads to leave their calls.
const OTHERS_PATIENCE: Duration = Duration::from_millis(250);

/// Connection of one process to a broker. Creating one opens, starts and connects nothing.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Client {
    url: String,
    token: Option<String>,
    program: Option<PathBuf>,
    name: Option<String>,
    /// Held only briefly, and always with the interpreter lock, so never while this process is forked.
    state: Mutex<ClientState>,
}

struct ClientState {
    pid: u32,
    driver: Option<Arc<dyn Driver>>,
    /// Full URL of the broker when the driver was created.
    broker: Option<String>,
    closed: bool,
}

impl Client {
    pub(crate) fn driver(&self) -> Result<Arc<dyn Driver>, ClientError> {
        let mut state = self.state.lock().unwrap();
        let pid = std::process::id();
        if state.pid != pid {
            state.pid = pid;
            if let Some(inherited) = state.driver.take() {
                inherited.abandon();
                // Threads of the parent may hold its locks, and its own thread does not exist here.
                std::mem::forget(inherited);
            }
        }
        if state.closed {
            return Err(ClientError::closed());
        }
        if let Some(driver) = &state.driver {
            return Ok(Arc::clone(driver));
        }
        let driver = penstock_local::connect(DriverConfig {
            url: self.url.clone(),
            token: self.token.clone(),
            program: self.program.clone(),
            name: self.name.clone().unwrap_or_else(|| format!("pid {pid}")),
            heartbeat: HEARTBEAT,
        })
        .map_err(ClientError::of_query)?;
        state.driver = Some(Arc::clone(&driver));
        state.broker = Some(penstock_local::full_url(&self.url));
        Ok(driver)
    }

    /// Commits one transaction, and waits until it is confirmed. Returns the driver that did it.
    fn commit(
        &self,
        py: Python<'_>,
        tx: Tx,
        durability: Durability,
        timeout_s: f64,
    ) -> PyResult<Arc<dyn Driver>> {
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.commit(vec![tx], durability, deadline, done);
        })?;
        confirmed(outcome)?;
        Ok(driver)
    }

    fn ask(&self, py: Python<'_>, query: Query, timeout_s: f64) -> PyResult<Answer> {
        self.ask_by(py, query, query_deadline(timeout_s)?)
    }

    fn workflows_page(
        &self,
        py: Python<'_>,
        query: WorkflowsQuery,
        deadline: Instant,
    ) -> PyResult<WorkflowsPage> {
        match self.ask_by(py, Query::Workflows(query), deadline)? {
            Answer::Workflows(page) => Ok(page),
            other => Err(odd_answer(&other).into()),
        }
    }

    fn ask_by(&self, py: Python<'_>, query: Query, deadline: Instant) -> PyResult<Answer> {
        let driver = self.driver()?;
        let answer = wait_for_end(py, &*driver, |done| driver.query(query, deadline, done))?;
        Ok(answer.map_err(ClientError::of_query)?)
    }

    /// Waits until all these jobs have ended.
    fn states(
        &self,
        py: Python<'_>,
        jobs: &[MessageId],
        timeout_s: Option<f64>,
        waiter: Option<&[u8]>,
        loan: Option<&Loan>,
    ) -> PyResult<Vec<KeyState>> {
        let slot = ValueSlot::new();
        let filled = Arc::clone(&slot);
        let waiter = waiter.map(job).transpose()?;
        let gather = Gather::ends(jobs, waiter, Box::new(move |states| filled.fill(states)));
        self.gather(py, gather, &slot, timeout_s, loan)
    }

    fn gather(
        &self,
        py: Python<'_>,
        gather: Arc<Gather>,
        slot: &ValueSlot<Result<Vec<KeyState>, ClientError>>,
        timeout_s: Option<f64>,
        loan: Option<&Loan>,
    ) -> PyResult<Vec<KeyState>> {
        let deadline = deadline(timeout_s)?;
        let driver = self.driver()?;
        let keys = gather.keys();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let sink = Arc::clone(&gather);
        // Timed here and not by the driver, whose thread would have to be woken for it.
        let (watch, states) = slot.wait_for(py, &*driver, deadline, loan, || {
            sink.begin(&*driver, keys, None)
        });
        match states {
            Ok(Some(states)) => Ok(states?),
            Ok(None) => {
                driver.unwatch(watch);
                Err(gather.timeout_error(driver.trouble()).into())
            }
            Err(interrupted) => {
                driver.unwatch(watch);
                Err(interrupted)
            }
        }
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (url, *, token = None, program = None, name = None))]
    fn new(
        url: String,
        token: Option<String>,
        program: Option<PathBuf>,
        name: Option<String>,
    ) -> Result<Self, ClientError> {
        // Report a meaningless URL now, not at the first call.
        url.parse::<penstock_driver::BrokerUrl>()
            .map_err(ClientError::of_query)?;
        Ok(Self {
            url,
            token,
            program,
            name,
            state: Mutex::new(ClientState {
                pid: std::process::id(),
                driver: None,
                broker: None,
                closed: false,
            }),
        })
    }

    fn publish<'py>(
        &self,
        py: Python<'py>,
        options: &Options,
        body: &Bound<'py, PyBytes>,
        timeout_s: f64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let id = draw_ids(1)?[0];
        let tx = Tx::from(vec![options.publish(id, copied(body))]);
        let driver = self.commit(py, tx, options.durability, timeout_s)?;
        read_ahead::published(&driver, &[id]);
        Ok(PyBytes::new(py, &id.0))
    }

    fn publish_same<'py>(
        &self,
        py: Python<'py>,
        options: &Options,
        bodies: Vec<Bound<'py, PyBytes>>,
        timeout_s: f64,
    ) -> PyResult<Bound<'py, PyList>> {
        let ids = draw_ids(bodies.len())?;
        let ops = ids
            .iter()
            .zip(&bodies)
            .map(|(id, body)| options.publish(*id, copied(body)))
            .collect();
        let driver = self.commit(py, Tx { ops }, options.durability, timeout_s)?;
        read_ahead::published(&driver, &ids);
        id_list(py, &ids)
    }

    fn publish_many<'py>(
        &self,
        py: Python<'py>,
        jobs: Vec<(Bound<'py, Options>, Bound<'py, PyBytes>)>,
        timeout_s: f64,
    ) -> PyResult<Bound<'py, PyList>> {
        let (ids, tx, durability) = publish_all(&jobs)?;
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.commit(vec![tx], durability, deadline, done);
        })?;
        let owners = owners(outcome)?;
        read_ahead::published(&driver, &ids);
        let list = id_list(py, &ids)?;
        for (place, owner) in owners {
            list.set_item(place as usize, (PyBytes::new(py, &owner.0),))?;
        }
        Ok(list)
    }

    /// Commit all jobs and joins of a workflow in one transaction. `workflow`: its id; `None` for a job without
    /// a workflow. Returns false if it must be sent only once and already was.
    fn publish_graph(
        &self,
        py: Python<'_>,
        graph: &Graph,
        workflow: Option<&[u8]>,
        timeout_s: f64,
    ) -> PyResult<bool> {
        let (tx, durability) = graph.take(workflow.map(job).transpose()?);
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.commit(vec![tx], durability, deadline, done);
        })?;
        let was_sent = matches!(
            outcome.as_deref(),
            Ok([Receipt::Refused {
                why: Refusal::GuardFailed,
                ..
            }])
        );
        if !was_sent {
            confirmed(outcome)?;
        }
        Ok(!was_sent)
    }

    fn submit_graph(
        &self,
        py: Python<'_>,
        graph: &Graph,
        workflow: &[u8],
        timeout_s: f64,
        port: &Port,
        token: u64,
    ) -> PyResult<()> {
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let (tx, durability) = graph.take(Some(job(workflow)?));
        let inbox = Arc::clone(&port.inbox);
        inbox.expect(token);
        let done = Box::new(move |outcome| {
            inbox.end(token, confirmed(outcome).map(|()| CallEnd::Committed));
        });
        py.detach(move || driver.commit(vec![tx], durability, deadline, done));
        Ok(())
    }

    /// Cancel all jobs of a workflow; return the id of that operation.
    fn cancel_workflow(
        &self,
        py: Python<'_>,
        workflow: &[u8],
        reason: String,
        running: &str,
        timeout_s: f64,
    ) -> PyResult<Option<u64>> {
        let filter = Filter {
            workflow: Some(job(workflow)?),
            ..Filter::default()
        };
        let op = Op::Cancel {
            target: Target::Filter(filter),
            reason,
            running: running_of(running)?,
        };
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.settle(vec![Tx::from(vec![op])], deadline, done);
        })?;
        Ok(failed::applied(outcome)?.operation)
    }

    #[pyo3(signature = (job_id, timeout_s, *, waiter = None, loan = None))]
    fn wait<'py>(
        &self,
        py: Python<'py>,
        job_id: &[u8],
        timeout_s: Option<f64>,
        waiter: Option<&[u8]>,
        loan: Option<Bound<'py, Loan>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let loan = loan.as_ref().map(Bound::get);
        let job = job(job_id)?;
        let begun = Instant::now();
        if let Some(state) = read_ahead::take(py, &self.driver()?, job, timeout_s, loan)? {
            return ended(py, state);
        }
        let left_s = timeout_s.map(|timeout_s| timeout_s - begun.elapsed().as_secs_f64());
        let states = self.states(py, &[job], left_s, waiter, loan)?;
        ended(py, only(states))
    }

    #[pyo3(signature = (job_ids, timeout_s, *, waiter = None, loan = None))]
    fn wait_all<'py>(
        &self,
        py: Python<'py>,
        job_ids: Vec<Bound<'py, PyBytes>>,
        timeout_s: Option<f64>,
        waiter: Option<&[u8]>,
        loan: Option<Bound<'py, Loan>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let jobs = jobs(&job_ids)?;
        let loan = loan.as_ref().map(Bound::get);
        let states = self.states(py, &jobs, timeout_s, waiter, loan)?;
        all_ended(py, states)
    }

    /// End a job that is not running, or ask a running one to stop; return the state in which the job was
    /// found.
    fn cancel(
        &self,
        py: Python<'_>,
        job_id: &[u8],
        reason: String,
        running: &str,
        timeout_s: f64,
    ) -> PyResult<Option<&'static str>> {
        let deadline = deadline(Some(timeout_s))?;
        let tx = cancellation(job(job_id)?, reason, running)?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.settle(vec![tx], deadline, done);
        })?;
        Ok(found(outcome)?)
    }

    fn peek<'py>(
        &self,
        py: Python<'py>,
        job_id: &[u8],
        timeout_s: f64,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let slot = ValueSlot::new();
        let filled = Arc::clone(&slot);
        let gather = Gather::state_of(job(job_id)?, Box::new(move |states| filled.fill(states)));
        let states = self.gather(py, gather, &slot, Some(timeout_s), None)?;
        state_now(py, only(states))
    }

    fn message_info<'py>(
        &self,
        py: Python<'py>,
        job_id: &[u8],
        timeout_s: f64,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let answer = self.ask(py, Query::Message(job(job_id)?), timeout_s)?;
        info_dict(py, message_info(answer)?)
    }

    /// Return the number of consumers of a queue.
    fn consumers(&self, py: Python<'_>, queue: String, timeout_s: f64) -> PyResult<u32> {
        let deadline = query_deadline(timeout_s)?;
        let query = Query::Status(StatusQuery::of_queues(vec![queue]));
        match self.ask_by(py, query, deadline)? {
            Answer::Status(page) => {
                let queue = page.status.queues.first();
                Ok(queue.map_or(0, |queue| queue.consumers))
            }
            other => Err(odd_answer(&other).into()),
        }
    }

    fn broker(&self) -> String {
        let known = self.state.lock().unwrap().broker.clone();
        known.unwrap_or_else(|| penstock_local::full_url(&self.url))
    }

    fn status<'py>(&self, py: Python<'py>, timeout_s: f64) -> PyResult<Bound<'py, PyDict>> {
        let deadline = query_deadline(timeout_s)?;
        let status =
            Status::collect(
                |page| match self.ask_by(py, Query::Status(page), deadline)? {
                    Answer::Status(page) => PyResult::Ok(page),
                    other => Err(odd_answer(&other).into()),
                },
            )?;
        status_dict(py, &status)
    }

    fn purge(&self, py: Python<'_>, queue: String, timeout_s: f64) -> PyResult<()> {
        let tx = Tx::from(vec![Op::Purge { queue }]);
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.settle(vec![tx], deadline, done);
        })?;
        Ok(confirmed(outcome)?)
    }

    /// Return matching failed jobs, oldest or newest first, after the last one of the previous page.
    fn failed<'py>(
        &self,
        py: Python<'py>,
        filter: failed::FilterTuple,
        newest_first: bool,
        after: u64,
        timeout_s: f64,
    ) -> PyResult<(Bound<'py, PyList>, Option<u64>)> {
        let query = FailedQuery {
            filter: failed::filter_of(filter),
            after,
            limit: 0,
            newest_first,
        };
        match self.ask(py, Query::Failed(query), timeout_s)? {
            Answer::Failed(page) => failed::page(py, page),
            other => Err(odd_answer(&other).into()),
        }
    }

    /// Return matching workflows, newest first, after the last one of the previous page.
    fn workflows(
        &self,
        py: Python<'_>,
        state: Option<&str>,
        name: Option<String>,
        after: Option<&[u8]>,
        timeout_s: f64,
    ) -> PyResult<(Vec<String>, Option<[u8; 16]>)> {
        let query = workflows::query(state, name, after.map(job).transpose()?)?;
        let page = self.workflows_page(py, query, query_deadline(timeout_s)?)?;
        Ok(workflows::page(&page))
    }

    /// Return a workflow with the states of its steps, and the first of its failed jobs.
    fn workflow_status<'py>(
        &self,
        py: Python<'py>,
        workflow: &[u8],
        timeout_s: f64,
    ) -> PyResult<Option<(String, Bound<'py, PyList>)>> {
        let deadline = query_deadline(timeout_s)?;
        let mut query = WorkflowsQuery {
            workflow: Some(job(workflow)?),
            ..WorkflowsQuery::default()
        };
        // The first answer has the steps; the second has all their states from one moment.
        let page = self.workflows_page(py, query.clone(), deadline)?;
        query.nodes = workflows::nodes(&page);
        let workflow = query.workflow;
        let page = self.workflows_page(py, query, deadline)?;
        let Some(status) = workflows::status(&page) else {
            return Ok(None);
        };
        let counts = page.workflows.first().map(|workflow| workflow.jobs);
        let most = counts.map_or(0, |jobs| jobs.failed).min(FAILURES_SHOWN) as usize;
        let mut failed = FailedQuery::default();
        failed.filter.workflow = workflow;
        let mut ids = Vec::new();
        while ids.len() < most {
            let page = match self.ask_by(py, Query::Failed(failed.clone()), deadline)? {
                Answer::Failed(page) => page,
                other => return Err(odd_answer(&other).into()),
            };
            ids.extend(page.jobs.iter().map(|job| job.id));
            match page.next {
                Some(next) => failed.after = next,
                None => break,
            }
        }
        ids.truncate(most);
        Ok(Some((status, id_list(py, &ids)?)))
    }

    /// Retry or remove one failed job, or all that match; for the latter, return the id of the operation.
    fn order_failed(
        &self,
        py: Python<'_>,
        order: &str,
        job_id: Option<&[u8]>,
        filter: failed::FilterTuple,
        queue: Option<String>,
        timeout_s: f64,
    ) -> PyResult<Option<u64>> {
        let op = failed::order(order, job_id.map(job).transpose()?, filter, queue)?;
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.settle(vec![Tx::from(vec![op])], deadline, done);
        })?;
        Ok(failed::applied(outcome)?.operation)
    }

    /// Change a schedule; return the id of the job that this created, if any.
    #[pyo3(signature = (app, name, order, call, timeout_s))]
    fn order_schedule<'py>(
        &self,
        py: Python<'py>,
        app: String,
        name: String,
        order: &str,
        call: Option<ScheduledCall<'py>>,
        timeout_s: f64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let set = call.as_ref().map(|(timing, options, body)| {
            let body = Bytes::copy_from_slice(body.as_bytes());
            (timing.get(), options.get(), body)
        });
        let op = schedules::order(ScheduleName { app, name }, order, set)?;
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.commit(vec![Tx::from(vec![op])], Durability::Disk, deadline, done);
        })?;
        let applied = failed::applied(outcome)?;
        let job = applied.owners.first();
        Ok(job.map(|(_, job)| PyBytes::new(py, &job.0)))
    }

    /// Return a page of an app's schedules as JSON, each with this many of its next times.
    fn schedules(
        &self,
        py: Python<'_>,
        app: String,
        name: Option<String>,
        after: Option<String>,
        times: u32,
        timeout_s: f64,
    ) -> PyResult<(Vec<String>, Option<String>)> {
        let after = after.map(|name| ScheduleName {
            app: app.clone(),
            name,
        });
        let query = SchedulesQuery {
            app: Some(app),
            name,
            after,
            times,
        };
        match self.ask(py, Query::Schedules(query), timeout_s)? {
            Answer::Schedules(page) => Ok(schedules::page(&page)),
            other => Err(odd_answer(&other).into()),
        }
    }

    /// Return the progress of an operation on many jobs, as (done, spared, is_over).
    fn operation(
        &self,
        py: Python<'_>,
        operation: u64,
        timeout_s: f64,
    ) -> PyResult<Option<(u64, u64, bool)>> {
        match self.ask(py, Query::Operation(operation), timeout_s)? {
            Answer::Operation(status) => {
                Ok(status.map(|status| (status.done, status.spared, status.is_over)))
            }
            other => Err(odd_answer(&other).into()),
        }
    }

    /// Return the latest progress of a job: JSON, [done, total or null, message].
    fn progress<'py>(
        &self,
        py: Python<'py>,
        job_id: &[u8],
        timeout_s: f64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        match self.ask(py, Query::Progress(job(job_id)?), timeout_s)? {
            Answer::Progress(body) => Ok(body.map(|body| PyBytes::new(py, &body))),
            other => Err(odd_answer(&other).into()),
        }
    }

    /// Send a worker's declaration of a schedule at its start, as `declare_schedule` returned it.
    fn declare_schedule(&self, py: Python<'_>, declaration: &str, timeout_s: f64) -> PyResult<()> {
        let op = penstock_wire::op_of_hex(declaration)
            .ok_or_else(|| ClientError::invalid("this is not the declaration of a schedule"))?;
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let outcome = wait_for_end(py, &*driver, |done| {
            driver.settle(vec![Tx::from(vec![op])], deadline, done);
        })?;
        failed::applied(outcome)?;
        Ok(())
    }

    #[pyo3(signature = (forward_ms, timeout_s, *, by_schedules=false))]
    fn move_clock(
        &self,
        py: Python<'_>,
        forward_ms: u64,
        timeout_s: f64,
        by_schedules: bool,
    ) -> PyResult<u64> {
        let query = Query::SetClock {
            forward_ms,
            by_schedules,
        };
        match self.ask(py, query, timeout_s)? {
            Answer::Clock(now_ms) => Ok(now_ms),
            other => Err(odd_answer(&other).into()),
        }
    }

    fn take_notices(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        match &state.driver {
            Some(driver) if state.pid == std::process::id() => driver
                .take_notices()
                .iter()
                .map(ToString::to_string)
                .collect(),
            _ => Vec::new(),
        }
    }

    fn close(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let deadline = query_deadline(timeout_s)?;
        let driver = {
            let mut state = self.state.lock().unwrap();
            state.closed = true;
            match state.pid == std::process::id() {
                true => state.driver.take(),
                false => None,
            }
        };
        if let Some(driver) = driver {
            py.detach(move || driver.close(deadline));
        }
        Ok(())
    }

    fn rest(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let deadline = query_deadline(timeout_s)?;
        let until = deadline.min(Instant::now() + OTHERS_PATIENCE);
        loop {
            let mut state = self.state.lock().unwrap();
            let unused = match &state.driver {
                Some(driver) if state.pid == std::process::id() => Arc::strong_count(driver) == 1,
                _ => return Ok(()),
            };
            let driver = state.driver.take_if(|_| unused);
            drop(state);
            if let Some(driver) = driver {
                py.detach(move || driver.close(deadline));
                return Ok(());
            }
            if Instant::now() >= until {
                return Ok(());
            }
            py.detach(|| std::thread::sleep(Duration::from_millis(1)));
        }
    }

    fn submit<'py>(
        &self,
        py: Python<'py>,
        jobs: Vec<(Bound<'py, Options>, Bound<'py, PyBytes>)>,
        timeout_s: f64,
        port: &Port,
        token: u64,
    ) -> PyResult<Bound<'py, PyList>> {
        let deadline = deadline(Some(timeout_s))?;
        let driver = self.driver()?;
        let (ids, tx, durability) = publish_all(&jobs)?;
        let inbox = Arc::clone(&port.inbox);
        inbox.expect(token);
        let done = Box::new(move |outcome| {
            inbox.end(token, owners(outcome).map(CallEnd::Enqueued));
        });
        py.detach(move || driver.commit(vec![tx], durability, deadline, done));
        id_list(py, &ids)
    }

    #[pyo3(signature = (job_id, timeout_s, port, token, *, waiter = None))]
    fn watch(
        &self,
        py: Python<'_>,
        job_id: &[u8],
        timeout_s: Option<f64>,
        port: &Port,
        token: u64,
        waiter: Option<&[u8]>,
    ) -> PyResult<()> {
        let inbox = Arc::clone(&port.inbox);
        let finish = Box::new(move |states: Result<Vec<KeyState>, ClientError>| {
            inbox.end(token, states.map(|states| CallEnd::JobEnded(only(states))));
        });
        let waiter = waiter.map(job).transpose()?;
        let gather = Gather::ends(&[job(job_id)?], waiter, finish);
        self.gather_at(py, gather, timeout_s, port, token)
    }

    #[pyo3(signature = (job_ids, timeout_s, port, token, *, waiter = None))]
    fn watch_all(
        &self,
        py: Python<'_>,
        job_ids: Vec<Bound<'_, PyBytes>>,
        timeout_s: Option<f64>,
        port: &Port,
        token: u64,
        waiter: Option<&[u8]>,
    ) -> PyResult<()> {
        let jobs = jobs(&job_ids)?;
        let inbox = Arc::clone(&port.inbox);
        let finish = Box::new(move |states: Result<Vec<KeyState>, ClientError>| {
            inbox.end(token, states.map(CallEnd::JobsEnded));
        });
        let waiter = waiter.map(job).transpose()?;
        let gather = Gather::ends(&jobs, waiter, finish);
        self.gather_at(py, gather, timeout_s, port, token)
    }

    #[pyo3(signature = (job_ids, timeout_s, only_ask, port, token, *, waiter = None))]
    #[expect(clippy::too_many_arguments, reason = "Python's call has as many")]
    fn watch_each(
        &self,
        py: Python<'_>,
        job_ids: Vec<Bound<'_, PyBytes>>,
        timeout_s: Option<f64>,
        only_ask: bool,
        port: &Port,
        token: u64,
        waiter: Option<&[u8]>,
    ) -> PyResult<()> {
        let deadline = deadline(timeout_s)?;
        let driver = self.driver()?;
        let each = Each::new(&jobs(&job_ids)?, only_ask, Arc::clone(&port.inbox), token);
        let keys = each.keys();
        port.inbox.expect(token);
        let waiter = waiter.map(job).transpose()?;
        let watch = py.detach(|| match waiter {
            _ if only_ask => driver.peek(keys, deadline, each),
            Some(waiter) => driver.wait_inside(waiter, keys, deadline, each),
            None => driver.watch(keys, deadline, each),
        });
        port.inbox.expect_watch(token, watch);
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "Python's call has as many")]
    fn cancel_async(
        &self,
        py: Python<'_>,
        job_id: &[u8],
        reason: String,
        running: &str,
        timeout_s: f64,
        port: &Port,
        token: u64,
    ) -> PyResult<()> {
        let deadline = deadline(Some(timeout_s))?;
        let tx = cancellation(job(job_id)?, reason, running)?;
        let driver = self.driver()?;
        let inbox = Arc::clone(&port.inbox);
        inbox.expect(token);
        let done = Box::new(move |outcome| inbox.end(token, found(outcome).map(CallEnd::Found)));
        py.detach(move || driver.settle(vec![tx], deadline, done));
        Ok(())
    }

    fn peek_async(
        &self,
        py: Python<'_>,
        job_id: &[u8],
        timeout_s: f64,
        port: &Port,
        token: u64,
    ) -> PyResult<()> {
        let inbox = Arc::clone(&port.inbox);
        let finish = Box::new(move |states: Result<Vec<KeyState>, ClientError>| {
            inbox.end(token, states.map(|states| CallEnd::JobState(only(states))));
        });
        let gather = Gather::state_of(job(job_id)?, finish);
        self.gather_at(py, gather, Some(timeout_s), port, token)
    }

    fn message_info_async(
        &self,
        py: Python<'_>,
        job_id: &[u8],
        timeout_s: f64,
        port: &Port,
        token: u64,
    ) -> PyResult<()> {
        let deadline = query_deadline(timeout_s)?;
        let query = Query::Message(job(job_id)?);
        let driver = self.driver()?;
        let inbox = Arc::clone(&port.inbox);
        inbox.expect(token);
        let done = Box::new(move |outcome: Result<Answer, DriverError>| {
            let info = outcome
                .map_err(ClientError::of_query)
                .and_then(message_info);
            inbox.end(token, info.map(CallEnd::Info));
        });
        py.detach(move || driver.query(query, deadline, done));
        Ok(())
    }

    fn forget(&self, py: Python<'_>, port: &Port, token: u64) {
        if let Some(watch) = port.inbox.forget(token)
            && let Ok(driver) = self.driver()
        {
            py.detach(move || driver.unwatch(watch));
        }
    }
}

impl Client {
    fn gather_at(
        &self,
        py: Python<'_>,
        gather: Arc<Gather>,
        timeout_s: Option<f64>,
        port: &Port,
        token: u64,
    ) -> PyResult<()> {
        let deadline = deadline(timeout_s)?;
        let driver = self.driver()?;
        let keys = gather.keys();
        port.inbox.expect(token);
        let watch = py.detach(|| gather.begin(&*driver, keys, deadline));
        port.inbox.expect_watch(token, watch);
        Ok(())
    }
}

/// Waits for an outcome that always arrives: a driver ends each call itself when its time is up.
pub(crate) fn wait_for_end<T: Send + 'static>(
    py: Python<'_>,
    driver: &dyn Driver,
    call: impl FnOnce(Done<T>) + Send,
) -> PyResult<Result<T, DriverError>> {
    let slot = ValueSlot::new();
    let filled = Arc::clone(&slot);
    let done = Box::new(move |outcome| filled.fill(outcome));
    let (_, ended) = slot.wait_for(py, driver, None, None, || call(done));
    // Without a deadline, only an outcome ends the wait.
    Ok(ended?.unwrap_or(Err(DriverError::closed())))
}
