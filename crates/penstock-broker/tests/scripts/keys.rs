//! Values, locks, claims and joins.

use crate::script::{check, check_with};
use penstock_broker::BrokerOptions;

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
        ("w move one queue=elsewhere", "w confirm 3"),
    ] {
        let settles = last.contains("ack");
        let after = if settles {
            "a confirm 3"
        } else {
            "a confirm 3 3:skipped[0]+0:owner-one"
        };
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one unless=once           -> a confirm 1
            a publish two unless=once           -> a confirm 2 2:skipped[0]+0:owner-one
            w hello                             -> w welcome 0
            w guard once present                -> w confirm 1
            w consume default 1                 -> w deliver one
            w move one next                     -> w confirm 2
            w consume default 1                 -> w deliver one#1
            kill                                ->
            w hello one                         -> w welcome 2 one
            {last}                              -> {rest}
            a hello                             -> a welcome 1, a confirm 2 2:skipped[0]+0:owner-one
            a publish three unless=once         -> {after}
            "
        ));
    }
    check(
        "
        a hello                             -> a welcome 0
        a publish one unless=once expires=10; publish two unless=once  -> a confirm 1 1:skipped[1]+1:owner-one
        a watch once                        -> a sees once pending
        wait 10                             -> a sees once gone
        a publish two unless=once           -> a confirm 2
        a purge default                     -> a confirm 3 3:operation-1
        a publish three unless=once; put once held  -> a confirm 4
        # The value exists independently.
        a purge default                     -> a confirm 5 5:operation-2
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
        a publish two unless=once           -> a confirm 2 2:skipped[0]+0:owner-one
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
    // A value whose watcher has lost its connection is kept for its return.
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

/// A publish under an existing key was not checked any further, since it would be skipped. But an earlier operation of
/// the same transaction could remove the key. The broker then had an id twice, or stopped at a priority that does not
/// exist.
#[test]
fn a_message_whose_key_the_transaction_removes_is_still_checked() {
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
fn a_join_releases_its_messages_once() {
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
        a join all index=0 failed           -> a confirm 3, a sees one Upstream
        a join any index=0 failed           -> a confirm 4
        a join any index=1                  -> a confirm 5
        a join all index=1                  -> a confirm 6
        a info one                          -> a knows Blocked in default attempt 0 crashes 0
        a status                            -> a status default:1/0/0 clients 1 results 0 evicted 0
        ",
    );
    // A message that expires while it is held is not released.
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
