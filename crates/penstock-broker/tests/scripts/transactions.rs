//! Effects of a transaction, and when clients see them; sessions that send them.

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
    // A worker reports at most once a second: after a burst of short jobs its last report is out of date.
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
        # The status waits for no record: it is available even while the disk is stuck.
        a status                            -> a status default:0/0/1 w=0/0/1 clients 1 results 0 evicted 0
        sync                                -> a confirm 2 2:refused 0 GuardFailed, a sees one pending, w deliver one
        ",
    );
    // A returned message is not given to another client before the return is safe: after a crash the first lease would
    // hold again, and two clients would run it.
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
    // A refusal depends on all earlier decisions, whatever durability it asked for itself.
    check(
        "
        a hello                             -> a welcome 0
        stall                               ->
        a publish one                       ->
        a none publish one                  ->
        sync                                -> a confirm 2 2:refused 0 AlreadyExists
        ",
    );
    // Messages that a join releases also depend on the hold.
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
    // No client is told that a value is pending after having received the value.
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
    // A value depends on its record, and so does its absence.
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
    // A client that can't take more receives confirms, and nothing else until it can.
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
    refused("hold join count=16777217 messages=held", "2 Invalid");
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
        # Resent and new transactions may come together.
        a seq=3 publish two|publish three   -> a confirm 4
        a status                            -> a status default:3/0/0 clients 1 results 0 evicted 0
        # After a reconnect, a client learns of plain successes, and resends from the first exception.
        a lost                              ->
        a hello                             -> a welcome 1, a confirm 4 2:refused 0 GuardFailed
        a seq=2 guard no present            -> a confirm 4 2:refused 0 GuardFailed
        a seq=6 publish four                -> a close transaction 6 arrived instead of 5
        ",
    );
    check(
        "
        a hello                             -> a welcome 0
        a publish one unless=k|publish two unless=k; publish three  -> a confirm 2 2:skipped[0]+0:owner-one
        kill                                ->
        a hello                             -> a welcome 1, a confirm 2 2:skipped[0]+0:owner-one
        a status                            -> a status default:2/0/0 clients 1 results 0 evicted 0
        ",
    );
    // Transactions that were not safe when the broker died were not confirmed, and are applied when they are resent.
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
    // Numbers that were confirmed with little durability, and then lost, do not count as missing.
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
        # Jobs that it no longer works on were returned.
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
    closes("seq=2 publish one", "transaction 2 arrived instead of 1");
    closes(
        "consume default+ 1",
        "a queue's name must have 1 to 255 bytes not 0",
    );
    check(
        "a hello last=18446744073709551615  -> a close transaction 18446744073709551615 is past the last number 4611686018427387904",
    );
    check(
        "
        a hello                             -> a welcome 0
        a part more publish one             ->
        a publish two                       -> a close a transaction arrived between the parts of a larger one
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

/// Seed 5005336 of the simulator: the first welcome was lost with its connection, and the second said that everything
/// up to the last number had been applied. So the client took transactions as confirmed that no broker had.
#[test]
fn a_client_learns_that_it_was_forgotten_however_often_that_is_lost() {
    check(
        "
        a hello last=5                      -> a welcome 5 forgotten
        a lost                              ->
        a hello last=5                      -> a welcome 5 forgotten
        a lost                              ->
        a hello last=7                      -> a welcome 5 forgotten
        # Nor does the next broker know what the client has received.
        kill                                ->
        a hello last=7                      -> a welcome 5 forgotten
        a publish one                       -> a confirm 8
        a lost                              ->
        a hello last=8                      -> a welcome 8
        carry                               ->
        kill                                ->
        a hello last=8                      -> a welcome 8
        ",
    );
}
