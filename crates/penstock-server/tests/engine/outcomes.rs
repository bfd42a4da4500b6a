//! The outcome of a run waits a little for company, so that one sync serves both; but only while nobody waits for it.

use bytes::Bytes;
use penstock_message::{
    Durability, Key, KeyState, Lease, MessageId, Op, ReleaseReason, Tx, Value, ValueStatus,
};
use penstock_server::WriterTask;
use penstock_wire::proto::{self, ToBroker};

use crate::world::*;

/// Longest time that an outcome may wait.
const PATIENCE_MS: u64 = 2;

/// Engine with a worker that runs job 1 and has no room for another, and a client that enqueues.
struct OutcomeWorld {
    world: EngineWorld,
    worker: EngineClient,
    client: EngineClient,
    lease: Lease,
}

impl OutcomeWorld {
    fn new() -> Self {
        let mut world = EngineWorld::new();
        let client = world.join(1);
        let worker = world.join(2);
        world.ask(client, &commit(1, Durability::Disk, vec![publish(1)]));
        let delivery = world.ask(worker, &consume(1)).deliveries.remove(0);
        world.live(1_000);
        world.confirmed(client);
        Self {
            world,
            worker,
            client,
            lease: delivery.lease,
        }
    }

    /// Sends the outcome of job 1.
    fn end(&mut self) {
        let outcome = outcome(self.lease, Durability::Disk);
        self.world.send(self.worker, &outcome);
    }

    /// Returns the next task of the writer, if it begins at once.
    fn task(&mut self) -> Option<WriterTask> {
        let task = self.world.take_task();
        self.world.transmit();
        task
    }

    fn confirmed(&mut self, client: EngineClient) -> Option<u64> {
        self.world.confirmed(client).through
    }
}

fn outcome(lease: Lease, durability: Durability) -> ToBroker {
    let value = Value::new(ValueStatus::Succeeded, Bytes::from_static(b"42"));
    let put = Op::Put {
        key: Key::Result(MessageId([1; 16])),
        value,
        ttl_ms: Some(60_000),
        group: "shop.send".to_owned(),
    };
    commit(1, durability, vec![Tx::from(vec![ack(lease), put])])
}

fn ack(lease: Lease) -> Op {
    Op::Ack { lease, cost_us: 1 }
}

fn watch() -> ToBroker {
    ToBroker {
        watch: Some(proto::Watch {
            keys: vec![Key::Result(MessageId([1; 16])).into()],
            ..proto::Watch::default()
        }),
        ..ToBroker::default()
    }
}

#[test]
fn an_outcome_shares_the_sync_of_the_next_publish() {
    let mut running = OutcomeWorld::new();
    let (worker, client) = (running.worker, running.client);
    running.end();
    assert!(running.task().is_none(), "it waits");
    assert_eq!(running.confirmed(worker), None);

    let publish = commit(2, Durability::Disk, vec![publish(2)]);
    running.world.send(client, &publish);
    let task = running.task().expect("a publish is written at once");
    assert!(task.sync && task.is_awaited);
    running.world.carry_out(&task);
    running.world.transmit();
    assert_eq!(running.confirmed(client), Some(2));
    assert_eq!(running.confirmed(worker), Some(1));
    assert!(running.task().is_none(), "both were in one batch");
}

#[test]
fn an_outcome_that_stays_alone_is_synced_two_milliseconds_later() {
    for durability in [Durability::Disk, Durability::Os] {
        let mut running = OutcomeWorld::new();
        let worker = running.worker;
        let outcome = outcome(running.lease, durability);
        running.world.send(worker, &outcome);
        running.world.live(PATIENCE_MS - 1);
        assert_eq!(running.confirmed(worker), None, "{durability:?}");
        running.world.live(1);
        assert_eq!(running.confirmed(worker), Some(1), "{durability:?}");
    }
}

#[test]
fn an_outcome_that_somebody_awaits_is_synced_at_once() {
    let mut running = OutcomeWorld::new();
    let client = running.client;
    running.world.send(client, &watch());
    running.world.settle();
    running.world.confirmed(client);
    running.end();
    let task = running.task().expect("it does not wait");
    assert!(task.sync && task.is_awaited);
}

#[test]
fn an_outcome_waits_no_longer_once_somebody_asks_for_it() {
    let mut running = OutcomeWorld::new();
    let client = running.client;
    running.end();
    assert!(running.task().is_none());
    let told = running.world.ask(client, &watch());
    let [(_, KeyState::Present(value))] = &told.values[..] else {
        panic!("no value without a wait: {:?}", told.values);
    };
    assert_eq!(&value.body[..], b"42");
}

#[test]
fn an_outcome_that_frees_a_job_for_another_worker_is_synced_at_once() {
    let mut running = OutcomeWorld::new();
    let other = running.world.join(3);
    running.world.ask(other, &consume(1));
    let release = Op::Release {
        lease: running.lease,
        reason: ReleaseReason::Returned,
    };
    let commit = commit(1, Durability::Disk, vec![Tx::from(vec![release])]);
    running.world.send(running.worker, &commit);
    running.world.settle();
    assert_eq!(running.world.confirmed(other).delivered_ids(), [1]);
}

#[test]
fn a_publish_beside_an_outcome_of_another_transaction_is_synced_at_once() {
    let mut running = OutcomeWorld::new();
    let outcome = Tx::from(vec![ack(running.lease)]);
    let commit = commit(1, Durability::Disk, vec![outcome, publish(2)]);
    running.world.send(running.worker, &commit);
    assert!(running.task().is_some());
}

#[test]
fn many_outcomes_do_not_wait() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let worker = world.join(2);
    let jobs = (0..200).map(publish).collect();
    world.ask(client, &commit(1, Durability::Disk, jobs));
    let deliveries = world.ask(worker, &consume(200)).deliveries;
    let outcomes = deliveries.iter().map(|delivery| {
        let put = Op::Put {
            key: Key::Result(delivery.message.id),
            value: Value::new(ValueStatus::Succeeded, Bytes::from(vec![7; 100])),
            ttl_ms: None,
            group: "shop.send".to_owned(),
        };
        Tx::from(vec![ack(delivery.lease), put])
    });
    let told = world.ask(worker, &commit(1, Durability::Disk, outcomes.collect()));
    assert_eq!(told.through, Some(200), "they are more than 16 KiB");
}
