//! Records that are whole, cut short, changed, or random bytes.

use proptest::collection::vec;
use proptest::prelude::*;

use penstock_message::{
    AppVersion, CatchUp, Due, Message, Overflow, Overlap, Refusal, Rhythm, ScheduleTiming,
};

use super::*;
use crate::clock::WhichClock;
use crate::table::interner::Interner;

/// Builds an event that owns its data, so that lists of events can be generated.
fn event() -> impl Strategy<Value = RecordEvent<'static>> {
    let id = any::<[u8; 16]>().prop_map(MessageId);
    let bytes = vec(any::<u8>(), 0..40).prop_map(|bytes| &*bytes.leak());
    let text = ".{0,20}".prop_map(|text| &*text.leak());
    let name = (0..6_usize).prop_map(|index| names().1[index]);
    let key = prop_oneof![
        id.clone().prop_map(Key::Result),
        bytes.clone().prop_map(|name| Key::Named(name.into()))
    ];
    let when = (any::<u64>(), any::<bool>()).prop_map(|(at, is_wall)| ClockTime {
        at,
        clock: if is_wall {
            WhichClock::Wall
        } else {
            WhichClock::Steady
        },
    });
    let deadline = when.clone();
    let grant = any::<(u32, u64, u64)>().prop_map(|(epoch, number, started_at)| Grant {
        epoch,
        number,
        started_at,
    });
    let state = prop_oneof![
        Just(RecordedState::Ready),
        when.clone().prop_map(RecordedState::Delayed),
        id.clone().prop_map(RecordedState::Held),
        (any::<u64>(), grant.clone())
            .prop_map(|(session, grant)| RecordedState::Leased { session, grant }),
    ];
    let head = (
        any::<(u64, u8, u8, (bool, bool), u32, u64)>(),
        (id.clone(), 0..=penstock_message::HIGHEST_PRIORITY),
        (name.clone(), name.clone()),
        (prop::option::of(when.clone()), any::<Option<u64>>(), state),
    );
    let head = head.prop_map(|(plain, (id, priority), (queue, task), optional)| {
        let (number, max_deliveries, crashes, flags, attempt, enqueued_at) = plain;
        let (redelivered, has_copies) = flags;
        let (expires_at, result_ttl_ms, state) = optional;
        MessageHead {
            number,
            id,
            queue,
            task,
            priority,
            max_deliveries,
            crashes,
            redelivered,
            has_copies,
            attempt,
            generation: 0,
            attempts_before: 0,
            enqueued_at,
            expires_at,
            result_ttl_ms,
            state,
        }
    });
    let change = (
        any::<(u64, bool, bool)>(),
        name.clone(),
        prop::option::of(when.clone()),
        prop::option::of(bytes.clone()),
        prop::option::of(when),
    );
    let change = change.prop_map(
        |((to, next_attempt, crashed), queue, due, note, expires_at)| Change {
            to,
            queue,
            due,
            next_attempt,
            crashed,
            redelivered: false,
            was_sent: false,
            note,
            expires_at,
        },
    );
    let refusal = (0..8, ".{0,20}").prop_map(|(which, text)| match which {
        7 => Refusal::Claimed(MessageId([7; 16])),
        0 => Refusal::LeaseLost,
        1 => Refusal::GuardFailed,
        2 => Refusal::TooLarge(text),
        3 => Refusal::AlreadyExists,
        4 => Refusal::QueueFull(text),
        5 => Refusal::DiskFull,
        _ => Refusal::Invalid(text),
    });
    let receipt = prop_oneof![
        vec(any::<u32>(), 0..4).prop_map(Receipt::skipped),
        Just(Receipt::Duplicate),
        Just(Receipt::Unknown),
        (any::<u32>(), refusal).prop_map(|(op, why)| Receipt::Refused { op, why }),
    ];
    let status = prop_oneof![
        Just(ValueStatus::Succeeded),
        Just(ValueStatus::Failed),
        Just(ValueStatus::Expired),
        Just(ValueStatus::Crashed),
        Just(ValueStatus::Cancelled),
        Just(ValueStatus::TimedOut),
    ];
    let policy = prop_oneof![Just(JoinPolicy::AllSucceeded), Just(JoinPolicy::AllEnded)];
    let ids = vec(id.clone(), 0..4);
    let outcome = proptest::sample::select(&Outcome::ALL[..]);
    let sessions = prop_oneof![
        any::<(u64, u64, u64, u64)>().prop_map(|(numbers, grants, sessions, evicted)| {
            RecordEvent::Counters {
                numbers,
                grants,
                sessions,
                evicted,
            }
        }),
        any::<u64>().prop_map(|steady| RecordEvent::ClockSet { steady }),
        any::<([u8; 16], u64)>().prop_map(|(id, ms)| RecordEvent::ClockBoot {
            boot: Boot { id, ms }
        }),
        (any::<(u64, [u8; 16], u64, u64)>(), text.clone()).prop_map(|(plain, name)| {
            let (number, session, heartbeat_ms, applied) = plain;
            RecordEvent::SessionOpened {
                number,
                session: SessionId(session),
                heartbeat_ms,
                applied,
                name,
            }
        }),
        any::<(u64, u64)>().prop_map(|(number, at)| RecordEvent::SessionLeft { number, at }),
        any::<u64>().prop_map(|number| RecordEvent::SessionForgotten { number }),
        any::<(u64, u64)>()
            .prop_map(|(session, through)| RecordEvent::Applied { session, through }),
        (any::<(u64, u64)>(), receipt).prop_map(|((session, seq), receipt)| {
            RecordEvent::Answered {
                session,
                seq,
                receipt,
            }
        }),
    ];
    let messages = prop_oneof![
        (head, bytes.clone()).prop_map(|(head, body)| RecordEvent::Message {
            head,
            extras: None,
            failure: None,
            body
        }),
        (any::<(u64, u64)>(), name.clone()).prop_map(|((number, source), queue)| {
            RecordEvent::Copied {
                number,
                source,
                queue,
            }
        }),
        (any::<u64>(), bytes.clone())
            .prop_map(|(number, note)| RecordEvent::Noted { number, note }),
        (any::<(u64, u64)>(), grant).prop_map(|((number, session), grant)| RecordEvent::Granted {
            number,
            session,
            grant
        }),
        any::<(u64, bool)>().prop_map(|(number, redelivered)| RecordEvent::Returned {
            number,
            redelivered
        }),
        (any::<u64>(), bytes.clone())
            .prop_map(|(number, reason)| RecordEvent::Crashed { number, reason }),
        (any::<u64>(), bytes.clone())
            .prop_map(|(number, reason)| RecordEvent::Suspected { number, reason }),
        (any::<u64>(), any::<bool>(), name.clone()).prop_map(|(number, kill, reason)| {
            RecordEvent::CancelAsked {
                number,
                kill,
                reason,
            }
        }),
        (any::<u64>(), change).prop_map(|(number, change)| RecordEvent::Moved { number, change }),
        any::<u64>().prop_map(|number| RecordEvent::Settled { number }),
        any::<u64>().prop_map(|number| RecordEvent::Replaced { number }),
        any::<u64>().prop_map(|number| RecordEvent::Unclaimed { number }),
        (any::<u64>(), key.clone(), any::<Option<u64>>()).prop_map(|(number, key, latest)| {
            RecordEvent::ClaimedUntilStart {
                number,
                key,
                latest,
            }
        }),
    ];
    let progress = (
        any::<([u64; 3], bool)>(),
        prop::sample::select(&WorkflowState::ALL[..]),
        any::<[Option<u64>; 2]>(),
    );
    let progress = progress.prop_map(|((counts, is_cancelled), outcome, times)| {
        let [ended_at, overdue_before] = times;
        let [succeeded, failed, cancelled] = counts;
        WorkflowProgress {
            is_cancelled,
            succeeded,
            failed,
            cancelled,
            outcome,
            ended_at,
            overdue_before,
        }
    });
    let workflows = prop_oneof![
        (id.clone(), prop::option::of(progress.clone()))
            .prop_map(|(workflow, progress)| RecordEvent::WorkflowChanged { workflow, progress }),
        (
            (id.clone(), any::<u64>(), any::<Option<u64>>()),
            (text.clone(), bytes.clone()),
            (prop::option::of(deadline), prop::option::of(id.clone())),
            progress,
        )
            .prop_map(|(plain, (name, description), optional, progress)| {
                let (workflow, opened_at, kept_ms) = plain;
                let (deadline, parent) = optional;
                RecordEvent::WorkflowOpened {
                    workflow,
                    head: WorkflowHead {
                        name,
                        description,
                        opened_at,
                        deadline,
                        kept_ms,
                        parent,
                    },
                    progress,
                }
            }),
    ];
    let others = prop_oneof![
        (
            key.clone(),
            status,
            bytes,
            name.clone(),
            any::<Option<u64>>()
        )
            .prop_map(
                |(key, status, body, group, expires_at)| RecordEvent::Stored {
                    key,
                    status,
                    body,
                    group,
                    expires_at,
                    run: None,
                }
            ),
        key.clone().prop_map(|key| RecordEvent::Removed { key }),
        key.clone().prop_map(|key| RecordEvent::Evicted { key }),
        (any::<u64>(), key).prop_map(|(number, key)| RecordEvent::Claimed { number, key }),
        (id.clone(), any::<u32>(), policy).prop_map(|(join, count, policy)| {
            RecordEvent::JoinOpened {
                join,
                count,
                policy,
            }
        }),
        (id.clone(), any::<u32>()).prop_map(|(join, index)| RecordEvent::Joined { join, index }),
        (id.clone(), any::<u32>())
            .prop_map(|(join, index)| RecordEvent::MemberNotNeeded { join, index }),
        (id.clone(), any::<u32>(), ids.clone()).prop_map(|(join, index, causes)| {
            RecordEvent::MemberFailed {
                join,
                index,
                causes: causes.into(),
            }
        }),
        (
            (
                id.clone(),
                any::<(u32, u32, u32, bool)>(),
                any::<(Option<u64>, Option<u64>)>()
            ),
            vec((id.clone(), any::<u32>()), 0..3),
            (
                any::<(bool, bool)>(),
                proptest::collection::btree_map(any::<u32>(), outcome, 0..3),
            ),
            ids,
        )
            .prop_map(|(plain, then, (needless, expects), causes)| {
                let (join, (count, max_failures, failures, is_released), (over_at, ttl_ms)) = plain;
                let then = then.into_iter();
                let then: Vec<Member> = then.map(|(join, index)| Member { join, index }).collect();
                // These are written with their number, which is then not 0.
                let causes = if failures > 0 { causes } else { Vec::new() };
                RecordEvent::JoinState {
                    join,
                    count,
                    policy: JoinPolicy::of_max_failures(max_failures),
                    over_at,
                    arrived: vec![(0, 5), (7, 1 << 63)].into(),
                    progress: JoinProgress {
                        failures,
                        is_released,
                        causes: causes.into(),
                        expects: expects.into_iter().collect(),
                        has_needless: needless.0,
                        is_needless: needless.1,
                        then: then.into(),
                        result_ttl_ms: ttl_ms,
                        unsealed: (count % 2 == 0).then_some(Growth {
                            workflow: join,
                            session: failures.into(),
                            grant: u64::MAX,
                            members: max_failures,
                        }),
                    },
                }
            }),
        (id.clone(), any::<u32>()).prop_map(|(join, by)| RecordEvent::JoinGrown { join, by }),
        (id.clone(), any::<u32>(), any::<bool>()).prop_map(|(join, count, cancelled)| {
            RecordEvent::JoinSealed {
                join,
                count,
                cancelled,
            }
        }),
        (
            id,
            any::<(bool, Option<u64>)>(),
            any::<Option<(u64, u64, u64)>>()
        )
            .prop_map(
                |(join, (released, at), renumbered)| RecordEvent::JoinEnded {
                    join,
                    released,
                    renumbered: renumbered.map(|(first, to, count)| Renumbered {
                        first,
                        to,
                        count
                    }),
                    at,
                }
            ),
        (name.clone(), any::<bool>())
            .prop_map(|(queue, paused)| RecordEvent::Paused { queue, paused }),
        (name, any::<(Option<u64>, Option<u64>)>(), any::<bool>()).prop_map(
            |(queue, (max_length, max_bytes), drops)| RecordEvent::Limited {
                queue,
                limits: QueueLimits {
                    max_length,
                    max_bytes,
                    overflow: match drops {
                        true => Overflow::DropOldest,
                        false => Overflow::Reject,
                    },
                },
            }
        ),
    ];
    prop_oneof![sessions, messages, others, workflows, schedules()]
}

