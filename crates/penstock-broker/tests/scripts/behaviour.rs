//! What a broker does, seen from its clients: scripts, each line with what it sends.

use crate::script::{check, check_with};
use penstock_broker::BrokerOptions;

#[test]
fn a_message_is_published_delivered_and_settled() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 10                -> w deliver one
        a info one                          -> a knows Running in default attempt 0 crashes 0 at w
        w ack one; put one yes              -> a sees one Succeeded yes, w confirm 1
        a watch one                         -> a sees one Succeeded yes
        a info one                          -> a knows nothing
        a status                            -> a status default:0/0/0 w=0/0/0 clients 1 results 1 evicted 0
        ",
    );
}

#[test]
fn a_worker_is_no_busier_than_it_has_jobs() {
    // It reports once a second at most: after a burst of short jobs its last word is out of date.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 10                -> w deliver one
        w report 2 2                        ->
        a status                            -> a status default:0/0/1 w=2/1/1 clients 1 results 0 evicted 0
        w ack one                           -> w confirm 1
        a status                            -> a status default:0/0/0 w=2/0/0 clients 1 results 0 evicted 0
        ",
    );
}

#[test]
fn nothing_leaves_before_it_is_safe() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 10                ->
        stall                               ->
        a publish one                       ->
        a guard lock present                ->
        a watch one                         ->
        a status                            ->
        sync                                -> a confirm 2 2:refused 0 GuardFailed, a status default:0/0/1 w=0/0/1 clients 1 results 0 evicted 0, a sees one pending, w deliver one
        ",
    );
    // A message that was handed back is not given to another before that is safe: after a crash the
    // first lease would hold again, and two would run it.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        v hello                             -> v welcome 0
        v consume default 1                 ->
        stall                               ->
        w return one                        ->
        sync                                -> w confirm 1, v deliver one!
        ",
    );
    // Less durability waits for less.
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 10                ->
        stall                               ->
        a os publish one                    ->
        write                               -> w deliver one, a confirm 1
        a none publish two                  -> a confirm 2, w deliver two
        a publish three                     ->
        a os publish four                   ->
        a none publish five                 -> a confirm 2 early 5, w deliver five
        write                               -> a confirm 2 early 4, w deliver four
        sync                                -> a confirm 5, w deliver three
        ",
    );
    // A refusal rests on all that was decided before, whatever it asked for itself.
    check(
        "
        a hello                             -> a welcome 0
        stall                               ->
        a publish one                       ->
        a none publish one                  ->
        sync                                -> a confirm 2 2:refused 0 AlreadyExists
        ",
    );
    // What a join releases rests on the hold as well.
    check(
        "
        w hello                             -> w welcome 0
        w consume default 10                ->
        stall                               ->
        w hold join count=1 messages=one    ->
        w none join join index=0            -> w confirm 0 early 2
        sync                                -> w confirm 2, w deliver one
        ",
    );
    // Nobody is told that a value is pending after having been told the value.
    check(
        "
        w hello                             -> w welcome 0
        w consume default 10                ->
        w none publish one                  -> w confirm 1, w deliver one
        stall                               ->
        w publish two                       ->
        w watch one                         ->
        w none ack one; put one yes         -> w confirm 1 early 3, w sees one Succeeded yes
        sync                                -> w confirm 3, w deliver two
        ",
    );
    // A value rests on its record, and so does its absence.
    check(
        "
        a hello                             -> a welcome 0
        a put key one                       -> a confirm 1
        stall                               ->
        a put key two                       ->
        a watch key                         ->
        a delete key                        ->
        a watch key                         ->
        sync                                -> a confirm 3, a sees key Succeeded two, a sees key gone
        ",
    );
    // A client that can't take more is sent confirms, and nothing else until it can.
    check(
        "
        w hello                             -> w welcome 0
        w writable no                       ->
        w consume default 10                ->
        w publish one                       -> w confirm 1
        w watch one                         ->
        w writable yes                      -> w sees one pending, w deliver one
        ",
    );
}

