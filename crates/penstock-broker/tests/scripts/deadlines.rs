//! Deadlines of workflows: case 29. `g/` is a join, `g/0` its first member.

use penstock_broker::BrokerOptions;

use crate::script::{ScriptWorld, check};

const NOTHING: &str = "# No crash.";

/// Its waiting, delayed and held jobs end, and running ones are asked to stop.
#[test]
fn a_workflow_is_cancelled_at_its_deadline() {
    for (between, delivered) in [
        (NOTHING, "w deliver g/0:by50"),
        ("carry", "w deliver g/0:by50"),
        ("kill", "w deliver g/0!:by50"),
    ] {
        for deadline in ["deadline=50", "deadline-at=50"] {
            check(&format!(
                "
                a hello                                     -> a welcome 0
                a open g/ {deadline}; hold g/ count=3 messages=body inputs=list workflow=g/; publish g/0 member=g/:0 workflow=g/; publish g/1 member=g/:1 workflow=g/ after=1000; publish g/2 member=g/:2 workflow=g/ queue=slow -> a confirm 1
                a open c1; publish c1 workflow=c1 queue=slow; publish other queue=slow -> a confirm 2
                {between}
                w hello                                     -> w welcome 0
                w consume default 9                         -> {delivered}
                wait 49                                     ->
                wait 1                                      -> w stop g/0 (the deadline of its workflow has passed)
                w watch g/1 g/2 body c1 other -> w sees g/1 Cancelled the deadline of its workflow has passed, w sees g/2 Cancelled the deadline of its workflow has passed, w sees body Cancelled the deadline of its workflow has passed, w sees c1 pending, w sees other pending
                w workflows                                 -> w workflows g/:nightly:cancelled:running1+cancelled3:by50 c1:nightly:running:waiting1
                w return g/0                                -> w confirm 1
                w watch g/0                                 -> w sees g/0 Cancelled the deadline of its workflow has passed
                {between}
                b hello                                     -> b welcome 0
                b workflows of=g/                           -> b workflows g/:nightly:cancelled:cancelled4-over:a|b:by50
                "
            ));
        }
    }
}

#[test]
fn a_deadline_that_passes_while_no_broker_runs_counts() {
    for deadline in ["deadline=50", "deadline-at=50"] {
        for carry in [NOTHING, "carry"] {
            check(&format!(
                "
                a hello                                     -> a welcome 0
                a open c1 {deadline}; publish c1 workflow=c1 -> a confirm 1
                {carry}
                killed-for 60 wall 0                        ->
                w hello                                     -> w welcome 0
                w consume default 1                         ->
                w workflows                                 -> w workflows c1:nightly:cancelled:cancelled1-over:by50
                "
            ));
        }
    }
}

#[test]
fn no_job_of_a_workflow_starts_if_its_deadline_has_already_passed() {
    check(
        "
        w hello                                             -> w welcome 0
        w consume default 9                                 ->
        wait 100                                            ->
        a hello                                             -> a welcome 0
        a open c1 deadline-at=50; publish c1 workflow=c1|open c2 deadline=0; publish c2 workflow=c2 -> a confirm 2
        a workflows -> a workflows c2:nightly:cancelled:cancelled1-over:by100 c1:nightly:cancelled:cancelled1-over:by50
        ",
    );
}

/// An idle worker is about to get the first job of a chain when its deadline passes. The jobs behind it have the result
/// "cancelled", and not "blocked" by it.
#[test]
fn all_steps_of_a_chain_end_as_cancelled() {
    check(
        "
        w hello                                             -> w welcome 0
        w consume default 9                                 ->
        a hello                                             -> a welcome 0
        a open c/ deadline=0; hold u/ count=1; hold d/ count=1 messages=c/ member=u/:0 workflow=c/; hold b/ count=1 messages=d/0 member=d/:0 workflow=c/; publish b/0 member=b/:0 workflow=c/ -> a confirm 1
        a watch b/0 d/0 c/ -> a sees b/0 Cancelled the deadline of its workflow has passed, a sees d/0 Cancelled the deadline of its workflow has passed, a sees c/ Cancelled the deadline of its workflow has passed
        ",
    );
}

/// Any number of messages may wait for one job, because they end in steps.
#[test]
fn any_number_of_messages_waits_for_a_job_that_is_cancelled() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    for line in ["a hello", "w hello", "w consume default 10"] {
        world.run(line);
    }
    let held: Vec<String> = (0..5_000).map(|number| format!("m{number}")).collect();
    world.run(&format!(
        "a open c1 deadline=0; hold g/ count=1 messages={} workflow=c1; publish g/0 member=g/:0 workflow=c1",
        held.join("+")
    ));
    assert_eq!(world.run("a operation 1"), ["a operation 5001/5001/0 over"]);
    world.check_recovery();
}

