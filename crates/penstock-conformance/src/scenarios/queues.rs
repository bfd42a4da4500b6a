//! Promises about queues: which job a worker receives next, and what a queue takes and hands out.

use penstock_message::{
    KeyState, Message, Op, Overflow, QueueLimits, Receipt, Refusal, TaskSelection, ValueStatus,
};

use crate::Bench;
use crate::words::*;

pub(super) fn higher_priority_goes_first_and_equals_stay_in_order(bench: &Bench<'_>) {
    let client = bench.client();
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
    let expected: Vec<_> = high.chain(low).map(id).collect();
    assert_eq!(order, expected, "a lower priority went first");
}

pub(super) fn a_paused_queue_hands_out_nothing_until_it_is_resumed(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
    let queue = || "work".to_owned();
    worker.client.commit(vec![Op::Pause { queue: queue() }]);
    worker.client.commit(vec![publish(message(1))]);
    let status = worker.client.status();
    assert!(status.queues[0].paused, "its status says so");
    assert!(worker.has_nothing(), "a paused queue hands out a job");
    worker.client.commit(vec![Op::Resume { queue: queue() }]);
    assert_eq!(worker.take_one().message.id, id(1));
}

pub(super) fn a_full_queue_refuses_and_takes_again_once_there_is_room(bench: &Bench<'_>) {
    let client = bench.client();
    let limits = QueueLimits {
        max_length: Some(1),
        max_bytes: None,
        overflow: Overflow::Reject,
    };
    let queue = "work".to_owned();
    client.commit(vec![Op::Limit { queue, limits }]);
    assert_eq!(client.commit(vec![publish(message(1))]), applied());
    match client.commit(vec![publish(message(2))]) {
        Receipt::Refused {
            why: Refusal::QueueFull(_),
            ..
        } => {}
        other => panic!("a full queue takes a job: {other:?}"),
    }
    let worker = client.worker("work", 1);
    assert_eq!(worker.take_one().message.id, id(1));
    assert_eq!(client.commit(vec![publish(message(3))]), applied());
}

pub(super) fn a_worker_gets_only_the_tasks_that_it_names(bench: &Bench<'_>) {
    let other = Message {
        task: "other".into(),
        ..message(2)
    };
    let named = TaskSelection::Named(vec!["other".into()]);
    let picky = bench.client().worker_of(named, "work", 10);
    picky
        .client
        .commit(vec![publish(message(1)), publish(other)]);
    assert_eq!(
        picky.take_one().message.task,
        "other",
        "a worker got a task that it does not name"
    );
    picky.client.status();
    assert!(picky.has_nothing());
    let any = picky.client.worker("work", 10);
    assert_eq!(any.take_one().message.id, id(1));
}

/// Twenty jobs of one task, each reporting a second of run time, are queued before ten quick ones of another.
pub(super) fn quick_jobs_are_not_kept_waiting_by_long_ones(bench: &Bench<'_>) {
    const QUICK: usize = 10;
    let worker = bench.client().worker("work", 0);
    let job = |task: &str, number| {
        publish(Message {
            task: task.into(),
            ..message(number)
        })
    };
    let long = (0..20).map(|number| job("long", number));
    let quick = (20..30).map(|number| job("quick", number));
    worker.client.commit(long.chain(quick).collect());
    let (mut long, mut quick) = (0, 0);
    while quick < QUICK {
        worker.want(1);
        let delivery = worker.take_one();
        let is_quick = delivery.message.task == "quick";
        quick += usize::from(is_quick);
        long += usize::from(!is_quick);
        let cost_us = if is_quick { 1 } else { 1_000_000 };
        let lease = delivery.lease;
        worker.settle(&delivery, vec![Op::Ack { lease, cost_us }]);
    }
    assert!(
        long <= QUICK / 2,
        "{long} long jobs ran before {QUICK} quick ones"
    );
}

pub(super) fn a_purge_cancels(bench: &Bench<'_>) {
    let client = bench.client();
    client.commit(vec![publish(message(1)), publish(message(2))]);
    let states = client.watch(result(2));
    client.commit(vec![Op::Purge {
        queue: "work".into(),
    }]);
    let end = states.end();
    match end {
        KeyState::Present(value) => assert_eq!(value.status, ValueStatus::Cancelled),
        other => panic!("{other:?}"),
    }
}
