//! The shapes of messages: the fields that hold messages, and the repeated fields. With them,
//! penstock-wire computes how much memory a frame takes before it decodes the frame.

use std::collections::BTreeSet;
use std::error::Error;

use protox::prost_reflect::prost_types::field_descriptor_proto::{Label, Type};
use protox::prost_reflect::prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorSet,
};

use crate::encoded::Encoded;
use crate::split::Split;

const PACKAGE: &str = ".penstock.v1.";
/// Rust type of a field of bytes.
const BYTES: &str = "::prost::bytes::Bytes";

/// Generates the Rust code for the shapes of this message and of all messages inside it.
pub fn of(
    root: &str,
    split: &Split,
    encoded: &Encoded,
    files: &FileDescriptorSet,
) -> Result<String, Box<dyn Error>> {
    let mut shapes = String::new();
    let mut entries = BTreeSet::new();
    let mut seen = BTreeSet::from([root.to_owned()]);
    let mut todo = vec![root.to_owned()];
    while let Some(name) = todo.pop() {
        let mut fields = String::new();
        for field in &find(&name, files)?.field {
            let Some(mut shape) = shape_of(field)? else {
                continue;
            };
            if encoded.is(&name, field.name()) {
                // An entry becomes a noun in a list of its own, while the bytes are still there.
                let noun = shape.entry.take().ok_or("an encoded field is a list")?;
                shape.entry = Some(format!("({BYTES}, {noun})"));
            }
            fields += &format!("        ({}, {}),\n", field.number(), shape.code());
            entries.extend(shape.entry);
            if let Some(held) = shape.holds
                && seen.insert(held.clone())
            {
                todo.push(held);
            }
        }
        let list = match fields.is_empty() {
            true => String::new(),
            false => format!("\n{fields}    "),
        };
        let constant = constant(&name);
        let boxed = match name == split.message {
            true => format!(
                ".with_box(super::FIRST_EXTRA, size_of::<super::{}>())",
                split.extras
            ),
            false => String::new(),
        };
        shapes += &format!(
            "    pub(crate) const {constant}: EntryShape = EntryShape::new(&[{list}]){boxed};\n"
        );
    }
    let mut sizes = String::new();
    for entry in entries {
        sizes += &format!("        size_of::<{entry}>(),\n");
    }
    Ok(format!(
        "/// The fields of a message from this one on are in a box of their own, mostly absent.\n\
         pub(crate) const FIRST_EXTRA: u32 = {};\n\n\
         /// Shapes of the frames that a client may send, for `weigh`.\n\
         pub(crate) mod shapes {{\n    use crate::weigh::{{EntryField, EntryShape}};\n\n{shapes}\n    \
         /// Bytes of memory for an entry of each kind of list.\n    \
         pub(crate) const ENTRIES: &[usize] = &[\n{sizes}    ];\n}}\n",
        split.first_rare,
    ))
}

struct FieldShape {
    /// Name of the message in the field.
    holds: Option<String>,
    /// Rust type of an entry, if the field is a list.
    entry: Option<String>,
}

impl FieldShape {
    fn code(&self) -> String {
        let shape = self.holds.as_deref().map(constant);
        match (shape, &self.entry) {
            (Some(shape), None) => format!("EntryField::One(&{shape})"),
            (Some(shape), Some(entry)) => {
                format!("EntryField::Many(&{shape}, size_of::<{entry}>())")
            }
            (None, entry) => {
                let entry = entry.as_deref().unwrap_or("()");
                let field = match entry {
                    "u64" => "ManyNumbers",
                    _ => "ManyPlain",
                };
                format!("EntryField::{field}(size_of::<{entry}>())")
            }
        }
    }
}

/// Returns the shape of a field; `None` if it needs no memory beyond its message, or its text.
fn shape_of(field: &FieldDescriptorProto) -> Result<Option<FieldShape>, Box<dyn Error>> {
    let is_list = field.label() == Label::Repeated;
    let plain = |entry: &str| FieldShape {
        holds: None,
        entry: Some(entry.to_owned()),
    };
    Ok(match field.r#type() {
        Type::Message => {
            let name = relative(field.type_name())?;
            let entry = is_list.then(|| format!("super::{}", rust_path(&name)));
            let holds = Some(name);
            Some(FieldShape { holds, entry })
        }
        _ if !is_list => None,
        Type::String => Some(plain("String")),
        Type::Bytes => Some(plain(BYTES)),
        Type::Uint64 => Some(plain("u64")),
        other => {
            let field = field.name();
            return Err(format!(
                "{field}: weigh.rs does not know how to weigh a list of {other:?}"
            )
            .into());
        }
    })
}

fn relative(type_name: &str) -> Result<String, Box<dyn Error>> {
    let name = type_name.strip_prefix(PACKAGE);
    Ok(name
        .ok_or_else(|| format!("{type_name} is of another package"))?
        .to_owned())
}

fn find<'a>(
    name: &str,
    files: &'a FileDescriptorSet,
) -> Result<&'a DescriptorProto, Box<dyn Error>> {
    let mut among: Vec<_> = files
        .file
        .iter()
        .flat_map(|file| &file.message_type)
        .collect();
    let mut found = None;
    for part in name.split('.') {
        let message = among.into_iter().find(|message| message.name() == part);
        let message = message.ok_or_else(|| format!("there is no message {name}"))?;
        among = message.nested_type.iter().collect();
        found = Some(message);
    }
    found.ok_or_else(|| "a message without a name".into())
}

/// `Hold.Held` is `HOLD_HELD`.
fn constant(name: &str) -> String {
    let parts: Vec<String> = name.split('.').map(snake).collect();
    parts.join("_").to_uppercase()
}

/// `Hold.Held` is `hold::Held`, as prost-build names it.
fn rust_path(name: &str) -> String {
    match name.rsplit_once('.') {
        None => name.to_owned(),
        Some((outer, inner)) => {
            let modules: Vec<String> = outer.split('.').map(snake).collect();
            format!("{}::{inner}", modules.join("::"))
        }
    }
}

fn snake(camel: &str) -> String {
    let mut snake = String::new();
    for letter in camel.chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}
