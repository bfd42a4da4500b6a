//! Which message is next, and when: order, shares, delays, expiry.

use crate::script::{ScriptWorld, check};
use penstock_broker::BrokerOptions;

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
    // A returned message goes to its place among the others, and a delayed one to that of its publishing.
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
    // One body, several queues; each copy is settled separately.
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
        # The wall clock is set forward: a countdown ignores that, an ETA has come.
        wall 5000                           -> w deliver eta
        # Times are whole milliseconds, so a countdown ends with the next one.
        wait 1000                           ->
        wait 1                              -> w deliver soon
        w ack eta; ack soon                 -> w confirm 3
        ",
    );
}

#[test]
fn a_countdown_ignores_a_wall_clock_set_before_a_restart() {
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
    // Nor when the segment that recorded it is gone.
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

/// While no broker ran, only the wall clock was known to continue. So when it was set forward by an hour in that time,
/// a job with a countdown of ten minutes started at once.
#[test]
fn a_countdown_ignores_a_wall_clock_set_while_no_broker_runs() {
    for set_by in ["3600000", "-3600000"] {
        check(&format!(
            "
            boot                                ->
            w hello                             -> w welcome 0
            w publish soon after=10000          -> w confirm 1
            wait 1000                           ->
            killed-for 2000 wall {set_by}       ->
            w hello                             -> w welcome 1
            w consume default 10                ->
            wait 3000                           ->
            killed-for 1000 wall {set_by}       ->
            w hello                             -> w welcome 1
            w consume default 10                ->
            wait 3000                           ->
            wait 1                              -> w deliver soon!
            "
        ));
    }
    // Nor when that is only known from records that were carried forward.
    check(
        "
        boot                                ->
        w hello                             -> w welcome 0
        w publish soon after=10000          -> w confirm 1
        carry                               ->
        killed-for 4000 wall 3600000        ->
        w hello                             -> w welcome 1
        w consume default 10                ->
        wait 6000                           ->
        wait 1                              -> w deliver soon!
        ",
    );
}

/// The wall clock is then the only one that has continued.
#[test]
fn a_countdown_follows_the_wall_clock_over_a_restart_of_the_machine() {
    check(
        "
        boot                                ->
        w hello                             -> w welcome 0
        w publish soon after=10000          -> w confirm 1
        wall 3600000                        ->
        wait 1000                           ->
        boot                                ->
        killed-for 4000 wall 0              ->
        w hello                             -> w welcome 1
        w consume default 10                ->
        killed-for 4000 wall -3600000       ->
        w hello                             -> w welcome 1
        w consume default 10                ->
        wait 1000                           ->
        wait 1                              -> w deliver soon!
        ",
    );
}

/// A broker that nobody talks to recorded the boot of the machine only with its first client.
#[test]
fn a_new_boot_is_recorded_before_any_client_comes() {
    for set_by in ["3600000", "-3600000"] {
        check(&format!(
            "
            boot                                ->
            w hello                             -> w welcome 0
            w publish soon after=10000          -> w confirm 1
            boot                                ->
            killed-for 1000 wall 0              ->
            looks 1000                          -> 0
            killed-for 1000 wall {set_by}       ->
            w hello                             -> w welcome 1
            w consume default 10                ->
            wait 7000                           ->
            wait 1                              -> w deliver soon!
            "
        ));
    }
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
    // A running job does not expire; if it is returned, it does.
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

/// A worker is never sent a job that it can't run; the job waits, and others behind it do not.
#[test]
fn a_job_is_sent_only_to_a_consumer_that_can_run_its_task() {
    check(
        "
        a hello                             -> a welcome 0
        a publish old task=old|publish one task=new|publish two task=new  -> a confirm 3
        v hello                             -> v welcome 0
        w hello                             -> w welcome 0
        w consume default 9 tasks=new       -> w deliver one two
        v consume default 9 tasks=other     ->
        a status                            -> a status default:1/0/2-unknown1 v=0/0/0 w=0/0/2 clients 1 results 0 evicted 0
        a info old                          -> a knows Ready in default attempt 0 crashes 0 and no consumer that has its task
        # No worker knows it, which is reported once.
        wait 2999                           ->
        wait 1                              -> notice: 1 of old and 0 others unknown in default
        a publish old-too task=old          -> a confirm 4
        wait 60000                          ->
        # A consumer's tasks change in place, and its credit stays.
        v consume default 0 tasks=other+old -> v deliver old old-too
        a publish three task=other          -> a confirm 5, v deliver three
        v consume default 0 tasks=new       ->
        a publish four task=old|publish five task=old priority=7  -> a confirm 7
        a status                            -> a status default:2/0/5-unknown2 v=0/0/3 w=0/0/2 clients 1 results 0 evicted 0
        # A consumer that names no tasks can run all.
        w consume - 0 tasks=any             -> w deliver five four
        ",
    );
}

/// A connection may have several consumers, each with its own queues, tasks and credit.
#[test]
fn consumers_of_one_connection_do_not_wait_behind_each_other() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        w consume default 1 as=1 tasks=slow ->
        w consume default+mail 2 as=2 tasks=quick  ->
        a publish one task=slow|publish two task=slow|publish three task=quick|publish four queue=mail task=quick  -> a confirm 4, w deliver one/1 four/2@mail three/2
        w ack one                           -> w confirm 1
        w consume default 1 as=1            -> w deliver two/1
        w consume default 1 as=2            ->
        a publish five task=quick|publish six task=quick  -> a confirm 6, w deliver five/2
        w bye                               ->
        v hello                             -> v welcome 0
        v consume default 9 tasks=quick+slow  -> v deliver three! two! five! six
        ",
    );
}

