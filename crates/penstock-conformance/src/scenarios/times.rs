//! Promises about time: what is due, expires or comes round does so, whatever happens to the clock on the wall.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use penstock_message::{
    Answer, CatchUp, Due, Durability, KeyState, Message, Op, Overlap, Query, Receipt, Rhythm,
    ScheduleName, SchedulePlan, ScheduleStep, ScheduleTiming, SchedulesQuery, ValueStatus,
};

use super::ENGINE_TICK;
use crate::Bench;
use crate::words::*;

pub(super) fn a_delay_is_kept_by_the_broker(bench: &Bench<'_>) {
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

pub(super) fn what_expires_is_not_handed_out_and_ends_as_expired(bench: &Bench<'_>) {
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

pub(super) fn a_countdown_does_not_follow_the_clock_on_the_wall(bench: &Bench<'_>) {
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

pub(super) fn a_clock_that_is_moved_makes_delayed_jobs_due(bench: &Bench<'_>) {
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

pub(super) fn a_schedule_makes_jobs_until_it_is_removed(bench: &Bench<'_>) {
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
