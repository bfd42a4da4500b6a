//! Progress of running jobs: the latest is kept next to them, in memory.

use crate::script::check;

#[test]
fn clients_that_ask_get_the_latest_progress_of_a_running_job() {
    check(
        "
        a hello                     -> a welcome 0
        w hello                     -> w welcome 0
        w consume default 2         ->
        a publish m0                -> a confirm 1, w deliver m0
        a told m0                   -> a told nothing
        w progress m0 one           ->
        w progress m0 two           ->
        a told m0                   -> a told two
        # Progress from a client that does not run the job is ignored.
        a progress m0 three         ->
        a told m0                   -> a told two
        # The last progress is kept for clients that ask shortly after.
        w ack m0                    -> w confirm 1
        a told m0                   -> a told two
        w progress m0 four          ->
        a told m0                   -> a told two
        a told m1                   -> a told nothing
        ",
    );
}

#[test]
fn each_attempt_begins_without_progress() {
    check(
        "
        a hello                     -> a welcome 0
        w hello                     -> w welcome 0
        w consume default 9         ->
        a publish m0                -> a confirm 1, w deliver m0
        w progress m0 one           ->
        w move m0 next              -> w confirm 1, w deliver m0#1
        a told m0                   -> a told nothing
        w progress m0 two           ->
        w return m0                 -> w confirm 2, w deliver m0!#1
        a told m0                   -> a told nothing
        # An attempt without progress shows none of an earlier one.
        w ack m0                    -> w confirm 3
        a told m0                   -> a told nothing
        ",
    );
}

#[test]
fn a_restarted_broker_has_forgotten_progress() {
    check(
        "
        a hello                     -> a welcome 0
        w hello                     -> w welcome 0
        w consume default 1         ->
        a publish m0                -> a confirm 1, w deliver m0
        w progress m0 one           ->
        kill                        ->
        a hello                     -> a welcome 1
        w hello m0                  -> w welcome 0 m0
        a told m0                   -> a told nothing
        w progress m0 two           ->
        a told m0                   -> a told two
        ",
    );
}

#[test]
fn progress_that_is_too_large_is_dropped() {
    check(
        "
        a hello                     -> a welcome 0
        w hello                     -> w welcome 0
        w consume default 1         ->
        a publish m0                -> a confirm 1, w deliver m0
        w progress m0 one           ->
        w progress m0 MiB:1         ->
        a told m0                   -> a told one
        ",
    );
}
