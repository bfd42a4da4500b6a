//! Tests what the model is certain of, and what it doubts.

use bytes::Bytes;
use penstock_message::{
    DEFAULT_PRIORITY, Delivery, Failure, Filter, Hold, IdSource, InputShape, InputValue,
    InputValues, Inputs, JoinPolicy, Key, Lease, Member, Message, MessageId, OnRunning, Op,
    Receipt, ReleaseReason, SessionId, Target, Tx, Value, ValueStatus,
};

use super::Model;
use super::item::{Moment, Run, Time};
use crate::work::made_of;

const PRODUCER: SessionId = SessionId([1; 16]);
const WORKER: SessionId = SessionId([2; 16]);
const HEARTBEAT_MS: u64 = 1_000;
const MONTH_MS: u64 = 30 * 24 * 3_600_000;
const BEGINNING_MS: u64 = 1_800_000_000_000;

fn time(ms: u64) -> Time {
    Time {
        steady: BEGINNING_MS + ms,
        wall: BEGINNING_MS + ms,
    }
}

fn decided(model: &mut Model, number: u64, op: Op) {
    decided_for(PRODUCER, model, number, vec![op]);
}

fn decided_for(session: SessionId, model: &mut Model, number: u64, ops: Vec<Op>) {
    let applied = Receipt::applied();
    let moment = Moment {
        grants: (1, 1_000),
        ..Moment::default()
    };
    let verdict = model.decided(number, session, &Tx::from(ops), &applied, &moment);
    verdict.expect("it may be applied");
}

fn message(max_deliveries: u8) -> Message {
    Message {
        id: MessageId::new(IdSource {
            unix_ms: BEGINNING_MS,
            random: [7; 10],
        }),
        task: "shop.send".to_string(),
        priority: DEFAULT_PRIORITY,
        expires_at: None,
        result_ttl_ms: None,
        max_deliveries,
        attempt: 0,
        crashes: 0,
        enqueued_at: 0,
        notes: Vec::new(),
        body: Bytes::new(),
        extras: None,
    }
}

fn publish(message: &Message) -> Op {
    Op::Publish {
        queues: vec!["default".to_string()],
        message: message.clone(),
        due: None,
        unless_key: None,
    }
}

/// Returns the first hand-out of this message.
fn delivery(message: Message) -> Delivery {
    Delivery {
        consumer: 0,
        lease: Lease {
            message: message.id,
            epoch: 1,
            grant: 1,
        },
        queue: "default".to_string(),
        redelivered: false,
        message,
        inputs: bytes::Bytes::new(),
        deadline: None,
    }
}

/// Sets the wall clock by this much, and cuts the power before that reaches the disk.
fn clock_steps_over_a_crash(model: &mut Model, by_ms: u64) {
    model.clock_is_doubtful = true;
    model.clock_is_off_by_ms += by_ms;
    model.restarted(HEARTBEAT_MS);
    model.advance(time(10 * HEARTBEAT_MS));
}

/// Seed 209708 of the soak: an expired lock held again in a broker whose clock had been set back by weeks just before
/// the power failed.
#[test]
fn a_value_whose_time_is_over_may_be_back_when_the_clock_has_stepped_over_a_crash() {
    let mut model = Model::default();
    model.advance(time(0));
    let key = Key::Named(Bytes::from_static(b"lock"));
    let put = Op::Put {
        key: key.clone(),
        value: Value::new(ValueStatus::Succeeded, Bytes::new()),
        ttl_ms: Some(1_000),
        group: "locks".to_string(),
    };
    decided(&mut model, 1, put);
    assert_eq!(model.key_exists(&key), Some(true));
    model.advance(time(5_000));
    model.quiet(false);
    assert_eq!(model.key_exists(&key), Some(false));
    clock_steps_over_a_crash(&mut model, MONTH_MS);
    assert_eq!(model.key_exists(&key), None);
}

/// Seed 424120 of a soak: a message and its hand-out were lost in a crash, and the message was sent again. Its worker
/// was allowed to continue, which the next crash took back. The checker was still certain of it.
#[test]
fn a_lease_that_outlived_its_message_may_be_lost_in_the_next_crash() {
    let mut model = Model::default();
    model.advance(time(0));
    let message = message(3);
    let delivery = delivery(message.clone());
    let run = Run::from(&delivery.message);
    model.seen.insert((delivery.lease, WORKER), run);
    decided(&mut model, 1, publish(&message));
    model.restarted(HEARTBEAT_MS);
    let welcome = |model: &mut Model, named: &[Lease]| {
        model.hello(WORKER, HEARTBEAT_MS, &[delivery.lease]);
        model.welcomed(WORKER, named)
    };
    assert_eq!(welcome(&mut model, &[delivery.lease]), Ok(()));
    assert!(welcome(&mut model.clone(), &[]).is_err(), "it held");
    model.left(WORKER, false);
    model.restarted(HEARTBEAT_MS);
    assert_eq!(welcome(&mut model, &[]), Ok(()));
}

