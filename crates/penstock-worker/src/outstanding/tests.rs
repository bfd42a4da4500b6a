//! Tests of the outstanding packets: the supervisor, and children that run as threads.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use bytes::BytesMut;
use penstock_message::{Extras, Message, MessageId};

use super::*;
use crate::limits::Step;
use crate::link::{Ended, Link, Pulled, Resumed, Slot};
use crate::order::{JobAt, Order};
use crate::packet::{Frame, Kind, OutcomeFrame, Reader, Wait, WaitFrame};
use crate::page::{RingReader, SharedPages};

fn delivery(number: u64, body: Vec<u8>) -> Delivery {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&number.to_le_bytes());
    Delivery {
        consumer: 0,
        lease: Lease {
            message: MessageId(id),
            epoch: 1,
            grant: number,
        },
        queue: "default".into(),
        redelivered: false,
        message: Message {
            id: MessageId(id),
            task: "work".into(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: Some(1_000),
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from(body),
            extras: None,
        },
        inputs: bytes::Bytes::new(),
        deadline: None,
    }
}

fn task() -> TaskIndex {
    crate::policy::Policy::<()>::default().task("work")
}

struct PoolBench {
    out: Outstanding,
    pull: OwnedFd,
}

impl PoolBench {
    /// Creates a desk whose children have one slot each.
    fn new(children: u32) -> Self {
        Self::with_slots(children, 1)
    }

    fn with_slots(children: u32, slots: u32) -> Self {
        let (out, mut pull) = Outstanding::new(1, (children, children * (slots + 1))).unwrap();
        Self {
            out,
            pull: pull.remove(0),
        }
    }

    fn send(&mut self, numbers: impl IntoIterator<Item = u64>) {
        let task = task();
        let jobs = numbers
            .into_iter()
            .map(|number| delivery(number, vec![]))
            .collect();
        self.out.send(0, "work", HandOut { task, jobs }).unwrap();
    }

    /// Creates a child that runs as a thread. It shares only sockets and pages with the supervisor.
    fn child(&self, child: u32) -> (Slot, UnixStream, RingReader) {
        let (link, ours, ring) = self.link(child);
        (link.slot(), ours, ring)
    }

    fn link(&self, child: u32) -> (Arc<Link>, UnixStream, RingReader) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ring = self.out.pages.fresh_ring(child);
        let link = Link::new(
            self.pull.try_clone().unwrap(),
            theirs.into(),
            SharedPages::map(self.out.pages.as_fd().try_clone_to_owned().unwrap()).unwrap(),
            child,
        );
        (link.unwrap(), ours, ring)
    }
}

const DONE: Ended<'static> = Ended {
    kind: Kind::Succeeded,
    delay_ms: 0,
    value: None,
    failure: None,
    note: b"",
};

fn outcome<'a>(reader: &mut Reader<'a>) -> Option<OutcomeFrame<'a>> {
    loop {
        match reader.frame().unwrap()? {
            Frame::Outcome(outcome) => return Some(outcome),
            Frame::Bell | Frame::Serving(_) | Frame::Wait(_) | Frame::Progress(_) => {}
        }
    }
}

fn numbers(jobs: &[Delivery]) -> Vec<u64> {
    jobs.iter().map(|job| job.lease.grant).collect()
}

#[test]
pub(crate) fn what_a_child_ran_has_ended_what_it_began_is_charged_and_the_rest_comes_back() {
    let mut desk = PoolBench::new(2);
    let (mut child, _socket, mut ring) = desk.child(1);
    desk.send(0..4);
    assert_eq!(child.pull().unwrap(), Pulled::Packet);
    child.begin().unwrap().unwrap();
    child.finish(DONE).unwrap();
    child.begin().unwrap().unwrap();
    // The child dies here: its outcome is in the ring, and its second job has begun.
    drop(child);
    let mut outcomes = Vec::new();
    ring.read(&desk.out.pages, &mut outcomes).unwrap();
    let frame = outcome(&mut Reader(&outcomes)).unwrap();
    let ended = desk
        .out
        .end_job(frame.place.into(), frame.sequence, frame.index.into())
        .unwrap();
    assert_eq!((ended.jobs.lease.grant, ended.end), (0, None));

    let places = desk.out.places_of(Some(1));
    assert_eq!(places.len(), 1);
    let back = desk.out.take_back(places[0], PacketEnd::TakenBack).unwrap();
    assert_eq!((numbers(&back.jobs), back.end), (vec![2, 3], None));
    let begun = desk.out.take_begun(places[0]).unwrap();
    assert_eq!(numbers(&begun.jobs), [1]);
    assert_eq!(begun.end, Some(PacketEnd::TakenBack));
    assert!(desk.out.all_places().is_empty() && !desk.out.any_large());
}

