//! Joins and workflows.

use penstock_message::{JoinOutcome as Outcome, JoinPolicy, Member, MessageId, WorkflowState};

use super::RecordReader;
use crate::records::{
    Growth, JoinProgress, RecordError, RecordEvent, WorkflowHead, WorkflowProgress, also_join,
    changed, join, opened,
};

impl<'a> RecordReader<'a> {
    pub(super) fn join_rarities(
        &mut self,
        progress: &mut JoinProgress<'a>,
    ) -> Result<(), RecordError> {
        let at = self.at;
        let flags = self.varint()?;
        if flags & !also_join::KNOWN != 0 {
            return Err(RecordError::UnknownField { what: "join", at });
        }
        progress.has_needless = flags & also_join::HAS_NEEDLESS != 0;
        progress.is_needless = flags & also_join::NEEDLESS != 0;
        if flags & also_join::EXPECTS != 0 {
            let mut expects: Vec<(u32, Outcome)> = Vec::new();
            for _ in 0..self.varint()? {
                let at = self.at;
                let index = self.small("index")?;
                if expects.last().is_some_and(|(before, _)| *before >= index) {
                    return Err(RecordError::Malformed { what: "index", at });
                }
                let when = Outcome::ALL.get(usize::from(self.byte()?)).copied();
                let unknown = RecordError::UnknownField {
                    what: "outcome",
                    at,
                };
                expects.push((index, when.ok_or(unknown)?));
            }
            progress.expects = expects.into();
        }
        if flags & also_join::UNSEALED != 0 {
            progress.unsealed = Some(Growth {
                workflow: MessageId(self.array()?),
                session: self.varint()?,
                grant: self.varint()?,
                members: self.small("count")?,
            });
        }
        Ok(())
    }

    pub(super) fn join_state(&mut self) -> Result<RecordEvent<'a>, RecordError> {
        let join = MessageId(self.array()?);
        let count = self.small("count")?;
        let at = self.at;
        let flags = self.byte()?;
        let has = |flag| flags & flag != 0;
        let over_at = match has(join::OVER) {
            false => None,
            true => Some(self.difference(self.time)?),
        };
        let policy = match (has(join::ALL_ENDED), has(join::MAX_FAILURES)) {
            (true, _) => JoinPolicy::AllEnded,
            (false, true) => JoinPolicy::of_max_failures(self.small("number of failures")?),
            (false, false) => JoinPolicy::AllSucceeded,
        };
        let mut progress = JoinProgress {
            is_released: has(join::RELEASED),
            ..JoinProgress::default()
        };
        if has(join::FAILURES) {
            progress.failures = self.small("number of failures")?;
            progress.causes = self.ids()?.into();
        }
        if has(join::THEN) {
            let mut then = Vec::new();
            for _ in 0..self.varint()? {
                then.push(Member {
                    join: MessageId(self.array()?),
                    index: self.small("index")?,
                });
            }
            progress.then = then.into();
        }
        if has(join::RESULT) {
            progress.result_ttl_ms = Some(self.varint()?);
        }
        if has(join::ALSO) {
            self.join_rarities(&mut progress)?;
        }
        let mut arrived = Vec::new();
        let mut before = 0;
        for _ in 0..self.varint()? {
            before = self.difference(before)?;
            let word = u32::try_from(before);
            let word = word.map_err(|_| RecordError::Malformed { what: "index", at })?;
            arrived.push((word, self.word()?));
        }
        Ok(RecordEvent::JoinState {
            join,
            count,
            policy,
            over_at,
            arrived: arrived.into(),
            progress,
        })
    }

    pub(super) fn workflow_head(&mut self) -> Result<WorkflowHead<'a>, RecordError> {
        let at = self.at;
        let flags = self.byte()?;
        let has = |flag| flags & flag != 0;
        if flags & !(opened::DEADLINE | opened::KEPT | opened::PARENT) != 0 {
            let what = "workflow";
            return Err(RecordError::UnknownField { what, at });
        }
        Ok(WorkflowHead {
            name: self.text()?,
            description: self.slice()?,
            opened_at: self.difference(self.time)?,
            deadline: match has(opened::DEADLINE) {
                true => Some(self.when()?),
                false => None,
            },
            kept_ms: match has(opened::KEPT) {
                true => Some(self.varint()?),
                false => None,
            },
            parent: match has(opened::PARENT) {
                true => Some(MessageId(self.array()?)),
                false => None,
            },
        })
    }

    pub(super) fn workflow_progress(&mut self) -> Result<Option<WorkflowProgress>, RecordError> {
        let at = self.at;
        let flags = self.byte()?;
        let has = |flag| flags & flag != 0;
        if flags == changed::FORGOTTEN {
            return Ok(None);
        }
        let known = changed::OUTCOME
            | changed::ENDED
            | changed::COUNTS
            | changed::CANCELLED
            | changed::OVERDUE;
        let outcome = WorkflowState::ALL.get(usize::from(flags & changed::OUTCOME));
        let Some(outcome) = outcome.filter(|_| flags & !known == 0) else {
            let what = "end of a workflow";
            return Err(RecordError::UnknownField { what, at });
        };
        let mut progress = WorkflowProgress {
            outcome: *outcome,
            is_cancelled: has(changed::CANCELLED),
            ..WorkflowProgress::default()
        };
        if has(changed::ENDED) {
            progress.ended_at = Some(self.difference(self.time)?);
        }
        if has(changed::COUNTS) {
            progress.succeeded = self.varint()?;
            progress.failed = self.varint()?;
            progress.cancelled = self.varint()?;
        }
        if has(changed::OVERDUE) {
            progress.overdue_before = Some(self.number()?);
        }
        Ok(Some(progress))
    }
}
