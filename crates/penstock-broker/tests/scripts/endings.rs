//! However a message ends, the result is the same: its value exists, its key is free, and its join has learned of it.

use crate::script::check;

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
