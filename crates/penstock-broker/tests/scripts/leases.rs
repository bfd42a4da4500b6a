//! Which client may run which job: leases, crashes, retries.

use penstock_broker::BrokerOptions;

use crate::script::{ScriptWorld, check};

#[test]
fn leases_follow_their_session() {
    // A clean goodbye returns them at once; nothing is counted.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w bye                               ->
        a info one                          -> a knows Ready in default attempt 0 crashes 0
        v hello                             -> v welcome 0
        v consume default 1                 -> v deliver one!
        v ack one                           -> v confirm 1
        ",
    );
    // A lost connection keeps them for one heartbeat.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w lost                              ->
        v hello                             -> v welcome 0
        v consume default 1                 ->
        wait 14999                          ->
        w hello one                         -> w welcome 0 one
        wait 60000                          ->
        w lost                              ->
        wait 14999                          ->
        a status                            -> a status default:0/0/1 v=0/0/0 w=0/0/1-away clients 1 results 0 evicted 0
        wait 1                              -> v deliver one!
        w hello one                         -> w welcome 0
        w ack one                           -> w confirm 1 1:refused 0 LeaseLost
        a info one                          -> a knows Running in default attempt 0 crashes 1 at v notes worker lost: no heartbeat for 15 s
        v ack one                           -> v confirm 1
        ",
    );
    // A delivery that never left returns unmarked: no client can have begun it.
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 1                 ->
        stall                               ->
        a publish one                       ->
        w lost                              ->
        sync                                -> a confirm 1
        v hello                             -> v welcome 0
        v consume default 1                 -> v deliver one
        v ack one                           -> v confirm 1
        ",
    );
}

