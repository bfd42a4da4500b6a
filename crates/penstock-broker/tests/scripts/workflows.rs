//! Steps that wait for others: which outcome releases them, and which values they get. `g/` is a join, `g/0` its first
//! member.

use penstock_broker::BrokerOptions;

use crate::script::{check, check_with};

#[test]
fn a_body_is_given_the_values_of_its_group_in_order() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w ack g/1; put g/1 two                                        -> w confirm 1
        w ack g/0; put g/0 one                                        -> w confirm 2, w deliver body[one two]
        w ack body; put body done                                     -> w confirm 3
        b hello                                                       -> b welcome 0
        b watch body                                                  -> b sees body Succeeded done
        ",
    );
}

#[test]
fn each_step_of_a_chain_is_given_the_value_of_the_one_before() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold j/ count=1 messages=c inputs=one; hold i/ count=1 messages=j/0 inputs=one member=j/:0; publish i/0 member=i/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver i/0
        w ack i/0; put i/0 one                                        -> w confirm 1, w deliver j/0[one]
        kill                                                          ->
        w hello j/0                                                   -> w welcome 1 j/0
        w ack j/0; put j/0 two                                        -> w confirm 2
        w consume default 10                                          -> w deliver c![two]
        carry                                                         ->
        w return c                                                    -> w confirm 3, w deliver c![two]
        ",
    );
}

/// Case 9: the first member beyond those that the group tolerates decides. Messages that waited for it name the failed
/// job, and so do all that waited for those; other members continue.
#[test]
fn blocked_jobs_name_the_failed_job() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold h/ count=1 messages=last inputs=one; hold g/ count=2 messages=h/0 inputs=list member=h/:0 result=1000000; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        a watch last h/0 g/ -> a sees last pending, a sees h/0 pending, a sees g/ pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w fail g/1 boom                                               -> w confirm 1, a sees g/ Upstream g/1, a sees h/0 Upstream g/1, a sees last Upstream g/1
        w ack g/0; put g/0 one                                        -> w confirm 2
        a info last                                                   -> a knows Blocked in default attempt 0 crashes 0
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch last h/0 g/ -> a sees last Upstream g/1, a sees h/0 Upstream g/1, a sees g/ Upstream g/1
        ",
    );
}

/// Case 10.
#[test]
fn a_body_is_given_failures_that_its_group_tolerates() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=3 messages=body inputs=list max-failures=2; publish g/0 member=g/:0; publish g/1 member=g/:1; publish g/2 member=g/:2 expires=10 queue=slow -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w fail g/1 boom                                               -> w confirm 1
        carry                                                         ->
        w ack g/0; put g/0 one                                        -> w confirm 2
        kill                                                          ->
        w hello                                                       -> w welcome 2
        w consume default 10                                          ->
        wait 10                                                       -> w deliver body![one Failed:error Expired]
        ",
    );
}

#[test]
fn one_failure_more_than_a_group_tolerates_blocks_its_body() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=3 messages=body inputs=list max-failures=1; publish g/0 member=g/:0; publish g/1 member=g/:1; publish g/2 member=g/:2 -> a confirm 1
        a watch body                                                  -> a sees body pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1 g/2
        w fail g/1 boom                                               -> w confirm 1
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch body                                                  -> a sees body pending
        w hello g/0 g/2                                               -> w welcome 1 g/0 g/2
        w fail g/2 bang                                               -> w confirm 2, a sees body Upstream g/1+g/2
        ",
    );
}

/// A crash used to lose the reason why later steps of a chain had failed: only the first was reported again in the
/// right order.
#[test]
fn blocked_jobs_name_the_failed_job_after_a_crash() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold b/ count=1 messages=last inputs=one; hold c/ count=1 messages=b/0 inputs=one member=b/:0; hold z/ count=1 messages=c/0 inputs=one member=c/:0; publish z/0 member=z/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver z/0
        w fail z/0 boom                                               -> w confirm 1
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch c/0 b/0 last -> a sees c/0 Upstream z/0, a sees b/0 Upstream z/0, a sees last Upstream z/0
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch c/0 b/0 last -> a sees c/0 Upstream z/0, a sees b/0 Upstream z/0, a sees last Upstream z/0
        ",
    );
}

