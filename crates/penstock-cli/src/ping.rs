use std::time::Instant;

use clap::Args;
use penstock_message::StatusQuery;
use serde_json::json;

use crate::exit::CommandError;
use crate::remote::BrokerArguments;
use crate::text::{printable, show, show_json};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

/// Fails unless a broker is running, accepts this client and answers within 5 s.
pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let began = Instant::now();
    let broker = arguments.broker.find()?;
    let process = broker.status_page(StatusQuery::first(1))?.status.process;
    let took_ms = began.elapsed().as_secs_f64() * 1000.0;
    match arguments.json {
        true => show_json(&json!({
            "broker": broker.shown,
            "version": process.version,
            "pid": process.pid,
            "took_ms": took_ms,
        })),
        false => show(&format!(
            "{} answered in {took_ms:.1} ms (pid {}, penstock {})\n",
            printable(&broker.shown),
            process.pid,
            printable(&process.version),
        )),
    }
}
