//! Messages that a broker refuses or drops for lack of room.

use crate::script::{ScriptWorld, check};
use penstock_broker::BrokerOptions;

#[test]
fn a_full_queue_refuses_new_messages_and_applies_nothing_of_their_transaction() {
    check(
        "
        a hello                             -> a welcome 0
        a limit default length=2            -> a confirm 1
        a publish one|publish two           -> a confirm 3
        a put key value; publish three      -> a confirm 4 4:refused 1 QueueFull
        a watch key                         -> a sees key gone
        # All messages of one transaction count, and so do delayed ones.
        a limit other length=2              -> a confirm 5
        a publish four queue=other; publish five queue=other after=1000; publish six queue=other  -> a confirm 6 6:refused 2 QueueFull
        a publish four queue=other; publish five queue=other after=1000  -> a confirm 7
        a publish six queue=other           -> a confirm 8 8:refused 0 QueueFull
        # A skipped message takes no room; one for several queues needs room in each.
        a put once held                     -> a confirm 9
        a publish six unless=once           -> a confirm 10 10:skipped[0]
        a publish six queue=free+default    -> a confirm 11 11:refused 0 QueueFull
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        # Running jobs are not counted.
        a publish six                       -> a confirm 12
        a publish seven                     -> a confirm 13 13:refused 0 QueueFull
        a limit default                     -> a confirm 14
        a publish seven                     -> a confirm 15
        ",
    );
    check(
        "
        a hello                             -> a welcome 0
        a limit default size=1000           -> a confirm 1
        a publish one bytes=600|publish two bytes=500|publish three bytes=400  -> a confirm 4 3:refused 0 QueueFull
        a status                            -> a status default:2/0/0-limit-/1000/Reject-waiting1000B clients 1 results 0 evicted 0
        ",
    );
}

#[test]
fn the_outcome_of_a_run_is_never_refused_for_a_full_queue() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two|publish three|limit default length=0  -> a confirm 4
        a publish four                      -> a confirm 5 5:refused 0 QueueFull
        w hello                             -> w welcome 0
        w consume default 3                 -> w deliver one two three
        w ack one; put one yes; publish next  -> w confirm 1
        w move two next                     -> w confirm 2
        w return three                      -> w confirm 3
        # It still counts, and messages that a join holds enter when they are released.
        a limit dead length=0               -> a confirm 6
        a hold join count=1 messages=held   -> a confirm 7
        a join join index=0                 -> a confirm 8
        w consume default 4                 -> w deliver three! next two#1 held
        w move next queue=dead              -> w confirm 4
        a status                            -> a status dead:1/0/0-limit0/-/Reject-waiting4B default:0/0/3-limit0/-/Reject-waiting0B w=0/0/3 clients 1 results 1 evicted 0
        ",
    );
}

#[test]
fn clients_learn_when_the_oldest_messages_make_room() {
    check(
        "
        a hello                             -> a welcome 0
        a limit default length=2 drop-oldest  -> a confirm 1
        a publish one|publish two           -> a confirm 3
        a watch one                         -> a sees one pending
        a publish three                     -> a confirm 4, a sees one Cancelled its queue was full and newer jobs took its place
        # The lowest priority goes first, even if it is the newest.
        a publish high priority=9           -> a confirm 5
        a publish low priority=0            -> a confirm 6
        a watch low two                     -> a sees low Cancelled its queue was full and newer jobs took its place, a sees two Cancelled its queue was full and newer jobs took its place
        # Delayed messages are never dropped: they are refused if they alone fill the queue.
        a publish late after=1000|publish later after=1000|publish latest after=1000  -> a confirm 9 9:refused 0 QueueFull
        a publish now                       -> a confirm 10 10:refused 0 QueueFull
        # A message larger than the whole queue would drop everything, and itself.
        a limit default size=100 drop-oldest  -> a confirm 11
        a publish large bytes=101           -> a confirm 12 12:refused 0 QueueFull
        a status                            -> a status default:0/2/0-limit-/100/DropOldest-waiting9B clients 1 results 5 evicted 0
        ",
    );
    // A retry makes room as well. A drop is on disk before it is reported, whatever durability the publish asked for.
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two|limit default length=1 drop-oldest  -> a confirm 3
        w consume default 1                 -> w deliver one
        a watch two one                     -> a sees two pending, a sees one pending
        stall                               ->
        w move one next                     ->
        sync                                -> w confirm 1, a sees two Cancelled its queue was full and newer jobs took its place
        stall                               ->
        a none publish three                -> a confirm 4
        sync                                -> a sees one Cancelled its queue was full and newer jobs took its place
        kill                                ->
        a hello                             -> a welcome 4
        a status                            -> a status default:1/0/0-limit1/-/DropOldest-waiting5B clients 1 results 2 evicted 0
        ",
    );
}

