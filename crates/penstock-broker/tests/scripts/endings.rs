//! However a message ends, the result is the same: its value exists, its key is free, and its join has learned of it.

use penstock_broker::BrokerOptions;

use crate::script::{ScriptWorld, check, check_with};

/// Ways to end the message `m`, the output to the worker or client that ends it, and the result that a watcher sees.
const ENDS: [(&str, &str, &str); 8] = [
    ("w ack m; put m yes", "w confirm 1", "Succeeded yes"),
    ("w fail m", "w confirm 1", "Failed error"),
    ("w crash m reason=boom", "w confirm 1", "Crashed boom"),
    ("wait 40", "", "Expired"),
    (
        "a purge q",
        "a confirm 9 9:operation-1",
        "Cancelled its queue was purged",
    ),
    (
        "a cancel m reason=no",
        "a confirm 9 9:Ready",
        "Cancelled no",
    ),
    (
        "a cancel all queue=q reason=no",
        "a confirm 9 9:operation-1",
        "Cancelled no",
    ),
    (
        "a publish newer queue=q",
        "a confirm 9",
        "Cancelled its queue was full and newer jobs took its place",
    ),
];

/// Whether a worker causes this end, so that it must have received the message.
fn is_run(end: &str) -> bool {
    end.starts_with("w ")
}

fn each_end(more: impl Fn(&str, &str, bool) -> String) {
    for (end, confirm, value) in ENDS {
        let run = if is_run(end) {
            "w consume q 1 -> w deliver m@q"
        } else {
            "# It waits."
        };
        let limit = if end.contains("newer") {
            "a limit q length=1 drop-oldest"
        } else {
            "a limit q"
        };
        let succeeded = value.starts_with("Succeeded");
        let outputs = [confirm, &format!("a sees m {value}")].join(", ");
        let outputs = outputs.trim_start_matches(", ").to_owned();
        let script = more(
            &format!(
                "
                w hello                     -> w welcome 0
                {limit}                     -> a confirm 7
                a watch m                   -> a sees m pending
                a guard other absent        -> a confirm 8
                {run}
                "
            ),
            &format!("{end} -> {outputs}"),
            succeeded,
        );
        check(&script);
    }
}

const PUBLISH: &str = "queue=q expires=30 deliveries=1";

#[test]
fn whatever_ends_a_message_its_value_is_there_and_stays_after_a_crash() {
    each_end(|prepare, end, _| {
        let seen = end.split(" -> ").nth(1).unwrap();
        let seen = seen.split(", ").find(|line| line.contains("sees")).unwrap();
        format!(
            "
            a hello last=5                  -> a welcome 5 forgotten
            a publish m {PUBLISH}           -> a confirm 6
            {prepare}
            {end}
            a watch m                       -> {seen}
            kill                            ->
            carry                           ->
            kill                            ->
            b hello                         -> b welcome 0
            b watch m                       -> {}
            ",
            seen.replacen('a', "b", 1)
        )
    });
}

#[test]
fn whatever_ends_a_message_its_key_is_free() {
    each_end(|prepare, end, _| {
        format!(
            "
            a hello last=5                  -> a welcome 5 forgotten
            a publish m {PUBLISH} unless=k  -> a confirm 6
            {prepare}
            {end}
            b hello                         -> b welcome 0
            b guard k absent                -> b confirm 1
            kill                            ->
            b hello                         -> b welcome 1
            b publish next unless=k         -> b confirm 2
            "
        )
    });
}

#[test]
fn whatever_ends_a_member_its_join_learns_of_it() {
    each_end(|prepare, end, succeeded| {
        let (state, told) = match succeeded {
            true => ("Ready", "b sees last pending"),
            false => ("Blocked", "b sees last Upstream m"),
        };
        format!(
            "
            a hello last=5                  -> a welcome 5 forgotten
            a hold join count=1 messages=last; hold any count=1 messages=after all-ended; publish m {PUBLISH} member=join:0  -> a confirm 6
            {prepare}
            {end}
            b hello                         -> b welcome 0
            b info last                     -> b knows {state} in default attempt 0 crashes 0
            b watch last                    -> {told}
            b info after                    -> b knows Held in default attempt 0 crashes 0
            kill                            ->
            carry                           ->
            kill                            ->
            b hello                         -> b welcome 0
            b info last                     -> b knows {state} in default attempt 0 crashes 0
            "
        )
    });
}

