//! Measures the strength of the simulator. Plants one bug after another and counts the seeds until it is caught. A bug
//! that is not caught reveals a hole in the model or in the world.

use std::sync::Mutex;
use std::time::Instant;

use penstock_faults::{Finder, PLANTS, Plant, Points};

use crate::soak::run_without_panic;
use crate::world::Without;

/// Easy bugs are caught within the first seeds, so the hard ones come last.
const ROUNDS: [u64; 4] = [30, 300, 3_000, 10_000];

/// Bug, and the seed that caught it.
struct Hunt {
    plant: &'static Plant,
    /// Last seed that was run.
    seed: u64,
    /// Failure of that seed.
    caught: Option<String>,
}

/// Hunts these bugs (all, if none is named) with seeds from 1 up to `seeds`, and prints a table. Returns true if all
/// were caught.
pub fn hunt(names: &[&str], seeds: u64) -> bool {
    let start = Instant::now();
    let wanted = |plant: &&Plant| {
        matches!(plant.finder, Finder::Simulator | Finder::Both)
            && (names.is_empty() || names.contains(&plant.name))
    };
    let mut hunts: Vec<Hunt> = PLANTS.iter().filter(wanted).map(Hunt::new).collect();
    let count = hunts.len();
    if count < names.len() {
        println!("some of these names are not in the table of bugs that the simulator is to catch");
        return false;
    }
    println!(
        "{:<28} {:>5}  promise that it breaks, and how that showed",
        "planted bug", "seed"
    );
    for round in ROUNDS {
        one_round(&mut hunts, round.min(seeds));
    }
    let missed = hunts.iter().filter(|hunt| hunt.caught.is_none());
    for Hunt { plant, seed, .. } in missed.clone() {
        println!(
            "{:<28} {:>5}  {}: NOT CAUGHT in {seed} seeds",
            plant.name, "-", plant.promise
        );
    }
    let (missed, seconds) = (missed.count(), start.elapsed().as_secs_f64());
    println!(
        "{} of {count} planted bugs caught in {seconds:.0} s",
        count - missed
    );
    missed == 0
}

/// Runs one round. Each thread has one bug at a time, so that the first seed to catch it is always the same.
fn one_round(hunts: &mut [Hunt], last_seed: u64) {
    let left = Mutex::new(hunts.iter_mut().filter(|hunt| hunt.caught.is_none()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let next = || left.lock().expect("nobody panics with it").next();
                while let Some(hunt) = next() {
                    hunt.go_on(last_seed);
                }
            });
        }
    });
}

impl Hunt {
    fn new(plant: &'static Plant) -> Self {
        Self {
            plant,
            seed: 0,
            caught: None,
        }
    }

    fn go_on(&mut self, last_seed: u64) {
        Points::plant(Some(self.plant.name));
        while self.caught.is_none() && self.seed < last_seed {
            self.seed += 1;
            self.caught = run_without_panic(self.seed, &Without::default()).failure;
        }
        Points::plant(None);
        if let Some(what) = &self.caught {
            let Plant { name, promise, .. } = self.plant;
            let what: String = what.chars().take(160).collect();
            println!("{name:<28} {:>5}  {promise}\n{:37}{what}", self.seed, "");
        }
    }
}
