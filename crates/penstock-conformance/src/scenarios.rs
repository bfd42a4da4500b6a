//! What every driver must do, whichever engine is behind it. A new promise is one more scenario.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::support::*;
use bytes::Bytes;
use penstock_message::{
    Answer, Applied, Condition, Delivery, Due, Durability, FailedQuery, Failure, Filter,
    HeaderPatch, Key, KeyState, Message, MessageState, Op, Query, Receipt, Refusal, ReleaseReason,
    Run, Target, Value, ValueStatus,
};

/// Brokers keep time in whole milliseconds, so one that has begun counts.
const BROKER_TICK: Duration = Duration::from_millis(1);

/// One test for each scenario and kind of broker.
macro_rules! scenarios {
    ($($name:ident)*) => {
        scenarios!(memory: $($name)*);
        scenarios!(local: $($name)*);
        scenarios!(remote: $($name)*);
    };
    ($kind:ident: $($name:ident)*) => {
        mod $kind {
            $(
                #[test]
                fn $name() {
                    super::$name(&super::Place::$kind());
                }
            )*
        }
    };
}

scenarios! {
    a_job_is_published_run_and_settled_in_one_step
    a_lease_that_was_lost_changes_nothing
    a_transaction_is_applied_whole_or_not_at_all
    guards_decide
    an_id_is_accepted_once
    a_publish_under_a_key_is_skipped_while_the_key_exists
    one_body_goes_to_any_number_of_queues
    a_delay_is_kept_by_the_broker
    what_expires_is_not_handed_out_and_ends_as_expired
    higher_priority_goes_first_and_equals_stay_in_order
    a_retry_keeps_id_and_body_and_counts
    a_lease_handed_back_burns_no_attempt_and_a_crash_counts
    too_many_crashes_end_the_job
    a_key_is_told_of_when_it_is_there_and_gone_when_it_never_will_be
    a_watch_outlives_the_broker
    what_was_confirmed_outlives_the_broker
    what_was_in_flight_is_applied_once_through_a_kill
    running_work_is_not_handed_out_again_after_a_kill
    a_large_transaction_arrives_whole
    a_large_body_arrives_whole
    every_durability_is_confirmed
    a_goodbye_hands_leases_to_others_at_once
    a_purge_cancels
    a_failed_job_is_kept_listed_retried_and_dropped
    a_job_is_cancelled_or_it_is_said_why_not
    questions_are_answered
    what_a_driver_declares_is_true
}

fn a_job_is_published_run_and_settled_in_one_step(place: &Place) {
    let client = place.client();
    assert_eq!(client.commit(vec![publish(message(1))]), applied());
    let states = client.watch(result(1));
    assert_eq!(states.recv_timeout(PATIENCE), Ok(KeyState::Pending));

    let worker = place.client().worker("work", 10);
    let delivery = worker.take_one();
    assert_eq!(delivery.message.id, id(1));
    assert_eq!(delivery.message.task, "task");
    assert_eq!(delivery.message.body, "1");
    assert!(
        delivery.message.enqueued_at > 0,
        "the broker says when it accepted the message"
    );
    assert!(!delivery.redelivered);

    let settlement = vec![ack(&delivery), put(1, "done"), publish(message(2))];
    assert_eq!(worker.settle(&delivery, settlement), applied());
    let end = states.recv_timeout(PATIENCE).unwrap();
    assert_eq!(plain(end.clone()), KeyState::Present(value("done")));
    let KeyState::Present(Value { run: Some(run), .. }) = end else {
        panic!("{end:?} does not say which run it came from");
    };
    assert!(run.ended_at >= delivery.message.enqueued_at);
    let expected = Run {
        task: "task".into(),
        queue: "work".into(),
        attempt: 0,
        generation: 0,
        ended_at: run.ended_at,
    };
    assert_eq!(*run, expected);
    assert_eq!(worker.take_one().message.id, id(2));
}

fn a_lease_that_was_lost_changes_nothing(place: &Place) {
    let worker = place.client().worker("work", 10);
    worker.client.commit(vec![publish(message(1))]);
    let delivery = worker.take_one();
    assert_eq!(
        worker.settle(&delivery, vec![ack(&delivery), put(1, "first")]),
        applied()
    );
    let second = worker.settle(
        &delivery,
        vec![ack(&delivery), put(1, "second"), publish(message(2))],
    );
    assert_eq!(refusal(second), Refusal::LeaseLost);
    assert_eq!(
        plain(worker.client.end_of(result(1))),
        KeyState::Present(value("first"))
    );
    assert_eq!(worker.client.end_of(result(2)), KeyState::Gone);
}