/// The failed job used to be named once for each job that it had blocked.
#[test]
fn a_failed_job_is_named_once_by_everything_it_has_blocked() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=3 messages=body inputs=list max-failures=2; hold k/ count=1 messages=g/1 inputs=one member=g/:1; hold i/ count=1 messages=g/0 inputs=one member=g/:0 then=k/:0; publish i/0 member=i/:0; publish g/2 member=g/:2 -> a confirm 1
        a watch body                                                  -> a sees body pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver i/0 g/2
        w fail i/0 boom                                               -> w confirm 1
        kill                                                          ->
        a hello                                                       -> a welcome 1
        w hello g/2                                                   -> w welcome 1 g/2
        a watch body                                                  -> a sees body pending
        w fail g/2 bang                                               -> w confirm 2, a sees body Upstream g/2+i/0
        ",
    );
}

/// A member that is itself blocked by a failure has failed because of that failure.
#[test]
fn a_body_is_given_the_cause_of_a_blocked_member() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list all-ended; hold i/ count=1 messages=g/1 inputs=one member=g/:1; publish i/0 member=i/:0; publish g/0 member=g/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver i/0 g/0
        w ack g/0; put g/0 one                                        -> w confirm 1
        w fail i/0 boom                                               -> w confirm 2, w deliver body[one Upstream:i/0]
        ",
    );
}

/// Cases 16 and 5: a group in a group is a list in a list.
#[test]
fn a_group_in_a_group_is_a_list_in_a_list() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold o/ count=2 messages=body inputs=list; hold i/ count=2 then=o/:1 result=1000; publish i/0 member=i/:0; publish i/1 member=i/:1; publish o/0 member=o/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver i/0 i/1 o/0
        w ack i/1; put i/1 y                                          -> w confirm 1
        w ack i/0; put i/0 x                                          -> w confirm 2
        carry                                                         ->
        kill                                                          ->
        w hello o/0                                                   -> w welcome 2 o/0
        w ack o/0; put o/0 z                                          -> w confirm 3
        w consume default 10                                          -> w deliver body![z [x y]]
        carry                                                         ->
        wait 2                                                        ->
        w return body                                                 -> w confirm 4, w deliver body![z [x y]]
        ",
    );
}

/// Case 21: once, on the failure, with the failed jobs.
#[test]
fn an_errback_runs_once_when_the_failure_happens() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=rescue inputs=list when=failed; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w fail g/0 boom                                               -> w confirm 1, w deliver rescue[Upstream:g/0]
        w fail g/1 bang                                               -> w confirm 2
        kill                                                          ->
        w hello rescue                                                -> w welcome 2 rescue
        w ack rescue; put rescue saved                                -> w confirm 3
        w consume default 10                                          ->
        ",
    );
}

/// Case 22.
#[test]
fn an_errback_without_a_failure_ends_as_not_needed() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=rescue inputs=one when=failed; publish g/0 member=g/:0 -> a confirm 1
        a watch rescue                                                -> a sees rescue pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w ack g/0                                                     -> w confirm 1, a sees rescue Cancelled it was not needed: nothing that it waited for has failed
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 10                                          ->
        ",
    );
}

/// A step that is not needed used to report to its joins that it had failed, as a cancelled job does, so its own errback ran.
#[test]
fn a_step_that_is_not_needed_has_neither_succeeded_nor_failed() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold s/ count=1 messages=after; hold r/ count=1 messages=s/0 inputs=one when=failed member=s/:0; hold g/ count=1 messages=r/0 inputs=one when=failed member=r/:0; publish g/0 member=g/:0 -> a confirm 1
        a watch r/0 s/0 after -> a sees r/0 pending, a sees s/0 pending, a sees after pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w ack g/0 -> w confirm 1, a sees after Cancelled it was not needed: nothing that it waited for has failed, a sees s/0 Cancelled it was not needed: nothing that it waited for has failed, a sees r/0 Cancelled it was not needed: nothing that it waited for has failed
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 10                                          ->
        carry                                                         ->
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 10                                          ->
        ",
    );
}