#[test]
fn a_refused_transaction_changes_nothing() {
    let refused = |tx: &str, receipt: &str| {
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one|publish dead-end queue=other|put key yes  -> a confirm 3
            w hello                             -> w welcome 0
            w consume default 10                -> w deliver one
            w publish new; put new-key 1; {tx}  -> w confirm 1 1:refused {receipt}
            w watch new new-key key             -> w sees new gone, w sees new-key gone, w sees key Succeeded yes
            w info new                          -> w knows nothing
            w info one                          -> w knows Running in default attempt 0 crashes 0 at w
            a status                            -> a status default:0/0/1 other:1/0/0 w=0/0/1 clients 1 results 0 evicted 0
            w ack one                           -> w confirm 2
            "
        ));
    };
    refused("ack unknown", "2 LeaseLost");
    refused("ack one; ack one", "3 LeaseLost");
    refused("ack one; move one", "3 LeaseLost");
    refused("return dead-end", "2 LeaseLost");
    refused("guard key absent", "2 GuardFailed");
    refused("guard nothing present", "2 GuardFailed");
    refused("guard key no", "2 GuardFailed");
    refused("ack one; guard key no", "3 GuardFailed");
    refused("publish one", "2 AlreadyExists");
    refused("publish new", "2 AlreadyExists");
    refused("publish two priority=10", "2 Invalid");
    refused("publish two deliveries=0", "2 Invalid");
    refused("publish two queue=q+q", "2 Invalid");
    refused("publish two queue=", "2 Invalid");
    refused("publish two task=", "2 Invalid");
    refused("publish two bytes=20000000", "2 TooLarge");
    refused("put key x bytes=20000000", "2 TooLarge");
    refused("hold join count=0 messages=held", "2 Invalid");
    refused(
        "hold join count=1 messages=held; hold join count=1 messages=other",
        "3 AlreadyExists",
    );
    refused("hold join count=1 messages=held+held", "2 AlreadyExists");
}

#[test]
fn a_lease_is_settled_by_its_session_only() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        a ack one                           -> a confirm 2 2:refused 0 LeaseLost
        w ack one                           -> w confirm 1
        w ack one                           -> w confirm 2 2:refused 0 LeaseLost
        ",
    );
}

#[test]
fn a_resent_transaction_is_answered_and_not_applied_again() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|guard no present|publish two  -> a confirm 3 2:refused 0 GuardFailed
        a seq=1 publish one|guard no present|publish two  -> a confirm 3 2:refused 0 GuardFailed
        a status                            -> a status default:2/0/0 clients 1 results 0 evicted 0
        # What was resent and what is new may come together.
        a seq=3 publish two|publish three   -> a confirm 4
        a status                            -> a status default:3/0/0 clients 1 results 0 evicted 0
        # After a reconnect, a client is told of plain successes, and resends from the first exception.
        a lost                              ->
        a hello                             -> a welcome 1, a confirm 4 2:refused 0 GuardFailed
        a seq=2 guard no present            -> a confirm 4 2:refused 0 GuardFailed
        a seq=6 publish four                -> a close transaction 6 came where 5 was expected
        ",
    );
    check(
        "
        a hello                             -> a welcome 0
        a publish one unless=k|publish two unless=k; publish three  -> a confirm 2 2:skipped[0]
        kill                                ->
        a hello                             -> a welcome 1, a confirm 2 2:skipped[0]
        a status                            -> a status default:2/0/0 clients 1 results 0 evicted 0
        ",
    );
    // What was not safe when the broker died was not told of, and is applied when it is resent.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        stall                               ->
        a publish two                       ->
        power-cut                           ->
        sync                                ->
        a hello                             -> a welcome 1
        a seq=2 publish two                 -> a confirm 2
        a status                            -> a status default:2/0/0 clients 1 results 0 evicted 0
        ",
    );
    // Numbers that were confirmed with little durability, and then lost, are not missed.
    check(
        "
        a hello                             -> a welcome 0
        stall                               ->
        a none publish one|publish two      -> a confirm 2
        power-cut                           ->
        sync                                ->
        a hello                             -> a welcome 0
        a publish three                     -> a confirm 3
        stall                               ->
        a none publish four                 -> a confirm 4
        power-cut                           ->
        sync                                ->
        a hello                             -> a welcome 3
        a publish five                      -> a confirm 5
        a status                            -> a status default:2/0/0 clients 1 results 0 evicted 0
        ",
    );
}

