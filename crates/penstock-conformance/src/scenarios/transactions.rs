//! A transaction is applied whole, once, and as safely as it asked for.

use bytes::Bytes;
use penstock_message::{Condition, Durability, KeyState, Message, Op, Receipt, Refusal};

use super::{named, refusal};
use crate::Bench;
use crate::words::*;

pub(super) fn a_transaction_is_applied_whole_or_not_at_all(bench: &Bench<'_>) {
    let client = bench.client();
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
    assert_eq!(taken, [id(1), id(4)], "what was refused is there");
}

pub(super) fn guards_decide(bench: &Bench<'_>) {
    let client = bench.client();
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

pub(super) fn an_id_is_accepted_once(bench: &Bench<'_>) {
    let client = bench.client();
    assert_eq!(client.commit(vec![publish(message(1))]), applied());
    assert_eq!(
        refusal(client.commit(vec![publish(message(1))])),
        Refusal::AlreadyExists
    );
}

pub(super) fn a_large_transaction_arrives_whole(bench: &Bench<'_>) {
    const JOBS: u64 = 40;
    let client = bench.client();
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

pub(super) fn every_durability_is_confirmed(bench: &Bench<'_>) {
    let client = bench.client();
    for (number, durability) in [Durability::None, Durability::Os, Durability::Disk]
        .into_iter()
        .enumerate()
    {
        let ops = vec![publish(message(number as u64))];
        assert_eq!(client.commit_at(durability, ops), applied());
    }
    assert_eq!(client.worker("work", 10).take(3).len(), 3);
}