#[test]
fn leases_outlive_the_broker() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        w hello                             -> w welcome 0
        w consume default 2                 -> w deliver one two
        kill                                ->
        v hello                             -> v welcome 0
        v consume default 10                ->
        wait 14000                          ->
        w hello one two                     -> w welcome 0 one two
        wait 60000                          ->
        w ack one; put one yes              -> w confirm 1
        w lost                              ->
        wait 15000                          -> v deliver two!
        v info two                          -> v knows Running in default attempt 0 crashes 1 at v notes worker lost: no heartbeat for 15 s
        v ack two                           -> v confirm 1
        ",
    );
    // A grant whose record was lost with the broker still holds for the client that presents it.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        a publish two                       -> a confirm 2
        w hello                             -> w welcome 0
        stall                               ->
        w consume default 1                 -> w deliver one
        power-cut                           ->
        sync                                ->
        w hello one                         -> w welcome 0 one
        # As far as the broker knows, the next one may also have been handed out.
        w consume default 1                 -> w deliver two!
        w ack one|ack two                   -> w confirm 2
        ",
    );
    // It holds even after another crash, as long as no other client was handed anything.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        stall                               ->
        w consume default 1                 -> w deliver one
        power-cut                           ->
        sync                                ->
        a hello                             -> a welcome 1
        kill                                ->
        w hello one                         -> w welcome 0 one
        w ack one                           -> w confirm 1
        ",
    );
    // It holds even if nothing at all is left of the broker that made it.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        kill                                ->
        stall                               ->
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one!
        power-cut                           ->
        sync                                ->
        w hello one                         -> w welcome 0 one
        w ack one                           -> w confirm 1
        ",
    );
    // A settled one does not hold, though its client has not learned of that. The broker would have counted the retry
    // as running at a client that had returned it, until that client left.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w move one next                     -> w confirm 1
        power-cut                           ->
        w hello one                         -> w welcome 1
        w consume default 1                 -> w deliver one!#1
        w info one                          -> w knows Running in default attempt 1 crashes 0 at w
        ",
    );
    // Nor does a lease hold that a later broker has judged: here it handed the message to another client, which asked
    // for a retry. Its grants are numbered from the last that the journal knew, so they can be lower than the lost one.
    // In an earlier version they were compared without the epoch, and the retry went to a client that knew its lease as
    // lost.
    check(
        "
        a hello                             -> a welcome 0
        a publish zero queue=mail|publish one -> a confirm 2
        w hello                             -> w welcome 0
        stall                               ->
        w consume mail 1                    -> w deliver zero@mail
        w consume default 1                 -> w deliver one
        power-cut                           ->
        sync                                ->
        v hello                             -> v welcome 0
        v consume default 1                 -> v deliver one!
        v move one next                     -> v confirm 1
        power-cut                           ->
        w hello one                         -> w welcome 0
        ",
    );
    // Nor does one hold that a later broker judged before it had handed out anything: here the journal only knew an
    // older lease of the same client. Its settlement under the lost lease was refused, and then the next broker
    // believed the lease again. The client knew better, and the message never ran.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        sync                                ->
        stall                               ->
        w none return one                   -> w confirm 1
        w consume default 1                 -> w deliver one!
        power-cut                           ->
        sync                                ->
        w hello one                         -> w welcome 0
        kill                                ->
        w hello one                         -> w welcome 0
        w consume default 1                 -> w deliver one!
        ",
    );
    // Nor does the lease of a message in two queues hold: it could be taken for the other copy's, which then never
    // runs, while this one runs twice.
    check(
        "
        a hello                             -> a welcome 0
        a publish one queue=default+mail    -> a confirm 1
        w hello                             -> w welcome 0
        stall                               ->
        w consume mail 1                    -> w deliver one@mail
        power-cut                           ->
        sync                                ->
        w hello one                         -> w welcome 0
        w consume mail 1                    -> w deliver one@mail!
        w ack one                           -> w confirm 1
        w consume default 1                 -> w deliver one!
        ",
    );
    // Not even if only one copy is left, since the lease may have been for one that is gone.
    check(
        "
        a hello                             -> a welcome 0
        a publish one queue=default+mail    -> a confirm 1
        w hello                             -> w welcome 0
        stall                               ->
        w consume mail 1                    -> w deliver one@mail
        power-cut                           ->
        sync                                ->
        a hello last=1                      -> a welcome 1
        a purge mail                        -> a confirm 2 2:operation-1
        kill                                ->
        w hello one                         -> w welcome 0
        w consume default 1                 -> w deliver one!
        ",
    );
    // Nor does one hold whose message another client has since received.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        stall                               ->
        w consume default 1                 -> w deliver one
        power-cut                           ->
        sync                                ->
        v hello                             -> v welcome 0
        v consume default 1                 -> v deliver one!
        w hello                             -> w welcome 0
        v ack one                           -> v confirm 1
        ",
    );
    // Nor does that of a job that its group held again after the crash, since the end of a member was lost too: the run
    // received a value that never came to exist. In an earlier version it held if the member ended again before the
    // worker was back.
    check(
        "
        a hello                             -> a welcome 0
        a hold g/ count=2 messages=body inputs=list max-failures=1; publish g/0 member=g/:0; publish g/1 member=g/:1 -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 2                 -> w deliver g/0 g/1
        w ack g/0; put g/0 zero             -> w confirm 1
        v hello                             -> v welcome 0
        v consume default 1                 ->
        stall                               ->
        w none ack g/1; put g/1 one         -> w confirm 2, v deliver body[zero one]
        power-cut                           ->
        sync                                ->
        w hello g/1                         -> w welcome 1 g/1
        w fail g/1                          -> w confirm 3
        v hello body                        -> v welcome 0
        v consume default 1                 -> v deliver body![zero Failed:error]
        v ack body; put body done           -> v confirm 1
        ",
    );
    // A message that may be delivered only once is not delivered before its grant is safe.
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=1          -> a confirm 1
        w hello                             -> w welcome 0
        stall                               ->
        w consume default 1                 ->
        power-cut                           ->
        sync                                ->
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        kill                                ->
        wait 15000                          ->
        w hello                             -> w welcome 0
        w consume default 1                 ->
        w watch one                         -> w sees one Crashed worker lost: no heartbeat for 15 s
        ",
    );
}

/// Jobs that died together used to be charged a crash each, so a job that kills its process used up the crashes of all
/// jobs that ran next to it.
#[test]
fn suspicions_are_counted_separately_and_the_third_is_final() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=2          -> a confirm 1
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 10                -> w deliver one
        w suspect one reason=first          -> w confirm 1, w deliver one!~1
        w suspect one reason=second         -> w confirm 2, w deliver one!~2
        a info one                          -> a knows Running in default attempt 0 crashes 0 at w notes first+second
        kill                                ->
        w hello one                         -> w welcome 2 one
        w crash one reason=own              -> w confirm 3
        w consume default 1                 -> w deliver one!~2
        carry                               ->
        kill                                ->
        a hello                             -> a welcome 1
        a watch one                         -> a sees one pending
        w hello one                         -> w welcome 3 one
        w suspect one reason=third          -> a sees one Crashed third, w confirm 4
        a info one                          -> a knows Failed in default attempt 0 crashes 2 failed WorkerCrashed:third notes first+second+own+third
        # A retry resets suspicions as it resets crashes.
        a retry one                         -> a confirm 2 2:Failed
        w consume default 1                 -> w deliver one#1
        ",
    );
    // A job that may be delivered once has been, whichever job is guilty.
    check(
        "
        w hello                             -> w welcome 0
        w publish one deliveries=1          -> w confirm 1
        w watch one                         -> w sees one pending
        w consume default 1                 -> w deliver one
        w suspect one reason=why            -> w confirm 2, w sees one Crashed why
        ",
    );
    // A suspect that ran when its queue was purged did not wait there.
    check(
        "
        a hello                             -> a welcome 0
        a publish one; publish two          -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        a purge default                     -> a confirm 2 2:operation-1
        w suspect one                       -> w confirm 1
        kill                                ->
        w hello                             -> w welcome 1
        w consume default 1                 -> w deliver one!~1
        ",
    );
}

