//! Versions of the protocol that this program speaks, and the additions of each.
//!
//! Both sides state the highest version that they speak, and continue in the lower of the two. Additions of later
//! versions must not be sent: an operation would be refused, but a field would be dropped silently. So a client checks
//! [`ADDITIONS`] before it sends anything to an older broker.
//!
//! Hello, Welcome, Close and the query that stops a local broker mean the same in every version.

use std::fmt;

use bytes::Bytes;
use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Highest version that this program speaks.
pub const PROTOCOL_VERSION: u32 = 2;
/// Lowest version that it speaks. Version 1 was never released.
pub const LOWEST_PROTOCOL_VERSION: u32 = 2;

/// Versions that one side speaks.
#[derive(Clone, Copy, Debug)]
pub struct Versions {
    pub lowest: u32,
    pub highest: u32,
    /// Additions of all versions but the first.
    pub additions: &'static [Addition],
}

/// Addition of a version after the first.
#[derive(Clone, Copy, Debug)]
pub struct Addition {
    pub since: u32,
    /// Name for people.
    pub what: &'static str,
    pub within: Within,
    /// Field numbers from `within` down to the message that contains the fields.
    pub path: &'static [u32],
    /// First and last number of its fields; any of them counts as the addition.
    pub fields: (u32, u32),
}

/// Content of a frame from a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Within {
    Tx,
    Query,
}

/// Field numbers on the way to others.
const OPS: u32 = 1;
const ACK: u32 = 1;
const PUBLISH: u32 = 4;
const HOLD: u32 = 8;

/// Additions of each version but the first. Remove an entry once no earlier version is spoken.
pub const ADDITIONS: &[Addition] = &[
    operation(2, 14, "cancelling jobs"),
    operation(2, 15, "failing a job in one operation"),
    operation(2, 16, "retrying failed jobs"),
    operation(2, 17, "dropping failed jobs"),
    operation(2, 19, "sending a group in several transactions"),
    operation(2, 20, "naming workflows"),
    operation(2, 22, "schedules"),
    operation(2, 23, "removing schedules"),
    Addition {
        since: 2,
        what: "replacing a job",
        within: Within::Tx,
        path: &[OPS, ACK],
        fields: (3, 3),
    },
    message_fields(2, (12, 25), &[OPS, PUBLISH, 2]),
    message_fields(2, (12, 25), &[OPS, HOLD, 3, 2]),
    message_fields(2, (5, 9), &[OPS, HOLD]),
    query(2, 5, "asking a worker"),
    query(2, 6, "asking for the status in pages"),
    query(2, 7, "listing failed jobs"),
    query(2, 8, "asking about an operation on many jobs"),
    query(2, 9, "listing workflows"),
    query(2, 10, "listing schedules"),
    query(2, 12, "moving the clock"),
];

const fn operation(since: u32, number: u32, what: &'static str) -> Addition {
    Addition {
        since,
        what,
        within: Within::Tx,
        path: &[OPS],
        fields: (number, number),
    }
}

const fn message_fields(since: u32, fields: (u32, u32), path: &'static [u32]) -> Addition {
    Addition {
        since,
        what: "headers, keys, time limits, retries and workflows of a job",
        within: Within::Tx,
        path,
        fields,
    }
}

const fn query(since: u32, number: u32, what: &'static str) -> Addition {
    Addition {
        since,
        what,
        within: Within::Query,
        path: &[],
        fields: (number, number),
    }
}

impl Versions {
    pub const TODAY: Self = Self {
        lowest: LOWEST_PROTOCOL_VERSION,
        highest: PROTOCOL_VERSION,
        additions: ADDITIONS,
    };

    /// Returns the version to speak with a peer whose highest version is this one; `None`: there is none.
    pub fn common(&self, highest_of_other: u32) -> Option<u32> {
        let common = highest_of_other.min(self.highest);
        (common >= self.lowest).then_some(common)
    }

    /// Returns an addition in these bytes that a broker of this version would not understand.
    pub fn too_new(
        &self,
        version: u32,
        within: Within,
        encoded: &Bytes,
    ) -> Option<&'static Addition> {
        let is_too_new =
            |additions: &&'static Addition| additions.within == within && additions.since > version;
        let additions: Vec<&'static Addition> = self.additions.iter().filter(is_too_new).collect();
        // Bytes that this program has encoded are sound, so an error hides nothing.
        find(encoded.clone(), &mut Vec::new(), &additions).unwrap_or(None)
    }
}

/// Formats as "version 2", or "versions 2 to 3".
impl fmt::Display for Versions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lowest == self.highest {
            true => write!(out, "version {}", self.highest),
            false => write!(out, "versions {} to {}", self.lowest, self.highest),
        }
    }
}

