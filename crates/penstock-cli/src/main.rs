//! The `penstock` command. Each command is a file; this one says what there is and how it is called.

mod demo;
mod exit;
mod fsck;
mod limit;
mod logging;
mod memory;
mod purge;
mod remote;
mod server;
mod status;
mod stop;
mod text;
mod upgrade;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   it failed; the last line says why
  2   the command line is wrong
  3   another broker has the directory; worker: the app can't be loaded
  4   worker: it was told to end twice, and running jobs were handed back
  65  the journal is damaged
  69  no broker is running or can be reached
  74  server: the disk failed; what was confirmed is kept
  78  a path, a permission or the format of the journal is wrong
";

/// A task queue for Python: durable by default, and fast all the same.
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
    /// Run a broker of its own, for clients on this machine or others
    Server(server::Arguments),
    /// Show queues, workers and the broker's health
    Status(status::Arguments),
    /// Limit how much may wait in a queue, or show its limits
    Limit(limit::Arguments),
    /// Drop everything that waits in a queue
    Purge(purge::Arguments),
    /// Check a journal, and repair it if told to
    Fsck(fsck::Arguments),
    /// Go over to the newest format of the journal, which older programs refuse
    Upgrade(upgrade::Arguments),
    /// End the local broker of a directory
    Stop(stop::Arguments),
    /// Run a map-reduce over the standard library's source
    Demo(demo::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Worker(arguments) => return worker::run(arguments),
        Command::Server(arguments) => server::run(arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Limit(arguments) => limit::run(&arguments),
        Command::Purge(arguments) => purge::run(&arguments),
        Command::Fsck(arguments) => fsck::run(&arguments),
        Command::Upgrade(arguments) => upgrade::run(&arguments),
        Command::Stop(arguments) => stop::run(&arguments),
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
            for option in command
                .get_arguments()
                .filter_map(|option| option.get_long())
            {
                let shown = page.contains(&format!("`--{option}`"))
                    || page.contains(&format!("`--{option} "));
                assert!(shown, "--{option} of {name} is not there");
            }
        }
        for line in EXIT_CODES.lines().skip(1) {
            let (code, meaning) = line.trim().split_once(' ').expect("a code and its meaning");
            let row = format!("| {code} | {} |", meaning.trim());
            assert!(page.contains(&row), "{row}");
        }
    }
}
