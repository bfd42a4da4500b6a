use clap::{Args, Subcommand, ValueEnum};
use penstock_message::{Op, Overflow, QueueLimits};
use serde_json::{Value, json};

use crate::address::Address;
use crate::exit::{CommandError, WRONG_CALL};
use crate::remote::BrokerArguments;
use crate::text::{TextTable, byte_count, bytes, limits, show, show_json};

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the limits of all queues
    Ls(ListArguments),
    /// Set the limits of a queue, in place of its earlier ones
    Set(SetArguments),
    /// Remove the limits of a queue
    Rm(RemoveArguments),
}

#[derive(Args)]
struct ListArguments {
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON array, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct SetArguments {
    /// The queue, such as mail or queue:mail
    address: Address,
    /// Maximum number of waiting jobs, ready or delayed
    #[arg(long, value_name = "N")]
    max_length: Option<u64>,
    /// Maximum total size of their arguments, such as 64M or 1G
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    max_bytes: Option<u64>,
    /// When the queue is full, refuse new jobs or drop the oldest ones
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = OverflowChoice::Reject)]
    overflow: OverflowChoice,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct RemoveArguments {
    /// The queue, such as mail or queue:mail
    address: Address,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum OverflowChoice {
    Reject,
    DropOldest,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        Command::Ls(arguments) => list(arguments),
        Command::Set(arguments) => set(arguments),
        Command::Rm(arguments) => change(
            &arguments.broker,
            &arguments.address,
            QueueLimits::NONE,
            arguments.json,
        ),
    }
}

fn list(arguments: &ListArguments) -> Result<(), CommandError> {
    let mut queues = arguments.broker.find()?.status()?.queues;
    queues.retain(|queue| !queue.limits.is_none());
    if arguments.json {
        let limits = queues
            .iter()
            .map(|queue| limits_json(&Address::of_queue(&queue.name), &queue.limits));
        return show_json(&Value::Array(limits.collect()));
    }
    if queues.is_empty() {
        return show("no queue has a limit\n");
    }
    let mut table = TextTable::new(&["QUEUE", ">JOBS", ">BYTES", "OVERFLOW"]);
    for queue in &queues {
        let limits = &queue.limits;
        table.row(vec![
            Address::of_queue(&queue.name).to_string(),
            limits
                .max_length
                .map_or("-".to_owned(), |most| most.to_string()),
            limits.max_bytes.map_or("-".to_owned(), bytes),
            overflow_name(limits.overflow).to_owned(),
        ]);
    }
    show(&table.to_string())
}

fn set(arguments: &SetArguments) -> Result<(), CommandError> {
    let wanted = QueueLimits {
        max_length: arguments.max_length,
        max_bytes: arguments.max_bytes,
        overflow: match arguments.overflow {
            OverflowChoice::Reject => Overflow::Reject,
            OverflowChoice::DropOldest => Overflow::DropOldest,
        },
    };
    if wanted.is_none() {
        let text = "give --max-length, --max-bytes or both; `penstock limit rm` removes limits";
        return Err(CommandError::new(WRONG_CALL, text));
    }
    change(
        &arguments.broker,
        &arguments.address,
        wanted,
        arguments.json,
    )
}

fn change(
    broker: &BrokerArguments,
    address: &Address,
    wanted: QueueLimits,
    as_json: bool,
) -> Result<(), CommandError> {
    let queue = address.queue("a limit")?;
    broker.find()?.commit(Op::Limit {
        queue: queue.to_owned(),
        limits: wanted,
    })?;
    match as_json {
        true => show_json(&limits_json(address, &wanted)),
        false => show(&format!("{address}: {} from now on\n", limits(&wanted))),
    }
}

fn limits_json(address: &Address, limits: &QueueLimits) -> Value {
    json!({
        "address": address.typed(),
        "max_length": limits.max_length,
        "max_bytes": limits.max_bytes,
        "overflow": overflow_name(limits.overflow),
    })
}

pub fn overflow_name(overflow: Overflow) -> &'static str {
    match overflow {
        Overflow::Reject => "reject",
        Overflow::DropOldest => "drop-oldest",
    }
}