#[test]
fn a_session_is_forgotten_ten_minutes_after_it_left() {
    check(
        "
        a hello                             -> a welcome 0
        a put key value                     -> a confirm 1
        a bye                               ->
        wait 599999                         ->
        a hello                             -> a welcome 1
        a lost                              ->
        wait 599999                         ->
        kill                                ->
        wait 1                              ->
        a hello                             -> a welcome 1 forgotten
        a put key other                     -> a confirm 2
        ",
    );
}

#[test]
fn a_newer_connection_fences_the_older() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        w hello                             -> w welcome 0
        w consume default 2                 -> w deliver one two
        w hello one                         -> old2 close fenced, w welcome 0 one
        # What it does not work on any more went back.
        w consume default 1                 -> w deliver two!
        w ack one|ack two                   -> w confirm 2
        ",
    );
}

#[test]
fn a_protocol_error_ends_the_connection() {
    let closes = |line: &str, reason: &str| {
        check(&format!(
            "a hello -> a welcome 0\n a {line} -> a close {reason}"
        ));
    };
    closes("seq=0 publish one", "transactions are numbered from 1");
    closes(
        "seq=2 publish one",
        "transaction 2 came where 1 was expected",
    );
    closes(
        "consume default+ 1",
        "a queue's name has from 1 to 255 bytes not 0",
    );
    check(
        "a hello last=18446744073709551615  -> a close transaction 18446744073709551615 is past the last number 4611686018427387904",
    );
    check(
        "
        a hello                             -> a welcome 0
        a part more publish one             ->
        a publish two                       -> a close a transaction came between the parts of a larger one
        ",
    );
}

#[test]
fn a_large_transaction_comes_in_parts() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 10                ->
        a part more publish one             ->
        a part more publish two             ->
        a part last publish three           -> a confirm 1, w deliver one two three
        a part more publish four            ->
        a lost                              ->
        a hello                             -> a welcome 1
        a part more publish four            ->
        a part last publish five            -> a confirm 2, w deliver four five
        w ack one|ack two|ack three|ack four|ack five  -> w confirm 5
        ",
    );
    let options = BrokerOptions {
        staged_parts_cap_bytes: 10_000,
        ..BrokerOptions::default()
    };
    check_with(
        options,
        "
        a hello                             -> a welcome 0
        a part more publish one bytes=9000  ->
        b hello                             -> b welcome 0
        b part more publish two bytes=5000  ->
        b part last publish three           -> b confirm 1 1:refused 0 TooLarge
        a part last publish four            -> a confirm 1
        a status                            -> a status default:2/0/0 clients 2 results 0 evicted 0
        ",
    );
}

#[test]
fn leases_follow_their_session() {
    // A clean goodbye gives them back at once; nothing is counted.
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
    // A delivery that never left returns unmarked: nobody can have begun it.
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
        # The next may have been handed out as well, for all that the broker knows.
        w consume default 1                 -> w deliver two!
        w ack one|ack two                   -> w confirm 2
        ",
    );
    // Also after another crash, as long as nobody else was handed anything.
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
    // Also when nothing at all is left of the broker that made it.
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
    // One that was settled does not, though its client has not heard of that. The broker would have
    // counted the retry as running at a client that had given it back, until that client left.
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
    // Nor does one that a later broker has judged: here it gave the message to another, who asked for a
    // retry. Its grants are numbered from the last that the journal knew, so they can be lower than the
    // lost one; they were once compared without the epoch, and the retry went to a client that had
    // been told that its lease was lost.
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
    // Nor one that a later broker judged when it had handed out nothing: here the journal knew of an older
    // lease of the same client alone. What was settled under the lost one was refused, and then the
    // next broker believed the lease again: its client knew better, and nobody ever ran the message.
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
    // One of a message in two queues does not: it could be taken for the other's, which then never
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
    // ... not even if there is only one left, for it may have been of one that is gone.
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
        a purge mail                        -> a confirm 2
        kill                                ->
        w hello one                         -> w welcome 0
        w consume default 1                 -> w deliver one!
        ",
    );
    // One that somebody else has meanwhile does not.
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