/// Hands the message out, and reports this outcome.
fn runs(model: &mut Model, number: u64, delivery: &Delivery, outcome: fn(Lease) -> Op) {
    let verdict = model.delivered(WORKER, delivery);
    verdict.expect("it may be handed out");
    decided_for(WORKER, model, number, vec![outcome(delivery.lease)]);
}

fn ack(lease: Lease) -> Op {
    Op::Ack { lease, cost_us: 0 }
}

/// Seed 5071 of a soak: a job was replaced by another, a worker ran the replacement, and a crash undid the replacement.
/// The worker came back with its lease, so the value of the second job became the result of the first.
#[test]
fn a_job_whose_replacement_was_lost_may_have_the_result_of_the_other() {
    let original = message(3);
    let heir = Message {
        task: "shop.merge".to_string(),
        ..message(3)
    };
    let evaluated = |has_run: Message| {
        let mut model = Model::default();
        model.advance(time(0));
        decided(&mut model, 1, publish(&original));
        model.lenient = true;
        runs(&mut model, 2, &delivery(has_run), ack);
        model.evaluated(original.id)
    };
    assert_eq!(evaluated(heir), None);
    assert_eq!(
        evaluated(original.clone()),
        Some(made_of(&original.task, 0, None))
    );
}

#[test]
fn what_a_group_holds_waits_for_its_members_until_they_have_ended() {
    let mut model = Model::default();
    model.advance(time(0));
    let join = MessageId::new_join(IdSource {
        unix_ms: BEGINNING_MS,
        random: [1; 10],
    });
    let body = message(3);
    let mut member = message(3);
    member.id = MessageId::member(join, 0);
    member.extras.get_or_insert_default().member = Some(Member { join, index: 0 });
    let hold = Op::Hold(Hold {
        join,
        count: 1,
        messages: vec![("default".to_string(), body.clone())],
        ..Hold::default()
    });
    decided_for(PRODUCER, &mut model, 1, vec![hold, publish(&member)]);
    let waits = |model: &Model| {
        let (surely, perhaps) = (
            model.surely_waits_for(body.id),
            model.perhaps_waits_for(body.id),
        );
        (surely == [member.id], perhaps == [member.id])
    };
    assert_eq!(waits(&model), (true, true));
    runs(&mut model, 2, &delivery(member.clone()), ack);
    // A refusal may be on its way.
    assert_eq!(waits(&model), (false, true));
    model.quiet(false);
    assert_eq!(waits(&model), (false, false));
}

/// Seed 5199 of a soak: a group that tolerates a failure continued without a nested group, whose failed job a person
/// retried later.
#[test]
fn a_group_may_have_gone_on_without_what_was_retried_within_another() {
    let join = |random| {
        MessageId::new_join(IdSource {
            unix_ms: BEGINNING_MS,
            random: [random; 10],
        })
    };
    let (outer, inner) = (join(1), join(2));
    let mut model = Model::default();
    model.advance(time(0));
    let mut body = message(3);
    let shape = InputShape::List;
    body.extras.get_or_insert_default().inputs = Some(Inputs { join: outer, shape });
    let mut member = message(3);
    member.id = MessageId::member(inner, 0);
    member.extras.get_or_insert_default().member = Some(Member {
        join: inner,
        index: 0,
    });
    let tolerant = Op::Hold(Hold {
        join: outer,
        count: 1,
        messages: vec![("default".to_string(), body.clone())],
        policy: JoinPolicy::UpTo(1),
        ..Hold::default()
    });
    let within = Op::Hold(Hold {
        join: inner,
        count: 1,
        then: vec![Member {
            join: outer,
            index: 0,
        }],
        ..Hold::default()
    });
    decided_for(
        PRODUCER,
        &mut model,
        1,
        vec![tolerant, within, publish(&member)],
    );
    let fails = |lease| Op::Fail {
        lease,
        value: None,
        note: Bytes::new(),
        failure: Failure::default(),
        cost_us: 0,
    };
    runs(&mut model, 2, &delivery(member.clone()), fails);
    let mut given = delivery(body.clone());
    let values = InputValues {
        join: outer,
        count: 1,
        values: Some(vec![InputValue::Of(ValueStatus::Upstream, Bytes::new())]),
    };
    let mut inputs = Vec::new();
    values.encode_into(&mut inputs);
    given.inputs = inputs.into();
    runs(&mut model, 3, &given, ack);
    let retry = Op::RetryFailed {
        target: Target::Job(member.id),
        queue: None,
    };
    decided(&mut model, 4, retry);
    member.attempt = 1;
    member.notes = vec![Bytes::new()];
    let mut again = delivery(member);
    again.lease.grant = 2;
    runs(&mut model, 5, &again, ack);
    assert_eq!(model.evaluated(body.id), None);
}

