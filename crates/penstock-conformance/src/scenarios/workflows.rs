//! Joins release what they hold, and workflows and failed jobs are kept and listed.

use bytes::Bytes;
use penstock_message::{
    Answer, Delivery, FailedQuery, Failure, Filter, Hold, JoinPolicy, KeyState, MessageState,
    NodeState, Op, Open, Query, Receipt, Refusal, Target, Value, ValueStatus, WorkflowState,
    WorkflowsQuery,
};

use super::refusal;
use crate::Bench;
use crate::words::*;

pub(super) fn a_join_releases_what_it_holds_once(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
    let join = id(100);
    worker.client.commit(vec![Op::Hold(Hold {
        join,
        count: 2,
        messages: vec![("work".into(), message(1))],
        policy: JoinPolicy::AllSucceeded,
        ..Hold::default()
    })]);
    let arrive = |index| {
        worker.client.commit(vec![Op::Join {
            join,
            index,
            succeeded: true,
        }])
    };
    arrive(0);
    arrive(0);
    worker.client.status();
    assert!(
        worker.has_nothing(),
        "the held job came before all had joined"
    );
    arrive(1);
    assert_eq!(worker.take_one().message.id, id(1));
    worker.client.status();
    assert!(worker.has_nothing());
}

pub(super) fn a_failed_job_is_kept_listed_retried_and_dropped(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
    let client = bench.client();
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

    // Its result is the error, and the broker reports the rest.
    let error = Value::new(ValueStatus::Failed, Bytes::from_static(b"the error"));
    assert_eq!(plain(client.end_of(result(1))), KeyState::Present(error));
    let info = |number| match client.ask(Query::Message(id(number))) {
        Answer::Message(info) => info,
        other => panic!("{other:?}"),
    };
    let failed = info(1).expect("a failed job is kept");
    assert_eq!(
        (failed.state, failed.queue.as_str(), failed.generation),
        (MessageState::Failed, "work", 0)
    );
    assert_eq!(failed.notes, ["the note"]);
    let (failed_at, why) = *failed.failed.unwrap();
    assert!(failed_at >= failed.enqueued_at);
    assert_eq!(why, failure("ValueError"));
    assert_eq!(client.status().failed, 2);

    // One page at a time, and by class.
    let ask = |query| match client.ask(Query::Failed(query)) {
        Answer::Failed(page) => page,
        other => panic!("{other:?}"),
    };
    let list = |filter, after, limit| {
        ask(FailedQuery {
            filter,
            after,
            limit,
            newest_first: false,
        })
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

    // From the newest on, also one page at a time.
    let newest = |after| {
        ask(FailedQuery {
            after,
            limit: 1,
            newest_first: true,
            ..FailedQuery::default()
        })
    };
    let last = newest(0);
    assert_eq!(last.jobs, rest.jobs);
    let first = newest(last.next.expect("there are more"));
    assert_eq!((first.jobs, first.next), (page.jobs, None));

    // A retried job has a new generation, whose retries are counted from here.
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

    // A filter's jobs are dropped step by step, and the progress can be queried.
    let drop = Op::DropFailed {
        target: Target::Filter(key_errors),
    };
    let Receipt::Applied(applied) = client.commit(vec![drop]) else {
        panic!("a filter always applies");
    };
    let name = applied.operation.expect("it has a name");
    let over = loop {
        match client.ask(Query::Operation(name)) {
            Answer::Operation(Some(status)) if status.is_over => break status,
            Answer::Operation(Some(_)) => std::thread::yield_now(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((over.matched, over.done, over.spared), (1, 1, 0));
    assert_eq!(info(2), None);
    assert_eq!(
        client.ask(Query::Operation(name + 1)),
        Answer::Operation(None)
    );
}

pub(super) fn a_workflow_is_listed_with_its_jobs(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 1);
    let client = &worker.client;
    let job = |number| {
        let mut message = message(number);
        message.extras.get_or_insert_default().workflow = Some(id(2));
        publish(message)
    };
    let open = Op::Open(Open {
        workflow: id(2),
        name: "nightly".to_owned(),
        description: "steps".into(),
        ..Open::default()
    });
    assert_eq!(client.commit(vec![open, job(1), job(2)]), applied());
    let find = |name: &str| {
        let query = WorkflowsQuery {
            name: Some(name.to_owned()),
            ..WorkflowsQuery::default()
        };
        match client.ask(Query::Workflows(query)) {
            Answer::Workflows(page) => page.workflows,
            other => panic!("{other:?}"),
        }
    };
    let found = find("nightly");
    assert_eq!(found.len(), 1, "a workflow is listed");
    assert_eq!(
        (found[0].id, found[0].state),
        (id(2), WorkflowState::Running)
    );
    assert_eq!(find("other"), []);
    let first = worker.take_one();
    assert_eq!(worker.settle(&first, vec![ack(&first)]), applied());
    assert_eq!(find("nightly")[0].jobs.succeeded, 1);
    worker.want(1);
    let second = worker.take_one();
    assert_eq!(worker.settle(&second, vec![ack(&second)]), applied());
    let ended = find("nightly").remove(0);
    assert_eq!(
        (ended.state, ended.jobs.succeeded),
        (WorkflowState::Succeeded, 2)
    );
    assert!(ended.ended_at >= Some(ended.opened_at));
    // A single workflow by its id, with its steps.
    let query = WorkflowsQuery {
        workflow: Some(id(2)),
        nodes: vec![id(1), id(3)],
        ..WorkflowsQuery::default()
    };
    let page = match client.ask(Query::Workflows(query)) {
        Answer::Workflows(page) => page,
        other => panic!("{other:?}"),
    };
    assert_eq!(page.workflows[0].description, "steps");
    assert_eq!(page.nodes, [NodeState::Gone; 2]);
}
