//! A person retries the failed members of a group, and the group continues.

use penstock_broker::BrokerOptions;

use crate::script::{ScriptWorld, check};

/// Case 24. Clients that asked earlier saw why the body can't run; clients that ask from now on wait for it.
#[test]
fn a_group_continues_when_its_failed_member_is_retried() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list result=1000000; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w fail g/1 boom                                               -> w confirm 1
        w ack g/0; put g/0 one                                        -> w confirm 2
        a watch body g/ g/1                                           -> a sees body Upstream g/1, a sees g/ Upstream g/1, a sees g/1 Failed error
        a retry g/1                                                   -> a confirm 2 2:Failed, w deliver g/1#1
        a watch body g/ g/1                                           -> a sees body pending, a sees g/ pending, a sees g/1 pending
        a info body                                                   -> a knows Held in default attempt 0 crashes 0
        w ack g/1; put g/1 two                                        -> w confirm 3, w deliver body[one two], a sees g/1 Succeeded two, a sees g/ Gathered g/ of 2
        w ack body; put body done                                     -> w confirm 4, a sees body Succeeded done
        ",
    );
}

/// The same for a broker that knows the group only from the journal, wherever it is in there.
#[test]
fn a_group_continues_after_crashes_and_when_its_journal_was_carried_forward() {
    let steps = [
        "a retry g/1                              -> a confirm 2 2:Failed",
        "w consume default 1                      -> w deliver g/1#1",
        "w ack g/1; put g/1 two                   -> w confirm 3",
        "w consume default 1                      -> w deliver body[one two]",
    ];
    // Outputs to the clients when they reconnect, before each of these steps.
    let hellos = [
        ["a hello -> a welcome 1", "w hello -> w welcome 2"],
        [
            "a hello -> a welcome 1, a confirm 2 2:Failed",
            "w hello -> w welcome 2",
        ],
        [
            "a hello -> a welcome 1, a confirm 2 2:Failed",
            "w hello g/1 -> w welcome 2 g/1",
        ],
        [
            "a hello -> a welcome 1, a confirm 2 2:Failed",
            "w hello -> w welcome 3",
        ],
    ];
    for (at, hellos) in hellos.iter().enumerate() {
        for between in ["", "carry", "mark\n carry 3"] {
            let (before, after) = steps.split_at(at);
            check(&format!(
                "
                a hello                           -> a welcome 0
                a hold g/ count=2 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
                w hello                           -> w welcome 0
                w consume default 2               -> w deliver g/0 g/1
                w fail g/1 boom                   -> w confirm 1
                w ack g/0; put g/0 one            -> w confirm 2
                {}
                {between}
                restart                           ->
                {}
                {}
                carry                             ->
                ",
                before.join("\n"),
                hellos.join("\n"),
                after.join("\n"),
            ));
        }
    }
}

/// The group has been carried forward, but not its member, which is in the segment that is deleted next.
#[test]
fn a_group_learns_of_a_retry_while_a_segment_is_emptied() {
    for steps in 1..8 {
        check(&format!(
            "
            a hello                               -> a welcome 0
            a hold g/ count=1 messages=body inputs=one; publish g/0 member=g/:0 -> a confirm 1
            w hello                               -> w welcome 0
            w consume default 1                   -> w deliver g/0
            w fail g/0 boom                       -> w confirm 1
            mark                                  ->
            carry {steps}                         ->
            a retry g/0                           -> a confirm 2 2:Failed
            carry                                 ->
            restart                               ->
            a hello                               -> a welcome 1, a confirm 2 2:Failed
            a watch body                          -> a sees body pending
            w hello                               -> w welcome 1
            w consume default 1                   -> w deliver g/0#1
            w ack g/0; put g/0 zero               -> w confirm 2
            w consume default 1                   -> w deliver body[zero]
            "
        ));
    }
}