#[test]
fn crashes_are_counted_and_the_last_is_final() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=2          -> a confirm 1
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 10                -> w deliver one
        w crash one reason=SIGSEGV          -> w confirm 1, w deliver one!
        w crash one reason=SIGKILL          -> a sees one Crashed SIGKILL, w confirm 2
        a info one                          -> a knows Dead in dead attempt 0 crashes 2 notes SIGSEGV+SIGKILL
        kill                                ->
        a hello                             -> a welcome 1
        a info one                          -> a knows Dead in dead attempt 0 crashes 2 notes SIGSEGV+SIGKILL
        # Thirty days later it is cleared away; how it ended was told.
        a lost                              ->
        wait 2592000000                     ->
        a hello last=1                      -> a welcome 1 forgotten
        a info one                          -> a knows nothing
        ",
    );
    // Without a result to keep, there is nothing to be seen of it.
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
    // The dead letters can be consumed like any queue.
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=1          -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 10                -> w deliver one
        w crash one                         -> w confirm 1
        w consume dead 1                    -> w deliver one@dead
        w move one queue=default            -> w confirm 2
        w consume default 1                 -> w deliver one
        w ack one; put one yes              -> w confirm 3
        a watch one                         -> a sees one Succeeded yes
        ",
    );
    // Whoever looks after them may crash, too: a letter keeps its place, and its job the result it had.
    check(
        "
        a hello                             -> a welcome 0
        a publish one deliveries=1          -> a confirm 1
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w put one no failed; move one queue=dead  -> w confirm 1
        w consume dead 2                    -> w deliver one@dead
        w crash one                         -> w confirm 2, w deliver one@dead!
        a watch one                         -> a sees one Failed no
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
        # Behind what came before the retry.
        w consume default 2                 -> w deliver two! one!#1
        w ack two                           -> w confirm 2
        w put one no failed; move one queue=dead note=bang expires=1000  -> w confirm 3
        w info one                          -> w knows Dead in dead attempt 1 crashes 0 notes boom+bang
        w watch one                         -> w sees one Failed no
        wait 1000                           ->
        w info one                          -> w knows nothing
        w watch one                         -> w sees one Failed no
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
fn order_is_that_of_publishing_within_a_priority() {
    check(
        "
        a hello                             -> a welcome 0
        a publish a|publish b priority=9|publish c|publish d priority=0|publish e priority=9  -> a confirm 5
        w hello                             -> w welcome 0
        w consume default 3                 -> w deliver b e a
        w return a|return b                 -> w confirm 2
        w consume default 5                 -> w deliver b! a! c d
        w ack a; ack b; ack c; ack d; ack e -> w confirm 3
        ",
    );
    // What comes back goes to its place among the others, and what was delayed to that of its publishing.
    check(
        "
        a hello                             -> a welcome 0
        a publish late after=10|publish b|publish c|publish d  -> a confirm 4
        w hello                             -> w welcome 0
        w consume default 2                 -> w deliver b c
        a publish e                         -> a confirm 5
        w return c                          -> w confirm 1
        w return b                          -> w confirm 2
        wait 11                             ->
        w consume default 10                -> w deliver late b! c! d e
        w ack late; ack b; ack c; ack d; ack e  -> w confirm 3
        ",
    );
}

#[test]
fn flows_share_by_measured_cost() {
    // A run of `slow` costs three times one of `fast`: it gets a third of the turns.
    let mut script = String::from("a hello -> a welcome 0\n");
    for index in 0..8 {
        script += &format!(
            "a publish s{index} task=slow|publish f{index} task=fast -> a confirm {}\n",
            2 * index + 2
        );
    }
    script += "
        w hello                             -> w welcome 0
        w consume default 2                 -> w deliver s0 f0
        w ack s0 cost=3000|ack f0 cost=1000 -> w confirm 2
        w consume default 9                 -> w deliver f1 f2 s1 f3 f4 f5 s2 f6 f7
        w ack s1 cost=3000|ack s2 cost=3000 -> w confirm 4
        w ack f1; ack f2; ack f3; ack f4; ack f5; ack f6; ack f7 -> w confirm 5
        # One that was idle rejoins at the present.
        a publish f8 task=fast|publish f9 task=fast -> a confirm 18
        w consume default 3                 -> w deliver f8 s3 f9
        ";
    check(&script);
}

#[test]
fn a_flow_that_was_idle_rejoins_at_the_present() {
    check(
        "
        w hello                             -> w welcome 0
        w publish x1 task=x|publish x2 task=x|publish x3 task=x  -> w confirm 3
        w consume default 3                 -> w deliver x1 x2 x3
        w ack x1; ack x2; ack x3            -> w confirm 4
        w publish x4 task=x|publish x5 task=x|publish x6 task=x  -> w confirm 7
        w publish y1 task=y|publish y2 task=y|publish y3 task=y  -> w confirm 10
        w consume default 6                 -> w deliver y1 x4 y2 x5 y3 x6
        ",
    );
}

#[test]
fn consumers_and_queues_take_turns() {
    check(
        "
        a hello                             -> a welcome 0
        v hello                             -> v welcome 0
        w hello                             -> w welcome 0
        v consume default 10                ->
        w consume default 10                ->
        a publish a|publish b|publish c|publish d  -> a confirm 4, v deliver a c, w deliver b d
        v bye                               -> w deliver a! c!
        w ack a; ack b; ack c; ack d        -> w confirm 1
        ",
    );
    check(
        "
        a hello                             -> a welcome 0
        a publish a queue=x|publish b queue=x|publish c queue=y|publish d queue=y  -> a confirm 4
        w hello                             -> w welcome 0
        w consume x+y 3                     -> w deliver a@x c@y b@x
        w stop-consuming                    ->
        a publish e queue=x                 -> a confirm 5
        w consume x+y 1                     -> w deliver d@y
        w consume x+y 0                     ->
        w consume x 1                       -> w deliver e@x
        ",
    );
    // One body, several queues; each copy is settled by itself.
    check(
        "
        a hello                             -> a welcome 0
        a publish one queue=x+y after=5     -> a confirm 1
        a publish one                       -> a confirm 2 2:refused 0 AlreadyExists
        w hello                             -> w welcome 0
        w consume x 9                       ->
        wait 6                              -> w deliver one@x
        w ack one                           -> w confirm 1
        a watch one                         -> a sees one pending
        w consume y 0                       -> w deliver one@y
        w ack one                           -> a sees one gone, w confirm 2
        a publish one                       -> a confirm 3
        ",
    );
}

#[test]
fn delays_follow_the_clock_they_were_given_in() {
    check(
        "
        w hello                             -> w welcome 0
        w consume default 10                ->
        w publish soon after=1000|publish eta at=5000  -> w confirm 2
        w info eta                          -> w knows Delayed in default attempt 0 crashes 0
        # The wall's clock is set forward: a countdown does not care, an ETA has come.
        wall 5000                           -> w deliver eta
        # Half a millisecond is not known of, so a countdown ends with the next whole one.
        wait 1000                           ->
        wait 1                              -> w deliver soon
        w ack eta; ack soon                 -> w confirm 3
        ",
    );
}

#[test]
fn a_countdown_does_not_care_that_the_wall_clock_was_set_before_a_restart() {
    for set_by in ["3600000", "-3600000"] {
        check(&format!(
            "
            w hello                             -> w welcome 0
            w publish soon after=10000          -> w confirm 1
            wall {set_by}                       ->
            wait 1000                           ->
            kill                                ->
            w hello                             -> w welcome 1
            w consume default 10                ->
            wait 9000                           ->
            wait 1                              -> w deliver soon!
            "
        ));
    }
    // Nor when the segment that told of it is gone.
    check(
        "
        w hello                             -> w welcome 0
        w publish soon after=10000          -> w confirm 1
        wall 3600000                        ->
        carry                               ->
        kill                                ->
        w hello                             -> w welcome 1
        w consume default 10                ->
        wait 10000                          ->
        wait 1                              -> w deliver soon!
        ",
    );
}

#[test]
fn an_expired_message_is_not_started() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one expires=100|publish two expires=100 no-result|publish three expires=50 after=80  -> a confirm 3
        a publish past expires-at=0         -> a confirm 4
        a watch one two three past          -> a sees one pending, a sees two pending, a sees three pending, a sees past Expired
        wait 99                             -> a sees three Expired
        wait 1                              -> a sees one Expired, a sees two gone
        w hello                             -> w welcome 0
        w consume default 10                ->
        ",
    );
    // One that runs does not expire; when it comes back, it does.
    check(
        "
        w hello                             -> w welcome 0
        w consume default 10                ->
        w publish one expires=100|publish two expires=100  -> w confirm 2, w deliver one two
        wait 200                            ->
        w ack one; put one yes              -> w confirm 3
        w return two                        -> w confirm 4
        w watch one two                     -> w sees one Succeeded yes, w sees two Expired
        ",
    );
}

