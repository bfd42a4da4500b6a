//! Schedules. `at60000` is the job of the time 60 seconds after the script's beginning. A schedule is shown with the
//! number of times that had jobs, were skipped and were missed: `poll:every60000:1+0+2`.

use penstock_broker::BrokerOptions;

use crate::script::check_with;

/// Checks a script without warnings that no worker is there yet.
fn check(script: &str) {
    for resident_bodies_bytes in [None, Some(0)] {
        let options = BrokerOptions {
            resident_bodies_bytes,
            unserved_ms: PATIENCE_MS,
            never_served_ms: PATIENCE_MS,
            ..BrokerOptions::default()
        };
        check_with(options, script);
    }
}

const PATIENCE_MS: u64 = 1 << 40;

/// Returns the mark of a job whose first delivery may have been lost with its broker.
fn mark_after(between: &str) -> &'static str {
    match between.contains("kill") || between.contains("power-cut") {
        true => "!",
        false => "",
    }
}

const NOTHING: &str = "# No crash.";
const BETWEEN: [&str; 5] = [
    NOTHING,
    "kill",
    "power-cut",
    "mark\ncarry",
    "mark\ncarry\nkill",
];

#[test]
fn a_schedule_makes_a_job_at_each_of_its_times() {
    check(
        "
        a hello                                     -> a welcome 0
        a set poll every=60000                      -> a confirm 1
        a schedules times=2                         -> a schedules poll:every60000:0+0+0:set:next60000:next120000
        w hello                                     -> w welcome 0
        w consume default 9                         ->
        wait 59999                                  ->
        wait 1                                      -> w deliver at60000
        w ack at60000                               -> w confirm 1
        wait 60000                                  -> w deliver at120000
        w ack at120000                              -> w confirm 2
        a schedules                                 -> a schedules poll:every60000:2+0+0:set:last120000:next180000
        a unschedule poll                           -> a confirm 2
        wait 200000                                 ->
        a schedules                                 -> a schedules
        ",
    );
}

#[test]
fn one_moment_has_one_job_and_cron_has_its_zone() {
    // The script begins on 14 November 2023 at 22:13:20 UTC.
    check(
        "
        a hello                                     -> a welcome 0
        a set once at=5000; set past at=0; set daily cron=0_8_*_*_* zone=Asia/Tokyo -> a confirm 1
        a schedules times=2                         -> a schedules daily:0_8_*_*_*:0+0+0:set:next2800000:next89200000 once:at5000:0+0+0:set:next5000 past:at0:0+0+0:set
        wait 5000                                   ->
        wait 100000                                 ->
        a schedules                                 -> a schedules daily:0_8_*_*_*:0+0+0:set:next2800000 once:at5000:1+0+0:set:running:last5000 past:at0:0+0+0:set
        ",
    );
}

/// Each time has one job, whatever happens to the broker.
#[test]
fn a_time_is_decided_once_despite_kills() {
    for between in BETWEEN {
        let again = mark_after(between);
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000 overlap=allow        -> a confirm 1
            {between}
            wait 60000                                  ->
            {between}
            wait 0                                      ->
            wait 60000                                  ->
            {between}
            w hello                                     -> w welcome 0
            w consume default 9                         -> w deliver at60000{again} at120000{again}
            w schedules                                 -> w schedules poll:every60000:2+0+0:set:running:last120000:next180000
            "
        ));
    }
}

/// Its record was not on disk, so no client has seen the job.
#[test]
fn a_decision_that_a_power_cut_takes_is_made_again() {
    check(
        "
        a hello                                     -> a welcome 0
        w hello                                     -> w welcome 0
        w consume default 9                         ->
        a set poll every=60000                      -> a confirm 1
        stall                                       ->
        wait 60000                                  ->
        power-cut                                   ->
        sync                                        ->
        w hello                                     -> w welcome 0
        w consume default 9                         -> w deliver at60000
        w schedules                                 -> w schedules poll:every60000:1+0+0:set:running:last60000:next120000
        ",
    );
}