fn a_transaction_is_applied_whole_or_not_at_all(place: &Place) {
    let client = place.client();
    client.commit(vec![publish(message(1))]);
    let receipt = client.commit(vec![
        publish(message(2)),
        publish(message(1)),
        publish(message(3)),
    ]);
    assert_eq!(
        receipt,
        Receipt::Refused {
            op: 1,
            why: Refusal::AlreadyExists
        }
    );
    let worker = client.worker("work", 10);
    worker.client.commit(vec![publish(message(4))]);
    let taken: Vec<_> = worker
        .take(2)
        .iter()
        .map(|delivery| delivery.message.id)
        .collect();
    assert_eq!(taken, [id(1), id(4)]);
}

fn guards_decide(place: &Place) {
    let client = place.client();
    let guard = |condition| Op::Guard {
        key: named("lock"),
        condition,
    };
    let lock = |body| Op::Put {
        key: named("lock"),
        value: value(body),
        ttl_ms: None,
        group: "locks".into(),
    };
    let is = |body: &'static str| Condition::Is(Bytes::from_static(body.as_bytes()));
    assert_eq!(
        refusal(client.commit(vec![guard(Condition::Present)])),
        Refusal::GuardFailed
    );
    assert_eq!(
        client.commit(vec![guard(Condition::Absent), lock("mine")]),
        applied()
    );
    assert_eq!(
        refusal(client.commit(vec![guard(Condition::Absent), lock("yours")])),
        Refusal::GuardFailed
    );
    assert_eq!(
        refusal(client.commit(vec![lock("yours"), guard(is("other"))])),
        Refusal::GuardFailed
    );
    assert_eq!(
        plain(client.end_of(named("lock"))),
        KeyState::Present(value("mine"))
    );
    assert_eq!(
        client.commit(vec![guard(is("mine")), Op::Delete { key: named("lock") }]),
        applied()
    );
    assert_eq!(client.end_of(named("lock")), KeyState::Gone);
}

fn an_id_is_accepted_once(place: &Place) {
    let client = place.client();
    assert_eq!(client.commit(vec![publish(message(1))]), applied());
    assert_eq!(
        refusal(client.commit(vec![publish(message(1))])),
        Refusal::AlreadyExists
    );
}

fn a_publish_under_a_key_is_skipped_while_the_key_exists(place: &Place) {
    let worker = place.client().worker("work", 10);
    let unique = |number| Op::Publish {
        queues: vec!["work".into()],
        message: message(number),
        due: None,
        unless_key: Some(named("unique")),
    };
    assert_eq!(worker.client.commit(vec![unique(1)]), applied());
    let receipt = worker.client.commit(vec![publish(message(2)), unique(3)]);
    let skipped = Applied {
        skipped: vec![1],
        owners: vec![(1, id(1))],
        ..Applied::default()
    };
    assert_eq!(receipt, Receipt::Applied(skipped));
    let taken = worker.take(2);
    for delivery in &taken {
        worker.settle(delivery, vec![ack(delivery)]);
    }
    assert_eq!(
        worker.client.commit(vec![unique(4)]),
        applied(),
        "the key ends with its message"
    );
    assert_eq!(worker.take_one().message.id, id(4));
}

fn one_body_goes_to_any_number_of_queues(place: &Place) {
    let client = place.client();
    client.commit(vec![Op::Publish {
        queues: vec!["left".into(), "right".into()],
        message: message(1),
        due: None,
        unless_key: None,
    }]);
    assert_eq!(client.status().queues.len(), 2);
    for queue in ["left", "right"] {
        assert_eq!(place.client().worker(queue, 1).take_one().message.body, "1");
    }
}

fn a_delay_is_kept_by_the_broker(place: &Place) {
    let worker = place.client().worker("work", 10);
    let start = Instant::now();
    worker.client.commit(vec![
        publish_due(message(1), Some(Due::AfterMs(300))),
        publish_due(message(2), Some(Due::AfterMs(100))),
        publish_due(message(3), Some(Due::At(1))),
        publish(message(4)),
    ]);
    let order: Vec<_> = worker
        .take(4)
        .iter()
        .map(|delivery| delivery.message.id)
        .collect();
    assert_eq!(order, [id(3), id(4), id(2), id(1)]);
    assert!(start.elapsed() + BROKER_TICK >= Duration::from_millis(300));
}

