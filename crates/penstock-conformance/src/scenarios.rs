//! Defines the scenarios. Each new promise becomes another one.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use penstock_driver::DriverError;
use penstock_message::Feature::*;
use penstock_message::{
    Answer, Applied, AskQuery, CatchUp, Claim, Condition, Conflict, Delivery, Due, Durability,
    FailedQuery, Failure, Feature, Filter, HeaderPatch, Hold, JoinPolicy, Key, KeyState, Message,
    MessageState, NoReply, NodeState, OnRunning, Op, Open, Overflow, Overlap, ProducingRun, Query,
    QueueLimits, Receipt, Refusal, ReleaseReason, Rhythm, ScheduleName, SchedulePlan, ScheduleStep,
    ScheduleTiming, SchedulesQuery, Scope, Target, TaskSelection, Until, Value, ValueStatus,
    WorkerReport, WorkerState, WorkerStatus, WorkflowState, WorkflowsQuery,
};

use crate::words::*;
use crate::{Ability, Bench, Scenario, TestClient};

/// Smallest unit of an engine's time. A unit that has begun counts in full.
const ENGINE_TICK: Duration = Duration::from_millis(1);

/// Lists the scenarios, and defines the macro that generates a test for each. `$d` is a dollar sign.
macro_rules! scenarios {
    ($d:tt $($name:ident { shows $shows:tt needs $needs:tt $(by $by:tt)? })*) => {
        pub static SCENARIOS: &[Scenario] = &[$(
            Scenario {
                name: stringify!($name),
                shows: {
                    const SHOWS: &[Feature] = &$shows;
                    SHOWS
                },
                needs: {
                    const NEEDS: &[Feature] = &$needs;
                    NEEDS
                },
                abilities: {
                    const ABILITIES: &[Ability] = &[$(Ability::$by)?];
                    ABILITIES
                },
                run: $name,
            },
        )*];

        /// Generates a test for each scenario. The argument creates a fresh [`TestEngine`](crate::TestEngine).
        #[macro_export]
        macro_rules! tests {
            ($d fresh:expr) => {
                $(
                    #[test]
                    fn $name() {
                        $d crate::check(stringify!($name), &$d fresh());
                    }
                )*
            };
        }
    };
}

