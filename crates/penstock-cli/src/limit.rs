use clap::{Args, ValueEnum};
use penstock_message::{Op, Overflow, QueueLimits, Receipt, StatusQuery, Tx};

use crate::exit::{FAILED, Failure, WRONG_CALL};
use crate::remote::{Broker, BrokerArguments};
use crate::text::{byte_count, limits, printable, show};

#[derive(Args)]
pub struct Arguments {
    /// The queue. Without an option its limits are shown
    queue: String,
    /// How many jobs may wait in it, ready or delayed
    #[arg(long, value_name = "N")]
    max_length: Option<u64>,
    /// How many bytes their arguments may have in all; 64M and the like are understood
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    max_bytes: Option<u64>,
    /// What happens when it is full: new jobs are refused (so unless told), or the oldest job makes room
    #[arg(long, value_name = "POLICY")]
    overflow: Option<Policy>,
    /// Take its limits away
    #[arg(long, conflicts_with_all = ["max_length", "max_bytes", "overflow"])]
    none: bool,
    #[command(flatten)]
    broker: BrokerArguments,
}

#[derive(Clone, Copy, ValueEnum)]
enum Policy {
    Reject,
    DropOldest,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let wanted = QueueLimits {
        max_length: arguments.max_length,
        max_bytes: arguments.max_bytes,
        overflow: match arguments.overflow {
            None | Some(Policy::Reject) => Overflow::Reject,
            Some(Policy::DropOldest) => Overflow::DropOldest,
        },
    };
    if wanted.is_none() && arguments.overflow.is_some() {
        let text = "--overflow needs a limit: --max-length, --max-bytes or both";
        return Err(Failure::new(WRONG_CALL, text));
    }
    let broker = arguments.broker.find()?;
    let queue = &arguments.queue;
    if wanted.is_none() && !arguments.none {
        let found = limits_of(&broker, queue)?;
        return show(&format!("{}: {}\n", printable(queue), limits(&found)));
    }
    let limit = Op::Limit {
        queue: queue.clone(),
        limits: wanted,
    };
    match broker.commit(Tx::from(vec![limit]))? {
        Receipt::Applied { .. } => show(&format!(
            "{}: {} from now on\n",
            printable(queue),
            limits(&wanted)
        )),
        other => Err(Failure::new(
            FAILED,
            format!("the broker refused: {other:?}"),
        )),
    }
}

fn limits_of(broker: &Broker, queue: &str) -> Result<QueueLimits, Failure> {
    let page = broker.status_page(StatusQuery::of_queues(vec![queue.to_owned()]))?;
    let found = page.status.queues.first();
    Ok(found.map_or(QueueLimits::NONE, |found| found.limits))
}
