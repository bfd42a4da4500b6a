use clap::Args;
use penstock_message::{Op, StatusQuery};
use serde_json::json;

use crate::address::Address;
use crate::confirm::ConfirmArguments;
use crate::exit::{CommandError, FAILED};
use crate::remote::{BrokerArguments, RemoteBroker};
use crate::text::{count, printable, show, show_json};

/// Number of queues to name when the given one does not exist.
const KNOWN: u32 = 20;

#[derive(Args)]
pub struct Arguments {
    /// Queue to empty, such as mail or queue:mail. Running and failed jobs are left alone; the results of the
    /// others become `cancelled`
    address: Address,
    #[command(flatten)]
    broker: BrokerArguments,
    #[command(flatten)]
    confirm: ConfirmArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let address = &arguments.address;
    let queue = address.queue("a purge")?;
    let broker = arguments.broker.find()?;
    let waiting = waiting_jobs(&broker, queue)?;
    if waiting > 0 {
        let jobs = count(waiting, "waiting job");
        arguments
            .confirm
            .ask(&format!("This drops {jobs} of {address}. Continue?"))?;
    }
    let dropped = broker.run_operation(Op::Purge {
        queue: queue.to_owned(),
    })?;
    match arguments.json {
        true => show_json(&json!({ "address": address.typed(), "dropped": dropped.done })),
        false => show(&format!(
            "dropped {} of {address}\n",
            count(dropped.done, "waiting job")
        )),
    }
}

/// Returns the number of waiting jobs in a queue, which must exist.
pub fn waiting_jobs(broker: &RemoteBroker, queue: &str) -> Result<u64, CommandError> {
    let page = broker.status_page(StatusQuery::of_queues(vec![queue.to_owned()]))?;
    if let Some(found) = page.status.queues.first() {
        return Ok(found.ready + found.delayed);
    }
    let mut queues = broker
        .status_page(StatusQuery::first(KNOWN + 1))?
        .status
        .queues;
    let more = match queues.len() > KNOWN as usize {
        true => " and more",
        false => "",
    };
    queues.truncate(KNOWN as usize);
    let names: Vec<String> = queues.iter().map(|queue| printable(&queue.name)).collect();
    let known = match names.is_empty() {
        true => "it has no queues yet".to_owned(),
        false => format!("its queues are {}{more}", names.join(", ")),
    };
    let queue = printable(queue);
    Err(CommandError::new(
        FAILED,
        format!("this broker has no queue \"{queue}\"; {known}"),
    ))
}