#[test]
fn crashes_are_counted_and_the_last_is_final() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=2          -> a confirm 1
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 10                -> w deliver one
        w crash one reason=SIGSEGV          -> w confirm 1, w deliver one!~1
        w crash one reason=SIGKILL          -> a sees one Crashed SIGKILL, w confirm 2
        a info one                          -> a knows Failed in default attempt 0 crashes 2 failed WorkerCrashed:SIGKILL notes SIGSEGV+SIGKILL
        kill                                ->
        a hello                             -> a welcome 1
        a info one                          -> a knows Failed in default attempt 0 crashes 2 failed WorkerCrashed:SIGKILL notes SIGSEGV+SIGKILL
        # Thirty days later it is dropped; its end was already reported.
        a lost                              ->
        wait 2592000000                     ->
        a hello last=1                      -> a welcome 1 forgotten
        a info one                          -> a knows nothing
        ",
    );
    // Without a result to keep, its end can't be observed.
    check(
        "
        w hello                             -> w welcome 0
        w publish one deliveries=1 no-result  -> w confirm 1
        w watch one                         -> w sees one pending
        w consume default 1                 -> w deliver one
        w crash one                         -> w confirm 2, w sees one gone
        w watch one                         -> w sees one gone
        ",
    );
}

/// A machine without memory was given the same job three times within milliseconds.
#[test]
fn a_job_that_has_crashed_twice_waits_before_it_runs_again() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=9|publish two  -> a confirm 2
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w crash one reason=first            -> w confirm 1
        # The first crash is not counted against it: it runs at once, in its old place.
        w consume default 1                 -> w deliver one!~1
        w crash one reason=second           -> w confirm 2
        a info one                          -> a knows Delayed in default attempt 0 crashes 2 notes first+second
        # Others go before it. A restart neither shortens the delay nor restarts it.
        w consume default 1                 -> w deliver two
        w ack two                           -> w confirm 3
        wait 600                            ->
        kill                                ->
        w hello                             -> w welcome 3
        w consume default 1                 ->
        wait 400                            ->
        wait 1                              -> w deliver one!~1
        w crash one reason=third            -> w confirm 4
        w consume default 1                 ->
        wait 4000                           ->
        power-cut                           ->
        w hello                             -> w welcome 4
        w consume default 1                 ->
        wait 1                              -> w deliver one!~1
        w crash one                         -> w confirm 5
        w consume default 1                 ->
        wait 16000                          ->
        wait 1                              -> w deliver one!~1
        w crash one                         -> w confirm 6
        w consume default 1                 ->
        wait 60000                          ->
        wait 1                              -> w deliver one!~1
        w crash one                         -> w confirm 7
        w consume default 1                 ->
        wait 60000                          ->
        wait 1                              -> w deliver one!~1
        w ack one                           -> w confirm 8
        ",
    );
    // Likewise a job whose worker was lost twice.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w lost                              ->
        v hello                             -> v welcome 0
        v consume default 1                 ->
        wait 15000                          -> v deliver one!
        v lost                              ->
        u hello                             -> u welcome 0
        u consume default 1                 ->
        wait 15000                          ->
        wait 1000                           ->
        wait 1                              -> u deliver one!
        u ack one                           -> u confirm 1
        ",
    );
    // A suspect is charged nothing, and runs again at once, alone.
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=9          -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 2                 -> w deliver one
        w crash one                         -> w confirm 1, w deliver one!~1
        w suspect one                       -> w confirm 2
        w consume default 1                 -> w deliver one!~2
        ",
    );
}

