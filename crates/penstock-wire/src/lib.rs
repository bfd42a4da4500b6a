//! The native protocol: frames, their messages as `proto/penstock.proto` draws them, and conversions to and from the
//! nouns of `penstock-message`. Only a codec: it opens no socket, and keeps no state but the received bytes of a frame.
//!
//! ```text
//!     decoder.extend(&bytes);                                    in any portions
//!     while let Some(message) = decoder.next_message()? { … }    whole messages
//!     encode_frame(&message, &mut out);                          the other way
//! ```
//!
//! No input causes a panic here: it is a message, not yet one, or a [`WireError`].

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

/// Messages of `proto/penstock.proto`.
pub mod proto {
    pub use crate::generated::*;
    pub use crate::message::Message;
}

/// Writes an operation as hexadecimal digits, for text that one process passes to another.
pub fn hex_of_op(op: penstock_message::Op) -> String {
    let bytes = prost::Message::encode_to_vec(&proto::Op::from(op));
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads the output of [`hex_of_op`]; `None`: the text is something else.
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

/// Maximum bytes of the first frame, which anybody may send.
pub const MAX_HELLO_BYTES: usize = 4 << 10;
/// Number of leases that fit into the first hello; more follow in another.
pub const HELLO_LEASES: usize = 100;
/// Maximum bytes of a token: the first frame always has room for it.
pub const MAX_TOKEN_BYTES: usize = 256;
/// Maximum leases in a hello and its continuations.
pub const MAX_PRESENTED_LEASES: usize = 256 << 10;
/// Maximum queries in a frame.
pub const MAX_QUERIES_A_FRAME: usize = 1024;
/// Maximum bytes of any other frame, unless the broker's Welcome says otherwise: a body of 16 MiB and its headers.
pub const MAX_FRAME_BYTES: usize = 17 << 20;
/// Maximum bytes of a transaction in parts. A broker may accept less, by its memory limit, but never more.
pub const MAX_TRANSACTION_BYTES: usize = 512 << 20;
