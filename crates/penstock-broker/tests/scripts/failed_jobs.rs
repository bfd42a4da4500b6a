//! Failed jobs are a state: they are listed, retried, dropped, and the oldest go when they are too many.

use penstock_broker::BrokerOptions;

use crate::script::{check, check_with};

#[test]
fn failed_jobs_are_listed_kept_in_their_queues_and_handed_to_nobody() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two queue=mail task=send|publish three deliveries=1  -> a confirm 3
        w consume default+mail 3            -> w deliver one two@mail three
        w fail one class=ValueError message=bad|fail two class=OSError message=gone|crash three reason=SIGSEGV  -> w confirm 3
        w consume default+mail+dead 9       ->
        a failed                            -> a failed one:task@default#0:ValueError:bad two:send@mail#0:OSError:gone three:task@default#0:WorkerCrashed:SIGSEGV
        a failed queue=mail                 -> a failed two:send@mail#0:OSError:gone
        a failed task=task class=ValueError  -> a failed one:task@default#0:ValueError:bad
        a failed class=None                 -> a failed
        a failed fingerprint=7              -> a failed one:task@default#0:ValueError:bad two:send@mail#0:OSError:gone
        a failed from=1                     -> a failed
        a failed until=1 limit=1            -> a failed one:task@default#0:ValueError:bad next 4
        a failed behind=4 limit=1           -> a failed two:send@mail#0:OSError:gone next 5
        a failed behind=5                   -> a failed three:task@default#0:WorkerCrashed:SIGSEGV
        a failed newest limit=2             -> a failed three:task@default#0:WorkerCrashed:SIGSEGV two:send@mail#0:OSError:gone next 5
        a failed newest behind=5 limit=2    -> a failed one:task@default#0:ValueError:bad
        a failed newest behind=4            -> a failed
        a failed newest task=task limit=1   -> a failed three:task@default#0:WorkerCrashed:SIGSEGV next 6
        a status                            -> a status dead:0/0/0 default:0/0/0-failed2 mail:0/0/0-failed1 w=0/0/0 clients 1 results 3 evicted 0
        carry                               ->
        kill                                ->
        a hello                             -> a welcome 3
        a failed                            -> a failed one:task@default#0:ValueError:bad two:send@mail#0:OSError:gone three:task@default#0:WorkerCrashed:SIGSEGV
        ",
    );
}

/// A worker for a queue with any name, even `dead`, never receives a failed job, and the jobs of such a queue are like
/// any others.
#[test]
fn a_queue_called_dead_is_a_queue_like_any_other() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish own queue=dead            -> a confirm 1
        w consume default+dead 9            -> w deliver own@dead
        w fail own                          -> w confirm 1
        a publish other queue=dead          -> a confirm 2, w deliver other@dead
        w ack other; put other yes          -> w confirm 2
        a watch own other                   -> a sees own Failed error, a sees other Succeeded yes
        ",
    );
}

#[test]
fn a_failed_job_is_retried_as_its_next_generation() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one unless=k expires=50 headers=a:b|publish two deliveries=1  -> a confirm 2
        w consume default 2                 -> w deliver one two
        w fail one note=first|crash two     -> w confirm 2
        wait 60                             ->
        a publish between                   -> a confirm 3
        a watch one                         -> a sees one Failed error
        a retry one                         -> a confirm 4 4:Failed
        a watch one                         -> a sees one pending
        a guard k present                   -> a confirm 5
        a retry one                         -> a confirm 6 6:refused 0 TooLate(Ready)
        a retry nobody                      -> a confirm 7 7:refused 0 NoSuchJob
        a retry two                         -> a confirm 8 8:Failed
        a info one                          -> a knows Ready in default attempt 1 crashes 0 generation 1 notes first
        kill                                ->
        carry                               ->
        kill                                ->
        w hello                             -> w welcome 2
        # Behind earlier messages, and its attempts continue to count.
        w consume default 9                 -> w deliver between! one!#1 two#1
        w fail one note=second              -> w confirm 3
        w info one                          -> w knows Failed in default attempt 1 crashes 0 generation 1 failed Error:boom notes first+second
        w guard k absent                    -> w confirm 4
        ",
    );
}

#[test]
fn a_retry_is_refused_when_its_key_is_anothers_and_names_it() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one unless=k              -> a confirm 1
        w consume default 1                 -> w deliver one
        w fail one                          -> w confirm 1
        a publish two unless=k              -> a confirm 2
        a retry one                         -> a confirm 3 3:refused 0 Invalid
        a retry all                         -> a confirm 4 4:operation-1
        a operation 1                       -> a operation 1/0/1 over
        a cancel two                        -> a confirm 5 5:Ready
        a retry all                         -> a confirm 6 6:operation-2
        a operation 2                       -> a operation 1/1/0 over
        a publish three unless=k            -> a confirm 7 7:skipped[0]+0:owner-one
        ",
    );
}

