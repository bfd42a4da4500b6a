//! Life of a broker: it starts, works with its disk, and dies; the shell's loop around it.

use penstock_broker::ConnId;
use penstock_journal::sim::{Fault, SimStorage};
use penstock_journal::{JournalReader, OpenError, WriteError, Writer};
use penstock_server::{Engine, ReadTask, WriterTask};

use super::World;
use crate::checker::Crash;
use crate::client::Stage;
use crate::model::Verdict;
use crate::network::Link;
use crate::words;

/// Life of a broker.
pub(super) struct Life {
    pub(super) engine: Engine,
    pub(super) writer: Writer<SimStorage>,
    pub(super) started_ms: u64,
    pub(super) task: Option<WriterTask>,
    /// Whether the writer has finished it, before the loop has noticed.
    pub(super) task_is_done: bool,
    pub(super) reader: JournalReader<SimStorage>,
    pub(super) reads: Option<ReadTask>,
    /// Whether the reader has finished them, before the loop has noticed.
    pub(super) reads_are_done: bool,
}

impl World<'_> {
    pub(super) fn start(&mut self) -> Verdict {
        let mut attempts = 0;
        loop {
            attempts += 1;
            self.now_ms += self.rng.below(300);
            if self.plan.power_cuts > 0 && !self.healed && self.rng.one_in(4) {
                let call = self.storage.calls() + self.rng.below(12);
                self.storage.fail_at(call, Fault::PowerOff);
            }
            let now = self.now();
            match Engine::open(self.storage.clone(), self.options.clone(), || now) {
                Ok((engine, writer, report)) => {
                    self.say(|| format!("the broker starts: {report:?}"));
                    engine.broker().assert_consistent();
                    if let Some(crash) = self.ended.take() {
                        let (broker, time) = (engine.broker(), self.time());
                        self.checker
                            .recovered(crash, broker, time, report.through)?;
                    }
                    let started_ms = self.now_ms;
                    let reader = writer.reader();
                    let life = Life {
                        engine,
                        writer,
                        started_ms,
                        task: None,
                        task_is_done: false,
                        reader,
                        reads: None,
                        reads_are_done: false,
                    };
                    self.broker = Some(life);
                    return self.tend();
                }
                Err(OpenError::Io { .. } | OpenError::DiskFull { .. }) if attempts < 100 => {
                    if self.storage.is_dead() {
                        self.storage = self.storage.kill();
                        continue;
                    }
                    // The crash was planned. Once a broker has met a fault, the power may as well be cut.
                    self.storage = self.storage.crash(&mut self.rng);
                    self.boot();
                    self.ended = self.ended.map(|_| Crash::PowerCut);
                }
                Err(error) => return Err(format!("the journal can't be opened: {error}")),
            }
        }
    }

    pub(super) fn crash(&mut self, crash: Crash) -> Verdict {
        match self.die(crash) {
            true => self.start_unless_on_demand(),
            false => Ok(()),
        }
    }

    pub(super) fn start_unless_on_demand(&mut self) -> Verdict {
        match self.plan.starts_on_demand && !self.healed {
            true => Ok(()),
            false => self.start(),
        }
    }

    /// Ends the broker, if there is one, and all of its connections.
    pub(super) fn die(&mut self, crash: Crash) -> bool {
        if self.broker.is_none() {
            return false;
        }
        self.say(|| format!("{crash:?}"));
        self.broker = None;
        self.ended = Some(crash);
        self.storage = match crash {
            Crash::Killed | Crash::DiskFailed => self.storage.kill(),
            Crash::PowerCut => self.storage.crash(&mut self.rng),
        };
        if crash == Crash::PowerCut {
            self.boot();
        }
        let time = self.time();
        for (conn, mut link) in std::mem::take(&mut self.links) {
            // The client still reads all or some of the bytes that had reached its side.
            let read = self.rng.below(link.to_client.len() as u64 + 1) as usize;
            let bytes: Vec<u8> = link.to_client.drain(..read).collect();
            let seat = &mut self.seats[link.seat];
            if seat.conn == Some(conn) {
                if seat.client.stage() != Stage::Dead {
                    seat.client.hears(&mut self.rng, time, &bytes);
                }
                seat.client.disconnected();
                seat.conn = None;
            }
        }
        true
    }

    /// Does the shell's work after each call: tasks for the disk, bytes for clients, closing of connections.
    pub(super) fn tend(&mut self) -> Verdict {
        if self.broker.is_some() && self.storage.is_dead() {
            return self.crash(Crash::Killed);
        }
        loop {
            let now = self.now();
            let Some(life) = &mut self.broker else {
                return Ok(());
            };
            self.checker.look_at_deadlines(life.engine.broker())?;
            self.checker.look_at_schedules(life.engine.broker())?;
            let mut idle = true;
            if life.task.is_none() {
                life.task = life.engine.take_batch(now);
                life.task_is_done = false;
                idle &= life.task.is_none();
            }
            if life.reads.is_none() {
                life.reads = life.engine.take_reads(now);
                life.reads_are_done = false;
                idle &= life.reads.is_none();
            }
            if let Some(conn) = life.engine.poll_transmit() {
                self.transmit(conn)?;
                continue;
            }
            while let Some(conn) = life.engine.poll_close() {
                idle = false;
                self.checker.closed(conn)?;
                if let Some(link) = self.links.get_mut(&conn) {
                    link.broker_has_closed = true;
                    link.to_broker.clear();
                    if link.client_has_closed {
                        self.links.remove(&conn);
                    }
                }
            }
            if idle {
                // A batch that is held back for more records may have decided times, too.
                self.checker.look_at_schedules(life.engine.broker())?;
                life.engine.broker().assert_no_circle_of_waits();
                break;
            }
        }
        let broker = self.broker.as_ref().map(|life| life.engine.broker());
        self.checker.end_of_call(broker)?;
        match self
            .broker
            .as_ref()
            .is_some_and(|life| life.engine.is_over())
        {
            true => self.crash(Crash::DiskFailed),
            false => Ok(()),
        }
    }

    /// Sends the pending bytes of a connection, as far as its socket has room.
    pub(super) fn transmit(&mut self, conn: ConnId) -> Verdict {
        let now = self.now();
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        let waiting = life.engine.outgoing(conn);
        let room = self.links.get(&conn).map_or(usize::MAX, Link::room);
        let bytes = waiting[..waiting.len().min(room)].to_vec();
        for byte in &bytes {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        if let Some(link) = self.links.get_mut(&conn) {
            link.is_full = bytes.len() < waiting.len();
            link.broker_sends(&bytes);
        }
        self.checker.sent(conn, &bytes)?;
        life.engine.transmitted(now, conn, bytes.len());
        Ok(())
    }

    pub(super) fn disk_works(&mut self) -> Verdict {
        let now = self.now();
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        if life.reads.is_some() && (life.task.is_none() || self.rng.bool()) {
            return self.something_is_read();
        }
        let Some(task) = &life.task else {
            return Ok(());
        };
        if life.task_is_done {
            let task = life.task.take().expect("there is one");
            life.engine.batch_done(now, &task, 100);
            return self.tend();
        }
        let mut written = None;
        let done = task.carry_out(&mut life.writer, |through| written = Some(through));
        life.task_is_done = true;
        if let Some(through) = written {
            life.engine.batch_written(now, through);
        }
        match done {
            Ok(()) => {
                if self.rng.bool() {
                    self.prepare_spares();
                }
                if self.trace.is_some() {
                    let task = self.broker.as_ref().and_then(|life| life.task.as_ref());
                    let words = task.map(words::task);
                    self.say(|| words.unwrap_or_default());
                }
                self.tend()
            }
            Err(error @ WriteError::DiskFull { .. }) => {
                life.task_is_done = false;
                self.say(|| format!("the writer tries again later: {error}"));
                Ok(())
            }
            Err(_) if self.storage.is_dead() => self.crash(Crash::Killed),
            Err(error) if self.storage.is_off() => {
                self.say(|| format!("the power fails: {error}"));
                self.tend()?;
                self.crash(Crash::PowerCut)
            }
            Err(error) => {
                life.engine.disk_failed(now);
                self.say(|| format!("the disk fails: {error}"));
                self.tend()?;
                // The process exits in any case; sometimes the machine goes down with it.
                let crash = if self.rng.bool() {
                    Crash::DiskFailed
                } else {
                    Crash::PowerCut
                };
                self.crash(crash)
            }
        }
    }

    pub(super) fn something_is_read(&mut self) -> Verdict {
        let now = self.now();
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        if life.reads_are_done {
            let reads = life.reads.take().expect("there are some");
            life.engine.reads_done(now, reads);
            return self.tend();
        }
        let reads = life.reads.as_mut().expect("there are some");
        reads.carry_out(&mut life.reader);
        life.reads_are_done = true;
        let words = self
            .trace
            .is_some()
            .then(|| format!("read back: {reads:?}"));
        self.say(|| words.unwrap_or_default());
        match (self.storage.is_dead(), self.storage.is_off()) {
            (true, _) => self.crash(Crash::Killed),
            (false, true) => self.crash(Crash::PowerCut),
            (false, false) => Ok(()),
        }
    }

    /// Prepares spare segments at any time, as a separate thread would; until then the writer makes its own.
    pub(super) fn prepare_spares(&mut self) {
        let now = self.now();
        if let Some(life) = &mut self.broker {
            let spares = life.writer.spares();
            let space = spares.space();
            while spares.wanted() && spares.prepare().is_ok() {}
            if spares.space() != space {
                life.engine.space_changed(now);
            }
        }
    }
}
