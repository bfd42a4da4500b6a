//! Members of a large group take little more memory than plain jobs.

use penstock_message::{
    Extras, Hold, InputShape, Inputs, JoinId, Key, Lease, Member, Unsealed, Value, ValueStatus,
};

use super::*;

const MEMBERS: u32 = 100_000;
/// Arguments of each job, and its result.
const ARGUMENTS: &[u8] = b"some arguments of a call";
const RESULT: &[u8] = b"its result";
const KEPT_MS: u64 = 24 * 3_600_000;

/// Maximum bytes that a member takes beyond a plain job: while it waits, and once it has arrived.
const WAITING_BYTES: f64 = 16.0;
const ARRIVED_BYTES: f64 = 12.0;

/// Bytes in use for each job.
struct MemoryCost {
    waiting: f64,
    /// Bytes after all jobs have ended, before the job that waits for the group has begun.
    ended: f64,
}

/// Sends and runs jobs, either plain or as a group that another job waits for. `keeps`: with results.
fn measure(is_group: bool, keeps: bool) -> MemoryCost {
    let options = BrokerOptions {
        resident_bodies_bytes: Some(0),
        results_cap_bytes: u64::MAX,
        ..BrokerOptions::default()
    };
    let mut world = MeasuredBroker::new(options);
    let join = JoinId::new_join(IdSource {
        unix_ms: world.now.wall_ms,
        random: [9; 10],
    });
    if is_group {
        world.hold(join);
    }
    let before = in_use();
    for first in (0..MEMBERS).step_by(BATCH as usize) {
        let jobs = (first..first + BATCH)
            .map(|index| world.member(is_group.then_some(join), index, keeps));
        let jobs: Vec<Op> = jobs.collect();
        world.commit_one(jobs);
    }
    if is_group {
        world.commit_one(vec![Op::Seal {
            join,
            count: MEMBERS,
        }]);
    }
    let per_job = |bytes: usize| bytes as f64 / f64::from(MEMBERS);
    let waiting = per_job(in_use() - before);
    let mut ran = 0;
    while ran < MEMBERS {
        let delivered = world.consume(vec!["queue".to_owned()]);
        let delivered = world.with_bodies(delivered);
        ran += delivered.len() as u32;
        let acks = delivered.into_iter().map(|lease| {
            let put = keeps.then(|| Op::Put {
                key: Key::Result(lease.message),
                value: Value::new(ValueStatus::Succeeded, Bytes::copy_from_slice(RESULT)),
                ttl_ms: Some(KEPT_MS),
                group: "task".to_owned(),
            });
            let ack = Op::Ack { lease, cost_us: 20 };
            Tx::from(put.into_iter().chain([ack]).collect::<Vec<Op>>())
        });
        let acks = acks.collect();
        world.commit_all(acks);
    }
    let ended = per_job(in_use().saturating_sub(before));
    MemoryCost { waiting, ended }
}

impl MeasuredBroker {
    fn commit_one(&mut self, ops: Vec<Op>) {
        self.commit_all(vec![Tx::from(ops)]);
    }

    fn commit_all(&mut self, txs: Vec<Tx>) {
        let first_seq = self.seq + 1;
        self.seq += txs.len() as u64;
        let outputs = self.turn(Input::Commit {
            conn: CLIENT,
            first_seq,
            durability: Durability::Disk,
            txs,
        });
        for output in outputs {
            if let Output::Confirm { receipts, .. } = output {
                assert_eq!(receipts, [], "all are applied");
            }
        }
    }

    fn hold(&mut self, join: JoinId) {
        let Op::Publish { mut message, .. } = self.job("body".to_owned(), "gather".to_owned())
        else {
            unreachable!()
        };
        message.extras = Extras {
            inputs: Some(Inputs {
                join,
                shape: InputShape::List,
            }),
            workflow: Some(message.id),
            ..Extras::default()
        }
        .boxed();
        let unsealed = Unsealed {
            workflow: message.id,
            creator: None,
        };
        self.commit_one(vec![Op::Hold(Hold {
            join,
            messages: vec![("body".to_owned(), message)],
            unsealed: Some(unsealed),
            ..Hold::default()
        })]);
    }

    fn member(&mut self, join: Option<JoinId>, index: u32, keeps: bool) -> Op {
        let mut op = self.job("queue".to_owned(), "task".to_owned());
        let Op::Publish { message, .. } = &mut op else {
            unreachable!()
        };
        message.body = Bytes::from_static(ARGUMENTS);
        message.result_ttl_ms = keeps.then_some(KEPT_MS);
        if let Some(join) = join {
            message.id = MessageId::member(join, index);
            message.extras = Extras {
                member: Some(Member { join, index }),
                workflow: Some(join),
                ..Extras::default()
            }
            .boxed();
        }
        op
    }

    /// Answers the reads of bodies, and returns the leases of all deliveries.
    fn with_bodies(&mut self, delivered: Vec<Delivery>) -> Vec<Lease> {
        let mut leases: Vec<Lease> = delivered
            .into_iter()
            .map(|delivery| delivery.lease)
            .collect();
        loop {
            let reads = self.broker.poll_reads(1 << 20);
            if reads.is_empty() {
                return leases;
            }
            for read in reads {
                let length = read.range.end - read.range.start;
                let body = vec![0; length as usize];
                self.broker.handle_read(self.now, read, Ok(body.into()));
            }
            leases.extend(
                deliveries(self.poll())
                    .into_iter()
                    .map(|delivery| delivery.lease),
            );
        }
    }
}

#[test]
fn a_member_takes_little_more_than_a_plain_job() {
    let _alone = COUNTS.lock().unwrap();
    for keeps in [false, true] {
        let plain = measure(false, keeps);
        let member = measure(true, keeps);
        println!(
            "keeps results: {keeps}; waiting: {:.1}, a member {:.1}; ended: {:.1}, a member {:.1}",
            plain.waiting, member.waiting, plain.ended, member.ended
        );
        assert!(member.waiting - plain.waiting <= WAITING_BYTES);
        assert!(member.ended - plain.ended <= ARRIVED_BYTES);
    }
}
