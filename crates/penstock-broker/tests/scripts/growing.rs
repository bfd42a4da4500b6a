//! Groups that arrive in several transactions: their members run in the meantime, and they end like groups that arrive
//! in one.

use crate::script::check;

#[test]
fn members_run_while_others_are_still_to_come_and_the_body_waits_for_all() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=body messages=body inputs=list workflow=body; publish g/0 member=g/:0 workflow=body -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w ack g/0; put g/0 one                                        -> w confirm 1
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a publish g/1 member=g/:1 workflow=body; publish g/2 member=g/:2 workflow=body -> a confirm 2
        w hello                                                       -> w welcome 1
        w consume default 10                                          -> w deliver g/1 g/2
        w ack g/2; put g/2 three                                      -> w confirm 2
        a seal g/ count=3                                             -> a confirm 3
        carry                                                         ->
        w ack g/1; put g/1 two                                        -> w confirm 3, w deliver body![one two three]
        ",
    );
}

#[test]
fn the_seal_ends_a_group_whose_members_have_all_ended() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=g/ result=1000; publish g/0 member=g/:0 workflow=g/ -> a confirm 1
        a watch g/                                                    -> a sees g/ pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w ack g/0; put g/0 one                                        -> w confirm 1
        a seal g/ count=1                                             -> a confirm 2, a sees g/ Gathered g/ of 1
        ",
    );
}

/// Case 31. A client that did not receive a confirm sends the transaction again. That changes nothing, neither while
/// its jobs wait nor once they have ended.
#[test]
fn a_chunk_that_is_sent_again_is_refused_whole() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=g/; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        a publish g/1 member=g/:1; publish g/2 member=g/:2            -> a confirm 2 2:refused 0 AlreadyExists
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w ack g/0 | ack g/1                                           -> w confirm 2
        a publish g/0 member=g/:0                                     -> a confirm 3 3:refused 0 AlreadyExists
        a hold g/ unsealed=g/                                         -> a confirm 4 4:refused 0 Invalid
        a seal g/ count=2                                             -> a confirm 5
        a seal g/ count=2                                             -> a confirm 6 6:refused 0 Invalid
        ",
    );
}

#[test]
fn a_seal_names_exactly_the_members_that_have_come() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=g/ messages=body; publish g/0 member=g/:0  -> a confirm 1
        a seal g/ count=2                                             -> a confirm 2 2:refused 0 Invalid
        a seal g/ count=0                                             -> a confirm 3 3:refused 0 Invalid
        a hold i/ unsealed=i/ count=1                                 -> a confirm 4 4:refused 0 Invalid
        a hold i/ unsealed=i/; hold j/ unsealed=j/                    -> a confirm 5 5:refused 1 Invalid
        a hold i/ unsealed=g/                                         -> a confirm 6 6:refused 0 Invalid
        a publish g/1 member=g/:1; seal g/ count=2                    -> a confirm 7 7:refused 1 Invalid
        a seal g/ count=1                                             -> a confirm 8
        a seal g/ count=1                                             -> a confirm 9 9:refused 0 AlreadyExists
        a seal gone/ count=1                                          -> a confirm 10 10:refused 0 Invalid
        ",
    );
}

/// A chain counts once through its last job, and a group through its own join.
#[test]
fn members_of_several_jobs_count_once() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=body messages=body inputs=list             -> a confirm 1
        a hold c/ count=1 messages=g/0 inputs=one member=g/:0; publish c/0 member=c/:0; hold i/ count=1 then=g/:1 result=1000; publish i/0 member=i/:0 -> a confirm 2
        a seal g/ count=2                                             -> a confirm 3
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver c/0 i/0
        w ack i/0; put i/0 x                                          -> w confirm 1
        w ack c/0; put c/0 y                                          -> w confirm 2, w deliver g/0[y]
        w ack g/0; put g/0 z                                          -> w confirm 3, w deliver body[z [x]]
        ",
    );
}

/// Case 30.
#[test]
fn a_workflow_whose_creator_says_goodbye_before_the_seal_is_cancelled() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=body messages=body inputs=list workflow=body; publish g/0 member=g/:0 workflow=body; publish g/1 member=g/:1 workflow=body -> a confirm 1
        b hello                                                       -> b welcome 0
        b watch body g/1                                              -> b sees body pending, b sees g/1 pending
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        a bye                                                         -> w stop g/0 (its creator ended before it was complete), b sees body Cancelled its creator ended before it was complete, b sees g/1 Cancelled its creator ended before it was complete
        w ack g/0                                                     -> w confirm 1
        a hello                                                       -> a welcome 1
        a publish g/2 member=g/:2 workflow=body                       -> a confirm 2 2:refused 0 TooLate(Failed)
        a seal g/ count=2                                             -> a confirm 3 3:refused 0 TooLate(Failed)
        ",
    );
}

#[test]
fn a_workflow_whose_creator_stays_away_is_cancelled_once_its_session_is_forgotten() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=g/ result=10000000; publish g/0 member=g/:0 workflow=g/ after=9000000 -> a confirm 1
        b hello                                                       -> b welcome 0
        b watch g/                                                    -> b sees g/ pending
        a lost                                                        ->
        wait 599000                                                   ->
        a hello                                                       -> a welcome 1
        a publish g/1 member=g/:1 workflow=g/ after=9000000           -> a confirm 2
        a lost                                                        ->
        carry                                                         ->
        kill                                                          ->
        b hello                                                       -> b welcome 0
        b watch g/                                                    -> b sees g/ pending
        wait 601000                                                   -> b sees g/ Cancelled its creator ended before it was complete
        ",
    );
}

