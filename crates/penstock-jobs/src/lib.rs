//! Transactions for the outcomes of jobs. Pure functions: no IO, no clock, no state.
//!
//! ```text
//!     succeeded    Ack, Put(result)
//!     replaced     Replace, and the steps that replace the job
//!     spawned      as succeeded, and separate steps
//!     retry        Move(attempt + 1, note, due)
//!     deferred     Move(note, due): nothing is counted
//!     cancelled    Release(returned): the broker, which has asked for it, ends the job
//!     failed       Fail(error, note, why): the broker keeps the job, for people to inspect
//!     crashed      Release(crashed): the engine counts it, and fails the job after too many
//!     suspected    Release(suspected): the same, counted separately; and the job runs alone next
//!     returned     Release(returned): nothing is counted
//! ```
//!
//! Each transaction begins with an operation on the lease. Such an operation is a guard: a fenced-off attempt changes
//! nothing at all.
//!
//! # A death charges the guilty
//!
//! A process may run many jobs when it dies. [`blame`] decides which of them is charged: the only one, or the one that
//! the system names. If nobody knows, each of them is a *suspect*. A guilty job or a suspect runs alone from then on
//! ([`runs_alone`]), in a process without others: if that dies too, no doubt is left. The loss of a whole worker is a
//! crash of all jobs that it held, and says nothing about any of them.
//!
//! After its first crash a job runs again at once: usually a deployment or the machine is the cause. After each further
//! crash it waits ([`delay_after_crash_ms`]), so that a lack of memory has time to pass before the job has used up its
//! attempts.

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{
    Delivery, Due, Failure, HeaderPatch, Key, Lease, Message, Op, ReleaseReason, Tx, Value,
    ValueStatus,
};

/// Part of a delivery that settling needs; a worker keeps it instead of the whole message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryHead {
    pub lease: Lease,
    pub task: String,
    pub queue: String,
    /// Time for which the result is kept; `None`: nobody reads it, so none is stored.
    pub result_ttl_ms: Option<u64>,
    /// Attempts that ended in an error before this one.
    pub attempt: u32,
    /// Deliveries that ended in a crash before this one.
    pub crashes: u8,
    pub max_deliveries: u8,
    pub redelivered: bool,
}

impl From<&Delivery> for DeliveryHead {
    fn from(delivery: &Delivery) -> Self {
        let message = &delivery.message;
        Self {
            lease: delivery.lease,
            task: message.task.clone(),
            queue: delivery.queue.clone(),
            result_ttl_ms: message.result_ttl_ms,
            attempt: message.attempt,
            crashes: message.crashes,
            max_deliveries: message.max_deliveries,
            redelivered: delivery.redelivered,
        }
    }
}

/// Outcome of one run of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The job returned. `value`: its encoded result, if anybody may read it.
    Succeeded { value: Option<Bytes>, cost_us: u64 },
    /// The job returned steps that replace it: operations as described at [`Op::Replace`].
    Replaced { steps: Vec<Op>, cost_us: u64 },
    /// Like `Succeeded`, with further jobs.
    Spawned {
        value: Option<Bytes>,
        steps: Vec<Op>,
        cost_us: u64,
    },
    /// The job raised and will run again. `note`: the encoded error.
    Retry {
        delay_ms: u64,
        note: Bytes,
        cost_us: u64,
    },
    /// This worker can't run the job, but one of another version may. `note`: the encoded error.
    Deferred {
        delay_ms: u64,
        note: Bytes,
        cost_us: u64,
    },
    /// The job raised in its last attempt. `value`: the encoded error for any client that asks for the result; `note`:
    /// the same for people who look into failed jobs; `failure`: fields by which failed jobs are listed.
    Failed {
        value: Option<Bytes>,
        note: Bytes,
        failure: Failure,
        cost_us: u64,
    },
    /// The job was cancelled while it ran, and has stopped.
    Cancelled,
    /// The process that ran it died; the text describes how, for people.
    Crashed { reason: String },
    /// The process that ran it and others died, and the cause is unknown.
    Suspected { reason: String },
    /// The job never ran, or was stopped cleanly.
    Returned,
}

/// Splits steps into the operations that add members to the job's group, which come before its end, and the others.
fn growth_and_rest(steps: Vec<Op>) -> (Vec<Op>, Vec<Op>) {
    let grows = |op: &Op| matches!(op, Op::Grow { .. });
    steps.into_iter().partition(grows)
}

