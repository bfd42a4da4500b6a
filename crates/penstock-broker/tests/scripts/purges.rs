//! A purge ends what waited when its mark came to the disk: all of that, nothing else, and in steps.

use crate::script::check;

/// Once a purge is on disk, its jobs are handed out to nobody, however far its steps have come. A job that was running
/// and returns was not purged.
#[test]
fn a_purge_holds_from_its_mark_on_across_kills() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish run|publish one|publish late after=1000  -> a confirm 3
        w consume default 1                 -> w deliver run
        a purge default                     -> a confirm 4 4:operation-1
        w return run                        -> w confirm 1
        a publish two                       -> a confirm 5
        kill                                ->
        w hello                             -> w welcome 1
        w consume default 9                 -> w deliver run! two!
        wait 2000                           ->
        a hello                             -> a welcome 3, a confirm 5 4:operation-1
        a watch one late                    -> a sees one Cancelled its queue was purged, a sees late Cancelled its queue was purged
        ",
    );
}

/// The record in which a purge began may be gone before the purge is over: what it still has to end is ended, and handed
/// out to nobody.
fn purge_continues_without_its_first_record() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        disk no-settlements                 -> notice: NoSettlements
        a purge default                     -> a confirm 3 3:operation-1
        carry                               ->
        kill                                ->
        w hello                             -> w welcome 0
        w consume default 9                 ->
        a hello                             -> a welcome 2, a confirm 3 3:operation-1
        a watch one two                     -> a sees one Cancelled its queue was purged, a sees two Cancelled its queue was purged
        ",
    );
}

#[test]
fn a_purge_continues_when_the_record_in_which_it_began_is_gone() {
    purge_continues_without_its_first_record();
}

#[cfg(feature = "faults")]
#[test]
fn planted_bugs_that_the_simulator_hardly_ever_reaches_are_found() {
    use penstock_faults::{Finder, PLANTS, is_found_by};

    for plant in PLANTS.iter().filter(|plant| plant.finder == Finder::Script) {
        let script = match plant.name {
            "carry-no-mark" => purge_continues_without_its_first_record,
            "keep-claim-of-lost-grant" => crate::claims::key_is_free_though_the_grant_is_lost,
            other => panic!("no script finds {other}"),
        };
        assert!(
            is_found_by(plant.name, script),
            "{} was not found",
            plant.name
        );
    }
}

/// Messages that a group holds do not wait in their queue yet, so they are not purged, however soon they are released.
#[test]
fn a_group_that_is_released_while_its_queue_is_purged_continues() {
    check(
        "
        a hello                             -> a welcome 0
        a hold join count=1 messages=next+after|publish one  -> a confirm 2
        a purge default|join join index=0   -> a confirm 4 3:operation-1
        kill                                ->
        carry                               ->
        kill                                ->
        a hello                             -> a welcome 2, a confirm 4 3:operation-1
        a watch one                         -> a sees one Cancelled its queue was purged
        w hello                             -> w welcome 0
        w consume default 9                 -> w deliver next! after!
        w ack next|ack after                -> w confirm 2
        ",
    );
}

#[test]
fn jobs_published_after_a_purge_are_handed_out_once_it_is_over() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 9                 ->
        a pause default                     -> a confirm 1
        a publish one|publish two           -> a confirm 3
        a purge default|publish three|resume default  -> a confirm 6 4:operation-1, w deliver three
        ",
    );
}

/// The task whose turn it is has no purged jobs here, but the consumer can't run it. The next task has.
#[test]
fn a_purged_job_is_not_handed_out_in_the_place_of_one_that_the_consumer_cannot_run() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        v hello                             -> v welcome 0
        w consume default 1 tasks=dear      ->
        v consume default 1 tasks=cheap     ->
        a publish one task=dear             -> a confirm 1, w deliver one
        a publish two task=cheap            -> a confirm 2, v deliver two
        w ack one cost=5000                 -> w confirm 1
        v ack two cost=1                    -> v confirm 1
        a pause default                     -> a confirm 3
        a publish three task=dear           -> a confirm 4
        w consume default 9 tasks=dear      ->
        a purge default|publish four task=cheap|resume default  -> a confirm 7 5:operation-1
        a watch three                       -> a sees three Cancelled its queue was purged
        v consume default 1 tasks=cheap     -> v deliver four
        ",
    );
}
