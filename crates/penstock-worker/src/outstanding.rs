//! Tracks the outstanding packets, sent to the children and not done: their jobs, their owners, and the jobs
//! that can be taken back.

use std::collections::HashSet;
use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, replace, take};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_faults::planted;
use penstock_message::{Delivery, Lease};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

use crate::config::MAX_PLACES;
use crate::limits::{Alarms, Limits, Ordered};
use crate::packet::{INLINE_PAYLOAD_BYTES, PacketHeader, encode_job, job_bytes};
use crate::page::{Pages, anonymous_file, steady_ns};
use crate::policy::{HandOut, PacketEnd, TaskIndex};

pub use orders::{Given, RunningAt};

mod orders;
mod parking;

/// Number of ticks on one job after which a slot is stuck: this worker should not hold work for it. More than
/// one, since on a busy machine a process can wait that long for a processor.
const STUCK_TICKS: u32 = 5;

struct OutstandingPacket {
    sequence: u32,
    pool: usize,
    task: TaskIndex,
    /// Jobs by index; `None` once a job has ended or was taken back.
    jobs: Vec<Option<Delivery>>,
    /// Number of jobs that are `Some`.
    open: usize,
    end: PacketEnd,
    /// Number of jobs that had begun at the last tick; `None` before the packet's first.
    begun_at_tick: Option<usize>,
    /// Number of consecutive ticks at which no further job had begun.
    still_ticks: u32,
    is_stuck: bool,
    /// Shortest limit of its jobs.
    limit: Option<Duration>,
    /// Time at which it was sent, by the clock of [`steady_ns`]; 0 without limits.
    sent_ns: u64,
    /// Order to the running job, or to an earlier one.
    ordered: Option<Ordered>,
    /// Time since which its job has been parked, by the clock of [`steady_ns`].
    parked_ns: Option<u64>,
}

/// Packet that did not fit into the shared socket; sent as soon as there is room.
struct Unsent {
    bytes: Vec<u8>,
    file: Option<OwnedFd>,
}

/// Error for a packet that could not be sent now.
#[derive(Debug)]
pub struct NotSent {
    pub error: io::Error,
    /// Jobs of the packet; `None` if the packet was kept for [`Outstanding::send_unsent`].
    pub hand_out: Option<HandOut<Delivery>>,
}

/// Jobs removed from a packet, and the packet's end if they were its last.
#[derive(Debug)]
pub struct Left<J> {
    pub pool: usize,
    pub task: TaskIndex,
    pub jobs: J,
    pub end: Option<PacketEnd>,
}

/// Findings of a check of a pool's packets.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PacketFindings {
    /// Packets with a slow job, whose remaining jobs should be taken back.
    pub slow: Vec<usize>,
    /// Whether the next check may find something new even if nothing happens.
    pub again: bool,
}

/// Subset of the places that can be iterated without looking at the others.
#[derive(Default)]
struct Places {
    members: Vec<u32>,
    /// Index among the members, by place. No longer than needed.
    at: Vec<u32>,
}

const ABSENT: u32 = u32::MAX;

impl Places {
    fn has(&self, place: usize) -> bool {
        self.at.get(place).is_some_and(|at| *at != ABSENT)
    }

    fn add(&mut self, place: usize) {
        if self.at.len() <= place {
            self.at.resize(place + 1, ABSENT);
        }
        if self.at[place] == ABSENT {
            self.at[place] = self.members.len() as u32;
            self.members.push(place as u32);
        }
    }

    fn remove(&mut self, place: usize) {
        let at = self
            .at
            .get_mut(place)
            .map_or(ABSENT, |at| replace(at, ABSENT));
        if at == ABSENT {
            return;
        }
        self.members.swap_remove(at as usize);
        if let Some(moved) = self.members.get(at as usize) {
            self.at[*moved as usize] = at;
        }
    }

    fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.iter().map(|place| *place as usize)
    }
}

/// Packets for the children of one pool.
struct Pool {
    /// Supervisor's end of the socket from which children pull. No child has this end open, so all children
    /// notice the supervisor's death.
    socket: Option<OwnedFd>,
    unsent: Option<Unsent>,
    /// Packets about which a check may find something new. Packets whose jobs have all begun, and which have
    /// not moved for long, are excluded: with thousands of jobs that wait for something, these are nearly all.
    watched: Places,
    /// Number of claimed packets that are not watched; each occupies a slot.
    settled: usize,
    stuck: usize,
}

