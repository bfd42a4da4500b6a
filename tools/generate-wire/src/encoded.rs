//! A field that Rust keeps as it is on the wire, although it holds messages.
//!
//! Nearly all memory of a large frame is its operations. Decoded with their frame, they would all stand in memory
//! twice, once as messages and once as nouns. So a transaction remains the bytes of its frame until penstock-wire
//! converts it, one operation after another. On the wire, a message and a field of bytes look the same.

use std::error::Error;

use protox::prost_reflect::prost_types::FileDescriptorSet;
use protox::prost_reflect::prost_types::field_descriptor_proto::Type;

pub struct Encoded {
    pub message: &'static str,
    pub field: &'static str,
}

pub const TRANSACTIONS: Encoded = Encoded {
    message: "Commit",
    field: "txs",
};

impl Encoded {
    /// Makes the field one of bytes.
    pub fn apply(&self, files: &mut FileDescriptorSet) -> Result<(), Box<dyn Error>> {
        let mut messages = files
            .file
            .iter_mut()
            .flat_map(|file| &mut file.message_type);
        let message = messages.find(|message| message.name() == self.message);
        let message = message.ok_or_else(|| format!("there is no message {}", self.message))?;
        let mut fields = message.field.iter_mut();
        let field = fields.find(|field| field.name() == self.field);
        let field = field.ok_or_else(|| format!("{} has no {}", self.message, self.field))?;
        field.set_type(Type::Bytes);
        field.type_name = None;
        Ok(())
    }

    /// Whether this is the field with this name of this message.
    pub fn is(&self, message: &str, field: &str) -> bool {
        self.message == message && self.field == field
    }
}
