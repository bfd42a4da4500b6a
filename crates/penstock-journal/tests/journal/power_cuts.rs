//! Power cuts at any time, with any unsynced changes kept: all confirmed records are there, and of the others at most
//! the beginning.

use penstock_journal::sim::{Fault, Rng, SimStorage};
use penstock_journal::{JournalOptions, OpenError, WriteError};

use crate::support::{ReplayedRecords, User, open, roomy, small};

/// Action of a broker. All sequences of three are tried, some with a close in between.
#[derive(Clone, Copy, Debug)]
enum JournalStep {
    /// Appends one small record, on disk before anything else.
    Commit,
    /// Appends a record that spans batches and, with these sizes, segments.
    CommitLong,
    /// Appends a written but unsynced record, as with `durability="os"`.
    WriteOnly,
    Watermark,
    DropOldest,
    /// Drops the oldest segment, after carrying forward more than one batch can hold.
    CarryAndDrop,
    /// Kills the process; another takes over.
    Reopen,
    /// Closes the journal in order; another process takes over.
    Close,
}

const STEPS: [JournalStep; 8] = [
    JournalStep::Commit,
    JournalStep::CommitLong,
    JournalStep::WriteOnly,
    JournalStep::Watermark,
    JournalStep::DropOldest,
    JournalStep::CarryAndDrop,
    JournalStep::Reopen,
    JournalStep::Close,
];

fn workloads() -> Vec<Vec<JournalStep>> {
    let mut workloads = Vec::new();
    for first in STEPS {
        workloads.push(vec![first]);
        for second in STEPS {
            workloads.push(vec![first, second]);
            let triples = STEPS.map(|third| vec![first, second, third]);
            workloads.extend(triples.into_iter().filter(|steps| {
                let closes = |step: &JournalStep| matches!(step, JournalStep::Close);
                !closes(&steps[0]) && !closes(&steps[2])
            }));
        }
    }
    workloads
}

#[derive(Debug, thiserror::Error)]
enum Stopped {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Stops early at the power cut.
fn run(
    user: &mut User<SimStorage>,
    storage: &mut SimStorage,
    steps: &[JournalStep],
) -> Result<(), Stopped> {
    for step in steps {
        match step {
            JournalStep::Commit => {
                user.append(100);
                user.commit()?;
            }
            JournalStep::CommitLong => {
                user.append(40);
                user.append(2600);
                user.commit()?;
            }
            JournalStep::WriteOnly => {
                user.append(700);
                user.write()?;
            }
            JournalStep::Watermark => user.write_watermark()?,
            JournalStep::DropOldest => {
                user.drop_oldest();
                user.commit()?;
            }
            JournalStep::CarryAndDrop => {
                for _ in 0..4 {
                    user.append(600);
                }
                user.drop_oldest();
                user.append(10);
                user.commit()?;
            }
            JournalStep::Reopen => {
                *storage = storage.kill();
                user.reopen(storage)?;
            }
            JournalStep::Close => {
                user.close()?;
                *storage = storage.kill();
                user.reopen(storage)?;
            }
        }
    }
    Ok(())
}

/// Returns the number of states that were tried.
fn cut_power_everywhere(
    options: &JournalOptions,
    steps: &[JournalStep],
    kept: u64,
    seed: u64,
) -> u64 {
    let mut states = 0;
    // Journal with some history, so that there are segments to drop and ghosts in the spares.
    let begin = || {
        let mut storage = SimStorage::new();
        let mut user = User::open_with(&storage, options.clone()).unwrap();
        let history = [
            JournalStep::CommitLong,
            JournalStep::CommitLong,
            JournalStep::DropOldest,
            JournalStep::Commit,
        ];
        run(&mut user, &mut storage, &history).unwrap();
        (user, storage)
    };
    for cut in 0.. {
        let (mut user, mut storage) = begin();
        storage.fail_at(storage.calls() + cut, Fault::PowerOff);
        let ended = run(&mut user, &mut storage, steps);
        for sectors in 0..kept {
            let mut rng = Rng::new(seed ^ cut << 32 ^ sectors << 48);
            let after = storage.fork().crash(&mut rng);
            let (opened, records) = open(&after, options.clone()).expect("nothing is damaged");
            user.expects(&records);
            drop(opened);
            cut_power_while_opening(&user, &storage, &mut rng);
            what_was_shown_stays(&user, &after, &records, &mut rng);
            states += 1;
        }
        if ended.is_ok() {
            return states;
        }
    }
    unreachable!("the workload ends");
}

/// Cuts the power a second time, at every call of the opening after the first cut.
fn cut_power_while_opening(user: &User<SimStorage>, storage: &SimStorage, rng: &mut Rng) {
    let found = storage.fork().crash(rng);
    for cut in 0.. {
        let storage = found.fork();
        storage.fail_at(storage.calls() + cut, Fault::PowerOff);
        let options = &user.options;
        let first = open(&storage, options.clone()).map(|(_, records)| records);
        let (_, records) = open(&storage.crash(rng), options.clone()).expect("nothing is damaged");
        user.expects(&records);
        if let Ok(first) = first {
            assert_eq!(
                first, records,
                "what was shown after an opening was taken back"
            );
            return;
        }
    }
}

/// Checks that an opened journal may be served: no record that it showed is lost in the next cut.
fn what_was_shown_stays(
    before: &User<SimStorage>,
    storage: &SimStorage,
    shown: &ReplayedRecords,
    rng: &mut Rng,
) {
    let mut storage = storage.crash(rng);
    let options = before.options.clone();
    let mut user = User::open_with(&storage, options.clone()).expect("nothing is damaged");
    assert_eq!(user.appended, *shown);
    // It continues like any other journal: ghosts of the cut-off part don't return.
    run(
        &mut user,
        &mut storage,
        &[JournalStep::Commit, JournalStep::CommitLong],
    )
    .unwrap();
    user.append(500);
    user.write().unwrap();
    let (_, records) = open(&storage.crash(rng), options).expect("nothing is damaged");
    user.expects(&records);
}

#[test]
fn all_that_was_confirmed_survives_a_power_cut_at_any_call_whatever_the_disk_keeps() {
    let mut states = 0;
    for (index, steps) in workloads().iter().enumerate() {
        states += cut_power_everywhere(&small(), steps, 3, index as u64);
    }
    assert!(states > 5_000, "only {states} states were tried");
}

#[test]
fn a_few_workloads_survive_very_many_ways_of_losing_sectors() {
    use JournalStep::{Close, Commit, CommitLong, DropOldest, Reopen, Watermark, WriteOnly};
    for (index, steps) in [
        &[Commit, Close, Commit, Watermark, Close][..],
        &[CommitLong, WriteOnly, WriteOnly, CommitLong][..],
        &[WriteOnly, Reopen, WriteOnly, Commit][..],
        &[CommitLong, DropOldest, DropOldest, CommitLong][..],
    ]
    .iter()
    .enumerate()
    {
        for (options, kept) in [(small(), 40), (roomy(), 10)] {
            cut_power_everywhere(&options, steps, kept, 1 << 20 | index as u64);
        }
    }
}