#[test]
fn keys_have_values_guards_and_a_time() {
    check(
        "
        a hello                             -> a welcome 0
        a guard lock absent; put lock mine ttl=1000  -> a confirm 1
        b hello                             -> b welcome 0
        b guard lock absent; put lock yours -> b confirm 1 1:refused 0 GuardFailed
        b guard lock mine                   -> b confirm 2
        wait 999                            ->
        b guard lock present                -> b confirm 3
        kill                                ->
        wait 1                              ->
        b hello                             -> b welcome 0, b confirm 3 1:refused 0 GuardFailed
        b watch lock                        -> b sees lock gone
        b guard lock absent; put lock yours -> b confirm 4
        b guard lock yours; delete lock     -> b confirm 5
        b watch lock                        -> b sees lock gone
        ",
    );
}

#[test]
fn a_unique_message_owns_its_key_until_it_is_settled() {
    for (last, rest) in [
        ("w ack one", "w confirm 3"),
        ("w crash one", "w confirm 3"),
        ("w move one queue=dead", "w confirm 3"),
    ] {
        let settles = last.contains("ack");
        let after = if settles {
            "a confirm 3"
        } else {
            "a confirm 3 3:skipped[0]"
        };
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one unless=once           -> a confirm 1
            a publish two unless=once           -> a confirm 2 2:skipped[0]
            w hello                             -> w welcome 0
            w guard once present                -> w confirm 1
            w consume default 1                 -> w deliver one
            w move one next                     -> w confirm 2
            w consume default 1                 -> w deliver one#1
            kill                                ->
            w hello one                         -> w welcome 2 one
            {last}                              -> {rest}
            a hello                             -> a welcome 1, a confirm 2 2:skipped[0]
            a publish three unless=once         -> {after}
            "
        ));
    }
    check(
        "
        a hello                             -> a welcome 0
        a publish one unless=once expires=10; publish two unless=once  -> a confirm 1 1:skipped[1]
        a watch once                        -> a sees once pending
        wait 10                             -> a sees once gone
        a publish two unless=once           -> a confirm 2
        a purge default                     -> a confirm 3
        a publish three unless=once; put once held  -> a confirm 4
        # The value is there on its own account.
        a purge default                     -> a confirm 5
        a publish four unless=once          -> a confirm 6 6:skipped[0]
        a delete once; publish five unless=once  -> a confirm 7
        ",
    );
}