#[test]
fn a_clock_that_is_set_back_brings_no_time_again() {
    for between in [NOTHING, "kill"] {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000 overlap=allow        -> a confirm 1
            wait 60000                                  ->
            wall -50000                                 ->
            {between}
            wait 50000                                  ->
            wait 59999                                  ->
            b hello                                     -> b welcome 0
            b schedules                                 -> b schedules poll:every60000:1+0+0:set:running:last60000:next120000
            wait 1                                      ->
            b schedules                                 -> b schedules poll:every60000:2+0+0:set:running:last120000:next180000
            "
        ));
    }
}

/// A clock that was a year ahead has decided all times of that year. The clock was wrong, so the schedule continues
/// from the present.
#[test]
fn a_clock_that_was_far_ahead_does_not_stop_a_schedule() {
    check(
        "
        a hello                                     -> a welcome 0
        a set poll every=60000 overlap=allow        -> a confirm 1
        wall 31536000000                            ->
        wall -31536000000                           ->
        a schedules                                 -> a schedules poll:every60000:1+0+525599:set:running:last31536000000:Missed31535940000:next60000
        wait 60000                                  ->
        a schedules                                 -> a schedules poll:every60000:2+0+525599:set:running:last60000:Missed31535940000:next120000
        ",
    );
}

// --- overlap

#[test]
fn a_job_that_has_not_ended_has_the_next_time_skipped() {
    for between in BETWEEN {
        let again = mark_after(between);
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000                      -> a confirm 1
            wait 60000                                  ->
            {between}
            wait 60000                                  ->
            w hello                                     -> w welcome 0
            w consume default 9                         -> w deliver at60000{again}
            w schedules                                 -> w schedules poll:every60000:1+1+0:set:running:last60000:Overlap120000:next180000
            w ack at60000                               -> w confirm 1
            wait 60000                                  -> w deliver at180000
            "
        ));
    }
}

/// Between its attempts a job has not ended; once it has failed for good, it has.
#[test]
fn a_retry_is_the_same_job_and_a_failed_job_is_out_of_the_way() {
    for between in [NOTHING, "kill"] {
        let again = mark_after(between);
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000                      -> a confirm 1
            w hello                                     -> w welcome 0
            w consume default 9                         ->
            wait 60000                                  -> w deliver at60000
            w move at60000 next after=90000             -> w confirm 1
            w bye                                       ->
            {between}
            wait 60000                                  ->
            v hello                                     -> v welcome 0
            v schedules                                 -> v schedules poll:every60000:1+1+0:set:running:last60000:Overlap120000:next180000
            wait 30001                                  ->
            v consume default 9                         -> v deliver at60000{again}#1
            v fail at60000                              -> v confirm 1
            wait 29999                                  -> v deliver at180000
            "
        ));
    }
}

#[test]
fn one_job_waits_behind_another() {
    for between in BETWEEN {
        let again = mark_after(between);
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000 overlap=queue        -> a confirm 1
            wait 60000                                  ->
            wait 60000                                  ->
            wait 60000                                  ->
            {between}
            w hello                                     -> w welcome 0
            w consume default 9                         -> w deliver at60000{again}
            w schedules                                 -> w schedules poll:every60000:1+1+0:set:running:queued:last60000:Overlap180000:next240000
            w ack at60000                               -> w confirm 1, w deliver at120000
            w schedules                                 -> w schedules poll:every60000:2+1+0:set:running:last120000:Overlap180000:next240000
            w ack at120000                              -> w confirm 2
            wait 60000                                  -> w deliver at240000
            "
        ));
    }
}