fn plan() -> impl Strategy<Value = SchedulePlan> {
    let rhythm = prop_oneof![
        ".{0,9}".prop_map(Rhythm::Cron),
        any::<u64>().prop_map(Rhythm::Every),
        any::<u64>().prop_map(Rhythm::At),
    ];
    let times = (
        rhythm,
        ".{0,9}",
        any::<(u64, u64)>(),
        prop::sample::select(&Overlap::ALL[..]),
        prop::sample::select(&CatchUp::ALL[..]),
    );
    let message = (
        ".{0,9}",
        0..=penstock_message::HIGHEST_PRIORITY,
        any::<(u8, Option<u64>, Option<u64>, Option<u64>)>(),
        vec(any::<u8>(), 0..40),
    );
    (times, ".{0,9}", message).prop_map(|(times, queue, message)| {
        let (rhythm, zone, (jitter_ms, window_ms), overlap, catch_up) = times;
        let (task, priority, (max_deliveries, expires_ms, result_ttl_ms, timeout_ms), body) =
            message;
        let extras = Extras {
            timeout_ms,
            ..Extras::default()
        };
        SchedulePlan {
            timing: ScheduleTiming {
                rhythm,
                zone,
                jitter_ms,
            },
            overlap,
            catch_up,
            window_ms,
            queue,
            message: Message {
                id: MessageId::default(),
                task,
                priority,
                expires_at: expires_ms.map(Due::AfterMs),
                result_ttl_ms,
                max_deliveries,
                attempt: 0,
                crashes: 0,
                enqueued_at: 0,
                notes: Vec::new(),
                body: body.into(),
                extras: extras.boxed(),
            },
        }
    })
}

