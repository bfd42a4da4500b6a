//! Fuzzes the supervisor: a child writes anything anywhere into the memory and the sockets that it shares.

use std::collections::BTreeSet;
use std::os::fd::AsFd;

use bytes::Bytes;
use penstock_message::{Delivery, Lease, Message, MessageId};

use crate::outstanding::Outstanding;
use crate::packet::{FailureView, Frame, Kind, OutcomeFrame, Reader};
use crate::policy::{HandOut, PacketEnd, Policy};

/// Number of pools: one has a child of two slots, the other a child of one slot.
const POOLS: usize = 2;
/// Number of places: one for each slot, and one more for each child.
const PLACES: u32 = 5;
const CHILDREN: u32 = 2;
/// Size of the claims and of each child's ring.
const SHARED_BYTES: u64 = (1 + CHILDREN as u64) * 64 * 1024;

/// Checks that nothing panics, and that each job comes back once: ended, taken back, or charged to the child.
pub fn child_out_of_its_mind(data: &[u8]) {
    let mut data = ByteSource(data);
    let (mut out, _pull) =
        Outstanding::new(POOLS, (CHILDREN, PLACES)).expect("this process may map memory");
    let mut policy = Policy::<Delivery>::default();
    let task = policy.task("work");
    let mut rings: Vec<_> = (0..CHILDREN)
        .map(|child| out.pages.fresh_ring(child))
        .collect();
    let mut sent = 0;
    let mut back = BTreeSet::new();
    let mut take = |jobs: Vec<Delivery>| {
        for job in jobs {
            assert!(back.insert(job.lease.grant), "a job came back twice");
        }
    };
    while let Some(action) = data.byte() {
        match action % 8 {
            0 if out.has_room(usize::from(action / 8) % 2) => {
                let pool = usize::from(action / 8) % 2;
                let jobs = 1 + data.number() % 5;
                let jobs = (0..jobs).map(|_| {
                    sent += 1;
                    delivery(sent)
                });
                let jobs = jobs.collect();
                out.send(pool, "work", HandOut { task, jobs })
                    .expect("the socket is there");
            }
            1 | 2 => {
                let offset = match data.byte() {
                    // Writes to a claim.
                    Some(place) if place % 2 == 0 => 64 + u64::from(place / 2 % 8) * 64,
                    // Writes to the head of a ring, or its tail.
                    Some(place) => {
                        let child = u64::from(place / 2 % 2);
                        (1 + child) * 64 * 1024 + u64::from(place / 4 % 2) * 64
                    }
                    None => 0,
                };
                let bytes = data.bytes(8);
                let _written = rustix::io::pwrite(out.pages.as_fd(), bytes, offset);
            }
            3 => {
                let offset = data.number() % SHARED_BYTES;
                let bytes = data.bytes(64);
                if offset + bytes.len() as u64 <= SHARED_BYTES {
                    let _written = rustix::io::pwrite(out.pages.as_fd(), bytes, offset);
                }
            }
            4 => {
                let mut bytes = Vec::new();
                let ring = &mut rings[(data.number() % 2) as usize];
                if ring.read(&out.pages, &mut bytes).is_ok() {
                    settle(&mut out, &mut policy, &bytes, &mut take);
                }
            }
            5 => {
                let bytes = data.bytes(100);
                settle(&mut out, &mut policy, bytes, &mut take);
            }
            6 => {
                let mut bytes = Vec::new();
                let sequence = (data.number() % 8) as u32;
                let place = (data.number() % 8) as u16;
                let index = (data.number() % 8) as u16;
                let kind = Kind::from_number((data.number() % 6) as u8).expect("it is known");
                OutcomeFrame {
                    sequence,
                    place,
                    index,
                    kind,
                    cost_ns: data.number(),
                    cpu_ns: data.number(),
                    delay_ms: data.number(),
                    value: None,
                    failure: (kind == Kind::Failed).then_some(FailureView {
                        class: "Error",
                        message: "",
                        fingerprint: 1,
                        preview: b"",
                    }),
                    note: b"",
                }
                .encode_into(&mut bytes);
                settle(&mut out, &mut policy, &bytes, &mut take);
            }
            _ => {
                let slots = (data.number() % 3) as usize;
                for pool in 0..POOLS {
                    let look = out.look(pool, slots);
                    for place in look.slow {
                        if let Some(left) = out.take_back(place, PacketEnd::Slow) {
                            take(left.jobs);
                        }
                    }
                }
                let _owners = out.owners_of_large();
                assert!(out.stuck(0) + out.stuck(1) <= out.all_places().len());
            }
        }
    }
    // The child is killed, and its packets are removed. So are packets that seem unclaimed.
    for place in out.all_places() {
        if let Some(left) = out.take_back(place, PacketEnd::TakenBack) {
            take(left.jobs);
        }
        if let Some(left) = out.take_begun(place) {
            take(left.jobs);
        }
    }
    assert_eq!(back.len() as u64, sent, "a job is lost");
    assert!(out.all_places().is_empty() && !out.any_large());
    assert_eq!((out.stuck(0), out.stuck(1)), (0, 0));
}

fn settle(
    out: &mut Outstanding,
    policy: &mut Policy<Delivery>,
    bytes: &[u8],
    take: &mut impl FnMut(Vec<Delivery>),
) {
    let mut reader = Reader(bytes);
    while let Ok(Some(frame)) = reader.frame() {
        let Frame::Outcome(outcome) = frame else {
            continue;
        };
        let (place, index) = (outcome.place.into(), outcome.index.into());
        let Some(ended) = out.end_job(place, outcome.sequence, index) else {
            return;
        };
        policy.observe(ended.task, outcome.cost_ns);
        policy.set_stuck(out.stuck(ended.pool));
        take(vec![ended.jobs]);
    }
}

fn delivery(number: u64) -> Delivery {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&number.to_le_bytes());
    let id = MessageId(id);
    Delivery {
        consumer: 0,
        lease: Lease {
            message: id,
            epoch: 1,
            grant: number,
        },
        queue: "default".into(),
        redelivered: false,
        message: Message {
            id,
            task: "work".into(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::new(),
            extras: None,
        },
        inputs: Bytes::new(),
        deadline: None,
    }
}

/// Reads values from the front of the input, and zeros after its end.
struct ByteSource<'a>(&'a [u8]);

impl<'a> ByteSource<'a> {
    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> Option<u8> {
        self.bytes(1).first().copied()
    }

    /// Reads a number, mostly a small one: its first byte is the number itself or says how many bytes follow.
    fn number(&mut self) -> u64 {
        match self.byte() {
            None => 0,
            Some(small @ 0..248) => small.into(),
            Some(long) => {
                let mut number = [0; 8];
                let bytes = self.bytes(usize::from(long - 247));
                number[..bytes.len()].copy_from_slice(bytes);
                u64::from_le_bytes(number)
            }
        }
    }
}
