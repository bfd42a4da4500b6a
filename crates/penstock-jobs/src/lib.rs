//! Transactions for the outcomes of jobs. Pure functions: no IO, no clock, no state.
//!
//! ```text
//!     succeeded    Ack, Put(result)
//!     retry        Move(attempt + 1, note, due)
//!     deferred     Move(note, due): nothing is counted
//!     failed       Fail(error, note, why): the broker keeps the job, for people to look into
//!     crashed      Release(crashed): the engine counts it, and fails the job when it was one too many
//!     returned     Release(returned): nothing is counted
//! ```
//!
//! Each transaction begins with an operation on the lease, and such an operation is a guard: an attempt
//! that was fenced off changes nothing at all.

use bytes::Bytes;
use penstock_message::{
    Delivery, Due, Failure, HeaderPatch, Key, Lease, Op, ReleaseReason, Tx, Value, ValueStatus,
};

/// Part of a delivery that settling needs; kept by a worker in place of the whole message.
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
    /// The job returned. `value`: its encoded result, if it has one that anybody may read.
    Succeeded { value: Option<Bytes>, cost_us: u64 },
    /// The job raised, and shall run again. `note`: the encoded error.
    Retry {
        delay_ms: u64,
        note: Bytes,
        cost_us: u64,
    },
    /// This worker can't run the job, and one of another version may. `note`: the encoded error.
    Deferred {
        delay_ms: u64,
        note: Bytes,
        cost_us: u64,
    },
    /// The job raised for the last time. `value`: the encoded error for any client that asks for the result;
    /// `note`: the same for people who look into failed jobs; `failure`: what these are listed by.
    Failed {
        value: Option<Bytes>,
        note: Bytes,
        failure: Failure,
        cost_us: u64,
    },
    /// The process that ran it died; the text says how, for a person.
    Crashed { reason: String },
    /// The job never ran, or was stopped in order.
    Returned,
}

/// Returns the transaction that settles a delivery. Values are stored only for jobs that keep results.
pub fn settle(delivery: &DeliveryHead, outcome: Outcome) -> Tx {
    let lease = delivery.lease;
    match outcome {
        Outcome::Succeeded { value, cost_us } => {
            let mut ops = vec![Op::Ack { lease, cost_us }];
            ops.extend(put_result(delivery, value));
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
        Outcome::Returned => vec![Op::Release {
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

/// Part of a delivery that decides about a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashHead {
    /// Deliveries that ended in a crash before this one.
    pub crashes: u8,
    /// The number of deliveries that may end in a crash; the last of them ends the job.
    pub max_deliveries: u8,
}

/// Consequence of a crash for its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashEnd {
    /// The job goes back to its place, with this many crashes.
    Again { crashes: u8 },
    /// The crash was one too many.
    Failed { crashes: u8 },
}

/// Judges a crash: the process died under the job, or its worker was lost. Every engine goes by this, so a job has
/// as many chances on each.
pub fn crashed(head: CrashHead) -> CrashEnd {
    let crashes = head.crashes.saturating_add(1);
    match crashes < head.max_deliveries {
        true => CrashEnd::Again { crashes },
        false => CrashEnd::Failed { crashes },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_message::MessageId;

    /// Describes each operation in words, on a line of its own.
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
    fn a_job_crashes_as_often_as_it_may_be_delivered() {
        let check = |crashes, max_deliveries, expected| {
            let head = CrashHead {
                crashes,
                max_deliveries,
            };
            assert_eq!(crashed(head), expected, "{head:?}");
        };
        check(0, 3, CrashEnd::Again { crashes: 1 });
        check(1, 3, CrashEnd::Again { crashes: 2 });
        check(2, 3, CrashEnd::Failed { crashes: 3 });
        check(0, 1, CrashEnd::Failed { crashes: 1 });
        check(7, 3, CrashEnd::Failed { crashes: 8 });
        check(254, 255, CrashEnd::Failed { crashes: 255 });
        check(255, 255, CrashEnd::Failed { crashes: 255 });
    }
}