fn what_expires_is_not_handed_out_and_ends_as_expired(place: &Place) {
    let client = place.client();
    let expires_at = Some(Due::AfterMs(20));
    client.commit(vec![
        publish(Message {
            expires_at,
            ..message(1)
        }),
        publish(message(2)),
    ]);
    match client.end_of(result(1)) {
        KeyState::Present(value) => assert_eq!(value.status, ValueStatus::Expired),
        other => panic!("{other:?}"),
    }
    assert_eq!(client.worker("work", 10).take_one().message.id, id(2));
}

fn higher_priority_goes_first_and_equals_stay_in_order(place: &Place) {
    let client = place.client();
    let ops = (0..100)
        .map(|number| {
            publish(Message {
                priority: (number % 2 * 9) as u8,
                ..message(number)
            })
        })
        .collect();
    client.commit(ops);
    let order: Vec<_> = client
        .worker("work", 100)
        .take(100)
        .iter()
        .map(|delivery| delivery.message.id)
        .collect();
    let high = (1..100).step_by(2);
    let low = (0..100).step_by(2);
    assert_eq!(order, high.chain(low).map(id).collect::<Vec<_>>());
}

fn a_retry_keeps_id_and_body_and_counts(place: &Place) {
    let worker = place.client().worker("work", 10);
    worker.client.commit(vec![publish(message(1))]);
    let first = worker.take_one();
    let start = Instant::now();
    let retry = Op::Move {
        lease: first.lease,
        queue: None,
        due: Some(Due::AfterMs(50)),
        patch: HeaderPatch {
            next_attempt: true,
            note: Some(Bytes::from_static(b"why")),
            expires_at: None,
        },
        cost_us: 10,
    };
    assert_eq!(worker.settle(&first, vec![retry]), applied());
    let second = worker.take_one();
    assert!(start.elapsed() + BROKER_TICK >= Duration::from_millis(50));
    assert_ne!(second.lease, first.lease);
    assert_eq!(second.message.id, id(1));
    assert_eq!(second.message.body, "1");
    assert_eq!(second.message.attempt, 1);
    assert_eq!(second.message.notes, [Bytes::from_static(b"why")]);
    assert_eq!(
        worker.settle(&second, vec![ack(&second), put(1, "done")]),
        applied()
    );
    assert_eq!(
        plain(worker.client.end_of(result(1))),
        KeyState::Present(value("done"))
    );
}

fn a_lease_handed_back_burns_no_attempt_and_a_crash_counts(place: &Place) {
    let worker = place.client().worker("work", 10);
    worker.client.commit(vec![publish(message(1))]);
    let first = worker.take_one();
    worker.settle(&first, vec![release(&first, ReleaseReason::Returned)]);
    let second = worker.take_one();
    assert_eq!((second.message.attempt, second.message.crashes), (0, 0));
    let crash = ReleaseReason::Crashed("killed by signal 9 (SIGKILL)".into());
    worker.settle(&second, vec![release(&second, crash)]);
    let third = worker.take_one();
    assert_eq!((third.message.attempt, third.message.crashes), (0, 1));
    assert!(third.redelivered);
}

fn too_many_crashes_end_the_job(place: &Place) {
    let worker = place.client().worker("work", 10);
    let once = Message {
        max_deliveries: 1,
        ..message(1)
    };
    worker.client.commit(vec![publish(once)]);
    let delivery = worker.take_one();
    let crash = ReleaseReason::Crashed("exit code 3".into());
    worker.settle(&delivery, vec![release(&delivery, crash)]);
    match worker.client.end_of(result(1)) {
        KeyState::Present(value) => {
            assert_eq!(value.status, ValueStatus::Crashed);
            assert_eq!(value.body, "exit code 3");
        }
        other => panic!("{other:?}"),
    }
    assert!(worker.has_nothing());
}