/// Returns the transaction that settles a delivery. Values are stored only for jobs that keep results.
pub fn settle(delivery: &DeliveryHead, outcome: Outcome) -> Tx {
    let lease = delivery.lease;
    match outcome {
        Outcome::Succeeded { value, cost_us } => {
            let ack = Op::Ack { lease, cost_us };
            match put_result(delivery, value) {
                Some(put) => vec![ack, put],
                None => vec![ack],
            }
            .into()
        }
        Outcome::Replaced { steps, cost_us } => {
            let (mut ops, steps) = growth_and_rest(steps);
            ops.push(Op::Replace { lease, cost_us });
            ops.extend(steps);
            ops.into()
        }
        Outcome::Spawned {
            value,
            steps,
            cost_us,
        } => {
            let (mut ops, steps) = growth_and_rest(steps);
            ops.push(Op::Ack { lease, cost_us });
            ops.extend(put_result(delivery, value));
            ops.extend(steps);
            ops.into()
        }
        Outcome::Retry {
            delay_ms,
            note,
            cost_us,
        } => run_later(lease, true, delay_ms, note, cost_us),
        Outcome::Deferred {
            delay_ms,
            note,
            cost_us,
        } => run_later(lease, false, delay_ms, note, cost_us),
        Outcome::Failed {
            value,
            note,
            failure,
            cost_us,
        } => vec![Op::Fail {
            lease,
            value: value.filter(|_| delivery.result_ttl_ms.is_some()),
            note,
            failure,
            cost_us,
        }]
        .into(),
        Outcome::Crashed { reason } => vec![Op::Release {
            lease,
            reason: ReleaseReason::Crashed(reason),
        }]
        .into(),
        Outcome::Suspected { reason } => vec![Op::Release {
            lease,
            reason: ReleaseReason::Suspected(reason),
        }]
        .into(),
        Outcome::Returned | Outcome::Cancelled => vec![Op::Release {
            lease,
            reason: ReleaseReason::Returned,
        }]
        .into(),
    }
}

fn run_later(lease: Lease, next_attempt: bool, delay_ms: u64, note: Bytes, cost_us: u64) -> Tx {
    vec![Op::Move {
        lease,
        queue: None,
        due: (delay_ms > 0).then_some(Due::AfterMs(delay_ms)),
        patch: HeaderPatch {
            next_attempt,
            note: Some(note),
            expires_at: None,
        },
        cost_us,
    }]
    .into()
}

fn put_result(delivery: &DeliveryHead, body: Option<Bytes>) -> Option<Op> {
    Some(Op::Put {
        key: Key::Result(delivery.lease.message),
        value: Value::new(ValueStatus::Succeeded, body?),
        ttl_ms: Some(delivery.result_ttl_ms?),
        group: delivery.task.clone(),
    })
}

/// Share of a job in the death of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    Guilty,
    /// Either this job or another job of its process is guilty.
    Suspected,
}

/// Judges a job that was running when its process died; `None`: it is innocent. `begun`: the number of running jobs.
/// `is_named`: whether the system named this one; `None`: it named none.
pub fn blame(begun: usize, is_named: Option<bool>) -> Option<Blame> {
    match is_named {
        Some(true) => Some(Blame::Guilty),
        Some(false) if planted!("neighbours-burned") => Some(Blame::Guilty),
        Some(false) => None,
        None if begun > 1 => Some(Blame::Suspected),
        None => Some(Blame::Guilty),
    }
}

/// Returns the job that is guilty of its process's out-of-memory death, judged by the usual peak of each task: the one
/// that usually needs at least twice as much as any other. `None`: unknown.
pub fn guilty_of_memory(peaks: &[Option<u64>]) -> Option<usize> {
    let known: Vec<u64> = peaks.iter().copied().collect::<Option<_>>()?;
    let (guilty, most) = known.iter().enumerate().max_by_key(|(_, peak)| **peak)?;
    let mut others = known.iter().enumerate();
    let is_clear = others.all(|(other, peak)| other == guilty || peak.saturating_mul(2) <= *most);
    (is_clear && *most > 0).then_some(guilty)
}