/// Case 14: neither age nor the cap removes values that a body has yet to read. After that, both do.
#[test]
fn values_are_pinned_until_the_body_has_settled() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body inputs=list; publish g/0 member=g/:0 ttl=5000 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        w ack g/0; put g/0 one ttl=5                                  -> w confirm 1
        wait 100                                                      ->
        carry                                                         ->
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 1                                           -> w deliver body![one]
        w fail body boom                                              -> w confirm 2
        wait 100                                                      ->
        a hello                                                       -> a welcome 1
        a retry body                                                  -> a confirm 2 2:Failed
        w consume default 1                                           -> w deliver body#1[one]
        w ack body                                                    -> w confirm 3
        wait 61000                                                    ->
        a watch g/0                                                   -> a sees g/0 gone
        ",
    );
}

/// The result of a failed group says which jobs have failed it, and the client then asks for their errors. These used
/// to expire after their own time, which left the group's failure without a cause.
#[test]
fn the_errors_that_have_failed_a_group_are_pinned_as_long_as_its_result_is_kept() {
    for between in ["# No crash.", "carry\nkill\na hello -> a welcome 1"] {
        check(&format!(
            "
            a hello                                                   -> a welcome 0
            a hold g/ count=2 result=1000000; publish g/0 member=g/:0 ttl=50; publish g/1 member=g/:1 ttl=50 -> a confirm 1
            w hello                                                   -> w welcome 0
            w consume default 2                                       -> w deliver g/0 g/1
            w ack g/1; put g/1 one ttl=50                             -> w confirm 1
            w fail g/0 boom                                           -> w confirm 2
            {between}
            wait 61000                                                ->
            a watch g/ g/0 g/1 -> a sees g/ Upstream g/0, a sees g/0 Failed error, a sees g/1 gone
            "
        ));
    }
}

/// Values that a failed body has yet to read were each checked once a minute, for the month in which it may be retried.
/// Here, each of two is checked once an hour on the second day. The broker checks equally often whether names are still
/// in use.
#[test]
fn values_pinned_for_long_are_checked_ever_more_rarely() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list max-failures=1; publish g/0 member=g/:0 ttl=5000; publish g/1 member=g/:1 expires=10 ttl=50 queue=slow -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        w ack g/0; put g/0 one ttl=5                                  -> w confirm 1
        w consume default 1                                           ->
        wait 10                                                       -> w deliver body[one Expired]
        w fail body boom                                              -> w confirm 2
        looks 3600000                                                 -> 15
        # One of them at the begin of the second in which the result of the body expires.
        looks 86400000                                                -> 97
        ",
    );
}

/// Only the time and the reason of its end are kept for a member that never ran. Its time to live used to take these
/// from its body.
#[test]
fn how_a_member_ended_unrun_is_kept_until_the_body_has_settled() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list max-failures=1; publish g/0 member=g/:0 expires=10 ttl=50 queue=slow; publish g/1 member=g/:1; publish other expires=10 ttl=50 queue=slow -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/1
        wait 10                                                       ->
        wait 100                                                      ->
        a watch g/0 other                                             -> a sees g/0 Expired, a sees other gone
        carry                                                         ->
        kill                                                          ->
        w hello g/1                                                   -> w welcome 0 g/1
        w consume default 1                                           ->
        wait 100                                                      ->
        w ack g/1; put g/1 two                                        -> w confirm 1, w deliver body![Expired two]
        w ack body                                                    -> w confirm 2
        wait 61000                                                    ->
        a hello                                                       -> a welcome 1
        a watch g/0                                                   -> a sees g/0 gone
        ",
    );
}

/// The first results of a large group used to be dropped when its task's results were over the cap, and its body got
/// only some.
#[test]
fn the_cap_on_results_spares_those_that_a_body_is_to_read() {
    let options = BrokerOptions {
        results_cap_bytes: 200,
        ..BrokerOptions::default()
    };
    check_with(
        options,
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=3 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1; publish g/2 member=g/:2 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 3                                           -> w deliver g/0 g/1 g/2
        w ack g/0; put g/0 one group=task                             -> w confirm 1
        w ack g/1; put g/1 two group=task                             -> w confirm 2
        w ack g/2; put g/2 three group=task                           -> w confirm 3
        w consume default 1                                           -> w deliver body[one two three]
        w ack body; put body done group=task                          -> w confirm 4, notice: task over 200
        a publish more; publish others                                -> a confirm 2
        w consume default 2                                           -> w deliver more others
        w ack more; put more value group=task                         -> w confirm 5
        w ack others; put others value group=task                     -> w confirm 6
        a watch g/0                                                   -> a sees g/0 gone
        ",
    );
}

