//! A key is free, taken or told of.

use bytes::Bytes;
use penstock_message::{
    Applied, Claim, Conflict, Due, Key, KeyState, Message, Op, Receipt, Refusal, Scope, Until,
    ValueStatus,
};

use super::{named, refusal};
use crate::Bench;
use crate::words::*;

pub(super) fn a_publish_under_a_key_is_skipped_while_the_key_exists(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
    let unique = |number| Op::Publish {
        queues: vec!["work".into()],
        message: message(number),
        due: None,
        unless_key: Some(named("unique").into()),
    };
    assert_eq!(worker.client.commit(vec![unique(1)]), applied());
    let receipt = worker.client.commit(vec![publish(message(2)), unique(3)]);
    let skipped = Applied {
        skipped: vec![1],
        owners: vec![(1, id(1))],
        ..Applied::default()
    };
    assert_eq!(receipt, Receipt::Applied(skipped), "the key is not heeded");
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

fn claimed(number: u64, until: Until, conflict: Conflict, due: Option<Due>) -> Op {
    let key = Key::Scoped(Scope::Unique, Bytes::from_static(b"unique"));
    Op::Publish {
        queues: vec!["work".into()],
        message: message(number),
        due,
        unless_key: Some(Box::new(Claim {
            key,
            until,
            conflict,
        })),
    }
}

pub(super) fn a_unique_job_is_one_until_its_key_is_free(bench: &Bench<'_>) {
    let client = bench.client();
    let publish =
        |number, until, conflict| client.commit(vec![claimed(number, until, conflict, None)]);
    let skipped = |owner| {
        Receipt::Applied(Applied {
            skipped: vec![0],
            owners: vec![(0, id(owner))],
            ..Applied::default()
        })
    };
    let replace = Conflict::Replace { max_wait_ms: None };
    assert_eq!(publish(1, Until::Started, Conflict::Skip), applied());
    assert_eq!(
        publish(2, Until::Started, Conflict::Skip),
        skipped(1),
        "one job waits"
    );
    let refused = publish(2, Until::Started, Conflict::Refuse);
    assert_eq!(refusal(refused), Refusal::Claimed(id(1)));
    assert_eq!(publish(3, Until::Started, replace), applied());
    let KeyState::Present(replaced) = client.end_of(result(1)) else {
        panic!("it has ended");
    };
    assert_eq!(replaced.status, ValueStatus::Replaced);
    assert_eq!(replaced.body, id(3).0[..]);
    let worker = bench.client().worker("work", 9);
    let taken = worker.take_one();
    assert_eq!(taken.message.id, id(3));
    // The job was handed out, so new calls make another job until it ends.
    assert_eq!(publish(4, Until::Ended, Conflict::Skip), applied());
    worker.settle(&taken, vec![ack(&taken)]);
    assert_eq!(publish(5, Until::Ended, Conflict::Skip), skipped(4));
    let taken = worker.take_one();
    assert_eq!(publish(5, Until::Ended, replace), skipped(4), "it runs");
    worker.settle(&taken, vec![ack(&taken)]);
    // A key with a fixed time outlives its job.
    assert_eq!(
        publish(6, Until::ForMs(3_600_000), Conflict::Skip),
        applied()
    );
    let taken = worker.take_one();
    worker.settle(&taken, vec![ack(&taken)]);
    assert_eq!(publish(7, Until::Ended, Conflict::Skip), skipped(6));
}

pub(super) fn the_last_of_quick_calls_is_due_in_time(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 1);
    let replace = Conflict::Replace {
        max_wait_ms: Some(1_000),
    };
    let publish = |number, after_ms| {
        let due = Some(Due::AfterMs(after_ms));
        let receipt = worker
            .client
            .commit(vec![claimed(number, Until::Started, replace, due)]);
        assert_eq!(receipt, applied());
    };
    publish(1, 300);
    // Its own delay is far longer than the maximum wait, which ends a second after the first call.
    publish(2, 50_000);
    assert_eq!(
        worker.take_one().message.id,
        id(2),
        "the last one runs, in time"
    );
}

pub(super) fn a_key_is_told_of_when_it_is_there_and_gone_when_it_never_will_be(bench: &Bench<'_>) {
    let client = bench.client();
    assert_eq!(
        client.watch(result(9)).next(),
        KeyState::Gone,
        "there never will be one"
    );
    // Its result is not stored, so no client can wait for it after it has run.
    let forgetful = Message {
        result_ttl_ms: None,
        ..message(2)
    };
    client.commit(vec![publish(forgetful)]);
    let states = client.watch(result(2));
    assert_eq!(states.next(), KeyState::Pending);
    let worker = client.worker("work", 1);
    let delivery = worker.take_one();
    worker.settle(&delivery, vec![ack(&delivery)]);
    assert_eq!(states.next(), KeyState::Gone);
}
