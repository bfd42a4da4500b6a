//! Status in pages, so that no answer exceeds a frame, however many names there are.

use std::collections::BTreeSet;

use bytes::Bytes;
use penstock_journal::sim::SimStorage;
use penstock_message::{
    Answer, Consume, Durability, Op, Query, Status, StatusCursor, StatusPage, StatusQuery,
    TaskSelection, Tx,
};
use penstock_wire::encoded_frame_len;
use penstock_wire::proto::{ToBroker, ToClient};

use crate::world::*;

/// Maximum size of a page, with some room for the rest of the frame.
const MOST_BYTES: usize = (1 << 20) + 4096;

/// Asks for one page, as a client does.
fn page(world: &mut EngineWorld, client: EngineClient, wanted: StatusQuery) -> StatusPage {
    let answer = world
        .ask(client, &query(1, Query::Status(wanted)))
        .answers
        .remove(0);
    let frame = ToClient {
        answers: vec![answer.clone()],
        ..ToClient::default()
    };
    let bytes = encoded_frame_len(&frame);
    assert!(bytes <= MOST_BYTES, "a frame of {bytes} bytes");
    match answer.try_into().expect("the engine speaks the protocol") {
        (1, Answer::Status(page)) => page,
        other => panic!("{other:?}"),
    }
}

fn whole(world: &mut EngineWorld, client: EngineClient) -> (Status, usize) {
    let mut pages = 0;
    let status = Status::collect(|wanted| {
        pages += 1;
        Ok::<_, ()>(page(world, client, wanted))
    });
    (status.unwrap(), pages)
}

fn make_queues(world: &mut EngineWorld, client: EngineClient, names: &[String]) {
    for (index, names) in names.chunks(1_000).enumerate() {
        let pause = |name: &String| Op::Pause {
            queue: name.clone(),
        };
        let tx: Tx = names.iter().map(pause).collect::<Vec<_>>().into();
        let seq = index as u64 + 1;
        world.send(client, &commit(seq, Durability::Disk, vec![tx]));
        world.settle();
    }
}

fn serve(queues: &[&String], add_credit: u32) -> ToBroker {
    let mut frame = consume(add_credit);
    frame.consumers[0].queues = queues.iter().map(|name| name.to_string()).collect();
    frame
}

#[test]
fn ninety_thousand_long_names_are_told_page_by_page_and_one_queue_by_its_name() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    // Sent in another order than listed.
    let name = |number: u32| format!("{:05}{:x<244}", number * 7_919 % 90_000, "");
    let names: Vec<String> = (0..90_000).map(name).collect();
    make_queues(&mut world, client, &names);

    let (status, pages) = whole(&mut world, client);
    let told: Vec<&String> = status.queues.iter().map(|queue| &queue.name).collect();
    let sorted: BTreeSet<&String> = names.iter().collect();
    assert_eq!(told, Vec::from_iter(sorted), "each once, in order");
    assert!(status.queues.iter().all(|queue| queue.paused));
    assert!(pages < 100, "{pages} pages");
    assert_eq!(status.clients, 1);
    assert_eq!(status.process.pid, 42);

    // Asked like `purge`, `limit` and a burst. A repeated name is one queue.
    let unknown = "no such queue".to_owned();
    let some = vec![
        names[3].clone(),
        unknown,
        names[3].clone(),
        names[7].clone(),
    ];
    let found = page(&mut world, client, StatusQuery::of_queues(some));
    let mut expected = [&names[3], &names[7]];
    expected.sort();
    let told: Vec<&String> = found
        .status
        .queues
        .iter()
        .map(|queue| &queue.name)
        .collect();
    assert_eq!(told, expected);
    assert_eq!(found.next, None);

    // Asked like `stop`.
    let first = page(&mut world, client, StatusQuery::first(1));
    assert_eq!(first.status.queues.len(), 1);
    assert_eq!(
        first.next,
        Some(StatusCursor::Queue(first.status.queues[0].name.clone()))
    );
}

#[test]
fn every_queue_and_worker_is_on_one_page_whatever_its_limit() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let names: Vec<String> = (0..7).map(|number| format!("queue {number}")).collect();
    make_queues(&mut world, client, &names);
    for session in 10..15 {
        let worker = world.join(session);
        world.send(worker, &serve(&[&names[0], &names[1]], 1));
    }
    world.settle();
    let (expected, pages) = whole(&mut world, client);
    assert_eq!(pages, 1);
    assert_eq!((expected.queues.len(), expected.workers.len()), (7, 5));
    for limit in 1..=13 {
        let mut pages = 0;
        let collected = Status::collect(|wanted| {
            let page = page(&mut world, client, StatusQuery { limit, ..wanted });
            pages += 1;
            let listed = page.status.queues.len() + page.status.workers.len();
            assert!(listed <= limit as usize);
            assert_eq!(page.status.connected_workers, 5, "on every page");
            Ok::<_, ()>(page)
        });
        let collected = collected.unwrap();
        assert_eq!(collected.queues, expected.queues, "limit {limit}");
        assert_eq!(collected.workers, expected.workers, "limit {limit}");
        assert_eq!(pages, 12_u32.div_ceil(limit), "limit {limit}");
    }
    let own = page(
        &mut world,
        client,
        StatusQuery::of_queues(vec![names[2].clone()]),
    );
    assert!(own.status.workers.is_empty());
    assert_eq!(own.next, None);
}