fn a_key_is_told_of_when_it_is_there_and_gone_when_it_never_will_be(place: &Place) {
    let client = place.client();
    assert_eq!(
        client.watch(result(9)).recv_timeout(PATIENCE),
        Ok(KeyState::Gone)
    );
    client.commit(vec![put(1, "there")]);
    assert_eq!(
        client.watch(result(1)).recv_timeout(PATIENCE),
        Ok(KeyState::Present(value("there")))
    );
    // Nobody reads its result, so nobody can wait for it after it has run.
    let forgetful = Message {
        result_ttl_ms: None,
        ..message(2)
    };
    client.commit(vec![publish(forgetful)]);
    let states = client.watch(result(2));
    assert_eq!(states.recv_timeout(PATIENCE), Ok(KeyState::Pending));
    let worker = client.worker("work", 1);
    let delivery = worker.take_one();
    worker.settle(&delivery, vec![ack(&delivery)]);
    assert_eq!(states.recv_timeout(PATIENCE), Ok(KeyState::Gone));
}

fn a_watch_outlives_the_broker(place: &Place) {
    let client = place.client();
    client.commit(vec![publish(message(1))]);
    let states = client.watch(result(1));
    assert_eq!(states.recv_timeout(PATIENCE), Ok(KeyState::Pending));
    place.kill();
    let worker = place.client().worker("work", 1);
    let delivery = worker.take_one();
    worker.settle(&delivery, vec![ack(&delivery), put(1, "done")]);
    let end = std::iter::from_fn(|| states.recv_timeout(PATIENCE).ok())
        .find(|state| *state != KeyState::Pending);
    assert_eq!(end.map(plain), Some(KeyState::Present(value("done"))));
    assert!(states.try_recv().is_err(), "it is told once");
}

fn what_was_confirmed_outlives_the_broker(place: &Place) {
    let client = place.client();
    client.commit(vec![publish(message(1)), put(7, "kept")]);
    client.commit(vec![publish_due(message(2), Some(Due::AfterMs(1)))]);
    place.kill();
    assert_eq!(
        plain(client.end_of(result(7))),
        KeyState::Present(value("kept"))
    );
    let taken: BTreeSet<_> = client
        .worker("work", 9)
        .take(2)
        .iter()
        .map(|delivery| delivery.message.id)
        .collect();
    assert_eq!(taken, BTreeSet::from([id(1), id(2)]));
}

fn what_was_in_flight_is_applied_once_through_a_kill(place: &Place) {
    const JOBS: u64 = 3_000;
    let client = place.client();
    let (confirm, confirmed) = std::sync::mpsc::channel();
    for number in 0..JOBS {
        let confirm = confirm.clone();
        let done = Box::new(move |outcome: Result<Vec<Receipt>, _>| {
            confirm.send(outcome.unwrap().remove(0)).unwrap();
        });
        let tx = vec![publish(message(number))].into();
        client.driver.commit(vec![tx], Durability::Disk, None, done);
        if number == JOBS / 2 {
            place.kill();
        }
    }
    for _ in 0..JOBS {
        let receipt = confirmed
            .recv_timeout(PATIENCE)
            .expect("every commit is confirmed");
        assert!(
            matches!(receipt, Receipt::Applied { .. } | Receipt::Duplicate),
            "{receipt:?}"
        );
    }
    let worker = place.client().worker("work", JOBS as u32 + 1);
    let taken: BTreeSet<_> = worker
        .take(JOBS as usize)
        .iter()
        .map(|delivery| delivery.message.id)
        .collect();
    assert_eq!(taken.len(), JOBS as usize);
    worker.client.status();
    assert!(worker.has_nothing());
}

fn running_work_is_not_handed_out_again_after_a_kill(place: &Place) {
    let worker = place.client().worker("work", 10);
    worker.client.commit(vec![publish(message(1))]);
    let delivery = worker.take_one();
    // Another worker would gladly have it.
    let other = place.client().worker("work", 10);
    other.client.status();
    place.kill();
    if place.outlives_kills {
        let first_welcome = worker.leases_kept.recv_timeout(PATIENCE).unwrap();
        assert_eq!(first_welcome, [], "at first there was nothing to keep");
        assert_eq!(
            worker.leases_kept.recv_timeout(PATIENCE).unwrap(),
            [delivery.lease]
        );
    }
    other.client.status();
    assert!(other.has_nothing());
    assert_eq!(
        worker.settle(&delivery, vec![ack(&delivery), put(1, "done")]),
        applied()
    );
    assert_eq!(
        plain(worker.client.end_of(result(1))),
        KeyState::Present(value("done"))
    );
    other.client.status();
    assert!(other.has_nothing());
}