/// Tests the case that claims exist for. A child is preempted between pulling and claiming and taken for
/// dead, and its packet is sent again. Then the child wakes up.
#[test]
pub(crate) fn a_packet_that_was_pulled_and_not_claimed_runs_once() {
    let mut desk = PoolBench::new(2);
    desk.send([7]);
    let place = desk.out.places_of(None)[0];
    let back = desk.out.take_back(place, PacketEnd::TakenBack).unwrap();
    assert_eq!(back.end, Some(PacketEnd::TakenBack));
    desk.out
        .send(
            0,
            "work",
            HandOut {
                task: back.task,
                jobs: back.jobs,
            },
        )
        .unwrap();
    let (mut child, _socket, _ring) = desk.child(0);
    // The first packet in the socket is the stale one, which is skipped.
    assert_eq!(child.pull().unwrap(), Pulled::Packet);
    assert!(child.begin().unwrap().is_some());
    child.finish(DONE).unwrap();
    assert!(child.begin().unwrap().is_none());
    desk.out.close();
    assert_eq!(child.pull().unwrap(), Pulled::End);
}

#[test]
pub(crate) fn a_child_that_is_closed_in_the_midst_of_a_packet_begins_nothing_more() {
    let mut desk = PoolBench::new(2);
    let (mut child, socket, _ring) = desk.child(0);
    desk.send(0..3);
    assert_eq!(child.pull().unwrap(), Pulled::Packet);
    child.begin().unwrap().unwrap();
    desk.out.pages.close(0);
    child.finish(DONE).unwrap();
    // This holds even before the supervisor has taken the rest back.
    assert!(child.begin().unwrap().is_none());
    let place = desk.out.places_of(Some(0))[0];
    let back = desk.out.take_back(place, PacketEnd::TakenBack).unwrap();
    assert_eq!(numbers(&back.jobs), [1, 2]);

    // It leaves later packets unclaimed, and reports that.
    desk.send([3]);
    assert_eq!(child.pull().unwrap(), Pulled::End);
    assert_eq!(child.try_pull().unwrap(), Pulled::End);
    assert_eq!(desk.out.places_of(None).len(), 1);
    socket.set_nonblocking(true).unwrap();
    let mut said = [0; 256];
    let heard = rustix::net::recv(&socket, &mut said[..], rustix::net::RecvFlags::empty());
    let mut reader = Reader(&said[..heard.unwrap().0]);
    let mut frames = std::iter::from_fn(|| reader.frame().unwrap());
    assert!(frames.any(|frame| matches!(frame, Frame::Serving(0))));
}

#[test]
fn a_child_that_says_nonsense_is_not_believed() {
    let mut desk = PoolBench::new(1);
    desk.send(0..2);
    let place = desk.out.all_places()[0];
    assert!(desk.out.end_job(place, 99, 0).is_none());
    assert!(desk.out.end_job(place, 1, 2).is_none());
    assert!(desk.out.end_job(99, 1, 0).is_none());
    assert!(desk.out.end_job(place, 1, 0).is_some());
    assert!(desk.out.end_job(place, 1, 0).is_none(), "it has ended");
}

#[test]
fn a_job_that_takes_long_is_noticed_and_its_child_is_stuck_in_time() {
    let mut desk = PoolBench::new(2);
    let (mut child, _socket, _ring) = desk.child(0);
    desk.send(0..3);
    desk.send([3]);
    child.pull().unwrap();
    child.begin().unwrap().unwrap();
    let place = desk.out.places_of(Some(0))[0];
    assert_eq!(
        desk.out.look(0, 2),
        PacketFindings {
            slow: vec![],
            again: true
        }
    );
    assert_eq!(desk.out.look(0, 2).slow, [place]);
    assert_eq!(desk.out.stuck(0), 0);
    for _ in 2..STUCK_TICKS {
        desk.out.look(0, 2);
    }
    // A second child may be about to pull the other packet. With no other child, that packet should be
    // taken back.
    assert_eq!(
        desk.out.look(0, 2),
        PacketFindings {
            slow: vec![place],
            again: false
        }
    );
    assert_eq!(desk.out.look(0, 1).slow.len(), 2);
    assert_eq!(desk.out.stuck(0), 1);
    desk.out.end_job(place, 1, 0).unwrap();
    assert_eq!(desk.out.stuck(0), 0);
}

