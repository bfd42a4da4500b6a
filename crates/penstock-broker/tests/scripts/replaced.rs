//! Jobs that are replaced by other steps, which take their ids and places. `r` is a lone job, and `u/` a join.

use crate::script::check;

/// Case 15. Clients that wait for the job keep waiting, and get the value that the other job returns.
#[test]
fn a_job_takes_the_id_of_the_one_that_it_replaces() {
    check(
        "
        a hello                                                       -> a welcome 0
        a publish r                                                   -> a confirm 1
        a watch r                                                     -> a sees r pending
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver r
        w replace r; publish r task=other queue=slow                  -> w confirm 1
        a info r                                                      -> a knows Ready in slow attempt 0 crashes 0
        carry                                                         ->
        kill                                                          ->
        w hello                                                       -> w welcome 1
        w consume slow 1                                              -> w deliver r@slow!
        a hello                                                       -> a welcome 1
        a watch r                                                     -> a sees r pending
        w ack r; put r done                                           -> w confirm 2, a sees r Succeeded done
        ",
    );
}

#[test]
fn the_lease_of_a_replaced_job_does_not_settle_the_one_in_its_place() {
    check(
        "
        a hello                                                       -> a welcome 0
        a publish r                                                   -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        w replace r; publish r task=other                             -> w confirm 1, w deliver r
        w return r                                                    -> w confirm 2, w deliver r!
        w seq=1 replace r; publish r task=other                       -> w confirm 2
        w ack r                                                       -> w confirm 3
        w replace r; publish r                                        -> w confirm 4 4:refused 0 LeaseLost
        ",
    );
}

/// Case 15: in a group, and before the last step of a chain.
#[test]
fn the_end_of_a_step_reports_in_place_of_the_job_that_it_replaces() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w ack g/1; put g/1 two                                        -> w confirm 1
        w replace g/0; hold c/ count=1 messages=g/0 inputs=one; publish c/0 member=c/:0 -> w confirm 2, w deliver c/0
        kill                                                          ->
        w hello c/0                                                   -> w welcome 2 c/0
        w ack c/0; put c/0 half                                       -> w confirm 3
        w consume default 10                                          -> w deliver g/0![half]
        carry                                                         ->
        w ack g/0; put g/0 one                                        -> w confirm 4, w deliver body![one two]
        ",
    );
}

/// Case 16.
#[test]
fn the_values_of_a_group_take_the_place_of_the_job_that_it_replaces() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold j/ count=1 messages=next inputs=one; publish j/0 member=j/:0 -> a confirm 1
        a watch j/0                                                   -> a sees j/0 pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver j/0
        w replace j/0; hold u/ count=2 then=j/:0 result=1000000; publish u/0 member=u/:0; publish u/1 member=u/:1 -> w confirm 1, w deliver u/0 u/1
        w ack u/0; put u/0 one                                        -> w confirm 2
        carry                                                         ->
        w ack u/1; put u/1 two                                        -> w confirm 3, a sees j/0 Gathered u/ of 2, w deliver next[[one two]]
        ",
    );
}

/// The same for a job that has no place: the outcome of the group is kept under its id.
#[test]
fn a_group_takes_the_id_of_a_job_that_has_no_place() {
    check(
        "
        a hello                                                       -> a welcome 0
        a publish r                                                   -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        w replace r; hold u/ count=2 takes=r result=1000000; publish u/0 member=u/:0; publish u/1 member=u/:1 -> w confirm 1, w deliver u/0 u/1
        a watch r                                                     -> a sees r pending
        a workflows nodes=r                                           -> a workflows 0/2-failed0-running
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch r                                                     -> a sees r pending
        w hello u/0 u/1                                               -> w welcome 1 u/0 u/1
        w ack u/0; put u/0 one                                        -> w confirm 2
        w ack u/1; put u/1 two                                        -> w confirm 3, a sees r Gathered u/ of 2
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch r                                                     -> a sees r Gathered u/ of 2
        ",
    );
}

