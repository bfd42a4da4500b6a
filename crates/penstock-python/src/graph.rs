//! Gathers the steps of a workflow for one transaction.

use std::collections::HashMap;
use std::sync::Mutex;

use bytes::Bytes;
use penstock_message::{
    Condition, Due, Durability, Extras, Hold, InputShape, Inputs, JOIN_CAP, JoinId, JoinOutcome,
    JoinPolicy, Key, Member, Message, MessageId, Op, Open, ReleaseTimes, Tx, Unsealed, Value,
    ValueStatus,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::ClientError;
use crate::ids;
use crate::options::Options;
use crate::requests::{copied, draw_ids, job};

/// Header of a job whose arguments are more than its body. It says how the process that runs the job builds them; users
/// can't set it.
const MARK: &str = "penstock.step";

/// Header of a job that replaced another one: how many replacements happened in a row.
const DEPTH: &str = "penstock.replaced";

/// Group of the values that hold the names of graphs' steps.
const VALUES: &str = "penstock.graphs";

/// Group of the values that record what running jobs have sent.
const SENT: &str = "penstock.sent";

/// Jobs and joins of one workflow. A join must be added before the jobs that it holds, and before its members.
#[pyclass(frozen, module = "penstock._core")]
#[derive(Default)]
pub(crate) struct Graph {
    parts: Mutex<Parts>,
}

#[derive(Default)]
struct Parts {
    holds: Vec<Hold>,
    /// Index of each join in `holds`.
    joins: HashMap<JoinId, usize>,
    publishes: Vec<Op>,
    values: Vec<Op>,
    seal: Option<Op>,
    grow: Option<Op>,
    durability: Option<Durability>,
    open: Option<Open>,
    /// Number of jobs, one after another, that these replace.
    depth: u32,
    /// Source of ids that are the same in each run.
    derived: Option<ids::Derived>,
    /// Note that the whole graph was sent, after the guard that it was not.
    sent: Vec<Op>,
}

impl Parts {
    fn hold(&mut self, join: JoinId) -> Result<&mut Hold, ClientError> {
        match self.joins.get(&join) {
            Some(place) => Ok(&mut self.holds[*place]),
            None => Err(ClientError::invalid("no such join in this workflow")),
        }
    }

    fn draw_id(&mut self) -> PyResult<MessageId> {
        match &mut self.derived {
            Some(derived) => Ok(derived.draw()),
            None => Ok(draw_ids(1)?[0]),
        }
    }
}

/// Member's place in a join, as (join, index).
type MemberPlace<'a> = (PyBackedId<'a>, u32);
type PyBackedId<'a> = Bound<'a, PyBytes>;

#[pymethods]
impl Graph {
    #[new]
    #[pyo3(signature = (depth = 0))]
    fn new(depth: u32) -> Self {
        let parts = Parts {
            depth,
            ..Parts::default()
        };
        Self {
            parts: Mutex::new(parts),
        }
    }

    /// Derive all ids from the id of the sending job and the seed, so that they are the same when that job runs
    /// again.
    fn derive_ids(&self, job_id: &[u8], seed: [u8; 32]) -> PyResult<()> {
        let derived = ids::Derived::new(job(job_id)?, &seed);
        self.parts.lock().unwrap().derived = Some(derived);
        Ok(())
    }

    /// Add a note under its own key, kept for this time. `once`: the graph is only sent if there is no such
    /// note yet.
    fn note(&self, key: &[u8], ttl_ms: u64, once: bool) {
        let key = Key::Named(Bytes::copy_from_slice(key));
        let guard = Op::Guard {
            key: key.clone(),
            condition: Condition::Absent,
        };
        let put = Op::Put {
            key,
            value: Value::new(ValueStatus::Succeeded, Bytes::new()),
            ttl_ms: Some(ttl_ms),
            group: SENT.to_owned(),
        };
        let ops = once.then_some(guard).into_iter().chain([put]);
        self.parts.lock().unwrap().sent.extend(ops);
    }