pub struct Outstanding {
    pub pages: Pages,
    pools: Vec<Pool>,
    /// Packets by their place among the claims. Covers only places that were ever in use, which are usually
    /// few.
    packets: Vec<Option<OutstandingPacket>>,
    /// Free places among them.
    free_places: Vec<usize>,
    /// Number of places.
    places: usize,
    /// Places of all packets.
    used: Places,
    /// Places of packets of more than one job.
    large: Places,
    last_sequence: u32,
    buffer: Vec<u8>,
    alarms: Alarms,
}

fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    // macOS has no SOCK_SEQPACKET for Unix sockets. Its SOCK_DGRAM socket pairs also keep packets separate and
    // in order.
    #[cfg(target_os = "linux")]
    let kind = SocketType::SEQPACKET;
    #[cfg(not(target_os = "linux"))]
    let kind = SocketType::DGRAM;
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(AddressFamily::UNIX, kind, flags, None)?)
}

impl Outstanding {
    /// Makes room for the packets of this many pools, with this many children and places in total. Also returns the
    /// ends of the sockets that children pull from. Each slot has one packet, and one more may wait for each child.
    pub fn new(pools: usize, (children, places): (u32, u32)) -> io::Result<(Self, Vec<OwnedFd>)> {
        assert!(places <= MAX_PLACES);
        let places = places as usize;
        let mut ends = Vec::new();
        let mut books = Vec::new();
        for _ in 0..pools {
            let (ours, theirs) = socket_pair()?;
            ends.push(theirs);
            books.push(Pool {
                socket: Some(ours),
                unsent: None,
                watched: Places::default(),
                settled: 0,
                stuck: 0,
            });
        }
        let packets = Self {
            pages: Pages::new(children, places)?,
            pools: books,
            packets: Vec::new(),
            free_places: Vec::new(),
            places,
            used: Places::default(),
            large: Places::default(),
            last_sequence: 0,
            buffer: Vec::new(),
            alarms: Alarms::default(),
        };
        Ok((packets, ends))
    }

    /// Returns the socket of each pool; none after [`Outstanding::close`].
    pub fn sockets(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        let pools = self.pools.iter().enumerate();
        pools.filter_map(|(number, pool)| Some((number, pool.socket.as_ref()?.as_fd())))
    }

    /// Closes the sockets. Each child exits when it finds its socket closed.
    pub fn close(&mut self) {
        for pool in &mut self.pools {
            pool.socket = None;
        }
    }

