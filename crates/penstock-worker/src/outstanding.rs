//! The packets that are out: sent to the children and not done. Which jobs are in them, who has them,
//! and what of them can be had back.

use std::collections::HashSet;
use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, replace, take};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use penstock_message::{Delivery, Lease};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

use crate::packet::{INLINE_PAYLOAD_BYTES, PacketHeader, encode_job, job_bytes};
use crate::page::{Pages, anonymous_file};
use crate::policy::{HandOut, PacketEnd, TaskIndex};

/// A child that has been at one job for so many ticks is stuck: this worker should not hold work for it.
/// More than one, since on a busy machine a process can wait for a processor that long.
const STUCK_TICKS: u32 = 5;

struct Packet {
    sequence: u32,
    task: TaskIndex,
    /// By index; `None` once it has ended or was taken back.
    jobs: Vec<Option<Delivery>>,
    /// How many are `Some`.
    open: usize,
    end: PacketEnd,
    /// How many had begun at the last tick; `None` before its first.
    begun_at_tick: Option<usize>,
    /// Ticks in a row at which nothing had begun since the one before.
    still_ticks: u32,
    is_stuck: bool,
}

/// A packet that did not fit into the shared socket; sent as soon as there is room.
struct Unsent {
    bytes: Vec<u8>,
    file: Option<OwnedFd>,
}

/// A packet could not be sent now.
#[derive(Debug)]
pub struct NotSent {
    pub error: io::Error,
    /// Its jobs; `None` where the packet was kept, for [`Outstanding::send_unsent`].
    pub hand_out: Option<HandOut<Delivery>>,
}

/// Jobs that left a packet, and how that ended if they were its last.
#[derive(Debug)]
pub struct Left<J> {
    pub task: TaskIndex,
    pub jobs: J,
    pub end: Option<PacketEnd>,
}

/// What a look at all packets shows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Packets of which the rest should be taken back: a job of theirs takes long.
    pub slow: Vec<usize>,
    /// Whether the next look may show something new although nothing happens.
    pub again: bool,
}

pub struct Outstanding {
    pub pages: Pages,
    /// Children pull from the other end. None of them has this one, so all of them see the supervisor's
    /// death.
    socket: Option<OwnedFd>,
    /// By their place among the claims.
    packets: Vec<Option<Packet>>,
    free_places: Vec<usize>,
    last_sequence: u32,
    unsent: Option<Unsent>,
    /// Packets of more than one job.
    large: usize,
    stuck: usize,
    buffer: Vec<u8>,
}

impl Outstanding {
    /// Room for the packets of so many children; and the end of the socket that they pull from.
    pub fn new(slots: u32) -> io::Result<(Self, OwnedFd)> {
        // macOS has no SOCK_SEQPACKET for Unix sockets; its SOCK_DGRAM between a pair keeps packets
        // apart, and their order, just as well.
        #[cfg(target_os = "linux")]
        let kind = SocketType::SEQPACKET;
        #[cfg(not(target_os = "linux"))]
        let kind = SocketType::DGRAM;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        // Each child has one packet, and at most one more waits for it.
        let places = 2 * slots as usize;
        let packets = Self {
            pages: Pages::new(slots, places)?,
            socket: Some(ours),
            packets: (0..places).map(|_| None).collect(),
            free_places: (0..places).rev().collect(),
            last_sequence: 0,
            unsent: None,
            large: 0,
            stuck: 0,
            buffer: Vec::new(),
        };
        Ok((packets, theirs))
    }

    /// `None` after [`Outstanding::close`].
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Each child ends when it finds the socket closed.
    pub fn close(&mut self) {
        self.socket = None;
    }

    /// Whether another packet can be sent now.
    pub fn has_room(&self) -> bool {
        self.unsent.is_none() && !self.free_places.is_empty()
    }

    /// Whether there are packets of more than one job.
    pub fn any_large(&self) -> bool {
        self.large > 0
    }

