//! Cancelled running jobs: their worker is asked to stop them, and they end as cancelled whatever it does then.

use crate::script::{ScriptWorld, check};
use penstock_broker::BrokerOptions;

#[test]
fn a_running_job_is_asked_to_stop_once_that_is_on_disk() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two           -> a confirm 2
        w consume default 2                 -> w deliver one two
        a watch one                         -> a sees one pending
        a info one                          -> a knows Running in default attempt 0 crashes 0 at w
        stall                               ->
        a cancel one ask reason=why         ->
        sync                                -> a confirm 3 3:Cancelling, w stop one (why)
        a info one                          -> a knows Cancelling in default attempt 0 crashes 0 at w
        # When asked again, its worker only learns what is new.
        a cancel one ask reason=other       -> a confirm 4 4:Cancelling
        a cancel one kill reason=other      -> a confirm 5 5:Cancelling, w stop one! (why)
        a cancel one ask                    -> a confirm 6 6:Cancelling
        # It is spared, except from requests that name it.
        a cancel one                        -> a confirm 7 7:refused 0 TooLate(Cancelling)
        a cancel two                        -> a confirm 8 8:refused 0 TooLate(Running)
        a cancel nobody ask                 -> a confirm 9 9:refused 0 NoSuchJob
        w return one                        -> w confirm 1, a sees one Cancelled why
        a cancel one ask                    -> a confirm 10 10:refused 0 NoSuchJob
        w fail two                          -> w confirm 2
        a cancel two kill                   -> a confirm 11 11:refused 0 TooLate(Failed)
        ",
    );
}

/// Actions of a worker that was asked to stop the job `m`, and the result that a watcher then sees.
const OUTCOMES: [(&str, &str); 8] = [
    ("w ack m; put m yes", "Succeeded yes"),
    ("w return m", "Cancelled why"),
    ("w crash m reason=boom", "Cancelled why"),
    ("w suspect m reason=boom", "Cancelled why"),
    ("w move m next note=first", "Cancelled why"),
    ("w move m after=50 note=first", "Cancelled why"),
    ("w fail m", "Cancelled why"),
    ("w bye", "Cancelled why"),
];

#[test]
fn a_job_that_was_asked_to_stop_ends_whatever_its_worker_does_and_keeps_its_success() {
    for (outcome, value) in OUTCOMES {
        for crash in ["# No crash.", "kill", "power-cut"] {
            let is_there = crash.starts_with('#');
            let (again, seen) = match is_there {
                true => ("# No hello.", "# It is watched."),
                // The order is sent again to the holder of the lease.
                false => (
                    "w hello m -> w welcome 0 m, w stop m (why)",
                    "b hello -> b welcome 0",
                ),
            };
            let confirm = match outcome {
                "w bye" => String::new(),
                _ => "w confirm 1, ".to_owned(),
            };
            let end = match is_there {
                true => format!("{outcome} -> {confirm}a sees m {value}"),
                false => format!("{outcome} -> {}", confirm.trim_end_matches(", ")),
            };
            let after = if is_there { "after" } else { "after!" };
            check(&format!(
                "
                a hello                     -> a welcome 0
                w hello                     -> w welcome 0
                a publish m deliveries=2 unless=k  -> a confirm 1
                a hold any count=1 messages=after all-ended; publish n member=any:0  -> a confirm 2
                w consume default 1         -> w deliver m
                a watch m                   -> a sees m pending
                a cancel m ask reason=why   -> a confirm 3 3:Cancelling, w stop m (why)
                carry                       ->
                {crash}                     ->
                {again}
                {end}
                {seen}
                c hello                     -> c welcome 0
                c watch m                   -> c sees m {value}
                c guard k absent            -> c confirm 1
                # It never runs again.
                c pause default             -> c confirm 2
                c consume default 9         ->
                c cancel n                  -> c confirm 3 3:Ready
                c resume default            -> c confirm 4, c deliver {after}
                wait 100                    ->
                "
            ));
        }
    }
}

#[test]
fn an_order_waits_for_the_worker_to_come_back_and_for_the_delivery_to_leave() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish other         -> a confirm 2
        w consume default 1                 -> w deliver one
        a cancel other                      -> a confirm 3 3:Ready
        w lost                              ->
        a cancel one kill                   -> a confirm 4 4:Cancelling
        w hello one                         -> w welcome 0 one, w stop one! (it was cancelled)
        w lost                              ->
        w hello one                         -> w welcome 0 one, w stop one! (it was cancelled)
        # A worker that does not present the lease has stopped cleanly.
        w lost                              ->
        w hello                             -> w welcome 0
        a info one                          -> a knows nothing
        stall                               ->
        a publish two                       ->
        w consume default 1                 ->
        a cancel two ask                    ->
        sync                                -> a confirm 6 6:Cancelling, w deliver two, w stop two (it was cancelled)
        ",
    );
}