#[test]
fn bodies_of_any_size_go_through_and_so_do_results() {
    for size in [0, 1_000, INLINE_PAYLOAD_BYTES, 1 << 20, 16 << 20] {
        let mut desk = PoolBench::new(1);
        let (link, socket, mut ring) = desk.link(0);
        let mut child = link.slot();
        let jobs = vec![delivery(1, vec![7; size])];
        desk.out
            .send(0, "work", HandOut { task: task(), jobs })
            .unwrap();
        let worker = thread::spawn(move || {
            child.pull().unwrap();
            assert_eq!(child.task(), "work");
            let body = child.begin().unwrap().unwrap().body.to_vec();
            let value = Some(&body[..]);
            child.finish(Ended { value, ..DONE }).unwrap();
            link.flush().unwrap();
        });
        let mut incoming = BytesMut::new();
        let mut chunk = vec![0; 64 * 1024];
        loop {
            let received = io::Read::read(&mut &socket, &mut chunk).unwrap();
            incoming.extend_from_slice(&chunk[..received]);
            let mut outcomes = Vec::new();
            ring.read(&desk.out.pages, &mut outcomes).unwrap();
            let bytes = if outcomes.is_empty() {
                &incoming[..]
            } else {
                &outcomes[..]
            };
            if let Some(frame) = outcome(&mut Reader(bytes)) {
                assert_eq!(frame.value, Some(&vec![7; size][..]));
                break;
            }
        }
        worker.join().unwrap();
    }
}

#[test]
fn what_does_not_fit_the_socket_follows_when_there_is_room() {
    let mut desk = PoolBench::new(64);
    let mut sent = 0;
    while desk.out.has_room(0) {
        let jobs = vec![delivery(sent, vec![0; INLINE_PAYLOAD_BYTES - 100])];
        desk.out
            .send(0, "work", HandOut { task: task(), jobs })
            .unwrap();
        sent += 1;
    }
    assert!(sent < 64, "the socket should have been full first");
    let (mut child, _socket, _ring) = desk.child(0);
    for _ in 0..sent {
        assert_eq!(child.pull().unwrap(), Pulled::Packet);
        child.begin().unwrap().unwrap();
        child.finish(DONE).unwrap();
        desk.out.send_unsent(0).unwrap();
    }
    assert!(desk.out.has_room(0));
}

#[test]
fn a_child_runs_as_many_packets_as_it_has_slots_and_its_death_interrupts_each() {
    let mut desk = PoolBench::with_slots(1, 3);
    let (link, _socket, mut ring) = desk.link(0);
    let mut slots: Vec<Slot> = (0..3).map(|_| link.slot()).collect();
    desk.send(0..3);
    desk.send(3..6);
    desk.send([6]);
    for slot in &mut slots {
        assert_eq!(slot.try_pull().unwrap(), Pulled::Packet);
        slot.begin().unwrap().unwrap();
    }
    assert_eq!(link.slot().try_pull().unwrap(), Pulled::Nothing);
    // The jobs end in any order.
    slots[1].finish(DONE).unwrap();
    slots[1].begin().unwrap().unwrap();
    slots[0].finish(DONE).unwrap();
    let mut outcomes = Vec::new();
    ring.read(&desk.out.pages, &mut outcomes).unwrap();
    let mut reader = Reader(&outcomes);
    let mut ended = Vec::new();
    while let Some(frame) = outcome(&mut reader) {
        let (place, index) = (frame.place.into(), frame.index.into());
        let left = desk.out.end_job(place, frame.sequence, index).unwrap();
        ended.push(left.jobs.lease.grant);
    }
    assert_eq!(ended, [3, 0]);
    // The child dies here.
    let (mut back, mut begun) = (Vec::new(), Vec::new());
    for place in desk.out.places_of(Some(0)) {
        if let Some(left) = desk.out.take_back(place, PacketEnd::TakenBack) {
            back.extend(numbers(&left.jobs));
        }
        if let Some(left) = desk.out.take_begun(place) {
            begun.extend(numbers(&left.jobs));
        }
    }
    back.sort_unstable();
    begun.sort_unstable();
    assert_eq!((back, begun), (vec![1, 2, 5], vec![4, 6]));
    assert!(desk.out.all_places().is_empty() && !desk.out.any_large());
}

