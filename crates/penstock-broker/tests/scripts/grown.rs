//! Members that a running member adds to its group, with its own end. `x` and `y` are their ids in that transaction.

use crate::script::check;

/// Case 18. The body waits for the new member, and gets its value after those of the others; so it does if the broker
/// dies in between.
#[test]
fn a_member_adds_another_to_its_group() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w ack g/1; put g/1 two                                        -> w confirm 1
        w grow g/0 member=x; ack g/0; put g/0 one; publish x task=other queue=slow -> w confirm 2
        carry                                                         ->
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a info x                                                      -> a knows nothing
        a info g/2                                                    -> a knows Ready in slow attempt 0 crashes 0
        w hello                                                       -> w welcome 2
        w consume slow 1                                              -> w deliver g/2@slow!
        w consume default 10                                          ->
        w ack g/2; put g/2 three                                      -> w confirm 3, w deliver body![one two three]
        ",
    );
}

/// A new member can be several jobs: a chain, which ends in the group, and a group, which is a member itself.
#[test]
fn a_new_member_may_consist_of_several_jobs() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body inputs=list; publish g/0 member=g/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w grow g/0 member=x; grow g/0 member=y; ack g/0; put g/0 one; hold c/ count=1 messages=x inputs=one; publish c/0 member=c/:0; hold i/ count=1 then-of=y result=1000; publish i/0 member=i/:0 -> w confirm 1, w deliver c/0 i/0
        w ack i/0; put i/0 three                                      -> w confirm 2
        w ack c/0; put c/0 half                                       -> w confirm 3, w deliver g/1[half]
        w grow g/1 member=x; ack g/1; put g/1 two; publish x          -> w confirm 4, w deliver g/3
        w ack g/3; put g/3 four                                       -> w confirm 5, w deliver body[one two [three] four]
        ",
    );
}

/// A job with callbacks has a join of its own, which is the member of the group.
#[test]
fn a_job_with_callbacks_adds_to_the_group_around_it() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body inputs=list; hold c/ count=1 messages=link inputs=one then=g/:0 result=1000; publish c/0 member=c/:0 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver c/0
        w grow c/0 member=x outer; ack c/0; put c/0 one; publish x    -> w confirm 1, w deliver link[one] g/1
        w ack link                                                    -> w confirm 2
        w ack g/1; put g/1 two                                        -> w confirm 3, w deliver body[[one] two]
        ",
    );
}

/// The members of a failed group continue, and count if a person retries the one that failed.
#[test]
fn a_failed_group_grows_too() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=2 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 g/1
        w fail g/1                                                    -> w confirm 1
        w grow g/0 member=x; ack g/0; put g/0 one; publish x          -> w confirm 2, w deliver g/2
        w ack g/2; put g/2 three                                      -> w confirm 3
        kill                                                          ->
        a hello                                                       -> a welcome 1
        a retry g/1                                                   -> a confirm 2 2:Failed
        w hello                                                       -> w welcome 3
        w consume default 10                                          -> w deliver g/1#1
        w ack g/1; put g/1 two                                        -> w confirm 4, w deliver body![one two three]
        ",
    );
}

#[test]
fn a_failed_new_member_fails_its_group() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body inputs=list; publish g/0 member=g/:0 -> a confirm 1
        a watch body                                                  -> a sees body pending
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        w grow g/0 member=x; ack g/0; put g/0 one; publish x          -> w confirm 1, w deliver g/1
        w fail g/1                                                    -> w confirm 2, a sees body Upstream g/1
        ",
    );
}

/// Its step would run for nobody. Everything else in the transaction counts.
#[test]
fn nobody_joins_a_group_of_a_cancelled_workflow() {
    check(
        "
        a hello                                                       -> a welcome 0
        a open body; hold g/ count=1 messages=body inputs=list workflow=body; publish g/0 member=g/:0 workflow=body -> a confirm 1
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0
        a cancel all workflow=body                                    -> a confirm 2 2:operation-1
        w grow g/0 member=x; grow g/0 member=y; ack g/0; put g/0 one; hold c/ count=1 messages=x inputs=one workflow=body; publish c/0 member=c/:0 workflow=body; publish y workflow=body; put k other -> w confirm 1 1:skipped[4+5+6]
        a info c/0                                                    -> a knows nothing
        a watch k                                                     -> a sees k Succeeded other
        ",
    );
}

#[test]
fn a_growth_names_a_member_that_it_settles_and_each_new_one_once() {
    check(
        "
        a hello                                                       -> a welcome 0
        a hold g/ count=1 messages=body; publish g/0 member=g/:0; publish lone -> a confirm 1
        a hold u/ unsealed=u/; publish u/0 member=u/:0                -> a confirm 2
        w hello                                                       -> w welcome 0
        w consume default 10                                          -> w deliver g/0 lone u/0
        w grow g/0 member=x; publish x                                -> w confirm 1 1:refused 0 Invalid
        w grow lone member=x; ack lone; publish x                     -> w confirm 2 2:refused 0 Invalid
        w grow u/0 member=x; ack u/0; publish x                       -> w confirm 3 3:refused 0 Invalid
        w grow g/0 member=x; ack g/0                                  -> w confirm 4 4:refused 0 Invalid
        w ack g/0; grow g/0 member=x; publish x                       -> w confirm 5 5:refused 1 Invalid
        w grow g/0 member=x; grow g/0 member=x; ack g/0; publish x    -> w confirm 6 6:refused 1 AlreadyExists
        w grow g/0 member=x; ack g/0; publish x; publish x            -> w confirm 7 7:refused 3 AlreadyExists
        w grow g/0 member=x; ack g/0; publish x member=g/:0           -> w confirm 8 8:refused 2 Invalid
        w grow g/0 member=x; ack g/0; publish x queue=one+two         -> w confirm 9 9:refused 2 Invalid
        w grow g/0 member=x; grow u/0 member=y; ack g/0; publish x    -> w confirm 10 10:refused 0 Invalid
        w grow g/0 member=x outer; ack g/0; publish x                 -> w confirm 11 11:refused 0 Invalid
        w grow g/0 member=x; ack g/0; publish x                       -> w confirm 12, w deliver g/1
        w grow g/0 member=x; ack g/0; publish x                       -> w confirm 13 13:refused 1 LeaseLost
        ",
    );
}
