//! Converts workflows between Python values and the broker's types.

use penstock_drawing::{DrawnStep, DrawnWorkflow, fields};
use penstock_message::{MessageId, WorkflowState, WorkflowsPage, WorkflowsQuery};
use pyo3::prelude::*;

use crate::errors::ClientError;

pub(crate) fn query(
    state: Option<&str>,
    name: Option<String>,
    after: Option<MessageId>,
) -> PyResult<WorkflowsQuery> {
    let state = state.map(|wanted| {
        let mut all = WorkflowState::ALL.into_iter();
        let found = all.find(|state| state.name() == wanted);
        found.ok_or_else(|| ClientError::invalid(format!("a workflow has no state {wanted:?}")))
    });
    Ok(WorkflowsQuery {
        state: state.transpose()?,
        name,
        after,
        ..WorkflowsQuery::default()
    })
}

/// Returns a page as (workflows as JSON, cursor of the next page).
pub(crate) fn page(page: &WorkflowsPage) -> (Vec<String>, Option<[u8; 16]>) {
    let workflows = page.workflows.iter();
    let workflows = workflows.map(|workflow| fields(workflow).to_string());
    (workflows.collect(), page.next.map(|next| next.0))
}

/// Returns the jobs and joins of a workflow whose states are needed.
pub(crate) fn nodes(page: &WorkflowsPage) -> Vec<MessageId> {
    let workflow = page.workflows.first();
    let steps = workflow.and_then(|workflow| DrawnStep::read(&workflow.description));
    steps.map_or_else(Vec::new, |steps| {
        let mut ids = steps.ids();
        ids.truncate(WorkflowsQuery::NODES_CAP);
        ids
    })
}

/// Returns the workflow and its steps as JSON; `None` if it is not listed.
pub(crate) fn status(page: &WorkflowsPage) -> Option<String> {
    DrawnWorkflow::of_page(page).map(|workflow| workflow.to_json().to_string())
}

/// Draw a workflow that [`status`] returned, as a "tree", "dot" or "svg".
#[pyfunction]
pub(crate) fn draw_workflow(status: &str, how: &str) -> PyResult<String> {
    let workflow = DrawnWorkflow::from_json(status);
    let workflow =
        workflow.ok_or_else(|| ClientError::invalid("the status of the workflow is incomplete"))?;
    match how {
        "tree" => Ok(workflow.tree()),
        "dot" => Ok(workflow.dot()),
        "svg" => Ok(workflow.svg()),
        _ => Err(ClientError::invalid("draw a workflow as \"tree\", \"dot\" or \"svg\"").into()),
    }
}