/// Seed 4003213 of a soak: the journal's oldest segment was being emptied. The join had been carried forward, but not
/// its member, which then ended. So the segment with the member's record was deleted, and after a crash the end named
/// an unknown message: the join waited for it forever, and its held messages never ran.
#[test]
fn a_join_learns_of_a_member_that_ended_while_a_segment_was_emptied() {
    for steps in 1..8 {
        each_end(|prepare, end, _| {
            format!(
                "
                a hello last=5                  -> a welcome 5 forgotten
                a hold join count=2 messages=last all-ended; publish m {PUBLISH} member=join:1  -> a confirm 6
                {prepare}
                mark                            ->
                carry {steps}                   ->
                {end}
                carry                           ->
                kill                            ->
                b hello                         -> b welcome 0
                b info last                     -> b knows Held in default attempt 0 crashes 0
                b join join index=0             -> b confirm 1
                b info last                     -> b knows Ready in default attempt 0 crashes 0
                "
            )
        });
    }
}

/// Likewise for a key that passes to a copy while a segment is being emptied.
#[test]
fn a_copy_owns_the_key_of_one_that_ended_while_a_segment_was_emptied() {
    for steps in 1..8 {
        // The copy in `r` was retried, so the copy in `s` inherits the key of the one in `q`.
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish m queue=q+r+s unless=k    -> a confirm 1
            w hello                             -> w welcome 0
            w consume r 1                       -> w deliver m@r
            w move m                            -> w confirm 1
            w consume q 1                       -> w deliver m@q
            w ack m                             -> w confirm 2
            w consume s 1                       -> w deliver m@s
            mark                                ->
            carry {steps}                       ->
            w ack m                             -> w confirm 3
            carry                               ->
            kill                                ->
            a hello                             -> a welcome 1
            a guard k present                   -> a confirm 2
            w hello                             -> w welcome 3
            w consume r 1                       -> w deliver m@r!
            w ack m                             -> w confirm 4
            a guard k absent                    -> a confirm 3
            "
        ));
    }
}

/// Likewise for the result of a failed job that is retried.
#[test]
fn the_result_of_a_retried_job_is_removed_before_its_segment_is_emptied() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish m                             -> a confirm 1
        mark                                    ->
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver m
        w fail m                                -> w confirm 1
        a retry m                               -> a confirm 2 2:Failed
        carry                                   ->
        kill                                    ->
        a hello                                 -> a welcome 1, a confirm 2 2:Failed
        a watch m                               -> a sees m pending
        ",
    );
}

#[test]
fn a_failure_goes_through_joins_within_joins() {
    each_end(|prepare, end, succeeded| {
        let (inner, outer) = match succeeded {
            true => ("Ready", "Held"),
            false => ("Blocked", "Blocked"),
        };
        format!(
            "
            a hello last=5                  -> a welcome 5 forgotten
            a hold outer count=1 messages=last; hold inner count=1 messages=mid member=outer:0; publish m {PUBLISH} member=inner:0  -> a confirm 6
            {prepare}
            {end}
            b hello                         -> b welcome 0
            b info mid                      -> b knows {inner} in default attempt 0 crashes 0
            b info last                     -> b knows {outer} in default attempt 0 crashes 0
            "
        )
    });
}

#[test]
fn a_join_whose_members_may_fail_is_released_by_its_last_whatever_ends_it() {
    each_end(|prepare, end, _| {
        format!(
            "
            a hello last=5                  -> a welcome 5 forgotten
            a hold join count=1 messages=last all-ended; publish m {PUBLISH} member=join:0  -> a confirm 6
            {prepare}
            {end}
            b hello                         -> b welcome 0
            b info last                     -> b knows Ready in default attempt 0 crashes 0
            "
        )
    });
}

#[test]
fn a_copy_ends_alone_and_its_key_passes_to_another_copy() {
    for end in ["purge q", "cancel all queue=q"] {
        check(&format!(
            "
            a hello                         -> a welcome 0
            a publish m queue=q+r unless=k  -> a confirm 1
            a {end}                         -> a confirm 2 2:operation-1
            a guard k present               -> a confirm 3
            w hello                         -> w welcome 0
            w consume r 1                   -> w deliver m@r
            w ack m                         -> w confirm 1
            a guard k absent                -> a confirm 4
            "
        ));
    }
}

