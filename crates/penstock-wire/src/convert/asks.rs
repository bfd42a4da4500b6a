//! Questions to workers, and the reports of workers.

use bytes::Bytes;
use penstock_message::{Ask, AskQuery, NoReply, WorkerReport, WorkerState};

use super::FromNumber;
use crate::proto::asked::Why;
use crate::{WireError, proto};

impl From<AskQuery> for proto::AskQuery {
    fn from(ask: AskQuery) -> Self {
        Self {
            worker: ask.worker,
            question: ask.question,
            patience_ms: ask.patience_ms,
        }
    }
}

impl From<proto::AskQuery> for AskQuery {
    fn from(wire: proto::AskQuery) -> Self {
        Self {
            worker: wire.worker,
            question: wire.question,
            patience_ms: wire.patience_ms,
        }
    }
}

impl From<Ask> for proto::Ask {
    fn from(Ask { id, question }: Ask) -> Self {
        Self { id, question }
    }
}

impl From<proto::Ask> for Ask {
    fn from(proto::Ask { id, question }: proto::Ask) -> Self {
        Self { id, question }
    }
}

impl From<Result<Bytes, NoReply>> for proto::Asked {
    fn from(outcome: Result<Bytes, NoReply>) -> Self {
        let (why, reply) = match outcome {
            Ok(reply) => (Why::Replied, reply),
            Err(why) => (why.into(), Bytes::new()),
        };
        Self {
            why: why.into(),
            reply,
        }
    }
}

impl TryFrom<proto::Asked> for Result<Bytes, NoReply> {
    type Error = WireError;

    fn try_from(wire: proto::Asked) -> Result<Self, WireError> {
        let why = Why::try_from(wire.why)
            .map_err(|_| WireError::Invalid("an unknown reason why a worker has not replied"))?;
        Ok(match why {
            Why::Replied => Ok(wire.reply),
            Why::UnknownWorker => Err(NoReply::UnknownWorker),
            Why::SeveralWorkers => Err(NoReply::SeveralWorkers),
            Why::TooOld => Err(NoReply::TooOld),
            Why::Busy => Err(NoReply::Busy),
            Why::Lost => Err(NoReply::Lost),
            Why::Silent => Err(NoReply::Silent),
            Why::TooLarge => Err(NoReply::TooLarge),
        })
    }
}

impl From<NoReply> for Why {
    fn from(why: NoReply) -> Self {
        match why {
            NoReply::UnknownWorker => Self::UnknownWorker,
            NoReply::SeveralWorkers => Self::SeveralWorkers,
            NoReply::TooOld => Self::TooOld,
            NoReply::Busy => Self::Busy,
            NoReply::Lost => Self::Lost,
            NoReply::Silent => Self::Silent,
            NoReply::TooLarge => Self::TooLarge,
        }
    }
}

impl From<WorkerReport> for proto::Report {
    fn from(report: WorkerReport) -> Self {
        Self {
            slots: report.slots,
            busy: report.busy,
            state: proto::WorkerState::from(report.state).into(),
            takes_asks: report.takes_asks,
            parked: report.parked,
        }
    }
}

impl From<proto::Report> for WorkerReport {
    fn from(wire: proto::Report) -> Self {
        Self {
            slots: wire.slots,
            busy: wire.busy,
            // A newer worker's state may have no name here.
            state: WorkerState::from_number(wire.state).unwrap_or_default(),
            takes_asks: wire.takes_asks,
            parked: wire.parked,
        }
    }
}
