//! Running jobs that wait for others. The awaited jobs go first. A wait in a circle is refused, and so is a wait that
//! nothing can end.

use crate::script::check;

/// Order alone would begin everything wide before anything deep.
#[test]
fn jobs_that_a_running_job_waits_for_go_before_earlier_ones() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish root; publish one; publish two -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver root
        c hello                                 -> c welcome 0
        c publish left; publish right           -> c confirm 1
        c job root awaits right                 -> c sees right pending
        w consume default 1                     -> w deliver right
        w consume default 3                     -> w deliver one two left
        ",
    );
}

#[test]
fn the_deepest_awaited_job_goes_first_and_then_the_oldest() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish root                          -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver root
        c hello                                 -> c welcome 0
        c publish l; publish r; publish s       -> c confirm 1
        c job root awaits r s l                 -> c sees r pending, c sees s pending, c sees l pending
        w consume default 1                     -> w deliver l
        c publish ll; publish lr                -> c confirm 2
        c job l awaits ll                       -> c sees ll pending
        w consume default 1                     -> w deliver ll
        c publish lll                           -> c confirm 3
        c job ll awaits lll                     -> c sees lll pending
        w consume default 2                     -> w deliver lll r
        w consume default 2                     -> w deliver s lr
        ",
    );
}

/// A task counts as waiting once one of its jobs has waited. Its other jobs begin when no awaited job is left to run;
/// tasks that never wait take turns as usual.
#[test]
fn an_awaited_job_waits_for_its_turn_with_tasks_that_never_wait() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish r1 task=root; publish r2 task=root -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver r1
        c hello                                 -> c welcome 0
        c publish x task=leaf; publish y task=leaf; publish m task=mail; publish n task=mail -> c confirm 1
        c job r1 awaits x y                     -> c sees x pending, c sees y pending
        w consume default 4                     -> w deliver x m y r2
        w consume default 1                     -> w deliver n
        ",
    );
}

#[test]
fn a_higher_priority_goes_before_awaited_jobs() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish root; publish high priority=9; publish low -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver high
        w consume default 1                     -> w deliver root
        c hello                                 -> c welcome 0
        c publish child; publish higher priority=9 -> c confirm 1
        c job root awaits child                 -> c sees child pending
        w consume default 3                     -> w deliver higher child low
        ",
    );
}

/// A worker returns the jobs that it has not begun when one of its jobs waits.
#[test]
fn an_awaited_job_that_is_returned_goes_first_again() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish root; publish one; publish child; publish two -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 3                     -> w deliver root one child
        c hello                                 -> c welcome 0
        c job root awaits child                 -> c sees child pending
        w return one; return child              -> w confirm 1
        w consume default 1                     -> w deliver child!
        w ack child; put child yes              -> w confirm 2, c sees child Succeeded yes
        w consume default 2                     -> w deliver one! two
        ",
    );
}

#[test]
fn the_jobs_before_an_awaited_step_go_first_and_then_the_step() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish root; publish one; publish two -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver root
        c hello                                 -> c welcome 0
        c hold g/ count=2 messages=body inputs=list; hold h/ count=1 messages=g/1 inputs=one member=g/:1; publish h/0 member=h/:0; publish g/0 member=g/:0 -> c confirm 1
        c job root awaits body                  -> c sees body pending
        w consume default 2                     -> w deliver h/0 g/0
        w ack g/0; put g/0 zero                 -> w confirm 1
        w ack h/0; put h/0 half                 -> w confirm 2
        w consume default 1                     -> w deliver g/1[half]
        w ack g/1; put g/1 one                  -> w confirm 3
        w consume default 1                     -> w deliver body[zero one]
        w consume default 2                     -> w deliver one two
        ",
    );
}

#[test]
fn members_of_an_awaited_group_go_first() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish root; publish one             -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver root
        c hello                                 -> c welcome 0
        c hold g/ count=2 result=1000000; publish g/0 member=g/:0; publish g/1 member=g/:1 -> c confirm 1
        c job root awaits g/                    -> c sees g/ pending
        w consume default 3                     -> w deliver g/0 g/1 one
        ",
    );
}