/// Each event that ends a delayed job also ends one that waits after a crash, and none leads to an early run.
#[test]
fn a_job_that_waits_after_a_crash_is_cancelled_purged_paused_and_expires_as_any_other() {
    let check = |(order, answer): (&str, &str), then: &str| {
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one deliveries=9 unless=once expires=40000  -> a confirm 1
            w hello                             -> w welcome 0
            w consume default 9                 -> w deliver one
            w crash one                         -> w confirm 1, w deliver one!~1
            w crash one                         -> w confirm 2
            {order}                             -> {answer}
            wait 1001                           -> {then}
            "
        ));
    };
    check(("# Nothing.", ""), "w deliver one!~1");
    let cancelled = "a confirm 2 2:Delayed";
    check(("a cancel one", cancelled), "");
    check(("a purge default", "a confirm 2 2:operation-1"), "");
    check(("a pause default", "a confirm 2"), "");
    let skipped = "a confirm 2 2:skipped[0]+0:owner-one";
    check(("a publish two unless=once", skipped), "w deliver one!~1");
    // It expires while it waits, and its key is free.
    crate::script::check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=9 unless=once expires=500  -> a confirm 1
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 9                 -> w deliver one
        w crash one                         -> w confirm 1, w deliver one!~1
        w crash one                         -> w confirm 2
        wait 500                            -> a sees one Expired
        a publish two unless=once           -> a confirm 2, w deliver two
        wait 60000                          ->
        ",
    );
}

#[test]
fn a_retry_is_the_same_message_in_a_new_place() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w move one next note=boom after=500 -> w confirm 1
        a info one                          -> a knows Delayed in default attempt 1 crashes 0 notes boom
        wait 500                            ->
        kill                                ->
        w hello                             -> w welcome 1
        w consume other 1                   ->
        wait 1                              ->
        # Behind messages that arrived before the retry.
        w consume default 2                 -> w deliver two! one!#1
        w ack two                           -> w confirm 2
        w fail one note=bang class=ValueError message=bad  -> w confirm 3
        w info one                          -> w knows Failed in default attempt 1 crashes 0 failed ValueError:bad notes boom+bang
        w watch one                         -> w sees one Failed error
        ",
    );
    // A new attempt has not been delivered before.
    check(
        "
        w hello                             -> w welcome 0
        w publish one                       -> w confirm 1
        w consume default 1                 -> w deliver one
        w return one                        -> w confirm 2
        w consume default 1                 -> w deliver one!
        w move one next                     -> w confirm 3
        w consume default 1                 -> w deliver one#1
        ",
    );
}

#[test]
fn a_worker_is_shown_with_the_jobs_that_it_has_had_for_longest() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two queue=mail task=send|publish three|publish four  -> a confirm 4
        v hello                             -> v welcome 0
        w hello                             -> w welcome 0
        w consume default 2                 -> w deliver one three
        wait 2000                           ->
        v consume mail 1                    -> v deliver two@mail
        w ack one                           -> w confirm 1
        w consume default 1                 -> w deliver four
        running                             -> v runs two:send@mail+2000, w runs three:task@default+0 four:task@default+2000
        v bye                               ->
        running                             -> w runs three:task@default+0 four:task@default+2000
        ",
    );
}

/// Two copies of a job start in the same millisecond. A recovered broker used to list them in another order.
#[test]
fn jobs_that_start_together_are_shown_in_the_order_of_their_hand_out_after_a_restart_too() {
    // At the end of the script the copies are compared.
    let script = |first: &str, second: &str| {
        format!(
            "
            a hello                             -> a welcome 0
            w hello                             -> w welcome 0
            a publish one queue=x+y             -> a confirm 1
            w consume {first} 1                 -> w deliver one@{first}
            w consume {second} 1                -> w deliver one@{second}
            running                             -> w runs one:task@{first}+0 one:task@{second}+0
            carry                               ->
            "
        )
    };
    check(&script("x", "y"));
    check(&script("y", "x"));
}

/// However many jobs workers have, one page of the status looks at only some of them.
#[test]
fn a_page_of_the_status_ends_where_its_workers_have_very_many_jobs() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    world.run("a hello");
    for lump in 0..3 {
        let jobs: Vec<String> = (0..16_000)
            .map(|number| format!("publish {lump}-{number} queue=q{lump}"))
            .collect();
        world.run(&format!("a {}", jobs.join("|")));
        world.run(&format!("w{lump} hello"));
        world.run(&format!("w{lump} consume q{lump} 16000"));
    }
    assert_eq!(world.worker_pages("a"), [2, 1]);
    let running = world.run("running");
    assert_eq!(running.len(), 3);
    for worker in running {
        assert_eq!(worker.matches("+0").count(), 64, "{worker}");
    }
}
