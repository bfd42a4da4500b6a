//! Memory of a decoded frame, estimated before it is decoded.
//!
//! An entry of a list may have two bytes on the wire and take several hundred in memory: 17 MiB of empty operations
//! would become gigabytes. So a frame is first walked without keeping anything, and refused when its entries would take
//! too much memory. Nearly all frames are too short for that, whatever they contain, and are not walked.

use prost::DecodeError;
use prost::encoding::{DecodeContext, WireType, decode_varint, skip_field};

/// Maximum memory for the entries of all lists of a frame, in addition to the frame's own bytes.
pub const MAX_ENTRY_BYTES: usize = 64 << 20;

/// Fields of a message that hold messages, or that may be repeated.
pub(crate) struct EntryShape {
    fields: &'static [(u32, EntryField)],
    /// Bitmap of the field numbers.
    numbers: u64,
    /// First field number that is in a box, and the box's bytes.
    boxed: Option<(u32, usize)>,
}

impl EntryShape {
    pub(crate) const fn new(fields: &'static [(u32, EntryField)]) -> Self {
        assert!(fields.len() <= MOST_FIELDS);
        let mut numbers = 0;
        let mut index = 0;
        while index < fields.len() {
            assert!(fields[index].0 < u64::BITS);
            numbers |= 1 << fields[index].0;
            index += 1;
        }
        Self {
            fields,
            numbers,
            boxed: None,
        }
    }

    /// Returns the index of a field in the list.
    fn index_of(&self, number: u32) -> Option<usize> {
        let is_known = number < u64::BITS && self.numbers & 1 << number != 0;
        match is_known {
            true => self.fields.iter().position(|(known, _)| *known == number),
            false => None,
        }
    }

    pub(crate) const fn with_box(mut self, first: u32, bytes: usize) -> Self {
        self.boxed = Some((first, bytes));
        self
    }
}

const MOST_FIELDS: usize = 20;

pub(crate) enum EntryField {
    /// Message inside its parent's memory. When sent twice it is merged or replaced.
    One(&'static EntryShape),
    /// List of messages, and the bytes of an entry.
    Many(&'static EntryShape, usize),
    /// List of strings, and the bytes of an entry without its text.
    ManyPlain(usize),
    /// List of numbers, packed or not, and the bytes of an entry.
    ManyNumbers(usize),
}

/// Whether the entries of this frame stay under [`MAX_ENTRY_BYTES`]. Bytes that are not protobuf pass, and the decoder
/// refuses them.
pub(crate) fn fits_memory(frame: &[u8], shape: &EntryShape, largest_entry: usize) -> bool {
    // The shortest entry is a field number and a length of zero. A list with one entry reserves room for FIRST_ROOM.
    if frame.len() / 2 * FIRST_ROOM as usize * largest_entry <= MAX_ENTRY_BYTES {
        return true;
    }
    let mut walk = Walk {
        left: MAX_ENTRY_BYTES,
    };
    !matches!(walk.message(frame, shape), Err(Stop::TooHeavy))
}

/// Entries for which a non-empty list has room at first; a full list doubles its room.
const FIRST_ROOM: u32 = 4;

struct Walk {
    left: usize,
}

enum Stop {
    TooHeavy,
    NotProtobuf,
}

impl From<DecodeError> for Stop {
    fn from(_: DecodeError) -> Self {
        Self::NotProtobuf
    }
}

impl Walk {
    /// Works on borrowed bytes: counting references for every part would take half the time of a large frame's walk.
    fn message(&mut self, mut bytes: &[u8], shape: &EntryShape) -> Result<(), Stop> {
        if shape.fields.is_empty() {
            return Ok(());
        }
        let mut lists = [List::default(); MOST_FIELDS];
        let mut boxed = shape.boxed;
        while !bytes.is_empty() {
            let (number, wire_type) = key(&mut bytes)?;
            if let Some((_, box_bytes)) = boxed.take_if(|(first, _)| number >= *first) {
                self.take(box_bytes)?;
            }
            let index = shape.index_of(number);
            let (Some(index), WireType::LengthDelimited) = (index, wire_type) else {
                if let Some(index) = index
                    && let EntryField::ManyNumbers(entry_bytes) = &shape.fields[index].1
                {
                    self.add(&mut lists[index], *entry_bytes)?;
                }
                skip(wire_type, number, &mut bytes)?;
                continue;
            };
            let held = part(&mut bytes)?;
            match &shape.fields[index].1 {
                EntryField::One(shape) => self.message(held, shape)?,
                EntryField::Many(shape, entry_bytes) => {
                    self.add(&mut lists[index], *entry_bytes)?;
                    self.message(held, shape)?;
                }
                EntryField::ManyPlain(entry_bytes) => self.add(&mut lists[index], *entry_bytes)?,
                EntryField::ManyNumbers(entry_bytes) => {
                    // Each number ends in a byte whose highest bit is not set.
                    for _ in held.iter().filter(|byte| **byte < 0x80) {
                        self.add(&mut lists[index], *entry_bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, bytes: usize) -> Result<(), Stop> {
        self.left = self.left.checked_sub(bytes).ok_or(Stop::TooHeavy)?;
        Ok(())
    }

    fn add(&mut self, list: &mut List, entry_bytes: usize) -> Result<(), Stop> {
        if list.entries == list.room {
            let room = (list.room * 2).max(FIRST_ROOM);
            self.take((room - list.room) as usize * entry_bytes)?;
            list.room = room;
        }
        list.entries += 1;
        Ok(())
    }
}

/// Reads the number and type of a field.
#[inline(always)]
fn key(bytes: &mut &[u8]) -> Result<(u32, WireType), Stop> {
    let key = varint(bytes)?;
    let number = u32::try_from(key >> 3).map_err(|_| Stop::NotProtobuf)?;
    Ok((number, WireType::try_from(key & 7)?))
}

#[inline(always)]
fn skip(wire_type: WireType, number: u32, bytes: &mut &[u8]) -> Result<(), Stop> {
    match wire_type {
        WireType::Varint => varint(bytes).map(drop),
        WireType::LengthDelimited => part(bytes).map(drop),
        _ => Ok(skip_field(
            wire_type,
            number,
            bytes,
            DecodeContext::default(),
        )?),
    }
}

/// Reads the bytes of a field, after their length.
#[inline(always)]
fn part<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], Stop> {
    let length = usize::try_from(varint(bytes)?).map_err(|_| Stop::NotProtobuf)?;
    let (part, rest) = bytes.split_at_checked(length).ok_or(Stop::NotProtobuf)?;
    *bytes = rest;
    Ok(part)
}

#[inline(always)]
fn varint(bytes: &mut &[u8]) -> Result<u64, Stop> {
    match **bytes {
        [byte, ref rest @ ..] if byte < 0x80 => {
            *bytes = rest;
            Ok(u64::from(byte))
        }
        _ => Ok(decode_varint(bytes)?),
    }
}

#[derive(Clone, Copy, Default)]
struct List {
    entries: u32,
    room: u32,
}