/// Case 27, as far as jobs are concerned: everything in the workflow is cancelled, and nothing else.
#[test]
fn a_workflow_is_cancelled_by_its_id() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list workflow=body; publish g/0 member=g/:0 workflow=body; publish g/1 member=g/:1 workflow=body after=100; publish other -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        a cancel all workflow=body ask                                -> a confirm 2 2:operation-1, w stop g/0 (it was cancelled)
        a watch body g/1                                              -> a sees body Cancelled it was cancelled, a sees g/1 Cancelled it was cancelled
        w return g/0                                                  -> w confirm 1
        w consume default 1                                           -> w deliver other
        ",
    );
}

#[test]
fn inputs_are_those_of_the_join_that_holds_the_job() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body then=gone/:0                  -> a confirm 1 1:refused 0 Invalid
        ",
    );
}

/// A workflow is listed from its beginning to its end, with its jobs in each state, and for a day after.
#[test]
fn a_workflow_is_listed_with_counts_of_its_jobs() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open body name=nightly steps=tree; hold g/ count=2 messages=body inputs=list workflow=body; publish g/0 member=g/:0 workflow=body; publish g/1 member=g/:1 workflow=body after=100; publish other -> a confirm 1
        a workflows                                                   -> a workflows body:nightly:running:waiting3
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        a workflows of=body nodes=g/+g/0+g/1+body+other               -> a workflows body:nightly:running:waiting2+running1:tree 0/2-failed0-running Running Delayed Held Ready
        w ack g/0; put g/0 one                                        -> w confirm 1
        wait 101                                                      ->
        w consume default 2                                           -> w deliver g/1 other
        w ack g/1; put g/1 two; ack other                             -> w confirm 2
        a workflows                                                   -> a workflows body:nightly:running:waiting1+succeeded2
        w consume default 1                                           -> w deliver body[one two]
        w ack body; put body done                                     -> w confirm 3
        a workflows of=body nodes=g/+g/0+body                         -> a workflows body:nightly:succeeded:succeeded3-over:tree gone Succeeded Succeeded
        wait 86399000                                                 ->
        b hello                                                       -> b welcome 0
        b workflows                                                   -> b workflows body:nightly:succeeded:succeeded3-over
        wait 1001                                                     ->
        b workflows                                                   -> b workflows
        ",
    );
}

/// The same while the journal is reclaimed: jobs whose records are older than their workflow's also end for it.
#[test]
fn a_workflow_keeps_its_counts_while_the_journal_is_carried_forward() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open body; hold g/ count=3 messages=body inputs=list workflow=body max-failures=2; publish g/0 member=g/:0 workflow=body; publish g/1 member=g/:1 workflow=body; publish g/2 member=g/:2 workflow=body queue=slow -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        w ack g/0; put g/0 one                                        -> w confirm 1
        carry                                                         ->
        w consume default 1                                           -> w deliver g/1
        mark                                                          ->
        carry 3                                                       ->
        w fail g/1 boom                                               -> w confirm 2
        carry                                                         ->
        a cancel g/2                                                  -> a confirm 2 2:Ready
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1, a confirm 2 2:Ready
        a workflows                                                   -> a workflows body:nightly:running:waiting1+succeeded1+failed1+cancelled1
        w hello                                                       -> w welcome 2
        w consume default 1                                           -> w deliver body![one Failed:error Cancelled:it was cancelled]
        w ack body; put body done                                     -> w confirm 3
        carry                                                         ->
        kill                                                          ->
        b hello                                                       -> b welcome 0
        b workflows                                                   -> b workflows body:nightly:succeeded:succeeded2+failed1+cancelled1-over
        ",
    );
}

