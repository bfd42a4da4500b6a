//! The `penstock` command. Each command is a file; this one lists them.

mod address;
mod allocator;
mod attempts;
mod broker;
mod confirm;
mod demo;
mod exit;
mod failed;
mod hints;
mod job;
mod journal;
mod limit;
mod lists;
mod logging;
mod pause;
mod ping;
mod purge;
mod refused_orders;
mod remote;
mod schedule;
mod server;
mod status;
mod text;
mod times;
mod worker;
mod workers;
mod workflow;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   the command failed; the last line says why
  2   the command line is wrong
  3   worker: the app can't be loaded
  4   worker: a second signal came, and running jobs were handed back
  5   worker: the memory limit is below what the loaded app needs
  6   another broker is using the directory
  65  the journal is damaged
  69  no broker is running, or it can't be reached
  74  server: the disk failed; everything confirmed is kept
  75  this broker does not support that
  78  a path, permission, token, name or journal format is wrong
";

/// A task queue for Python: durable by default, and fast.
#[derive(Parser)]
#[command(name = "penstock", version, after_help = EXIT_CODES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the jobs of an app
    Worker(worker::Arguments),
    /// Show running workers; pause, resize, drain or stop them
    #[command(subcommand)]
    Workers(workers::WorkersCommand),
    /// Run a standalone broker for clients on this machine or others
    Server(server::Arguments),
    /// Show queues, workers and the broker's health
    Status(status::Arguments),
    /// Check that a broker answers
    Ping(ping::Arguments),
    /// Show the queues of a broker
    #[command(subcommand)]
    Queue(lists::QueueCommand),
    /// Drop all waiting jobs of a queue
    Purge(purge::Arguments),
    /// Limit the number and size of a queue's waiting jobs
    Limit(limit::Arguments),
    /// Stop starting jobs of a queue
    Pause(pause::Arguments),
    /// Start the jobs of a paused queue again
    Resume(pause::Arguments),
    /// Show, cancel or retry a job
    Job(job::Arguments),
    /// Show, retry or remove failed jobs
    Failed(failed::Arguments),
    /// Show, add or edit schedules; pause, resume, run, reset or remove them
    Schedule(schedule::Arguments),
    /// Show, draw, cancel or retry workflows
    Workflow(workflow::Arguments),
    /// Check, repair or upgrade a journal on disk
    Journal(journal::Arguments),
    /// Stop a local broker
    Broker(broker::Arguments),
    /// Run a map-reduce over the standard library's source
    Demo(demo::Arguments),
}

fn main() -> ExitCode {
    // Before the command line is parsed, which may allocate large blocks.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|command| command == "worker")
    {
        allocator::keep_little();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return hints::report(&error),
    };
    let outcome = match cli.command {
        Command::Worker(arguments) => return worker::run(arguments),
        Command::Workers(command) => workers::run(&command),
        Command::Server(arguments) => server::run(arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Ping(arguments) => ping::run(&arguments),
        Command::Queue(command) => lists::queues(&command),
        Command::Purge(arguments) => purge::run(&arguments),
        Command::Limit(arguments) => limit::run(&arguments),
        Command::Pause(arguments) => pause::pause(&arguments),
        Command::Resume(arguments) => pause::resume(&arguments),
        Command::Job(arguments) => job::run(&arguments),
        Command::Failed(arguments) => failed::run(&arguments),
        Command::Schedule(arguments) => schedule::run(&arguments),
        Command::Workflow(arguments) => workflow::run(&arguments),
        Command::Journal(arguments) => journal::run(&arguments),
        Command::Broker(arguments) => broker::run(&arguments),
        Command::Demo(arguments) => demo::run(arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_page_about_the_command_line_names_every_command_option_and_exit_code() {
        let page = include_str!("../../../docs/cli.md");
        let cli = Cli::command();
        for command in cli.get_subcommands() {
            let name = command.get_name();
            assert!(
                page.contains(&format!("## penstock {name}\n")),
                "no section on {name}"
            );
            for inner in command.get_subcommands() {
                let name = format!("penstock {name} {}", inner.get_name());
                assert!(page.contains(&name), "no word on {name}");
                options_are_on(page, &name, inner);
            }
            options_are_on(page, name, command);
        }
        for line in EXIT_CODES.lines().skip(1) {
            let (code, meaning) = line.trim().split_once(' ').expect("a code and its meaning");
            let row = format!("| {code} | {} |", meaning.trim());
            assert!(page.contains(&row), "{row}");
        }
    }

    fn options_are_on(page: &str, name: &str, command: &clap::Command) {
        for option in command
            .get_arguments()
            .filter_map(|option| option.get_long())
        {
            let shown =
                page.contains(&format!("`--{option}`")) || page.contains(&format!("`--{option} "));
            assert!(shown, "--{option} of {name} is not there");
        }
    }

    /// Checks a promise to scripts: a shared option means the same in every command.
    #[test]
    fn options_that_are_shared_are_the_same_everywhere() {
        let mut seen = std::collections::BTreeMap::new();
        let mut waiting = vec![Cli::command()];
        while let Some(command) = waiting.pop() {
            waiting.extend(command.get_subcommands().cloned());
            for option in command.get_arguments() {
                let Some(long) = option
                    .get_long()
                    .filter(|long| ["yes", "url"].contains(long))
                else {
                    continue;
                };
                let is = (
                    option.get_short(),
                    option.get_help().map(ToString::to_string),
                );
                let first = seen.entry(long.to_owned()).or_insert_with(|| is.clone());
                assert_eq!(*first, is, "--{long} of {}", command.get_name());
            }
        }
        assert_eq!(seen.len(), 2);
    }
}
