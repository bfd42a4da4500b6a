//! Queues as a whole, and live things that are carried forward out of old records.

use crate::script::{check, check_with};
use penstock_broker::BrokerOptions;

#[test]
fn a_queue_is_paused_resumed_and_purged() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 1                 ->
        a pause default                     -> a confirm 1
        a publish one|publish two|publish three after=1000  -> a confirm 4
        kill                                ->
        a hello                             -> a welcome 4
        a status                            -> a status default:2/1/0-paused clients 1 results 0 evicted 0
        w hello                             -> w welcome 0
        w consume default 1                 ->
        a resume default                    -> a confirm 5, w deliver one!
        a watch one two three               -> a sees one pending, a sees two pending, a sees three pending
        a purge default                     -> a confirm 6 6:operation-1, a sees two Cancelled its queue was purged, a sees three Cancelled its queue was purged
        a status                            -> a status default:0/0/1 w=0/0/1 clients 1 results 2 evicted 0
        w ack one                           -> a sees one gone, w confirm 1
        a purge nothing                     -> a confirm 7
        ",
    );
}

#[test]
fn a_queue_without_consumers_is_reported_once() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        # Soon, if there has never been a worker.
        wait 2999                           ->
        wait 1                              -> notice: 2 unserved in default for 3000
        a publish three                     -> a confirm 3
        wait 60000                          ->
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w ack one                           -> w confirm 1
        w bye                               ->
        # Later, if workers may come back: after they restart, or the broker does.
        wait 29999                          ->
        wait 1                              -> notice: 2 unserved in default for 30000
        kill                                ->
        a hello                             -> a welcome 3
        wait 29999                          ->
        wait 1                              -> notice: 2 unserved in default for 30000
        a purge default                     -> a confirm 4 4:operation-1
        ",
    );
    // Not for a queue that was empty in the meantime, nor for failed jobs.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        wait 2000                           ->
        a purge default                     -> a confirm 2 2:operation-1
        a publish two deliveries=1 expires=40000  -> a confirm 3
        wait 2000                           ->
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver two
        w crash two                         -> w confirm 1
        wait 60000                          ->
        ",
    );
}

#[test]
fn references_to_carried_forward_things_still_hold() {
    // The grant is before the position to which its session was carried.
    check(
        "
        w hello                             -> w welcome 0
        a hello                             -> a welcome 0
        mark                                ->
        a publish one                       -> a confirm 1
        w consume default 1                 -> w deliver one
        carry                               ->
        restart                             ->
        w hello one                         -> w welcome 0 one
        w ack one                           -> w confirm 1
        ",
    );
    // Nothing is live, but no number is used twice.
    check(
        "
        w hello                             -> w welcome 0
        w publish one                       -> w confirm 1
        w consume default 1                 -> w deliver one
        w ack one                           -> w confirm 2
        w bye                               ->
        wait 600000                         ->
        carry                               ->
        restart                             ->
        w hello                             -> w welcome 2 forgotten
        w publish one                       -> w confirm 3
        w consume default 1                 -> w deliver one
        w ack old-one                       -> w confirm 4 4:refused 0 LeaseLost
        ",
    );
}

#[test]
fn live_things_are_carried_forward() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one unless=once|guard no present|hold join count=3 messages=held|join join index=1  -> a confirm 4 2:refused 0 GuardFailed
        a publish late after=60000|publish run|pause other|put key value|publish dead deliveries=1  -> a confirm 9
        w hello                             -> w welcome 0
        w consume default 3                 -> w deliver one run dead
        w move one next note=boom|crash dead reason=why  -> w confirm 2
        a publish pair queue=x+y|publish gone  -> a confirm 11
        w consume default 2                 -> w deliver one#1 gone
        w ack gone; put gone yes            -> w confirm 3
        carry                               ->
        kill                                ->
        carry                               ->
        a hello                             -> a welcome 1, a confirm 11 2:refused 0 GuardFailed
        w hello run one                     -> w welcome 3 run one
        w info one                          -> w knows Running in default attempt 1 crashes 0 at w notes boom
        a info dead                         -> a knows Failed in default attempt 0 crashes 1 failed WorkerCrashed:why notes why
        a watch key gone dead               -> a sees key Succeeded value, a sees gone Succeeded yes, a sees dead Crashed why
        a publish two unless=once           -> a confirm 12 12:skipped[0]+0:owner-one
        w ack one|ack run                   -> w confirm 5
        a join join index=0|join join index=1|join join index=2  -> a confirm 15
        w consume default 2                 -> w deliver held!
        wait 60001                          -> w deliver late!, notice: 1 unserved in x for 30000, notice: 1 unserved in y for 30000
        a status                            -> a status default:0/0/2-failed1 other:0/0/0-paused x:1/0/0-60001ms y:1/0/0-60001ms w=0/0/2 clients 1 results 2 evicted 0
        ",
    );
}

#[test]
fn a_body_that_cannot_be_read_back_is_quarantined_and_everything_else_continues() {
    let cold = BrokerOptions {
        resident_bodies_bytes: Some(0),
        ..BrokerOptions::default()
    };
    check_with(
        cold,
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        rot                                 ->
        a publish three                     -> a confirm 3
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 10                -> notice: one of default is unreadable, notice: two of default is unreadable, w deliver three, a sees one Crashed of 64 bytes
        a status                            -> a status default:0/0/1-failed2 w=0/0/1 clients 1 results 2 evicted 0
        w ack three                         -> w confirm 1
        a failed                            -> a failed one:task@default#0:Unreadable:its body can't be read back from the journal: record 2 is rotten two:task@default#0:Unreadable:its body can't be read back from the journal: record 2 is rotten
        ",
    );
}

#[test]
fn the_body_of_a_delayed_message_is_read_before_its_time_if_it_has_a_consumer() {
    let cold = BrokerOptions {
        resident_bodies_bytes: Some(0),
        ..BrokerOptions::default()
    };
    check_with(
        cold,
        "
        w hello                             -> w welcome 0
        w consume default 10                ->
        w publish soon after=1000|publish later after=1200|publish last after=9000  -> w confirm 3
        w publish unserved queue=other after=1000  -> w confirm 4
        # Bodies due in the next quarter of a second are read at once: later damage to the disk does not matter.
        wait 800                            ->
        rot                                 ->
        wait 201                            -> w deliver soon
        wait 200                            -> w deliver later
        v hello                             -> v welcome 0
        v consume other 10                  -> notice: unserved of other is unreadable
        # A body that could not be read ahead is requested again when its turn comes.
        wait 7600                           ->
        wait 200                            -> notice: last of default is unreadable
        ",
    );
}
