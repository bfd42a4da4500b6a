//! Encodes transactions for the wire. The thread that commits a transaction encodes it once, outside of any
//! lock. The thread that writes a frame only concatenates the results.

use bytes::Bytes;
use penstock_message::{Features, Tx};
use penstock_wire::{convert, proto};
use prost::Message as _;

/// Size up to which transactions are packed into one frame, and up to which a large one is split into parts.
/// Small enough for other clients of the broker to get their turn in between.
pub const FRAME_TARGET_BYTES: usize = 1 << 20;

/// Transaction encoded for the wire, once, by the thread that commits it.
pub struct Encoded {
    /// Features that the engine must offer for it, not counting its durability.
    pub needs: Features,
    pub form: Form,
}

pub enum Form {
    Whole(Bytes),
    /// Operations of one transaction that is too large for a frame.
    Parts(Vec<Bytes>),
}

impl From<Form> for Encoded {
    /// Wraps a form whose operations every engine offers.
    fn from(form: Form) -> Self {
        let needs = Features::NONE;
        Self { needs, form }
    }
}

impl Encoded {
    pub fn new(tx: Tx) -> Self {
        let needs = Features::of(&tx);
        let form = Form::new(tx);
        Self { needs, form }
    }

    /// Returns a transaction without operations.
    pub fn nothing() -> Self {
        Form::Whole(Bytes::new()).into()
    }

    pub fn parts(&self) -> &[Bytes] {
        match &self.form {
            Form::Whole(bytes) => std::slice::from_ref(bytes),
            Form::Parts(parts) => parts,
        }
    }

    pub fn bytes(&self) -> usize {
        self.parts().iter().map(Bytes::len).sum()
    }

    pub fn largest_part_bytes(&self) -> usize {
        self.parts().iter().map(Bytes::len).max().unwrap_or(0)
    }
}

impl Form {
    fn new(tx: Tx) -> Self {
        let mut parts = Vec::new();
        let mut part = Vec::new();
        for op in tx.ops {
            let op = proto::Op::from(op);
            let op_bytes = op.encoded_len();
            let room = convert::encoded_op_len(op_bytes);
            if part.len() + room > FRAME_TARGET_BYTES && !part.is_empty() {
                parts.push(Bytes::from(std::mem::take(&mut part)));
            }
            match part.is_empty() {
                // Most transactions have one operation.
                true => part.reserve_exact(room),
                false => part.reserve(room),
            }
            convert::encode_op(&op, op_bytes, &mut part);
        }
        match parts.is_empty() {
            true => Self::Whole(part.into()),
            false => {
                parts.push(part.into());
                Self::Parts(parts)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_message::Op;

    use super::*;

    #[test]
    fn parts_of_a_transaction_are_the_whole_of_it() {
        let purge = |length: usize| Op::Purge {
            queue: "q".repeat(length),
        };
        let lengths = [
            1,
            127,
            128,
            700_000,
            300_000,
            40_000,
            20_000,
            2 * FRAME_TARGET_BYTES,
            1,
        ];
        let tx = Tx::from(lengths.map(purge).to_vec());
        let encoded = Encoded::new(tx.clone());
        let parts = encoded.parts();
        assert_eq!(parts.concat(), convert::encode_tx(tx));
        let within = |part: &&Bytes| part.len() <= FRAME_TARGET_BYTES;
        assert_eq!((parts.len(), parts.iter().filter(within).count()), (4, 3));
    }
}
