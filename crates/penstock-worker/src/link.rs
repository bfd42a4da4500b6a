//! A child's side of the link to its supervisor. The Python extension wraps it; it needs no Python.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

use crate::packet::{
    BELL, FailureView, JobView, Kind, MAX_PACKET_BYTES, Malformed, OutcomeFrame, Reader,
};
use crate::page::ChildPages;

/// What a task's code made of a job.
#[derive(Clone, Copy, Debug)]
pub struct Ended<'a> {
    pub kind: Kind,
    pub delay_ms: u64,
    pub value: Option<&'a [u8]>,
    /// Present for a job that failed for good, and for no other.
    pub failure: Option<FailureView<'a>>,
    pub note: &'a [u8],
}

/// How waiting for work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// There is a packet of this child's own: its jobs can begin.
    Packet,
    /// The supervisor wants no more, or is gone.
    End,
    /// A signal came in: let its handler run, then pull again.
    Interrupted,
}

pub struct Link {
    work: OwnedFd,
    reply: OwnedFd,
    pages: ChildPages,
    slot: u32,
    /// What was pulled last: a buffer for the longest message, and how much of it is used.
    buffer: Vec<u8>,
    received: usize,
    /// Its payload, if that came in a file.
    from_file: Vec<u8>,
    packet: Packet,
    running: Option<Running>,
    frame: Vec<u8>,
    /// Outcomes are in the ring of which the supervisor has not been told.
    unannounced: bool,
}

/// The packet whose jobs this child is running.
#[derive(Clone, Copy, Default)]
struct Packet {
    sequence: u32,
    place: u16,
    jobs: usize,
    next: usize,
    /// Where the next job begins in the payload.
    offset: usize,
    in_file: bool,
}

#[derive(Clone, Copy)]
struct Running {
    index: usize,
    since: Instant,
}

fn damaged() -> io::Error {
    io::Error::other("a damaged packet came from the supervisor")
}

impl From<Malformed> for io::Error {
    fn from(_: Malformed) -> Self {
        damaged()
    }
}

impl Link {
    /// `work` is shared by all children; `reply` is this child's own.
    pub fn new(work: OwnedFd, reply: OwnedFd, pages: OwnedFd, slot: u32) -> io::Result<Self> {
        Ok(Self {
            work,
            reply,
            pages: ChildPages::new(pages.as_fd(), slot)?,
            slot,
            buffer: vec![0; MAX_PACKET_BYTES],
            received: 0,
            from_file: Vec::new(),
            packet: Packet::default(),
            running: None,
            frame: Vec::new(),
            unannounced: false,
        })
    }

    /// Waits for a packet and makes it this child's.
    pub fn pull(&mut self) -> io::Result<Pulled> {
        self.flush()?;
        self.from_file = Vec::new();
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut buffer = [IoSliceMut::new(&mut self.buffer)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            self.received = match recvmsg(&self.work, &mut buffer, &mut ancillary, flags) {
                Ok(received) => received.bytes,
                Err(Errno::INTR) => return Ok(Pulled::Interrupted),
                Err(Errno::CONNRESET) => return Ok(Pulled::End),
                Err(error) => return Err(error.into()),
            };
            if self.received == 0 {
                return Ok(Pulled::End);
            }
            let file = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut files) => files.next(),
                _ => None,
            });
            let mut reader = Reader(&self.buffer[..self.received]);
            let header = reader.packet_header()?;
            let packet = Packet {
                sequence: header.sequence,
                place: header.place,
                jobs: header.jobs.into(),
                next: 0,
                offset: if header.in_file {
                    0
                } else {
                    self.received - reader.0.len()
                },
                in_file: header.in_file,
            };
            let cell = self.pages.claim(header.place.into()).ok_or_else(damaged)?;
            if !cell.claim(header.sequence, self.slot) {
                // It was taken back while it lay in the socket.
                continue;
            }
            if header.in_file {
                self.from_file = vec![0; header.payload_bytes as usize];
                let file = std::fs::File::from(file.ok_or_else(damaged)?);
                std::os::unix::fs::FileExt::read_exact_at(&file, &mut self.from_file, 0)?;
            }
            self.packet = packet;
            return Ok(Pulled::Packet);
        }
    }

    /// The task of the packet that was pulled last.
    pub fn task(&self) -> &str {
        Reader(&self.buffer[..self.received])
            .packet_header()
            .map_or("", |header| header.task)
    }

    /// Claims the next job of the packet, which must run now and end with [`Link::finish`]. `None`: there
    /// is none left, or the rest was taken back.
    pub fn begin(&mut self) -> io::Result<Option<JobView<'_>>> {
        let packet = &mut self.packet;
        if packet.next == packet.jobs {
            return Ok(None);
        }
        let cell = self.pages.claim(packet.place.into()).ok_or_else(damaged)?;
        if !cell.begin(packet.sequence, self.slot, packet.next) {
            packet.next = packet.jobs;
            return Ok(None);
        }
        let payload = if packet.in_file {
            &self.from_file[..]
        } else {
            &self.buffer[..self.received]
        };
        let mut reader = Reader(&payload[packet.offset..]);
        let job = reader.job()?;
        packet.offset = payload.len() - reader.0.len();
        self.running = Some(Running {
            index: packet.next,
            since: Instant::now(),
        });
        packet.next += 1;
        Ok(Some(job))
    }

    /// Tells how the job that was begun last has ended.
    pub fn finish(&mut self, ended: Ended<'_>) -> io::Result<()> {
        let Some(running) = self.running.take() else {
            return Err(io::Error::other("no job of this child is running"));
        };
        self.frame.clear();
        OutcomeFrame {
            sequence: self.packet.sequence,
            place: self.packet.place,
            index: running.index as u16,
            kind: ended.kind,
            cost_ns: running.since.elapsed().as_nanos() as u64,
            delay_ms: ended.delay_ms,
            value: ended.value,
            failure: ended.failure,
            note: ended.note,
        }
        .encode_into(&mut self.frame);
        if self.pages.push(&self.frame) {
            self.unannounced = true;
        } else {
            // It fits the ring only in part or not at all: over the socket, in pieces.
            send_all(&self.reply, &self.frame)?;
            self.frame.shrink_to(64 * 1024);
        }
        Ok(())
    }

    /// Tells the supervisor of outcomes that are in the ring.
    pub fn flush(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.unannounced) {
            send_all(&self.reply, &BELL)?;
        }
        Ok(())
    }
}

fn send_all(socket: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