/// Case 17, unless a client replaces it with `[]` sooner.
#[test]
fn an_empty_group_may_replace_a_job() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold j/ count=1 messages=next inputs=one; publish j/0 member=j/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver j/0
        w replace j/0; hold u/ count=0 then=j/:0 result=1000000       -> w confirm 1, w deliver next[[]]
        ",
    );
}

#[test]
fn a_failed_replacement_of_a_job_can_be_retried_as_that_job() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold j/ count=1 messages=next inputs=one; publish j/0 member=j/:0 -> a confirm 1
        a watch next j/0                                              -> a sees next pending, a sees j/0 pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver j/0
        w replace j/0; hold u/ count=2 then=j/:0 result=1000000; publish u/0 member=u/:0; publish u/1 member=u/:1 -> w confirm 1, w deliver u/0 u/1
        w fail u/0 boom                                               -> w confirm 2, a sees j/0 Upstream u/0, a sees next Upstream u/0
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a watch next                                                  -> a sees next Upstream u/0
        a retry u/0                                                   -> a confirm 2 2:Failed
        w hello u/1                                                   -> w welcome 2 u/1
        w consume default 10                                          -> w deliver u/0#1
        w ack u/1; put u/1 two                                        -> w confirm 3
        w ack u/0; put u/0 one                                        -> w confirm 4, w deliver next![[one two]]
        ",
    );
}

#[test]
fn a_workflow_continues_with_the_replacement_of_its_last_step() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open r; publish r workflow=r                                -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        w replace r; hold c/ count=1 messages=r inputs=one workflow=r; publish c/0 member=c/:0 workflow=r -> w confirm 1, w deliver c/0
        a workflows                                                   -> a workflows r:nightly:running:waiting1+running1
        w ack c/0; put c/0 one                                        -> w confirm 2, w deliver r[one]
        w ack r; put r two                                            -> w confirm 3
        a workflows                                                   -> a workflows r:nightly:succeeded:succeeded2-over
        ",
    );
}

/// Every delivery states the deadline of its workflow, even for jobs that join it later.
#[test]
fn a_replacement_and_the_jobs_it_sends_keep_the_deadline() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open r deadline=50; publish r workflow=r                    -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r:by50
        w replace r; hold u/ count=1 takes=r result=1000000 workflow=r; publish u/0 member=u/:0 workflow=r; publish s workflow=r; publish o -> w confirm 1, w deliver u/0:by50 s:by50 o
        w replace u/0; publish u/0 member=u/:0 workflow=r             -> w confirm 2, w deliver u/0:by50
        ",
    );
}

#[test]
fn a_cancelled_job_is_not_replaced() {
    check(
        "
        a hello                                                       -> a welcome 0
        a publish r                                                   -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        a cancel r ask reason=enough                                  -> a confirm 2 2:Cancelling, w stop r (enough)
        a watch r                                                     -> a sees r pending
        w replace r; hold c/ count=1 messages=r; publish c/0 member=c/:0 -> w confirm 1, a sees r Cancelled enough
        a info c/0                                                    -> a knows nothing
        ",
    );
}

/// No job of a cancelled workflow starts any more, even if one of its jobs was spared.
#[test]
fn a_job_of_a_cancelled_workflow_is_not_replaced_and_brings_no_others() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open r; publish r workflow=r; publish s workflow=r          -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r s
        a cancel all workflow=r reason=enough                         -> a confirm 2 2:operation-1
        a watch r                                                     -> a sees r pending
        w replace r; publish r workflow=r                             -> w confirm 1, a sees r Cancelled its workflow was cancelled
        w ack s; put s one; publish t workflow=r                      -> w confirm 2 2:skipped[2]
        a info t                                                      -> a knows nothing
        ",
    );
}

