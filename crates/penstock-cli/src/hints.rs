//! Answers people who type another queue's command line, or an earlier one of this program.

use std::io::{Write, stderr};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::exit::WRONG_CALL;

/// Commands of other programs, with their replacement.
const COMMANDS: &[(&[&str], &str)] = &[
    // Earlier names of this program.
    (
        &["fsck"],
        "it is `penstock journal check DIR` now, and `penstock journal repair DIR` with --repair",
    ),
    (&["upgrade"], "it is `penstock journal upgrade DIR` now"),
    (
        &["stop"],
        "it is `penstock broker stop` now; stop a worker with SIGTERM, Ctrl-C or `penstock workers stop NAME`",
    ),
    // Celery.
    (
        &["beat"],
        "there is no beat process: the broker makes the jobs of `@app.periodic(...)`; `penstock schedule ls` lists them",
    ),
    (
        &["flower", "events"],
        "`penstock status`, `penstock failed ls` and their --json show what is going on",
    ),
    (
        &["inspect", "report"],
        "`penstock status` shows queues and workers, `penstock job show ID` one job",
    ),
    (
        &["control"],
        "`penstock workers pause|resume|resize|drain|stop NAME` act on running workers",
    ),
    (
        &["multi"],
        "start a worker with `penstock worker APP`, and stop it with SIGTERM",
    ),
    (
        &[
            "amqp", "call", "result", "migrate", "logtool", "enqueue", "schedule",
        ],
        "enqueue jobs from Python; `penstock job show ID` shows one",
    ),
    (&["revoke"], "it is `penstock job cancel ID`"),
    (
        &["list"],
        "lists are called `ls`: `penstock queue ls`, `failed ls`, `workflow ls`, `workers ls`",
    ),
    (&["version"], "it is `penstock --version`"),
    // RQ.
    (&["info"], "it is `penstock status`"),
    (
        &["requeue"],
        "it is `penstock failed retry ID`, or `penstock failed retry --all`",
    ),
    (&["empty"], "it is `penstock purge QUEUE`"),
    (&["suspend"], "it is `penstock pause QUEUE`"),
    (&["worker-pool"], "it is `penstock worker APP -c N`"),
    (
        &["scheduler", "cron", "schedules"],
        "it is `penstock schedule ls`; code declares schedules with `@app.periodic(...)`",
    ),
    // A plural or a singular.
    (&["queues"], "it is `penstock queue ls`"),
    (
        &["jobs"],
        "it is `penstock job show ID`; `penstock status` counts them by queue",
    ),
    (&["dead"], "it is `penstock failed ls`"),
    (&["workflows"], "it is `penstock workflow ls`"),
    (&["limits"], "it is `penstock limit ls`"),
];

/// Options of other programs, with their replacement.
const OPTIONS: &[(&[&str], &str)] = &[
    (
        &["-A", "--app"],
        "the app is the first argument: `penstock worker shop:app`",
    ),
    (
        &["-l", "--loglevel", "--logging-level"],
        "it is `--log-level LEVEL`; Celery's `-l info`, with a line for each job, is `-v`",
    ),
    (
        &["-P", "--pool", "--worker-class", "-w"],
        "`-c N` runs N jobs at once, each in its own process; `--threads N` and `--async N` are for threads and `async def` tasks",
    ),
    (
        &["-B", "--beat", "--with-scheduler", "-s", "--schedule"],
        "schedules need no process or option: the broker makes the jobs of `@app.periodic(...)`",
    ),
    (
        &["--max-tasks-per-child", "--maxtasksperchild", "--max-jobs"],
        "it is `--max-jobs-per-child N`",
    ),
    (
        &["--autoscale"],
        "a worker has `-c N` processes, and `penstock workers resize NAME -c N` changes that",
    ),
    (
        &[
            "--time-limit",
            "--soft-time-limit",
            "--job-timeout",
            "--timeout",
        ],
        "tasks have their own limits: @app.task(timeout=..., soft_timeout=...)",
    ),
    (&["-n", "--hostname"], "it is `--name NAME`"),
    (&["-b", "--broker"], "it is `--url URL`, or PENSTOCK_URL"),
    (
        &["-f", "--logfile"],
        "logs go to standard error; redirect it to a file",
    ),
    (
        &["-D", "--detach", "--pidfile", "--uid", "--gid"],
        "a service manager such as systemd starts workers in the background",
    ),
    (
        &[
            "-E",
            "--task-events",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
            "-O",
        ],
        "this can't be switched on or off here; leave it out",
    ),
    (
        &["--prefetch-multiplier"],
        "a worker fetches enough jobs to keep its processes busy; a long job never holds up the jobs behind it",
    ),
    (
        &["-X", "--exclude-queues"],
        "`-Q` names the queues to serve",
    ),
    (
        &["--reload", "--watch", "--autoreload", "--dev"],
        "a worker keeps the code that it loaded: stop it and start it again. Reloading is not supported yet",
    ),
    (&["--repair"], "it is `penstock journal repair DIR` now"),
    (&["--none"], "it is `penstock limit rm QUEUE` now"),
];