fn a_large_transaction_arrives_whole(place: &Place) {
    const JOBS: u64 = 40;
    let client = place.client();
    let body = Bytes::from(vec![b'x'; 200 << 10]);
    let ops = (0..JOBS)
        .map(|number| {
            publish(Message {
                body: body.clone(),
                ..message(number)
            })
        })
        .collect();
    assert_eq!(client.commit(ops), applied());
    let taken = client.worker("work", 100).take(JOBS as usize);
    assert!(taken.iter().all(|delivery| delivery.message.body == body));
    let again = vec![
        publish(message(100)),
        publish(Message {
            body: body.clone(),
            ..message(0)
        }),
    ];
    let large = (0..JOBS).map(|number| {
        publish(Message {
            body: body.clone(),
            ..message(200 + number)
        })
    });
    let receipt = client.commit(large.chain(again).collect());
    assert_eq!(
        receipt,
        Receipt::Refused {
            op: JOBS as u32 + 1,
            why: Refusal::AlreadyExists
        }
    );
    assert_eq!(client.end_of(result(200)), KeyState::Gone);
}

fn a_large_body_arrives_whole(place: &Place) {
    let client = place.client();
    let body: Bytes = (0..16 << 20)
        .map(|index| (index / 7) as u8)
        .collect::<Vec<u8>>()
        .into();
    client.commit(vec![publish(Message {
        body: body.clone(),
        ..message(1)
    })]);
    let worker = client.worker("work", 1);
    let delivery = worker.take_one();
    assert!(delivery.message.body == body);
    let result_of_it = Op::Put {
        key: result(1),
        value: penstock_message::Value::new(ValueStatus::Succeeded, body.clone()),
        ttl_ms: Some(60_000),
        group: "task".into(),
    };
    assert_eq!(
        worker.settle(&delivery, vec![ack(&delivery), result_of_it]),
        applied()
    );
    match client.end_of(result(1)) {
        KeyState::Present(value) => assert!(value.body == body),
        other => panic!("{other:?}"),
    }
    let beyond = Message {
        body: vec![0; (16 << 20) + 1].into(),
        ..message(2)
    };
    match refusal(client.commit(vec![publish(beyond)])) {
        Refusal::TooLarge(_) => {}
        other => panic!("{other:?}"),
    }
}

fn every_durability_is_confirmed(place: &Place) {
    let client = place.client();
    for (number, durability) in [Durability::None, Durability::Os, Durability::Disk]
        .into_iter()
        .enumerate()
    {
        let ops = vec![publish(message(number as u64))];
        assert_eq!(
            client.try_commit(ops, durability, PATIENCE).unwrap(),
            applied()
        );
    }
    assert_eq!(client.worker("work", 10).take(3).len(), 3);
}

fn a_goodbye_hands_leases_to_others_at_once(place: &Place) {
    if !place.takes_many_clients() {
        return a_goodbye_ends_the_broker_of_one_client(place);
    }
    let leaver = place.client().worker("work", 10);
    leaver.client.commit(vec![publish(message(1))]);
    leaver.take_one();
    let stayer = place.client().worker("work", 10);
    leaver.client.driver.close(Instant::now() + PATIENCE);
    let delivery = stayer.take_one();
    assert_eq!((delivery.message.attempt, delivery.message.crashes), (0, 0));
}

fn a_goodbye_ends_the_broker_of_one_client(place: &Place) {
    let client = place.client();
    client.commit(vec![publish(message(1))]);
    let pid = client.broker_pid();
    client.driver.close(Instant::now() + PATIENCE);
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let gone = || rustix::process::test_kill_process(pid).is_err();
    let deadline = Instant::now() + PATIENCE;
    while !gone() {
        assert!(Instant::now() < deadline, "the broker goes on for nobody");
        std::thread::yield_now();
    }
}

fn a_purge_cancels(place: &Place) {
    let client = place.client();
    client.commit(vec![publish(message(1)), publish(message(2))]);
    let states = client.watch(result(2));
    client.commit(vec![Op::Purge {
        queue: "work".into(),
    }]);
    let end = std::iter::from_fn(|| states.recv_timeout(PATIENCE).ok())
        .find(|state| *state != KeyState::Pending);
    match end {
        Some(KeyState::Present(value)) => assert_eq!(value.status, ValueStatus::Cancelled),
        other => panic!("{other:?}"),
    }
}