/// Priorities hold among the tasks that a consumer knows.
#[test]
fn jobs_of_unknown_tasks_do_not_block_others() {
    check(
        "
        a hello                             -> a welcome 0
        a publish high task=unknown priority=9|publish low task=known priority=1|publish middle task=known  -> a confirm 3
        w hello                             -> w welcome 0
        w consume default 9 tasks=known     -> w deliver middle low
        a status                            -> a status default:1/0/2-unknown1 w=0/0/2 clients 1 results 0 evicted 0
        # While no consumer takes from the queue at all, none of its tasks is unknown.
        w bye                               ->
        a status                            -> a status default:3/0/0 clients 1 results 0 evicted 0
        wait 20000                          ->
        a purge default                     -> a confirm 4 4:operation-1
        a status                            -> a status default:0/0/0 clients 1 results 3 evicted 0
        ",
    );
}

/// An operator whose two apps have a task of the same name finds out when their workers meet, not when a job runs in
/// the wrong one.
#[test]
fn two_apps_with_the_same_task_name_in_one_queue_are_reported() {
    check(
        "
        v hello                             -> v welcome 0
        w hello                             -> w welcome 0
        x hello                             -> x welcome 0
        v consume default 1 app=shop tasks=send+pack ->
        # A deployment of the same app is not reported, and neither is a queue of one's own.
        w consume default 1 app=shop tasks=send ->
        x consume other 1 app=mail tasks=send+pack ->
        x consume default+other 0           -> notice: mail and shop share send and 1 others in default
        x consume - 1                       ->
        # The worker has another name from now on.
        w consume - 0 app=post              -> notice: post and shop share send and 0 others in default
        ",
    );
}

/// Eight slots, jobs that never end, and jobs of a millisecond. If runs were only charged at their hand-out, jobs that
/// never end would cost nothing more. They took one slot after another: all eight after seven short jobs.
#[test]
fn a_task_whose_jobs_never_end_does_not_take_every_slot() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    for line in ["a hello", "w hello"] {
        world.run(line);
    }
    for number in 0..8 {
        world.run(&format!("a publish long{number} task=long"));
    }
    for number in 0..1_000 {
        world.run(&format!("a publish short{number} task=short"));
    }
    let mut running = Vec::new();
    let mut ended = 0;
    let mut given = world.run("w consume default 8");
    loop {
        for line in std::mem::take(&mut given) {
            if let Some(names) = line.strip_prefix("w deliver ") {
                running.extend(names.split(' ').map(str::to_owned));
            }
        }
        let is_short = |name: &String| name.starts_with("short");
        let Some(place) = running.iter().position(is_short) else {
            break;
        };
        let short = running.remove(place);
        ended += 1;
        // Four run at a time, a millisecond each.
        if ended % 4 == 0 {
            world.run("wait 1");
        }
        given = world.run(&format!("w ack {short} cost=1000"));
        given.extend(world.run("w consume default 1"));
        if ended % 100 == 0 {
            // By now all long jobs have run for longer than all short ones together.
            given.extend(world.run("wait 500"));
        }
    }
    assert_eq!(ended, 1_000, "short jobs that ran, beside {running:?}");
}