    /// How many children are stuck.
    pub fn stuck(&self) -> usize {
        self.stuck
    }

    /// Sends a packet, or keeps it until the socket has room. Only after [`Outstanding::has_room`].
    pub fn send(&mut self, task: &str, hand_out: HandOut<Delivery>) -> Result<(), NotSent> {
        let sequence = self.last_sequence.wrapping_add(1);
        let place = match self.free_places.last() {
            Some(place) => *place,
            None => {
                return Err(NotSent {
                    error: io::ErrorKind::OutOfMemory.into(),
                    hand_out: Some(hand_out),
                });
            }
        };
        let unsent = match self.encode(place, sequence, task, &hand_out.jobs) {
            Ok(unsent) => unsent,
            Err(error) => {
                return Err(NotSent {
                    error,
                    hand_out: Some(hand_out),
                });
            }
        };
        self.free_places.pop();
        self.last_sequence = sequence;
        let jobs = hand_out.jobs.len();
        self.pages.claim(place).offer(sequence, jobs);
        self.large += usize::from(jobs > 1);
        self.packets[place] = Some(Packet {
            sequence,
            task: hand_out.task,
            open: jobs,
            end: PacketEnd::Ran { jobs },
            jobs: hand_out.jobs.into_iter().map(Some).collect(),
            begun_at_tick: None,
            still_ticks: 0,
            is_stuck: false,
        });
        self.unsent = Some(unsent);
        self.send_unsent().map_err(|error| NotSent {
            error,
            hand_out: None,
        })
    }

    fn encode(
        &mut self,
        place: usize,
        sequence: u32,
        task: &str,
        jobs: &[Delivery],
    ) -> io::Result<Unsent> {
        let payload_bytes: usize = jobs.iter().map(|job| job_bytes(&job.message)).sum();
        let header = PacketHeader {
            sequence,
            place: place as u16,
            jobs: jobs.len() as u16,
            payload_bytes: payload_bytes as u32,
            in_file: payload_bytes > INLINE_PAYLOAD_BYTES,
            task,
        };
        let mut bytes = take(&mut self.buffer);
        bytes.clear();
        header.encode_into(&mut bytes);
        let file = if header.in_file {
            let mut payload = Vec::with_capacity(payload_bytes);
            for job in jobs {
                encode_job(job, &mut payload);
            }
            let file = anonymous_file("penstock-packet")?;
            io::Write::write_all(&mut std::fs::File::from(file.try_clone()?), &payload)?;
            Some(file)
        } else {
            for job in jobs {
                encode_job(job, &mut bytes);
            }
            None
        };
        Ok(Unsent { bytes, file })
    }

