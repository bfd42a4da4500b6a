//! Encodes transactions for the wire. The thread that commits a transaction encodes it once, outside of any
//! lock. The thread that writes a frame only concatenates the results.

use bytes::Bytes;
use penstock_message::{Features, Tx};
use penstock_wire::proto;
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};

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
        let proto::Tx { ops } = tx.into();
        let mut parts = Vec::new();
        let mut part = Vec::new();
        for op in ops {
            // A nested message computes its length once per level of nesting. For settlements that took a tenth
            // of the supervisor's time, so the length is computed once here.
            let op_bytes = op.encoded_len();
            let room = 1 + encoded_len_varint(op_bytes as u64) + op_bytes;
            if part.len() + room > FRAME_TARGET_BYTES && !part.is_empty() {
                parts.push(Bytes::from(std::mem::take(&mut part)));
            }
            match part.is_empty() {
                // Most transactions have one operation.
                true => part.reserve_exact(room),
                false => part.reserve(room),
            }
            encode_key(OPS, WireType::LengthDelimited, &mut part);
            encode_varint(op_bytes as u64, &mut part);
            op.encode_raw(&mut part);
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

/// Field number of the operations in `proto::Tx`.
const OPS: u32 = 1;

/// `proto::Commit` with its transactions already encoded. On the wire, a nested message and a field of bytes
/// look the same.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EncodedCommit {
    #[prost(uint64, tag = "1")]
    pub first_seq: u64,
    #[prost(enumeration = "proto::Durability", tag = "2")]
    pub durability: i32,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub txs: Vec<Bytes>,
    #[prost(enumeration = "proto::Part", tag = "4")]
    pub part: i32,
}

/// `proto::ToBroker` that only holds encoded commits.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EncodedCommits {
    #[prost(message, repeated, tag = "2")]
    pub commits: Vec<EncodedCommit>,
}

#[cfg(test)]
mod tests {
    use penstock_message::Op;

    use super::*;

    /// Checks that the bytes are the same whether transactions are encoded before the frame or with it.
    #[test]
    fn a_commit_of_encoded_transactions_is_a_commit() {
        let purge = Op::Purge {
            queue: "mail".into(),
        };
        let txs = [Tx::from(vec![purge]), Tx::default()];
        let whole = proto::ToBroker {
            commits: vec![proto::Commit {
                first_seq: 300,
                durability: proto::Durability::Os.into(),
                txs: txs.iter().cloned().map(Into::into).collect(),
                part: proto::Part::Whole.into(),
            }],
            ..Default::default()
        };
        let encoded = |tx: &Tx| Encoded::new(tx.clone()).parts()[0].clone();
        let ours = EncodedCommits {
            commits: vec![EncodedCommit {
                first_seq: 300,
                durability: proto::Durability::Os.into(),
                txs: txs.iter().map(encoded).collect(),
                part: proto::Part::Whole.into(),
            }],
        };
        assert_eq!(ours.encode_to_vec(), whole.encode_to_vec());
    }
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
        assert_eq!(parts.concat(), proto::Tx::from(tx).encode_to_vec());
        let within = |part: &&Bytes| part.len() <= FRAME_TARGET_BYTES;
        assert_eq!((parts.len(), parts.iter().filter(within).count()), (4, 3));
    }
}
