//! Runs `make bench-backlog`: ten million waiting jobs, a million delayed ones, a million expiring keys. Prints
//! a table, and fails when a bound is missed. `BACKLOG_JOBS=1000000 make bench-backlog` is shorter.

mod harness;

use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use harness::{BenchBroker, BenchPace, pace};
use penstock_message::Due;

const BODY_BYTES: usize = 100;
const MIB: u64 = 1 << 20;

fn body(_job: u64) -> Bytes {
    Bytes::from_static(&[7; BODY_BYTES])
}

/// Goals and measurements.
#[derive(Default)]
struct GoalTable {
    rows: Vec<[String; 3]>,
    missed: u32,
}

impl GoalTable {
    fn add(&mut self, what: &str, found: String, bound: &str, holds: bool) {
        let bound = match (bound, holds) {
            ("", _) => String::new(),
            (bound, true) => format!("{bound}: yes"),
            (bound, false) => format!("{bound}: NO"),
        };
        self.missed += u32::from(!holds);
        println!("{what:<44} {found:>28}   {bound}");
        self.rows.push([what.to_owned(), found, bound]);
    }

    fn rate(&mut self, what: &str, pace: &BenchPace) {
        let found = format!("{:.0}/s, {:.2} µs CPU", pace.per_second(), pace.cpu_us());
        self.add(what, found, "", true);
    }

    fn beside(&mut self, what: &str, pace: &BenchPace, empty: &BenchPace) {
        let ratio = pace.per_second() / empty.per_second();
        let found = format!(
            "{:.0}/s, {:.2} µs CPU, {:.0} %",
            pace.per_second(),
            pace.cpu_us(),
            ratio * 100.0
        );
        self.add(what, found, ">= 80 % of the empty broker's", ratio >= 0.8);
    }

    fn memory(&mut self, what: &str, bytes: u64, jobs: u64, bound_mib: u64) {
        let mut found = format!("{} MiB", bytes / MIB);
        if let Some(each) = bytes.checked_div(jobs) {
            found += &format!(", {each} bytes each");
        }
        let bound = format!("< {bound_mib} MiB");
        self.add(what, found, &bound, bytes < bound_mib * MIB);
    }
}

fn main() -> ExitCode {
    let wanted = std::env::var("BACKLOG_JOBS").ok();
    let jobs = wanted.map_or(10_000_000, |jobs| jobs.parse().expect("a number of jobs"));
    let mut table = GoalTable::default();
    backlog(&mut table, jobs);
    delayed(&mut table, jobs / 10);
    keys(&mut table, jobs / 10);
    println!("\n| | found | bound |\n| --- | ---: | --- |");
    for [what, found, bound] in &table.rows {
        println!("| {what} | {found} | {bound} |");
    }
    match table.missed {
        0 => ExitCode::SUCCESS,
        missed => {
            eprintln!("{missed} bounds are missed");
            ExitCode::FAILURE
        }
    }
}

fn backlog(table: &mut GoalTable, jobs: u64) {
    let mut broker = BenchBroker::start();
    let mut client = broker.client();
    let few = (jobs / 20).clamp(1_000, 500_000);
    // The first round creates files and buffers. The others show the rate of an empty broker; their median counts.
    client.enqueue(few, body, |_| None);
    client.drain(few, |_| {});
    let mut enqueues = Vec::new();
    let mut drains = Vec::new();
    for _ in 0..3 {
        enqueues.push(pace(&broker, few, || {
            client.enqueue(few, body, |_| None);
        }));
        drains.push(pace(&broker, few, || client.drain(few, |_| {})));
    }
    enqueues.sort_by_key(|pace| pace.took);
    drains.sort_by_key(|pace| pace.took);
    let (empty_in, empty_out) = (enqueues[1], drains[1]);
    table.rate("enqueue on an empty broker", &empty_in);
    table.rate("drain of an empty broker", &empty_out);
    let empty = broker.resident_bytes();
    table.memory("memory of the empty broker", empty, 0, 200);

    let all_in = pace(&broker, jobs, || client.enqueue(jobs, body, |_| None));
    table.beside(&format!("enqueue {jobs}"), &all_in, &empty_in);
    let bound = if jobs >= 10_000_000 { 1024 } else { 300 };
    let full = broker.resident_bytes();
    table.memory("memory with all waiting", full, jobs, bound);

    drop(client);
    let ready = broker.restart();
    let ready_s = ready.as_secs_f64();
    let seconds = format!(
        "{ready_s:.1} s, {:.2} µs a job",
        ready_s * 1e6 / jobs as f64
    );
    table.add("ready after kill -9", seconds, "<= 10 s", ready_s <= 10.0);
    let mut client = broker.client();
    assert_eq!(client.waiting(), jobs, "nothing is lost");
    let bytes = broker.resident_bytes();
    table.memory("memory after the restart", bytes, jobs, bound);

    let mut on_top = [(); 3].map(|()| pace(&broker, few, || client.enqueue(few, body, |_| None)));
    on_top.sort_by_key(|pace| pace.took);
    table.beside("enqueue on top of it", &on_top[1], &empty_in);
    let all = jobs + 3 * few;
    let all_out = pace(&broker, all, || client.drain(all, |_| {}));
    table.beside("drain all", &all_out, &empty_out);
    assert_eq!(client.waiting(), 0);
    assert_eq!(client.status().unreadable, 0);
    broker.comes_down_to(200 * MIB, Duration::from_secs(20));
    table.memory("memory after the drain", broker.resident_bytes(), 0, 200);
    client.close();
}

fn delayed(table: &mut GoalTable, jobs: u64) {
    let mut broker = BenchBroker::start();
    let mut client = broker.client();
    // In random order. The first are due once all are enqueued and the restart is over.
    let due = |job: u64| Some(Due::AfterMs(30_000 + job * 7919 % 20_000));
    client.enqueue(jobs, body, due);
    let bytes = broker.resident_bytes();
    table.memory(&format!("memory with {jobs} delayed"), bytes, jobs, 300);
    drop(client);
    let ready_s = broker.restart().as_secs_f64();
    table.add(
        "... ready after kill -9",
        format!("{ready_s:.1} s"),
        "<= 10 s",
        ready_s <= 10.0,
    );
    let client = broker.client();
    assert_eq!(client.waiting(), jobs, "nothing is lost");
    let out = pace(&broker, jobs, || client.drain(jobs, |_| {}));
    let took = format!(
        "{:.1} s, {:.2} µs CPU",
        out.took.as_secs_f64(),
        out.cpu_us()
    );
    table.add(
        "... until all came due and were done",
        took,
        "<= 70 s",
        out.took.as_secs() <= 70,
    );
    broker.comes_down_to(200 * MIB, Duration::from_secs(20));
    table.memory(
        "... memory when they are done",
        broker.resident_bytes(),
        0,
        200,
    );
    client.close();
}

fn keys(table: &mut GoalTable, keys: u64) {
    let broker = BenchBroker::start();
    let mut client = broker.client();
    client.put(keys, BODY_BYTES, 30_000);
    let bytes = broker.resident_bytes();
    table.memory(
        &format!("memory with {keys} keys that expire"),
        bytes,
        keys,
        600,
    );
    // They expire automatically.
    let is_down = broker.comes_down_to(200 * MIB, Duration::from_secs(60));
    let bytes = broker.resident_bytes();
    table.add(
        "... memory when they have expired",
        format!("{} MiB", bytes / MIB),
        "< 200 MiB",
        is_down,
    );
    client.close();
}
