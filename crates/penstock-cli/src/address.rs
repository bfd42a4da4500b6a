//! Parses the target of a command: `queue:mail`, later also `task:…`, `key:…` and `name:…`. A bare word is a
//! queue.

use std::fmt;
use std::str::FromStr;

use crate::exit::{CommandError, NOT_OFFERED};
use crate::text::printable;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    kind: AddressKind,
    name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AddressKind {
    Queue,
    Task,
    Key,
    Name,
}

const KINDS: [(&str, AddressKind); 4] = [
    ("queue", AddressKind::Queue),
    ("task", AddressKind::Task),
    ("key", AddressKind::Key),
    ("name", AddressKind::Name),
];

impl Address {
    pub fn of_queue(name: &str) -> Self {
        Self {
            kind: AddressKind::Queue,
            name: name.to_owned(),
        }
    }

    /// Returns the full address, for programs.
    pub fn typed(&self) -> String {
        format!("{}:{}", self.kind_name(), self.name)
    }

    fn kind_name(&self) -> &'static str {
        let kind = KINDS.iter().find(|(_, kind)| *kind == self.kind);
        kind.map_or("", |(name, _)| name)
    }

    /// Returns the name of the queue. `what` is the subject of the error for any other address, such as "a
    /// limit".
    pub fn queue(&self, what: &str) -> Result<&str, CommandError> {
        match self.kind {
            AddressKind::Queue => Ok(&self.name),
            AddressKind::Task | AddressKind::Key | AddressKind::Name => Err(CommandError::new(
                NOT_OFFERED,
                format!(
                    "{what} of {self} is not offered yet: this version only accepts queues, such as queue:mail; \
                     nothing was changed"
                ),
            )),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, name) = match text.split_once(':') {
            None => (AddressKind::Queue, text),
            Some((kind, name)) => match KINDS.iter().find(|(known, _)| *known == kind) {
                Some((_, kind)) => (*kind, name),
                None => {
                    return Err(format!(
                        "an address is queue:NAME, task:NAME, key:NAME or name:NAME; for a queue of this name, write queue:{}",
                        printable(text)
                    ));
                }
            },
        };
        match name {
            "" => Err("the name is empty".to_owned()),
            name => Ok(Self {
                kind,
                name: name.to_owned(),
            }),
        }
    }
}

/// Shows the address to people: control characters are escaped.
impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.kind_name(), printable(&self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_word_is_a_queue_and_a_kind_that_is_not_built_says_so() {
        let check = |text: &str, expected: &str| {
            let shown = match text.parse::<Address>() {
                Err(why) => why,
                Ok(address) => match address.queue("a limit") {
                    Ok(queue) => format!("queue {queue}"),
                    Err(failure) => format!("{} {}", failure.code, failure.message),
                },
            };
            assert!(shown.starts_with(expected), "{text}: {shown}");
        };
        check("mail", "queue mail");
        check("queue:mail", "queue mail");
        check("queue:task:mail", "queue task:mail");
        check(
            "task:shop.send",
            "75 a limit of task:shop.send is not offered yet",
        );
        check("key:7", "75 ");
        check("name:nightly", "75 ");
        check("a:b", "an address is queue:NAME");
        check("", "the name is empty");
        check("queue:", "the name is empty");
    }
}
