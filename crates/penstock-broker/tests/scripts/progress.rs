//! Progress of running jobs: the latest is kept next to them, in memory.

use crate::script::check;

#[test]
fn the_latest_progress_of_a_running_job_is_told_to_those_who_ask() {
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
        # A client that does not run it has no say in that.
        a progress m0 three         ->
        a told m0                   -> a told two
        # The last is kept for those who look a moment later.
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
        # An attempt that has told nothing leaves nothing of an earlier one.
        w ack m0                    -> w confirm 3
        a told m0                   -> a told nothing
        ",
    );
}

#[test]
fn a_broker_that_starts_again_has_forgotten_it() {
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
fn too_large_a_progress_is_dropped() {
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
