//! Compares the counts of workflows with their jobs.

use std::collections::BTreeMap;

use penstock_message::{JoinOutcome as Outcome, MessageId, WorkflowInfo};

use super::item::{End, State};
use super::{Item, Model, Verdict};

impl Model {
    /// Compares, at a quiet moment, the counts of all workflows with their jobs.
    pub fn workflows_are_right(
        &self,
        seen: impl Fn(&MessageId) -> Option<WorkflowInfo>,
    ) -> Verdict {
        let mut jobs: BTreeMap<MessageId, Vec<&Item>> = BTreeMap::new();
        for item in &self.items {
            let extras = item.message.extras.as_ref();
            if let Some(workflow) = extras.and_then(|extras| extras.workflow)
                && item.state != State::Ended(End::Replaced)
            {
                jobs.entry(workflow).or_default().push(item);
            }
        }
        for workflow in &self.workflows {
            let jobs = jobs.get(workflow).map_or(&[][..], Vec::as_slice);
            Self::workflow_is_right(*workflow, jobs, seen(workflow).as_ref())?;
        }
        Ok(())
    }

    /// Compares the counts of a workflow with its jobs. The broker lists a workflow at least until its first end.
    fn workflow_is_right(id: MessageId, jobs: &[&Item], seen: Option<&WorkflowInfo>) -> Verdict {
        let Some(WorkflowInfo { jobs: counts, .. }) = seen else {
            let goes_on = |item: &&&Item| match item.state {
                State::Leased { .. } => true,
                State::Waiting => item.ending().is_none() && !item.may_be_dead(),
                _ => false,
            };
            // A workflow that has ended and was forgotten may have resumed because a person retried a job.
            let was_retried = jobs.iter().any(|item| item.generation > 0);
            return match jobs.iter().find(goes_on).filter(|_| !was_retried) {
                Some(item) => Err(format!(
                    "workflow {id} is not listed, and {} has not ended",
                    item.message.id
                )),
                None => Ok(()),
            };
        };
        let ended = counts.succeeded + counts.failed + counts.cancelled;
        let counted = counts.waiting + counts.running + counts.blocked + ended;
        // A job that was not needed is not counted, and it may have ended in another way before.
        let waits_for_failure = |item: &&&Item| item.when() == Outcome::Failed;
        let unsure = jobs.iter().filter(waits_for_failure).count() as u64;
        let all = jobs.len() as u64;
        if counted > all || counted + unsure < all {
            return Err(format!(
                "workflow {id} has {} jobs, and counts {counts:?}",
                jobs.len()
            ));
        }
        let succeeded = jobs
            .iter()
            .filter(|item| item.state == State::Ended(End::Acked));
        match succeeded.count() as u64 {
            succeeded if succeeded == counts.succeeded => Ok(()),
            succeeded => Err(format!(
                "{succeeded} jobs of workflow {id} have succeeded, and it counts {counts:?}"
            )),
        }
    }
}
