//! Tests chains, and groups with a callback, as transactions. Each step settles its job, stores its result and
//! publishes or joins its successors, all at once. Meanwhile brokers are killed and workers lost at random
//! moments.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_driver::DriverConfig;
use penstock_message::{
    Delivery, Durability, Hold, JoinPolicy, KeyState, Message, Op, Receipt, Refusal, Tx, Value,
    ValueStatus,
};

use crate::support::*;

const CHAINS: u64 = 40;
const LINKS: u64 = 10;
const GROUPS: u64 = 6;
const MEMBERS: u64 = 100;
const WORKERS: u64 = 4;

/// Meaning of a message, encoded in its number.
#[derive(Clone, Copy)]
enum FlowStep {
    Link { chain: u64, index: u64 },
    Member { group: u64, index: u64 },
    Callback { group: u64 },
}

impl FlowStep {
    fn of(number: u64) -> Self {
        let (group, index) = (number / 1_000 % 1_000, number % 1_000);
        match number / 1_000_000 {
            1 => Self::Link {
                chain: group,
                index,
            },
            2 => Self::Member { group, index },
            _ => Self::Callback { group },
        }
    }

    fn number(self) -> u64 {
        match self {
            Self::Link { chain, index } => 1_000_000 + chain * 1_000 + index,
            Self::Member { group, index } => 2_000_000 + group * 1_000 + index,
            Self::Callback { group } => 3_000_000 + group * 1_000,
        }
    }

    fn message(self) -> Message {
        Message {
            // It must run however often its worker is lost.
            max_deliveries: u8::MAX,
            ..message(self.number())
        }
    }

    fn all() -> impl Iterator<Item = Self> {
        let links =
            (0..CHAINS).flat_map(|chain| (0..LINKS).map(move |index| Self::Link { chain, index }));
        let members = (0..GROUPS)
            .flat_map(|group| (0..MEMBERS).map(move |index| Self::Member { group, index }));
        let callbacks = (0..GROUPS).map(|group| Self::Callback { group });
        links.chain(members).chain(callbacks)
    }
}

/// Observations, kept outside of everything that is killed.
#[derive(Default)]
struct RunBooks {
    seen: Mutex<Seen>,
    changed: Condvar,
}

#[derive(Default)]
struct Seen {
    deliveries: u64,
    /// Number of times that each step arrived as a new one.
    first_deliveries: BTreeMap<u64, u64>,
    /// Confirmed results of each step.
    confirmed: BTreeMap<u64, Vec<String>>,
    fenced: u64,
}

impl RunBooks {
    fn delivered(&self, delivery: &Delivery, number: u64) {
        let mut seen = self.seen.lock().unwrap();
        seen.deliveries += 1;
        let is_first = !delivery.redelivered && delivery.message.crashes == 0;
        *seen.first_deliveries.entry(number).or_default() += u64::from(is_first);
        if let FlowStep::Callback { group } = FlowStep::of(number) {
            for index in 0..MEMBERS {
                let member = FlowStep::Member { group, index }.number();
                assert!(
                    seen.first_deliveries.contains_key(&member),
                    "the callback of group {group} came before member {index}"
                );
            }
        }
        self.changed.notify_all();
    }

    fn ended(&self, number: u64, result: String, receipt: &Receipt) {
        let mut seen = self.seen.lock().unwrap();
        match receipt {
            Receipt::Applied { .. } | Receipt::Duplicate => {
                seen.confirmed.entry(number).or_default().push(result);
            }
            Receipt::Refused {
                why: Refusal::LeaseLost,
                ..
            } => seen.fenced += 1,
            other => panic!("{number}: {other:?}"),
        }
    }
}

/// Small random generator: xorshift64, by George Marsaglia.
struct Chance(u64);

impl Chance {
    fn one_in(&mut self, many: u64) -> bool {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.is_multiple_of(many)
    }
}

/// Returns everything that ends a step, in one transaction.
fn end_of(delivery: &Delivery, number: u64, result: &str) -> Vec<Op> {
    let mut ops = vec![
        ack(delivery),
        Op::Put {
            key: crate::support::result(number),
            value: Value::new(
                ValueStatus::Succeeded,
                Bytes::copy_from_slice(result.as_bytes()),
            ),
            ttl_ms: Some(3_600_000),
            group: "task".into(),
        },
    ];
    match FlowStep::of(number) {
        FlowStep::Link { chain, index } if index + 1 < LINKS => {
            let index = index + 1;
            ops.push(publish(FlowStep::Link { chain, index }.message()));
        }
        FlowStep::Member { group, index } => ops.push(Op::Join {
            join: id(4_000_000 + group),
            index: index as u32,
            succeeded: true,
        }),
        FlowStep::Link { .. } | FlowStep::Callback { .. } => {}
    }
    ops
}

