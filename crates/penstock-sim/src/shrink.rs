//! Finds a smaller run that fails in the same way. Cuts off the end, then omits faults, habits and clients one
//! by one. Every omission changes later draws, so each attempt is a different, but reproducible run.

use std::time::{Duration, Instant};

use crate::soak::run_without_panic;
use crate::world::{NAMES, Outcome, Without};

/// Number of attempts with fewer steps, after each omission.
const CUTS: u64 = 24;

/// Returns a failure without ids, numbers and places, which differ from run to run.
fn kind(failure: &str) -> String {
    let what = failure
        .split_once(" ms: ")
        .map_or(failure, |(_, what)| what);
    let words = what.split_whitespace();
    let plain = words.filter(|word| !word.contains(|letter: char| letter.is_ascii_digit()));
    plain.take(7).collect::<Vec<&str>>().join(" ")
}

/// Returns the omissions with which a run still fails, and its outcome with them. Stops trying after this time:
/// a person is waiting, and the seed will fail again tomorrow.
pub fn shrink(seed: u64, outcome: Outcome, patience: Duration) -> (Without, Outcome) {
    let Some(failure) = &outcome.failure else {
        return (Without::default(), outcome);
    };
    let wanted = kind(failure);
    let began = Instant::now();
    let fails = |without: &Without| {
        if began.elapsed() > patience {
            return None;
        }
        let outcome = run_without_panic(seed, without);
        let is_same = outcome
            .failure
            .as_ref()
            .is_some_and(|failure| kind(failure) == wanted);
        is_same.then_some(outcome)
    };
    let mut best = (Without::default(), outcome);
    loop {
        let before = best.0.clone();
        let mut attempts = Vec::new();
        for name in NAMES {
            let mut attempt = best.0.clone();
            if attempt.names.insert(name) {
                attempts.push(attempt);
            }
        }
        for clients in (1..=4).rev() {
            let mut attempt = best.0.clone();
            attempt.clients += clients;
            attempts.push(attempt);
        }
        let smaller = attempts
            .into_iter()
            .find_map(|attempt| Some((fails(&attempt)?, attempt)));
        if let Some((outcome, without)) = smaller
            && without.clients <= 8
        {
            best = (without, outcome);
        }
        let steps = best.1.steps;
        for cut in 1..=CUTS {
            let mut attempt = best.0.clone();
            attempt.steps = Some(steps * cut / (CUTS + 1));
            if let Some(outcome) = fails(&attempt) {
                best = (attempt, outcome);
                break;
            }
        }
        if best.0 == before {
            return best;
        }
    }
}

/// Shortens whole ids, which are long to read. The rest is enough to tell each id from the others.
pub fn shorten_ids(line: &str) -> String {
    let is_id = |text: &str| {
        let dashes = [8, 13, 18, 23];
        text.char_indices()
            .all(|(at, letter)| match dashes.contains(&at) {
                true => letter == '-',
                false => letter.is_ascii_hexdigit(),
            })
    };
    let mut short = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(letter) = rest.chars().next() {
        match rest.get(..36).filter(|text| is_id(text)) {
            Some(id) => {
                short += &id[24..32];
                rest = &rest[36..];
            }
            None => {
                short.push(letter);
                rest = &rest[letter.len_utf8()..];
            }
        }
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_of_one_kind_whatever_their_ids_and_numbers() {
        let one = "step 277, 15899 ms: 01a3185c-5315-7272-9d78-cbaf9f120000 must not be delivered";
        let other = "step 12, 9 ms: 01a3185c-5315-7272-9d78-000000000000 must not be delivered";
        assert_eq!(kind(one), kind(other));
        assert_ne!(
            kind(one),
            kind("step 12, 9 ms: transaction 4 was seen, and is lost")
        );
    }

    #[test]
    fn ids_are_shortened_and_the_rest_stays() {
        let line = "«01a3185c-5315-7272-9d78-cbaf9f120000» from mail";
        assert_eq!(shorten_ids(line), "«cbaf9f12» from mail");
    }
}