    /// Returns the socket of a pool; none after [`Outstanding::close`].
    pub fn socket(&self, pool: usize) -> Option<BorrowedFd<'_>> {
        self.pools[pool].socket.as_ref().map(AsFd::as_fd)
    }

    /// Whether no packet waits for room in this pool's socket.
    pub fn is_sent(&self, pool: usize) -> bool {
        self.pools[pool].unsent.is_none()
    }

    /// Whether another packet can be sent to this pool now.
    pub fn has_room(&self, pool: usize) -> bool {
        self.pools[pool].unsent.is_none() && self.next_place().is_some()
    }

    /// Whether no packet is out.
    pub fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    /// Returns the place of the next packet to send.
    pub fn next_place(&self) -> Option<usize> {
        let unused = self.packets.len();
        let last = self.free_places.last().copied();
        last.or_else(|| (unused < self.places).then_some(unused))
    }

    /// Returns the child that has the packet at this place.
    pub fn owner(&self, place: usize) -> Option<u32> {
        self.pages.claim(place).read().owner
    }

    /// Returns the watched packets of one job that a child of this pool has: places, tasks and children.
    pub fn lone(&self, pool: usize) -> impl Iterator<Item = (usize, TaskIndex, u32)> {
        self.pools[pool].watched.iter().filter_map(|place| {
            let packet = self.packets[place].as_ref()?;
            let owner = self.owner(place)?;
            (packet.jobs.len() == 1).then_some((place, packet.task, owner))
        })
    }

    /// Whether any packet has more than one job.
    pub fn any_large(&self) -> bool {
        !self.large.is_empty()
    }

    /// Returns how many slots of a pool are stuck.
    pub fn stuck(&self, pool: usize) -> usize {
        self.pools[pool].stuck
    }

    /// Sends a packet, or keeps it until the socket has room. Call only after [`Outstanding::has_room`].
    pub fn send(
        &mut self,
        pool: usize,
        task: &str,
        hand_out: HandOut<Delivery>,
    ) -> Result<(), NotSent> {
        let sequence = self.last_sequence.wrapping_add(1);
        let place = match self.next_place() {
            Some(place) => place,
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
        if self.free_places.pop().is_none() {
            self.packets.push(None);
        }
        self.last_sequence = sequence;
        let jobs = hand_out.jobs.len();
        let mut hand_out = hand_out;
        if let [job] = &mut hand_out.jobs[..] {
            detach(job);
        }
        self.pages.claim(place).offer(sequence, jobs);
        self.used.add(place);
        self.pools[pool].watched.add(place);
        if jobs > 1 {
            self.large.add(place);
        }
        let limits = hand_out.jobs.iter().map(|job| Limits::of(&job.message));
        let limit = limits.filter_map(Limits::first).min();
        let mut sent_ns = 0;
        if let Some(limit) = limit {
            sent_ns = steady_ns();
            self.alarms.by(place, Instant::now() + limit);
        }
        self.packets[place] = Some(OutstandingPacket {
            sequence,
            pool,
            task: hand_out.task,
            open: jobs,
            end: PacketEnd::Ran { jobs },
            jobs: hand_out.jobs.into_iter().map(Some).collect(),
            begun_at_tick: None,
            still_ticks: 0,
            is_stuck: false,
            limit,
            sent_ns,
            ordered: None,
            parked_ns: None,
        });
        self.pools[pool].unsent = Some(unsent);
        self.send_unsent(pool).map_err(|error| NotSent {
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
        let payload_bytes: usize = jobs.iter().map(job_bytes).sum();
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

    /// Sends the packet that did not fit. Call it when the socket has room, or some time after an error; an
    /// error drops nothing.
    pub fn send_unsent(&mut self, pool: usize) -> io::Result<()> {
        let pool = &mut self.pools[pool];
        let (Some(unsent), Some(socket)) = (pool.unsent.take(), &pool.socket) else {
            return Ok(());
        };
        match send_message(socket.as_fd(), &unsent) {
            Ok(()) => self.buffer = unsent.bytes,
            Err(error) => {
                pool.unsent = Some(unsent);
                if error != Errno::AGAIN {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Returns the places of this child's packets; with `None`, of unclaimed packets.
    pub fn places_of(&self, owner: Option<u32>) -> Vec<usize> {
        self.places(|place, _| self.pages.claim(place).read().owner == owner)
    }

    /// Returns the places of packets that hold a job with one of these leases.
    pub fn places_with(&self, leases: &HashSet<Lease>) -> Vec<usize> {
        self.places(|_, packet| {
            let mut open = packet.jobs.iter().flatten();
            open.any(|job| leases.contains(&job.lease))
        })
    }

    pub fn all_places(&self) -> Vec<usize> {
        self.used.iter().collect()
    }

    fn places(&self, wanted: impl Fn(usize, &OutstandingPacket) -> bool) -> Vec<usize> {
        let is_wanted = |place: &usize| {
            let packet = self.packets[*place].as_ref();
            packet.is_some_and(|packet| wanted(*place, packet))
        };
        self.used.iter().filter(is_wanted).collect()
    }

    /// Returns the children that have packets of more than one job.
    pub fn owners_of_large(&self) -> Vec<u32> {
        let owner = |place| self.pages.claim(place).read().owner;
        let mut owners: Vec<u32> = self.large.iter().filter_map(owner).collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    /// Returns the lease of a job that has not ended.
    pub fn lease(&self, place: usize, sequence: u32, index: usize) -> Option<Lease> {
        let packet = self.packets.get(place)?.as_ref()?;
        let job = packet.jobs.get(index)?.as_ref()?;
        (packet.sequence == sequence).then_some(job.lease)
    }

    /// Removes a job that its child reports as ended. `None`: there is no such job, so the child's memory is
    /// damaged.
    pub fn end_job(&mut self, place: usize, sequence: u32, index: usize) -> Option<Left<Delivery>> {
        let packet = self.packets.get_mut(place)?.as_mut()?;
        if packet.sequence != sequence {
            return None;
        }
        let job = packet.jobs.get_mut(index)?.take()?;
        packet.open -= 1;
        packet.still_ticks = 0;
        let (pool, task) = (packet.pool, packet.task);
        if replace(&mut packet.is_stuck, false) {
            self.pools[pool].stuck -= 1;
        }
        // The packet may have been settled while other jobs of it are still open.
        self.watch(place, pool);
        Some(Left {
            pool,
            task,
            jobs: job,
            end: self.end_if_empty(place),
        })
    }

    fn watch(&mut self, place: usize, pool: usize) {
        let packet = self.packets[place].as_mut();
        let was_parked = packet.is_some_and(|packet| packet.parked_ns.take().is_some());
        let pool = &mut self.pools[pool];
        if !pool.watched.has(place) {
            pool.settled -= usize::from(!was_parked);
            pool.watched.add(place);
        }
    }

    /// Takes back the jobs that have not begun. `end` is how the packet ends if that removes any.
    pub fn take_back(&mut self, place: usize, end: PacketEnd) -> Option<Left<Vec<Delivery>>> {
        let packet = self.packets.get_mut(place)?.as_mut()?;
        let claim = self.pages.claim(place).take_back();
        // A child can write there. Its numbers are only indices, and checked.
        let mut begun = claim.begun.min(packet.jobs.len());
        if planted!("take-back-what-has-begun") {
            begun = begun.saturating_sub(1);
        }
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
            pool: packet.pool,
            task: packet.task,
            jobs,
            end: self.end_if_empty(place),
        })
    }

    /// Returns the jobs of a packet that a dead child had begun and not ended: at most one, if its memory was
    /// sound.
    pub fn take_begun(&mut self, place: usize) -> Option<Left<Vec<Delivery>>> {
        let packet = self.packets.get_mut(place)?.as_mut()?;
        packet.open = 0;
        packet.end = PacketEnd::TakenBack;
        Some(Left {
            pool: packet.pool,
            task: packet.task,
            jobs: packet.jobs.iter_mut().filter_map(Option::take).collect(),
            end: self.end_if_empty(place),
        })
    }

    fn end_if_empty(&mut self, place: usize) -> Option<PacketEnd> {
        let packet = self.packets[place].as_ref()?;
        if packet.open > 0 {
            return None;
        }
        self.watch(place, packet.pool);
        let packet = self.packets[place].take()?;
        // A child that still has its sequence number can neither claim the packet nor begin a job of it.
        self.pages.claim(place).take_back();
        let pool = &mut self.pools[packet.pool];
        pool.watched.remove(place);
        pool.stuck -= usize::from(packet.is_stuck);
        self.used.remove(place);
        self.large.remove(place);
        self.free_places.push(place);
        Some(packet.end)
    }

    /// Looks for packets of a pool that have not moved since the last check. `slots` is the pool's number of
    /// slots.
    pub fn look(&mut self, pool: usize, slots: usize) -> PacketFindings {
        let Self {
            pools,
            packets,
            pages,
            ..
        } = self;
        let pool = &mut pools[pool];
        let mut look = PacketFindings::default();
        let mut claimed = pool.settled;
        let mut unclaimed = Vec::new();
        let mut settled = Vec::new();
        for place in pool.watched.iter() {
            let Some(packet) = &mut packets[place] else {
                continue;
            };
            let claim = pages.claim(place).read();
            let is_claimed = claim.owner.is_some();
            let is_still = packet.begun_at_tick == Some(claim.begun);
            packet.begun_at_tick = Some(claim.begun);
            packet.still_ticks = match is_still {
                true => packet.still_ticks.saturating_add(1),
                false => 0,
            };
            let is_long_still = packet.still_ticks >= STUCK_TICKS;
            let is_stuck = is_claimed && is_long_still;
            pool.stuck -= usize::from(replace(&mut packet.is_stuck, is_stuck));
            pool.stuck += usize::from(is_stuck);
            look.again |= !is_long_still;
            match is_claimed {
                // No job of it can be taken back, and it changes only when its jobs end.
                true if is_stuck && claim.begun >= packet.jobs.len() => settled.push(place),
                true if is_still => look.slow.push(place),
                false if is_long_still => unclaimed.push(place),
                _ => {}
            }
            claimed += usize::from(is_claimed);
        }
        for place in settled {
            pool.watched.remove(place);
            pool.settled += 1;
        }
        // An unclaimed packet is left alone while a slot may still take it.
        if claimed >= slots {
            look.slow.append(&mut unclaimed);
        }
        look
    }
}

/// Copies the fields that are slices of the frame in which a job came. A single job may run for hours, and
/// would keep the frame's whole buffer of 64 KiB for a few bytes.
fn detach(job: &mut Delivery) {
    let message = &mut job.message;
    let extras = message.extras.as_deref_mut();
    let headers = extras.map(|extras| {
        let values = extras.headers.iter_mut().map(|(_, value)| value);
        values.chain(&mut extras.key)
    });
    let slices = message.notes.iter_mut().chain([&mut message.body]);
    for slice in slices.chain(headers.into_iter().flatten()) {
        if slice.len() <= INLINE_PAYLOAD_BYTES {
            *slice = Bytes::copy_from_slice(slice);
        }
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
pub(crate) mod tests;
