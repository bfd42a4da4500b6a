//! Tests of the policy, with numbers as jobs.

use super::*;

const QUICK_NS: u64 = 10_000;
const LONG_NS: u64 = 1_000_000_000;

/// Returns a worker with this many processes of one slot, and the tasks `quick` and `long`, both well
/// known.
fn policy(children: usize) -> Policy<u32> {
    let mut policy = Policy::default();
    policy.set_slots(children, children);
    for (task, cost_ns) in [("quick", QUICK_NS), ("long", LONG_NS)] {
        arrive(&mut policy, task, [0]);
        for _ in 0..12 {
            let sent = policy.next_packet().unwrap();
            for _ in &sent.jobs {
                policy.observe(sent.task, cost_ns);
            }
            let jobs = sent.jobs.len();
            policy.packet_ended(sent.task, PacketEnd::Ran { jobs });
            arrive(&mut policy, task, 0..2 * jobs as u32);
        }
        policy.take_all();
    }
    policy
}

fn arrive(policy: &mut Policy<u32>, task: &str, jobs: impl IntoIterator<Item = u32>) {
    let task = policy.task(task);
    for job in jobs {
        policy.arrive(task, job, 10);
    }
}

/// Returns the sizes of the packets that are sent one after another.
fn sizes(policy: &mut Policy<u32>) -> Vec<usize> {
    std::iter::from_fn(|| policy.next_packet())
        .map(|packet| packet.jobs.len())
        .collect()
}

fn make_quick(policy: &mut Policy<u32>) {
    let quick = policy.task("quick");
    for _ in 0..2_000 {
        policy.observe(quick, QUICK_NS);
    }
}

#[test]
fn an_unknown_task_goes_alone_to_idle_slots_only() {
    let mut policy = policy(2);
    arrive(&mut policy, "new", 0..10);
    assert_eq!(sizes(&mut policy), [1, 1]);
}

#[test]
fn one_by_one_even_quick_jobs_go_alone_to_idle_slots_only() {
    let mut policy = Policy::one_by_one(SeededState::default(), 1);
    arrive(&mut policy, "quick", 0..10);
    for _ in 0..5 {
        let sent = policy.next_packet().unwrap();
        assert_eq!(sent.jobs.len(), 1);
        assert_eq!((policy.next_packet(), policy.out()), (None, 1));
        policy.observe(sent.task, QUICK_NS);
        policy.packet_ended(sent.task, PacketEnd::Ran { jobs: 1 });
    }
    assert_eq!((policy.waiting(), policy.out()), (5, 0));
}

#[test]
fn a_task_keeps_no_room_for_jobs_that_waited_once() {
    let mut policy = policy(1);
    arrive(&mut policy, "quick", 0..1000);
    arrive(&mut policy, "long", 0..1000);
    policy.retain(|job| *job == 0);
    policy.next_packet();
    assert_eq!(policy.waiting(), 1);
    policy.give_back_memory();
    let mut kept: Vec<(usize, usize)> = policy
        .tasks
        .iter()
        .map(|task| (task.waiting.len(), task.waiting.capacity()))
        .collect();
    kept.sort_unstable();
    assert_eq!(kept[0], (0, 0));
    assert!(kept[1].0 == 1 && kept[1].1 > 0, "{kept:?}");
}

fn turn(place: usize) -> Turn {
    Turn {
        place,
        wait: 1,
        is_on_loop: false,
    }
}

#[test]
pub(crate) fn a_job_that_waits_lends_its_slot_and_has_one_back_before_any_job_begins() {
    let mut policy = policy(1);
    arrive(&mut policy, "long", 0..3);
    let first = policy.next_packet().unwrap().task;
    assert_eq!(policy.next_packet(), None);

    assert!(policy.park(first));
    assert_eq!((policy.busy(), policy.parked()), (0, 1));
    assert_eq!(sizes(&mut policy), [1], "one runs in its place");
    policy.want_turn(turn(7));
    assert_eq!(policy.next_turn(), None, "the slot is in use");
    policy.packet_ended(first, PacketEnd::Ran { jobs: 1 });
    assert_eq!(policy.next_packet(), None, "others wait for longer");
    assert_eq!(policy.next_turn(), Some(turn(7)));
    policy.unpark(first, 7);
    assert_eq!((policy.busy(), policy.parked()), (1, 0));
    assert!(!policy.has_turns());
    policy.packet_ended(first, PacketEnd::Ran { jobs: 1 });
    assert_eq!(sizes(&mut policy), [1]);
}

