//! Runs the simulator. `penstock-sim --seeds 2000` runs seeds 1 to 2000; `--seed 8211` replays one, step by
//! step.

use std::io::{BufWriter, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_sim::checker::Counts;
use penstock_sim::shrink::{shorten_ids, shrink};
use penstock_sim::soak::{keep_panics, run_without_panic};
use penstock_sim::world::{Outcome, Without, run_without};

/// Divisor of the seeds that run twice: the same seed must give the same run.
const TWICE: u64 = 20;

/// Maximum time to look for a smaller run, while a person waits.
const SHRINKS_FOR: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    keep_panics();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().ok();
    match arguments[..] {
        ["--seed", seed] => number(seed).map(replay),
        ["--seed", seed, "--whole"] => number(seed).map(replay_whole),
        ["--seeds", seeds] => number(seeds).map(|seeds| search(1, seeds)),
        ["--seeds", seeds, "--from", from] => number(seeds)
            .zip(number(from))
            .map(|(seeds, from)| search(from, seeds)),
        ["--hashes", seeds] => number(seeds).map(hashes),
        // Replays a seed with a planted bug, to see how the bug appears.
        #[cfg(feature = "faults")]
        ["--seed", seed, "--planted", name] if penstock_faults::Points::plant(Some(name)) => {
            number(seed).map(replay)
        }
        #[cfg(feature = "faults")]
        ["--seed", seed, "--whole", "--planted", name]
            if penstock_faults::Points::plant(Some(name)) =>
        {
            number(seed).map(replay_whole)
        }
        #[cfg(feature = "faults")]
        ["--mutants", ref names @ ..] => Some(hunt(names)),
        _ => None,
    }
    .unwrap_or_else(|| {
        eprintln!("usage: penstock-sim --seeds COUNT [--from SEED] | --seed SEED [--whole]");
        ExitCode::from(2)
    })
}

/// Names of planted bugs; without any, all of them.
#[cfg(feature = "faults")]
fn hunt(names: &[&str]) -> ExitCode {
    /// Number of seeds after which a bug counts as not found.
    const SEEDS: u64 = 10_000;
    match penstock_sim::mutants::hunt(names, SEEDS) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Prints a run step by step. If it fails, also prints the smallest run that fails in the same way.
fn replay(seed: u64) -> ExitCode {
    let outcome = run_without_panic(seed, &Without::default());
    let Some(whole) = outcome.failure.as_deref().map(shorten_ids) else {
        return replay_whole(seed);
    };
    let seconds = SHRINKS_FOR.as_secs();
    println!(
        "seed {seed} fails at {whole}\nLooking for a smaller run that fails in the same way, for {seconds} s at \
         most; the whole run is shown by: make simulate SEED={seed} WHOLE=1\n"
    );
    let (without, outcome) = shrink(seed, outcome, SHRINKS_FOR);
    show(seed, &without);
    let Without { names, clients, .. } = &without;
    let (steps, failure) = (outcome.steps, outcome.failure.unwrap_or_default());
    println!(
        "\nThis is less than the whole run of seed {seed}, which fails at {whole}\n\
         left out: {clients} clients, {names:?}; {steps} steps are left\n\
         seed {seed} fails at {}",
        shorten_ids(&failure)
    );
    ExitCode::FAILURE
}

/// Prints a run step by step, without omissions.
fn replay_whole(seed: u64) -> ExitCode {
    match show(seed, &Without::default()) {
        Some(outcome) if outcome.failure.is_none() => {
            println!("{:?}", outcome.counts);
            return ExitCode::SUCCESS;
        }
        Some(outcome) => {
            let failure = outcome.failure.unwrap_or_default();
            println!("seed {seed} fails at {}", shorten_ids(&failure));
        }
        None => {
            let what = run_without_panic(seed, &Without::default()).failure;
            println!("seed {seed} fails at {}", what.unwrap_or_default());
        }
    }
    ExitCode::FAILURE
}

/// Prints a run step by step. `None`: it ended in a panic.
fn show(seed: u64, without: &Without) -> Option<Outcome> {
    let mut lines = BufWriter::new(std::io::stdout().lock());
    let mut trace = |line: &str| {
        // A failed write is ignored: the reader may have closed the pipe.
        let _ended = writeln!(lines, "{}", shorten_ids(line));
    };
    let shown = || run_without(seed, without, Some(&mut trace));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(shown)).ok()
}

/// Prints a line for each seed that is the same at any time and on any machine.
fn hashes(seeds: u64) -> ExitCode {
    for seed in 1..=seeds {
        let outcome = run_without_panic(seed, &Without::default());
        println!(
            "seed {seed}: {} steps, {:016x}",
            outcome.steps, outcome.hash
        );
    }
    ExitCode::SUCCESS
}

fn search(from: u64, seeds: u64) -> ExitCode {
    let start = Instant::now();
    let next = AtomicU64::new(from);
    let found = Mutex::new((Vec::new(), Counts::default(), 0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + seeds {
                        return;
                    }
                    let outcome = run_checked(seed);
                    let mut found = found.lock().expect("no run panics while it holds this");
                    found.1 += outcome.counts;
                    found.2 += outcome.steps;
                    if let Some(what) = outcome.failure {
                        println!("seed {seed} fails at {what}");
                        found.0.push(seed);
                    }
                }
            });
        }
    });
    let (mut failed, counts, steps) = found.into_inner().expect("all runs have ended");
    let seconds = start.elapsed().as_secs_f64();
    println!("{seeds} seeds, {steps} steps in {seconds:.1} s: {counts:?}");
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    failed.sort_unstable();
    println!(
        "{} failed; replay one with: make simulate SEED={}",
        failed.len(),
        failed[0]
    );
    ExitCode::FAILURE
}

/// Runs a seed. A panic in it is a failure like any other. Some seeds run twice.
fn run_checked(seed: u64) -> Outcome {
    let mut outcome = run_without_panic(seed, &Without::default());
    if seed.is_multiple_of(TWICE)
        && outcome.failure.is_none()
        && run_without_panic(seed, &Without::default()).hash != outcome.hash
    {
        outcome.failure = Some("its end: the same seed gave another run".to_string());
    }
    outcome
}
