//! Checks the costs of a long backlog that don't depend on the machine: bytes, counts, and ratios of processor
//! time. `make bench-backlog` is the same at full length, by the clock.

#[expect(dead_code, reason = "the benchmark measures more")]
#[path = "../../benches/backlog/harness.rs"]
mod harness;

use std::time::Duration;

use bytes::Bytes;
use harness::{BenchBroker, BenchPace, pace};

const JOBS: u64 = 300_000;
const FEW: u64 = 20_000;
/// Other load on the machine only adds to the time of one of them.
const ROUNDS: usize = 3;
const BODY_BYTES: usize = 100;
const MIB: u64 = 1 << 20;

fn numbered(job: u64) -> Bytes {
    let mut body = vec![0; BODY_BYTES];
    body[..8].copy_from_slice(&job.to_le_bytes());
    body.into()
}

fn number(body: &[u8]) -> u64 {
    u64::from_le_bytes(*body.first_chunk().expect("eight bytes"))
}

fn least(rounds: impl Iterator<Item = BenchPace>) -> BenchPace {
    rounds
        .min_by_key(|pace| pace.cpu)
        .expect("some rounds were measured")
}

#[test]
fn a_long_backlog_is_small_outlives_its_broker_in_order_and_leaves_nothing_behind() {
    let mut broker = BenchBroker::start();
    let mut client = broker.client();
    // The first round creates files and buffers.
    client.enqueue(FEW, numbered, |_| None);
    client.drain(FEW, |_| {});
    let rounds = [(); ROUNDS].map(|()| {
        let enqueued = pace(&broker, FEW, || client.enqueue(FEW, numbered, |_| None));
        let drained = pace(&broker, FEW, || client.drain(FEW, |_| {}));
        (enqueued, drained)
    });
    let empty_in = least(rounds.iter().map(|(enqueued, _)| *enqueued));
    let empty_out = least(rounds.iter().map(|(_, drained)| *drained));

    client.enqueue(JOBS, numbered, |_| None);
    drop(client);
    broker.restart();
    let recovered_us = broker.cpu().as_secs_f64() * 1e6 / JOBS as f64;
    let mut client = broker.client();
    assert_eq!(client.waiting(), JOBS, "jobs after kill -9");
    let waiting_bytes = broker.resident_bytes();

    let rounds =
        [(); ROUNDS].map(|()| pace(&broker, FEW, || client.enqueue(FEW, numbered, |_| None)));
    let on_top = least(rounds.into_iter());
    let all = JOBS + FEW * ROUNDS as u64;
    let mut taken = Vec::new();
    let out = pace(&broker, all, || {
        client.drain(all, |message| taken.push(number(&message.body)));
    });
    let on_top_of_all = (0..ROUNDS).flat_map(|_| 0..FEW);
    assert!(
        taken.into_iter().eq((0..JOBS).chain(on_top_of_all)),
        "each comes once, in the order of enqueueing"
    );
    assert_eq!((client.waiting(), client.status().unreadable), (0, 0));
    broker.comes_down_to(64 * MIB, Duration::from_secs(60));
    let left_bytes = broker.resident_bytes();
    client.close();

    println!(
        "waiting {} MiB, left {} MiB; µs: enqueue {:.2} and {:.2}, drain {:.2} and {:.2}, recovery {:.2}",
        waiting_bytes / MIB,
        left_bytes / MIB,
        empty_in.cpu_us(),
        on_top.cpu_us(),
        empty_out.cpu_us(),
        out.cpu_us(),
        recovered_us
    );
    // A broker without jobs has 20 MiB or less.
    let each = waiting_bytes.saturating_sub(32 * MIB) / JOBS;
    assert!(each < 100, "{each} bytes for each job that waits");
    assert!(left_bytes < 64 * MIB, "{} MiB are kept", left_bytes / MIB);
    assert!(
        on_top.cpu_us() < 3.0 * empty_in.cpu_us(),
        "enqueueing beside a backlog: {on_top:?}, without: {empty_in:?}"
    );
    assert!(
        out.cpu_us() < 3.0 * empty_out.cpu_us(),
        "draining a backlog: {out:?}, a few: {empty_out:?}"
    );
    assert!(
        recovered_us < 2.0 * empty_in.cpu_us(),
        "{recovered_us} µs to recover a job, to enqueue it: {empty_in:?}"
    );
}
