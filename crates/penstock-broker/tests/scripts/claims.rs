//! Keys of unique jobs: until the start, until the end, for a time; and messages that replace each other.

use penstock_broker::BrokerOptions;

use crate::script::{check, check_with};

/// Runs a script once for each event that may happen to its broker at `{crash ...}`, which says how the client `a` is
/// received after a crash. `!` follows a job whose first delivery may have been lost with its broker.
fn check_with_crashes(script: &str) {
    for between in [
        "# No crash.",
        "kill",
        "power-cut",
        "mark\ncarry",
        "mark\ncarry\nkill",
    ] {
        let dies = between.contains("kill") || between.contains("power-cut");
        let mut parts = script.split("{crash ");
        let mut whole = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (received, rest) = part.split_once('}').expect("it is closed");
            whole += between;
            if dies {
                whole += &format!("\na hello -> {received}");
            }
            whole += rest;
        }
        check(&whole.replace('!', if dies { "!" } else { "" }));
    }
}

#[test]
fn a_key_until_the_start_is_free_once_the_job_is_handed_out() {
    check_with_crashes(
        "
        a hello                                      -> a welcome 0
        a publish one claim=k until=start            -> a confirm 1
        {crash a welcome 1}
        a publish two claim=k until=start            -> a confirm 2 2:skipped[0]+0:owner-one
        w hello                                      -> w welcome 0
        w consume default 1                          -> w deliver one!
        a publish two claim=k until=start            -> a confirm 3
        w move one next                              -> w confirm 1
        a publish three claim=k until=start          -> a confirm 4 4:skipped[0]+0:owner-two
        ",
    );
}

#[test]
fn a_key_until_the_start_is_not_taken_again_by_a_retry_or_after_a_crash() {
    for (back, last) in [
        ("w move one next", "one#1"),
        ("w crash one", "one!"),
        ("w return one", "one"),
    ] {
        check(&format!(
            "
            a hello                                  -> a welcome 0
            w hello                                  -> w welcome 0
            w consume default 1                      ->
            a publish one claim=k until=start        -> a confirm 1, w deliver one
            a publish two claim=k until=start        -> a confirm 2
            {back}                                   -> w confirm 1
            kill                                     ->
            a hello                                  -> a welcome 2
            a publish three claim=k until=start      -> a confirm 3 3:skipped[0]+0:owner-two
            # {last} waits as well, and its end frees nothing.
            "
        ));
    }
}

/// The worker comes back with a lease whose record was lost with the broker. The job has started, so a job for the
/// change that came after that must not be skipped.
pub fn key_is_free_though_the_grant_is_lost() {
    check(
        "
        a hello                                      -> a welcome 0
        a publish one claim=k until=start            -> a confirm 1
        w hello                                      -> w welcome 0
        stall                                        ->
        w consume default 1                          -> w deliver one
        power-cut                                    ->
        sync                                         ->
        w hello one                                  -> w welcome 0 one
        a hello                                      -> a welcome 1
        a publish two claim=k until=start            -> a confirm 2
        w fail one                                   -> w confirm 1
        a retry one                                  -> a confirm 3 3:Failed
        a publish three claim=k until=start          -> a confirm 4 4:skipped[0]+0:owner-two
        ",
    );
}

#[test]
fn a_key_until_the_start_is_free_though_the_record_of_the_start_is_lost() {
    key_is_free_though_the_grant_is_lost();
}

#[test]
fn a_key_until_the_end_is_free_after_a_failure_and_taken_again_by_a_retry() {
    check_with_crashes(
        "
        a hello                                      -> a welcome 0
        w hello                                      -> w welcome 0
        w consume default 1                          ->
        a publish one claim=k                        -> a confirm 1, w deliver one
        a publish two claim=k conflict=refuse        -> a confirm 2 2:refused 0 Claimed by one
        w fail one                                   -> w confirm 1
        a retry one                                  -> a confirm 3 3:Failed
        {crash a welcome 1, a confirm 3 2:refused 0 Claimed by one 3:Failed}
        a publish two claim=k                        -> a confirm 4 4:skipped[0]+0:owner-one
        ",
    );
    check_with_crashes(
        "
        a hello                                      -> a welcome 0
        w hello                                      -> w welcome 0
        w consume default 1                          ->
        a publish one claim=k                        -> a confirm 1, w deliver one
        w fail one                                   -> w confirm 1
        {crash a welcome 1}
        a publish two claim=k queue=other            -> a confirm 2
        {crash a welcome 2}
        a retry one                                  -> a confirm 3 3:refused 0 Invalid
        a publish three claim=k queue=other          -> a confirm 4 4:skipped[0]+0:owner-two
        ",
    );
}

