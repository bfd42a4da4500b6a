//! The native protocol: frames, their messages as `proto/penstock.proto` draws them, and the way
//! between those and the nouns of `penstock-message`. A codec only: it opens no socket and keeps no
//! between those and the nouns of `penstock-message`. A codec only: it opens no socket and keeps no
//! state but the bytes that have arrived of a frame.
//! ```text
//!     decoder.extend(&bytes);                                    in any portions
//!     while let Some(message) = decoder.next_message()? { … }    whole messages
//!     encode_frame(&message, &mut out);                          the other way
//! ```
//!
//! Whatever arrives, nothing here panics: it is a message, not yet one, or a [`WireError`].

pub mod convert;
mod frame;
#[rustfmt::skip]
mod generated;
mod message;
pub mod native;
mod versions;
mod weigh;

pub use frame::{Decoder, FRAME_HEADER_BYTES, Heard, WireError, encode_frame, encoded_frame_len};
pub use versions::{
    ADDITIONS, Addition, LOWEST_PROTOCOL_VERSION, PROTOCOL_VERSION, Versions, Within,
};
pub use weigh::MAX_ENTRY_BYTES;

/// The messages of `proto/penstock.proto`.
pub mod proto {
    pub use crate::generated::*;
    pub use crate::message::Message;
}

/// Writes an operation as hexadecimal digits, for a text that one process hands to another.
pub fn hex_of_op(op: penstock_message::Op) -> String {
    let bytes = prost::Message::encode_to_vec(&proto::Op::from(op));
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads what [`hex_of_op`] has written; `None`: it is something else.
pub fn op_of_hex(text: &str) -> Option<penstock_message::Op> {
    let digits = text.as_bytes();
    let pairs = digits.chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair)
            .ok()
            .filter(|pair| pair.len() == 2)?;
        u8::from_str_radix(pair, 16).ok()
    });
    let bytes: Vec<u8> = pairs.collect::<Option<_>>()?;
    let op: proto::Op = prost::Message::decode(bytes.as_slice()).ok()?;
    op.try_into().ok()
}

/// Most bytes of the first frame, which anybody may send.
pub const MAX_HELLO_BYTES: usize = 4 << 10;
/// Leases that fit into the first hello; more follow in another.
pub const HELLO_LEASES: usize = 100;
/// Most bytes of a token: the first frame always has room for it.
pub const MAX_TOKEN_BYTES: usize = 256;
/// Most leases in a hello and its continuations.
pub const MAX_PRESENTED_LEASES: usize = 256 << 10;
/// Most queries in a frame.
pub const MAX_QUERIES_A_FRAME: usize = 1024;
/// Most bytes of any other frame, unless the broker's Welcome says otherwise: a body of 16 MiB and its surroundings.
pub const MAX_FRAME_BYTES: usize = 17 << 20;
/// Most bytes of a transaction in parts. A broker may take less, by its memory limit, and never takes more.
pub const MAX_TRANSACTION_BYTES: usize = 512 << 20;