/// A workflow has failed as soon as its last step can't run, and ends with the last job that can. It is kept for as long as its
/// failed job.
#[test]
fn a_failed_workflow_names_its_blocked_jobs() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open body; hold g/ count=2 messages=body inputs=list workflow=body no-result; publish g/0 member=g/:0 workflow=body no-result; publish g/1 member=g/:1 workflow=body no-result -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w fail g/0 boom                                               -> w confirm 1
        a workflows state=running                                     -> a workflows
        a workflows state=failed nodes=g/+body                        -> a workflows body:nightly:failed:running1+failed1+blocked1 1/2-failed1-failed Blocked
        carry                                                         ->
        kill                                                          ->
        w hello g/1                                                   -> w welcome 1 g/1
        w ack g/1                                                     -> w confirm 2
        a hello                                                       -> a welcome 1
        a workflows                                                   -> a workflows body:nightly:failed:succeeded1+failed1+blocked1-over
        carry                                                         ->
        kill                                                          ->
        wait 2591999000                                               ->
        b hello                                                       -> b welcome 0
        b workflows                                                   -> b workflows body:nightly:failed:succeeded1+failed1+blocked1-over
        wait 1002                                                     ->
        b workflows                                                   -> b workflows
        ",
    );
}

/// Its jobs end, and it ends with them; errbacks that were not needed do not count as cancelled.
#[test]
fn a_workflow_ends_as_its_last_step_does() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open c1 name=cancelled; publish c1 workflow=c1              -> a confirm 1
        a open e1 name=expired; publish e1 workflow=e1 expires=10     -> a confirm 2
        a open g/ name=group; hold g/ count=1 messages=rescue inputs=list when=failed workflow=g/; publish g/0 member=g/:0 workflow=g/ -> a confirm 3
        a cancel all workflow=c1                                      -> a confirm 4 4:operation-1
        wait 10                                                       ->
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w ack g/0; put g/0 one                                        -> w confirm 1
        carry                                                         ->
        kill                                                          ->
        a hello last=4                                                -> a welcome 3, a confirm 4 4:operation-1
        a workflows                                                   -> a workflows g/:group:succeeded:succeeded1-over e1:expired:expired:cancelled1-over c1:cancelled:cancelled:cancelled1-over
        a workflows limit=1                                           -> a workflows g/:group:succeeded:succeeded1-over next g/
        a workflows limit=1 behind=g/                                 -> a workflows e1:expired:expired:cancelled1-over next e1
        a workflows name=cancelled                                    -> a workflows c1:cancelled:cancelled:cancelled1-over
        ",
    );
}

/// A group whose members were cancelled has failed, but a workflow that was cancelled as a whole has not.
#[test]
fn a_workflow_that_is_cancelled_says_so() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open g/; hold g/ count=2 workflow=g/ result=90000; publish g/0 member=g/:0 workflow=g/; publish g/1 member=g/:1 workflow=g/ -> a confirm 1
        a open h/; hold h/ count=2 workflow=h/ result=90000; publish h/0 member=h/:0 workflow=h/; publish h/1 member=h/:1 workflow=h/ -> a confirm 2
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        a cancel all workflow=g/                                      -> a confirm 3 3:operation-1
        a cancel h/0                                                  -> a confirm 4 4:Ready
        a workflows                                                   -> a workflows h/:nightly:failed:waiting1+cancelled1 g/:nightly:cancelled:running1+cancelled1
        carry                                                         ->
        kill                                                          ->
        w hello g/0                                                   -> w welcome 0 g/0
        w ack g/0                                                     -> w confirm 1
        w workflows                                                   -> w workflows h/:nightly:failed:waiting1+cancelled1 g/:nightly:cancelled:succeeded1+cancelled1-over
        ",
    );
}