#[test]
fn a_key_for_a_time_outlives_its_job_and_expires() {
    check_with_crashes(
        "
        a hello                                      -> a welcome 0
        w hello                                      -> w welcome 0
        w consume default 9                          ->
        a publish one claim=k for=60000              -> a confirm 1, w deliver one
        w ack one                                    -> w confirm 1
        wait 59000                                   ->
        {crash a welcome 1}
        a publish two claim=k for=60000              -> a confirm 2 2:skipped[0]+0:owner-one
        a publish two claim=k conflict=refuse        -> a confirm 3 3:refused 0 Claimed by one
        wait 1000                                    ->
        {crash a welcome 1, a confirm 3 2:skipped[0]+0:owner-one 3:refused 0 Claimed by one}
        a publish two claim=k for=60000 queue=other  -> a confirm 4
        ",
    );
}

#[test]
fn derived_keys_and_keys_of_applications_never_meet() {
    check(
        "
        a hello                                      -> a welcome 0
        a put k mine                                 -> a confirm 1
        a publish one claim=k                        -> a confirm 2
        a delete k                                   -> a confirm 3
        a publish two claim=k                        -> a confirm 4 4:skipped[0]+0:owner-one
        a publish three unless=k                     -> a confirm 5
        ",
    );
}

#[test]
fn a_message_takes_the_place_of_a_waiting_one_in_its_queue() {
    check_with_crashes(
        "
        a hello                                      -> a welcome 0
        a publish one claim=k conflict=replace       -> a confirm 1
        a publish other                              -> a confirm 2
        a watch one                                  -> a sees one pending
        a publish two claim=k conflict=replace       -> a confirm 3, a sees one Replaced two
        a publish three claim=k conflict=replace     -> a confirm 4
        {crash a welcome 4}
        a watch two three                            -> a sees two Replaced three, a sees three pending
        w hello                                      -> w welcome 0
        w consume default 1                          -> w deliver three!
        # It runs, and is not touched.
        a publish four claim=k conflict=replace      -> a confirm 5 5:skipped[0]+0:owner-three
        w ack three                                  -> a sees three gone, w confirm 1
        a publish four claim=k conflict=replace      -> a confirm 6
        w consume default 9                          -> w deliver other! four
        ",
    );
}

/// The replacement keeps slot and number of the message that it replaces, and must not get its arguments.
#[test]
fn a_body_that_is_read_while_its_message_is_replaced_goes_to_no_other() {
    let cold = BrokerOptions {
        resident_bodies_bytes: Some(0),
        ..BrokerOptions::default()
    };
    check_with(
        cold,
        "
        a hello                                      -> a welcome 0
        a publish busy                               -> a confirm 1
        w hello                                      -> w welcome 0
        w consume default 1                          -> w deliver busy
        hold-reads                                   ->
        a publish one claim=k conflict=replace after=1000  -> a confirm 2
        # Its body is about to be read, and its time comes, but no slot is free.
        wait 800                                     ->
        wait 201                                     ->
        a publish two claim=k conflict=replace       -> a confirm 3
        answer-reads                                 ->
        w ack busy                                   -> w confirm 1
        w consume default 1                          -> w deliver two
        ",
    );
}

#[test]
fn a_replacement_has_its_own_times() {
    // The replaced job's expiry is not that of the new one.
    check_with_crashes(
        "
        a hello                                                 -> a welcome 0
        a publish one claim=k conflict=replace expires=1000     -> a confirm 1
        a publish two claim=k conflict=replace                  -> a confirm 2
        {crash a welcome 2}
        wait 2000                                               ->
        a info two                                              -> a knows Ready in default attempt 0 crashes 0
        a publish three claim=k conflict=replace after=5000     -> a confirm 3
        a info three                                            -> a knows Delayed in default attempt 0 crashes 0
        a publish four claim=k conflict=replace after=1000      -> a confirm 4
        {crash a welcome 4}
        wait 1001                                               ->
        a info four                                             -> a knows Ready in default attempt 0 crashes 0
        ",
    );
}

