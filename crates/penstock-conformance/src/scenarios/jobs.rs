//! A job is run, retried, handed back and charged as its outcome says.

use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_message::{
    Answer, Due, HeaderPatch, KeyState, Message, MessageState, Op, ProducingRun, Query, Refusal,
    ReleaseReason, Value, ValueStatus,
};

use super::{ENGINE_TICK, ids, refusal, release};
use crate::words::*;
use crate::{Bench, TestClient};

pub(super) fn a_job_is_run_and_acknowledged(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 1);
    worker
        .client
        .commit(vec![publish(message(1)), publish(message(2))]);
    let first = worker.take_one();
    assert_eq!(
        (first.message.id, &first.message.body[..], first.redelivered),
        (id(1), &b"1"[..], false)
    );
    worker.client.status();
    assert!(worker.has_nothing(), "it asked for one only");
    assert_eq!(worker.settle(&first, vec![ack(&first)]), applied());
    worker.want(1);
    assert_eq!(worker.take_one().message.id, id(2));
}

pub(super) fn a_job_is_published_run_and_settled_in_one_step(bench: &Bench<'_>) {
    let client = bench.client();
    assert_eq!(client.commit(vec![publish(message(1))]), applied());
    let states = client.watch(result(1));
    assert_eq!(states.next(), KeyState::Pending);

    let worker = bench.client().worker("work", 10);
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
    let end = states.next();
    assert_eq!(plain(end.clone()), KeyState::Present(value("done")));
    let KeyState::Present(Value { run: Some(run), .. }) = end else {
        panic!("{end:?} does not say which run it came from");
    };
    assert!(run.ended_at >= delivery.message.enqueued_at);
    let expected = ProducingRun {
        task: "task".into(),
        queue: "work".into(),
        attempt: 0,
        generation: 0,
        ended_at: run.ended_at,
    };
    assert_eq!(*run, expected);
    assert_eq!(worker.take_one().message.id, id(2));
}

pub(super) fn a_lease_that_was_lost_changes_nothing(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
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

pub(super) fn one_body_goes_to_any_number_of_queues(bench: &Bench<'_>) {
    let client = bench.client();
    client.commit(vec![Op::Publish {
        queues: vec!["left".into(), "right".into()],
        message: message(1),
        due: None,
        unless_key: None,
    }]);
    assert_eq!(client.status().queues.len(), 2);
    for queue in ["left", "right"] {
        assert_eq!(bench.client().worker(queue, 1).take_one().message.body, "1");
    }
}

pub(super) fn a_retry_keeps_id_and_body_and_counts(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
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
    assert!(start.elapsed() + ENGINE_TICK >= Duration::from_millis(50));
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

pub(super) fn a_lease_handed_back_burns_no_attempt_and_a_crash_counts(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
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

pub(super) fn a_suspect_is_charged_with_no_crash_and_is_told_of_it(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
    let often = Message {
        max_deliveries: 2,
        ..message(1)
    };
    let once = Message {
        max_deliveries: 1,
        ..message(2)
    };
    let suspected = || ReleaseReason::Suspected("killed by signal 9 (SIGKILL)".into());
    let suspects = |delivery: &penstock_message::Delivery| {
        let extras = delivery.message.extras.as_ref();
        extras.map_or(0, |extras| extras.suspects)
    };
    worker.client.commit(vec![publish(often)]);
    let mut delivery = worker.take_one();
    for expected in 1..=2 {
        worker.settle(&delivery, vec![release(&delivery, suspected())]);
        delivery = worker.take_one();
        assert_eq!(
            (suspects(&delivery), delivery.message.crashes),
            (expected, 0)
        );
        assert!(delivery.redelivered);
    }
    worker.settle(&delivery, vec![release(&delivery, suspected())]);
    let status = |job| match worker.client.end_of(result(job)) {
        KeyState::Present(value) => value.status,
        other => panic!("{other:?}"),
    };
    assert_eq!(status(1), ValueStatus::Crashed, "a third time is too often");
    worker.client.commit(vec![publish(once)]);
    let delivery = worker.take_one();
    worker.settle(&delivery, vec![release(&delivery, suspected())]);
    assert_eq!(status(2), ValueStatus::Crashed, "it may not run again");
    assert!(worker.has_nothing());
}

pub(super) fn too_many_crashes_end_the_job(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
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

pub(super) fn a_result_is_kept(bench: &Bench<'_>) {
    let client = bench.client();
    client.commit(vec![put(1, "there")]);
    let there = KeyState::Present(value("there"));
    assert_eq!(client.watch(result(1)).next(), there);
    assert_eq!(
        client.watch(result(1)).next(),
        there,
        "for everybody who asks"
    );
}

pub(super) fn a_large_body_arrives_whole(bench: &Bench<'_>) {
    let client = bench.client();
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

pub(super) fn a_goodbye_hands_leases_to_others_at_once(bench: &Bench<'_>) {
    let leaver = bench.client().worker("work", 10);
    leaver.client.commit(vec![publish(message(1))]);
    leaver.take_one();
    let stayer = bench.client().worker("work", 10);
    leaver
        .client
        .driver
        .close(Instant::now() + leaver.client.patience);
    let delivery = stayer.take_one();
    assert_eq!((delivery.message.attempt, delivery.message.crashes), (0, 0));
}

pub(super) fn a_job_that_is_handed_back_keeps_its_place(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 1);
    worker
        .client
        .commit((1..=3).map(|number| publish(message(number))).collect());
    let first = worker.take_one();
    worker.settle(&first, vec![release(&first, ReleaseReason::Returned)]);
    worker.want(3);
    assert_eq!(
        ids(&worker.take(3)),
        [id(1), id(2), id(3)],
        "the job that was handed back has another place"
    );
}

pub(super) fn the_progress_of_a_running_job_is_told(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 1);
    worker.client.commit(vec![publish(message(1))]);
    let job = worker.take_one();
    let told = |client: &TestClient| client.ask(Query::Progress(id(1)));
    assert_eq!(told(&worker.client), Answer::Progress(None));
    for body in ["one", "two"] {
        let progress = penstock_message::Progress {
            lease: job.lease,
            body: body.into(),
        };
        worker.client.driver.progress(progress);
    }
    let two = Answer::Progress(Some("two".into()));
    assert_eq!(told(&worker.client), two, "the last progress that was told");
    worker.settle(&job, vec![ack(&job)]);
    // The last progress is kept for a short time.
    assert_eq!(told(&worker.client), two);
    assert_eq!(told(&bench.client()), two);
}

pub(super) fn a_job_can_be_looked_at(bench: &Bench<'_>) {
    let client = bench.client();
    client.commit(vec![
        publish(message(1)),
        publish_due(message(2), Some(Due::AfterMs(60_000))),
    ]);
    let ask = |number| match client.ask(Query::Message(id(number))) {
        Answer::Message(info) => info,
        other => panic!("{other:?}"),
    };
    let ready = ask(1).expect("a job that is held is found");
    assert_eq!(ready.state, MessageState::Ready);
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