/// Returns the outcome of a job whose process died. `reason` describes how, for people.
pub fn lost(blame: Option<Blame>, max_deliveries: u8, reason: &str) -> Outcome {
    match blame {
        Some(Blame::Guilty) => Outcome::Crashed {
            reason: reason.to_owned(),
        },
        Some(Blame::Suspected) => Outcome::Suspected {
            reason: format!("{reason}; it ran other jobs too, and any of them may be guilty"),
        },
        // A job that may never run twice has already run.
        None if max_deliveries == 1 => Outcome::Crashed {
            reason: "its process was lost through another job's fault, and it may not run again"
                .to_owned(),
        },
        None => Outcome::Returned,
    }
}

/// Whether a job must run in a process without others: it has killed one, or may have.
pub fn runs_alone(message: &Message) -> bool {
    let extras = message.extras.as_deref();
    let is_suspect = extras.is_some_and(|extras| extras.suspects > 0);
    is_suspect && !planted!("suspect-not-isolated")
}

/// Number of deaths at which a job fails, even if no crash was its own: a machine that kills all its processes must not
/// receive the same jobs forever.
pub const MOST_SUSPECTS: u8 = 3;

/// Fields of a delivery that decide about a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashHead {
    /// Deliveries that ended in a crash before this one.
    pub crashes: u8,
    /// Deliveries before this one in which it was a suspect; at least 1 for a job that was guilty.
    pub suspects: u8,
    /// Number of deliveries that may end in a crash; the last of them ends the job.
    pub max_deliveries: u8,
}

/// Consequence of a crash for its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashEnd {
    /// The job runs again with these counts: at once and in its old place, or after this delay.
    Again {
        crashes: u8,
        suspects: u8,
        delay_ms: u64,
    },
    /// The job has crashed too often. The crash is counted in any case.
    Failed { crashes: u8 },
}

/// Judges a crash: the process died under the job, or its worker was lost, for which nobody is blamed. Every engine
/// uses this, so a job has equally many attempts on each.
pub fn crashed(head: CrashHead, blame: Option<Blame>) -> CrashEnd {
    let CrashHead {
        crashes,
        suspects,
        max_deliveries,
    } = head;
    let counted = crashes.saturating_add(1);
    let suspected = suspects.saturating_add(1);
    let goes_on = match blame {
        // The job has run. A job with one delivery may not run again, whichever job is guilty.
        Some(Blame::Suspected) => max_deliveries > 1 && suspected < MOST_SUSPECTS,
        Some(Blame::Guilty) | None => counted < max_deliveries,
    };
    if !goes_on {
        return CrashEnd::Failed { crashes: counted };
    }
    let delay_ms = delay_after_crash_ms(counted);
    let (crashes, suspects, delay_ms) = match blame {
        None => (counted, suspects, delay_ms),
        Some(Blame::Guilty) => (counted, suspects.max(1), delay_ms),
        // Nobody knows whether it is guilty, so it runs alone.
        Some(Blame::Suspected) => (crashes, suspected, 0),
    };
    CrashEnd::Again {
        crashes,
        suspects,
        delay_ms,
    }
}