scenarios! { $
    a_job_is_run_and_acknowledged { shows [] needs [] }
    a_job_is_published_run_and_settled_in_one_step { shows [OneStepSettlement] needs [Values, Pending] }
    a_lease_that_was_lost_changes_nothing { shows [Fencing] needs [Values, Pending] }
    a_transaction_is_applied_whole_or_not_at_all { shows [OneStepSettlement] needs [Dedupe] }
    guards_decide { shows [Keys] needs [OneStepSettlement, Pending] }
    an_id_is_accepted_once { shows [] needs [Dedupe] }
    a_publish_under_a_key_is_skipped_while_the_key_exists { shows [Keys] needs [] }
    a_unique_job_is_one_until_its_key_is_free { shows [Claims] needs [Values, Pending] }
    the_last_of_quick_calls_is_due_in_time { shows [Debounce] needs [Claims, Delays] }
    one_body_goes_to_any_number_of_queues { shows [] needs [] }
    a_delay_is_kept_by_the_broker { shows [Delays] needs [] }
    what_expires_is_not_handed_out_and_ends_as_expired { shows [] needs [Values] }
    higher_priority_goes_first_and_equals_stay_in_order { shows [Priorities] needs [] }
    quick_jobs_are_not_kept_waiting_by_long_ones { shows [FairFlows] needs [] }
    a_retry_keeps_id_and_body_and_counts { shows [] needs [Delays, Values] }
    a_lease_handed_back_burns_no_attempt_and_a_crash_counts { shows [] needs [] }
    a_job_that_is_handed_back_keeps_its_place { shows [KeepsPlace] needs [] }
    a_suspect_is_charged_with_no_crash_and_is_told_of_it { shows [] needs [Values] }
    too_many_crashes_end_the_job { shows [] needs [Values] }
    a_key_is_told_of_when_it_is_there_and_gone_when_it_never_will_be { shows [Pending] needs [Values] }
    a_result_is_kept { shows [Values] needs [] }
    a_join_releases_what_it_holds_once { shows [Joins] needs [] }
    a_watch_outlives_the_broker { shows [] needs [Values, Pending, OsDurability] by Kill }
    what_was_confirmed_outlives_the_broker { shows [OsDurability] needs [Values, Delays] by Kill }
    what_was_confirmed_from_disk_outlives_the_broker { shows [DiskDurability] needs [Values] by Kill }
    what_was_in_flight_is_applied_once_through_a_kill { shows [Dedupe] needs [OsDurability] by Kill }
    running_work_is_not_handed_out_again_after_a_kill { shows [LeasesOfSessions] needs [Values, OsDurability] by Kill }
    a_large_transaction_arrives_whole { shows [] needs [OneStepSettlement, Dedupe, Values, Pending] }
    a_large_body_arrives_whole { shows [] needs [Values] }
    every_durability_is_confirmed { shows [] needs [OsDurability, DiskDurability] }
    a_goodbye_hands_leases_to_others_at_once { shows [] needs [] by SeveralClients }
    a_paused_queue_hands_out_nothing_until_it_is_resumed { shows [Pause] needs [] }
    a_full_queue_refuses_and_takes_again_once_there_is_room { shows [Limits] needs [] }
    a_purge_cancels { shows [Purge] needs [Values] }
    a_failed_job_is_kept_listed_retried_and_dropped { shows [FailedJobs] needs [Values, Inspection, Fencing] }
    a_workflow_is_listed_with_its_jobs { shows [Workflows] needs [] }
    a_schedule_makes_jobs_until_it_is_removed { shows [Schedules] needs [] }
    a_job_is_cancelled_or_it_is_said_why_not { shows [CancelWaiting] needs [Values] }
    a_running_job_that_is_cancelled_ends_and_is_never_run_again { shows [CancelRunning] needs [CancelWaiting, Values, Inspection] }
    an_order_to_stop_outlives_the_broker { shows [] needs [CancelRunning, CancelWaiting, LeasesOfSessions, Values, OsDurability] by Kill }
    a_worker_gets_only_the_tasks_that_it_names { shows [TasksOfConsumers] needs [] }
    a_clock_that_is_moved_makes_delayed_jobs_due { shows [MovableClock] needs [Delays] }
    a_countdown_does_not_follow_the_clock_on_the_wall { shows [SteadyClock] needs [Delays, OsDurability] by SetWallClock }
    the_status_counts_jobs_and_workers { shows [] needs [Delays] }
    the_progress_of_a_running_job_is_told { shows [Progress] needs [] }
    a_worker_is_asked_and_replies { shows [Asks] needs [] }
    a_job_can_be_looked_at { shows [Inspection] needs [Delays] }
    what_a_driver_declares_is_true { shows [] needs [] }
}