#[test]
fn while_jobs_wait_quick_ones_go_alone_and_none_is_fetched_ahead() {
    let mut policy = policy(2);
    make_quick(&mut policy);
    let quick = policy.task("quick");
    arrive(&mut policy, "quick", 0..600);
    policy.next_packet().unwrap();
    assert!(policy.park(quick));
    let waiting = policy.waiting();
    assert_eq!(policy.surplus().len(), waiting - 2);
    assert_eq!(sizes(&mut policy), [1, 1]);
    assert_eq!(policy.grant(), Credit::Keep, "no slot is idle");
    policy.packet_ended(quick, PacketEnd::Ran { jobs: 1 });
    assert_eq!(policy.grant(), Credit::Add(1));
}

#[test]
fn a_long_job_is_kept_waiting_for_a_moment_while_others_are_parked() {
    let mut policy = policy(3);
    let check = |policy: &Policy<u32>, expected_ms: u64| {
        assert_eq!(policy.keep_ns() / 1_000_000, expected_ms);
    };
    arrive(&mut policy, "long", 0..3);
    let task = policy.next_packet().unwrap().task;
    check(&policy, 0);
    assert!(policy.park(task));
    check(&policy, 20);
    policy.take_all();
    arrive(&mut policy, "quick", 0..3);
    check(&policy, 0);
}

#[test]
fn no_more_jobs_are_parked_than_may_be() {
    let mut policy = policy(3);
    policy.set_max_parked(2);
    arrive(&mut policy, "long", 0..3);
    let task = policy.next_packet().unwrap().task;
    assert_eq!(sizes(&mut policy), [1, 1]);
    assert!(policy.park(task) && policy.park(task));
    assert!(!policy.park(task), "it keeps its slot");
    policy.unpark(task, 0);
    assert!(policy.park(task));
}

/// Processes that were forked for lent slots would start at once on jobs sent ahead.
#[test]
fn nothing_is_sent_ahead_to_processes_beyond_the_slots() {
    let mut policy = policy(2);
    make_quick(&mut policy);
    arrive(&mut policy, "quick", 0..2_000);
    policy.set_spare(2);
    assert_eq!(sizes(&mut policy).len(), 2);
    policy.set_spare(0);
    assert_eq!(sizes(&mut policy).len(), 2);
}

/// A job that passes through takes no slot from the others of its queue, unless there are very many of them.
#[test]
fn what_passes_by_is_granted_again() {
    let mut policy = policy(2);
    assert_eq!(policy.grant(), Credit::Add(2));
    policy.pass_by();
    policy.set_passed(1);
    assert_eq!(policy.grant(), Credit::Add(1));
    policy.pass_by();
    policy.set_passed(MOST_PASSED + 2);
    assert_eq!(policy.grant(), Credit::Keep);
    policy.set_passed(MOST_PASSED);
    assert_eq!(policy.grant(), Credit::Add(1));
}

#[test]
fn long_jobs_go_alone_to_idle_slots_only() {
    let mut policy = policy(3);
    arrive(&mut policy, "long", 0..10);
    assert_eq!(sizes(&mut policy), [1, 1, 1]);
}

/// Forty slots whose jobs sleep for 5 ms: eight of them will be free within a millisecond.
#[test]
fn slots_that_are_about_to_be_free_have_their_next_jobs_under_way() {
    let mut policy = policy(4);
    policy.set_slots(40, 40);
    let nap = policy.task("nap");
    for _ in 0..200 {
        policy.observe(nap, 4_900_000);
    }
    arrive(&mut policy, "nap", 0..100);
    assert_eq!(sizes(&mut policy).len(), 48);
    policy.take_all();
    policy.granted = 0;
    policy.packet_ended(nap, PacketEnd::Ran { jobs: 1 });
    assert_eq!(policy.grant(), Credit::Add(1));
    policy.set_stuck(40);
    assert_eq!(policy.grant(), Credit::Keep, "none will be free soon");
    assert_eq!(policy.withdraw(), Credit::Withdraw);
}

/// A job that may be long is never bound to a slot that runs such a job.
#[test]
fn nothing_is_under_way_to_slots_with_long_jobs() {
    let mut policy = policy(4);
    policy.set_slots(40, 40);
    arrive(&mut policy, "long", 0..100);
    assert_eq!(sizes(&mut policy).len(), 40);
    make_quick(&mut policy);
    assert_eq!(policy.free_soon(), 0);
    assert_eq!(policy.wanted(), 0);
}

#[test]
fn quick_jobs_go_in_packets_of_two_milliseconds_one_ahead_for_each_process() {
    let mut policy = policy(2);
    arrive(&mut policy, "quick", 0..5_000);
    let sizes = sizes(&mut policy);
    assert_eq!(sizes.len(), 4);
    let work_ns = sizes[0] as u64 * (QUICK_NS + OVERHEAD_NS);
    assert!(work_ns > PACKET_NS / 2 && work_ns <= PACKET_NS, "{sizes:?}");
}

