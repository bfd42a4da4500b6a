use std::io::{IsTerminal, stdin};

use clap::Args;
use penstock_message::{Op, Receipt, StatusQuery, Tx};

use crate::exit::{FAILED, Failure};
use crate::remote::{Broker, BrokerArguments};
use crate::text::{printable, show};

/// Queues that are named when the one asked for is not there.
const KNOWN: u32 = 20;

#[derive(Args)]
pub struct Arguments {
    /// The queue to empty. Jobs that run are left alone; the results of the others become `cancelled`
    queue: String,
    #[command(flatten)]
    broker: BrokerArguments,
    /// Don't ask
    #[arg(short, long)]
    yes: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let broker = arguments.broker.find()?;
    let queue = &arguments.queue;
    let waiting = waiting_in(&broker, queue)?;
    if !arguments.yes && stdin().is_terminal() && !agreed(waiting, queue)? {
        return Err(Failure::new(FAILED, "nothing was dropped"));
    }
    let purge = Op::Purge {
        queue: queue.clone(),
    };
    match broker.commit(Tx::from(vec![purge]))? {
        Receipt::Applied { .. } => show(&format!(
            "dropped what waited in {} ({waiting} jobs when asked)\n",
            printable(queue)
        )),
        other => Err(Failure::new(
            FAILED,
            format!("the broker refused: {other:?}"),
        )),
    }
}

fn waiting_in(broker: &Broker, queue: &str) -> Result<u64, Failure> {
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
        true => "it has none yet".to_owned(),
        false => format!("there are {}{more}", names.join(", ")),
    };
    let queue = printable(queue);
    Err(Failure::new(
        FAILED,
        format!("this broker has no queue \"{queue}\"; {known}"),
    ))
}

fn agreed(waiting: u64, queue: &str) -> Result<bool, Failure> {
    show(&format!(
        "Drop the {waiting} jobs that wait in {}? [y/N] ",
        printable(queue)
    ))?;
    let mut answer = String::new();
    stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