/// A join for each step with callbacks, a chain, a group in a group: everything that a failure has blocked, at any
/// distance, waits again.
#[test]
fn everything_blocked_by_a_failure_waits_again_after_a_retry() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold o/ count=2 messages=last inputs=list result=1000000    -> a confirm 1
        a hold i/ count=1 then=o/:1 result=1000; hold h/ count=2 messages=i/0 inputs=list member=i/:0 -> a confirm 2
        a publish h/0 member=h/:0; publish h/1 member=h/:1; publish o/0 member=o/:0 -> a confirm 3
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver h/0 h/1 o/0
        w fail h/0 boom                                               -> w confirm 1
        w ack h/1; put h/1 one                                        -> w confirm 2
        w ack o/0; put o/0 two                                        -> w confirm 3
        a watch last o/ i/0                                           -> a sees last Upstream h/0, a sees o/ Upstream h/0, a sees i/0 Upstream h/0
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 3
        a retry h/0                                                   -> a confirm 4 4:Failed
        a watch last o/ i/0 o/1                                       -> a sees last pending, a sees o/ pending, a sees i/0 pending, a sees o/1 pending
        kill                                                          ->
        w hello                                                       -> w welcome 3
        w consume default 10                                          -> w deliver h/0!#1
        w ack h/0; put h/0 zero                                       -> w confirm 4, w deliver i/0![zero one]
        w ack i/0; put i/0 both                                       -> w confirm 5, w deliver last![two [both]]
        ",
    );
}

/// Whether each failure is tolerated or not, and whichever comes first.
#[test]
fn a_group_reopens_once_it_tolerates_the_remaining_failures() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=3 messages=body inputs=list max-failures=1; publish g/0 member=g/:0; publish g/1 member=g/:1; publish g/2 member=g/:2 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 3                                           -> w deliver g/0 g/1 g/2
        w fail g/0                                                    -> w confirm 1
        w fail g/1                                                    -> w confirm 2
        w fail g/2                                                    -> w confirm 3
        a watch body                                                  -> a sees body Upstream g/0+g/1+g/2
        a retry g/1                                                   -> a confirm 2 2:Failed
        a watch body                                                  -> a sees body Upstream g/0+g/2
        a retry g/0                                                   -> a confirm 3 3:Failed
        a watch body                                                  -> a sees body pending
        w consume default 2                                           -> w deliver g/1#1 g/0#1
        w ack g/1; put g/1 one                                        -> w confirm 4
        w fail g/0                                                    -> w confirm 5, a sees body Upstream g/0+g/2
        a retry g/2                                                   -> a confirm 4 4:Failed
        a watch body                                                  -> a sees body pending
        w consume default 2                                           -> w deliver g/2#1
        w ack g/2; put g/2 two                                        -> w confirm 6, w deliver body[Failed:error one two]
        ",
    );
}

/// A failed member may also be retried before its group has ended.
#[test]
fn an_open_group_waits_again_for_a_member_that_is_retried() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list max-failures=1; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 2                                           -> w deliver g/0 g/1
        w fail g/0                                                    -> w confirm 1
        a retry g/0                                                   -> a confirm 2 2:Failed
        w ack g/1; put g/1 one                                        -> w confirm 2
        w consume default 2                                           -> w deliver g/0#1
        kill                                                          ->
        w hello g/0                                                   -> w welcome 2 g/0
        w ack g/0; put g/0 zero                                       -> w confirm 3
        w consume default 2                                           -> w deliver body![zero one]
        ",
    );
}