#[test]
fn a_slot_whose_thread_is_lost_tells_of_its_job_and_the_rest_can_be_had_back() {
    let mut desk = PoolBench::with_slots(1, 2);
    let (link, _socket, mut ring) = desk.link(0);
    let (mut lost, mut other) = (link.slot(), link.slot());
    desk.send(0..2);
    desk.send([2]);
    for slot in [&mut lost, &mut other] {
        assert_eq!(slot.try_pull().unwrap(), Pulled::Packet);
        slot.begin().unwrap().unwrap();
    }
    assert!(lost.lose("its thread has ended").unwrap());
    assert!(!lost.lose("its thread has ended").unwrap(), "told once");
    assert!(lost.begin().unwrap().is_none());
    other.finish(DONE).unwrap();
    let mut outcomes = Vec::new();
    ring.read(&desk.out.pages, &mut outcomes).unwrap();
    let mut reader = Reader(&outcomes);
    let frame = outcome(&mut reader).unwrap();
    assert_eq!(
        (frame.kind, frame.note),
        (Kind::Lost, &b"its thread has ended"[..])
    );
    let place = frame.place.into();
    let left = desk.out.end_job(place, frame.sequence, 0).unwrap();
    assert_eq!((left.jobs.lease.grant, left.end), (0, None));
    let frame = outcome(&mut reader).unwrap();
    let left = desk
        .out
        .end_job(frame.place.into(), frame.sequence, 0)
        .unwrap();
    assert_eq!(left.end, Some(PacketEnd::Ran { jobs: 1 }));
    // The jobs that it had not begun are taken back at the second check, as behind any slow job.
    desk.out.look(0, 2);
    assert_eq!(desk.out.look(0, 2).slow, [place]);
    let left = desk.out.take_back(place, PacketEnd::Slow).unwrap();
    assert_eq!(numbers(&left.jobs), [1]);
}

#[test]
fn a_child_that_closes_claims_and_begins_nothing_more() {
    let mut desk = PoolBench::with_slots(1, 3);
    let (link, _socket, _ring) = desk.link(0);
    let mut slot = link.slot();
    desk.send(0..2);
    assert_eq!(slot.try_pull().unwrap(), Pulled::Packet);
    slot.begin().unwrap().unwrap();
    // One slot waits at the socket, and one behind it.
    let pulls: Vec<_> = (0..2)
        .map(|_| {
            let mut slot = link.slot();
            thread::spawn(move || slot.pull().unwrap())
        })
        .collect();
    link.close();
    desk.send([2]);
    slot.finish(DONE).unwrap();
    assert!(slot.begin().unwrap().is_none());
    for pull in pulls {
        assert_eq!(pull.join().unwrap(), Pulled::End);
    }
    // The received packet is unclaimed, and can be taken back whole.
    let places = desk.out.places_of(None);
    let left = desk.out.take_back(places[0], PacketEnd::TakenBack).unwrap();
    assert_eq!((places.len(), numbers(&left.jobs)), (1, vec![2]));
}

#[test]
fn a_job_that_goes_alone_keeps_no_more_than_its_own_bytes() {
    let mut desk = PoolBench::with_slots(1, 8);
    let frame = Bytes::from(vec![7; 64 * 1024]);
    let sent = |jobs: u64| {
        let with_slice = |number| {
            let mut job = delivery(number, vec![]);
            job.message.body = frame.slice(100..110);
            job.message.notes = vec![frame.slice(0..5)];
            job
        };
        (0..jobs).map(with_slice).collect::<Vec<_>>()
    };
    let task = task();
    for jobs in [sent(1), sent(1)] {
        let hand_out = HandOut { task, jobs };
        desk.out.send(0, "work", hand_out).unwrap();
    }
    assert!(frame.is_unique(), "nothing out refers to the frame");
}

