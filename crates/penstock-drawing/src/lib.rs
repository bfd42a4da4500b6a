//! Drawings of workflows: as a tree on a terminal, as DOT, as SVG, and as JSON for programs.
//!
//! A client describes the steps of a workflow when it sends it, and the broker stores that description unread. This
//! crate reads it again, and adds the state that the broker knows of each step:
//!
//! ```text
//!     {"job": "shop.fetch", "id": "..."}                       a call
//!     {"chain": [...], "more": 7}                              steps that run one after another; some are left out
//!     {"group": 1000, "of": "shop.fetch", "id": "..."}         a group of many
//!     {"group": 10000, "grows": true, "of": ..., "id": ...}    the first part of a group that was sent in several
//!     {"group": 2, "id": "...", "steps": [...]}                a group of few
//!     "links": [{"on": "failed", ...}]                         callbacks of any of these
//!     "name": "load", "needs": [[0, "succeeded"]]              a step of a graph, which is a group of few
//!     "state": "running", "replaced_by": "shop.load"           what the broker knows; the second of a call whose job was replaced
//! ```

mod graph;
mod picture;
mod schedule;
mod step;
mod text;

use penstock_message::{WorkflowInfo, WorkflowsPage};
use serde_json::{Map, Value, json};

pub use schedule::fields_of_schedule;
pub use step::DrawnStep;

/// Workflow, and its steps with their states.
#[derive(Clone, Debug, PartialEq)]
pub struct DrawnWorkflow {
    pub id: String,
    pub name: String,
    pub state: String,
    /// Jobs by state, in the order in which they are shown.
    pub jobs: Vec<(&'static str, u64)>,
    /// Steps; `None`: its client has described none, or this program can't read them.
    pub steps: Option<DrawnStep>,
    /// All other fields, for programs.
    more: Map<String, Value>,
}

const JOBS: [&str; 6] = [
    "waiting",
    "running",
    "succeeded",
    "failed",
    "cancelled",
    "blocked",
];

/// Returns the fields of a workflow without its steps, for programs.
pub fn fields(info: &WorkflowInfo) -> Value {
    let counts = &info.jobs;
    json!({
        "id": info.id.to_string(),
        "name": info.name,
        "state": info.state.name(),
        "waiting": counts.waiting,
        "running": counts.running,
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "cancelled": counts.cancelled,
        "blocked": counts.blocked,
        "opened_at_ms": info.opened_at,
        "ended_at_ms": info.ended_at,
        "deadline_ms": info.deadline,
        "parent": info.parent.map(|parent| parent.to_string()),
    })
}

impl DrawnWorkflow {
    /// Reads the one workflow of a page, with the requested states of [`DrawnStep::ids`].
    pub fn of_page(page: &WorkflowsPage) -> Option<Self> {
        let info = page.workflows.first()?;
        let mut steps = DrawnStep::read(&info.description);
        if let Some(steps) = &mut steps {
            steps.set_states(&page.nodes, &page.tasks, info.state);
        }
        match fields(info) {
            Value::Object(fields) => Some(Self::new(fields, steps)),
            _ => None,
        }
    }

    /// Reads the output of [`DrawnWorkflow::to_json`].
    pub fn from_json(text: &str) -> Option<Self> {
        let Value::Object(mut fields) = serde_json::from_str(text).ok()? else {
            return None;
        };
        let steps = fields
            .remove("steps")
            .and_then(|steps| DrawnStep::of_value(&steps));
        Some(Self::new(fields, steps))
    }

    fn new(fields: Map<String, Value>, steps: Option<DrawnStep>) -> Self {
        let text = |name| fields.get(name).and_then(Value::as_str).unwrap_or_default();
        let number = |name| fields.get(name).and_then(Value::as_u64).unwrap_or(0);
        Self {
            id: text("id").to_owned(),
            name: text("name").to_owned(),
            state: text("state").to_owned(),
            jobs: JOBS.map(|name| (name, number(name))).to_vec(),
            steps,
            more: fields,
        }
    }

    pub fn to_json(&self) -> Value {
        let mut fields = self.more.clone();
        let steps = self.steps.as_ref().map_or(Value::Null, DrawnStep::to_value);
        fields.insert("steps".to_owned(), steps);
        Value::Object(fields)
    }

    /// Draws the steps as a tree, one line each, below a line about the workflow.
    pub fn tree(&self) -> String {
        text::tree(self)
    }

    /// Writes the steps as a graph in the language of Graphviz.
    pub fn dot(&self) -> String {
        picture::dot(self)
    }

    /// Draws the steps as a picture, from left to right.
    pub fn svg(&self) -> String {
        picture::svg(self)
    }
}

#[cfg(test)]
mod tests;