fn schedules() -> impl Strategy<Value = RecordEvent<'static>> {
    let name = (".{0,9}", ".{0,9}").prop_map(|(app, name)| ScheduleName { app, name });
    let version = prop_oneof![
        Just(AppVersion::Unnamed),
        any::<u64>().prop_map(AppVersion::Number),
        ".{0,9}".prop_map(AppVersion::Text),
    ];
    let generation = (version, any::<u64>()).prop_map(|(version, started_at)| AppRelease {
        version,
        started_at,
    });
    let head = (
        prop::option::of((plan(), generation)),
        prop::option::of(plan()),
        any::<(bool, u64)>(),
    );
    let head = head.prop_map(|(declared, set, (is_paused, anchor))| ScheduleHead {
        declared,
        set,
        is_paused,
        anchor,
    });
    let progress = (
        any::<(u64, Option<(u64, [u8; 16])>, Option<u64>, [u64; 3])>(),
        prop::option::of((any::<u64>(), prop::sample::select(&Skipped::ALL[..]))),
    );
    let progress = progress.prop_map(|((after, last, queued, [fired, skips, missed]), skipped)| {
        ScheduleProgress {
            after,
            last: last.map(|(time, job)| (time, MessageId(job))),
            queued,
            skipped,
            tally: ScheduleTally {
                fired,
                skipped: skips,
                missed,
            },
        }
    });
    prop_oneof![
        (name.clone(), head, progress.clone()).prop_map(|(name, head, progress)| {
            RecordEvent::ScheduleSet {
                schedule: Cow::Owned(name),
                head: Cow::Owned(head),
                progress,
            }
        }),
        (name, prop::option::of(progress)).prop_map(|(name, progress)| {
            RecordEvent::ScheduleFired {
                schedule: Cow::Owned(name),
                progress,
            }
        }),
    ]
}