/// A job that replaced a job of another task kept its number, so the stale place in the other task's flow counted as a
/// place of the new job. It went to a worker that can't run it, and the broker stopped over the count of a flow.
#[test]
fn what_takes_the_place_of_another_task_is_in_the_line_of_its_own() {
    check_with_crashes(
        "
        a hello                                               -> a welcome 0
        a publish first task=mail                             -> a confirm 1
        a publish one claim=k conflict=replace task=mail      -> a confirm 2
        a publish two claim=k conflict=replace task=report    -> a confirm 3
        a publish last task=mail                              -> a confirm 4
        {crash a welcome 4}
        w hello                                               -> w welcome 0
        w consume default 3 tasks=mail                        -> w deliver first! last!
        v hello                                               -> v welcome 0
        v consume default 2 tasks=report                      -> v deliver two!
        ",
    );
    check(
        "
        a hello                                               -> a welcome 0
        a publish first                                       -> a confirm 1
        a publish one claim=k conflict=replace                -> a confirm 2
        a publish two claim=k conflict=replace priority=9     -> a confirm 3
        a publish last                                        -> a confirm 4
        w hello                                               -> w welcome 0
        w consume default 1                                   -> w deliver two
        w consume default 2                                   -> w deliver first last
        ",
    );
}

#[test]
fn a_full_queue_has_room_for_a_replacement() {
    check(
        "
        a hello                                      -> a welcome 0
        a limit default length=1                     -> a confirm 1
        a publish one claim=k conflict=replace       -> a confirm 2
        a publish two claim=k conflict=replace       -> a confirm 3
        a publish three                              -> a confirm 4 4:refused 0 QueueFull
        a limit other length=1                       -> a confirm 5
        a publish four queue=other                   -> a confirm 6
        a publish three claim=k conflict=replace queue=other  -> a confirm 7 7:refused 0 QueueFull
        a limit other length=1 drop-oldest           -> a confirm 8
        a publish three claim=k conflict=replace queue=other  -> a confirm 9
        a watch two four                             -> a sees two Replaced three, a sees four Cancelled its queue was full and newer jobs took its place
        ",
    );
}

#[test]
fn the_last_of_quick_calls_runs_after_their_quiet_or_their_longest_wait() {
    check_with_crashes(
        "
        a hello                                                          -> a welcome 0
        a publish one claim=k until=start conflict=5000 after=2000       -> a confirm 1
        wait 1500                                                        ->
        a publish two claim=k until=start conflict=5000 after=2000       -> a confirm 2
        {crash a welcome 2}
        wait 1500                                                        ->
        a publish three claim=k until=start conflict=5000 after=2000     -> a confirm 3
        wait 1000                                                        ->
        # Until 5000, and not 6000.
        a publish four claim=k until=start conflict=5000 after=2000      -> a confirm 4
        {crash a welcome 4}
        w hello                                                          -> w welcome 0
        w consume default 1                                              ->
        wait 999                                                         ->
        wait 1                                                           -> w deliver four!
        # The next call starts over.
        a publish five claim=k until=start conflict=5000 after=2000      -> a confirm 5
        wait 1999                                                        ->
        a info five                                                      -> a knows Delayed in default attempt 0 crashes 0
        wait 2                                                           ->
        a info five                                                      -> a knows Ready in default attempt 0 crashes 0
        # Due, and in its queue: the last call takes its place at once.
        a publish six claim=k until=start conflict=5000 after=2000       -> a confirm 6
        a info six                                                       -> a knows Ready in default attempt 0 crashes 0
        ",
    );
}

#[test]
fn operations_under_way_end_the_messages_that_were_there_and_not_those_that_take_their_places() {
    check(
        "
        a hello                                      -> a welcome 0
        a publish one claim=k conflict=replace       -> a confirm 1
        a purge default; publish two claim=k conflict=replace  -> a confirm 2 2:operation-1
        a info two                                   -> a knows Ready in default attempt 0 crashes 0
        ",
    );
}

#[test]
fn claims_that_make_no_sense_are_refused() {
    check(
        "
        a hello                                                    -> a welcome 0
        a publish one queue=x+y claim=k                            -> a confirm 1 1:refused 0 Invalid
        a publish one claim=k for=1000 conflict=replace            -> a confirm 2 2:refused 0 Invalid
        a publish one claim=k until=start conflict=1000 at=9       -> a confirm 3 3:refused 0 Invalid
        a publish one claim=k conflict=1000                        -> a confirm 4 4:refused 0 Invalid
        a hold j count=1                                           -> a confirm 5
        a publish one claim=k member=j:0                           -> a confirm 6 6:refused 0 Invalid
        ",
    );
}
