//! A message cut in two: the fields that nearly every message has, and the rare ones.
//!
//! prost-build reserves room for each field in its struct, so a frame of plain messages would pay for
//! fields that hardly any message has. The rare fields go into a separate struct, which penstock-wire
//! keeps in a box that is mostly absent. The bytes on the wire stay the same.

use std::error::Error;

use protox::prost_reflect::prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet,
};

/// The message, its first rare field, and the names of its two parts.
pub struct Split {
    pub message: &'static str,
    pub first_rare: i32,
    pub head: &'static str,
    pub extras: &'static str,
}

pub const MESSAGE: Split = Split {
    message: "Message",
    first_rare: 12,
    head: "MessageHead",
    extras: "MessageExtras",
};

/// Field numbers in a file's descriptor, as used in the paths of its comments.
const MESSAGES: i32 = 4;
const FIELDS: i32 = 2;

impl Split {
    /// Adds both parts to the file with the message, and keeps the comments of their fields.
    pub fn apply(&self, files: &mut FileDescriptorSet) -> Result<(), Box<dyn Error>> {
        for file in &mut files.file {
            let mut messages = file.message_type.iter();
            if let Some(index) = messages.position(|message| message.name() == self.message) {
                self.add(file, index, self.head, |number| number < self.first_rare);
                self.add(file, index, self.extras, |number| number >= self.first_rare);
                return Ok(());
            }
        }
        Err(format!("there is no message {}", self.message).into())
    }

    fn add(
        &self,
        file: &mut FileDescriptorProto,
        index: usize,
        name: &str,
        belongs: impl Fn(i32) -> bool,
    ) {
        let whole = &file.message_type[index];
        let part_index = file.message_type.len();
        let mut part = DescriptorProto {
            name: Some(name.to_owned()),
            // Only those of `optional`, whose order has no meaning.
            oneof_decl: whole.oneof_decl.clone(),
            ..DescriptorProto::default()
        };
        let mut moved = vec![(
            vec![MESSAGES, index as i32],
            vec![MESSAGES, part_index as i32],
        )];
        for (place, field) in whole.field.iter().enumerate() {
            if !belongs(field.number()) {
                continue;
            }
            moved.push((
                vec![MESSAGES, index as i32, FIELDS, place as i32],
                vec![MESSAGES, part_index as i32, FIELDS, part.field.len() as i32],
            ));
            part.field.push(FieldDescriptorProto::clone(field));
        }
        file.message_type.push(part);
        if let Some(info) = &mut file.source_code_info {
            for (from, to) in moved {
                let locations = info.location.iter();
                let mut comments: Vec<_> =
                    locations.filter(|at| at.path == from).cloned().collect();
                for comment in &mut comments {
                    comment.path.clone_from(&to);
                }
                info.location.extend(comments);
            }
        }
    }
}