/// Case 27: no part of it starts any more, whichever client sends it. Jobs that a successful job of it sends are
/// skipped: see `replaced.rs`.
#[test]
fn jobs_added_to_a_cancelled_workflow_are_cancelled() {
    for between in ["", "carry", "kill"] {
        check(&format!(
            "
            a hello                                                   -> a welcome 0
            a open body; hold g/ count=1 messages=body workflow=body; publish g/0 member=g/:0 workflow=body -> a confirm 1
            a cancel all workflow=body                                -> a confirm 2 2:operation-1
            a hold o/ count=2 messages=last inputs=list; publish o/1 member=o/:1 queue=slow -> a confirm 3
            {between}
            w hello                                                   -> w welcome 0
            w consume default 9                                       ->
            b hello                                                   -> b welcome 0
            b publish late workflow=body queue=default+other          -> b confirm 1
            b publish other                                           -> b confirm 2, w deliver other
            b hold h/ count=1 messages=h2 inputs=one member=o/:0 workflow=body; publish h/0 member=h/:0 workflow=body after=50; hold e/ count=0 messages=e2 workflow=body -> b confirm 3
            w ack other; publish later workflow=body                  -> w confirm 1
            b watch late later h/0 h2 e2 last -> b sees late Cancelled its workflow was cancelled, b sees later Cancelled its workflow was cancelled, b sees h/0 Cancelled its workflow was cancelled, b sees h2 Cancelled its workflow was cancelled, b sees e2 Cancelled its workflow was cancelled, b sees last Upstream h2
            b workflows                                               -> b workflows body:nightly:cancelled:cancelled8-over
            "
        ));
    }
}

/// A job that continues anyway may send more: an errback after a deadline, or a job that a person retries.
#[test]
fn jobs_that_continue_in_a_cancelled_workflow_may_send_more() {
    check(
        "
        a hello                                                       -> a welcome 0
        w hello                                                       -> w welcome 0
        w consume default 9                                           ->
        a open g/ deadline=50; hold g/ count=1 messages=rescue when=failed workflow=g/; publish g/0 member=g/:0 workflow=g/ queue=slow -> a confirm 1
        wait 50                                                       -> w deliver rescue
        w publish more workflow=g/ parent=rescue                      -> w confirm 1, w deliver more
        w publish others workflow=g/ parent=more                      -> w confirm 2
        w ack rescue; publish last workflow=g/                        -> w confirm 3, w deliver last
        ",
    );
}

/// The retried job may belong to a group that stays failed. Once carried forward, that group used to be taken for a
/// failure after the retry, and a broker that read the journal reported that the workflow had ended.
#[test]
fn a_workflow_continues_while_its_failed_group_is_carried_forward() {
    check(
        "
        a hello                                                       -> a welcome 0
        w hello                                                       -> w welcome 0
        w consume default 9                                           ->
        a open g/; hold g/ count=2 workflow=g/; publish g/0 member=g/:0 workflow=g/; publish g/1 member=g/:1 workflow=g/ queue=slow -> a confirm 1, w deliver g/0
        w fail g/0 boom                                               -> w confirm 1
        a cancel g/1                                                  -> a confirm 2 2:Ready
        a retry g/0                                                   -> a confirm 3 3:Failed, w deliver g/0#1
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1, a confirm 3 2:Ready 3:Failed
        a workflows                                                   -> a workflows g/:nightly:running:running1+cancelled1
        ",
    );
}

/// A job that is retried, or arrives later, reopens its workflow.
#[test]
fn a_workflow_continues_with_a_retried_job() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open one kept=50; publish one workflow=one                  -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver one
        w fail one boom                                               -> w confirm 1
        a workflows                                                   -> a workflows one:nightly:failed:failed1-over
        carry                                                         ->
        a retry one                                                   -> a confirm 2 2:Failed
        a workflows                                                   -> a workflows one:nightly:running:waiting1
        carry                                                         ->
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 1                                           -> w deliver one!#1
        w ack one                                                     -> w confirm 2
        a hello last=2                                                -> a welcome 1, a confirm 2 2:Failed
        a workflows                                                   -> a workflows one:nightly:succeeded:succeeded1-over
        a publish two workflow=one                                    -> a confirm 3
        a workflows                                                   -> a workflows one:nightly:succeeded:waiting1+succeeded1
        wait 100                                                      ->
        w consume default 1                                           -> w deliver two
        w ack two                                                     -> w confirm 3
        wait 51                                                       ->
        a workflows                                                   -> a workflows
        ",
    );
}