fn find(
    mut bytes: Bytes,
    here: &mut Vec<u32>,
    additions: &[&'static Addition],
) -> Result<Option<&'static Addition>, prost::DecodeError> {
    while bytes.has_remaining() {
        let (number, wire_type) = decode_key(&mut bytes)?;
        let is_field = |additions: &&&Addition| {
            let (first, last) = additions.fields;
            additions.path == here.as_slice() && (first..=last).contains(&number)
        };
        if let Some(found) = additions.iter().find(is_field) {
            return Ok(Some(found));
        }
        here.push(number);
        let leads_on = additions
            .iter()
            .any(|additions| additions.path.starts_with(here.as_slice()));
        if leads_on && wire_type == WireType::LengthDelimited {
            let length = decode_varint(&mut bytes)?.min(bytes.remaining() as u64);
            let found = find(bytes.split_to(length as usize), here, additions)?;
            if found.is_some() {
                return Ok(found);
            }
        } else {
            skip_field(wire_type, number, &mut bytes, DecodeContext::default())?;
        }
        here.pop();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use penstock_message::{
        AskQuery, Extras, FailedQuery, Filter, Hold, JoinPolicy, Message, MessageId, OnRunning, Op,
        Query, StatusQuery, Target, Tx, WorkflowsQuery,
    };
    use prost::Message as _;

    use super::*;
    use crate::proto;

    const BEFORE: Versions = Versions {
        lowest: 1,
        ..Versions::TODAY
    };

    fn in_tx(version: u32, ops: Vec<Op>) -> Option<&'static str> {
        let encoded = crate::convert::encode_tx(Tx { ops });
        let additions = BEFORE.too_new(version, Within::Tx, &encoded);
        additions.map(|additions| additions.what)
    }

    fn pause() -> Op {
        Op::Pause {
            queue: "mail".to_owned(),
        }
    }

    fn message(extras: Extras) -> Message {
        Message {
            id: MessageId([1; 16]),
            task: "mail.send".to_owned(),
            priority: 4,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::from_static(&[0x72, 3, b'n', b'o', b't']),
            extras: extras.boxed(),
        }
    }

    fn publish(extras: Extras) -> Op {
        Op::Publish {
            queues: vec!["mail".to_owned()],
            message: message(extras),
            due: None,
            unless_key: None,
        }
    }

    #[test]
    fn an_operation_and_a_field_are_found_wherever_they_stand() {
        let cancel = Op::Cancel {
            target: Target::Job(MessageId([1; 16])),
            reason: String::new(),
            running: OnRunning::Ask,
        };
        let with_key = Extras {
            key: Some(Bytes::from_static(b"k")),
            ..Extras::default()
        };
        let retried = Extras {
            generation: 1,
            ..Extras::default()
        };
        let hold = Op::Hold(Hold {
            join: MessageId([2; 16]),
            count: 1,
            messages: vec![("mail".to_owned(), message(with_key.clone()))],
            policy: JoinPolicy::AllEnded,
            ..Hold::default()
        });
        let fields = Some("headers, keys, time limits, retries and workflows of a job");
        assert_eq!(
            in_tx(1, vec![pause(), publish(Extras::default())]),
            None,
            "a body is not looked into"
        );
        assert_eq!(
            in_tx(1, vec![pause(), cancel.clone()]),
            Some("cancelling jobs")
        );
        assert_eq!(in_tx(1, vec![pause(), publish(with_key)]), fields);
        assert_eq!(in_tx(1, vec![publish(retried)]), fields);
        assert_eq!(in_tx(1, vec![hold]), fields);
        assert_eq!(in_tx(2, vec![cancel]), None);
    }

    #[test]
    fn a_question_is_found() {
        let check = |query: Query, expected: Option<&str>| {
            let encoded = proto::Query::from((7, query)).encode_to_vec().into();
            let additions = BEFORE.too_new(1, Within::Query, &encoded);
            assert_eq!(additions.map(|additions| additions.what), expected);
        };
        check(Query::Message(MessageId([1; 16])), None);
        check(Query::Stop, None);
        check(
            Query::Status(StatusQuery::default()),
            Some("asking for the status in pages"),
        );
        let failed = FailedQuery {
            filter: Filter::default(),
            after: 0,
            limit: 0,
            newest_first: true,
        };
        check(Query::Failed(failed), Some("listing failed jobs"));
        check(
            Query::Operation(9),
            Some("asking about an operation on many jobs"),
        );
        let workflows = WorkflowsQuery::default();
        check(Query::Workflows(workflows), Some("listing workflows"));
        let set_clock = Query::SetClock {
            forward_ms: 1,
            by_schedules: false,
        };
        check(set_clock, Some("moving the clock"));
        let ask = AskQuery {
            worker: "mill".to_owned(),
            question: Bytes::new(),
            patience_ms: 0,
        };
        check(Query::Ask(ask), Some("asking a worker"));
    }

    #[test]
    fn the_common_version_is_the_lower_of_both_highest_or_none() {
        let both = Versions {
            lowest: 2,
            highest: 3,
            additions: &[],
        };
        let common = |other| both.common(other);
        assert_eq!(
            [0, 1, 2, 3, 4].map(common),
            [None, None, Some(2), Some(3), Some(3)]
        );
        assert_eq!(both.to_string(), "versions 2 to 3");
        assert_eq!(Versions::TODAY.to_string(), "version 2");
    }

    /// Checks that the table has everything that a noun can become on the wire and that has no number in version 1.
    #[test]
    fn nothing_that_came_with_version_2_is_forgotten() {
        let target = || Target::Filter(Filter::default());
        let lease = penstock_message::Lease {
            message: MessageId([1; 16]),
            epoch: 1,
            grant: 1,
        };
        let ops = [
            Op::Replace { lease, cost_us: 0 },
            Op::Fail {
                lease,
                value: None,
                note: Bytes::new(),
                failure: penstock_message::Failure::default(),
                cost_us: 0,
            },
            Op::Cancel {
                target: target(),
                reason: String::new(),
                running: OnRunning::Leave,
            },
            Op::RetryFailed {
                target: target(),
                queue: None,
            },
            Op::DropFailed { target: target() },
        ];
        for op in ops {
            assert!(in_tx(1, vec![op.clone()]).is_some(), "{op:?}");
        }
    }
}