/// With thousands of jobs that wait for something, a check must not visit all of them each time.
#[test]
fn packets_whose_jobs_all_wait_are_looked_at_no_more_and_still_counted() {
    let mut desk = PoolBench::with_slots(1, 100);
    let (link, _socket, _ring) = desk.link(0);
    for number in 0..99 {
        desk.send([number]);
    }
    let mut slots: Vec<Slot> = (0..99).map(|_| link.slot()).collect();
    for slot in &mut slots {
        slot.try_pull().unwrap();
        slot.begin().unwrap().unwrap();
    }
    for _ in 0..=STUCK_TICKS {
        desk.out.look(0, 100);
    }
    assert!(desk.out.pools[0].watched.is_empty());
    assert_eq!(desk.out.stuck(0), 99);
    // They count as having slots: an unclaimed packet is left for the hundredth slot, and no longer.
    desk.send([99]);
    for _ in 0..=STUCK_TICKS {
        assert!(desk.out.look(0, 100).slow.is_empty());
    }
    assert_eq!(desk.out.look(0, 99).slow.len(), 1);
    for place in desk.out.all_places() {
        let sequence = desk.out.packets[place].as_ref().unwrap().sequence;
        desk.out.end_job(place, sequence, 0).unwrap();
    }
    assert_eq!((desk.out.stuck(0), desk.out.pools[0].settled), (0, 0));
    assert!(desk.out.look(0, 1).slow.is_empty());
}

const GRACE: Duration = Duration::from_secs(5);

/// Returns the waits that a child has reported.
fn waits(socket: &UnixStream) -> Vec<WaitFrame> {
    socket.set_nonblocking(true).unwrap();
    let mut said = [0; 256];
    let heard = rustix::net::recv(socket, &mut said[..], rustix::net::RecvFlags::empty());
    let mut reader = Reader(&said[..heard.map_or(0, |(len, _)| len)]);
    let frames = std::iter::from_fn(|| reader.frame().unwrap());
    let waits = frames.filter_map(|frame| match frame {
        Frame::Wait(wait) => Some(wait),
        _ => None,
    });
    waits.collect()
}

/// Returns the progress that a child has reported, in the order of its ring.
fn told(ring: &mut RingReader, pages: &Pages) -> Vec<(u16, Vec<u8>)> {
    let mut bytes = Vec::new();
    ring.read(pages, &mut bytes).unwrap();
    let mut reader = Reader(&bytes);
    let frames = std::iter::from_fn(|| reader.frame().unwrap());
    let told = frames.map(|frame| match frame {
        Frame::Progress(progress) => (progress.index, progress.body.to_vec()),
        Frame::Outcome(outcome) => (outcome.index, b"ended".to_vec()),
        other => panic!("{other:?}"),
    });
    told.collect()
}

#[test]
fn of_the_progress_of_a_tenth_of_a_second_the_last_is_told_and_before_the_jobs_end() {
    let mut desk = PoolBench::new(1);
    let (mut child, _socket, mut ring) = desk.child(0);
    desk.send([7, 8]);
    child.pull().unwrap();
    let link = child.link();
    let id = child.begin().unwrap().unwrap().id;
    assert!(!link.tell_progress([9; 16], b"another job's").unwrap());
    for number in 0..1000 {
        assert!(
            link.tell_progress(id, format!("{number}").as_bytes())
                .unwrap()
        );
    }
    child.finish(DONE).unwrap();
    assert!(!link.tell_progress(id, b"too late").unwrap());
    let first = told(&mut ring, &desk.out.pages);
    let [(0, one), .., (0, last), (0, end)] = &first[..] else {
        panic!("{first:?}");
    };
    assert_eq!(
        (&one[..], &last[..], &end[..]),
        (&b"0"[..], &b"999"[..], &b"ended"[..])
    );
    assert!(first.len() < 10, "{first:?}");

    // While the job runs, another thread reports it.
    let id = child.begin().unwrap().unwrap().id;
    link.tell_progress(id, b"one").unwrap();
    link.tell_progress(id, b"two").unwrap();
    let mut all = Vec::new();
    let begun = Instant::now();
    while all.len() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{all:?}");
        all.extend(told(&mut ring, &desk.out.pages));
        thread::yield_now();
    }
    assert_eq!(all, [(1, b"one".to_vec()), (1, b"two".to_vec())]);
    let place = desk.out.all_places()[0];
    let sequence = desk.out.packets[place].as_ref().unwrap().sequence;
    assert!(desk.out.lease(place, sequence, 1).is_some());
    assert!(desk.out.lease(place, sequence + 1, 1).is_none());
    assert!(desk.out.lease(place, sequence, 2).is_none());
}

