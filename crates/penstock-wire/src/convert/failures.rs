//! Failed jobs: causes, filters, and the progress of an operation on them.

use bytes::Bytes;
use penstock_message::{FailedJob, FailedPage, FailedQuery, Failure, Filter, OperationStatus};

use super::{all, id_bytes, message_id, optional_id, small};
use crate::{WireError, proto};

impl From<Failure> for proto::Failure {
    fn from(failure: Failure) -> Self {
        Self {
            class: failure.class,
            message: failure.message,
            fingerprint: failure.fingerprint,
            preview: failure.preview,
        }
    }
}

impl From<proto::Failure> for Failure {
    fn from(wire: proto::Failure) -> Self {
        Self {
            class: wire.class,
            message: wire.message,
            fingerprint: wire.fingerprint,
            preview: wire.preview,
        }
    }
}

impl From<Filter> for proto::Filter {
    fn from(filter: Filter) -> Self {
        Self {
            queue: filter.queue,
            task: filter.task,
            class: filter.class,
            fingerprint: filter.fingerprint,
            failed_from_ms: filter.failed_from,
            failed_before_ms: filter.failed_before,
            workflow: filter.workflow.map_or(Bytes::new(), id_bytes),
        }
    }
}

impl TryFrom<proto::Filter> for Filter {
    type Error = WireError;

    fn try_from(wire: proto::Filter) -> Result<Self, WireError> {
        Ok(Self {
            queue: wire.queue,
            task: wire.task,
            workflow: optional_id(&wire.workflow)?,
            class: wire.class,
            fingerprint: wire.fingerprint,
            failed_from: wire.failed_from_ms,
            failed_before: wire.failed_before_ms,
        })
    }
}

impl From<FailedQuery> for proto::FailedQuery {
    fn from(query: FailedQuery) -> Self {
        Self {
            filter: Some(query.filter.into()),
            after: query.after,
            limit: query.limit,
            newest_first: query.newest_first,
        }
    }
}

impl TryFrom<proto::FailedQuery> for FailedQuery {
    type Error = WireError;

    fn try_from(wire: proto::FailedQuery) -> Result<Self, WireError> {
        Ok(Self {
            filter: wire.filter.unwrap_or_default().try_into()?,
            after: wire.after,
            limit: wire.limit,
            newest_first: wire.newest_first,
        })
    }
}

impl From<FailedPage> for proto::FailedPage {
    fn from(page: FailedPage) -> Self {
        Self {
            jobs: page.jobs.into_iter().map(Into::into).collect(),
            next: page.next,
        }
    }
}

impl TryFrom<proto::FailedPage> for FailedPage {
    type Error = WireError;

    fn try_from(wire: proto::FailedPage) -> Result<Self, WireError> {
        Ok(Self {
            jobs: all(wire.jobs)?,
            next: wire.next,
        })
    }
}

impl From<FailedJob> for proto::failed_page::Job {
    fn from(job: FailedJob) -> Self {
        Self {
            id: id_bytes(job.id),
            task: job.task,
            queue: job.queue,
            attempt: job.attempt,
            crashes: u32::from(job.crashes),
            generation: job.generation,
            enqueued_at_ms: job.enqueued_at,
            failed_at_ms: job.failed_at,
            failure: Some(job.failure.into()),
            body_bytes: job.body_bytes,
        }
    }
}

impl TryFrom<proto::failed_page::Job> for FailedJob {
    type Error = WireError;

    fn try_from(wire: proto::failed_page::Job) -> Result<Self, WireError> {
        Ok(Self {
            id: message_id(&wire.id)?,
            task: wire.task,
            queue: wire.queue,
            attempt: wire.attempt,
            crashes: small(wire.crashes)?,
            generation: wire.generation,
            enqueued_at: wire.enqueued_at_ms,
            failed_at: wire.failed_at_ms,
            failure: wire.failure.unwrap_or_default().into(),
            body_bytes: wire.body_bytes,
        })
    }
}

impl From<OperationStatus> for proto::OperationStatus {
    fn from(status: OperationStatus) -> Self {
        Self {
            matched: status.matched,
            done: status.done,
            asked: status.asked,
            spared: status.spared,
            is_over: status.is_over,
        }
    }
}

impl From<proto::OperationStatus> for OperationStatus {
    fn from(wire: proto::OperationStatus) -> Self {
        Self {
            matched: wire.matched,
            done: wire.done,
            asked: wire.asked,
            spared: wire.spared,
            is_over: wire.is_over,
        }
    }
}
