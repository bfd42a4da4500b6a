//! Steps of a workflow, read from its description.

use penstock_message::{MessageId, MessageState, NodeState, ValueStatus, WorkflowState};
use serde_json::{Map, Value, json};

use crate::text::number;

/// Maximum nesting of steps; a description may come from any client.
const DEEPEST: usize = 128;

/// Step of a workflow, and its state.
#[derive(Clone, Debug, PartialEq)]
pub struct DrawnStep {
    pub what: What,
    /// Job or join whose outcome is the step's; chains have none.
    pub id: Option<MessageId>,
    /// State by name; empty: unknown.
    pub state: &'static str,
    /// Task or group that has replaced a call; empty: none.
    pub replaced_by: String,
    /// Callbacks, each with the outcome on which it runs.
    pub links: Vec<(String, DrawnStep)>,
    /// Name of the step in its graph; empty for others.
    pub name: String,
    /// Steps of its graph that it waits for, by index, each with the required outcome.
    pub needs: Vec<(usize, String)>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// Call of this task.
    Job(String),
    /// Steps that run one after another, and the number of omitted steps.
    Chain(Vec<DrawnStep>, u64),
    Group {
        members: u64,
        /// Whether there may be further members, which were sent later.
        grows: bool,
        /// Task that each member runs, if the members are not listed.
        of: String,
        steps: Vec<DrawnStep>,
        /// Number of ended members, and of failed members; `None`: unknown.
        ended: Option<(u64, u64)>,
    },
}

/// States of a step, as in [`DrawnStep::state`].
const STATES: [&str; 13] = [
    "waiting",
    "delayed",
    "held",
    "running",
    "cancelling",
    "succeeded",
    "failed",
    "blocked",
    "expired",
    "crashed",
    "cancelled",
    "ended",
    "",
];

fn known(state: &str) -> &'static str {
    let mut all = STATES.into_iter();
    all.find(|known| *known == state).unwrap_or_default()
}

impl DrawnStep {
    /// Reads a description; `None`: there is none, or a newer client wrote it.
    pub fn read(description: &[u8]) -> Option<Self> {
        Self::of_value(&serde_json::from_slice(description).ok()?)
    }

    pub(crate) fn of_value(value: &Value) -> Option<Self> {
        Self::of_value_at(value, 0)
    }

    fn of_value_at(value: &Value, depth: usize) -> Option<Self> {
        if depth > DEEPEST {
            return None;
        }
        let all = |value: Option<&Value>| -> Option<Vec<Self>> {
            let steps = value.and_then(Value::as_array).into_iter().flatten();
            steps
                .map(|step| Self::of_value_at(step, depth + 1))
                .collect()
        };
        let count = |name| value.get(name).and_then(Value::as_u64);
        let text = |name| value.get(name).and_then(Value::as_str);
        let what = if let Some(task) = text("job") {
            What::Job(task.to_owned())
        } else if let Some(members) = count("group") {
            What::Group {
                members,
                grows: value.get("grows") == Some(&Value::Bool(true)),
                of: text("of").unwrap_or_default().to_owned(),
                steps: all(value.get("steps"))?,
                ended: count("ended").map(|ended| (ended, count("failed").unwrap_or(0))),
            }
        } else {
            let steps = value.get("chain").filter(|steps| steps.is_array())?;
            What::Chain(all(Some(steps))?, count("more").unwrap_or(0))
        };
        let links = value.get("links").and_then(Value::as_array);
        let link = |link: &Value| {
            let on = link.get("on")?.as_str()?.to_owned();
            Some((on, Self::of_value_at(link, depth + 1)?))
        };
        let needs = value.get("needs").and_then(Value::as_array);
        let need = |need: &Value| {
            let place = need.get(0)?.as_u64()?.try_into().ok()?;
            Some((place, need.get(1)?.as_str()?.to_owned()))
        };
        Some(Self {
            what,
            id: text("id").and_then(|id| id.parse().ok()),
            state: known(text("state").unwrap_or_default()),
            replaced_by: text("replaced_by").unwrap_or_default().to_owned(),
            links: links
                .into_iter()
                .flatten()
                .map(link)
                .collect::<Option<_>>()?,
            name: text("name").unwrap_or_default().to_owned(),
            needs: needs
                .into_iter()
                .flatten()
                .map(need)
                .collect::<Option<_>>()?,
        })
    }

    pub(crate) fn to_value(&self) -> Value {
        let mut fields = Map::new();
        let mut set = |name: &str, value: Value| {
            fields.insert(name.to_owned(), value);
        };
        let all = |steps: &[Self]| Value::Array(steps.iter().map(Self::to_value).collect());
        match &self.what {
            What::Job(task) => set("job", json!(task)),
            What::Chain(steps, more) => {
                set("chain", all(steps));
                if *more > 0 {
                    set("more", json!(more));
                }
            }
            What::Group {
                members,
                grows,
                of,
                steps,
                ended,
            } => {
                set("group", json!(members));
                if *grows {
                    set("grows", json!(true));
                }
                match steps.is_empty() {
                    true => set("of", json!(of)),
                    false => set("steps", all(steps)),
                }
                if let Some((ended, failed)) = ended {
                    set("ended", json!(ended));
                    set("failed", json!(failed));
                }
            }
        }
        if let Some(id) = self.id {
            set("id", json!(id.to_string()));
        }
        if !self.state.is_empty() {
            set("state", json!(self.state));
        }
        if !self.replaced_by.is_empty() {
            set("replaced_by", json!(self.replaced_by));
        }
        if !self.links.is_empty() {
            let links = self.links.iter().map(|(on, step)| {
                let mut link = step.to_value();
                if let Value::Object(fields) = &mut link {
                    fields.insert("on".to_owned(), json!(on));
                }
                link
            });
            set("links", Value::Array(links.collect()));
        }
        if !self.name.is_empty() {
            set("name", json!(self.name));
        }
        if !self.needs.is_empty() {
            set("needs", json!(self.needs));
        }
        Value::Object(fields)
    }