/// Seed 12515 of a soak: a run so busy that it had no quiet moment. When the model first learned of an early purge, the
/// purged messages had ended and their results had expired.
#[test]
fn the_result_of_an_end_that_was_seen_late_may_be_over_earlier() {
    let mut model = Model::default();
    model.advance(time(0));
    let mut early = message(3);
    early.result_ttl_ms = Some(1_000);
    decided(&mut model, 1, publish(&early));
    model.advance(time(100));
    let queue = "default".to_string();
    decided(&mut model, 2, Op::Purge { queue });
    model.advance(time(60_000));
    model.quiet(false);
    let key = Key::Result(early.id);
    let stored = model.value(&key).expect("it may be there").clone();
    assert_eq!(stored.status, ValueStatus::Cancelled);
    // The purge was decided at 100 ms.
    let may_be_over = |model: &mut Model, ms| {
        model.advance(time(ms));
        model.may_be_over(&stored)
    };
    assert!(may_be_over(&mut model, 60_000));
    assert_eq!(stored.until, Some(BEGINNING_MS + 61_000));
    assert_eq!(stored.late_ms, 59_900);
}

/// Seed 62593 of a soak: all jobs of a workflow were cancelled while a failed group blocked one, and then the failed
/// member was retried. The broker reached that job only after it was waiting again.
#[test]
fn a_blocked_job_that_is_cancelled_with_many_may_be_retried_before() {
    let mut model = Model::default();
    model.advance(time(0));
    let join = MessageId::new_join(IdSource {
        unix_ms: BEGINNING_MS,
        random: [1; 10],
    });
    let mut body = message(3);
    body.task = "shop.merge".to_string();
    body.result_ttl_ms = Some(MONTH_MS);
    let mut member = message(3);
    member.id = MessageId::member(join, 0);
    member.extras.get_or_insert_default().member = Some(Member { join, index: 0 });
    let hold = Op::Hold(Hold {
        join,
        count: 1,
        messages: vec![("default".to_string(), body.clone())],
        ..Hold::default()
    });
    decided_for(PRODUCER, &mut model, 1, vec![hold, publish(&member)]);
    let fails = |lease| Op::Fail {
        lease,
        value: None,
        note: Bytes::new(),
        failure: Failure::default(),
        cost_us: 0,
    };
    runs(&mut model, 2, &delivery(member.clone()), fails);
    model.advance(time(1_000));
    model.quiet(false);
    let cancel = |model: &mut Model| {
        let filter = Filter {
            task: Some(body.task.clone()),
            ..Filter::default()
        };
        let verdict = model.cancel_many(&filter, OnRunning::Leave, Some(1));
        verdict.expect("it has a number");
    };
    let retry = || Op::RetryFailed {
        target: Target::Job(member.id),
        queue: None,
    };
    let key = Key::Result(body.id);
    let may_be_cancelled = |model: &Model| model.may_be_cancelled(&key, ValueStatus::Cancelled);
    // At the next quiet moment, it has ended as ordered.
    let mut quiet = model.clone();
    cancel(&mut quiet);
    assert!(!may_be_cancelled(&quiet));
    quiet.quiet(false);
    decided(&mut quiet, 3, retry());
    assert!(!may_be_cancelled(&quiet));
    cancel(&mut model);
    decided(&mut model, 3, retry());
    assert!(may_be_cancelled(&model));
}

/// Seed 4687: after a crash the story is replayed, and it kept only the end of eight seconds in which nothing happened.
/// A job whose worker was lost early in that time seemed to start too soon after its second crash.
#[test]
fn a_worker_is_lost_when_its_heartbeat_is_over_and_not_when_somebody_looks() {
    let started_at = |ms| {
        let mut model = Model::default();
        model.advance(time(0));
        model.hello(WORKER, HEARTBEAT_MS, &[]);
        let mut job = message(4);
        decided(&mut model, 1, publish(&job));
        let crash = |lease| Op::Release {
            lease,
            reason: ReleaseReason::Crashed(String::new()),
        };
        runs(&mut model, 2, &delivery(job.clone()), crash);
        job.crashes = 1;
        job.notes = vec![Bytes::new()];
        job.extras.get_or_insert_default().suspects = 1;
        let mut again = delivery(job);
        again.redelivered = true;
        again.lease.grant = 2;
        model.delivered(WORKER, &again).expect("it waits");
        model.left(WORKER, false);
        // Nothing happens for a while, and then it is handed out.
        model.advance(time(ms));
        again.message.crashes = 2;
        again.lease.grant = 3;
        model.delivered(PRODUCER, &again)
    };
    assert!(started_at(HEARTBEAT_MS + 999).is_err());
    assert_eq!(started_at(HEARTBEAT_MS + 1_000), Ok(()));
}