#[test]
fn a_member_is_published_to_one_queue_and_to_a_join_that_is_open() {
    check(
        "
        a hello                             -> a welcome 0
        a publish m member=join:0           -> a confirm 1 1:refused 0 Invalid
        a hold join count=1 messages=last   -> a confirm 2
        a publish m member=join:1           -> a confirm 3 3:refused 0 Invalid
        a publish m member=join:0 queue=x+y  -> a confirm 4 4:refused 0 Invalid
        a publish m member=join:0           -> a confirm 5
        ",
    );
}

#[test]
fn waiting_jobs_are_cancelled_and_running_ones_are_left() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish run|publish wait|publish late after=1000|hold join count=1 messages=held  -> a confirm 4
        w consume default 1                 -> w deliver run
        a watch wait late held              -> a sees wait pending, a sees late pending, a sees held pending
        a cancel run                        -> a confirm 5 5:refused 0 TooLate(Running)
        a cancel nobody                     -> a confirm 6 6:refused 0 NoSuchJob
        a cancel wait reason=enough         -> a confirm 7 7:Ready, a sees wait Cancelled enough
        a cancel late                       -> a confirm 8 8:Delayed, a sees late Cancelled it was cancelled
        a cancel held                       -> a confirm 9 9:Held, a sees held Cancelled it was cancelled
        a cancel wait                       -> a confirm 10 10:refused 0 NoSuchJob
        w fail run                          -> w confirm 1
        a cancel run                        -> a confirm 11 11:refused 0 TooLate(Failed)
        ",
    );
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one task=x|publish two task=y|publish three task=x queue=other|publish four task=x after=9  -> a confirm 4
        a watch one two three four          -> a sees one pending, a sees two pending, a sees three pending, a sees four pending
        w consume default 1                 -> w deliver one
        a cancel all task=x queue=default reason=why  -> a confirm 5 5:operation-1, a sees four Cancelled why
        a operation 1                       -> a operation 2/1/1 over
        a cancel all                        -> a confirm 6 6:operation-2, a sees two Cancelled it was cancelled, a sees three Cancelled it was cancelled
        a operation 2                       -> a operation 3/2/1 over
        a operation 3                       -> a operation unknown
        wait 600000                         ->
        a operation 2                       -> a operation unknown
        ",
    );
}

#[test]
fn failed_jobs_are_listed_kept_in_their_queues_and_handed_to_nobody() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two queue=mail task=send|publish three deliveries=1  -> a confirm 3
        w consume default+mail 3            -> w deliver one two@mail three
        w fail one class=ValueError message=bad|fail two class=OSError message=gone|crash three reason=SIGSEGV  -> w confirm 3
        w consume default+mail+dead 9       ->
        a failed                            -> a failed one:task@default#0:ValueError:bad two:send@mail#0:OSError:gone three:task@default#0:WorkerCrashed:SIGSEGV
        a failed queue=mail                 -> a failed two:send@mail#0:OSError:gone
        a failed task=task class=ValueError  -> a failed one:task@default#0:ValueError:bad
        a failed class=None                 -> a failed
        a failed fingerprint=7              -> a failed one:task@default#0:ValueError:bad two:send@mail#0:OSError:gone
        a failed from=1                     -> a failed
        a failed until=1 limit=1            -> a failed one:task@default#0:ValueError:bad next 4
        a failed behind=4 limit=1           -> a failed two:send@mail#0:OSError:gone next 5
        a failed behind=5                   -> a failed three:task@default#0:WorkerCrashed:SIGSEGV
        a failed newest limit=2             -> a failed three:task@default#0:WorkerCrashed:SIGSEGV two:send@mail#0:OSError:gone next 5
        a failed newest behind=5 limit=2    -> a failed one:task@default#0:ValueError:bad
        a failed newest behind=4            -> a failed
        a failed newest task=task limit=1   -> a failed three:task@default#0:WorkerCrashed:SIGSEGV next 6
        a status                            -> a status dead:0/0/0 default:0/0/0-failed2 mail:0/0/0-failed1 w=0/0/0 clients 1 results 3 evicted 0
        carry                               ->
        kill                                ->
        a hello                             -> a welcome 3
        a failed                            -> a failed one:task@default#0:ValueError:bad two:send@mail#0:OSError:gone three:task@default#0:WorkerCrashed:SIGSEGV
        ",
    );
}