#[test]
fn few_quick_jobs_are_shared_by_the_idle_slots() {
    let mut policy = policy(4);
    arrive(&mut policy, "quick", 0..8);
    assert_eq!(sizes(&mut policy), [2, 2, 2, 2]);
}

#[test]
fn a_packet_holds_jobs_of_one_task_and_the_oldest_goes_first() {
    let mut policy = policy(1);
    arrive(&mut policy, "quick", [1]);
    arrive(&mut policy, "long", [2]);
    arrive(&mut policy, "quick", [3]);
    let first = policy.next_packet().unwrap();
    assert_eq!(first.jobs, [1, 3]);
    assert!(
        policy.next_packet().is_none(),
        "the long job waits for the child"
    );
    policy.packet_ended(first.task, PacketEnd::Ran { jobs: 2 });
    assert_eq!(policy.next_packet().unwrap().jobs, [2]);
}

#[test]
fn a_long_job_that_waits_for_a_child_is_not_overtaken_for_ever() {
    let mut policy = policy(1);
    arrive(&mut policy, "quick", 0..100);
    arrive(&mut policy, "long", [1]);
    let quick = policy.next_packet().unwrap();
    arrive(&mut policy, "quick", 0..100);
    assert!(policy.next_packet().is_none());
    policy.packet_ended(quick.task, PacketEnd::Ran { jobs: 100 });
    assert_eq!(policy.next_packet().unwrap().jobs, [1]);
}

#[test]
fn packets_grow_by_doubling_and_start_anew_when_one_turns_out_slow() {
    let mut policy = Policy::default();
    policy.set_slots(1, 1);
    let mut sizes = Vec::new();
    let mut turn = |policy: &mut Policy<u32>, end: Option<PacketEnd>| {
        policy.take_all();
        arrive(policy, "quick", 0..1_000);
        let sent = policy.next_packet().unwrap();
        let jobs = sent.jobs.len();
        sizes.push(jobs);
        for _ in 0..jobs {
            policy.observe(sent.task, 1);
        }
        policy.packet_ended(sent.task, end.unwrap_or(PacketEnd::Ran { jobs }));
    };
    for _ in 0..10 {
        turn(&mut policy, None);
    }
    turn(&mut policy, Some(PacketEnd::Slow));
    turn(&mut policy, Some(PacketEnd::TakenBack));
    turn(&mut policy, None);
    turn(&mut policy, None);
    assert_eq!(sizes, [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256, 1, 1, 2]);
}

#[test]
fn large_bodies_make_small_packets_and_a_huge_one_goes_alone() {
    let mut policy = policy(1);
    let quick = policy.task("quick");
    for job in 0..4 {
        policy.arrive(quick, job, INLINE_PAYLOAD_BYTES / 2);
    }
    policy.arrive(quick, 4, 16 << 20);
    assert_eq!(policy.next_packet().unwrap().jobs, [0, 1]);
    assert_eq!(policy.next_packet().unwrap().jobs, [2, 3]);
    policy.set_slots(2, 2);
    assert_eq!(policy.next_packet().unwrap().jobs, [4]);
}

#[test]
fn what_comes_back_goes_first_and_in_its_order() {
    let mut policy = policy(2);
    arrive(&mut policy, "long", [1]);
    arrive(&mut policy, "quick", [2, 3, 4, 5]);
    let long = policy.next_packet().unwrap();
    let quick = policy.next_packet().unwrap();
    assert_eq!(quick.jobs, [2, 3, 4, 5]);
    arrive(&mut policy, "quick", [6]);
    policy.put_back(long.task, [(1, 10)].into_iter());
    policy.put_back(quick.task, [(4, 10), (5, 10)].into_iter());
    policy.packet_ended(long.task, PacketEnd::TakenBack);
    policy.packet_ended(quick.task, PacketEnd::TakenBack);
    assert_eq!(policy.take_all(), [4, 5, 1, 6]);
    assert!(policy.is_idle());
}

#[test]
fn credit_for_long_jobs_is_the_free_slots() {
    let mut policy = policy(3);
    assert_eq!(policy.grant(), Credit::Add(3));
    assert_eq!(policy.grant(), Credit::Keep);
    arrive(&mut policy, "long", 0..3);
    assert_eq!(sizes(&mut policy), [1, 1, 1]);
    assert_eq!(policy.grant(), Credit::Keep, "no child is free");
    let long = policy.task("long");
    policy.packet_ended(long, PacketEnd::Ran { jobs: 1 });
    assert_eq!(policy.grant(), Credit::Add(1));
}