#[test]
fn the_job_before_is_cancelled_for_the_next() {
    for between in [NOTHING, "mark\ncarry"] {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000 overlap=cancel_previous -> a confirm 1
            w hello                                     -> w welcome 0
            w consume default 9                         ->
            wait 60000                                  -> w deliver at60000
            wait 60000                                  -> w stop at60000 (the next job of its schedule was due)
            {between}
            w return at60000                            -> w confirm 1, w deliver at120000
            w schedules                                 -> w schedules poll:every60000:2+0+0:set:running:last120000:next180000
            "
        ));
    }
    // A waiting job is cancelled at once.
    check(
        "
        a hello                                     -> a welcome 0
        a set poll every=60000 overlap=cancel_previous -> a confirm 1
        wait 60000                                  ->
        wait 60000                                  ->
        w hello                                     -> w welcome 0
        w consume default 9                         -> w deliver at120000
        ",
    );
    // A group that runs in its place ends with all of its members.
    for between in [NOTHING, "mark\ncarry"] {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000 overlap=cancel_previous -> a confirm 1
            w hello                                     -> w welcome 0
            w consume default 2                         ->
            wait 60000                                  -> w deliver at60000
            w replace at60000; hold u/ count=2 takes=at60000 result=1000000; publish u/0 member=u/:0 workflow=at60000; publish u/1 member=u/:1 workflow=at60000 -> w confirm 1, w deliver u/0
            {between}
            wait 60000                                  -> w stop u/0 (the next job of its schedule was due)
            w return u/0                                -> w confirm 2
            w consume default 1                         -> w deliver at120000
            "
        ));
    }
}

/// A job that a group has replaced is over when the group is.
#[test]
fn a_queued_time_waits_for_the_group_in_the_place_of_the_job() {
    for last in [
        "w ack u/0; put u/0 one       -> w confirm 2, w deliver at120000",
        "w fail u/0                    -> w confirm 2, w deliver at120000",
    ] {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000 overlap=queue        -> a confirm 1
            w hello                                     -> w welcome 0
            w consume default 9                         ->
            wait 60000                                  -> w deliver at60000
            w replace at60000; hold u/ count=1 takes=at60000 result=1000000; publish u/0 member=u/:0 workflow=at60000 -> w confirm 1, w deliver u/0
            wait 60000                                  ->
            {last}
            "
        ));
    }
}

#[test]
fn a_run_that_hangs_is_named_at_ten_times_the_median() {
    let mut script = "
        a hello                                     -> a welcome 0
        a set poll every=3600000                    -> a confirm 1
        w hello                                     -> w welcome 0
        w consume default 99                        ->
        "
    .to_owned();
    for run in 1..=5_u64 {
        let (wait, job) = (3600000 - 2000 * u64::from(run > 1), run * 3600000);
        script += &format!(
            "
            wait {wait}                             -> w deliver at{job}
            wait 2000                               ->
            w ack at{job}                           -> w confirm {run}
            "
        );
    }
    script += "
        wait 3598000                                -> w deliver at21600000
        wait 19999                                  ->
        wait 1                                      -> notice: at21600000 of poll hangs for 20000 instead of 2000
        # Only once.
        wait 3579999                                ->
        wait 1                                      ->
        w ack at21600000                            -> w confirm 6
        # A job that waits for a worker does not hang, however long it waits. It may hang once it has begun.
        w pause default                             -> w confirm 7
        wait 3600000                                ->
        wait 3000000                                ->
        w resume default                            -> w confirm 8, w deliver at28800000
        wait 19999                                  ->
        wait 1                                      -> notice: at28800000 of poll hangs for 20000 instead of 2000
        ";
    check(&script);
}

#[test]
fn a_person_changes_the_times_and_not_the_job() {
    for between in BETWEEN {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a declare poll every=60000 task=poll queue=slow -> a confirm 1
            a retime poll every=90000 overlap=allow queue=slow -> a confirm 2
            {between}
            b hello                                     -> b welcome 0
            b schedules                                 -> b schedules poll:every90000:0+0+0:set:next90000
            w hello                                     -> w welcome 0
            w consume slow 9                            ->
            wait 90000                                  -> w deliver at90000@slow
            b schedule poll reset                       -> b confirm 1
            b schedules                                 -> b schedules poll:every60000:1+0+0:running:last90000:next150000
            b retime other every=90000                  -> b confirm 2 2:refused 0 Invalid
            "
        ));
    }
}

#[test]
fn a_full_queue_has_the_time_skipped() {
    check(
        "
        a hello                                     -> a welcome 0
        a limit default length=1; publish one       -> a confirm 1
        a set poll every=60000                      -> a confirm 2
        wait 60000                                  ->
        a schedules                                 -> a schedules poll:every60000:0+1+0:set:QueueFull60000:next120000
        ",
    );
}

// --- times that were missed