#[test]
fn workers_that_serve_a_thousand_long_names_each_are_told_page_by_page_too() {
    let mut world = EngineWorld::new();
    let client = world.join(1);
    let names: Vec<String> = (0..1_024).map(|number| format!("{number:y>255}")).collect();
    for session in 10..30 {
        let worker = world.join(session);
        world.send(worker, &serve(&Vec::from_iter(&names), 1));
    }
    world.settle();
    let (status, _) = whole(&mut world, client);
    assert_eq!(status.queues.len(), 1_024);
    let told: BTreeSet<&String> = status.workers.iter().map(|worker| &worker.name).collect();
    assert_eq!((status.workers.len(), told.len()), (20, 20));
    assert!(
        status
            .workers
            .iter()
            .all(|worker| worker.queues.len() == 1_024)
    );
    // All queues that one worker may serve fit into one answer.
    let own = page(&mut world, client, StatusQuery::of_queues(names));
    assert_eq!((own.status.queues.len(), own.next), (1_024, None));
}

/// Checks leases of unread bodies: without them a worker would take such a queue for an empty one, since nothing waits
/// and nothing has arrived.
#[test]
fn a_job_whose_body_is_still_being_read_counts_as_a_lease_of_who_asks() {
    let mut world = EngineWorld::with(SimStorage::new(), |options| {
        options.broker.resident_bodies_bytes = Some(0);
    });
    let producer = world.join(1);
    let body = Bytes::from(vec![7; 10_000]);
    let jobs = (1..=3).map(|id| publish_body(id, body.clone())).collect();
    world.ask(producer, &commit(1, Durability::Disk, jobs));

    let worker = world.join(2);
    world.send(worker, &consume(10));
    // Does everything but the reading.
    while let Some(task) = world.take_task() {
        world.carry_out(&task);
    }
    let of_default = || {
        query(
            1,
            Query::Status(StatusQuery::of_queues(vec!["default".into()])),
        )
    };
    world.send(worker, &of_default());
    world.transmit();
    let heard = world.confirmed(worker);
    assert_eq!(
        heard.delivered_ids(),
        [0; 0],
        "the bodies are not there yet"
    );
    let (_, Answer::Status(page)) = heard.answers[0].clone().try_into().unwrap() else {
        panic!("{heard:?}");
    };
    assert_eq!(page.status.queues[0].ready, 0);
    assert_eq!(page.own_leases, 3);

    world.settle();
    assert_eq!(world.confirmed(worker).delivered_ids(), [1, 2, 3]);
    let of_another = world.ask(producer, &of_default()).answers.remove(0);
    let (_, Answer::Status(page)) = of_another.try_into().unwrap() else {
        panic!("a status");
    };
    assert_eq!(page.own_leases, 0, "they are not those of another client");
}

#[test]
fn what_is_ready_for_a_worker_are_the_jobs_that_it_can_run() {
    let mut world = EngineWorld::with(SimStorage::new(), |_| {});
    let producer = world.join(1);
    let job = |id: u8, task: &str| {
        let mut tx = publish(id);
        let Op::Publish { message, .. } = &mut tx.ops[0] else {
            panic!("it publishes");
        };
        message.task = task.to_owned();
        tx
    };
    let jobs = vec![job(1, "a"), job(2, "b"), job(3, "b"), job(4, "c")];
    world.ask(producer, &commit(1, Durability::Disk, jobs));

    let worker = world.join(2);
    let mut serve_as = |consumer, tasks: &[&str]| {
        let consume = Consume {
            consumer,
            queues: vec!["default".to_owned()],
            tasks: TaskSelection::Named(tasks.iter().map(|task| task.to_string()).collect()),
            ..Consume::default()
        };
        let frame = ToBroker {
            consumers: vec![consume.into()],
            ..ToBroker::default()
        };
        world.send(worker, &frame);
        page(&mut world, worker, StatusQuery::first(1)).own_ready
    };
    assert_eq!(serve_as(0, &["a", "x"]), 1);
    // Jobs that both can run count once.
    assert_eq!(serve_as(1, &["a", "b"]), 3);
    assert_eq!(serve_as(0, &[]), 3);
    let own_ready =
        |world: &mut EngineWorld, who| page(world, who, StatusQuery::first(1)).own_ready;
    assert_eq!(own_ready(&mut world, producer), 0);
    let pause = Op::Pause {
        queue: "default".to_owned(),
    };
    world.ask(
        producer,
        &commit(5, Durability::Disk, vec![vec![pause].into()]),
    );
    assert_eq!(own_ready(&mut world, worker), 0);
}