#[test]
fn credit_for_quick_jobs_is_some_milliseconds_of_work_in_lumps() {
    let mut policy = policy(2);
    make_quick(&mut policy);
    let Credit::Add(credit) = policy.grant() else {
        panic!("credit should be given");
    };
    assert!((900..=1_100).contains(&credit), "{credit}");
    arrive(&mut policy, "quick", 0..10);
    sizes(&mut policy);
    assert_eq!(policy.grant(), Credit::Keep, "too little to tell");
    arrive(&mut policy, "quick", 0..200);
    sizes(&mut policy);
    assert!(matches!(policy.grant(), Credit::Add(150..=250)));
}

#[test]
fn one_job_that_the_system_kept_waiting_changes_little_and_a_long_one_much() {
    let mut policy = policy(1);
    make_quick(&mut policy);
    let before = policy.wanted();
    let quick = policy.task("quick");
    policy.observe(quick, 20_000_000);
    assert!(policy.wanted() > before / 2);
    policy.observe(quick, LONG_NS);
    assert_eq!(policy.wanted(), 1);
}

#[test]
fn when_children_are_stuck_what_is_held_goes_back_and_credit_is_withdrawn() {
    let mut policy = policy(2);
    make_quick(&mut policy);
    policy.grant();
    arrive(&mut policy, "quick", 0..600);
    sizes(&mut policy);
    assert_eq!(policy.surplus(), Vec::<u32>::new());
    assert_eq!(policy.withdraw(), Credit::Keep);

    policy.set_stuck(2);
    let waiting = policy.waiting;
    assert_eq!(policy.surplus().len(), waiting);
    assert_eq!(policy.withdraw(), Credit::Withdraw);
    assert_eq!(policy.grant(), Credit::Keep);
    assert!(policy.next_packet().is_none());
}

#[test]
fn one_stuck_child_does_not_hold_up_the_others() {
    let mut policy = policy(2);
    make_quick(&mut policy);
    arrive(&mut policy, "long", [1]);
    assert_eq!(sizes(&mut policy), [1]);
    policy.set_stuck(1);
    arrive(&mut policy, "quick", 0..1_000);
    assert_eq!(sizes(&mut policy).len(), 2, "one runs, one is ahead");
    assert!(matches!(policy.grant(), Credit::Keep));
    assert_eq!(policy.surplus(), Vec::<u32>::new());
}

#[test]
fn no_more_is_asked_for_behind_jobs_that_may_be_long() {
    let mut policy = policy(2);
    make_quick(&mut policy);
    arrive(&mut policy, "new", 0..3);
    arrive(&mut policy, "quick", 0..10);
    assert_eq!(sizes(&mut policy), [1, 1]);
    assert_eq!(policy.grant(), Credit::Keep);
    let new = policy.task("new");
    policy.packet_ended(new, PacketEnd::Ran { jobs: 1 });
    sizes(&mut policy);
    policy.packet_ended(new, PacketEnd::Ran { jobs: 1 });
    sizes(&mut policy);
    assert!(matches!(policy.grant(), Credit::Add(900..)));
}

/// A process with many slots, such as threads, which share one interpreter.
#[test]
fn quick_jobs_are_handed_out_by_processes_and_long_ones_by_slots() {
    let mut policy = policy(2);
    make_quick(&mut policy);
    policy.set_slots(200, 2);
    let Credit::Add(credit) = policy.grant() else {
        panic!("credit should be given");
    };
    assert!(
        (900..=1_100).contains(&credit),
        "as for two slots: {credit}"
    );
    arrive(&mut policy, "quick", 0..credit);
    let quick = sizes(&mut policy);
    assert!(quick.len() < 30, "{quick:?}");
    policy.take_all();
    let quick_packets = quick.len();
    arrive(&mut policy, "long", 0..300);
    assert_eq!(sizes(&mut policy).len(), 200 - quick_packets);
}

#[test]
fn a_surplus_keeps_the_oldest() {
    let mut policy = policy(1);
    arrive(&mut policy, "long", 0..5);
    assert_eq!(sizes(&mut policy), [1]);
    assert_eq!(policy.surplus(), [2, 3, 4]);
    assert_eq!(policy.take_all(), [1]);
}

#[test]
fn nothing_is_sent_or_granted_once_closed() {
    let mut policy = policy(1);
    arrive(&mut policy, "quick", 0..3);
    policy.close();
    assert!(policy.next_packet().is_none());
    assert_eq!(policy.grant(), Credit::Keep);
    assert_eq!(policy.take_all(), [0, 1, 2]);
}

#[test]
fn jobs_whose_lease_is_lost_are_forgotten() {
    let mut policy = policy(1);
    arrive(&mut policy, "quick", 0..4);
    policy.retain(|job| job % 2 == 1);
    assert_eq!(policy.next_packet().unwrap().jobs, [1, 3]);
}

#[test]
fn names_are_hashed_with_the_seed_of_the_worker() {
    let policy = Policy::<()>::new(SeededState::new(7));
    assert_eq!(*policy.by_name.hasher(), SeededState::new(7));
}