#[test]
fn the_last_of_the_missed_times_has_a_job() {
    check(
        "
        a hello                                     -> a welcome 0
        a set poll every=60000; set short every=60000 window=60000 -> a confirm 1
        killed-for 3590000 wall 0                   ->
        w hello                                     -> w welcome 0
        w consume default 9                         -> w deliver at3540000 at3540000
        w schedules                                 -> w schedules poll:every60000:1+0+58:set:running:last3540000:Missed3480000:next3600000 short:every60000:1+0+58:set:running:last3540000:Missed3480000:next3600000
        ",
    );
    check(
        "
        a hello                                     -> a welcome 0
        a set daily every=86400000                  -> a confirm 1
        killed-for 90000001 wall 0                  ->
        w hello                                     -> w welcome 0
        w consume default 9                         ->
        w schedules                                 -> w schedules daily:every86400000:0+0+1:set:Missed86400000:next172800000
        ",
    );
}

#[test]
fn missed_times_have_no_job_or_each_one() {
    check(
        "
        a hello                                     -> a welcome 0
        a set none every=600000 catch-up=skip; set all every=600000 catch-up=all overlap=allow window=1800000 -> a confirm 1
        killed-for 3500000 wall 0                   ->
        w hello                                     -> w welcome 0
        w consume default 9                         -> w deliver at1800000 at2400000 at3000000
        w schedules                                 -> w schedules all:every600000:3+0+2:set:running:last3000000:Missed1200000:next3600000 none:every600000:0+0+5:set:Missed3000000:next3600000
        ",
    );
    // A hundred are enough, however many there are.
    check(
        "
        a hello                                     -> a welcome 0
        a set all every=1000 catch-up=all overlap=allow -> a confirm 1
        killed-for 3000000 wall 0                   ->
        w hello                                     -> w welcome 0
        w schedules                                 -> w schedules all:every1000:100+0+2900:set:running:last3000000:Missed2900000:next3001000
        ",
    );
}

#[test]
fn a_full_disk_delays_a_decision() {
    check(
        "
        a hello                                     -> a welcome 0
        a set poll every=60000                      -> a confirm 1
        disk no-publishes                           -> notice: NoPublishes
        wait 60000                                  ->
        wait 30000                                  ->
        a schedules                                 -> a schedules poll:every60000:0+0+0:set:next120000
        disk plenty                                 -> notice: Plenty
        a schedules                                 -> a schedules poll:every60000:1+0+0:set:running:last60000:next120000
        ",
    );
}

// --- people

#[test]
fn a_paused_schedule_misses_nothing() {
    for between in BETWEEN {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a set poll every=60000                      -> a confirm 1
            a schedule poll pause                       -> a confirm 2
            {between}
            wait 150000                                 ->
            b hello                                     -> b welcome 0
            b schedules                                 -> b schedules poll:every60000:0+0+0:set:paused
            b schedule poll resume                      -> b confirm 1
            b schedules                                 -> b schedules poll:every60000:0+0+0:set:next180000
            wait 30000                                  ->
            w hello                                     -> w welcome 0
            w consume default 9                         -> w deliver at180000
            "
        ));
    }
}

#[test]
fn a_schedule_runs_at_once_and_keeps_its_times() {
    check(
        "
        a hello                                     -> a welcome 0
        a set poll every=60000                      -> a confirm 1
        wait 100                                    ->
        a schedule poll run                         -> a confirm 2 2:0:owner-at100
        a schedule poll run                         -> a confirm 3 3:refused 0 Invalid
        w hello                                     -> w welcome 0
        w consume default 9                         -> w deliver at100
        w ack at100                                 -> w confirm 1
        wait 59900                                  -> w deliver at60000
        ",
    );
}

/// A run that had to wait took the present as its time. If that was a time of the schedule, its job had the id of that
/// time's job: the job that had just run, or a failed one, and then the run had no job at all.
#[test]
fn a_run_that_waits_has_a_job_of_its_own_though_it_came_at_a_time_of_the_schedule() {
    check(
        "
        a hello                                     -> a welcome 0
        w hello                                     -> w welcome 0
        w consume default 9                         ->
        a set poll every=60000 overlap=queue        -> a confirm 1
        wait 60000                                  -> w deliver at60000
        a schedule poll run                         -> a confirm 2
        w fail at60000                              -> w confirm 1, w deliver at60001
        ",
    );
}