    /// Add a join of `count` members, which is itself a member of the places in `then`; return its id. `max_failures`:
    /// `None` for any number. `kind`: the form of its value, see `ids.rs`. `expects`: outcomes that some members must
    /// have, by ascending index. `grows`, with a `count` of 0: its members come in several transactions, the last of
    /// which seals it. `creator`: id of the job that sends them, if any.
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords in Python, each with its name"
    )]
    #[pyo3(signature = (count, max_failures, then, result_ttl_ms, *, kind = 0, expects = Vec::new(), grows = false, creator = None))]
    fn join<'py>(
        &self,
        py: Python<'py>,
        count: u32,
        max_failures: Option<u32>,
        then: Vec<MemberPlace<'py>>,
        result_ttl_ms: Option<u64>,
        kind: u8,
        expects: Vec<(u32, u8)>,
        grows: bool,
        creator: Option<&[u8]>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        if count > JOIN_CAP {
            let text = format!("a group has at most {JOIN_CAP} members, not {count}");
            return Err(ClientError::invalid(text).into());
        }
        let then = then.iter().map(member).collect::<PyResult<_>>()?;
        let expects = expects
            .iter()
            .map(|(index, when)| Ok((*index, one_of(&JoinOutcome::ALL, *when)?)))
            .collect::<PyResult<_>>()?;
        let creator = creator.map(job).transpose()?;
        let mut parts = self.parts.lock().unwrap();
        let id = ids::join(parts.draw_id()?, kind);
        let place = parts.holds.len();
        parts.joins.insert(id, place);
        parts.holds.push(Hold {
            join: id,
            count,
            messages: Vec::new(),
            policy: max_failures.map_or(JoinPolicy::AllEnded, JoinPolicy::of_max_failures),
            expects,
            then,
            result_ttl_ms,
            // Its workflow is known once the graph is complete.
            unsealed: grows.then_some(Unsealed {
                workflow: id,
                creator,
            }),
        });
        Ok(PyBytes::new(py, &id.0))
    }

    /// Make a join a member of one more. Its outcome must not be a value: a value is stored by place.
    fn also(&self, join: &[u8], place: MemberPlace<'_>) -> PyResult<()> {
        let place = member(&place)?;
        let mut parts = self.parts.lock().unwrap();
        parts.hold(job(join)?)?.then.push(place);
        Ok(())
    }

    /// Add a value that belongs to the workflow, under an id that no job has.
    fn value(&self, id: &[u8], body: &Bound<'_, PyBytes>, ttl_ms: u64) -> PyResult<()> {
        let put = Op::Put {
            key: Key::Result(job(id)?),
            value: Value::new(ValueStatus::Succeeded, copied(body)),
            ttl_ms: Some(ttl_ms),
            group: VALUES.to_owned(),
        };
        self.parts.lock().unwrap().values.push(put);
        Ok(())
    }

    /// Add a job, and return its id. `place`: its place in a join. `held_by`: the join that it waits for.
    /// `shape`: form of that join's values as its first argument, `None` for a job without them. `when`: the
    /// end of the join on which it runs. `mark`: how its worker builds its arguments.
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords in Python, each with its name"
    )]
    #[pyo3(signature = (options, body, *, place = None, held_by = None, shape = None, when = 0, mark = None))]
    fn job<'py>(
        &self,
        py: Python<'py>,
        options: &Options,
        body: &Bound<'py, PyBytes>,
        place: Option<MemberPlace<'py>>,
        held_by: Option<&[u8]>,
        shape: Option<u8>,
        when: u8,
        mark: Option<&str>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let place = place.as_ref().map(member).transpose()?;
        let mut parts = self.parts.lock().unwrap();
        let id = match place {
            Some(Member { join, index }) => MessageId::member(join, index),
            None => parts.draw_id()?,
        };
        let (queue, mut message, due) = options.message(id, copied(body));
        let mut extras = message
            .extras
            .take()
            .map_or_else(Extras::default, |extras| *extras);
        extras.member = place;
        if let Some(mark) = mark {
            let value = Bytes::copy_from_slice(mark.as_bytes());
            extras.headers.push((MARK.to_owned(), value));
        }
        if parts.depth > 0 {
            let value = parts.depth.to_string().into();
            extras.headers.push((DEPTH.to_owned(), value));
        }
        parts.durability = parts.durability.max(Some(options.durability));
        match held_by {
            None => {
                message.extras = extras.boxed();
                parts.publishes.push(Op::Publish {
                    queues: vec![queue],
                    message,
                    due,
                    unless_key: None,
                });
            }
            Some(join) => {
                let join = job(join)?;
                let mut later = ReleaseTimes {
                    due,
                    expires_after_ms: None,
                };
                // An absolute time was set by a person, so it stays.
                if let Some(Due::AfterMs(ms)) = message.expires_at {
                    message.expires_at = None;
                    later.expires_after_ms = Some(ms);
                }
                extras.later = (later != ReleaseTimes::default()).then(|| Box::new(later));
                extras.when = one_of(&JoinOutcome::ALL, when)?;
                if let Some(shape) = shape {
                    let shape = one_of(&InputShape::ALL, shape)?;
                    extras.inputs = Some(Inputs { join, shape });
                }
                message.extras = extras.boxed();
                parts.hold(join)?.messages.push((queue, message));
            }
        }
        Ok(PyBytes::new(py, &id.0))
    }

    /// List the workflow under this name. It is cancelled `deadline_after_ms` from now, or at `deadline_at_ms`.
    /// `parent`: the job that sends it.
    #[pyo3(signature = (name, description, *, deadline_after_ms = None, deadline_at_ms = None, kept_ms = None, parent = None))]
    fn open(
        &self,
        name: String,
        description: &[u8],
        deadline_after_ms: Option<u64>,
        deadline_at_ms: Option<u64>,
        kept_ms: Option<u64>,
        parent: Option<&[u8]>,
    ) -> PyResult<()> {
        self.parts.lock().unwrap().open = Some(Open {
            workflow: MessageId::default(),
            name,
            description: Bytes::copy_from_slice(description),
            deadline: deadline_after_ms
                .map(Due::AfterMs)
                .or(deadline_at_ms.map(Due::At)),
            kept_ms,
            parent: parent.map(job).transpose()?,
        });
        Ok(())
    }

    /// Make the graph a new member of a running job's group, and return the id that stands for it. `outer`: the job's join
    /// is a member of the group.
    fn grow<'py>(
        &self,
        py: Python<'py>,
        job_id: &[u8],
        outer: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let job = job(job_id)?;
        let mut parts = self.parts.lock().unwrap();
        let member = parts.draw_id()?;
        parts.grow = Some(Op::Grow { job, member, outer });
        Ok(PyBytes::new(py, &member.0))
    }

    /// Seal a join: it has `count` members, and no more follow.
    fn seal(&self, join: &[u8], count: u32) -> PyResult<()> {
        let join = job(join)?;
        self.parts.lock().unwrap().seal = Some(Op::Seal { join, count });
        Ok(())
    }

    /// Encode the graph for the end of the running job. `workflow`: the id that each job names as its
    /// workflow's; `None` for a job without a workflow.
    #[pyo3(signature = (workflow))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        workflow: Option<&[u8]>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (tx, _) = self.take(workflow.map(job).transpose()?);
        Ok(PyBytes::new(py, &penstock_worker::encode_steps(tx.ops)))
    }

    /// Number of jobs and joins.
    fn __len__(&self) -> usize {
        let parts = self.parts.lock().unwrap();
        let held = parts.holds.iter().map(|hold| 1 + hold.messages.len());
        held.sum::<usize>() + parts.publishes.len()
    }
}