/// Errbacks also handle this kind of failure.
#[test]
fn errbacks_run_after_a_deadline() {
    for between in [
        NOTHING,
        "carry\nkill\nw hello g/0 -> w welcome 0 g/0, w stop g/0 (the deadline of its workflow has passed)\nw consume default 8 -> w deliver rescue![Upstream:g/1] other![Upstream:h/0]",
    ] {
        check(&format!(
            "
            a hello                                         -> a welcome 0
            w hello                                         -> w welcome 0
            a open g/ deadline=50; hold g/ count=2 messages=rescue inputs=list when=failed workflow=g/; publish g/0 member=g/:0 workflow=g/; publish g/1 member=g/:1 workflow=g/ queue=slow -> a confirm 1
            a open h/ deadline=50; hold h/ count=1 messages=other inputs=list when=failed workflow=h/; publish h/0 member=h/:0 workflow=h/ queue=slow -> a confirm 2
            w consume default 9                             -> w deliver g/0:by50
            wait 50                                         -> w stop g/0 (the deadline of its workflow has passed), w deliver rescue[Upstream:g/1] other[Upstream:h/0]
            {between}
            "
        ));
    }
}

/// An ended workflow has nothing left to cancel. If a person makes it continue, it no longer has a deadline.
#[test]
fn a_workflow_that_continues_after_its_deadline_is_not_cancelled() {
    for between in [
        NOTHING,
        "carry",
        "kill\nw hello c1 -> w welcome 1 c1",
        "carry\nkill\nw hello c1 -> w welcome 1 c1",
    ] {
        check(&format!(
            "
            a hello                                         -> a welcome 0
            w hello                                         -> w welcome 0
            w consume default 9                             ->
            a open c1 deadline=50; publish c1 workflow=c1   -> a confirm 1, w deliver c1:by50
            w fail c1 boom                                  -> w confirm 1
            wait 60                                         ->
            a retry c1                                      -> a confirm 2 2:Failed, w deliver c1#1
            a open c2 deadline=10; publish c2 workflow=c2 queue=slow -> a confirm 3
            wait 10                                         ->
            {between}
            b hello                                         -> b welcome 0
            b workflows -> b workflows c2:nightly:cancelled:cancelled1-over:by70 c1:nightly:running:running1:by50
            "
        ));
    }
}

#[test]
fn a_retry_before_the_deadline_does_not_lift_it() {
    for between in [NOTHING, "carry", "kill\nw hello c1 -> w welcome 1 c1"] {
        check(&format!(
            "
            a hello                                         -> a welcome 0
            w hello                                         -> w welcome 0
            w consume default 9                             ->
            a open c1 deadline=50; publish c1 workflow=c1   -> a confirm 1, w deliver c1:by50
            w fail c1 boom                                  -> w confirm 1
            wait 40                                         ->
            a retry c1                                      -> a confirm 2 2:Failed, w deliver c1#1:by50
            {between}
            wait 10                                         -> w stop c1 (the deadline of its workflow has passed)
            "
        ));
    }
}

/// A job that a person retries after the deadline has a new number, and other workflows' deadlines do not concern it.
#[test]
fn a_job_that_is_retried_after_the_deadline_runs() {
    for between in [NOTHING, "carry", "kill\nw hello g/0 -> w welcome 1 g/0"] {
        check(&format!(
            "
            a hello                                         -> a welcome 0
            w hello                                         -> w welcome 0
            w consume default 9                             ->
            a open g/ deadline=50; hold g/ count=2 workflow=g/; publish g/0 member=g/:0 workflow=g/; publish g/1 member=g/:1 workflow=g/ queue=slow -> a confirm 1, w deliver g/0:by50
            w fail g/0 boom                                 -> w confirm 1
            wait 50                                         ->
            a retry g/0                                     -> a confirm 2 2:Failed, w deliver g/0#1
            {between}
            b hello                                         -> b welcome 0
            b open c2 deadline=10; publish c2 workflow=c2 queue=slow -> b confirm 1
            wait 10                                         ->
            b workflows -> b workflows g/:nightly:running:running1+cancelled1:by50 c2:nightly:cancelled:cancelled1-over:by60
            "
        ));
    }
}

/// A group that has not received all of its members ends with its workflow.
#[test]
fn a_deadline_comes_while_a_group_is_being_sent() {
    check(
        "
        a hello                                             -> a welcome 0
        a open g/ deadline=50; hold g/ unsealed=g/ result=90000; publish g/0 member=g/:0 workflow=g/ -> a confirm 1
        wait 50                                             ->
        a publish g/1 member=g/:1 workflow=g/               -> a confirm 2 2:refused 0 TooLate(Failed)
        a watch g/                                          -> a sees g/ Cancelled the deadline of its workflow has passed
        a workflows                                         -> a workflows g/:nightly:cancelled:cancelled1-over:by50
        ",
    );
}

/// Deadlines of many workflows that pass together take at most two operations, and no pass of the loop is long.
#[test]
fn many_deadlines_that_come_together_are_one_operation() {
    const WORKFLOWS: usize = 5_000;
    let mut world = ScriptWorld::new(BrokerOptions::default());
    world.run("a hello");
    world.run("w hello");
    let open = |number: usize| {
        let due = 1000 + number % 2;
        format!("open m{number} deadline-at={due}; publish m{number} workflow=m{number}")
    };
    let all: Vec<String> = (0..WORKFLOWS).map(open).collect();
    world.run(&format!("a {}", all.join("; ")));
    world.run("wait 1000");
    assert_eq!(
        world.run("a operation 1"),
        [format!("a operation {0}/{0}/0 over", WORKFLOWS / 2)]
    );
    world.run("a pause default");
    world.run("w consume default 10");
    // The workers get credit before the operation has taken its first step.
    world.run("wait 1");
    assert_eq!(world.run("a resume default"), ["a confirm 3"]);
    world.check_recovery();
}
