//! Workflows: their names, their lists, and the states of their steps.

use bytes::Bytes;
use penstock_message::{
    MessageState, NodeState, Open, ValueStatus, WorkflowCounts, WorkflowInfo, WorkflowState,
    WorkflowsPage, WorkflowsQuery,
};

use super::messages::due;
use super::{FromNumber, all, id_bytes, message_id, optional_id};
use crate::{WireError, proto};

impl From<Open> for proto::Open {
    fn from(open: Open) -> Self {
        Self {
            workflow: id_bytes(open.workflow),
            name: open.name,
            description: open.description,
            deadline: open.deadline.map(Into::into),
            kept_ms: open.kept_ms,
            parent: open.parent.map_or(Bytes::new(), id_bytes),
        }
    }
}

impl TryFrom<proto::Open> for Open {
    type Error = WireError;

    fn try_from(wire: proto::Open) -> Result<Self, WireError> {
        Ok(Self {
            workflow: message_id(&wire.workflow)?,
            name: wire.name,
            description: wire.description,
            deadline: due(wire.deadline)?,
            kept_ms: wire.kept_ms,
            parent: optional_id(&wire.parent)?,
        })
    }
}

fn state_number(state: WorkflowState) -> i32 {
    proto::workflows_page::State::from(state).into()
}

impl From<WorkflowsQuery> for proto::WorkflowsQuery {
    fn from(query: WorkflowsQuery) -> Self {
        Self {
            workflow: query.workflow.map_or(Bytes::new(), id_bytes),
            state: query.state.map(state_number),
            name: query.name,
            after: query.after.map_or(Bytes::new(), id_bytes),
            limit: query.limit,
            nodes: query.nodes.into_iter().map(id_bytes).collect(),
        }
    }
}

impl TryFrom<proto::WorkflowsQuery> for WorkflowsQuery {
    type Error = WireError;

    fn try_from(wire: proto::WorkflowsQuery) -> Result<Self, WireError> {
        let nodes = wire.nodes.iter().map(|id| message_id(id));
        Ok(Self {
            workflow: optional_id(&wire.workflow)?,
            state: wire.state.map(WorkflowState::from_number).transpose()?,
            name: wire.name,
            after: optional_id(&wire.after)?,
            limit: wire.limit,
            nodes: nodes.collect::<Result<_, _>>()?,
        })
    }
}

impl From<WorkflowsPage> for proto::WorkflowsPage {
    fn from(page: WorkflowsPage) -> Self {
        Self {
            workflows: page.workflows.into_iter().map(Into::into).collect(),
            next: page.next.map_or(Bytes::new(), id_bytes),
            nodes: page.nodes.into_iter().map(Into::into).collect(),
            tasks: page.tasks,
        }
    }
}

impl TryFrom<proto::WorkflowsPage> for WorkflowsPage {
    type Error = WireError;

    fn try_from(wire: proto::WorkflowsPage) -> Result<Self, WireError> {
        Ok(Self {
            workflows: all(wire.workflows)?,
            next: optional_id(&wire.next)?,
            nodes: all(wire.nodes)?,
            tasks: wire.tasks,
        })
    }
}

impl From<WorkflowInfo> for proto::workflows_page::Workflow {
    fn from(workflow: WorkflowInfo) -> Self {
        let WorkflowCounts {
            waiting,
            running,
            succeeded,
            failed,
            cancelled,
            blocked,
        } = workflow.jobs;
        Self {
            id: id_bytes(workflow.id),
            name: workflow.name,
            description: workflow.description,
            state: state_number(workflow.state),
            waiting,
            running,
            succeeded,
            failed,
            cancelled,
            blocked,
            opened_at_ms: workflow.opened_at,
            ended_at_ms: workflow.ended_at,
            deadline_ms: workflow.deadline,
            parent: workflow.parent.map_or(Bytes::new(), id_bytes),
        }
    }
}

impl TryFrom<proto::workflows_page::Workflow> for WorkflowInfo {
    type Error = WireError;

    fn try_from(wire: proto::workflows_page::Workflow) -> Result<Self, WireError> {
        Ok(Self {
            id: message_id(&wire.id)?,
            name: wire.name,
            description: wire.description,
            state: WorkflowState::from_number(wire.state)?,
            jobs: WorkflowCounts {
                waiting: wire.waiting,
                running: wire.running,
                succeeded: wire.succeeded,
                failed: wire.failed,
                cancelled: wire.cancelled,
                blocked: wire.blocked,
            },
            opened_at: wire.opened_at_ms,
            ended_at: wire.ended_at_ms,
            deadline: wire.deadline_ms,
            parent: optional_id(&wire.parent)?,
        })
    }
}

impl From<NodeState> for proto::workflows_page::Node {
    fn from(node: NodeState) -> Self {
        use proto::workflows_page::node::Node as Wire;
        Self {
            node: match node {
                NodeState::Gone => None,
                NodeState::Job(state) => {
                    Some(Wire::Job(proto::message_info::State::from(state).into()))
                }
                NodeState::Ended(status) => {
                    Some(Wire::Ended(proto::value::Status::from(status).into()))
                }
                NodeState::Join {
                    members,
                    ended,
                    failed,
                    state,
                } => Some(Wire::Join(proto::workflows_page::Join {
                    members,
                    ended,
                    failed,
                    state: state_number(state),
                })),
            },
        }
    }
}

impl TryFrom<proto::workflows_page::Node> for NodeState {
    type Error = WireError;

    fn try_from(wire: proto::workflows_page::Node) -> Result<Self, WireError> {
        use proto::workflows_page::node::Node as Wire;
        Ok(match wire.node {
            None => Self::Gone,
            Some(Wire::Job(state)) => Self::Job(MessageState::from_number(state)?),
            Some(Wire::Ended(status)) => Self::Ended(ValueStatus::from_number(status)?),
            Some(Wire::Join(join)) => Self::Join {
                members: join.members,
                ended: join.ended,
                failed: join.failed,
                state: WorkflowState::from_number(join.state)?,
            },
        })
    }
}