fn a_failed_job_is_kept_listed_retried_and_dropped(place: &Place) {
    let worker = place.client().worker("work", 10);
    let client = place.client();
    client.commit(vec![publish(message(1)), publish(message(2))]);
    let [first, second] = <[_; 2]>::try_from(worker.take(2)).unwrap();
    let failure = |class: &str| Failure {
        class: class.into(),
        message: "it is odd".into(),
        fingerprint: u64::MAX - 7,
        preview: Bytes::from_static(b"(1)"),
    };
    let fail = |delivery: &Delivery, class: &str| Op::Fail {
        lease: delivery.lease,
        value: Some(Bytes::from_static(b"the error")),
        note: Bytes::from_static(b"the note"),
        failure: failure(class),
        cost_us: 5,
    };
    worker.settle(&first, vec![fail(&first, "ValueError")]);
    worker.settle(&second, vec![fail(&second, "KeyError")]);
    let again = client.commit(vec![fail(&first, "ValueError")]);
    assert_eq!(refusal(again), Refusal::LeaseLost, "it is a guard");

    // Its result is the error, and the broker tells what it knows of it.
    let error = Value::new(ValueStatus::Failed, Bytes::from_static(b"the error"));
    assert_eq!(plain(client.end_of(result(1))), KeyState::Present(error));
    let info = |number| match client.query(Query::Message(id(number))).unwrap() {
        Answer::Message(info) => info,
        other => panic!("{other:?}"),
    };
    let failed = info(1).unwrap();
    assert_eq!(
        (failed.state, failed.queue.as_str(), failed.generation),
        (MessageState::Failed, "work", 0)
    );
    assert_eq!(failed.notes, ["the note"]);
    let (failed_at, why) = *failed.failed.unwrap();
    assert!(failed_at >= failed.enqueued_at);
    assert_eq!(why, failure("ValueError"));
    assert_eq!(client.status().failed, 2);

    // A page at a time, and by its class.
    let list = |filter, after, limit| {
        let query = FailedQuery {
            filter,
            after,
            limit,
        };
        match client.query(Query::Failed(query)).unwrap() {
            Answer::Failed(page) => page,
            other => panic!("{other:?}"),
        }
    };
    let page = list(Filter::default(), 0, 1);
    assert_eq!(page.jobs.len(), 1);
    assert_eq!(
        (page.jobs[0].id, page.jobs[0].failed_at),
        (id(1), failed_at)
    );
    assert_eq!(page.jobs[0].failure, failure("ValueError"));
    let rest = list(Filter::default(), page.next.expect("there are more"), 10);
    assert_eq!(rest.jobs.len(), 1);
    assert_eq!(rest.jobs[0].id, id(2));
    let key_errors = Filter {
        class: Some("KeyError".into()),
        ..Filter::default()
    };
    assert_eq!(list(key_errors.clone(), 0, 10).jobs, rest.jobs);

    // Retried, it is another generation, whose retries are counted from here.
    let retry = Op::RetryFailed {
        target: Target::Job(id(1)),
        queue: None,
    };
    let Receipt::Applied(applied) = client.commit(vec![retry]) else {
        panic!("it is there");
    };
    assert_eq!(applied.found, Some(MessageState::Failed));
    let again = worker.take_one();
    assert_eq!(
        (again.message.id, again.message.body.as_ref()),
        (id(1), &b"1"[..])
    );
    let extras = again.message.extras.clone().unwrap();
    assert_eq!(
        (extras.generation, extras.attempts_before),
        (1, again.message.attempt)
    );
    assert_eq!(again.message.notes, ["the note"]);
    worker.settle(&again, vec![ack(&again), put(1, "done")]);
    let KeyState::Present(Value { run: Some(run), .. }) = client.end_of(result(1)) else {
        panic!("it was done, by a run that the broker knows");
    };
    assert_eq!(run.generation, 1);

    // What a filter means is dropped step by step, and it can be asked how far that has come.
    let drop = Op::DropFailed {
        target: Target::Filter(key_errors),
    };
    let Receipt::Applied(applied) = client.commit(vec![drop]) else {
        panic!("a filter always applies");
    };
    let name = applied.operation.expect("it has a name");
    let over = loop {
        match client.query(Query::Operation(name)).unwrap() {
            Answer::Operation(Some(status)) if status.is_over => break status,
            Answer::Operation(Some(_)) => std::thread::yield_now(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((over.matched, over.done, over.spared), (1, 1, 0));
    assert_eq!(info(2), None);
    assert_eq!(
        client.query(Query::Operation(name + 1)).unwrap(),
        Answer::Operation(None)
    );
}

fn a_job_is_cancelled_or_it_is_said_why_not(place: &Place) {
    let client = place.client();
    let worker = place.client().worker("work", 1);
    client.commit(vec![publish(message(1))]);
    let running = worker.take_one();
    client.commit(vec![publish(message(2))]);
    let cancel = |number| Op::Cancel {
        target: Target::Job(id(number)),
        reason: "not wanted".into(),
    };
    let Receipt::Applied(applied) = client.commit(vec![cancel(2)]) else {
        panic!("it waits");
    };
    assert_eq!(applied.found, Some(MessageState::Ready));
    let KeyState::Present(value) = client.end_of(result(2)) else {
        panic!("whoever waits for it is told");
    };
    assert_eq!(value.status, ValueStatus::Cancelled);
    assert_eq!(value.body, "not wanted");
    assert_eq!(
        refusal(client.commit(vec![cancel(1)])),
        Refusal::TooLate(MessageState::Running)
    );
    assert_eq!(refusal(client.commit(vec![cancel(3)])), Refusal::NoSuchJob);
    assert_eq!(
        worker.settle(&running, vec![ack(&running)]),
        Receipt::applied()
    );
}

fn questions_are_answered(place: &Place) {
    let client = place.client();
    client.commit(vec![
        publish(message(1)),
        publish_due(message(2), Some(Due::AfterMs(60_000))),
    ]);
    let worker = place.client().worker("other", 5);
    worker.client.driver.report(8, 3);
    // Its answer says that the report has arrived.
    worker.client.status();
    let status = client.status();
    let queue = status
        .queues
        .iter()
        .find(|queue| queue.name == "work")
        .unwrap();
    assert_eq!((queue.ready, queue.delayed, queue.running), (1, 1, 0));
    // It holds no job, so nothing of it is busy, whatever it said last.
    assert_eq!((status.workers[0].slots, status.workers[0].busy), (8, 0));
    let clients = u32::from(place.takes_many_clients());
    assert_eq!((status.clients, status.workers.len()), (clients, 1));
    assert_ne!(status.process.pid, 0);

    let ask = |number| match client.query(Query::Message(id(number))).unwrap() {
        Answer::Message(info) => info,
        other => panic!("{other:?}"),
    };
    assert_eq!(ask(1).unwrap().state, MessageState::Ready);
    let delayed = ask(2).unwrap();
    assert_eq!(delayed.state, MessageState::Delayed);
    assert_eq!(
        (delayed.task.as_str(), delayed.queue.as_str()),
        ("task", "work")
    );
    let due_in_ms = delayed.due_at.map(|due| due - delayed.enqueued_at);
    assert!(due_in_ms.is_some_and(|ms| (59_000..61_000).contains(&ms)));
    assert_eq!(ask(3), None);
}

/// What a driver claims before it has seen a broker is the most that one then declares.
fn what_a_driver_declares_is_true(place: &Place) {
    let client = place.client();
    let bound = client.driver.upper_bound();
    let said = client.probe().unwrap();
    assert_eq!(&*said, bound);
    let highest = match place.outlives_kills {
        true => Durability::Disk,
        false => Durability::None,
    };
    assert_eq!(said.highest_durability, highest);
    assert_eq!(said.is_double, !place.outlives_kills);
}

fn named(name: &'static str) -> Key {
    Key::Named(Bytes::from_static(name.as_bytes()))
}

fn release(delivery: &penstock_message::Delivery, reason: ReleaseReason) -> Op {
    Op::Release {
        lease: delivery.lease,
        reason,
    }
}

fn refusal(receipt: Receipt) -> Refusal {
    match receipt {
        Receipt::Refused { why, .. } => why,
        other => panic!("{other:?} is no refusal"),
    }
}
