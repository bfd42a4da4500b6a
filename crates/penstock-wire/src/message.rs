//! Joins the two parts of the protocol's `Message`: see tools/generate-wire/src/split.rs.

use prost::DecodeError;
use prost::bytes::{Buf, BufMut};
use prost::encoding::{DecodeContext, WireType};

use crate::generated::{FIRST_EXTRA, MessageExtras, MessageHead};

/// Message of the protocol. Most have nothing in `extras`, and pay only a null pointer for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    pub head: MessageHead,
    pub extras: Option<Box<MessageExtras>>,
}

impl prost::Message for Message {
    #[inline]
    fn encode_raw(&self, buf: &mut impl BufMut) {
        self.head.encode_raw(buf);
        if let Some(extras) = &self.extras {
            extras.encode_raw(buf);
        }
    }

    #[inline]
    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            ..FIRST_EXTRA => self.head.merge_field(tag, wire_type, buf, context),
            FIRST_EXTRA.. => {
                let extras = self.extras.get_or_insert_default();
                extras.merge_field(tag, wire_type, buf, context)
            }
        }
    }

    #[inline]
    fn encoded_len(&self) -> usize {
        let extras = self.extras.as_ref();
        self.head.encoded_len() + extras.map_or(0, |extras| extras.encoded_len())
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}