/// A person wants it to continue after all.
#[test]
fn a_job_that_was_retried_after_its_workflow_was_cancelled_may_be_replaced() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open r; publish r workflow=r                                -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        a cancel all workflow=r reason=enough                         -> a confirm 2 2:operation-1
        w fail r boom                                                 -> w confirm 1
        a retry r                                                     -> a confirm 3 3:Failed, w deliver r#1
        w replace r; publish r workflow=r                             -> w confirm 2, w deliver r
        ",
    );
}

#[test]
fn one_step_takes_the_place_of_a_job_and_reports_where_that_did() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body; publish g/0 member=g/:0; publish s queue=default+slow -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 s
        w replace g/0                                                 -> w confirm 1 1:refused 0 Invalid
        w replace g/0; publish t                                      -> w confirm 2 2:refused 0 Invalid
        w replace g/0; publish g/0 member=g/:1                        -> w confirm 3 3:refused 1 Invalid
        w replace g/0; publish g/0 member=g/:0; publish g/0 member=g/:0 -> w confirm 4 4:refused 2 AlreadyExists
        w replace g/0; publish g/0 member=g/:0; hold u/ count=1 then=g/:0 -> w confirm 5 5:refused 2 AlreadyExists
        w replace g/0; publish g/0 member=g/:0; ack s                 -> w confirm 6 6:refused 0 Invalid
        w replace s; publish s                                        -> w confirm 7 7:refused 0 Invalid
        w publish g/0 member=g/:0; replace g/0                        -> w confirm 8 8:refused 0 AlreadyExists
        w replace g/0; publish g/0 member=g/:0                        -> w confirm 9, w deliver g/0
        ",
    );
}

/// The key stays with its job, so another message with that key is still refused.
#[test]
fn a_key_passes_to_the_job_that_replaces_its_owner() {
    check(
        "
        a hello                                                       -> a welcome 0
        a publish r unless=only                                       -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        w replace r; hold c/ count=1 messages=r; publish c/0 member=c/:0 -> w confirm 1, w deliver c/0
        a publish s unless=only                                       -> a confirm 2 2:skipped[0]+0:owner-r
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1, a confirm 2 2:skipped[0]+0:owner-r
        a publish s unless=only                                       -> a confirm 3 3:skipped[0]+0:owner-r
        w hello c/0                                                   -> w welcome 1 c/0
        w ack c/0                                                     -> w confirm 2
        w consume default 10                                          -> w deliver r!
        w ack r                                                       -> w confirm 3
        a publish s unless=only                                       -> a confirm 4, w deliver s
        ",
    );
}

/// The group's jobs now represent the job: cancelling it cancels them.
#[test]
fn the_cancellation_of_a_job_ends_the_group_in_its_place() {
    for between in [
        "# No crash.",
        "carry",
        "kill\nw hello u/0 -> w welcome 1 u/0\na hello -> a welcome 1\na watch r -> a sees r pending",
    ] {
        check(&format!(
            "
            a hello                                                   -> a welcome 0
            a publish r                                               -> a confirm 1
            w hello                                                   -> w welcome 0
            w consume default 10                                      -> w deliver r
            a watch r                                                 -> a sees r pending
            w replace r; hold u/ count=2 takes=r result=1000000; hold c/ count=1 messages=u/1 member=u/:1 inputs=one; publish u/0 member=u/:0; publish c/0 member=c/:0 queue=slow -> w confirm 1, w deliver u/0
            {between}
            a cancel r ask reason=enough                              -> a confirm 2 2:Cancelling, a sees r Upstream u/1, w stop u/0 (enough)
            w return u/0                                              -> w confirm 2
            a watch u/0 u/1 c/0 -> a sees u/0 Cancelled enough, a sees u/1 Cancelled enough, a sees c/0 Cancelled enough
            "
        ));
    }
}

#[test]
fn a_job_whose_group_runs_may_be_left_to_run() {
    check(
        "
        a hello                                                       -> a welcome 0
        a publish r                                                   -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        w replace r; hold u/ count=2 takes=r result=1000000; publish u/0 member=u/:0; publish u/1 member=u/:1 -> w confirm 1, w deliver u/0 u/1
        a cancel r                                                    -> a confirm 2 2:refused 0 TooLate(Running)
        w ack u/0; put u/0 one                                        -> w confirm 2
        w ack u/1; put u/1 two                                        -> w confirm 3
        a cancel r                                                    -> a confirm 3 3:refused 0 NoSuchJob
        ",
    );
}

