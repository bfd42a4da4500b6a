//! Random scripts: whatever happens in whatever order, the counts stay right, and the broker that recovers from the
//! records equals the one that wrote them.

use crate::script::ScriptWorld;
use penstock_broker::BrokerOptions;
use proptest::prelude::*;

/// Draws one line of a script. Most are possible at any time; the others are refused.
fn line() -> impl Strategy<Value = String> {
    prop_oneof![6 => basic_line(), 2 => newer_line(), 1 => claim_line()]
}

/// Draws messages that claim keys, for a while, and replace each other.
fn claim_line() -> impl Strategy<Value = String> {
    let client = prop_oneof!["a", "b", "w"];
    let message = prop_oneof!["m1", "m2", "m3", "m4", "m5", "m6"];
    let until = prop_oneof![2 => "", 3 => "until=start", 1 => "for=60"];
    let conflict = prop_oneof![
        1 => "",
        1 => "conflict=refuse",
        3 => "conflict=replace",
        2 => "conflict=40",
    ];
    let extra = prop_oneof![
        3 => "",
        2 => "after=50",
        1 => "expires=60",
        1 => "queue=other",
        1 => "bytes=400",
        1 => "priority=7 no-result",
    ];
    let publish = (message, prop_oneof!["k1", "k2"], until, conflict, extra);
    let publish = publish.prop_map(|(message, key, until, conflict, extra)| {
        format!("publish {message} claim={key} {until} {conflict} {extra}")
    });
    let commit = prop::collection::vec(publish, 1..4).prop_flat_map(|ops| {
        prop_oneof![Just(" | "), Just("; ")].prop_map(move |between| ops.join(between))
    });
    (client, commit).prop_map(|(client, commit)| format!("{client} {commit}"))
}

/// Draws failures, operations on many messages, members of joins, and levels of space.
fn newer_line() -> impl Strategy<Value = String> {
    let message = prop_oneof!["m1", "m2", "m3", "m4", "m5", "m6"];
    let queue = prop_oneof![4 => "default", 1 => "other", 1 => "dead"];
    let extra = prop_oneof![
        1 => Just("bytes=400 no-result"),
        2 => Just("member=join:0"),
        1 => Just("member=join:1 expires=60"),
        1 => Just("member=outer:0 unless=k2"),
        1 => Just("headers=a:b retries=3"),
    ];
    let op = (message, queue, extra).prop_flat_map(|(message, queue, extra)| {
        prop_oneof![
            4 => Just(format!("publish {message} {extra}")),
            3 => Just(format!("fail {message}")),
            1 => Just(format!("fail {message} class=Other no-value")),
            2 => Just(format!("cancel {message}")),
            3 => Just(format!("cancel {message} ask")),
            1 => Just(format!("cancel {message} kill reason=now")),
            2 => Just(format!("retry {message}")),
            1 => Just(format!("retry {message} to={queue}")),
            1 => Just(format!("drop {message}")),
            1 => Just(format!("cancel all queue={queue}")),
            1 => Just("cancel all task=task reason=why".to_owned()),
            1 => Just(format!("cancel all queue={queue} ask")),
            1 => Just("cancel all kill".to_owned()),
            1 => Just(format!("retry all queue={queue}")),
            1 => Just("retry all class=Error".to_owned()),
            1 => Just("drop all".to_owned()),
            2 => Just("hold outer count=1 messages=o1".to_owned()),
            2 => Just("hold join count=2 messages=h3 member=outer:0".to_owned()),
            2 => Just("hold g/ unsealed=g/ result=90000".to_owned()),
            2 => Just(format!("hold g/ unsealed=g/ creator={message} messages=h4 workflow=g/")),
            4 => (0..3_u32).prop_map(|index| {
                format!("publish g/{index} member=g/:{index} workflow=g/")
            }),
            2 => (0..3_u32).prop_map(|index| format!("ack g/{index}")),
            2 => (0..3_u32).prop_map(|index| {
                format!("grow g/{index} member=x; ack g/{index}; publish x workflow=g/")
            }),
            1 => Just(format!(
                "grow {message} member=y; ack {message}; hold c/ count=1 messages=y inputs=one; \
                 publish c/0 member=c/:0"
            )),
            1 => Just("hold g/ count=2 result=90000 messages=h5 inputs=list".to_owned()),
            2 => (0..4_u32).prop_map(|count| format!("seal g/ count={count}")),
            1 => Just("cancel all workflow=g/ ask".to_owned()),
        ]
    });
    let client = prop_oneof!["a", "b", "w"];
    let commit = prop::collection::vec(op, 1..4).prop_flat_map(|ops| {
        prop_oneof![Just(" | "), Just("; ")].prop_map(move |between| ops.join(between))
    });
    prop_oneof![
        12 => (client, commit).prop_map(|(client, commit)| format!("{client} {commit}")),
        1 => Just("wait 100000".to_owned()),
        1 => Just("disk no-publishes".to_owned()),
        1 => Just("disk no-leases".to_owned()),
        1 => Just("disk no-settlements".to_owned()),
        1 => Just("disk steps-fit".to_owned()),
        1 => Just("room 200".to_owned()),
        3 => Just("disk plenty".to_owned()),
    ]
}

