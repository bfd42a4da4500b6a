//! Certainties of the model, and its doubts.

use bytes::Bytes;
use penstock_message::{
    DEFAULT_PRIORITY, Delivery, IdSource, Key, Lease, Message, MessageId, Op, Receipt, SessionId,
    Tx, Value, ValueStatus,
};

use super::Model;
use super::item::{Moment, Time};

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
    let applied = Receipt::applied();
    let moment = Moment {
        grants: (1, 1_000),
        ..Moment::default()
    };
    let verdict = model.decided(number, PRODUCER, &Tx::from(vec![op]), &applied, &moment);
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

/// Sets the wall's clock by this much, and cuts the power before that was on disk.
fn clock_steps_over_a_crash(model: &mut Model, by_ms: u64) {
    model.clock_is_doubtful = true;
    model.clock_is_off_by_ms += by_ms;
    model.restarted(HEARTBEAT_MS);
    model.advance(time(10 * HEARTBEAT_MS));
}

/// Seed 209708 of the soak: a lock whose time was over held again, in a broker whose clock had been set
/// back by weeks just before the power failed.
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

/// Seed 424120 of a soak: a message and its hand-out were lost in a crash, and the message sent again; its
/// worker was told that it may go on, which the next crash took back. The checker was certain of it still.
#[test]
fn a_lease_that_outlived_its_message_may_be_lost_in_the_next_crash() {
    let mut model = Model::default();
    model.advance(time(0));
    let message = message(3);
    let delivery = delivery(message.clone());
    model.seen.insert((delivery.lease, WORKER));
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