/// A worker for a queue with any name, even `dead`, never receives a failed job, and the jobs of such a queue are like
/// any others.
#[test]
fn a_queue_called_dead_is_a_queue_like_any_other() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish own queue=dead            -> a confirm 1
        w consume default+dead 9            -> w deliver own@dead
        w fail own                          -> w confirm 1
        a publish other queue=dead          -> a confirm 2, w deliver other@dead
        w ack other; put other yes          -> w confirm 2
        a watch own other                   -> a sees own Failed error, a sees other Succeeded yes
        ",
    );
}

#[test]
fn a_failed_job_is_retried_as_its_next_generation() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one unless=k expires=50 headers=a:b|publish two deliveries=1  -> a confirm 2
        w consume default 2                 -> w deliver one two
        w fail one note=first|crash two     -> w confirm 2
        wait 60                             ->
        a publish between                   -> a confirm 3
        a watch one                         -> a sees one Failed error
        a retry one                         -> a confirm 4 4:Failed
        a watch one                         -> a sees one pending
        a guard k present                   -> a confirm 5
        a retry one                         -> a confirm 6 6:refused 0 TooLate(Ready)
        a retry nobody                      -> a confirm 7 7:refused 0 NoSuchJob
        a retry two                         -> a confirm 8 8:Failed
        a info one                          -> a knows Ready in default attempt 1 crashes 0 generation 1 notes first
        kill                                ->
        carry                               ->
        kill                                ->
        w hello                             -> w welcome 2
        # Behind earlier messages, and its attempts continue to count.
        w consume default 9                 -> w deliver between! one!#1 two#1
        w fail one note=second              -> w confirm 3
        w info one                          -> w knows Failed in default attempt 1 crashes 0 generation 1 failed Error:boom notes first+second
        w guard k absent                    -> w confirm 4
        ",
    );
}

#[test]
fn a_retry_is_refused_when_its_key_is_anothers_and_names_it() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one unless=k              -> a confirm 1
        w consume default 1                 -> w deliver one
        w fail one                          -> w confirm 1
        a publish two unless=k              -> a confirm 2
        a retry one                         -> a confirm 3 3:refused 0 Invalid
        a retry all                         -> a confirm 4 4:operation-1
        a operation 1                       -> a operation 1/0/1 over
        a cancel two                        -> a confirm 5 5:Ready
        a retry all                         -> a confirm 6 6:operation-2
        a operation 2                       -> a operation 1/1/0 over
        a publish three unless=k            -> a confirm 7 7:skipped[0]+0:owner-one
        ",
    );
}

/// A job whose key a client deleted while it ran has none to take back. In an earlier version it took the key when it
/// was retried, but not once its record had been carried forward and the broker had been killed.
#[test]
fn a_retry_takes_the_key_that_its_job_had_when_it_failed() {
    for carry in ["carry", "wait 1"] {
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one unless=k              -> a confirm 1
            a delete k                          -> a confirm 2
            mark                                ->
            w hello                             -> w welcome 0
            w consume default 1                 -> w deliver one
            {carry}                             ->
            kill                                ->
            w hello one                         -> w welcome 0 one
            w fail one                          -> w confirm 1
            a hello                             -> a welcome 2
            a retry one                         -> a confirm 3 3:Failed
            a guard k absent                    -> a confirm 4
            "
        ));
        // By then, a key that was deleted after the failure belonged to another message, or to none.
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one unless=k              -> a confirm 1
            w hello                             -> w welcome 0
            w consume default 1                 -> w deliver one
            w fail one                          -> w confirm 1
            a publish two unless=k              -> a confirm 2
            a delete k                          -> a confirm 3
            mark                                ->
            {carry}                             ->
            kill                                ->
            a hello                             -> a welcome 3
            a retry one                         -> a confirm 4 4:Failed
            a publish three unless=k            -> a confirm 5 5:skipped[0]+0:owner-one
            "
        ));
    }
}