#[test]
fn a_workflow_that_a_job_creates_is_cancelled_with_the_end_of_its_lease() {
    check(
        "
        w hello                                                       -> w welcome 0
        w publish job                                                 -> w confirm 1
        w consume default 1                                           -> w deliver job
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=g/ creator=job result=1000; publish g/0 member=g/:0 workflow=g/ queue=other -> a confirm 1
        a watch g/                                                    -> a sees g/ pending
        carry                                                         ->
        kill                                                          ->
        w hello job                                                   -> w welcome 1 job
        a hello                                                       -> a welcome 1
        a watch g/                                                    -> a sees g/ pending
        a publish g/1 member=g/:1 workflow=g/ queue=other             -> a confirm 2
        w crash job                                                   -> w confirm 2, a sees g/ Cancelled its creator ended before it was complete
        kill                                                          ->
        a hello                                                       -> a welcome 2
        a watch g/0 g/1 -> a sees g/0 Cancelled its creator ended before it was complete, a sees g/1 Cancelled its creator ended before it was complete
        ",
    );
}

/// Late members would run for nothing, and would escape a cancellation of the workflow.
#[test]
fn a_failed_group_accepts_no_more_members() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=body messages=body workflow=body; publish g/0 member=g/:0 workflow=body; publish g/1 member=g/:1 workflow=body -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 2                                           -> w deliver g/0 g/1
        w fail g/0 boom                                               -> w confirm 1
        a publish g/2 member=g/:2 workflow=body                       -> a confirm 2 2:refused 0 TooLate(Failed)
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1, a confirm 2 2:refused 0 TooLate(Failed)
        a publish g/3 member=g/:3 workflow=body                       -> a confirm 3 3:refused 0 TooLate(Failed)
        a seal g/ count=2                                             -> a confirm 4 4:refused 0 TooLate(Failed)
        a bye                                                         ->
        w hello g/1                                                   -> w welcome 1 g/1
        w ack g/1                                                     -> w confirm 2
        ",
    );
}

#[test]
fn a_cancelled_workflow_accepts_no_more_members() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=g/ result=1000; publish g/0 member=g/:0 workflow=g/ -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 1                                           -> w deliver g/0
        a watch g/                                                    -> a sees g/ pending
        a cancel all workflow=g/ reason=enough                        -> a confirm 2 2:operation-1, a sees g/ Cancelled enough
        a publish g/1 member=g/:1 workflow=g/                         -> a confirm 3 3:refused 0 TooLate(Cancelling)
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1, a confirm 3 2:operation-1 3:refused 0 TooLate(Cancelling)
        a publish g/1 member=g/:1 workflow=g/                         -> a confirm 4 4:refused 0 TooLate(Cancelling)
        a watch g/                                                    -> a sees g/ Cancelled enough
        ",
    );
}

/// A replay used to take the new group for the ended one.
#[test]
fn the_id_of_a_group_that_has_ended_can_be_used_again() {
    check(
        "
        a hello                                                       -> a welcome 0
        w hello                                                       -> w welcome 0
        w hold g/ unsealed=g/ result=90000                            -> w confirm 1
        w bye                                                         ->
        a hold g/ unsealed=g/ messages=body workflow=g/; publish g/0 member=g/:0 -> a confirm 1
        kill                                                          ->
        carry                                                         ->
        a hello                                                       -> a welcome 1
        a seal g/ count=1                                             -> a confirm 2
        w hello                                                       -> w welcome 1
        w consume default 1                                           -> w deliver g/0!
        w ack g/0                                                     -> w confirm 2
        w consume default 1                                           -> w deliver body!
        ",
    );
}

/// Its members used to be cancelled before the body if they preceded it, which then blocked the body.
#[test]
fn the_last_job_of_a_cancelled_workflow_is_cancelled_and_not_blocked() {
    let joined = |ops: Vec<String>| ops.join("; ");
    // Slots are reused from the last one down.
    let others = joined(
        (0..700)
            .map(|index| format!("publish o{index} no-result after=9000"))
            .collect(),
    );
    let publish = |index| format!("publish g/{index} member=g/:{index} workflow=body after=9000");
    let members = joined((0..600).map(publish).collect());
    let script = format!(
        "
        a hello                                                       -> a welcome 0
        a {others}                                                    -> a confirm 1
        a cancel all task=task                                        -> a confirm 2 2:operation-1
        a hold g/ unsealed=body messages=body inputs=list workflow=body; {members} -> a confirm 3
        a watch body g/0 -> a sees body pending, a sees g/0 pending
        a cancel all workflow=body reason=enough                      -> a confirm 4 4:operation-2, a sees body Cancelled enough, a sees g/0 Cancelled enough
        "
    );
    check(&script);
}

#[test]
fn tolerated_failures_are_counted_over_all_members() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ unsealed=body messages=body inputs=list max-failures=1; publish g/0 member=g/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w fail g/0 boom                                               -> w confirm 1
        carry                                                         ->
        a publish g/1 member=g/:1; seal g/ count=2                    -> a confirm 2 2:refused 1 Invalid
        a publish g/1 member=g/:1                                     -> a confirm 3, w deliver g/1
        kill                                                          ->
        a hello                                                       -> a welcome 1, a confirm 3 2:refused 1 Invalid
        a seal g/ count=2                                             -> a confirm 4
        w hello g/1                                                   -> w welcome 1 g/1
        w consume default 10                                          ->
        w ack g/1; put g/1 two                                        -> w confirm 2, w deliver body![Failed:error two]
        ",
    );
}