#[test]
fn a_unique_message_owns_its_key_until_its_last_copy_is_settled() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one queue=x+y unless=once -> a confirm 1
        w hello                             -> w welcome 0
        w consume x 1                       -> w deliver one@x
        w ack one                           -> w confirm 1
        a publish two unless=once           -> a confirm 2 2:skipped[0]
        w consume y 1                       -> w deliver one@y
        w ack one                           -> w confirm 2
        a publish two unless=once           -> a confirm 3
        ",
    );
}

#[test]
fn results_are_evicted_oldest_first_but_never_one_that_is_watched() {
    let options = BrokerOptions {
        results_cap_bytes: 500,
        ..BrokerOptions::default()
    };
    check_with(
        options,
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 9                 ->
        a publish a|publish b|publish c|publish d  -> a confirm 4, w deliver a b c d
        w ack a; put a x bytes=100|ack b; put b x bytes=100 group=other|ack c; put c x bytes=100  -> w confirm 3
        w put lock x bytes=1000             -> w confirm 4
        w ack d; put d x bytes=200          -> notice: task over 500, w confirm 5
        w watch a b c d                     -> w sees a gone, w sees b Succeeded of 100 bytes, w sees c Succeeded of 100 bytes, w sees d Succeeded of 200 bytes
        a publish e                         -> a confirm 5, w deliver e
        w watch e                           -> w sees e pending
        w lost                              ->
        w hello e                           -> w welcome 5 e
        w watch e                           -> w sees e pending
        w ack e; put e x bytes=480          -> w confirm 6, w sees e Succeeded of 480 bytes
        w watch c d                         -> w sees c gone, w sees d gone
        w status                            -> w status default:0/0/0 clients 2 results 2 evicted 3
        ",
    );
    // One whose watcher has lost its connection is kept for its return.
    let options = BrokerOptions {
        results_cap_bytes: 500,
        ..BrokerOptions::default()
    };
    check_with(
        options,
        "
        w hello                             -> w welcome 0
        w publish one|publish two           -> w confirm 2
        a hello                             -> a welcome 0
        a watch one                         -> a sees one pending
        a lost                              ->
        w consume default 2                 -> w deliver one two
        w ack one; put one x bytes=300      -> w confirm 3
        w ack two; put two x bytes=300      -> notice: task over 500, w confirm 4
        a hello                             -> a welcome 0
        a watch one two                     -> a sees one Succeeded of 300 bytes, a sees two gone
        ",
    );
}

