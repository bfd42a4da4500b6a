//! Writes single values: numbers, times, bytes, names.

use penstock_message::Key;

use super::RecordWriter;
use crate::clock::ClockTime;
use crate::records::Grant;
use crate::table::interner::{Interner, Name};

impl RecordWriter {
    pub(in crate::records) fn tag(&mut self, byte: u8) {
        self.bytes.push(byte);
    }

    /// Writes a number, most of which are small.
    #[inline]
    pub(in crate::records) fn varint(&mut self, value: u64) {
        match value {
            0..0x80 => self.bytes.push(value as u8),
            _ => self.long_varint(value),
        }
    }

    fn long_varint(&mut self, mut value: u64) {
        let (mut bytes, mut length) = ([0; 10], 0);
        while value >= 0x80 {
            bytes[length] = value as u8 | 0x80;
            value >>= 7;
            length += 1;
        }
        bytes[length] = value as u8;
        self.bytes.extend_from_slice(&bytes[..=length]);
    }

    pub(in crate::records) fn difference(&mut self, value: u64, from: u64) {
        let difference = value.wrapping_sub(from) as i64;
        self.varint(((difference << 1) ^ (difference >> 63)) as u64);
    }

    pub(super) fn number(&mut self, number: u64) {
        self.difference(number, self.number);
        self.number = number;
    }

    pub(super) fn grant(&mut self, grant: &Grant) {
        self.varint(u64::from(grant.epoch));
        self.difference(grant.number, self.grant);
        self.grant = grant.number;
        self.difference(grant.started_at, self.time);
    }

    pub(super) fn when(&mut self, when: ClockTime) {
        self.tag(when.clock as u8);
        self.varint(when.at);
    }

    pub(in crate::records) fn slice(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    pub(in crate::records) fn text(&mut self, text: &str) {
        self.slice(text.as_bytes());
    }

    pub(super) fn key(&mut self, key: &Key) {
        match key {
            Key::Result(id) => {
                self.tag(0);
                self.bytes.extend_from_slice(&id.0);
            }
            Key::Named(name) => {
                self.tag(1);
                self.slice(name);
            }
            Key::Scoped(scope, key) => {
                self.tag(2);
                self.tag(*scope as u8);
                self.slice(key);
            }
        }
    }

    /// Writes zero and the text the first time, and later its index, from 1.
    pub(super) fn name(&mut self, names: &Interner, name: Name) {
        if self.spelled.len() <= name.index() {
            self.spelled.resize(name.index() + 1, (0, 0));
        }
        let (record, index) = self.spelled[name.index()];
        if record == self.records {
            self.varint(u64::from(index));
            return;
        }
        self.names_spelled += 1;
        self.spelled[name.index()] = (self.records, self.names_spelled);
        self.varint(0);
        self.text(names.text(name));
    }
}