/// Ended workflows are forgotten early when there are too many; workflows that continue never are.
#[test]
fn no_more_ended_workflows_are_listed_than_are_kept() {
    let options = BrokerOptions {
        workflows_kept: 2,
        ..BrokerOptions::default()
    };
    check_with(
        options,
        "
        a hello                                                       -> a welcome 0
        a open one; publish one workflow=one | open two; publish two workflow=two | open three; publish three workflow=three | open four; publish four workflow=four -> a confirm 4
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver one two three four
        w fail one boom                                               -> w confirm 1
        w ack two                                                     -> w confirm 2
        wait 1                                                        ->
        w ack three                                                   -> w confirm 3
        a workflows                                                   -> a workflows three:nightly:succeeded:succeeded1-over one:nightly:failed:failed1-over four:nightly:running:running1
        kill                                                          ->
        a hello                                                       -> a welcome 4
        a workflows                                                   -> a workflows three:nightly:succeeded:succeeded1-over one:nightly:failed:failed1-over four:nightly:running:running1
        ",
    );
}

#[test]
fn a_workflow_keeps_its_deadline_its_sender_and_its_steps() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open one deadline-at=60000 parent=job steps=tree; publish one workflow=one -> a confirm 1
        a open one name=other; publish two workflow=one               -> a confirm 2
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 2
        a workflows of=one                                            -> a workflows one:nightly:running:waiting2:tree:by60000:of-job
        ",
    );
}

/// Steps of a graph may wait for any end of some members, and for the success of others.
#[test]
fn a_member_may_be_expected_to_end_however_it_does() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold s/ count=2 messages=body inputs=list expects=1:ended; publish s/0 member=s/:0; publish s/1 member=s/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver s/0 s/1
        w fail s/1 boom                                               -> w confirm 1
        carry                                                         ->
        kill                                                          ->
        w hello s/0                                                   -> w welcome 1 s/0
        w ack s/0; put s/0 one                                        -> w confirm 2
        w consume default 10                                          -> w deliver body![one Failed:error]
        ",
    );
}

#[test]
fn a_step_that_expects_a_failure_runs_when_it_happens() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold s/ count=2 messages=alarm inputs=list expects=0:failed; publish s/0 member=s/:0; publish s/1 member=s/:1 -> a confirm 1
        carry                                                         ->
        kill                                                          ->
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver s/0! s/1!
        w ack s/1; put s/1 one                                        -> w confirm 1
        w fail s/0 boom                                               -> w confirm 2, w deliver alarm![Failed:error one]
        ",
    );
}

/// An errback ends as not needed, as do all messages that wait for it; messages that run in any case still run.
#[test]
fn a_step_that_expects_a_failure_is_not_needed_without_one() {
    for pause in [
        "",
        "carry ->",
        "carry 1 ->",
        "carry 2 ->",
        "carry 3 ->",
        "carry 4 ->",
        "carry 5 ->",
        "kill ->",
        "carry ->\n kill ->",
    ] {
        let greeting = match pause.contains("kill") {
            true => "w hello s/0 -> w welcome 0 s/0",
            false => "",
        };
        check(&format!(
            "
            a hello                                                   -> a welcome 0
            a hold e/ count=1 messages=last inputs=one expects=0:ended; hold t/ count=1 messages=e/0 inputs=one member=e/:0 -> a confirm 1
            a hold s/ count=1 messages=t/0 inputs=one member=t/:0 expects=0:failed; publish s/0 member=s/:0 -> a confirm 2
            w hello                                                   -> w welcome 0
            w consume default 1                                       -> w deliver s/0
            {pause}
            {greeting}
            w ack s/0; put s/0 one                                    -> w confirm 1
            b hello                                                   -> b welcome 0
            b watch t/0 e/0                                           -> b sees t/0 Cancelled it was not needed: nothing that it waited for has failed, b sees e/0 Cancelled it was not needed: nothing that it waited for has failed
            carry                                                     ->
            kill                                                      ->
            w hello                                                   -> w welcome 1
            w consume default 1                                       -> w deliver last![Cancelled:it was not needed: nothing that it waited for has failed]
            "
        ));
    }
}

#[test]
fn a_failure_blocks_steps_that_also_wait_for_one_that_is_not_needed() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold s/ count=2 messages=body inputs=list expects=1:failed; publish s/0 member=s/:0; publish s/1 member=s/:1 -> a confirm 1
        a watch body                                                  -> a sees body pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver s/0 s/1
        w fail s/0 boom                                               -> w confirm 1, a sees body Upstream s/0
        w ack s/1; put s/1 one                                        -> w confirm 2
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch body                                                  -> a sees body Upstream s/0
        ",
    );
}

