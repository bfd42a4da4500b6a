//! A job is cancelled, wherever it is.

use penstock_message::{
    Answer, Durability, HeaderPatch, KeyState, MessageState, OnRunning, Op, Query, Receipt,
    Refusal, ReleaseReason, Target, ValueStatus,
};

use super::refusal;
use crate::Bench;
use crate::words::*;

pub(super) fn a_job_is_cancelled_or_it_is_said_why_not(bench: &Bench<'_>) {
    let client = bench.client();
    let worker = bench.client().worker("work", 1);
    client.commit(vec![publish(message(1))]);
    let running = worker.take_one();
    let workers = client.status().workers;
    let listed: Vec<_> = workers.iter().flat_map(|worker| &worker.running).collect();
    let [listed] = listed[..] else {
        panic!("one job runs: {listed:?}");
    };
    assert_eq!((listed.id, listed.queue.as_str()), (id(1), "work"));
    assert_eq!(listed.task, running.message.task);
    assert!(listed.started_at >= running.message.enqueued_at);
    client.commit(vec![publish(message(2))]);
    let cancel = |number| Op::Cancel {
        target: Target::Job(id(number)),
        reason: "not wanted".into(),
        running: OnRunning::Leave,
    };
    let Receipt::Applied(applied) = client.commit(vec![cancel(2)]) else {
        panic!("it waits");
    };
    assert_eq!(applied.found, Some(MessageState::Ready));
    let KeyState::Present(value) = client.end_of(result(2)) else {
        panic!("waiting clients learn of its end");
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

pub(super) fn a_running_job_that_is_cancelled_ends_and_is_never_run_again(bench: &Bench<'_>) {
    let client = bench.client();
    let worker = bench.client().worker("work", 3);
    let jobs = [1, 2, 3];
    client.commit(jobs.map(|number| publish(message(number))).to_vec());
    let running = worker.take(3);
    for (number, delivery) in jobs.iter().zip(&running) {
        let Receipt::Applied(applied) = client.commit(vec![stop(*number, OnRunning::Ask)]) else {
            panic!("it runs");
        };
        assert_eq!(applied.found, Some(MessageState::Cancelling));
        let order = worker.order();
        assert_eq!(
            (order.lease, order.reason.as_str(), order.kill),
            (delivery.lease, "not wanted", false)
        );
    }
    let Answer::Message(Some(info)) = client.ask(Query::Message(id(1))) else {
        panic!("it has not ended");
    };
    assert_eq!(info.state, MessageState::Cancelling);
    let again = client.commit(vec![stop(1, OnRunning::Kill)]);
    assert!(matches!(again, Receipt::Applied(_)), "{again:?}");
    assert!(worker.order().kill, "it need not be gentle any more");

    let returned = Op::Release {
        lease: running[0].lease,
        reason: ReleaseReason::Returned,
    };
    let retried = Op::Move {
        lease: running[1].lease,
        queue: None,
        due: None,
        patch: HeaderPatch {
            next_attempt: true,
            ..HeaderPatch::default()
        },
        cost_us: 1,
    };
    let succeeded = vec![ack(&running[2]), put(3, "done")];
    assert_eq!(worker.settle(&running[0], vec![returned]), applied());
    assert_eq!(worker.settle(&running[1], vec![retried]), applied());
    assert_eq!(worker.settle(&running[2], succeeded), applied());
    for number in [1, 2] {
        let KeyState::Present(end) = client.end_of(result(number)) else {
            panic!("waiting clients learn of its end");
        };
        assert_eq!(end.status, ValueStatus::Cancelled);
        assert_eq!(end.body, "not wanted");
    }
    let kept = plain(client.end_of(result(3)));
    assert_eq!(kept, KeyState::Present(value("done")), "it had succeeded");
    worker.want(3);
    client.commit(vec![publish(message(4))]);
    assert_eq!(worker.take_one().message.id, id(4), "nothing runs again");
}

pub(super) fn an_order_to_stop_outlives_the_broker(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 1);
    let client = &worker.client;
    client.commit_at(Durability::Os, vec![publish(message(1))]);
    let delivery = worker.take_one();
    client.commit_at(Durability::Os, vec![stop(1, OnRunning::Ask)]);
    assert_eq!(worker.order().lease, delivery.lease);
    bench.kill();
    assert_eq!(worker.order().lease, delivery.lease, "it is told again");
    let crashed = Op::Release {
        lease: delivery.lease,
        reason: ReleaseReason::Crashed("killed".to_owned()),
    };
    assert_eq!(worker.settle(&delivery, vec![crashed]), applied());
    let KeyState::Present(end) = client.end_of(result(1)) else {
        panic!("waiting clients learn of its end");
    };
    assert_eq!(end.status, ValueStatus::Cancelled);
}

fn stop(number: u64, running: OnRunning) -> Op {
    Op::Cancel {
        target: Target::Job(id(number)),
        reason: "not wanted".into(),
        running,
    }
}
