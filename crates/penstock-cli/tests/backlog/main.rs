//! What a backlog takes of the broker's memory: few bytes a job, and nothing once it is done. `make
//! bench-backlog` has the same with ten million jobs, and the rates.

#[path = "../../benches/backlog/harness.rs"]
#[allow(dead_code, reason = "the benchmark uses the rest")]
mod harness;

use std::time::Duration;

use harness::Broker;

const JOBS: u64 = 300_000;
const BODY_BYTES: usize = 200;
/// As set in the broker's options, and what a body takes there besides its bytes.
const RESIDENT_BODIES_BYTES: u64 = 64 << 20;
/// 48 of the entry, 5 to 11 of the index, 8 of the flow, 4 of the ledger, and some to spare.
const BYTES_A_JOB: u64 = 120;

#[test]
fn a_waiting_job_takes_few_bytes_and_gives_them_back() {
    let mut broker = Broker::start();
    let mut client = broker.client();
    // Buffers have their sizes.
    client.enqueue(20_000, BODY_BYTES, |_| None);
    client.drain(20_000);
    let empty = broker.resident_bytes();

    client.enqueue(JOBS, BODY_BYTES, |_| None);
    let allowed = empty + RESIDENT_BODIES_BYTES * 5 / 4 + JOBS * BYTES_A_JOB;
    assert!(
        broker.comes_down_to(allowed, Duration::from_secs(5)),
        "{} bytes with {JOBS} jobs waiting, {empty} without",
        broker.resident_bytes()
    );

    // After a restart no body is in memory.
    drop(client);
    broker.restart();
    let client = broker.client();
    assert_eq!(client.waiting(), JOBS);
    let allowed = empty + JOBS * BYTES_A_JOB;
    assert!(
        broker.comes_down_to(allowed, Duration::from_secs(5)),
        "{} bytes with {JOBS} jobs recovered, {empty} without any",
        broker.resident_bytes()
    );

    client.drain(JOBS);
    assert_eq!(client.waiting(), 0);
    assert_eq!(client.status().unreadable, 0);
    let allowed = empty + (24 << 20);
    assert!(
        broker.comes_down_to(allowed, Duration::from_secs(10)),
        "{} bytes when all was drained, {empty} at first",
        broker.resident_bytes()
    );
    client.close();
}