#[test]
fn a_job_is_parked_while_any_of_its_waits_lasts_and_that_time_is_not_its_own() {
    let mut desk = PoolBench::new(1);
    let (mut child, socket, mut ring) = desk.child(0);
    let window = child.window();
    desk.send([7]);
    let place = desk.out.all_places()[0];
    child.pull().unwrap();
    let id = child.begin().unwrap().unwrap().id;
    assert_eq!(window.begin_wait([9; 16]).unwrap(), None, "another job's");
    let one = window.begin_wait(id).unwrap().unwrap();
    let other = window.begin_wait(id).unwrap().unwrap();
    let begun = waits(&socket)[..].to_vec();
    assert_eq!(begun.len(), 1);
    assert!(desk.out.waiting(1, &begun[0]).is_none(), "another child's");
    assert!(desk.out.waiting(0, &begun[0]).is_some());
    desk.out.park(place);
    thread::sleep(Duration::from_millis(300));

    assert_eq!(window.end_wait(one, false).unwrap(), Resumed::Now);
    assert_eq!(waits(&socket), [], "it still waits");
    let Resumed::After(number) = window.end_wait(other, false).unwrap() else {
        panic!("it was parked");
    };
    assert_eq!(waits(&socket)[0].what, Wait::Over);
    assert!(!window.await_turn(number, Duration::from_millis(1)));
    assert!(desk.out.unpark(place).is_some());
    assert_eq!(desk.out.parked_since(place), None);
    let pages = &desk.out.pages;
    thread::scope(|scope| {
        scope.spawn(|| while !window.await_turn(number, Duration::from_secs(60)) {});
        pages.claim(place).give_turn(number);
    });
    child.finish(DONE).unwrap();
    let mut outcomes = Vec::new();
    ring.read(&desk.out.pages, &mut outcomes).unwrap();
    let frame = outcome(&mut Reader(&outcomes)).unwrap();
    assert!(frame.cost_ns < 300_000_000, "{} ns", frame.cost_ns);
    let ended = desk.out.end_job(place, frame.sequence, 0).unwrap();
    assert_eq!(ended.end, Some(PacketEnd::Ran { jobs: 1 }));
    // A wait that it left open does not affect later jobs.
    assert_eq!(window.end_wait(other, false).unwrap(), Resumed::Now);
    assert!(window.has_turn(number));
}

#[test]
fn the_limit_of_a_job_stands_still_while_it_is_parked() {
    let mut desk = PoolBench::new(1);
    let (mut child, _socket, _ring) = desk.child(0);
    let task = task();
    let mut job = delivery(1, vec![]);
    job.message.extras = Extras {
        timeout_ms: Some(50),
        ..Extras::default()
    }
    .boxed();
    let jobs = vec![job];
    desk.out.send(0, "work", HandOut { task, jobs }).unwrap();
    let place = desk.out.all_places()[0];
    child.pull().unwrap();
    child.begin().unwrap().unwrap();
    desk.out.park(place);
    thread::sleep(Duration::from_millis(100));
    let step = |desk: &mut PoolBench| desk.out.look_at_limits(place, Instant::now()).unwrap().1;
    assert_eq!(step(&mut desk), Step::Nothing);
    desk.out.unpark(place).unwrap();
    assert!(desk.out.next_alarm().unwrap() <= Instant::now());
    assert_eq!(
        step(&mut desk),
        Step::Nothing,
        "its time goes on from where it was"
    );
    thread::sleep(Duration::from_millis(60));
    assert_eq!(step(&mut desk), Step::Give(Order::Hard));
}

#[test]
pub(crate) fn an_order_reaches_the_job_that_runs_and_never_the_next() {
    let mut desk = PoolBench::new(1);
    let (mut child, _socket, _ring) = desk.child(0);
    let window = child.window();
    desk.send(0..3);
    let place = desk.out.all_places()[0];
    let now = Instant::now();
    let order =
        |desk: &mut PoolBench, index, order| desk.out.order(place, index, order, now, GRACE);
    assert_eq!(order(&mut desk, 0, Order::Hard), Given::NotRunning);
    child.pull().unwrap();
    child.begin().unwrap().unwrap();
    assert_eq!(order(&mut desk, 1, Order::Hard), Given::NotRunning);
    assert_eq!(window.order(), None);
    let running = RunningAt {
        place,
        child: 0,
        job: JobAt {
            sequence: 1,
            index: 0,
        },
    };
    assert_eq!(order(&mut desk, 0, Order::Soft), Given::Now(running));
    assert_eq!(order(&mut desk, 0, Order::Soft), Given::Before);
    assert_eq!(window.order(), Some(Order::Soft));
    assert_eq!(
        (window.heard(), window.take_order()),
        (None, Some(Order::Soft))
    );
    assert_eq!((window.heard(), window.order()), (Some(Order::Soft), None));
    // A stronger order, and then a weaker one.
    assert_eq!(order(&mut desk, 0, Order::Hard), Given::Now(running));
    assert_eq!(order(&mut desk, 0, Order::Cancel), Given::Before);
    // The job ends before it has received the order, which does not affect the next job.
    child.finish(DONE).unwrap();
    assert_eq!((window.order(), window.heard()), (None, None));
    child.begin().unwrap().unwrap();
    assert_eq!((window.take_order(), window.heard()), (None, None));
    assert_eq!(order(&mut desk, 0, Order::Hard), Given::NotRunning);
}