/// Draws a line of the basic operations.
fn basic_line() -> impl Strategy<Value = String> {
    let client = prop_oneof!["a", "b", "w"];
    let message = prop_oneof!["m1", "m2", "m3", "m4", "m5", "m6"];
    let queue = prop_oneof![4 => "default", 1 => "other", 1 => "dead"];
    let key = prop_oneof!["k1", "k2"];
    let extra = prop_oneof![
        4 => Just(""),
        1 => Just("after=50"),
        1 => Just("at=2000"),
        1 => Just("expires=60"),
        1 => Just("unless=k1"),
        1 => Just("deliveries=1"),
        1 => Just("task=other priority=7"),
        1 => Just("queue=default+other"),
        1 => Just("bytes=400"),
    ];
    let op = (message.clone(), queue.clone(), key, extra, 0..3_u32).prop_flat_map(
        |(message, queue, key, extra, index)| {
            prop_oneof![
                6 => Just(format!("publish {message} {extra}")),
                1 => Just(format!("publish {message} queue={queue}")),
                2 => Just(format!("publish {message} member=join:{index}")),
                5 => Just(format!("ack {message} cost=300")),
                3 => Just(format!("ack {message}; put {message} done")),
                1 => Just(format!("put {message} x bytes=300")),
                2 => Just(format!("move {message} next note=again {extra}")),
                1 => Just(format!("move {message} queue=dead note=boom expires=100")),
                2 => Just(format!("return {message}")),
                2 => Just(format!("crash {message}")),
                1 => Just(format!("suspect {message}")),
                2 => Just(format!("put {key} value ttl=70")),
                1 => Just(format!("delete {key}")),
                1 => Just(format!("guard {key} absent")),
                1 => Just(format!("guard {key} value")),
                1 => Just("hold join count=2 messages=h1+h2 expires=90".to_owned()),
                1 => Just("hold join count=3 messages=h1 all-ended".to_owned()),
                2 => Just(format!("join join index={index}")),
                1 => Just(format!("join join index={index} failed")),
                1 => Just(format!("purge {queue}")),
                1 => Just(format!("pause {queue}")),
                1 => Just(format!("resume {queue}")),
                1 => Just(format!("limit {queue} length=2")),
                1 => Just(format!("limit {queue} length=2 drop-oldest")),
                1 => Just(format!("limit {queue} size=300 drop-oldest")),
                1 => Just(format!("limit {queue}")),
                1 => Just(format!("set s{index} every=1000 queue={queue} overlap=queue")),
                1 => Just("set s0 every=7000 overlap=cancel_previous catch-up=all".to_owned()),
                1 => Just(format!("declare s{index} every=5000 started={index}")),
                1 => Just(format!("schedule s{index} run")),
                1 => Just(format!("unschedule s{index}")),
            ]
        },
    );
    let commit = prop::collection::vec(op, 1..4).prop_flat_map(|ops| {
        let durability = prop_oneof![4 => "", 1 => "os ", 1 => "none "];
        let between = prop_oneof![Just(" | "), Just("; ")];
        (durability, between)
            .prop_map(move |(durability, between)| format!("{durability}{}", ops.join(between)))
    });
    let tasks = prop_oneof![
        6 => Just(""),
        1 => Just(" tasks=other"),
        1 => Just(" tasks=task+other"),
        1 => Just(" tasks=any"),
        1 => Just(" as=1"),
        1 => Just(" as=1 tasks=task"),
    ];
    let client_line = prop_oneof![
        12 => commit,
        3 => Just("hello".to_owned()),
        2 => message.clone().prop_map(|message| format!("hello {message}")),
        1 => Just("lost".to_owned()),
        1 => Just("bye".to_owned()),
        3 => (queue, 0..4_u32, tasks).prop_map(|(queue, credit, tasks)| {
            format!("consume {queue}+default {credit}{tasks}")
        }),
        1 => Just("stop-consuming".to_owned()),
        2 => message.clone().prop_map(|message| format!("watch {message} k1 m1 h1 o1")),
        2 => (message.clone(), message.clone())
            .prop_map(|(waiter, awaited)| format!("job {waiter} awaits {awaited} m1 h1")),
        1 => (message.clone(), message)
            .prop_map(|(waiter, awaited)| format!("job {waiter} stops-awaiting {awaited} m1")),
        1 => Just("unwatch m1 h1".to_owned()),
        1 => Just("writable no".to_owned()),
        1 => Just("writable yes".to_owned()),
        1 => Just("part more publish m5".to_owned()),
        1 => Just("part last publish m6".to_owned()),
    ];
    prop_oneof![
        16 => (client, client_line).prop_map(|(client, line)| format!("{client} {line}")),
        1 => (1..100_u32).prop_map(|ms| format!("wait {ms}")),
        1 => Just("wait 16000".to_owned()),
        1 => Just("stall".to_owned()),
        1 => Just("write".to_owned()),
        2 => Just("sync".to_owned()),
        1 => Just("carry".to_owned()),
        2 => (1..4_u32).prop_map(|steps| format!("carry {steps}")),
        2 => Just("mark".to_owned()),
        1 => Just("rot".to_owned()),
        1 => Just("kill".to_owned()),
        1 => Just("power-cut".to_owned()),
        1 => Just("restart".to_owned()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_broker_stays_consistent_and_recovers_as_it_was(
        lines in prop::collection::vec(line(), 1..80),
        resident in prop_oneof![Just(None), Just(Some(0)), Just(Some(1_000))],
        hash_seed in prop_oneof![Just(0), any::<u64>()],
    ) {
        let (mut world, outputs) = run(&lines, resident, 0);
        world.check_recovery();
        // The order within a table depends on the seed; nothing else may.
        let (mut again, outputs_again) = run(&lines, resident, hash_seed);
        again.check_recovery();
        prop_assert_eq!(outputs, outputs_again, "the same inputs give the same outputs");
        prop_assert_eq!(world.journal(), again.journal(), "and the same records, bit for bit");
    }

    #[test]
    fn a_broker_works_on_with_whatever_a_repair_of_its_journal_has_left(
        lines in prop::collection::vec(line(), 1..80),
        more in prop::collection::vec(line(), 0..40),
        holes in prop::collection::vec(0..200_usize, 1..8),
        width in 1..4_usize,
    ) {
        let (mut world, _) = run(&lines, None, 0);
        world.lose_records(|index| holes.iter().any(|hole| (*hole..hole + width).contains(&index)));
        for line in &more {
            if world.is_possible(line) {
                world.run(line);
            }
        }
        world.check_recovery();
    }
}

fn run(
    lines: &[String],
    resident_bodies_bytes: Option<u64>,
    hash_seed: u64,
) -> (ScriptWorld, Vec<String>) {
    let options = BrokerOptions {
        results_cap_bytes: 1_000,
        session_memory_ms: 40_000,
        failed_kept: 3,
        failed_kept_ms: 90_000,
        resident_bodies_bytes,
        hash_seed,
        ..BrokerOptions::default()
    };
    let mut world = ScriptWorld::new(options);
    let mut outputs = Vec::new();
    for client in ["a", "b", "w"] {
        outputs.extend(world.run(&format!("{client} hello")));
    }
    for line in lines {
        if world.is_possible(line) {
            outputs.extend(world.run(line));
        }
    }
    (world, outputs)
}

/// Runs the lines, loses some of the records that they wrote, runs more lines, and recovers once more.
fn lose_between(lines: &[&str], lost: &[usize], more: &[&str]) {
    let lines: Vec<String> = lines.iter().copied().map(str::to_owned).collect();
    let (mut world, _) = run(&lines, None, 0);
    world.lose_records(|index| lost.contains(&index));
    for line in more {
        if world.is_possible(line) {
            world.run(line);
        }
    }
    world.check_recovery();
}

/// Events of a message whose earlier records are lost are skipped; the message itself stays.
#[test]
fn a_message_whose_end_was_lost_with_a_part_of_the_journal_continues() {
    // Its value was dropped; the record of its end is lost.
    lose_between(
        &["a publish m1", "a cancel m1", "disk no-publishes"],
        &[4],
        &["disk plenty", "a hello", "a cancel m1"],
    );
}

/// A lost part of the journal has the record that forgot a session, so two sessions with one id are recovered. When the
/// older one was forgotten, its client's next hello did not find the other.
#[test]
fn a_session_is_found_though_an_older_one_of_its_id_is_forgotten() {
    let lines = [
        "a consume default+default 1",
        "a publish m1 expires=60",
        "power-cut",
        "wait 16000",
        "disk no-publishes",
        "wait 100000",
        "b hello",
        "b hello",
    ];
    let more = [
        "b hello",
        "w hello",
        "wait 100000",
        "restart",
        "b hello",
        "w hello",
        "wait 100000",
        "b hello",
    ];
    lose_between(&lines, &[8, 9, 177, 178], &more);
}

/// The record in which the first job lost its key is missing, so two jobs with one key are recovered. The first one
/// continued as if it owned the key, which belongs to the other.
#[test]
fn a_key_has_one_owner_though_the_end_of_an_older_one_is_lost() {
    lose_between(
        &[
            "a publish m1 unless=k1",
            "a cancel m1",
            "a publish m2 unless=k1",
        ],
        &[4],
        &["a hello", "a publish m3 unless=k1"],
    );
}

/// The lost part of the journal has the record that closed a group whose workflow was cancelled. A failed member came
/// back, and nothing showed that the group was over.
#[test]
fn a_group_is_over_when_it_has_failed_though_the_record_of_that_is_lost() {
    let lines = [
        "w hold g/ unsealed=g/ result=90000",
        "w publish g/2 member=g/:2 workflow=g/",
        "kill",
        "wait 16000",
        "wait 16000",
        "b hello",
        "wait 16000",
    ];
    for lost in 3..12 {
        lose_between(&lines, &[lost, lost + 1], &["carry 1"]);
    }
}