#[test]
fn failed_jobs_are_dropped_one_or_all_and_the_oldest_when_they_are_too_many() {
    let few = BrokerOptions {
        failed_kept: 2,
        failed_kept_ms: 1_000,
        ..BrokerOptions::default()
    };
    check_with(
        few,
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two|publish three|publish four  -> a confirm 4
        w consume default 4                 -> w deliver one two three four
        w fail one|fail two                 -> w confirm 2
        wait 500                            ->
        w fail three                        -> w confirm 3, notice: failed jobs are dropped
        a failed                            -> a failed two:task@default#0:Error:boom three:task@default#0:Error:boom
        # Its reported result stays.
        a watch one                         -> a sees one Failed error
        wait 500                            ->
        a failed                            -> a failed three:task@default#0:Error:boom
        kill                                ->
        w hello                             -> w welcome 3
        w failed                            -> w failed three:task@default#0:Error:boom
        w drop three                        -> w confirm 4 4:Failed
        w drop three                        -> w confirm 5 5:refused 0 NoSuchJob
        w consume default 1                 -> w deliver four!
        w fail four                         -> w confirm 6
        w drop all class=Other              -> w confirm 7 7:operation-1
        w drop all class=Error              -> w confirm 8 8:operation-2
        w operation 2                       -> w operation 1/1/0 over
        w failed                            -> w failed
        ",
    );
}

/// A program that keeps starting failing workflows used to grow the broker for 30 days: jobs blocked by a failed group
/// were dropped only for their age.
#[test]
fn blocked_jobs_and_their_groups_count_among_failed_jobs_and_the_oldest_go() {
    let few = BrokerOptions {
        failed_kept: 6,
        ..BrokerOptions::default()
    };
    let small = BrokerOptions {
        failed_kept_bytes: 4_000,
        ..BrokerOptions::default()
    };
    for options in [few, small] {
        check_with(
            options,
            "
            a hello                             -> a welcome 0
            w hello                             -> w welcome 0
            a hold one count=1 messages=x+y bytes=1000; publish m member=one:0; hold outer count=2 messages=o; publish n member=outer:0  -> a confirm 1
            a watch x                           -> a sees x pending
            w consume default 9                 -> w deliver m n
            w fail m                            -> w confirm 1, a sees x Upstream m
            a failed                            -> a failed m:task@default#0:Error:boom
            a info x                            -> a knows Blocked in default attempt 0 crashes 0
            a info y                            -> a knows Blocked in default attempt 0 crashes 0
            kill                                ->
            a hello                             -> a welcome 1
            w hello n                           -> w welcome 1 n
            wait 5                              ->
            # The second group blocks one job more than there is room for: the first job is dropped, and its group.
            a hold two count=1 messages=v+u bytes=1000; publish k member=two:0  -> a confirm 2
            w consume default 9                 -> w deliver k
            w fail k                            -> w confirm 2, notice: failed jobs are dropped
            a failed                            -> a failed k:task@default#0:Error:boom
            a info x                            -> a knows nothing
            a info y                            -> a knows nothing
            a info u                            -> a knows Blocked in default attempt 0 crashes 0
            # A group that has not failed does not count.
            a info o                            -> a knows Held in default attempt 0 crashes 0
            a watch x                           -> a sees x Upstream
            kill                                ->
            a hello                             -> a welcome 2
            a info x                            -> a knows nothing
            a info v                            -> a knows Blocked in default attempt 0 crashes 0
            ",
        );
    }
}

/// The same in steps, since a group may hold any number of messages, or none.
#[test]
fn failing_workflows_without_end_leave_no_more_than_is_kept() {
    let few = BrokerOptions {
        failed_kept: 100,
        ..BrokerOptions::default()
    };
    let held = (0..3_000).map(|index| format!("h{index}"));
    let held: Vec<String> = held.collect();
    let mut script = format!(
        "
        a hello                                 -> a welcome 0
        w hello                                 -> w welcome 0
        a hold large count=1 messages={}; publish m member=large:0  -> a confirm 1
        w consume default 1                     -> w deliver m
        w fail m                                -> w confirm 1, notice: failed jobs are dropped
        a info h0                               -> a knows nothing
        a info h2999                            -> a knows nothing
        ",
        held.join("+")
    );
    for index in 0..200 {
        script += &format!(
            "
            a hold g{index} count=1; publish m{index} member=g{index}:0  -> a confirm {}
            w consume default 1                 -> w deliver m{index}
            w fail m{index}                     -> w confirm {}
            wait 1                              ->
            ",
            index + 2,
            index + 2
        );
    }
    script += "
        a failed limit=1                        -> a failed m150:task@default#0:Error:boom next 3304
        a publish late member=g149:0            -> a confirm 202 202:refused 0 Invalid
        a publish later member=g150:0           -> a confirm 203
        ";
    check_with(few, &script);
}

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