#[test]
pub(crate) fn a_shield_keeps_off_orders_but_for_the_end_of_a_jobs_time() {
    let mut desk = PoolBench::new(1);
    let (mut child, _socket, _ring) = desk.child(0);
    let window = child.window();
    desk.send(0..2);
    let place = desk.out.all_places()[0];
    child.pull().unwrap();
    child.begin().unwrap().unwrap();
    window.shield();
    window.shield();
    let now = Instant::now();
    desk.out.order(place, 0, Order::Cancel, now, GRACE);
    assert_eq!(window.take_order(), None);
    window.unshield();
    assert_eq!(window.order(), None);
    window.unshield();
    window.unshield();
    assert_eq!(window.order(), Some(Order::Cancel));
    window.shield();
    desk.out.order(place, 0, Order::Hard, now, GRACE);
    assert_eq!(window.take_order(), Some(Order::Hard));
    // A shield that it left open does not protect the next job.
    child.finish(DONE).unwrap();
    child.begin().unwrap().unwrap();
    desk.out.order(place, 1, Order::Soft, now, GRACE);
    assert_eq!(window.take_order(), Some(Order::Soft));
}

/// A job that has received an order is not checked until its grace is over, unless it is to be killed.
#[test]
pub(crate) fn a_job_that_is_to_be_killed_is_looked_at_at_once() {
    let mut desk = PoolBench::new(1);
    let (mut child, _socket, _ring) = desk.child(0);
    desk.send(0..1);
    let place = desk.out.all_places()[0];
    child.pull().unwrap();
    child.begin().unwrap().unwrap();
    let now = Instant::now();
    desk.out.order(place, 0, Order::Cancel, now, GRACE);
    assert_eq!(child.window().take_order(), Some(Order::Cancel));
    assert_eq!(desk.out.pop_alarm(now), Some(place));
    let (_, step) = desk.out.look_at_limits(place, now).unwrap();
    assert_eq!(
        (step, desk.out.next_alarm()),
        (Step::Nothing, Some(now + GRACE))
    );
    desk.out.hasten(place, 0, now);
    assert_eq!(desk.out.pop_alarm(now), Some(place));
    let (_, step) = desk.out.look_at_limits(place, now).unwrap();
    assert_eq!(step, Step::Condemn);
}

fn limited(number: u64, timeout_ms: u64) -> Delivery {
    let mut job = delivery(number, vec![]);
    job.message.extras = penstock_message::Extras {
        timeout_ms: Some(timeout_ms),
        ..Default::default()
    }
    .boxed();
    job
}

#[test]
pub(crate) fn a_job_is_looked_at_when_its_limit_can_be_over_and_others_never() {
    let mut desk = PoolBench::with_slots(1, 4);
    let (link, _socket, _ring) = desk.link(0);
    let mut slot = link.slot();
    desk.send([0]);
    assert_eq!(desk.out.next_alarm(), None);
    slot.try_pull().unwrap();
    let ms = Duration::from_millis;
    let (task, jobs) = (task(), vec![limited(1, 60_000), limited(2, 70_000)]);
    let before = Instant::now();
    desk.out.send(0, "work", HandOut { task, jobs }).unwrap();
    let first = desk.out.next_alarm().unwrap();
    assert!(first >= before + ms(60_000) && first <= Instant::now() + ms(60_000));
    // The packet is unclaimed, so its job may begin at any time.
    let place = desk.out.pop_alarm(first).unwrap();
    assert_eq!(desk.out.look_at_limits(place, first), None);
    assert_eq!(desk.out.next_alarm(), Some(first + ms(60_000)));
    let mut slot = link.slot();
    slot.try_pull().unwrap();
    slot.begin().unwrap().unwrap();
    let now = Instant::now();
    let (running, step) = desk.out.look_at_limits(place, now).unwrap();
    assert_eq!((running.job.index, step), (0, Step::Nothing));
    let next = desk.out.next_alarm().unwrap();
    assert!(next > now && next <= now + ms(60_000));
    // The second job has its own time, counted from its own beginning.
    slot.finish(DONE).unwrap();
    desk.out.end_job(place, 2, 0).unwrap();
    std::thread::sleep(ms(20));
    let before = Instant::now();
    slot.begin().unwrap().unwrap();
    let now = Instant::now();
    desk.out.pop_alarm(next);
    desk.out.look_at_limits(place, now).unwrap();
    let took = now.elapsed();
    let last = desk.out.next_alarm().unwrap();
    assert!(
        last + took >= before + ms(70_000) && last <= now + ms(70_000),
        "{:?}",
        last - now
    );
}