/// A retry is confirmed, so its client believes that the job runs again.
#[test]
fn a_retry_is_not_dropped_to_make_room_for_itself() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two|publish three  -> a confirm 3
        w consume default 3                 -> w deliver one two three
        w fail one|fail two                 -> w confirm 2
        # Delayed messages make no room.
        a limit default length=1 drop-oldest|publish late after=1000  -> a confirm 5
        a publish now                       -> a confirm 6 6:refused 0 QueueFull
        a retry one                         -> a confirm 7 7:Failed
        a info one                          -> a knows Ready in default attempt 1 crashes 0 generation 1 notes raised
        kill                                ->
        a hello                             -> a welcome 5, a confirm 7 6:refused 0 QueueFull 7:Failed
        a info one                          -> a knows Ready in default attempt 1 crashes 0 generation 1 notes raised
        # It may be dropped for a later one, which is reported.
        a watch one                         -> a sees one pending
        a retry all                         -> a confirm 8 8:operation-1, a sees one Cancelled its queue was full and newer jobs took its place
        a info two                          -> a knows Ready in default attempt 1 crashes 0 generation 1 notes raised
        # The same holds for a run's own retry, and for the next step of a workflow.
        w hello three                       -> w welcome 2 three
        a watch two                         -> a sees two pending
        w move three next                   -> w confirm 3, a sees two Cancelled its queue was full and newer jobs took its place
        w consume default 1                 -> w deliver three#1
        w ack three; publish step           -> w confirm 4
        w consume default 1                 -> w deliver step
        ",
    );
    // It is not dropped for its low priority either.
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one priority=0            -> a confirm 1
        w consume default 1                 -> w deliver one
        w fail one                          -> w confirm 1
        a limit default length=2 drop-oldest|publish two|publish three  -> a confirm 4
        a watch two                         -> a sees two pending
        a retry one                         -> a confirm 5 5:Failed, a sees two Cancelled its queue was full and newer jobs took its place
        w consume default 2                 -> w deliver three one#1
        ",
    );
}

/// A record holds 1,024 ends; the others follow in a separate step.
#[test]
fn a_retry_is_not_dropped_by_the_later_step_that_makes_room() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    for line in [
        "a hello",
        "w hello",
        "a publish one priority=0",
        "w consume default 1",
        "w fail one",
    ] {
        world.run(line);
    }
    let publishes: Vec<String> = (0..3_000)
        .map(|number| format!("publish m{number}"))
        .collect();
    world.run(&format!("a {}", publishes.join("; ")));
    world.run("a limit default length=2 drop-oldest");
    assert_eq!(world.run("a retry one"), ["a confirm 4 4:Failed"]);
    assert_eq!(
        world.run("a status"),
        [
            "a status default:2/0/0-limit2/-/DropOldest-waiting8B w=0/0/0 clients 1 results 2999 evicted 0"
        ]
    );
    assert_eq!(
        world.run("w consume default 3"),
        ["w deliver m2999", "w deliver one#1"]
    );
    world.check_recovery();
}

#[test]
fn limits_are_remembered() {
    check(
        "
        a hello                             -> a welcome 0
        a limit default length=1|limit default length=2 size=9 drop-oldest|limit other length=3|limit other|limit third length=7  -> a confirm 5
        carry                               ->
        kill                                ->
        a hello                             -> a welcome 5
        a status                            -> a status default:0/0/0-limit2/9/DropOldest-waiting0B third:0/0/0-limit7/-/Reject-waiting0B clients 1 results 0 evicted 0
        a pause default|limit third         -> a confirm 7
        carry                               ->
        power-cut                           ->
        carry                               ->
        kill                                ->
        a hello                             -> a welcome 7
        a status                            -> a status default:0/0/0-paused-limit2/9/DropOldest-waiting0B clients 1 results 0 evicted 0
        ",
    );
}

#[test]
fn a_full_disk_stops_new_work_then_starts_and_never_an_outcome() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two|publish three  -> a confirm 3
        w consume default 1                 -> w deliver one
        disk no-publishes                   -> notice: NoPublishes
        a publish four                      -> a confirm 4 4:refused 0 DiskFull
        a hold join count=1 messages=held   -> a confirm 5 5:refused 0 DiskFull
        a put key value; delete key         -> a confirm 6
        w ack one; put one yes; publish next  -> w confirm 1
        w consume default 1                 -> w deliver two
        disk no-leases                      -> notice: NoLeases
        w move two next                     -> w confirm 2
        a publish four                      -> a confirm 7 7:refused 0 DiskFull
        disk no-settlements                 -> notice: NoSettlements
        w consume default 5                 ->
        disk no-publishes                   -> notice: NoPublishes, w deliver three next two#1
        disk plenty                         -> notice: Plenty
        a publish four                      -> a confirm 8, w deliver four
        ",
    );
}

