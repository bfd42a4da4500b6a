//! A message cut in two: the fields that nearly all of its kind have, and those that few have.
//!
//! prost-build gives each field a place in its struct, so a frame of plain messages would pay for what
//! hardly any has. Here the later fields of a message go into a struct of their own, which
//! penstock-wire keeps in a box that is mostly absent. On the wire nothing of it is seen.

use std::error::Error;

use protox::prost_reflect::prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet,
};

/// The message, the first field that few have, and what the two parts are called.
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

/// Numbers of the fields in a file's descriptor, as paths to its comments have them.
const MESSAGES: i32 = 4;
const FIELDS: i32 = 2;

impl Split {
    /// Adds both parts to the file that has the message, with the comments of their fields.
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
            // Only those of `optional`, which say nothing by their place.
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