/// Reports what is wrong with a command line, and names the penstock equivalent.
pub fn report(error: &clap::Error) -> ExitCode {
    let Some(answer) = answer(error) else {
        // clap reports help and the version as "errors" too, and knows where to print each.
        let _unread = error.print();
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(WRONG_CALL));
    };
    let _unread = writeln!(stderr(), "penstock: {answer}");
    ExitCode::from(WRONG_CALL)
}

fn answer(error: &clap::Error) -> Option<String> {
    let (kind, known) = match error.kind() {
        ErrorKind::InvalidSubcommand => (ContextKind::InvalidSubcommand, COMMANDS),
        ErrorKind::UnknownArgument => (ContextKind::InvalidArg, OPTIONS),
        _ => return None,
    };
    let Some(ContextValue::String(given)) = error.get(kind) else {
        return None;
    };
    // Treats `--pool=prefork` and `-linfo` the same.
    let is_it = |name: &&str| {
        let name = *name;
        given == name
            || given
                .strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('='))
    };
    let found = known.iter().find(|(names, _)| names.iter().any(is_it));
    if let Some((_, answer)) = found {
        return Some(format!("penstock has no {given:?}: {answer}"));
    }
    let is_of_limit = kind == ContextKind::InvalidSubcommand
        && error
            .get(ContextKind::Usage)
            .is_some_and(|usage| usage.to_string().contains("penstock limit"));
    is_of_limit.then(|| {
        format!("limits are `penstock limit ls`, `penstock limit set {given} …` and `penstock limit rm {given}` now")
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::Cli;

    #[test]
    fn a_foreign_option_gets_a_hint_that_names_ours() {
        let check = |line: &str, expected: &str| {
            let error = Cli::try_parse_from(line.split(' ')).err().expect(line);
            let answer = answer(&error).expect(line);
            assert!(answer.contains(expected), "{line}: {answer}");
        };
        check("penstock -A shop worker -l info", "first argument");
        check("penstock worker -A shop", "first argument");
        check("penstock worker --app=shop", "first argument");
        check("penstock worker shop:app -l info", "each job, is `-v`");
        check("penstock worker shop:app --loglevel=info", "--log-level");
        check("penstock worker shop:app --pool solo", "its own process");
        check("penstock worker shop:app -P gevent", "its own process");
        check(
            "penstock worker shop:app -B",
            "schedules need no process or option",
        );
        check(
            "penstock worker shop:app --max-tasks-per-child 10",
            "--max-jobs-per-child N",
        );
        check(
            "penstock worker shop:app --max-tasks-per-child=10",
            "--max-jobs-per-child N",
        );
        check("penstock worker shop:app --reload", "start it again");
        check("penstock worker shop:app --time-limit 30", "timeout=");
        check("penstock failed list", "`failed ls`");
        check("penstock dead ls", "`penstock failed ls`");
        check("penstock version", "`penstock --version`");
        check("penstock beat", "no beat process");
        check("penstock flower", "penstock status");
        check("penstock requeue --all", "penstock failed retry");
        check("penstock info", "penstock status");
        check(
            "penstock control pool_grow 2",
            "penstock workers pause|resume|resize",
        );
        check(
            "penstock worker shop:app --autoscale 8,2",
            "penstock workers resize",
        );
        check("penstock fsck .penstock", "penstock journal check");
        check("penstock upgrade .penstock", "penstock journal upgrade");
        check("penstock stop", "penstock broker stop");
        check(
            "penstock limit mail --max-length 3",
            "penstock limit set mail",
        );
        check("penstock limit rm mail --none", "penstock limit rm");
    }

    #[test]
    fn anything_else_gets_the_usual_report() {
        for line in [
            "penstock frobnicate",
            "penstock status --frobnicate",
            "penstock --help",
        ] {
            let error = Cli::try_parse_from(line.split(' ')).err().expect(line);
            assert_eq!(answer(&error), None, "{line}");
        }
    }
}