#[test]
fn short_space_drops_values_without_a_body_and_then_failed_jobs() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two|publish three|publish four deliveries=1  -> a confirm 4
        w consume default 2                 -> w deliver one two
        w ack one; put one yes|fail two     -> w confirm 2
        a cancel three                      -> a confirm 5 5:Ready
        a status                            -> a status default:1/0/0-failed1 w=0/0/0 clients 1 results 3 evicted 0
        a watch three                       -> a sees three Cancelled it was cancelled
        a watch four                        -> a sees four pending
        disk no-publishes                   -> notice: NoPublishes, notice: task over 67108864, notice: failed jobs are dropped
        a status                            -> a status default:1/0/0 w=0/0/0 clients 1 results 2 evicted 1
        a watch three                       -> a sees three gone
        a watch one two                     -> a sees one Succeeded yes, a sees two Failed error
        # Waiting clients are notified, although no value is kept.
        a purge default                     -> a confirm 6 6:operation-1, a sees four Cancelled its queue was purged
        a watch four                        -> a sees four gone
        disk plenty                         -> notice: Plenty
        kill                                ->
        a hello                             -> a welcome 4, a confirm 6 5:Ready 6:operation-1
        a status                            -> a status default:0/0/0 clients 1 results 2 evicted 2
        ",
    );
}

#[test]
fn an_operation_that_the_broker_does_not_know_is_refused_and_ends_nothing() {
    check(
        "
        a hello                             -> a welcome 0
        a unnamed x                         -> a confirm 1 1:refused 0 NotOffered
        a publish one                       -> a confirm 2
        ",
    );
}

/// The failure of a message may be behind another message with the same id in the journal. When the broker ended that
/// one, it forgot the failure. A broker that no longer found the message in the journal reported the failure again.
#[test]
fn a_value_that_the_end_of_a_message_has_replaced_does_not_come_back() {
    check(
        "
        a hello                                     -> a welcome 0
        a publish m2 queue=default+other deliveries=1  -> a confirm 1
        mark                                        ->
        w hello                                     -> w welcome 0
        w consume default 1                         -> w deliver m2
        w crash m2                                  -> w confirm 1
        a drop m2                                   -> a confirm 2 2:Failed
        a cancel m2                                 -> a confirm 3 3:Ready
        disk no-publishes                           -> notice: NoPublishes, notice: task over 67108864
        disk plenty                                 -> notice: Plenty
        a watch m2                                  -> a sees m2 gone
        carry                                       ->
        kill                                        ->
        b hello                                     -> b welcome 0
        b watch m2                                  -> b sees m2 gone
        ",
    );
}

/// Nor does the value of one of two copies that end together, if the other one is before it in the journal.
#[test]
fn a_value_that_the_end_of_a_copy_has_replaced_does_not_come_back() {
    check(
        "
        a hello                                     -> a welcome 0
        a publish m2 queue=default+other            -> a confirm 1
        mark                                        ->
        carry 2                                     ->
        a cancel m2                                 -> a confirm 2 2:Ready
        disk no-publishes                           -> notice: NoPublishes, notice: task over 67108864
        disk plenty                                 -> notice: Plenty
        a watch m2                                  -> a sees m2 gone
        carry                                       ->
        kill                                        ->
        b hello                                     -> b welcome 0
        b watch m2                                  -> b sees m2 gone
        ",
    );
}

/// The result that a retry removes may be the key of another message.
#[test]
fn a_key_that_is_a_result_keeps_its_owner_when_the_result_is_removed() {
    check(
        "
        a hello                                     -> a welcome 0
        a publish owner queue=slow unless=g/0       -> a confirm 1
        a publish g/0                               -> a confirm 2
        w hello                                     -> w welcome 0
        w consume default 1                         -> w deliver g/0
        w fail g/0                                  -> w confirm 1
        a retry g/0                                 -> a confirm 3 3:Failed
        a publish other unless=g/0                  -> a confirm 4 4:skipped[0]+0:owner-owner
        kill                                        ->
        b hello                                     -> b welcome 0
        b publish other unless=g/0                  -> b confirm 1 1:skipped[0]+0:owner-owner
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