/// A job whose key a client deleted while it ran has none to take back. In an earlier version it took the key when it
/// was retried, but not once its record had been carried forward and the broker had been killed.
#[test]
fn a_retry_takes_the_key_that_its_job_had_when_it_failed() {
    for carry in ["carry", "wait 1"] {
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one unless=k              -> a confirm 1
            a delete k                          -> a confirm 2
            mark                                ->
            w hello                             -> w welcome 0
            w consume default 1                 -> w deliver one
            {carry}                             ->
            kill                                ->
            w hello one                         -> w welcome 0 one
            w fail one                          -> w confirm 1
            a hello                             -> a welcome 2
            a retry one                         -> a confirm 3 3:Failed
            a guard k absent                    -> a confirm 4
            "
        ));
        // By then, a key that was deleted after the failure belonged to another message, or to none.
        check(&format!(
            "
            a hello                             -> a welcome 0
            a publish one unless=k              -> a confirm 1
            w hello                             -> w welcome 0
            w consume default 1                 -> w deliver one
            w fail one                          -> w confirm 1
            a publish two unless=k              -> a confirm 2
            a delete k                          -> a confirm 3
            mark                                ->
            {carry}                             ->
            kill                                ->
            a hello                             -> a welcome 3
            a retry one                         -> a confirm 4 4:Failed
            a publish three unless=k            -> a confirm 5 5:skipped[0]+0:owner-one
            "
        ));
    }
}

#[test]
fn failed_jobs_are_dropped_one_or_all_and_the_oldest_when_they_are_too_many() {
    let few = BrokerOptions {
        failed_kept: 2,
        failed_kept_ms: 1_000,
        ..BrokerOptions::default()
    };
    check_with(
        few,
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two|publish three|publish four  -> a confirm 4
        w consume default 4                 -> w deliver one two three four
        w fail one|fail two                 -> w confirm 2
        wait 500                            ->
        w fail three                        -> w confirm 3, notice: failed jobs are dropped
        a failed                            -> a failed two:task@default#0:Error:boom three:task@default#0:Error:boom
        # Its reported result stays.
        a watch one                         -> a sees one Failed error
        wait 500                            ->
        a failed                            -> a failed three:task@default#0:Error:boom
        kill                                ->
        w hello                             -> w welcome 3
        w failed                            -> w failed three:task@default#0:Error:boom
        w drop three                        -> w confirm 4 4:Failed
        w drop three                        -> w confirm 5 5:refused 0 NoSuchJob
        w consume default 1                 -> w deliver four!
        w fail four                         -> w confirm 6
        w drop all class=Other              -> w confirm 7 7:operation-1
        w drop all class=Error              -> w confirm 8 8:operation-2
        w operation 2                       -> w operation 1/1/0 over
        w failed                            -> w failed
        ",
    );
}

/// A program that keeps starting failing workflows used to grow the broker for 30 days: jobs blocked by a failed group
/// were dropped only for their age.
#[test]
fn blocked_jobs_and_their_groups_count_among_failed_jobs_and_the_oldest_go() {
    let few = BrokerOptions {
        failed_kept: 6,
        ..BrokerOptions::default()
    };
    let small = BrokerOptions {
        failed_kept_bytes: 4_000,
        ..BrokerOptions::default()
    };
    for options in [few, small] {
        check_with(
            options,
            "
            a hello                             -> a welcome 0
            w hello                             -> w welcome 0
            a hold one count=1 messages=x+y bytes=1000; publish m member=one:0; hold outer count=2 messages=o; publish n member=outer:0  -> a confirm 1
            a watch x                           -> a sees x pending
            w consume default 9                 -> w deliver m n
            w fail m                            -> w confirm 1, a sees x Upstream m
            a failed                            -> a failed m:task@default#0:Error:boom
            a info x                            -> a knows Blocked in default attempt 0 crashes 0
            a info y                            -> a knows Blocked in default attempt 0 crashes 0
            kill                                ->
            a hello                             -> a welcome 1
            w hello n                           -> w welcome 1 n
            wait 5                              ->
            # The second group blocks one job more than there is room for: the first job is dropped, and its group.
            a hold two count=1 messages=v+u bytes=1000; publish k member=two:0  -> a confirm 2
            w consume default 9                 -> w deliver k
            w fail k                            -> w confirm 2, notice: failed jobs are dropped
            a failed                            -> a failed k:task@default#0:Error:boom
            a info x                            -> a knows nothing
            a info y                            -> a knows nothing
            a info u                            -> a knows Blocked in default attempt 0 crashes 0
            # A group that has not failed does not count.
            a info o                            -> a knows Held in default attempt 0 crashes 0
            a watch x                           -> a sees x Upstream
            kill                                ->
            a hello                             -> a welcome 2
            a info x                            -> a knows nothing
            a info v                            -> a knows Blocked in default attempt 0 crashes 0
            ",
        );
    }
}

/// The same in steps, since a group may hold any number of messages, or none.
#[test]
fn failing_workflows_without_end_leave_no_more_than_is_kept() {
    let few = BrokerOptions {
        failed_kept: 100,
        ..BrokerOptions::default()
    };
    let held = (0..3_000).map(|index| format!("h{index}"));
    let held: Vec<String> = held.collect();
    let mut script = format!(
        "
        a hello                                 -> a welcome 0
        w hello                                 -> w welcome 0
        a hold large count=1 messages={}; publish m member=large:0  -> a confirm 1
        w consume default 1                     -> w deliver m
        w fail m                                -> w confirm 1, notice: failed jobs are dropped
        a info h0                               -> a knows nothing
        a info h2999                            -> a knows nothing
        ",
        held.join("+")
    );
    for index in 0..200 {
        script += &format!(
            "
            a hold g{index} count=1; publish m{index} member=g{index}:0  -> a confirm {}
            w consume default 1                 -> w deliver m{index}
            w fail m{index}                     -> w confirm {}
            wait 1                              ->
            ",
            index + 2,
            index + 2
        );
    }
    script += "
        a failed limit=1                        -> a failed m150:task@default#0:Error:boom next 3304
        a publish late member=g149:0            -> a confirm 202 202:refused 0 Invalid
        a publish later member=g150:0           -> a confirm 203
        ";
    check_with(few, &script);
}