    /// Sends what did not fit: to be called when the socket has room, or a while after an error, which
    /// drops nothing.
    pub fn send_unsent(&mut self) -> io::Result<()> {
        let (Some(unsent), Some(socket)) = (self.unsent.take(), &self.socket) else {
            return Ok(());
        };
        match send_message(socket.as_fd(), &unsent) {
            Ok(()) => self.buffer = unsent.bytes,
            Err(error) => {
                self.unsent = Some(unsent);
                if error != Errno::AGAIN {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// The places of the packets that this child has (`None`: that nobody has claimed).
    pub fn places_of(&self, owner: Option<u32>) -> Vec<usize> {
        self.places(|place, _| self.pages.claim(place).read().owner == owner)
    }

    /// The places of packets that hold a job with one of these leases.
    pub fn places_with(&self, leases: &HashSet<Lease>) -> Vec<usize> {
        self.places(|_, packet| {
            let mut open = packet.jobs.iter().flatten();
            open.any(|job| leases.contains(&job.lease))
        })
    }

    pub fn all_places(&self) -> Vec<usize> {
        self.places(|_, _| true)
    }

    fn places(&self, wanted: impl Fn(usize, &Packet) -> bool) -> Vec<usize> {
        let packets = self.packets.iter().enumerate();
        packets
            .filter_map(|(place, packet)| wanted(place, packet.as_ref()?).then_some(place))
            .collect()
    }

    /// The children that have packets of more than one job.
    pub fn owners_of_large(&self) -> Vec<u32> {
        let packets = self.packets.iter().enumerate();
        packets
            .filter(|(_, packet)| packet.as_ref().is_some_and(|packet| packet.jobs.len() > 1))
            .filter_map(|(place, _)| self.pages.claim(place).read().owner)
            .collect()
    }

    /// A child says that a job has ended. `None`: there is no such job, the child is out of its mind.
    pub fn end_job(&mut self, place: usize, sequence: u32, index: usize) -> Option<Left<Delivery>> {
        let packet = self.packets.get_mut(place)?.as_mut()?;
        if packet.sequence != sequence {
            return None;
        }
        let job = packet.jobs.get_mut(index)?.take()?;
        packet.open -= 1;
        packet.still_ticks = 0;
        if replace(&mut packet.is_stuck, false) {
            self.stuck -= 1;
        }
        Some(Left {
            task: packet.task,
            jobs: job,
            end: self.end_if_empty(place),
        })
    }

    /// Takes back what has not begun. `end`: what that makes of the packet, if it is anything.
    pub fn take_back(&mut self, place: usize, end: PacketEnd) -> Option<Left<Vec<Delivery>>> {
        let packet = self.packets[place].as_mut()?;
        let claim = self.pages.claim(place).take_back();
        // A child can write there: its numbers are only indices, to be checked.
        let begun = claim.begun.min(packet.jobs.len());
        let jobs: Vec<Delivery> = packet.jobs[begun..]
            .iter_mut()
            .filter_map(Option::take)
            .collect();
        if jobs.is_empty() {
            return None;
        }
        packet.open -= jobs.len();
        packet.end = end;
        Some(Left {
            task: packet.task,
            jobs,
            end: self.end_if_empty(place),
        })
    }

    /// What a dead child had begun and not ended: one job at most, as long as its memory was sound.
    pub fn take_begun(&mut self, place: usize) -> Option<Left<Vec<Delivery>>> {
        let packet = self.packets[place].as_mut()?;
        packet.open = 0;
        packet.end = PacketEnd::TakenBack;
        Some(Left {
            task: packet.task,
            jobs: packet.jobs.iter_mut().filter_map(Option::take).collect(),
            end: self.end_if_empty(place),
        })
    }

    fn end_if_empty(&mut self, place: usize) -> Option<PacketEnd> {
        let packet = self.packets[place].take_if(|packet| packet.open == 0)?;
        // Whoever still has its sequence number can neither claim it nor begin anything of it.
        self.pages.claim(place).take_back();
        self.free_places.push(place);
        self.large -= usize::from(packet.jobs.len() > 1);
        self.stuck -= usize::from(packet.is_stuck);
        Some(packet.end)
    }

    /// Looks for packets that have not moved since the last time. `children`: how many are alive.
    pub fn look(&mut self, children: usize) -> Look {
        let mut look = Look::default();
        let mut claimed = 0;
        let mut unclaimed = Vec::new();
        self.stuck = 0;
        for (place, packet) in self.packets.iter_mut().enumerate() {
            let Some(packet) = packet else {
                continue;
            };
            let claim = self.pages.claim(place).read();
            let is_claimed = claim.owner.is_some();
            let is_still = packet.begun_at_tick == Some(claim.begun);
            packet.begun_at_tick = Some(claim.begun);
            packet.still_ticks = match is_still {
                true => packet.still_ticks.saturating_add(1),
                false => 0,
            };
            let is_long_still = packet.still_ticks >= STUCK_TICKS;
            packet.is_stuck = is_claimed && is_long_still;
            self.stuck += usize::from(packet.is_stuck);
            look.again |= !is_long_still;
            match is_claimed {
                true if is_still => look.slow.push(place),
                false if is_long_still => unclaimed.push(place),
                _ => {}
            }
            claimed += usize::from(is_claimed);
        }
        // One that waits to be pulled is left alone while there may be a child for it.
        if claimed >= children {
            look.slow.append(&mut unclaimed);
        }
        look
    }
}

fn send_message(socket: BorrowedFd<'_>, unsent: &Unsent) -> rustix::io::Result<()> {
    let file = unsent.file.as_ref().map(|file| [file.as_fd()]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if let Some(file) = &file {
        ancillary.push(SendAncillaryMessage::ScmRights(file));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let bytes = [IoSlice::new(&unsent.bytes)];
    loop {
        match sendmsg(socket, &bytes, &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use bytes::{Bytes, BytesMut};
    use penstock_message::{Message, MessageId};

    use super::*;
    use crate::link::{Ended, Link, Pulled};
    use crate::packet::{Kind, Reader};
    use crate::page::RingReader;

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
        }
    }

    fn task() -> TaskIndex {
        crate::policy::Policy::<()>::default().task("work")
    }

    struct Desk {
        out: Outstanding,
        pull: OwnedFd,
    }

    impl Desk {
        fn new(slots: u32) -> Self {
            let (out, pull) = Outstanding::new(slots).unwrap();
            Self { out, pull }
        }

        fn send(&mut self, numbers: impl IntoIterator<Item = u64>) {
            let task = task();
            let jobs = numbers
                .into_iter()
                .map(|number| delivery(number, vec![]))
                .collect();
            self.out.send("work", HandOut { task, jobs }).unwrap();
        }

        /// A child, as a thread: it shares nothing with the supervisor but sockets and pages.
        fn child(&self, slot: u32) -> (Link, UnixStream, RingReader) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let ring = self.out.pages.fresh_ring(slot);
            let link = Link::new(
                self.pull.try_clone().unwrap(),
                theirs.into(),
                self.out.pages.as_fd().try_clone_to_owned().unwrap(),
                slot,
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

    fn numbers(jobs: &[Delivery]) -> Vec<u64> {
        jobs.iter().map(|job| job.lease.grant).collect()
    }

    #[test]
    fn what_a_child_ran_has_ended_what_it_began_is_charged_and_the_rest_comes_back() {
        let mut desk = Desk::new(2);
        let (mut child, _socket, mut ring) = desk.child(1);
        desk.send(0..4);
        assert_eq!(child.pull().unwrap(), Pulled::Packet);
        child.begin().unwrap().unwrap();
        child.finish(DONE).unwrap();
        child.begin().unwrap().unwrap();
        // Dies here: its outcome is in the ring, its second job begun.
        drop(child);
        let mut outcomes = Vec::new();
        ring.read(&desk.out.pages, &mut outcomes).unwrap();
        let frame = Reader(&outcomes).frame().unwrap().unwrap().unwrap();
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

    /// The case that the claim is for. Between pulling and claiming a child is preempted, taken for dead, and
    /// its packet is sent again; then it wakes up.
    #[test]
    fn a_packet_that_was_pulled_and_not_claimed_runs_once() {
        let mut desk = Desk::new(2);
        desk.send([7]);
        let place = desk.out.places_of(None)[0];
        let back = desk.out.take_back(place, PacketEnd::TakenBack).unwrap();
        assert_eq!(back.end, Some(PacketEnd::TakenBack));
        desk.out
            .send(
                "work",
                HandOut {
                    task: back.task,
                    jobs: back.jobs,
                },
            )
            .unwrap();
        let (mut child, _socket, _ring) = desk.child(0);
        // The first packet in the socket is the stale one: it goes by unnoticed.
        assert_eq!(child.pull().unwrap(), Pulled::Packet);
        assert!(child.begin().unwrap().is_some());
        child.finish(DONE).unwrap();
        assert!(child.begin().unwrap().is_none());
        desk.out.close();
        assert_eq!(child.pull().unwrap(), Pulled::End);
    }

    #[test]
    fn a_child_that_says_nonsense_is_not_believed() {
        let mut desk = Desk::new(1);
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
        let mut desk = Desk::new(2);
        let (mut child, _socket, _ring) = desk.child(0);
        desk.send(0..3);
        desk.send([3]);
        child.pull().unwrap();
        child.begin().unwrap().unwrap();
        let place = desk.out.places_of(Some(0))[0];
        assert_eq!(
            desk.out.look(2),
            Look {
                slow: vec![],
                again: true
            }
        );
        assert_eq!(desk.out.look(2).slow, [place]);
        assert_eq!(desk.out.stuck(), 0);
        for _ in 2..STUCK_TICKS {
            desk.out.look(2);
        }
        // A second child may be about to pull the other packet; were there none, it should come back.
        assert_eq!(
            desk.out.look(2),
            Look {
                slow: vec![place],
                again: false
            }
        );
        assert_eq!(desk.out.look(1).slow.len(), 2);
        assert_eq!(desk.out.stuck(), 1);
        desk.out.end_job(place, 1, 0).unwrap();
        assert_eq!(desk.out.stuck(), 0);
    }

    #[test]
    fn bodies_of_any_size_go_through_and_so_do_results() {
        for size in [0, 1_000, INLINE_PAYLOAD_BYTES, 1 << 20, 16 << 20] {
            let mut desk = Desk::new(1);
            let (mut child, socket, mut ring) = desk.child(0);
            let jobs = vec![delivery(1, vec![7; size])];
            desk.out
                .send("work", HandOut { task: task(), jobs })
                .unwrap();
            let worker = thread::spawn(move || {
                child.pull().unwrap();
                assert_eq!(child.task(), "work");
                let body = child.begin().unwrap().unwrap().body.to_vec();
                let value = Some(&body[..]);
                child.finish(Ended { value, ..DONE }).unwrap();
                child.flush().unwrap();
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
                if let Some(Some(frame)) = Reader(bytes).frame().unwrap() {
                    assert_eq!(frame.value, Some(&vec![7; size][..]));
                    break;
                }
            }
            worker.join().unwrap();
        }
    }

    #[test]
    fn what_does_not_fit_the_socket_follows_when_there_is_room() {
        let mut desk = Desk::new(64);
        let mut sent = 0;
        while desk.out.has_room() {
            let jobs = vec![delivery(sent, vec![0; INLINE_PAYLOAD_BYTES - 100])];
            desk.out
                .send("work", HandOut { task: task(), jobs })
                .unwrap();
            sent += 1;
        }
        assert!(sent < 64, "the socket should have been full first");
        let (mut child, _socket, _ring) = desk.child(0);
        for _ in 0..sent {
            assert_eq!(child.pull().unwrap(), Pulled::Packet);
            child.begin().unwrap().unwrap();
            child.finish(DONE).unwrap();
            desk.out.send_unsent().unwrap();
        }
        assert!(desk.out.has_room());
    }

    /// Children that pull and run as fast as they can, a supervisor that takes back and sends again
    /// without pause: every job runs exactly once.
    #[test]
    fn however_much_is_taken_back_every_job_runs_once() {
        const JOBS: u64 = 20_000;
        let mut desk = Desk::new(3);
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
            while desk.out.has_room() && !waiting.is_empty() {
                let jobs = waiting.split_off(waiting.len().saturating_sub(1 + round % 50));
                desk.out
                    .send("work", HandOut { task: task(), jobs })
                    .unwrap();
            }
            desk.out.send_unsent().unwrap();
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
                while let Some(frame) = reader.frame().unwrap() {
                    let frame = frame.unwrap();
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
}