/// Returns the same names each time.
fn names() -> (Interner, Vec<Name>) {
    let mut names = Interner::default();
    let all = ["default", "mail", "shop.mail.send", "", "dead", "ü"].map(|text| names.intern(text));
    (names, all.to_vec())
}

fn written(names: &Interner, events: &[RecordEvent<'_>]) -> Vec<u8> {
    let mut writer = RecordWriter::default();
    writer.stamp(3, 1_700_000_000_000);
    for event in events {
        writer.push(names, event);
    }
    writer.take()
}

fn read<'a>(bytes: &'a [u8], names: &mut Interner) -> Result<Vec<RecordEvent<'a>>, RecordError> {
    let mut reader = RecordReader::new(bytes)?;
    let mut events = Vec::new();
    while let Some(event) = reader.next(names)? {
        events.push(event);
    }
    Ok(events)
}

proptest! {
    #[test]
    fn what_is_written_is_read(events in vec(event(), 1..12)) {
        let (mut names, _) = names();
        let bytes = written(&names, &events);
        prop_assert_eq!(read(&bytes, &mut names).unwrap(), events);
    }

    #[test]
    fn what_is_cut_short_or_changed_is_an_error_or_a_record(
        events in vec(event(), 1..6),
        at in any::<prop::sample::Index>(),
        with in any::<u8>(),
    ) {
        let (mut names, _) = names();
        let mut bytes = written(&names, &events);
        let at = at.index(bytes.len());
        // The cut is between two events, or it is an error.
        if let Ok(fewer) = read(&bytes[..at], &mut names) {
            prop_assert!(events.starts_with(&fewer));
        }
        bytes[at] = with;
        let _ = read(&bytes, &mut names);
    }

    #[test]
    fn any_bytes_are_an_error_or_a_record(bytes in vec(any::<u8>(), 0..200)) {
        let (mut names, _) = names();
        let _ = read(&bytes, &mut names);
        let mut with_header = vec![VERSION, 1, 1];
        with_header.extend_from_slice(&bytes);
        let _ = read(&with_header, &mut names);
    }
}

