//! Full disks: work is held back before anything fails, accepted work is kept, and everything continues automatically
//! once there is space.

use penstock_journal::sim::{Rng, SimStorage};
use penstock_journal::{JournalOptions, OpenError, Storage, WriteError};
use penstock_message::Space;
use proptest::prelude::*;

use crate::support::{User, open, small};

fn with_reserves() -> JournalOptions {
    JournalOptions {
        spares: 4,
        ..small()
    }
}

/// Opens a journal in use, with all its reserves.
fn user_of(storage: &SimStorage) -> User<SimStorage> {
    let mut user = User::open_with(storage, with_reserves()).unwrap();
    user.append_and_commit(900);
    user.append_and_commit(800);
    assert_eq!(user.opened.journal.spares_ready(), 4);
    user
}

fn fill_the_disk(storage: &SimStorage) {
    storage.set_quota(Some(storage.used_bytes()));
}

fn space(user: &User<SimStorage>) -> Space {
    user.opened.journal.space()
}

#[test]
fn each_reserve_that_is_used_up_stops_one_more_kind_of_work_and_space_lets_all_go_on() {
    let storage = SimStorage::new();
    let mut user = user_of(&storage);
    fill_the_disk(&storage);
    let mut seen = vec![space(&user)];
    let error = loop {
        user.append(300);
        match user.commit() {
            Ok(()) if seen.last() != Some(&space(&user)) => seen.push(space(&user)),
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    use Space::{NoLeases, NoPublishes, NoSettlements, Plenty};
    assert_eq!(seen, [Plenty, NoPublishes, NoLeases, NoSettlements]);
    assert_eq!(user.opened.journal.spares_ready(), 0);
    assert_eq!(
        error.to_string(),
        "the disk is full: could not prepare 0000000000000006.segment: no storage space; nothing is \
         lost, and writing continues once there is space"
    );
    let again = user.commit().unwrap_err();
    assert!(matches!(again, WriteError::DiskFull { .. }), "{again}");

    storage.set_quota(Some(storage.used_bytes() + 2 * small().segment_bytes));
    user.prepare_spares();
    user.commit().unwrap();
    assert_ne!(space(&user), Plenty, "there is hardly any space");
    storage.set_quota(None);
    user.prepare_spares();
    assert_eq!(space(&user), Plenty);
    user.append_and_commit(300);
    let (_, records) = open(&storage.kill(), small()).unwrap();
    user.expects(&records);
}

#[test]
fn a_roll_while_there_is_space_stops_nobody() {
    let storage = SimStorage::new();
    let mut user = user_of(&storage);
    let spares = user.opened.writer.spares();
    for position in 0..3 {
        user.opened
            .journal
            .append(user.opened.next_position + position, &[1; 900]);
    }
    while let Some(batch) = user.opened.journal.take_batch() {
        user.opened.writer.write(&batch).unwrap();
    }
    assert!(spares.wanted() && user.opened.journal.spares_ready() < 4);
    assert_eq!(spares.space(), Space::Plenty);
}

#[test]
fn reclaiming_goes_on_with_its_own_reserve_and_lets_all_the_others_go_on() {
    let storage = SimStorage::new();
    let mut user = user_of(&storage);
    // Half of the first segment is live, and all of the second; the rest is dead.
    for _ in 0..20 {
        user.append_and_commit(900);
    }
    fill_the_disk(&storage);
    while space(&user) != Space::NoSettlements {
        user.append_and_commit(300);
    }
    assert_eq!(user.opened.journal.spares_ready(), 1);
    let mut carried = 0;
    while space(&user) != Space::Plenty {
        let live_bytes = 3000;
        assert!(
            user.opened.journal.reclaim_due(live_bytes),
            "after {carried}"
        );
        if carried < 3 {
            user.append(900);
            carried += 1;
        }
        user.drop_oldest();
        user.commit().unwrap();
        user.prepare_spares();
    }
    assert!(!user.opened.journal.reclaim_due(3000) || space(&user) == Space::Plenty);
    user.append_and_commit(900);
    let (_, records) = open(&storage.kill(), small()).unwrap();
    user.expects(&records);
}

#[test]
fn a_journal_on_a_full_disk_opens_with_a_spare_and_without_one_says_what_to_do() {
    let storage = SimStorage::new();
    let mut user = user_of(&storage);
    user.append(400);
    user.write().unwrap();
    let appended = user.appended.clone();
    fill_the_disk(&storage);
    for spares in (0..4).rev() {
        let (opened, records) = open(&storage.kill(), with_reserves()).unwrap();
        assert_eq!(records, appended);
        assert_eq!(opened.journal.spares_ready(), spares);
    }
    let storage = storage.kill();
    let before = storage.list().unwrap();
    let error = open(&storage, with_reserves()).map(|_| ()).unwrap_err();
    assert!(matches!(error, OpenError::DiskFull { .. }));
    assert_eq!(
        error.to_string(),
        "the disk of (simulated) is full: no storage space. Nothing is lost; make some space (a few \
         MB) and start again"
    );
    assert_eq!(storage.list().unwrap(), before);
    storage.set_quota(None);
    assert_eq!(open(&storage.kill(), small()).unwrap().1, appended);
}

const RESERVE: &str = "room.reserve";

/// Options for a disk on which overwriting a file may take room.
fn with_room_to_give() -> JournalOptions {
    JournalOptions {
        reserve_bytes: 8192,
        margin_bytes: 4096,
        ..with_reserves()
    }
}

fn has_reserve(storage: &SimStorage) -> bool {
    storage.list().unwrap().contains(&RESERVE.to_owned())
}

#[test]
fn a_batch_that_finds_no_room_is_given_the_reserve_and_then_spares_and_new_work_is_refused() {
    let storage = SimStorage::new();
    let mut user = User::open_with(&storage, with_room_to_give()).unwrap();
    user.append_and_commit(900);
    user.append_and_commit(800);
    assert!(has_reserve(&storage) && user.opened.journal.spares_ready() == 4);
    fill_the_disk(&storage);
    let full_bytes = storage.used_bytes();
    let spares = user.opened.writer.spares();
    assert!(spares.ran_out(), "the reserve made room");
    assert!(!has_reserve(&storage) && storage.used_bytes() < full_bytes);
    assert_eq!(
        (space(&user), user.opened.journal.spares_ready()),
        (Space::NoPublishes, 4)
    );
    // The next file does not fill the freed room at once: a margin is left.
    user.prepare_spares();
    assert!(!has_reserve(&storage) && storage.used_bytes() < full_bytes);
    for left in (1..4).rev() {
        assert!(spares.ran_out(), "a spare made room");
        assert_eq!(user.opened.journal.spares_ready(), left);
    }
    assert!(
        !spares.ran_out(),
        "the last one is for the segment that comes next"
    );
    assert_eq!(space(&user), Space::NoSettlements);

    storage.set_quota(None);
    user.prepare_spares();
    assert!(has_reserve(&storage) && user.opened.journal.spares_ready() == 4);
    assert_eq!(space(&user), Space::Plenty);
    user.append_and_commit(900);
    let (_, records) = open(&storage.kill(), small()).unwrap();
    user.expects(&records);
}

#[test]
fn an_opening_on_a_full_disk_takes_the_reserve_before_a_spare_and_refuses_new_work_from_the_start()
{
    let storage = SimStorage::new();
    let mut user = User::open_with(&storage, with_room_to_give()).unwrap();
    user.append_and_commit(900);
    user.append_and_commit(800);
    let appended = user.appended.clone();
    fill_the_disk(&storage);
    let storage = storage.kill();
    let (opened, records) = open(&storage, with_room_to_give()).unwrap();
    assert_eq!(records, appended);
    assert_eq!(opened.journal.spares_ready(), 4);
    assert_eq!(opened.journal.space(), Space::NoPublishes);
    assert!(!has_reserve(&storage));
    let storage = storage.kill();
    let (opened, records) = open(&storage, with_room_to_give()).unwrap();
    assert_eq!(records, appended);
    assert_eq!(opened.journal.spares_ready(), 3);
    assert_eq!(opened.journal.space(), Space::NoPublishes);
}

#[derive(Clone, Debug)]
enum JournalStep {
    Append(usize),
    Commit,
    Write,
    DropOldest,
    /// Limits the total size of all files.
    Quota(u64),
    Unlimited,
    PowerCut(u64),
}

fn steps() -> impl Strategy<Value = Vec<JournalStep>> {
    let step = prop_oneof![
        4 => (0..1200_usize).prop_map(JournalStep::Append),
        1 => (0..5000_usize).prop_map(JournalStep::Append),
        5 => Just(JournalStep::Commit),
        2 => Just(JournalStep::Write),
        2 => Just(JournalStep::DropOldest),
        2 => (0..20_000_u64).prop_map(JournalStep::Quota),
        1 => Just(JournalStep::Unlimited),
        1 => any::<u64>().prop_map(JournalStep::PowerCut),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_batch_meets_a_full_disk_while_a_reserve_is_left(steps in steps()) {
        let mut storage = SimStorage::new();
        storage.seed_faults(Rng::new(9));
        let mut user = User::open_with(&storage, with_reserves()).unwrap();
        for step in steps {
            let outcome = match step {
                JournalStep::Append(bytes) => {
                    user.append(bytes);
                    Ok(())
                }
                JournalStep::Commit => user.commit(),
                JournalStep::Write => user.write(),
                JournalStep::DropOldest => {
                    // The test user remembers one pending drop, not several.
                    if user.dropped_before == user.drop_asked_before {
                        user.drop_oldest();
                    }
                    Ok(())
                }
                JournalStep::Quota(more) => {
                    storage.set_quota(Some(storage.used_bytes() + more));
                    Ok(())
                }
                JournalStep::Unlimited => {
                    storage.set_quota(None);
                    user.prepare_spares();
                    prop_assert_eq!(space(&user), Space::Plenty);
                    Ok(())
                }
                JournalStep::PowerCut(seed) => {
                    storage = storage.crash(&mut Rng::new(seed));
                    match open(&storage, with_reserves()) {
                        Ok((_, records)) => user.expects(&records),
                        Err(OpenError::DiskFull { .. }) => storage.set_quota(None),
                        Err(error) => panic!("{error}"),
                    }
                    storage = storage.kill();
                    storage.set_quota(None);
                    user = User::open_with(&storage, with_reserves()).unwrap();
                    Ok(())
                }
            };
            if let Err(error) = outcome {
                prop_assert!(matches!(error, WriteError::DiskFull { .. }), "{}", error);
                prop_assert_eq!(user.opened.journal.spares_ready(), 0);
                prop_assert_eq!(space(&user), Space::NoSettlements);
            }
        }
        storage.set_quota(None);
        user.prepare_spares();
        user.commit().unwrap();
        let (_, records) = open(&storage.kill(), small()).unwrap();
        user.expects(&records);
    }
}
