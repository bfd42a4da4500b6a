//! Keeps the journal of a script's broker: recovers from it, damages it, and carries it forward.

use bytes::Bytes;
use penstock_broker::{
    Broker, CarriedForward, ConnId, Input, Now, Position, Read, Recovery, Unread,
};
use penstock_message::{Key, MessageId, Space};

use super::ScriptWorld;
use super::words::{describe_whole, message_id};

impl ScriptWorld {
    pub(super) fn take_records(&mut self) {
        while let Some(record) = self.broker.poll_record() {
            assert_eq!(
                record.position.0,
                self.journal.len() as u64 + 1,
                "positions have no gaps"
            );
            let mut bytes = Vec::new();
            record.encode_into(&mut bytes);
            self.journal.push(Some(bytes));
        }
    }

    /// Returns the bytes of the journal, except for reclaimed records.
    pub fn journal(&self) -> Vec<Option<Vec<u8>>> {
        self.journal.clone()
    }

    /// Becomes a broker on the journal of another one.
    pub fn become_what_wrote(&mut self, journal: Vec<Option<Vec<u8>>>) {
        self.journal = journal;
        self.restart(self.epoch);
    }

    /// Answers the broker's reads from the records that it wrote. Reads from a reclaimed or damaged record fail.
    pub(super) fn read_back(&mut self) {
        for read in self.broker.poll_reads(1_000) {
            match &mut self.held_reads {
                Some(held) => held.push(read),
                None => self.answer(read),
            }
        }
    }

    pub(super) fn answer(&mut self, read: Read) {
        let index = read.position.0 as usize - 1;
        assert!(index < self.synced, "what is read is safe");
        let outcome = match &self.journal[index] {
            _ if self.damaged.contains(&index) => {
                Err(Unread::Damaged(format!("record {} is rotten", index + 1)))
            }
            None => Err(Unread::Gone),
            Some(record) => {
                let range = read.range.start as usize..read.range.end as usize;
                Ok(Bytes::copy_from_slice(&record[range]))
            }
        };
        self.broker.handle_read(self.now, read, outcome);
    }

    pub(super) fn restart(&mut self, epoch: u32) {
        self.epoch = epoch;
        self.synced = self.journal.len();
        self.mark = self.mark.min(self.synced);
        self.now.mono_ms = 500;
        self.broker = self.recover(self.now);
        for client in self.clients.values_mut() {
            client.conn = None;
        }
    }

    fn recover(&self, now: Now) -> Broker {
        let mut recovery = Recovery::new(self.options.clone());
        for (index, record) in self.journal.iter().enumerate() {
            if let Some(record) = record {
                let position = Position(index as u64 + 1);
                recovery
                    .replay(position, record)
                    .expect("a broker reads what it wrote");
            }
        }
        recovery.finish(now, self.epoch)
    }

    /// Becomes a broker on a repaired journal: records are missing wherever the disk was damaged.
    pub fn lose_records(&mut self, is_lost: impl Fn(usize) -> bool) {
        self.was_repaired = true;
        let mut index = 0;
        self.journal.retain(|record| {
            index += 1;
            record.is_some() && !is_lost(index - 1)
        });
        self.synced = self.journal.len();
        self.mark = 0;
        self.damaged.clear();
        for client in self.clients.values_mut() {
            client.conn = None;
        }
        self.epoch += 1;
        self.broker = self.recover(self.now);
        self.broker.assert_consistent();
    }

    /// Carries a few things before the mark forward, one by one, and leaves the journal as it is: the segment is not
    /// empty yet.
    pub(super) fn carry_steps(&mut self, steps: u64) {
        self.take_records();
        let end = match self.mark {
            0 => self.journal.len(),
            mark => mark,
        };
        for _ in 0..steps {
            self.broker.carry_forward(Position(end as u64 + 1), 1);
            self.read_back();
        }
        self.take_records();
    }

    /// Empties the journal up to the mark, or completely, as reclaim empties a segment.
    pub(super) fn carry_forward(&mut self) {
        self.take_records();
        let end = match std::mem::take(&mut self.mark) {
            0 => self.journal.len(),
            mark => mark,
        };
        let before = Position(end as u64 + 1);
        while self.broker.carry_forward(before, 100) != CarriedForward::All {
            self.read_back();
        }
        self.take_records();
        for record in &mut self.journal[..end] {
            *record = None;
        }
    }

    /// Checks that a broker recovered from the journal describes itself like the original, once the original's
    /// connections are lost.
    pub fn check_recovery(&mut self) {
        self.is_stalled = false;
        // The copy knows of no lack of space, and would do work that waits for space here.
        self.input(Input::Space(Space::Plenty));
        let conns: Vec<ConnId> = self
            .clients
            .values_mut()
            .filter_map(|client| client.conn.take())
            .collect();
        for conn in conns {
            self.input(Input::Disconnected { conn, clean: false });
        }
        self.settle();
        let mut copy = self.recover(self.now);
        copy.assert_consistent();
        let keys: Vec<Key> = self
            .messages
            .clone()
            .iter()
            .chain(&self.keys.clone())
            .map(|name| self.key(name))
            .collect();
        let ids: Vec<MessageId> = self.messages.iter().map(|name| message_id(name)).collect();
        let position = Position(self.journal.len() as u64);
        let original = describe_whole(&mut self.broker, self.now, &keys, &ids, position);
        let recovered = describe_whole(&mut copy, self.now, &keys, &ids, position);
        assert_eq!(original, recovered, "what is recovered is not what was");
    }
}
