use clap::{Args, Subcommand};
use serde_json::Value;

use crate::exit::Failure;
use crate::remote::BrokerArguments;
use crate::status::{queue_json, queue_table};
use crate::text::{show, show_json};

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the queues, with their jobs and who serves them
    Ls(ListArguments),
}

#[derive(Args)]
struct ListArguments {
    #[command(flatten)]
    broker: BrokerArguments,
    /// One JSON array, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let Command::Ls(arguments) = &arguments.command;
    let status = arguments.broker.find()?.status()?;
    match arguments.json {
        true => show_json(&Value::Array(
            status.queues.iter().map(queue_json).collect(),
        )),
        false => show(&queue_table(&status.queues, &status.others)),
    }
}