/// This is a hint: a restarted broker begins in order, and learns of the waits again.
#[test]
fn a_new_broker_learns_of_waits_when_their_clients_are_back() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish root; publish one; publish child -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver root
        c hello                                 -> c welcome 0
        c job root awaits child                 -> c sees child pending
        kill                                    ->
        c hello                                 -> c welcome 0
        c job root awaits child                 -> c sees child pending
        w hello root                            -> w welcome 0 root
        w consume default 2                     -> w deliver child! one!
        ",
    );
}

#[test]
fn a_job_that_waits_for_itself_is_refused() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one                           -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver one
        c hello                                 -> c welcome 0
        c job one awaits one                    -> c sees one pending, c refused one Cycle one
        ",
    );
}

#[test]
fn a_wait_that_closes_a_circle_is_refused_and_names_all_jobs_in_it() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one task=x; publish two task=y; publish three task=z -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 3                     -> w deliver one two three
        c hello                                 -> c welcome 0
        d hello                                 -> d welcome 0
        c job one awaits two                    -> c sees two pending
        d job two awaits three                  -> d sees three pending
        d job three awaits one                  -> d sees one pending, d refused one Cycle three(z) one(x) two(y)
        # The others keep waiting.
        w ack three; put three yes              -> w confirm 1, d sees three Succeeded yes
        w ack two; put two yes                  -> w confirm 2, c sees two Succeeded yes
        ",
    );
}

/// A job of a group waits for messages that the group holds, for its own workflow, or for a job that does so.
#[test]
fn a_circle_through_a_group_is_found() {
    check(
        "
        a hello                                 -> a welcome 0
        a hold h/ count=1 messages=last inputs=one; hold g/ count=2 messages=h/0 inputs=list member=h/:0 result=1000000; publish g/0 member=g/:0; publish g/1 member=g/:1; publish other -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 3                     -> w deliver g/0 g/1 other
        c hello                                 -> c welcome 0
        c job g/0 awaits last                   -> c sees last pending, c refused last Cycle g/0 last h/0
        c job g/0 awaits g/                     -> c sees g/ pending, c refused g/ Cycle g/0 g/(group)
        c job g/1 awaits other                  -> c sees other pending
        c job other awaits h/0                  -> c sees h/0 pending, c refused h/0 Cycle other h/0 g/1
        # Another job in the same group is no circle.
        c job g/0 awaits g/1                    -> c sees g/1 pending
        ",
    );
}

/// Messages that a failed group holds wait for no job, until a person retries the member that has failed it.
#[test]
fn a_circle_that_a_retry_closes_is_found() {
    check(
        "
        a hello                                 -> a welcome 0
        a hold g/ count=2 messages=body inputs=list no-result; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 2                     -> w deliver g/0 g/1
        w fail g/0                              -> w confirm 1
        c hello                                 -> c welcome 0
        c job g/1 awaits body                   -> c sees body pending
        a retry g/0                             -> a confirm 2 2:Failed, c refused body Cycle g/1 body
        w ack g/1; put g/1 one                  -> w confirm 2
        w consume default 2                     -> w deliver g/0#1
        w ack g/0; put g/0 zero                 -> w confirm 3, w deliver body[zero one]
        ",
    );
    // The body's own group learns of the retry in a later step.
    check(
        "
        a hello                                 -> a welcome 0
        a hold h/ count=1 messages=last inputs=one no-result; hold g/ count=2 messages=h/0 inputs=list member=h/:0 no-result; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 2                     -> w deliver g/0 g/1
        w fail g/0                              -> w confirm 1
        c hello                                 -> c welcome 0
        c job g/1 awaits last                   -> c sees last pending
        a retry g/0                             -> a confirm 2 2:Failed, c refused last Cycle g/1 last h/0
        ",
    );
    // A job that waits for something outside the circle continues to do so.
    check(
        "
        a hello                                 -> a welcome 0
        a hold g/ count=1 messages=body inputs=list no-result; publish g/0 member=g/:0; publish other -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 2                     -> w deliver g/0 other
        w fail g/0                              -> w confirm 1
        c hello                                 -> c welcome 0
        c job other awaits body                 -> c sees body pending
        a retry g/0                             -> a confirm 2 2:Failed
        ",
    );
}

