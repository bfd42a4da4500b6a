//! Promises about workers: what they report, what they are asked, and what a driver declares.

use std::thread;

use bytes::Bytes;
use penstock_message::{
    Answer, AskQuery, Due, NoReply, Query, WorkerReport, WorkerState, WorkerStatus,
};

use crate::Bench;
use crate::words::*;

pub(super) fn the_status_counts_jobs_and_workers(bench: &Bench<'_>) {
    let client = bench.client();
    client.commit(vec![
        publish(message(1)),
        publish_due(message(2), Some(Due::AfterMs(60_000))),
    ]);
    let worker = bench.client().worker("other", 5);
    worker.client.driver.report(WorkerReport {
        slots: 8,
        busy: 3,
        state: WorkerState::Paused,
        takes_asks: false,
        parked: 2,
    });
    // The answer shows that the report has arrived.
    worker.client.status();
    let status = client.status();
    let queue = status
        .queues
        .iter()
        .find(|queue| queue.name == "work")
        .unwrap();
    assert_eq!((queue.ready, queue.delayed, queue.running), (1, 1, 0));
    // It holds no job, so none of its slots counts as busy, whatever it reported last.
    let WorkerStatus {
        slots,
        busy,
        parked,
        ..
    } = status.workers[0];
    assert_eq!((slots, busy, parked), (8, 0, 0));
    assert_eq!(status.workers[0].state, WorkerState::Paused);
    let clients = u32::from(bench.several_clients());
    assert_eq!((status.clients, status.workers.len()), (clients, 1));
}

pub(super) fn a_worker_is_asked_and_replies(bench: &Bench<'_>) {
    let client = bench.client();
    let ask = |worker: &str, question: &'static str| {
        Query::Ask(AskQuery {
            worker: worker.to_owned(),
            question: Bytes::from_static(question.as_bytes()),
            patience_ms: 10_000,
        })
    };
    let nobody = client.ask(ask("nobody", "anyone?"));
    assert_eq!(
        nobody,
        Answer::Asked(Err(NoReply::UnknownWorker)),
        "a question is answered"
    );
    let worker = bench.client().worker("work", 1);
    worker.client.driver.report(WorkerReport {
        takes_asks: true,
        ..WorkerReport::default()
    });
    let name = worker.client.status().workers[0].name.clone();
    let answer = thread::scope(|scope| {
        let asked = scope.spawn(|| client.ask(ask(&name, "which?")));
        let asks = worker.asks.recv_timeout(client.patience);
        let asks = asks.expect("the question comes");
        assert_eq!(&*asks[0].question, b"which?");
        let reply = Bytes::from_static(b"this");
        worker.client.driver.reply(asks[0].id, reply);
        asked.join().expect("an answer")
    });
    assert_eq!(answer, Answer::Asked(Ok(Bytes::from_static(b"this"))));
}

/// Before a driver has seen an engine, it claims at least as much as the engine offers.
pub(super) fn what_a_driver_declares_is_true(bench: &Bench<'_>) {
    let client = bench.client();
    let said = client.probe().unwrap();
    assert_eq!(*said, bench.capabilities);
    let bound = client.driver.upper_bound();
    let beyond = said.features().minus(bound.features());
    assert_eq!(beyond.first(), None, "it can do more than it can at best");
    assert!(said.highest_durability <= bound.highest_durability);
}