/// `b/0` also comes before other steps, and continues.
#[test]
fn a_cancelled_group_takes_nothing_with_it_that_others_wait_for() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body; hold u/ count=1 then=g/:0 result=1000000; hold b/ count=1 messages=u/0+other member=u/:0; publish b/0 member=b/:0 -> a confirm 1
        a cancel g/0 ask reason=enough                                -> a confirm 2 2:Held
        a watch g/0 body                                              -> a sees g/0 Upstream u/0, a sees body Upstream u/0
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver b/0
        w ack b/0                                                     -> w confirm 1, w deliver other
        ",
    );
}

/// The key of a failed job is free, and so is that of a job that waits for a failed one. Once retried, it continues
/// without the key, whatever the journal still says. The start of the join, and so its failure and its retry, are
/// carried forward here.
#[test]
fn a_failed_group_frees_the_keys_of_the_jobs_that_it_blocks() {
    for carry in ["carry", "wait 1"] {
        check(&format!(
            "
            a hello                                                   -> a welcome 0
            a publish r unless=k                                      -> a confirm 1
            w hello                                                   -> w welcome 0
            w consume default 10                                      -> w deliver r
            w replace r; hold u/ count=1 messages=r result=1000000; publish u/0 member=u/:0 -> w confirm 1, w deliver u/0
            b hello                                                   -> b welcome 0
            b publish s unless=k                                      -> b confirm 1 1:skipped[0]+0:owner-r
            w fail u/0                                                -> w confirm 2
            b guard k absent                                          -> b confirm 2
            {carry}                                                   ->
            kill                                                      ->
            a hello                                                   -> a welcome 1
            w hello                                                   -> w welcome 2
            a publish s unless=k queue=slow                           -> a confirm 2
            a retry u/0                                               -> a confirm 3 3:Failed
            {carry}                                                   ->
            kill                                                      ->
            a hello                                                   -> a welcome 2, a confirm 3 3:Failed
            w hello                                                   -> w welcome 2
            a cancel s                                                -> a confirm 4 4:Ready
            a guard k absent                                          -> a confirm 5
            w consume default 10                                      -> w deliver u/0!#1
            w ack u/0                                                 -> w confirm 3, w deliver r!
            w ack r                                                   -> w confirm 4
            "
        ));
    }
}

/// A record has room for a limited number of ends; an operation takes steps.
#[test]
fn a_group_of_many_in_the_place_of_a_job_is_cancelled_with_its_workflow() {
    let members: Vec<String> = (0..300)
        .map(|n| format!("publish u/{n} member=u/:{n} queue=slow"))
        .collect();
    let members = members.join(" workflow=r; ");
    check(&format!(
        "
        a hello                                                       -> a welcome 0
        a publish r                                                   -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        w open r; replace r; hold u/ count=300 takes=r result=1000000; {members} workflow=r -> w confirm 1
        a cancel r ask reason=enough                                  -> a confirm 2 2:Cancelling+operation-1
        a operation 1                                                 -> a operation 300/300/0 over
        a watch u/0 u/299 -> a sees u/0 Cancelled enough, a sees u/299 Cancelled enough
        "
    ));
    check(&format!(
        "
        a hello                                                       -> a welcome 0
        a open s; publish r workflow=s; publish s workflow=s queue=slow -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver r
        w replace r; hold u/ count=300 takes=r result=1000000; {} workflow=s -> w confirm 1
        a cancel r ask reason=enough                                  -> a confirm 2 2:refused 0 Invalid
        a cancel all workflow=s reason=enough                         -> a confirm 3 3:operation-1
        a operation 1                                                 -> a operation 301/301/0 over
        ",
        members.replace("workflow=r", "workflow=s")
    ));
}