#[test]
fn a_wait_that_is_over_closes_no_circle() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one; publish two              -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 2                     -> w deliver one two
        c hello                                 -> c welcome 0
        d hello                                 -> d welcome 0
        c job one awaits two                    -> c sees two pending
        c job one stops-awaiting two            ->
        d job two awaits one                    -> d sees one pending
        d unwatch one                           ->
        c job one awaits two                    -> c sees two pending
        # Its process is unreachable, perhaps dead.
        c lost                                  ->
        d job two awaits one                    -> d sees one pending
        ",
    );
}

/// An earlier run of a job does not bind the next one.
#[test]
fn a_wait_of_an_earlier_run_closes_no_circle() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one; publish two              -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 2                     -> w deliver one two
        c hello                                 -> c welcome 0
        d hello                                 -> d welcome 0
        c job one awaits two                    -> c sees two pending
        w crash one killed                      -> w confirm 1
        d job two awaits one                    -> d sees one pending
        d unwatch one                           ->
        w consume default 1                     -> w deliver one!~1
        d job two awaits one                    -> d sees one pending
        c job one awaits two                    -> c sees two pending, c refused two Cycle one two
        ",
    );
}

/// A worker whose every slot is held by a job that waits.
#[test]
fn the_deepest_of_jobs_that_hold_all_slots_is_refused_where_nothing_can_run() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one                           -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver one
        c hello                                 -> c welcome 0
        c publish two                           -> c confirm 1
        c job one awaits two                    -> c sees two pending
        w consume default 1                     -> w deliver two
        c publish three                         -> c confirm 2
        c job two awaits three                  -> c sees three pending
        w consume default 0 held=one+two        ->
        wait 400                                ->
        wait 100                                -> c refused three NoSlotLeft two three
        c unwatch three                         ->
        w ack two; put two no                   -> w confirm 1, c sees two Succeeded no
        w consume default 1 held=-              -> w deliver three
        wait 5000                               ->
        ",
    );
}

#[test]
fn jobs_that_hold_all_slots_wait_on_while_anything_they_wait_for_can_go_on() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one; publish busy; publish late delay=3000 -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver one
        v hello                                 -> v welcome 0
        v consume default 1                     -> v deliver busy
        c hello                                 -> c welcome 0
        c publish two                           -> c confirm 1
        # It runs.
        c job one awaits busy                   -> c sees busy pending
        w consume default 0 held=one            ->
        wait 2000                               ->
        c unwatch busy                          ->
        # Another worker knows its task, and may get to it.
        c job one awaits two                    -> c sees two pending
        wait 2000                               ->
        c unwatch two                           ->
        # It is due later, and then other workers may get to it.
        c job one awaits late                   -> c sees late pending
        wait 1000                               ->
        ",
    );
}

#[test]
fn no_wait_is_refused_for_a_task_that_no_worker_knows() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one                           -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1 tasks=task          -> w deliver one
        c hello                                 -> c welcome 0
        c publish two task=rare queue=rare      -> c confirm 1
        c job one awaits two                    -> c sees two pending
        w consume default 0 held=one            ->
        wait 2000                               ->
        ",
    );
}

/// The lease of the job was lost while it waited, so it waits in the queue as well; but it still holds its slot.
#[test]
fn a_job_that_holds_a_slot_after_its_lease_was_lost_is_refused() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one                           -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver one
        c hello                                 -> c welcome 0
        c publish two                           -> c confirm 1
        c job one awaits two                    -> c sees two pending
        w lost                                  ->
        w hello                                 -> w welcome 0
        w consume default 0 held=one            ->
        wait 1000                               -> c refused two NoSlotLeft one two
        w consume default 9 held=-              -> w deliver two one!
        ",
    );
}

#[test]
fn jobs_that_hold_all_slots_behind_a_group_are_found() {
    check(
        "
        a hello                                 -> a welcome 0
        a publish one                           -> a confirm 1
        w hello                                 -> w welcome 0
        w consume default 1                     -> w deliver one
        c hello                                 -> c welcome 0
        c hold g/ count=2 messages=body inputs=list; publish g/0 member=g/:0; publish g/1 member=g/:1 -> c confirm 1
        c job one awaits body                   -> c sees body pending
        w consume default 0 held=one            ->
        wait 1000                               -> c refused body NoSlotLeft one body g/0
        ",
    );
}
