//! Errbacks run when their group failed, and end without having run when they are not needed.

use penstock_broker::BrokerOptions;

use crate::script::{ScriptWorld, check};

/// In an earlier version it was purged: a group that failed did not check for purges, while one that succeeded did.
#[test]
fn an_errback_runs_though_its_queue_is_purged_when_the_failure_happens() {
    check(
        "
        a hello                             -> a welcome 0
        a hold g/ count=1 messages=rescue when=failed; publish g/0 member=g/:0 -> a confirm 1
        a consume default 1                 -> a deliver g/0
        a publish one                       -> a confirm 2
        a purge default|fail g/0 boom       -> a confirm 4 3:operation-1
        kill                                ->
        carry                               ->
        kill                                ->
        a hello                             -> a welcome 2, a confirm 4 3:operation-1
        a watch one                         -> a sees one Cancelled its queue was purged
        w hello                             -> w welcome 0
        w consume default 9                 -> w deliver rescue!
        w ack rescue                        -> w confirm 1
        ",
    );
}

/// A record has room for a limited number of the broker's own events, and the broker stopped if the end of one group
/// needed more.
#[test]
fn any_number_of_errbacks_may_not_be_needed() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    world.run("a hello");
    let errbacks: Vec<String> = (0..3_000).map(|number| format!("m{number}")).collect();
    world.run(&format!(
        "a hold g/ count=1 all-ended messages={} when=failed queue=slow; publish g/0 member=g/:0",
        errbacks.join("+")
    ));
    world.run("a cancel all queue=default reason=no");
    assert_eq!(
        world.run("a watch m0 m2999"),
        [
            "a sees m0 Cancelled it was not needed: nothing that it waited for has failed",
            "a sees m2999 Cancelled it was not needed: nothing that it waited for has failed"
        ]
    );
    world.check_recovery();
}

/// All errbacks of a group used to end in one record, which blocked everything else.
#[test]
fn errbacks_of_one_group_that_are_not_needed_end_in_steps() {
    // The last member ends because of a filter, because of its worker, or does not exist.
    for (count, end) in [
        (1, "a cancel all queue=default reason=no"),
        (1, "a ack g/0; put g/0 yes"),
        (0, "a info m0"),
    ] {
        let mut world = ScriptWorld::new(BrokerOptions::default());
        world.run("a hello");
        let errbacks: Vec<String> = (0..3_000).map(|number| format!("m{number}")).collect();
        let hold = format!(
            "a hold g/ count={count} all-ended messages={} when=failed queue=slow",
            errbacks.join("+")
        );
        match count {
            0 => world.run(&hold),
            _ => world.run(&format!("{hold}; publish g/0 member=g/:0")),
        };
        if end.contains("ack") {
            world.run("a consume default 1");
        }
        world.run(end);
        assert_eq!(
            world.run("a watch m0 m2999"),
            [
                "a sees m0 Cancelled it was not needed: nothing that it waited for has failed",
                "a sees m2999 Cancelled it was not needed: nothing that it waited for has failed"
            ]
        );
        // The first two records are the session and the group.
        let records = world.journal().len() - 2;
        assert!(records > 6, "{records} records, after {end}");
        world.check_recovery();
    }
}

/// A failed member is retried while the errbacks end. The group continues without the member, as it was about to: none
/// of the remaining errbacks waits again.
#[test]
fn a_group_whose_errbacks_end_continues_without_a_retried_member() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    world.run("a hello");
    let errbacks: Vec<String> = (0..3_000).map(|number| format!("m{number}")).collect();
    world.run(&format!(
        "a hold g/ count=1 all-ended messages={} when=failed queue=slow; publish g/0 member=g/:0",
        errbacks.join("+")
    ));
    world.run("a consume default 1");
    world.run("a fail g/0 && a retry g/0");
    assert_eq!(
        world.run("a watch m0 m2999"),
        [
            "a sees m0 Cancelled it was not needed: nothing that it waited for has failed",
            "a sees m2999 Cancelled it was not needed: nothing that it waited for has failed"
        ]
    );
    world.check_recovery();
}

/// Several groups that end in one record each have some.
#[test]
fn groups_with_errbacks_that_end_together_take_several_records() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    world.run("a hello");
    for number in 0..600 {
        world.run(&format!(
            "a hold g{number}/ count=1 all-ended messages=m{0}+m{1}+m{2}+m{3} when=failed queue=slow; publish g{number}/0 member=g{number}/:0",
            4 * number,
            4 * number + 1,
            4 * number + 2,
            4 * number + 3
        ));
    }
    world.run("a cancel all queue=default reason=no");
    world.run("a status");
    assert_eq!(
        world.run("a watch m0 m2399"),
        [
            "a sees m0 Cancelled it was not needed: nothing that it waited for has failed",
            "a sees m2399 Cancelled it was not needed: nothing that it waited for has failed"
        ]
    );
    world.check_recovery();
}