    /// Returns the jobs and joins whose states are needed, in the order that [`DrawnStep::set_states`] expects.
    pub fn ids(&self) -> Vec<MessageId> {
        let mut ids = Vec::new();
        self.walk(&mut |step| ids.extend(step.id));
        ids
    }

    fn walk(&self, look: &mut dyn FnMut(&Self)) {
        look(self);
        if let What::Chain(steps, _) | What::Group { steps, .. } = &self.what {
            steps.iter().for_each(|step| step.walk(look));
        }
        self.links.iter().for_each(|(_, step)| step.walk(look));
    }

    /// Sets the states of all steps. `tasks`: the tasks of the nodes; `workflow`: the outcome of the workflow.
    pub fn set_states(&mut self, nodes: &[NodeState], tasks: &[String], workflow: WorkflowState) {
        let tasks = tasks
            .iter()
            .map(String::as_str)
            .chain(std::iter::repeat(""));
        let mut nodes = nodes.iter().copied().zip(tasks);
        self.set_state(&mut nodes, workflow);
    }

    fn set_state(
        &mut self,
        nodes: &mut dyn Iterator<Item = (NodeState, &str)>,
        workflow: WorkflowState,
    ) {
        let (node, now) = match self.id {
            Some(_) => nodes.next().unwrap_or_default(),
            None => Default::default(),
        };
        match &mut self.what {
            What::Job(task) => {
                self.state = state_of_job(node);
                self.replaced_by = match node {
                    NodeState::Join { members, .. } => {
                        format!("group of {}", number(members.into()))
                    }
                    NodeState::Ended(ValueStatus::Gathered) => "group".to_owned(),
                    _ if now != task => now.to_owned(),
                    _ => String::new(),
                };
            }
            What::Chain(steps, _) => {
                let mut is_reached = true;
                for step in &mut *steps {
                    step.set_state(nodes, workflow);
                    if !is_reached && step.state == "running" {
                        // The members are held until the previous step has ended.
                        step.state = "held";
                    }
                    is_reached = matches!(step.state, "succeeded" | "ended");
                }
                self.state = state_of_chain(steps);
            }
            What::Group {
                members,
                grows,
                steps,
                ended,
                ..
            } => {
                steps
                    .iter_mut()
                    .for_each(|step| step.set_state(nodes, workflow));
                if let NodeState::Join {
                    members: seen,
                    state,
                    ..
                } = node
                    && *grows
                {
                    *members = u64::from(seen).max(*members);
                    *grows = state == WorkflowState::Running;
                }
                (self.state, *ended) = state_of_group(node, *members, workflow);
                if steps.iter().any(|step| !step.name.is_empty()) {
                    // A graph waits for the steps that no other step needs.
                    *ended = None;
                }
            }
        }
        for (_, step) in &mut self.links {
            step.set_state(nodes, workflow);
        }
    }
}

fn state_of_job(node: NodeState) -> &'static str {
    match node {
        NodeState::Job(state) => match state {
            MessageState::Ready => "waiting",
            MessageState::Delayed => "delayed",
            MessageState::Running | MessageState::Parked => "running",
            MessageState::Held => "held",
            MessageState::Failed => "failed",
            MessageState::Blocked => "blocked",
            MessageState::Cancelling => "cancelling",
        },
        NodeState::Ended(status) => state_of_value(status),
        NodeState::Join { state, .. } => state.name(),
        NodeState::Gone => "ended",
    }
}

fn state_of_value(status: ValueStatus) -> &'static str {
    match status {
        ValueStatus::Succeeded | ValueStatus::Gathered | ValueStatus::Replaced => "succeeded",
        ValueStatus::Failed | ValueStatus::TimedOut => "failed",
        ValueStatus::Expired => "expired",
        ValueStatus::Crashed => "crashed",
        ValueStatus::Cancelled => "cancelled",
        ValueStatus::Upstream => "blocked",
    }
}

fn state_of_chain(steps: &[DrawnStep]) -> &'static str {
    let has = |state| steps.iter().any(|step| step.state == state);
    let all = |states: &[&str]| steps.iter().all(|step| states.contains(&step.state));
    for worst in ["failed", "crashed", "expired", "cancelled", "blocked"] {
        if has(worst) {
            return worst;
        }
    }
    if all(&["succeeded", "ended"]) {
        return steps.last().map_or("", |step| step.state);
    }
    match steps.first().map_or("", |step| step.state) {
        first @ ("waiting" | "delayed" | "held") => first,
        _ => "running",
    }
}

fn state_of_group(
    node: NodeState,
    members: u64,
    workflow: WorkflowState,
) -> (&'static str, Option<(u64, u64)>) {
    match node {
        NodeState::Join {
            ended,
            failed,
            state,
            ..
        } => (state.name(), Some((u64::from(ended), u64::from(failed)))),
        NodeState::Ended(ValueStatus::Upstream) => ("failed", None),
        NodeState::Ended(status) => (
            state_of_value(status),
            Some((members, 0)).filter(|_| status == ValueStatus::Gathered),
        ),
        NodeState::Job(_) => (state_of_job(node), None),
        // A failed group is kept; a successful one is dropped once its results were read.
        NodeState::Gone => match workflow {
            WorkflowState::Failed | WorkflowState::Cancelled | WorkflowState::Expired => {
                ("ended", None)
            }
            WorkflowState::Running | WorkflowState::Succeeded => ("succeeded", None),
        },
    }
}