#[test]
fn a_join_reports_to_all_joins_that_it_is_a_member_of() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold x/ count=1 messages=one inputs=one; hold y/ count=1 messages=two inputs=one expects=0:ended -> a confirm 1
        a hold u/ count=1 then=x/:0+y/:0 result=1000000; publish u/0 member=u/:0 -> a confirm 2
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver u/0
        carry                                                         ->
        kill                                                          ->
        w hello u/0                                                   -> w welcome 0 u/0
        w ack u/0; put u/0 value                                      -> w confirm 1
        w consume default 10                                          -> w deliver one![[value]] two![[value]]
        ",
    );
}

#[test]
fn expectations_are_of_members_and_in_their_order() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body expects=1:ended               -> a confirm 1 1:refused 0 Invalid
        a hold g/ count=3 messages=body expects=1:ended+0:failed      -> a confirm 2 2:refused 0 Invalid
        ",
    );
}

/// Cases 1 and 2, where the group is part of another step.
#[test]
fn a_group_without_members_succeeds_at_once() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list; hold e/ count=0 then=g/:1 messages=link inputs=list result=1000000; publish g/0 member=g/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver link[] g/0
        carry                                                         ->
        kill                                                          ->
        w hello g/0                                                   -> w welcome 0 g/0
        w ack g/0; put g/0 one                                        -> w confirm 1
        w consume default 10                                          -> w deliver body![one []] link![]
        ",
    );
}

/// Case 39: times of a step that waits for others count from when it may run.
#[test]
fn a_countdown_of_a_held_message_begins_with_its_release() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body inputs=list later=50; publish g/0 member=g/:0 -> a confirm 1
        carry                                                         ->
        wait 100                                                      ->
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w ack g/0; put g/0 one                                        -> w confirm 1
        a info body                                                   -> a knows Delayed in default attempt 0 crashes 0
        wait 30                                                       ->
        carry                                                         ->
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 10                                          ->
        wait 20                                                       ->
        wait 1                                                        -> w deliver body![one]
        ",
    );
}

#[test]
fn a_held_message_expires_so_long_after_its_release() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold h/ count=1 messages=last inputs=one expects=0:ended; hold g/ count=1 messages=h/0 member=h/:0 later=50 later-expires=20; publish g/0 member=g/:0 -> a confirm 1
        wait 100                                                      ->
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w ack g/0                                                     -> w confirm 1
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 10                                          ->
        wait 20                                                       -> w deliver last![Expired]
        ",
    );
}

#[test]
fn a_time_that_a_person_named_is_kept_while_a_message_is_held() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=past later-at=10; publish g/0 member=g/:0; hold i/ count=1 messages=later later-at=5000; publish i/0 member=i/:0 -> a confirm 1
        wait 1000                                                     ->
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 i/0
        w ack g/0                                                     -> w confirm 1, w deliver past
        w ack i/0                                                     -> w confirm 2
        a info later                                                  -> a knows Delayed in default attempt 0 crashes 0
        wait 3999                                                     ->
        wait 1                                                        -> w deliver later
        ",
    );
}

/// Errbacks have their own times, too.
#[test]
fn an_errback_may_be_delayed_from_its_release() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=rescue inputs=one when=failed later=50; publish g/0 member=g/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        wait 100                                                      ->
        w fail g/0 boom                                               -> w confirm 1
        carry                                                         ->
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume default 10                                          ->
        wait 51                                                       -> w deliver rescue![Failed:error]
        ",
    );
}

/// The journal may contain a job twice, once where it arrived and once where it was carried forward. A broker that read
/// both counted it twice when its group failed.
#[test]
fn a_blocked_job_that_the_journal_names_twice_is_counted_once() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open body; hold g/ count=1 messages=body inputs=list workflow=body; publish g/0 member=g/:0 workflow=body -> a confirm 1
        carry 9                                                       ->
        a cancel g/0                                                  -> a confirm 2 2:Ready
        kill                                                          ->
        b hello                                                       -> b welcome 0
        b workflows                                                   -> b workflows body:nightly:failed:cancelled1+blocked1-over
        ",
    );
}
