//! Promises that hold when the engine is killed: what was confirmed, watched or running outlives it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use penstock_driver::DriverError;
use penstock_message::{Due, Durability, KeyState, Op, Receipt};

use super::ids;
use crate::Bench;
use crate::words::*;

pub(super) fn a_watch_outlives_the_broker(bench: &Bench<'_>) {
    let client = bench.client();
    client.commit_at(Durability::Os, vec![publish(message(1))]);
    let states = client.watch(result(1));
    assert_eq!(states.next(), KeyState::Pending);
    bench.kill();
    let worker = bench.client().worker("work", 1);
    let delivery = worker.take_one();
    worker.settle(&delivery, vec![ack(&delivery), put(1, "done")]);
    let end = states.end();
    assert_eq!(plain(end), KeyState::Present(value("done")));
    assert!(states.is_silent(), "it is told once");
}

pub(super) fn what_was_confirmed_outlives_the_broker(bench: &Bench<'_>) {
    let delayed = publish_due(message(2), Some(Due::AfterMs(1)));
    outlives(bench, Durability::Os, delayed);
}

pub(super) fn what_was_confirmed_from_disk_outlives_the_broker(bench: &Bench<'_>) {
    outlives(bench, Durability::Disk, publish(message(2)));
}

fn outlives(bench: &Bench<'_>, durability: Durability, second: Op) {
    let client = bench.client();
    client.commit_at(durability, vec![publish(message(1)), put(7, "kept")]);
    client.commit_at(durability, vec![second]);
    bench.kill();
    assert_eq!(
        plain(client.end_of(result(7))),
        KeyState::Present(value("kept")),
        "what was confirmed is gone"
    );
    let taken: BTreeSet<_> = ids(&client.worker("work", 9).take(2)).into_iter().collect();
    assert_eq!(taken, BTreeSet::from([id(1), id(2)]));
}

/// Commits continue before, during and after the kill, with this many in flight at any time.
pub(super) fn what_was_in_flight_is_applied_once_through_a_kill(bench: &Bench<'_>) {
    const IN_FLIGHT: usize = 300;
    const AT_LEAST: u64 = 3_000;
    let client = bench.client();
    let (confirm, confirmed) = channel();
    let is_over = AtomicBool::new(false);
    let next_is_once = || {
        let outcome: Result<Vec<Receipt>, DriverError> = confirmed
            .recv_timeout(client.patience)
            .expect("every commit is confirmed");
        let receipt = outcome.unwrap().remove(0);
        assert!(
            matches!(receipt, Receipt::Applied { .. } | Receipt::Duplicate),
            "what was sent again ended as {receipt:?}"
        );
    };
    let jobs = thread::scope(|scope| {
        let (mut jobs, mut ended) = (0, 0);
        // Shows that an engine is running and accepts such commits.
        let first = publish(message(u64::MAX));
        client.commit_at(Durability::Os, vec![first]);
        let kill = || {
            let _end = AtEnd(&is_over);
            bench.kill();
        };
        while jobs < AT_LEAST || !is_over.load(Ordering::Acquire) {
            if jobs == IN_FLIGHT as u64 {
                scope.spawn(kill);
            }
            let confirm = confirm.clone();
            let done = Box::new(move |outcome| {
                let _failed_already = confirm.send(outcome);
            });
            let tx = vec![publish(message(jobs))].into();
            client.driver.commit(vec![tx], Durability::Os, None, done);
            jobs += 1;
            if jobs - ended >= IN_FLIGHT as u64 {
                next_is_once();
                ended += 1;
            }
        }
        for _ in ended..jobs {
            next_is_once();
        }
        jobs
    });
    let worker = bench.client().worker("work", jobs as u32 + 2);
    let jobs = jobs as usize + 1;
    let taken: BTreeSet<_> = ids(&worker.take(jobs)).into_iter().collect();
    assert_eq!(taken.len(), jobs);
    worker.client.status();
    assert!(worker.has_nothing());
}

struct AtEnd<'a>(&'a AtomicBool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

pub(super) fn running_work_is_not_handed_out_again_after_a_kill(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
    worker
        .client
        .commit_at(Durability::Os, vec![publish(message(1))]);
    let delivery = worker.take_one();
    // Another worker would accept it.
    let other = bench.client().worker("work", 10);
    other.client.status();
    bench.kill();
    let kept = || worker.leases_kept.recv_timeout(worker.client.patience);
    assert_eq!(kept(), Ok(Vec::new()), "at first there was nothing to keep");
    assert_eq!(kept(), Ok(vec![delivery.lease]), "the lease was lost");
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
