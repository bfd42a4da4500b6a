//! Lists the long parts of the status: `penstock queue ls` and `penstock workers ls`.

use clap::{Args, Subcommand};
use penstock_message::Status;
use serde_json::Value;

use crate::exit::CommandError;
use crate::remote::BrokerArguments;
use crate::status::{queue_json, queue_table, running_table, worker_json, worker_table};
use crate::text::{show, show_json};
use crate::times::now_ms;

#[derive(Subcommand)]
pub enum QueueCommand {
    /// List the queues, with their jobs and consumers
    Ls(Arguments),
}

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON array, for programs
    #[arg(long)]
    json: bool,
}

pub fn queues(QueueCommand::Ls(arguments): &QueueCommand) -> Result<(), CommandError> {
    arguments.list(
        |status| queue_table(&status.queues, &status.others),
        |status| status.queues.iter().map(queue_json).collect(),
    )
}

pub fn workers(arguments: &Arguments) -> Result<(), CommandError> {
    arguments.list(
        |status| {
            let running = running_table(&status.workers, usize::MAX, now_ms());
            worker_table(&status.workers) + &running
        },
        |status| status.workers.iter().map(worker_json).collect(),
    )
}

impl Arguments {
    fn list(
        &self,
        table: fn(&Status) -> String,
        items: fn(&Status) -> Vec<Value>,
    ) -> Result<(), CommandError> {
        let status = self.broker.find()?.status()?;
        match self.json {
            true => show_json(&Value::Array(items(&status))),
            false => show(&table(&status)),
        }
    }
}