/// The second of two orders found the last job ended and the first order still queued. It started a job at once, and the
/// older order followed when that had ended: under `cancel_previous` the newest has to be the one that runs.
#[test]
fn of_two_orders_to_run_at_once_the_newest_cancels_the_other() {
    check(
        "
        a hello                                     -> a welcome 0
        a set poll every=60000 overlap=cancel_previous -> a confirm 1
        a schedule poll run                         -> a confirm 2 2:0:owner-at0
        wait 100                                    ->
        a schedule poll run | schedule poll run     -> a confirm 4
        w hello                                     -> w welcome 0
        w consume default 9                         -> w deliver at101
        w ack at101                                 -> w confirm 1
        a schedules                                 -> a schedules poll:every60000:3+0+0:set:last101:next60000
        ",
    );
}

#[test]
fn schedules_that_make_no_sense_are_refused() {
    check(
        "
        a hello                                     -> a welcome 0
        a schedule poll pause                       -> a confirm 1 1:refused 0 Invalid
        a set poll every=0                          -> a confirm 2 2:refused 0 Invalid
        a set poll cron=0_0_30_2_*                  -> a confirm 3 3:refused 0 Invalid
        a set poll cron=0_0_*_*_* zone=Mars/Base    -> a confirm 4 4:refused 0 Invalid
        a unschedule poll                           -> a confirm 5 5:refused 0 Invalid
        a set poll every=60000 workflow=w           -> a confirm 6 6:refused 0 Invalid
        a set poll every=60000                      -> a confirm 7
        a schedule poll reset                       -> a confirm 8 8:refused 0 Invalid
        a set large every=60000 bytes=300000        -> a confirm 9 9:refused 0 TooLarge
        ",
    );
}

// --- code and people

#[test]
fn the_newest_code_says_how_a_schedule_is() {
    for between in BETWEEN {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a declare poll every=60000 version=2 started=5 -> a confirm 1
            {between}
            b hello                                     -> b welcome 0
            b declare poll every=10000 version=1 started=9 -> b confirm 1
            b schedules                                 -> b schedules poll:every60000:0+0+0:next60000
            b declare poll every=20000 version=3 started=1 -> b confirm 2
            b schedules                                 -> b schedules poll:every20000:0+0+0:next20000
            b declare poll every=30000 version=3 started=2 -> b confirm 3
            {between}
            c hello                                     -> c welcome 0
            c schedules                                 -> c schedules poll:every30000:0+0+0:next30000
            "
        ));
    }
}

/// A restart of a worker that declares the same schedule moves no time.
#[test]
fn the_same_declaration_again_changes_nothing() {
    check(
        "
        a hello                                     -> a welcome 0
        a declare poll every=60000 started=1        -> a confirm 1
        wait 50000                                  ->
        a declare poll every=60000 started=2        -> a confirm 2
        a schedules                                 -> a schedules poll:every60000:0+0+0:next60000
        a declare poll every=60000 overlap=allow started=3 -> a confirm 3
        a schedules                                 -> a schedules poll:every60000:0+0+0:next60000
        a declare poll every=40000 started=4        -> a confirm 4
        a schedules                                 -> a schedules poll:every40000:0+0+0:next90000
        ",
    );
}

#[test]
fn a_person_overrides_code_until_a_reset() {
    for between in BETWEEN {
        check(&format!(
            "
            a hello                                     -> a welcome 0
            a declare poll every=60000 started=1        -> a confirm 1
            a set poll every=30000; schedule poll run   -> a confirm 2 2:1:owner-at0
            {between}
            b hello                                     -> b welcome 0
            b set poll every=30000                      -> b confirm 1
            b schedule poll pause                       -> b confirm 2
            b declare poll every=10000 started=2        -> b confirm 3
            {between}
            c hello                                     -> c welcome 0
            c schedules                                 -> c schedules poll:every30000:1+0+0:set:paused:running:last0
            c schedule poll reset                       -> c confirm 1
            c schedules                                 -> c schedules poll:every10000:1+0+0:running:last0:next10000
            "
        ));
    }
}