/// Returns the delay before a job runs again after its n-th crash, counted from 1.
pub fn delay_after_crash_ms(crashes: u8) -> u64 {
    match crashes {
        0 | 1 => 0,
        2 => 1_000,
        3 => 4_000,
        4 => 16_000,
        _ => 60_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_message::{Extras, MessageId};

    /// Describes each operation in words, one per line.
    fn settled(keeps_result: bool, outcome: Outcome) -> String {
        let delivery = DeliveryHead {
            lease: Lease {
                message: MessageId([7; 16]),
                epoch: 1,
                grant: 2,
            },
            task: "mail.send".to_owned(),
            queue: "mail".to_owned(),
            result_ttl_ms: keeps_result.then_some(1000),
            attempt: 0,
            crashes: 0,
            max_deliveries: 3,
            redelivered: false,
        };
        let lines: Vec<String> = settle(&delivery, outcome)
            .ops
            .iter()
            .map(|op| match op {
                Op::Ack { lease, cost_us } if *lease == delivery.lease => format!("ack {cost_us} us"),
                Op::Put {
                    key: Key::Result(id),
                    value,
                    ttl_ms: Some(ttl_ms),
                    group,
                } if *id == delivery.lease.message => {
                    format!("put {:?} {:?} for {ttl_ms} ms in {group}", value.status, value.body)
                }
                Op::Move {
                    lease,
                    queue,
                    due,
                    patch,
                    cost_us,
                } if *lease == delivery.lease => format!(
                    "move to {}, due {due:?}, next attempt {}, note {:?}, expires {:?}, {cost_us} us",
                    queue.as_deref().unwrap_or("its queue"),
                    patch.next_attempt,
                    patch.note,
                    patch.expires_at
                ),
                Op::Fail {
                    lease,
                    value,
                    note,
                    failure,
                    cost_us,
                } if *lease == delivery.lease => format!(
                    "fail with {value:?} and {note:?}: {} {:x}, {cost_us} us",
                    failure.class, failure.fingerprint
                ),
                Op::Release { lease, reason } if *lease == delivery.lease => format!("release {reason:?}"),
                Op::Replace { lease, cost_us } if *lease == delivery.lease => format!("replace {cost_us} us"),
                Op::Pause { queue } => format!("pause {queue}"),
                Op::Grow { .. } => "grow".to_owned(),
                other => panic!("a settlement has no such operation: {other:?}"),
            })
            .collect();
        lines.join("; ")
    }

    #[test]
    fn each_outcome_becomes_its_transaction() {
        let value = || Some(Bytes::from_static(b"v"));
        let note = || Bytes::from_static(b"n");
        let check = |keeps_result, outcome, expected: &str| {
            assert_eq!(settled(keeps_result, outcome), expected);
        };
        check(
            true,
            Outcome::Succeeded {
                value: value(),
                cost_us: 9,
            },
            r#"ack 9 us; put Succeeded b"v" for 1000 ms in mail.send"#,
        );
        check(
            false,
            Outcome::Succeeded {
                value: value(),
                cost_us: 9,
            },
            "ack 9 us",
        );
        check(
            true,
            Outcome::Succeeded {
                value: None,
                cost_us: 9,
            },
            "ack 9 us",
        );
        // A new member of the job's group comes before the end of the job, which may complete the group.
        let steps = || {
            vec![
                Op::Pause {
                    queue: "any".to_owned(),
                },
                Op::Grow {
                    job: MessageId([7; 16]),
                    member: MessageId([8; 16]),
                    outer: false,
                },
            ]
        };
        check(
            true,
            Outcome::Replaced {
                steps: steps(),
                cost_us: 9,
            },
            "grow; replace 9 us; pause any",
        );
        check(
            true,
            Outcome::Spawned {
                value: value(),
                steps: steps(),
                cost_us: 9,
            },
            r#"grow; ack 9 us; put Succeeded b"v" for 1000 ms in mail.send; pause any"#,
        );
        check(
            true,
            Outcome::Retry {
                delay_ms: 250,
                note: note(),
                cost_us: 9,
            },
            r#"move to its queue, due Some(AfterMs(250)), next attempt true, note Some(b"n"), expires None, 9 us"#,
        );
        check(
            true,
            Outcome::Retry {
                delay_ms: 0,
                note: note(),
                cost_us: 9,
            },
            r#"move to its queue, due None, next attempt true, note Some(b"n"), expires None, 9 us"#,
        );
        check(
            true,
            Outcome::Deferred {
                delay_ms: 30_000,
                note: note(),
                cost_us: 9,
            },
            r#"move to its queue, due Some(AfterMs(30000)), next attempt false, note Some(b"n"), expires None, 9 us"#,
        );
        let failure = || Failure {
            class: "ValueError".to_owned(),
            message: "it is odd".to_owned(),
            fingerprint: 0xf1,
            preview: Bytes::new(),
        };
        let failed = || Outcome::Failed {
            value: value(),
            note: note(),
            failure: failure(),
            cost_us: 9,
        };
        check(
            true,
            failed(),
            r#"fail with Some(b"v") and b"n": ValueError f1, 9 us"#,
        );
        check(
            false,
            failed(),
            r#"fail with None and b"n": ValueError f1, 9 us"#,
        );
        check(true, Outcome::Cancelled, "release Returned");
        check(
            true,
            Outcome::Crashed {
                reason: "killed by signal 9".to_owned(),
            },
            r#"release Crashed("killed by signal 9")"#,
        );
        check(true, Outcome::Returned, "release Returned");
    }

    #[test]
    fn the_job_that_needs_far_more_memory_than_any_other_is_guilty_of_the_lack() {
        let check = |peaks: &[Option<u64>], expected| {
            assert_eq!(guilty_of_memory(peaks), expected, "{peaks:?}");
        };
        check(&[], None);
        check(&[Some(40), Some(80), Some(40)], Some(1));
        check(&[Some(40), Some(79)], None);
        check(&[Some(80), Some(80), Some(1)], None);
        check(&[Some(80), None], None);
        check(&[Some(0), Some(0)], None);
        check(&[Some(0), Some(5)], Some(1));
    }

    #[test]
    fn a_job_crashes_as_often_as_it_may_be_delivered() {
        let check = |crashes, max_deliveries, expected| {
            let head = |suspects| CrashHead {
                crashes,
                suspects,
                max_deliveries,
            };
            let again = |suspects| match expected {
                Some(crashes) => CrashEnd::Again {
                    crashes,
                    suspects,
                    delay_ms: delay_after_crash_ms(crashes),
                },
                None => CrashEnd::Failed {
                    crashes: crashes.saturating_add(1),
                },
            };
            // A guilty job is under suspicion from then on; a job whose worker was lost is not.
            let guilty = Some(Blame::Guilty);
            assert_eq!(crashed(head(0), guilty), again(1), "{:?}", head(0));
            assert_eq!(crashed(head(2), guilty), again(2), "{:?}", head(2));
            assert_eq!(crashed(head(0), None), again(0), "{:?}", head(0));
            assert_eq!(crashed(head(2), None), again(2), "{:?}", head(2));
        };
        check(0, 3, Some(1));
        check(1, 3, Some(2));
        check(2, 3, None);
        check(0, 1, None);
        check(7, 3, None);
        check(254, 255, None);
        check(255, 255, None);
    }

    #[test]
    fn a_suspect_is_not_charged_until_it_was_near_three_deaths() {
        let check = |(crashes, suspects), max_deliveries, expected| {
            let head = CrashHead {
                crashes,
                suspects,
                max_deliveries,
            };
            assert_eq!(crashed(head, Some(Blame::Suspected)), expected, "{head:?}");
        };
        // The job runs again at once, alone.
        let again = |crashes, suspects| CrashEnd::Again {
            crashes,
            suspects,
            delay_ms: 0,
        };
        check((0, 0), 3, again(0, 1));
        check((0, 1), 3, again(0, 2));
        check((0, 2), 3, CrashEnd::Failed { crashes: 1 });
        check((0, 255), 255, CrashEnd::Failed { crashes: 1 });
        // Earlier crashes of its own do not count here.
        check((1, 0), 2, again(1, 1));
        check((0, 0), 1, CrashEnd::Failed { crashes: 1 });
    }

    #[test]
    fn a_job_runs_again_at_once_after_its_first_crash_and_later_after_each_further_one() {
        let delays: Vec<u64> = (0..8).map(delay_after_crash_ms).collect();
        assert_eq!(delays, [0, 0, 1_000, 4_000, 16_000, 60_000, 60_000, 60_000]);
        assert_eq!(delay_after_crash_ms(u8::MAX), 60_000);
    }

    #[test]
    fn one_job_is_guilty_a_named_one_clears_the_others_and_else_all_are_suspects() {
        assert_eq!(blame(1, None), Some(Blame::Guilty));
        assert_eq!(blame(20, Some(true)), Some(Blame::Guilty));
        assert_eq!(blame(20, Some(false)), None);
        assert_eq!(blame(20, None), Some(Blame::Suspected));
        let check = |blame, max_deliveries, expected: &str| {
            let outcome = lost(blame, max_deliveries, "exit code 3");
            assert_eq!(settled(true, outcome), expected);
        };
        let guilty = r#"release Crashed("exit code 3")"#;
        check(Some(Blame::Guilty), 3, guilty);
        check(Some(Blame::Guilty), 1, guilty);
        let suspected = r#"release Suspected("exit code 3; it ran other jobs too, and any of them may be guilty")"#;
        check(Some(Blame::Suspected), 3, suspected);
        check(None, 3, "release Returned");
        check(
            None,
            1,
            r#"release Crashed("its process was lost through another job's fault, and it may not run again")"#,
        );
    }

    #[test]
    fn a_job_that_was_guilty_or_a_suspect_runs_alone() {
        let message = |crashes, suspects| Message {
            id: MessageId([7; 16]),
            task: "mail.send".to_owned(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::new(),
            extras: Extras {
                suspects,
                generation: 1,
                ..Extras::default()
            }
            .boxed(),
        };
        let mut plain = message(0, 0);
        plain.extras = None;
        assert!(!runs_alone(&plain) && !runs_alone(&message(0, 0)));
        assert!(runs_alone(&message(0, 1)) && runs_alone(&message(1, 1)));
        assert!(!runs_alone(&message(1, 0)), "only its worker was lost");
    }
}