/// Runs workers, one after the other. Each ends at a random moment, with everything it holds.
fn work(place: &BrokerPlace, books: &RunBooks, over: &AtomicBool, name: u64) {
    let mut chance = Chance(name + 1);
    let mut runs = 0;
    'lives: while !over.load(Ordering::Relaxed) {
        let worker = client_of(DriverConfig {
            heartbeat: Duration::from_secs(1),
            ..place.config()
        })
        .worker("work", 8);
        loop {
            let deliveries = match worker.deliveries.recv_timeout(Duration::from_millis(100)) {
                Ok(deliveries) => deliveries,
                Err(RecvTimeoutError::Timeout) if over.load(Ordering::Relaxed) => break 'lives,
                Err(_) => continue,
            };
            for delivery in deliveries {
                let number = u64::from_be_bytes(*delivery.message.id.0.last_chunk().unwrap());
                books.delivered(&delivery, number);
                if chance.one_in(30) {
                    continue 'lives;
                }
                runs += 1;
                let result = format!("{number} by run {runs} of worker {name}");
                let ops = end_of(&delivery, number, &result);
                if chance.one_in(20) {
                    // The worker is gone while this is on its way, so the outcome is never received.
                    let driver = &worker.client.driver;
                    driver.commit(vec![Tx { ops }], Durability::Disk, None, Box::new(|_| {}));
                    continue 'lives;
                }
                let receipt = worker.settle(&delivery, ops);
                books.ended(number, result, &receipt);
                worker.want(1);
            }
        }
    }
}

#[test]
fn chains_and_groups_end_exactly_once_whoever_is_killed_meanwhile() {
    let kills: u64 = std::env::var("WORKFLOW_KILLS").map_or(10, |text| text.parse().unwrap());
    let place = BrokerPlace::unix();
    let books = RunBooks::default();
    let over = AtomicBool::new(false);
    let total = FlowStep::all().count() as u64;
    let client = place.client();
    thread::scope(|scope| {
        for name in 0..WORKERS {
            let (place, books, over) = (&place, &books, &over);
            scope.spawn(move || work(place, books, over, name));
        }
        // However this ends, the workers must end too.
        let _end = StopWorkers(&over);
        for chain in 0..CHAINS {
            client.commit(vec![publish(FlowStep::Link { chain, index: 0 }.message())]);
        }
        for group in 0..GROUPS {
            let mut ops = vec![Op::Hold(Hold {
                join: id(4_000_000 + group),
                count: MEMBERS as u32,
                messages: vec![("work".into(), FlowStep::Callback { group }.message())],
                policy: JoinPolicy::AllSucceeded,
                ..Hold::default()
            })];
            let members = (0..MEMBERS).map(|index| FlowStep::Member { group, index });
            ops.extend(members.map(|member| publish(member.message())));
            assert_eq!(client.commit(ops), applied());
        }
        for kill in 1..=kills {
            let due = kill * total / (kills + 1);
            let seen = books.seen.lock().unwrap();
            let (seen, waited) = books
                .changed
                .wait_timeout_while(seen, PATIENCE, |seen| seen.deliveries < due)
                .unwrap();
            assert!(!waited.timed_out(), "stuck at {} of {due}", seen.deliveries);
            drop(seen);
            place.kill();
        }
        let began = Instant::now();
        for step in FlowStep::all() {
            let number = step.number();
            let KeyState::Present(value) = client.end_of(crate::support::result(number)) else {
                panic!("{number} has no result");
            };
            let seen = books.seen.lock().unwrap();
            let confirmed = seen.confirmed.get(&number).map_or(&[][..], |all| all);
            assert!(confirmed.len() <= 1, "{number} ended as {confirmed:?}");
            for result in confirmed {
                assert_eq!(value.body, result.as_bytes(), "{number} has another result");
            }
        }
        println!("all ended {:?} after the last kill", began.elapsed());
    });
    let seen = books.seen.lock().unwrap();
    println!(
        "{total} steps, {kills} brokers killed: {} deliveries, {} settlements fenced off",
        seen.deliveries, seen.fenced
    );
    for (number, count) in &seen.first_deliveries {
        assert!(*count <= 1, "{number} came anew {count} times");
    }
    assert_eq!(seen.first_deliveries.len() as u64, total, "steps that ran");
    // Nothing is left over: no callback or step came a second time.
    for queue in client.status().queues {
        let left = queue.ready + queue.delayed + queue.running;
        assert_eq!(left, 0, "{left} messages are left in {}", queue.name);
    }
}

struct StopWorkers<'a>(&'a AtomicBool);

impl Drop for StopWorkers<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
