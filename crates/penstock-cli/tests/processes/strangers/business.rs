//! Measures how strangers affect others: the times of a client's confirms, and the server's resources.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{commit, hello_of, is_long_run, note};
use crate::support::*;

/// Legitimate client: commits one transaction after the other, and times each confirm.
pub struct Business<'a> {
    session: u64,
    stop: &'a AtomicBool,
}

impl Business<'_> {
    pub fn run(&self, address: &str, token: &[u8]) -> Vec<Duration> {
        let mut client = RawClient::tcp(address);
        client.send(&hello_of(self.session, token));
        let heard = client.hear().expect("a frame");
        assert!(heard.welcome.is_some(), "{heard:?}");
        let mut took = Vec::new();
        for number in 1.. {
            let start = Instant::now();
            client.send(&commit(number, vec![note(number)]));
            loop {
                let frame = client.hear().expect("the connection stands");
                assert_eq!(frame.close, None);
                if let Some(confirm) = frame.confirm {
                    assert_eq!((confirm.through, confirm.receipts), (number, vec![]));
                    break;
                }
            }
            took.push(start.elapsed());
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        took
    }
}

pub fn p99(times: &mut [Duration]) -> Duration {
    assert!(!times.is_empty());
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

/// Number of rounds into which a disturbance is split.
pub fn rounds() -> usize {
    if is_long_run() { 15 } else { 1 }
}

pub fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Runs the client during one activity and during another, and returns the 99th percentiles of both. The
/// activities alternate and the median round counts, so that other load on the machine affects both alike.
pub fn compare_business(
    address: &str,
    token: &[u8],
    mut one: impl FnMut(usize),
    mut other: impl FnMut(usize),
) -> (Duration, Duration) {
    let measure = |session, disturb: &mut dyn FnMut(usize), round| {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let business = Business {
                session,
                stop: &stop,
            };
            let business = scope.spawn(move || business.run(address, token));
            disturb(round);
            stop.store(true, Ordering::Relaxed);
            p99(&mut business.join().expect("it goes on undisturbed"))
        })
    };
    let (mut with_one, mut with_other) = (Vec::new(), Vec::new());
    for round in 0..rounds() {
        let session = (1 << 40) + 2 * round as u64;
        with_one.push(measure(session, &mut one, round));
        with_other.push(measure(session + 1, &mut other, round));
    }
    (median(&mut with_one), median(&mut with_other))
}

/// Runs an activity in rounds while the client commits; returns the 99th percentiles without and with the
/// activity.
pub fn beside_business(
    address: &str,
    token: &[u8],
    disturb: impl FnMut(usize),
) -> (Duration, Duration) {
    let while_quiet = Duration::from_millis(if is_long_run() { 1_500 } else { 300 });
    compare_business(address, token, |_| thread::sleep(while_quiet), disturb)
}

/// Bound on what other clients may notice. The millisecond allows for variation of the disk.
pub fn assert_not_disturbed(alone: Duration, meanwhile: Duration) {
    if is_long_run() {
        assert!(
            meanwhile <= 2 * alone + Duration::from_millis(1),
            "{meanwhile:?} beside it, {alone:?} alone"
        );
    }
}
