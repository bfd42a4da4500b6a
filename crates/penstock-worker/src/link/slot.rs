//! A slot of a child: pulls packets, begins their jobs, and reports the outcomes.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};

use penstock_faults::planted;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::first_idle::FirstIdle;
use super::window::Window;
use super::{InLine, Link, Turn, damaged, lock};
use crate::fault;
use crate::packet::{FailureView, JobView, Kind, OutcomeFrame, Reader};
use crate::page::{steady_ns, thread_cpu_ns};

/// Maximum size of the buffer that an idle slot keeps for its next packet.
const KEPT_BYTES: usize = 4096;

/// Interval, in jobs, of measuring the CPU time of jobs that share a packet. Such jobs are short, and reading
/// the CPU time costs about as much as running one.
const MEASURED_OF: u64 = 64;

/// End of a job, as its task's code caused it.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    pub kind: Kind,
    pub delay_ms: u64,
    pub value: Option<&'a [u8]>,
    /// Present only for a job that failed permanently.
    pub failure: Option<FailureView<'a>>,
    pub note: &'a [u8],
}

/// Outcome of waiting for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// This slot has a packet, whose jobs can begin.
    Packet,
    /// The supervisor wants no more jobs to run, or is gone, or this child is closed.
    End,
    /// A signal arrived: let its handler run, then pull again.
    Interrupted,
    /// There is no packet now, and the call does not wait.
    Nothing,
}

/// Place that runs one job at a time.
pub struct Slot {
    number: usize,
    /// Whether a fault of its thread is reported, with the slot's packet.
    is_watched: bool,
    link: Arc<Link>,
    turn: Arc<Turn>,
    /// Current packet: header, then payload.
    bytes: Vec<u8>,
    packet: OpenPacket,
    running: Option<BegunJob>,
    /// Number of jobs that it has begun.
    begun: u64,
    /// Whether no other slot shares its thread.
    has_thread: bool,
    window: Arc<Window>,
}

/// Packet whose jobs a slot is running.
#[derive(Clone, Copy, Default)]
pub(super) struct OpenPacket {
    pub(super) sequence: u32,
    pub(super) place: u16,
    jobs: usize,
    next: usize,
    /// Offset of the next job in the bytes.
    offset: usize,
}

#[derive(Clone, Copy)]
struct BegunJob {
    index: usize,
    since_ns: u64,
    /// CPU time of its thread when the job began; `None` if this job is not measured.
    cpu_since_ns: Option<u64>,
}

impl Slot {
    pub(super) fn new(number: usize, link: Arc<Link>, window: Arc<Window>) -> Self {
        Self {
            number,
            is_watched: false,
            link,
            turn: Arc::default(),
            bytes: Vec::new(),
            packet: OpenPacket::default(),
            running: None,
            begun: 0,
            has_thread: true,
            window,
        }
    }

    #[cfg(test)]
    pub fn link(&self) -> Arc<Link> {
        Arc::clone(&self.link)
    }

    /// Returns the window to this slot's running job, for orders.
    pub fn window(&self) -> Arc<Window> {
        Arc::clone(&self.window)
    }

    /// Waits for a packet and claims it for this slot.
    pub fn pull(&mut self) -> io::Result<Pulled> {
        self.link.flush()?;
        self.forget_packet();
        self.link.heed();
        let link = Arc::clone(&self.link);
        let in_line = match link.has_closed() {
            true => InLine::Ended,
            false => link.enter_line(&self.turn),
        };
        match in_line {
            InLine::Head => {}
            InLine::Dismissed => return Ok(Pulled::End),
            InLine::Ended => {
                link.end_line();
                link.tell_closing()?;
                return Ok(Pulled::End);
            }
        }
        let pulled = match link.has_closed() {
            true => Ok(Pulled::End),
            false => self.receive(&link, true),
        };
        link.leave_line();
        if let Ok(Pulled::End) = pulled {
            link.end_line();
            link.tell_closing()?;
        }
        pulled
    }

    /// Does the same as [`Slot::pull`], but without waiting and without announcing outcomes. For slots that
    /// share a thread.
    pub fn try_pull(&mut self) -> io::Result<Pulled> {
        self.has_thread = false;
        self.forget_packet();
        self.link.heed();
        let link = Arc::clone(&self.link);
        let pulled = match link.has_closed() {
            true => Ok(Pulled::End),
            false => self.receive(&link, false),
        };
        if let Ok(Pulled::End) = pulled {
            link.tell_closing()?;
        }
        pulled
    }

    fn forget_packet(&mut self) {
        if self.bytes.capacity() > KEPT_BYTES {
            self.bytes = Vec::new();
        }
    }

