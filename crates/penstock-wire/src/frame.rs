use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

use crate::generated::{ToBroker, ToClient, shapes};
use crate::weigh::{MAX_ENTRY_BYTES, fits_memory};

/// A frame is its length in four little-endian bytes, then the message.
pub const FRAME_HEADER_BYTES: usize = 4;

/// Reason why bytes are not valid. Their connection must be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("a frame of {length} bytes is over the limit of {limit}")]
    TooLarge { length: usize, limit: usize },
    #[error(
        "a frame holds so many entries that it would take more than {} MiB of memory; send fewer at a time",
        MAX_ENTRY_BYTES >> 20
    )]
    TooManyEntries,
    #[error("a frame is not a valid protobuf message: {0}")]
    NotProtobuf(String),
    /// Valid protobuf that makes no sense, such as an id of three bytes.
    #[error("{0}")]
    Invalid(&'static str),
}

/// Frame that one side receives from the other.
pub trait Heard: Message + Default {
    /// Whether a frame can be decoded within the memory that a client may cost.
    fn fits_memory(frame: &Bytes) -> bool;
}

impl Heard for ToBroker {
    fn fits_memory(frame: &Bytes) -> bool {
        fits_memory(frame, &shapes::TO_BROKER, LARGEST_ENTRY)
    }
}

impl Heard for ToClient {
    /// Returns true: a client has chosen its broker.
    fn fits_memory(_frame: &Bytes) -> bool {
        true
    }
}

const LARGEST_ENTRY: usize = {
    let mut largest = 0;
    let mut index = 0;
    while index < shapes::ENTRIES.len() {
        if shapes::ENTRIES[index] > largest {
            largest = shapes::ENTRIES[index];
        }
        index += 1;
    }
    largest
};

/// Splits a stream of bytes into messages. Byte fields of a message are slices of the received bytes, not copies.
#[derive(Debug)]
pub struct Decoder<T> {
    arrived: BytesMut,
    max_frame_bytes: usize,
    message: PhantomData<fn() -> T>,
}

impl<T: Heard> Decoder<T> {
    pub fn new(max_frame_bytes: usize) -> Self {
        Self {
            arrived: BytesMut::new(),
            max_frame_bytes,
            message: PhantomData,
        }
    }

    /// Sets the size limit for frames that have not been taken yet.
    pub fn set_max_frame_bytes(&mut self, max_frame_bytes: usize) {
        self.max_frame_bytes = max_frame_bytes;
    }

    pub fn extend(&mut self, bytes: &[u8]) {
        self.arrived.extend_from_slice(bytes);
    }

    /// Returns the received bytes of frames that were not taken yet.
    pub fn pending_bytes(&self) -> usize {
        self.arrived.len()
    }

    /// Frees the buffer if it is empty.
    pub fn shrink(&mut self) {
        if self.arrived.is_empty() {
            self.arrived = BytesMut::new();
        }
    }

    /// Takes the next complete message. After an error the rest of the stream is meaningless.
    pub fn next_message(&mut self) -> Result<Option<T>, WireError> {
        match self.next_frame()? {
            None => Ok(None),
            Some(frame) if !T::fits_memory(&frame) => Err(WireError::TooManyEntries),
            Some(frame) => match T::decode(frame) {
                Ok(message) => Ok(Some(message)),
                Err(error) => Err(WireError::NotProtobuf(error.to_string())),
            },
        }
    }

    fn next_frame(&mut self) -> Result<Option<Bytes>, WireError> {
        let Some(header) = self.arrived.first_chunk::<FRAME_HEADER_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length > self.max_frame_bytes {
            return Err(WireError::TooLarge {
                length,
                limit: self.max_frame_bytes,
            });
        }
        let whole = FRAME_HEADER_BYTES + length;
        if self.arrived.len() < whole {
            // One allocation for a large frame, instead of a doubling with each portion.
            self.arrived.reserve(whole - self.arrived.len());
            return Ok(None);
        }
        let mut frame = self.arrived.split_to(whole).freeze();
        frame.advance(FRAME_HEADER_BYTES);
        Ok(Some(frame))
    }
}

/// Appends one frame. The caller keeps it under the peer's limit, by [`encoded_frame_len`].
pub fn encode_frame(message: &impl Message, out: &mut BytesMut) {
    let length = message.encoded_len();
    debug_assert!(u32::try_from(length).is_ok());
    out.reserve(FRAME_HEADER_BYTES + length);
    out.put_u32_le(length as u32);
    message.encode_raw(out);
}

pub fn encoded_frame_len(message: &impl Message) -> usize {
    FRAME_HEADER_BYTES + message.encoded_len()
}