/// The message waited for a success that did not come, and for a failure whose job has since been retried. Once only
/// the failure is left to wait for, it is not needed, and neither are messages that wait for it. It used to stay
/// blocked forever, by nothing.
#[test]
fn an_errback_of_a_retried_job_is_not_needed_once_nothing_blocks_it() {
    for between in [
        "",
        "carry",
        "kill\n w hello s/1 -> w welcome 2 s/1\n w consume default 9 ->",
    ] {
        check(&format!(
            "
            a hello                                                   -> a welcome 0
            a hold t/ count=1 messages=tail inputs=one; hold s/ count=2 messages=t/0 inputs=list member=t/:0 expects=1:failed; publish s/0 member=s/:0; publish s/1 member=s/:1 -> a confirm 1
            w hello                                                   -> w welcome 0
            w consume default 10                                      -> w deliver s/0 s/1
            w fail s/0 boom                                           -> w confirm 1
            w fail s/1 bang                                           -> w confirm 2
            a retry s/1                                               -> a confirm 2 2:Failed, w deliver s/1#1
            {between}
            w ack s/1; put s/1 one                                    -> w confirm 3
            b hello                                                   -> b welcome 0
            b watch t/0 tail                                          -> b sees t/0 Upstream s/0, b sees tail Upstream s/0
            {between_two}
            b retry s/0 -> b confirm 1 1:Failed, w deliver s/0#1
            b watch t/0 tail -> b sees t/0 Cancelled it was not needed: nothing that it waited for has failed, b sees tail Cancelled it was not needed: nothing that it waited for has failed
            w ack s/0; put s/0 zero                                   -> w confirm 4
            ",
            between_two = if between == "carry" { between } else { "" },
        ));
    }
}

/// Errbacks that a failure has released stay released. They are given that failure even if they begin after the retry.
#[test]
fn an_errback_that_was_released_runs_once_whatever_is_retried() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=rescue inputs=list when=failed; publish g/0 member=g/:0 queue=q; publish g/1 member=g/:1 queue=q -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume q 10                                                -> w deliver g/0@q g/1@q
        w fail g/0 boom                                               -> w confirm 1
        a retry g/0                                                   -> a confirm 2 2:Failed, w deliver g/0@q#1
        w consume default 1                                           -> w deliver rescue[Upstream:g/0]
        w fail g/0 boom                                               -> w confirm 2
        w return rescue                                               -> w confirm 3, w deliver rescue![Upstream:g/0]
        w ack rescue                                                  -> w confirm 4
        w consume default 1                                           ->
        ",
    );
}

/// For a body that its group released without the failed member, that member remains failed.
#[test]
fn a_group_that_continued_without_a_member_does_not_go_back() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list all-ended; publish g/0 member=g/:0 queue=q; publish g/1 member=g/:1 queue=q -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume q 2                                                 -> w deliver g/0@q g/1@q
        w fail g/0 boom                                               -> w confirm 1
        w ack g/1; put g/1 one                                        -> w confirm 2
        w consume default 1                                           -> w deliver body[Failed:error one]
        a retry g/0                                                   -> a confirm 2 2:Failed
        w return body                                                 -> w confirm 3
        w consume default 1                                           -> w deliver body![Upstream:g/0 one]
        w consume q 1                                                 -> w deliver g/0@q#1
        w ack g/0; put g/0 zero                                       -> w confirm 4
        w ack body                                                    -> w confirm 5
        w consume default 1                                           ->
        ",
    );
}

/// Successful members keep their results for as long as the group may continue, whatever their time to live.
#[test]
fn a_failed_group_keeps_the_results_that_its_body_would_read() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 2                                           -> w deliver g/0 g/1
        w ack g/0; put g/0 one ttl=5                                  -> w confirm 1
        w fail g/1 boom                                               -> w confirm 2
        wait 200000                                                   ->
        carry                                                         ->
        restart                                                       ->
        a hello                                                       -> a welcome 1
        a retry g/1                                                   -> a confirm 2 2:Failed
        w hello                                                       -> w welcome 2
        w consume default 2                                           -> w deliver g/1#1
        w ack g/1; put g/1 two                                        -> w confirm 3, w deliver body[one two]
        ",
    );
}

#[test]
fn the_failed_members_of_a_workflow_are_retried_together() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list workflow=body; publish g/0 member=g/:0 workflow=body; publish g/1 member=g/:1 workflow=body; publish other -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 3                                           -> w deliver g/0 g/1 other
        w fail g/0                                                    -> w confirm 1
        w fail g/1                                                    -> w confirm 2
        w fail other                                                  -> w confirm 3
        a retry all workflow=body                                     -> a confirm 2 2:operation-1
        a operation 1                                                 -> a operation 2/2/0 over
        w consume default 3                                           -> w deliver g/0#1 g/1#1
        w ack g/0; put g/0 zero                                       -> w confirm 4
        w ack g/1; put g/1 one                                        -> w confirm 5, w deliver body[zero one]
        ",
    );
}

