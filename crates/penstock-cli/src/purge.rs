use std::io::{IsTerminal, stdin};

use clap::Args;
use penstock_message::{Answer, Op, Query, Receipt, Tx};

use crate::exit::{FAILED, Failure};
use crate::remote::{Broker, BrokerArguments};
use crate::text::show;

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
            "dropped what waited in {queue} ({waiting} jobs when asked)\n"
        )),
        other => Err(Failure::new(
            FAILED,
            format!("the broker refused: {other:?}"),
        )),
    }
}

fn waiting_in(broker: &Broker, queue: &str) -> Result<u64, Failure> {
    let Answer::Status(status) = broker.ask(Query::Status)? else {
        return Err(Failure::new(
            FAILED,
            "the broker gave another answer than its status",
        ));
    };
    let found = status.queues.iter().find(|found| found.name == queue);
    match found {
        Some(found) => Ok(found.ready + found.delayed),
        None => {
            let known: Vec<&str> = status
                .queues
                .iter()
                .map(|found| found.name.as_str())
                .collect();
            let known = match known.is_empty() {
                true => "it has none yet".to_owned(),
                false => format!("there are {}", known.join(", ")),
            };
            Err(Failure::new(
                FAILED,
                format!("this broker has no queue {queue:?}; {known}"),
            ))
        }
    }
}

fn agreed(waiting: u64, queue: &str) -> Result<bool, Failure> {
    show(&format!(
        "Drop the {waiting} jobs that wait in {queue}? [y/N] "
    ))?;
    let mut answer = String::new();
    stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