/// A publish under a key that existed was not looked at any further, since it would be skipped. But what came
/// before it in the same transaction could take the key away: then the broker had an id twice, or
/// ended at a priority that there is not.
#[test]
fn what_a_transaction_takes_the_key_of_is_checked_all_the_same() {
    check(
        "
        a hello                             -> a welcome 0
        a put once held                     -> a confirm 1
        a publish one                       -> a confirm 2
        a delete once; publish one unless=once  -> a confirm 3 3:skipped[1]
        a put once held                     -> a confirm 4
        a delete once; publish two unless=once; publish three  -> a confirm 5
        a put once held                     -> a confirm 6
        a publish four unless=once priority=10  -> a confirm 7 7:refused 0 Invalid
        a delete once; publish four unless=once priority=10  -> a confirm 8 8:refused 1 Invalid
        a delete once; publish four unless=once deliveries=0  -> a confirm 9 9:refused 1 Invalid
        w hello                             -> w welcome 0
        w consume default 9                 -> w deliver one two three
        ",
    );
}

#[test]
fn a_join_releases_what_it_holds_once() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 9                 ->
        a hold join count=3 messages=one+two  -> a confirm 1
        a watch one                         -> a sees one pending
        a info one                          -> a knows Held in default attempt 0 crashes 0
        a join join index=2                 -> a confirm 2
        a join join index=2 failed          -> a confirm 3
        a join join index=3                 -> a confirm 4 4:refused 0 Invalid
        kill                                ->
        a hello                             -> a welcome 3, a confirm 4 4:refused 0 Invalid
        w hello                             -> w welcome 0
        w consume default 9                 ->
        a join join index=0                 -> a confirm 5
        a join join index=1                 -> a confirm 6, w deliver one! two!
        a join join index=1                 -> a confirm 7
        w ack one; ack two                  -> w confirm 1
        ",
    );
    check(
        "
        a hello                             -> a welcome 0
        a hold all count=2 messages=one     -> a confirm 1
        a hold any count=2 messages=two all-ended  -> a confirm 2
        a watch one                         -> a sees one pending
        a join all index=0 failed           -> a confirm 3, a sees one Cancelled a member of the group it waited for has failed
        a join any index=0 failed           -> a confirm 4
        a join any index=1                  -> a confirm 5
        a join all index=1                  -> a confirm 6
        a status                            -> a status default:1/0/0 clients 1 results 1 evicted 0
        ",
    );
    // What expires while it is held is not released.
    check(
        "
        a hello                             -> a welcome 0
        a hold join count=1 messages=one expires=10  -> a confirm 1
        wait 10                             ->
        a join join index=0                 -> a confirm 2
        a status                            -> a status default:0/0/0 clients 1 results 1 evicted 0
        a watch one                         -> a sees one Expired
        ",
    );
}

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
        a purge default                     -> a confirm 6, a sees two Cancelled its queue was purged, a sees three Cancelled its queue was purged
        a status                            -> a status default:0/0/1 w=0/0/1 clients 1 results 2 evicted 0
        w ack one                           -> a sees one gone, w confirm 1
        a purge nothing                     -> a confirm 7
        ",
    );
}