#[test]
fn a_job_whose_worker_is_lost_after_it_was_asked_to_stop_has_ended() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two deliveries=1  -> a confirm 2
        w consume default 2                 -> w deliver one two
        a watch one two                     -> a sees one pending, a sees two pending
        a cancel one ask | cancel two ask   -> a confirm 4 3:Cancelling 4:Cancelling, w stop one (it was cancelled) two (it was cancelled)
        w lost                              ->
        wait 16000                          -> a sees two Cancelled it was cancelled, a sees one Cancelled it was cancelled
        counts                              -> queue default enqueued2+started2+cancelled2 lately, task task enqueued2+started2+cancelled2 lately
        b hello                             -> b welcome 0
        b consume default 9                 ->
        ",
    );
}

#[test]
fn jobs_that_run_are_asked_by_filter_too() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one task=x|publish two task=y|publish three task=x queue=other|publish four task=x after=9  -> a confirm 4
        w consume default+other 3           -> w deliver one three@other two
        a cancel all task=x queue=default ask reason=why  -> a confirm 5 5:operation-1, w stop one (why)
        a operation 1                       -> a operation 2/1/0 asked 1 over
        a cancel all kill                   -> a confirm 6 6:operation-2, w stop one! (why) two! (it was cancelled) three! (it was cancelled)
        a operation 2                       -> a operation 3/0/0 asked 3 over
        kill                                ->
        w hello one two                     -> w welcome 0 one two, w stop one! (why) two! (it was cancelled)
        wait 16000                          ->
        a hello last=6                      -> a welcome 4, a confirm 6 5:operation-1 6:operation-2
        a info three                        -> a knows nothing
        ",
    );
}

/// An operation under way asks a job to stop that a retry would put out of its reach, with a new number.
#[test]
fn a_retry_does_not_escape_an_operation_under_way() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two|publish three  -> a confirm 3
        w consume default 2                 -> w deliver one two
        a watch one                         -> a sees one pending
        disk no-settlements                 -> notice: NoSettlements
        a cancel all ask reason=why         -> a confirm 4 4:operation-1
        w move one next note=first          -> w confirm 1, a sees one Cancelled why
        a operation 1                       -> a operation 1/0/0 asked 1
        disk plenty                         -> notice: Plenty, w stop two (why)
        a operation 1                       -> a operation 3/1/0 asked 2 over
        ",
    );
}

/// A purge is for waiting jobs, and a group's held messages do not wait yet: they are released behind the purge, with
/// new numbers. In an earlier version that put them out of reach of an operation that cancelled them, and they ran
/// after the confirmed cancellation.
#[test]
fn messages_released_behind_a_purge_do_not_escape_a_cancellation() {
    for cancel in ["queue=default", "workflow=next"] {
        for between in ["", "kill", "carry\n kill"] {
            check(&format!(
                "
                a hello                             -> a welcome 0
                a hold join count=1 messages=next workflow=next|publish one  -> a confirm 2
                disk no-settlements                 -> notice: NoSettlements
                a purge default|cancel all {cancel}|join join index=0  -> a confirm 5 3:operation-1 4:operation-2
                disk plenty                         -> notice: Plenty
                {between}
                b hello                             -> b welcome 0
                b info next                         -> b knows nothing
                w hello                             -> w welcome 0
                w consume default 9                 ->
                "
            ));
        }
    }
}

/// Seed 7 of the simulator: an operation by filter continues in steps. Jobs that the steps had not reached were handed
/// out after the operation was decided, and even after it was confirmed. `cancel()` promises that none of them starts.
#[test]
fn no_job_starts_that_an_operation_under_way_cancels() {
    const JOBS: usize = 5_000;
    let mut world = ScriptWorld::new(BrokerOptions::default());
    for line in [
        "a hello",
        "w hello",
        "a pause default",
        "w consume default 10",
    ] {
        world.run(line);
    }
    let publishes: Vec<String> = (0..JOBS)
        .map(|number| format!("publish m{number} task=x"))
        .collect();
    world.run(&format!("a {}", publishes.join("; ")));
    // The workers get credit before the operation has taken its first step.
    let said = world.run("a cancel all task=x; resume default; publish after task=x");
    assert!(said.contains(&"w deliver after".to_owned()), "{said:?}");
    assert_eq!(
        world.run("a operation 1"),
        [format!("a operation {JOBS}/{JOBS}/0 over")]
    );
    world.check_recovery();
}

/// A running job was to be spared while others of its queue were cancelled. It was cancelled if it returned before the
/// steps of the operation had reached it.
#[test]
fn a_running_job_that_is_left_alone_may_come_back_while_the_operation_goes_on() {
    for (back, again) in [
        ("return", "one!"),
        ("crash", "one!~1"),
        ("suspect", "one!~1"),
    ] {
        check(&format!(
            "
            a hello                             -> a welcome 0
            w hello                             -> w welcome 0
            a publish one|publish two|publish three  -> a confirm 3
            w consume default 2                 -> w deliver one two
            disk no-settlements                 -> notice: NoSettlements
            a cancel all                        -> a confirm 4 4:operation-1
            w {back} one                        -> w confirm 1
            a operation 1                       -> a operation 1/0/1
            disk plenty                         -> notice: Plenty
            a operation 1                       -> a operation 3/1/2 over
            w consume default 9                 -> w deliver {again}
            "
        ));
    }
}