#[test]
fn a_newer_version_and_a_newer_event_are_told_apart_from_damage() {
    let mut names = Interner::default();
    assert_eq!(
        read(&[3, 0, 0], &mut names),
        Err(RecordError::UnknownVersion(3))
    );
    assert_eq!(
        read(&[VERSION, 0, 0, 99], &mut names),
        Err(RecordError::UnknownEvent { tag: 99, at: 3 })
    );
    assert_eq!(
        read(&[VERSION, 0], &mut names),
        Err(RecordError::Truncated { at: 2 })
    );
}

#[test]
fn a_busy_broker_writes_little_beside_the_bodies() {
    let (names, all) = names();
    let cost = |make: &dyn Fn(u64) -> RecordEvent<'static>| {
        let events: Vec<_> = (0..64).map(|index| make(1_000_000 + index)).collect();
        written(&names, &events).len() / 64
    };
    let time = 1_700_000_000_000;
    let message = |number| RecordEvent::Message {
        head: MessageHead {
            number,
            id: MessageId([7; 16]),
            queue: all[0],
            task: all[2],
            priority: 4,
            max_deliveries: 3,
            crashes: 0,
            redelivered: false,
            has_copies: false,
            attempt: 0,
            generation: 0,
            attempts_before: 0,
            enqueued_at: time,
            expires_at: None,
            result_ttl_ms: Some(86_400_000),
            state: RecordedState::Ready,
        },
        extras: None,
        failure: None,
        body: &[],
    };
    let granted = |number| RecordEvent::Granted {
        number,
        session: 7,
        grant: Grant {
            epoch: 3,
            number: number + 500,
            started_at: time,
        },
    };
    assert_eq!(cost(&message), 29);
    assert_eq!(cost(&granted), 6);
    assert_eq!(cost(&|number| RecordEvent::Settled { number }), 2);
}

/// Brokers are recovered from these records in `tests/scripts/golden.rs`.
#[test]
fn the_golden_records_have_every_kind_of_event() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut missing = tag::ALL.to_vec();
    let folders = ["version-1", "version-2"].map(|folder| root.join(folder));
    for file in folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).unwrap())
    {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        let (_, rest) = text.split_once("== records\n").unwrap();
        let (records, _) = rest.split_once("== then\n").unwrap();
        for line in records.lines().filter(|line| *line != "reclaimed") {
            let digits = |at| u8::from_str_radix(&line[at..at + 2], 16).unwrap();
            let bytes: Vec<u8> = (0..line.len()).step_by(2).map(digits).collect();
            let mut names = Interner::default();
            let mut reader = RecordReader::new(&bytes).unwrap();
            loop {
                let begin = reader.at();
                if reader.next(&mut names).unwrap().is_none() {
                    break;
                }
                missing.retain(|tag| *tag != bytes[begin]);
            }
        }
    }
    assert!(
        missing.is_empty(),
        "no golden record has an event of tag {missing:?}"
    );
}