#[test]
fn a_queue_that_nobody_serves_is_told_of_once() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        wait 29999                          ->
        wait 1                              -> notice: 2 unserved in default for 30000
        a publish three                     -> a confirm 3
        wait 60000                          ->
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        w ack one                           -> w confirm 1
        w bye                               ->
        wait 30000                          -> notice: 2 unserved in default for 30000
        a purge default                     -> a confirm 4
        ",
    );
    // Not of one that was empty meanwhile, nor of the dead letters.
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        wait 20000                          ->
        a purge default                     -> a confirm 2
        a publish two deliveries=1 expires=40000  -> a confirm 3
        wait 20000                          ->
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver two
        w crash two                         -> w confirm 1
        wait 60000                          ->
        ",
    );
}

#[test]
fn what_refers_to_what_was_carried_forward_still_does() {
    // The grant stands before the place to which its session was carried.
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
    // Nothing lives; but no number is given out twice.
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
fn what_lives_is_carried_forward() {
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
        a info dead                         -> a knows Dead in dead attempt 0 crashes 1 notes why
        a watch key gone dead               -> a sees key Succeeded value, a sees gone Succeeded yes, a sees dead Crashed why
        a publish two unless=once           -> a confirm 12 12:skipped[0]
        w ack one|ack run                   -> w confirm 5
        a join join index=0|join join index=1|join join index=2  -> a confirm 15
        w consume default 2                 -> w deliver held!
        wait 60001                          -> w deliver late!, notice: 1 unserved in x for 30000, notice: 1 unserved in y for 30000
        a status                            -> a status dead:1/0/0-60001ms default:0/0/2 other:0/0/0-paused x:1/0/0-60001ms y:1/0/0-60001ms w=0/0/2 clients 1 results 2 evicted 0
        ",
    );
}

#[test]
fn a_body_that_cannot_be_read_back_is_quarantined_and_all_else_goes_on() {
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
        a status                            -> a status dead:2/0/0 default:0/0/1 w=0/0/1 clients 1 results 2 evicted 0
        w ack three                         -> w confirm 1
        w consume dead 2                    -> w deliver one@dead two@dead
        w ack one; ack two                  -> w confirm 2
        ",
    );
}