/// If everything on the disk were jobs waiting to run, nothing else would ever free space.
#[test]
fn on_a_full_disk_a_few_jobs_start_at_a_time() {
    let jobs: Vec<String> = (1..=20).map(|number| format!("j{number}")).collect();
    let publish = jobs.iter().map(|job| format!("publish {job}"));
    let (publish, first) = (publish.collect::<Vec<_>>().join("|"), jobs[2..18].join(" "));
    check(&format!(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a {publish}  -> a confirm 20
        w consume default 2                 -> w deliver j1 j2
        disk no-leases                      -> notice: NoLeases
        w consume default 100               -> w deliver {first}
        w ack j3                            -> w confirm 1, w deliver j19
        w ack j1                            -> w confirm 2, w deliver j20
        "
    ));
}

#[test]
fn a_broker_at_its_memory_limit_takes_no_new_work_and_continues_the_rest() {
    check(
        "
        a hello                             -> a welcome 0
        w hello                             -> w welcome 0
        a publish one|publish two           -> a confirm 2
        memory full                         -> notice: memory full
        a publish three                     -> a confirm 3 3:refused 0 QueueFull
        w consume default 2                 -> w deliver one two
        w ack one; put one yes; publish next  -> w confirm 1
        memory full                         ->
        memory free                         -> notice: memory free
        a publish three                     -> a confirm 4
        ",
    );
}

#[test]
fn a_client_that_asks_for_everything_has_a_bounded_number_on_their_way() {
    let mut world = ScriptWorld::new(BrokerOptions::default());
    for line in [
        "a hello",
        "w hello",
        "v hello",
        "stall",
        "w consume default 100000",
    ] {
        world.run(line);
    }
    let publishes: Vec<String> = (0..20_000)
        .map(|number| format!("publish m{number}"))
        .collect();
    world.run(&format!("a {}", publishes.join("; ")));
    // Messages that are not on their way to the first client are for the second.
    world.run("v consume default 100000");
    world.run("sync");
    assert_eq!(
        world.run("a status"),
        ["a status default:0/0/20000 v=0/0/3616 w=0/0/16384 clients 1 results 0 evicted 0"]
    );
    // Messages that have left are no longer on their way.
    world.run("v bye");
    assert_eq!(
        world.run("a status"),
        ["a status default:0/0/20000 w=0/0/20000 clients 1 results 0 evicted 0"]
    );
}

/// A single transaction may bring more than the disk has room for, although there is plenty for transactions that arrive one
/// by one. If it were accepted, it would use up the reserves for a full disk, and nothing could free any space.
#[test]
fn a_transaction_larger_than_the_room_on_the_disk_is_refused_whole() {
    check(
        "
        a hello                             -> a welcome 0
        room 800                            ->
        a publish one; publish two; publish three; publish four; publish five; publish six; publish seven  -> a confirm 1 1:refused 0 DiskFull
        # The room was checked for that transaction only.
        a publish one; publish two; publish three; publish four; publish five; publish six; publish seven  -> a confirm 2
        room 500                            ->
        a put key value; publish eight|publish nine; publish ten; publish eleven; publish twelve  -> a confirm 4 4:refused 0 DiskFull
        w hello                             -> w welcome 0
        w consume default 1                 -> w deliver one
        room 0                              ->
        w ack one; publish after            -> w confirm 1
        room 0                              ->
        a purge default                     -> a confirm 5 5:operation-1
        ",
    );
}

/// A purge frees space, so it continues while its steps fit into the segment in use; work that takes space waits.
#[test]
fn a_purge_continues_when_the_disk_stops_everything_else() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one|publish two           -> a confirm 2
        a publish bad deliveries=1          -> a confirm 3
        disk no-settlements                 -> notice: NoSettlements
        a watch one                         -> a sees one pending
        a purge default                     -> a confirm 4 4:operation-1
        a status                            -> a status default:3/0/0-ending3 clients 1 results 0 evicted 0
        disk steps-fit                      -> a sees one Cancelled its queue was purged
        a status                            -> a status default:0/0/0 clients 1 results 0 evicted 3
        ",
    );
}
