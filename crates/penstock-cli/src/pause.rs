//! Implements `pause` and `resume`: whether workers receive the jobs of a queue.

use clap::Args;
use penstock_message::{Op, StatusQuery};
use serde_json::json;

use crate::address::Address;
use crate::exit::CommandError;
use crate::remote::BrokerArguments;
use crate::text::{show, show_json};

#[derive(Args)]
pub struct Arguments {
    /// The queue, such as mail or queue:mail
    address: Address,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn pause(arguments: &Arguments) -> Result<(), CommandError> {
    let queue = arguments.address.queue("a pause")?.to_owned();
    let op = Op::Pause {
        queue: queue.clone(),
    };
    let unknown = run(arguments, queue, op)?;
    report(
        arguments,
        true,
        match unknown {
            true => "paused; this queue has never had a job",
            false => "paused: no new job starts, and running jobs continue",
        },
    )
}

pub fn resume(arguments: &Arguments) -> Result<(), CommandError> {
    let queue = arguments.address.queue("a pause")?.to_owned();
    let op = Op::Resume {
        queue: queue.clone(),
    };
    run(arguments, queue, op)?;
    report(arguments, false, "resumed")
}

/// Returns whether the broker had not seen the queue before.
fn run(arguments: &Arguments, queue: String, op: Op) -> Result<bool, CommandError> {
    let broker = arguments.broker.find()?;
    let page = broker.status_page(StatusQuery::of_queues(vec![queue]))?;
    broker.commit(op)?;
    Ok(page.status.queues.is_empty())
}

fn report(arguments: &Arguments, is_paused: bool, text: &str) -> Result<(), CommandError> {
    let address = &arguments.address;
    match arguments.json {
        true => show_json(&json!({ "address": address.typed(), "paused": is_paused })),
        false => show(&format!("{address}: {text}\n")),
    }
}