impl Graph {
    /// Takes the graph as one transaction, with the highest durability of its jobs. `workflow`: the id that
    /// each job names as its workflow's; `None` for a job without a workflow.
    pub(crate) fn take(&self, workflow: Option<MessageId>) -> (Tx, Durability) {
        let Parts {
            holds,
            mut publishes,
            values,
            seal,
            grow,
            durability,
            open,
            sent,
            ..
        } = std::mem::take(&mut *self.parts.lock().unwrap());
        let mut holds = in_order(holds);
        let name = |message: &mut Message| {
            if workflow.is_some() {
                message.extras.get_or_insert_default().workflow = workflow;
            }
        };
        let id = workflow.unwrap_or_default();
        for unsealed in holds.iter_mut().filter_map(|hold| hold.unsealed.as_mut()) {
            unsealed.workflow = id;
        }
        let held = holds.iter_mut().flat_map(|hold| &mut hold.messages);
        held.for_each(|(_, message)| name(message));
        for op in &mut publishes {
            if let Op::Publish { message, .. } = op {
                name(message);
            }
        }
        let open = open.map(|open| {
            Op::Open(Open {
                workflow: id,
                ..open
            })
        });
        let holds = holds.into_iter().map(Op::Hold);
        let jobs = open.into_iter().chain(holds).chain(publishes);
        let jobs = grow.into_iter().chain(sent).chain(jobs);
        let ops = jobs.chain(values).chain(seal).collect();
        (Tx { ops }, durability.unwrap_or_default())
    }
}

/// Sorts joins into the order that a broker needs: each after the joins in which it, or a job that it holds, is
/// a member.
fn in_order(holds: Vec<Hold>) -> Vec<Hold> {
    let numbers: HashMap<JoinId, usize> =
        (0..).zip(&holds).map(|(n, hold)| (hold.join, n)).collect();
    let mut waiting: Vec<Option<Hold>> = holds.into_iter().map(Some).collect();
    let mut ordered = Vec::with_capacity(waiting.len());
    for start in 0..waiting.len() {
        // Joins that wait for the last one in the path, each with the number of its places already visited.
        let mut path = vec![(start, 0)];
        while let Some((number, looked_at)) = path.last_mut() {
            let Some(hold) = &waiting[*number] else {
                path.pop();
                continue;
            };
            match place_of(hold, *looked_at) {
                Some(place) => {
                    *looked_at += 1;
                    let outer = place.and_then(|place| numbers.get(&place.join).copied());
                    path.extend(outer.map(|outer| (outer, 0)));
                }
                None => {
                    ordered.extend(waiting[*number].take());
                    path.pop();
                }
            }
        }
    }
    ordered
}

/// Returns the place, if any, of a join itself or of a job that it holds; `None` beyond the last one.
fn place_of(hold: &Hold, number: usize) -> Option<Option<Member>> {
    match hold.then.get(number) {
        Some(place) => Some(Some(*place)),
        None => {
            let (_, message) = hold.messages.get(number - hold.then.len())?;
            Some(message.extras.as_ref().and_then(|extras| extras.member))
        }
    }
}

fn member(place: &MemberPlace<'_>) -> PyResult<Member> {
    let (join, index) = place;
    let join: JoinId = job(join.as_bytes())?;
    match join.is_join() && *index < JOIN_CAP {
        true => Ok(Member {
            join,
            index: *index,
        }),
        false => Err(ClientError::invalid("no place in a join").into()),
    }
}

fn one_of<T: Copy>(all: &[T], number: u8) -> Result<T, ClientError> {
    let found = all.get(usize::from(number)).copied();
    found.ok_or_else(|| ClientError::invalid(format!("there is no number {number} of these")))
}