/// Case 35: nobody can retry the job that failed the group, so everything that it has blocked is dropped at once, at
/// any distance.
#[test]
fn jobs_blocked_by_a_failed_job_are_dropped_with_it() {
    for drop in [
        "a drop g/0 -> a confirm 2 2:Failed",
        "a drop all -> a confirm 2 2:operation-1",
    ] {
        check(&format!(
            "
            a hello                           -> a welcome 0
            a hold i/ count=1 messages=last inputs=one; hold h/ count=1 messages=i/0 inputs=one member=i/:0; hold g/ count=2 then=h/:0 result=1000000; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
            w hello                           -> w welcome 0
            w consume default 2               -> w deliver g/0 g/1
            w fail g/0                        -> w confirm 1
            a info last                       -> a knows Blocked in default attempt 0 crashes 0
            {drop}
            a info last                       -> a knows nothing
            a info i/0                        -> a knows nothing
            a watch last                      -> a sees last Upstream
            w ack g/1; put g/1 one            -> w confirm 2
            kill                              ->
            a hello                           -> a welcome 1, {}
            a info last                       -> a knows nothing
            ",
            drop.split_once("-> ").unwrap().1
        ));
    }
}

/// Another job of the group may still be retried, and then the group tolerates the dropped one.
#[test]
fn a_group_that_may_still_continue_is_not_given_up() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=3 messages=body inputs=list max-failures=1; publish g/0 member=g/:0; publish g/1 member=g/:1; publish g/2 member=g/:2 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 3                                           -> w deliver g/0 g/1 g/2
        w fail g/0                                                    -> w confirm 1
        w fail g/1                                                    -> w confirm 2
        w ack g/2; put g/2 two                                        -> w confirm 3
        a drop g/0                                                    -> a confirm 2 2:Failed
        a info body                                                   -> a knows Blocked in default attempt 0 crashes 0
        a retry g/1                                                   -> a confirm 3 3:Failed
        w consume default 3                                           -> w deliver g/1#1
        w ack g/1; put g/1 one                                        -> w confirm 4, w deliver body[Failed:error one two]
        ",
    );
}

/// More than fit into a step. Work that a crash interrupts continues after it.
#[test]
fn a_large_group_that_was_blocked_waits_again_in_steps() {
    let members: Vec<String> = (0..3_000).map(|index| format!("o/{index}")).collect();
    let hold = format!(
        "a hold o/ count=3000 messages=last inputs=list result=1000000; \
         hold g/ count=1 messages={} each=o/ queue=q; publish g/0 member=g/:0",
        members.join("+")
    );
    let mut cut = 1;
    loop {
        let mut world = ScriptWorld::new(BrokerOptions::default());
        for line in [
            "a hello",
            &hold,
            "w hello",
            "w consume default 1",
            "w fail g/0",
        ] {
            world.run(line);
        }
        let blocked = "a knows Blocked in default attempt 0 crashes 0";
        assert_eq!(world.run("a info last"), [blocked]);
        let before = world.journal().len();
        // A client that asks before all of them wait again does not get the old answer.
        let told = world.run("a retry g/0 && a watch last o/ o/2999");
        assert_eq!(told.len(), 4, "{told:?}");
        let pending = [
            "a sees last pending",
            "a sees o/ pending",
            "a sees o/2999 pending",
        ];
        for line in pending {
            assert!(told.contains(&line.to_owned()), "{told:?}");
        }
        let steps = world.journal().len() - before;
        assert!(steps > 3, "{steps} records");
        if cut == steps {
            break;
        }
        world.lose_records(|index| index >= before + cut);
        world.run("a hello");
        assert_eq!(world.run("a watch last o/ o/2999"), pending);
        world.run("w hello");
        world.run("w consume default 1");
        world.run("w ack g/0");
        let ready = "a knows Ready in q attempt 0 crashes 0";
        assert_eq!(world.run("a info o/2999"), [ready]);
        world.check_recovery();
        cut += 1;
    }
}