/// Runs slots as threads do: each slot pulls when it is idle, and no slot in the line is forgotten.
#[test]
fn slots_in_line_take_turns_until_the_end() {
    let mut desk = PoolBench::with_slots(1, 8);
    let (link, socket, mut ring) = desk.link(0);
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let mut slot = link.slot();
            thread::spawn(move || {
                while slot.pull().unwrap() == Pulled::Packet {
                    while slot.begin().unwrap().is_some() {
                        slot.finish(DONE).unwrap();
                    }
                }
            })
        })
        .collect();
    let mut ended = 0;
    let mut sent = 0;
    while ended < 5_000 {
        while sent < 5_000 && desk.out.has_room(0) {
            desk.send([sent]);
            sent += 1;
        }
        let mut bell = [0; 4];
        io::Read::read_exact(&mut &socket, &mut bell).unwrap();
        let mut outcomes = Vec::new();
        ring.read(&desk.out.pages, &mut outcomes).unwrap();
        let mut reader = Reader(&outcomes);
        while let Some(frame) = outcome(&mut reader) {
            let (place, index) = (frame.place.into(), frame.index.into());
            desk.out.end_job(place, frame.sequence, index).unwrap();
            ended += 1;
        }
        desk.out.send_unsent(0).unwrap();
    }
    desk.out.close();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Children pull and run as fast as they can while a supervisor constantly takes back and sends again:
/// every job runs exactly once.
#[test]
fn however_much_is_taken_back_every_job_runs_once() {
    const JOBS: u64 = 20_000;
    let mut desk = PoolBench::new(3);
    let mut children = Vec::new();
    let mut ends = Vec::new();
    for slot in 0..3 {
        let (mut child, socket, ring) = desk.child(slot);
        socket.set_nonblocking(true).unwrap();
        ends.push((socket, ring));
        children.push(thread::spawn(move || {
            while child.pull().unwrap() == Pulled::Packet {
                while child.begin().unwrap().is_some() {
                    child.finish(DONE).unwrap();
                }
            }
        }));
    }
    let mut waiting: Vec<Delivery> = (0..JOBS).map(|number| delivery(number, vec![])).collect();
    let mut runs = vec![0; JOBS as usize];
    let mut ended = 0;
    let mut round = 0_usize;
    while ended < JOBS {
        while desk.out.has_room(0) && !waiting.is_empty() {
            let jobs = waiting.split_off(waiting.len().saturating_sub(1 + round % 50));
            desk.out
                .send(0, "work", HandOut { task: task(), jobs })
                .unwrap();
        }
        desk.out.send_unsent(0).unwrap();
        round += 1;
        for place in desk.out.all_places() {
            if (place + round).is_multiple_of(3)
                && let Some(back) = desk.out.take_back(place, PacketEnd::TakenBack)
            {
                waiting.extend(back.jobs);
            }
        }
        for (socket, ring) in &mut ends {
            let mut bells = [0; 4096];
            while io::Read::read(socket, &mut bells).is_ok_and(|count| count > 0) {}
            let mut outcomes = Vec::new();
            ring.read(&desk.out.pages, &mut outcomes).unwrap();
            let mut reader = Reader(&outcomes);
            while let Some(frame) = outcome(&mut reader) {
                let left = desk
                    .out
                    .end_job(frame.place.into(), frame.sequence, frame.index.into())
                    .unwrap();
                runs[left.jobs.lease.grant as usize] += 1;
                ended += 1;
            }
        }
    }
    assert!(runs.iter().all(|runs| *runs == 1));
    desk.out.close();
    for child in children {
        child.join().unwrap();
    }
}