fn a_job_is_run_and_acknowledged(bench: &Bench<'_>) {
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

fn a_job_is_published_run_and_settled_in_one_step(bench: &Bench<'_>) {
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

fn a_lease_that_was_lost_changes_nothing(bench: &Bench<'_>) {
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

fn a_transaction_is_applied_whole_or_not_at_all(bench: &Bench<'_>) {
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

fn guards_decide(bench: &Bench<'_>) {
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

fn an_id_is_accepted_once(bench: &Bench<'_>) {
    let client = bench.client();
    assert_eq!(client.commit(vec![publish(message(1))]), applied());
    assert_eq!(
        refusal(client.commit(vec![publish(message(1))])),
        Refusal::AlreadyExists
    );
}

fn a_publish_under_a_key_is_skipped_while_the_key_exists(bench: &Bench<'_>) {
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

fn a_unique_job_is_one_until_its_key_is_free(bench: &Bench<'_>) {
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

fn the_last_of_quick_calls_is_due_in_time(bench: &Bench<'_>) {
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

fn one_body_goes_to_any_number_of_queues(bench: &Bench<'_>) {
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

fn a_delay_is_kept_by_the_broker(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 10);
    let start = Instant::now();
    worker.client.commit(vec![
        publish_due(message(1), Some(Due::AfterMs(300))),
        publish_due(message(2), Some(Due::AfterMs(100))),
        publish_due(message(3), Some(Due::At(1))),
        publish(message(4)),
    ]);
    let order: Vec<_> = worker
        .take(4)
        .iter()
        .map(|delivery| delivery.message.id)
        .collect();
    assert_eq!(order, [id(3), id(4), id(2), id(1)], "a delay was not kept");
    assert!(start.elapsed() + ENGINE_TICK >= Duration::from_millis(300));
}

fn what_expires_is_not_handed_out_and_ends_as_expired(bench: &Bench<'_>) {
    let client = bench.client();
    let expires_at = Some(Due::AfterMs(20));
    client.commit(vec![
        publish(Message {
            expires_at,
            ..message(1)
        }),
        publish(message(2)),
    ]);
    match client.end_of(result(1)) {
        KeyState::Present(value) => assert_eq!(value.status, ValueStatus::Expired),
        other => panic!("{other:?}"),
    }
    assert_eq!(client.worker("work", 10).take_one().message.id, id(2));
}

fn higher_priority_goes_first_and_equals_stay_in_order(bench: &Bench<'_>) {
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

fn a_retry_keeps_id_and_body_and_counts(bench: &Bench<'_>) {
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

fn a_lease_handed_back_burns_no_attempt_and_a_crash_counts(bench: &Bench<'_>) {
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

fn a_suspect_is_charged_with_no_crash_and_is_told_of_it(bench: &Bench<'_>) {
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

fn too_many_crashes_end_the_job(bench: &Bench<'_>) {
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

fn a_key_is_told_of_when_it_is_there_and_gone_when_it_never_will_be(bench: &Bench<'_>) {
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

fn a_result_is_kept(bench: &Bench<'_>) {
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

fn a_watch_outlives_the_broker(bench: &Bench<'_>) {
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

fn what_was_confirmed_outlives_the_broker(bench: &Bench<'_>) {
    let delayed = publish_due(message(2), Some(Due::AfterMs(1)));
    outlives(bench, Durability::Os, delayed);
}

fn what_was_confirmed_from_disk_outlives_the_broker(bench: &Bench<'_>) {
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
fn what_was_in_flight_is_applied_once_through_a_kill(bench: &Bench<'_>) {
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

fn running_work_is_not_handed_out_again_after_a_kill(bench: &Bench<'_>) {
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

fn a_large_transaction_arrives_whole(bench: &Bench<'_>) {
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

fn a_large_body_arrives_whole(bench: &Bench<'_>) {
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

fn every_durability_is_confirmed(bench: &Bench<'_>) {
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

fn a_goodbye_hands_leases_to_others_at_once(bench: &Bench<'_>) {
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

fn a_paused_queue_hands_out_nothing_until_it_is_resumed(bench: &Bench<'_>) {
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

fn a_full_queue_refuses_and_takes_again_once_there_is_room(bench: &Bench<'_>) {
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

fn a_worker_gets_only_the_tasks_that_it_names(bench: &Bench<'_>) {
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
fn quick_jobs_are_not_kept_waiting_by_long_ones(bench: &Bench<'_>) {
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

fn a_job_that_is_handed_back_keeps_its_place(bench: &Bench<'_>) {
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

fn a_join_releases_what_it_holds_once(bench: &Bench<'_>) {
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

fn a_countdown_does_not_follow_the_clock_on_the_wall(bench: &Bench<'_>) {
    const HOUR: Duration = Duration::from_secs(3600);
    let worker = bench.client().worker("work", 10);
    let commit = |op| worker.client.commit_at(Durability::Os, vec![op]);
    let in_an_hour = Due::AfterMs(HOUR.as_millis() as u64);
    commit(publish_due(message(1), Some(in_an_hour)));
    bench.place.set_wall_clock(2 * HOUR);
    let by_the_wall = SystemTime::now() + HOUR;
    let by_the_wall = by_the_wall.duration_since(UNIX_EPOCH).unwrap();
    let at = Due::At(by_the_wall.as_millis() as u64);
    commit(publish_due(message(2), Some(at)));
    assert_eq!(
        worker.take_one().message.id,
        id(2),
        "a countdown followed the clock on the wall"
    );
    worker.client.status();
    assert!(
        worker.has_nothing(),
        "a countdown followed the clock on the wall"
    );
}

fn a_clock_that_is_moved_makes_delayed_jobs_due(bench: &Bench<'_>) {
    const HOUR_MS: u64 = 3_600_000;
    let worker = bench.client().worker("work", 1);
    let in_an_hour = publish_due(message(1), Some(Due::AfterMs(HOUR_MS)));
    worker.client.commit(vec![in_an_hour]);
    let forward_ms = HOUR_MS + 1;
    let by_schedules = false;
    match worker.client.ask(Query::SetClock {
        forward_ms,
        by_schedules,
    }) {
        Answer::Clock(_) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(worker.take_one().message.id, id(1));
}

fn a_purge_cancels(bench: &Bench<'_>) {
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

fn a_failed_job_is_kept_listed_retried_and_dropped(bench: &Bench<'_>) {
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

fn a_workflow_is_listed_with_its_jobs(bench: &Bench<'_>) {
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

fn a_schedule_makes_jobs_until_it_is_removed(bench: &Bench<'_>) {
    let worker = bench.client().worker("work", 2);
    let client = &worker.client;
    let schedule = ScheduleName {
        app: "shop".to_owned(),
        name: "poll".to_owned(),
    };
    let plan = SchedulePlan {
        timing: ScheduleTiming {
            rhythm: Rhythm::Every(1_000),
            zone: "UTC".to_owned(),
            jitter_ms: 0,
        },
        overlap: Overlap::Skip,
        catch_up: CatchUp::Once,
        window_ms: 60_000,
        queue: "work".to_owned(),
        message: message(1),
    };
    let step = |step| {
        let schedule = schedule.clone();
        client.commit(vec![Op::Schedule { schedule, step }])
    };
    let list = || match client.ask(Query::Schedules(SchedulesQuery {
        times: 2,
        ..SchedulesQuery::default()
    })) {
        Answer::Schedules(page) => page.schedules,
        other => panic!("{other:?}"),
    };
    let set = step(ScheduleStep::Set(Box::new(plan.clone())));
    assert_eq!(set, applied());
    let [listed] = &list()[..] else {
        panic!("a schedule is listed");
    };
    assert_eq!((&listed.name, &listed.timing), (&schedule, &plan.timing));
    assert_eq!(listed.next[1] - listed.next[0], 1_000);
    let first = worker.take_one();
    assert_eq!(first.message.body, plan.message.body);
    assert_ne!(first.message.id, plan.message.id);
    // While that job runs, the schedule enqueues no other.
    assert!(matches!(step(ScheduleStep::Run), Receipt::Refused { .. }));
    assert_eq!(step(ScheduleStep::Pause), applied());
    assert!(list()[0].is_paused && list()[0].next.is_empty());
    assert_eq!(worker.settle(&first, vec![ack(&first)]), applied());
    let Receipt::Applied(ran) = step(ScheduleStep::Run) else {
        panic!("it runs at once");
    };
    let second = worker.take_one();
    assert_eq!(ran.owners, [(0, second.message.id)]);
    assert_eq!(client.commit(vec![Op::Unschedule { schedule }]), applied());
    assert_eq!(list(), []);
    assert_eq!(worker.settle(&second, vec![ack(&second)]), applied());
}

fn a_job_is_cancelled_or_it_is_said_why_not(bench: &Bench<'_>) {
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

fn a_running_job_that_is_cancelled_ends_and_is_never_run_again(bench: &Bench<'_>) {
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

fn an_order_to_stop_outlives_the_broker(bench: &Bench<'_>) {
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

fn the_status_counts_jobs_and_workers(bench: &Bench<'_>) {
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

fn the_progress_of_a_running_job_is_told(bench: &Bench<'_>) {
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

fn a_worker_is_asked_and_replies(bench: &Bench<'_>) {
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

fn a_job_can_be_looked_at(bench: &Bench<'_>) {
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

/// Before a driver has seen an engine, it claims at least as much as the engine offers.
fn what_a_driver_declares_is_true(bench: &Bench<'_>) {
    let client = bench.client();
    let said = client.probe().unwrap();
    assert_eq!(*said, bench.capabilities);
    let bound = client.driver.upper_bound();
    let beyond = said.features().minus(bound.features());
    assert_eq!(beyond.first(), None, "it can do more than it can at best");
    assert!(said.highest_durability <= bound.highest_durability);
}

fn ids(taken: &[Delivery]) -> Vec<penstock_message::MessageId> {
    taken.iter().map(|delivery| delivery.message.id).collect()
}

fn named(name: &'static str) -> Key {
    Key::Named(Bytes::from_static(name.as_bytes()))
}

fn release(delivery: &penstock_message::Delivery, reason: ReleaseReason) -> Op {
    Op::Release {
        lease: delivery.lease,
        reason,
    }
}

fn refusal(receipt: Receipt) -> Refusal {
    match receipt {
        Receipt::Refused { why, .. } => why,
        other => panic!("{other:?} is no refusal"),
    }
}