    /// Takes and claims a packet. `waits`: waits for one; otherwise there may be [`Pulled::Nothing`].
    fn receive(&mut self, link: &Link, waits: bool) -> io::Result<Pulled> {
        let mut buffer = lock(&link.buffer);
        let first_idle = waits.then(|| link.first_idle()).flatten();
        let wait = match waits && first_idle.is_none() {
            true => RecvFlags::empty(),
            false => RecvFlags::DONTWAIT,
        };
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | wait;
            let mut whole = [IoSliceMut::new(&mut buffer)];
            let received = match recvmsg(&link.work, &mut whole, &mut ancillary, flags) {
                Ok(received) => received.bytes,
                Err(Errno::INTR) => return Ok(Pulled::Interrupted),
                Err(Errno::AGAIN) => match first_idle.map(FirstIdle::wait) {
                    Some(Ok(())) => continue,
                    Some(Err(Errno::INTR)) => return Ok(Pulled::Interrupted),
                    Some(Err(error)) => return Err(error.into()),
                    None => return Ok(Pulled::Nothing),
                },
                Err(Errno::CONNRESET) => return Ok(Pulled::End),
                Err(error) => return Err(error.into()),
            };
            if received == 0 || link.has_closed() {
                return Ok(Pulled::End);
            }
            let file = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut files) => files.next(),
                _ => None,
            });
            let message = &buffer[..received];
            let mut reader = Reader(message);
            let header = reader.packet_header()?;
            let header_bytes = received - reader.0.len();
            let cell = link.claims.get(header.place.into()).ok_or_else(damaged)?;
            if !cell.claim(header.sequence, link.child) {
                // The packet was taken back while it lay in the socket.
                continue;
            }
            self.bytes.clear();
            if header.in_file {
                self.bytes.extend_from_slice(&message[..header_bytes]);
                let all = header_bytes + header.payload_bytes as usize;
                self.bytes.resize(all, 0);
                let file = std::fs::File::from(file.ok_or_else(damaged)?);
                let payload = &mut self.bytes[header_bytes..];
                std::os::unix::fs::FileExt::read_exact_at(&file, payload, 0)?;
            } else {
                self.bytes.extend_from_slice(message);
            }
            self.packet = OpenPacket {
                sequence: header.sequence,
                place: header.place,
                jobs: header.jobs.into(),
                next: 0,
                offset: header_bytes,
            };
            return Ok(Pulled::Packet);
        }
    }

    /// Returns the task of the latest packet.
    pub fn task(&self) -> &str {
        Reader(&self.bytes)
            .packet_header()
            .map_or("", |header| header.task)
    }

    /// Begins the next job of the packet, which must run now and end with [`Slot::finish`]. `None`: no job is
    /// left, or the rest was taken back.
    pub fn begin(&mut self) -> io::Result<Option<JobView<'_>>> {
        let packet = &mut self.packet;
        if packet.next == packet.jobs {
            return Ok(None);
        }
        let link = &self.link;
        let cell = link.claims.get(packet.place.into()).ok_or_else(damaged)?;
        let since_ns = steady_ns();
        let has_closed = link.has_closed() && !planted!("closing-ignored-mid-packet");
        if has_closed || !cell.begin(packet.sequence, link.child, packet.next, since_ns) {
            packet.next = packet.jobs;
            return Ok(None);
        }
        let mut reader = Reader(&self.bytes[packet.offset..]);
        let job = reader.job()?;
        packet.offset = self.bytes.len() - reader.0.len();
        if self.is_watched {
            fault::set_place(self.number, Some(packet.place));
        }
        self.begun += 1;
        let is_measured = packet.jobs == 1 || self.begun.is_multiple_of(MEASURED_OF);
        self.running = Some(BegunJob {
            index: packet.next,
            since_ns,
            cpu_since_ns: (self.has_thread && is_measured).then(thread_cpu_ns),
        });
        self.window.begin(packet, packet.next, job.id);
        packet.next += 1;
        Ok(Some(job))
    }

    /// Whether another slot is reporting an outcome at the moment, so that [`Slot::finish`] would wait for it.
    pub fn would_wait(&self) -> bool {
        let outcomes = &self.link.outcomes;
        self.link.slots.load(Ordering::Relaxed) > 1
            && matches!(outcomes.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Reports the outcome of the job that was begun last.
    pub fn finish(&mut self, ended: Ended<'_>) -> io::Result<()> {
        let Some(running) = self.running.take() else {
            return Err(io::Error::other("no job of this slot is running"));
        };
        let since_ns = self.window.end()?.unwrap_or(running.since_ns);
        let used = |since: u64| thread_cpu_ns().saturating_sub(since).max(1);
        let cpu_ns = running.cpu_since_ns.map_or(0, used);
        if self.is_watched {
            fault::set_place(self.number, None);
        }
        lock(&self.link.outcomes).tell(OutcomeFrame {
            sequence: self.packet.sequence,
            place: self.packet.place,
            index: running.index as u16,
            kind: ended.kind,
            cost_ns: steady_ns().saturating_sub(since_ns),
            cpu_ns,
            delay_ms: ended.delay_ms,
            value: ended.value,
            failure: ended.failure,
            note: ended.note,
        })
    }

    /// Registers the calling thread as this slot's (see [`Link::watch_faults`]).
    pub fn watch_thread(&mut self) -> io::Result<()> {
        self.is_watched = true;
        fault::watch_thread(self.number)
    }

    /// Reports that the thread of this slot has exited during its job, if it had one. Returns whether it had.
    pub fn lose(&mut self, why: &str) -> io::Result<bool> {
        self.packet.next = self.packet.jobs;
        let Some(running) = &mut self.running else {
            return Ok(false);
        };
        // The caller is another thread, whose CPU time is not the job's.
        running.cpu_since_ns = None;
        self.finish(Ended {
            kind: Kind::Lost,
            delay_ms: 0,
            value: None,
            failure: None,
            note: why.as_bytes(),
        })?;
        self.link.flush()?;
        Ok(true)
    }
}
