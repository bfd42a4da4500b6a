//! Encodes questions that people ask a worker through its broker, and its replies: MessagePack maps with a
//! version.
//!
//! ```text
//!     {v: 1, ask: "resize", processes: 8}      a question; `ask` names it, and the rest is its own
//!     {v: 1, state: "serving", slots: 8, …}    it was done
//!     {v: 1, refused: "…"}                     it was not, and why
//!     {v: 1, unknown: "0.1.0"}                 this worker, of that version of penstock, does not know the question
//! ```
//!
//! A question may come twice, because clients resend theirs after a reconnect. So each states how things should
//! be, not what to change.

use bytes::Bytes;
use penstock_message::WorkerState;
use serde::{Deserialize, Serialize};

/// Version of the maps. Another version may use the same words with other meanings.
const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Start no jobs until `Resume`.
    Pause,
    Resume,
    /// Start no jobs, and exit when the running ones have ended.
    Drain,
    /// Stop as on SIGTERM.
    Stop,
    Resize(Sizes),
    /// Question of a newer penstock.
    Unknown,
}

/// New numbers of slots; `None` leaves a number unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sizes {
    /// Number of processes, as in `penstock worker -c`.
    pub concurrency: Option<u32>,
    /// Threads in each of these processes.
    pub threads: Option<u32>,
    /// Processes next to those with threads.
    pub processes: Option<u32>,
    /// Slots on the event loop.
    pub async_slots: Option<u32>,
    pub isolated: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Done(Standing),
    /// The worker refused, for this reason; nothing was changed.
    Refused(String),
    /// The worker runs this version of penstock, which does not know the question.
    Unknown {
        penstock: String,
    },
}

/// State of a worker after a question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub state: WorkerState,
    pub slots: u32,
    /// Number of slots with a job.
    pub busy: u32,
    /// Time that running jobs have left, in a worker that stops within its grace period.
    pub ends_within_ms: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct QuestionMap {
    v: u32,
    ask: String,
    #[serde(flatten)]
    sizes: Sizes,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct ReplyMap {
    v: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<String>,
    slots: u32,
    busy: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    ends_within_ms: Option<u64>,
}

impl Question {
    fn name(&self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Drain => "drain",
            Self::Stop => "stop",
            Self::Resize(_) => "resize",
            Self::Unknown => "unknown",
        }
    }

    pub fn encode(&self) -> Bytes {
        let sizes = match self {
            Self::Resize(sizes) => *sizes,
            _ => Sizes::default(),
        };
        encode(&QuestionMap {
            v: VERSION,
            ask: self.name().to_owned(),
            sizes,
        })
    }

    /// Reads a question; anything else is unknown.
    pub fn decode(bytes: &[u8]) -> Self {
        let Ok(QuestionMap {
            v: VERSION,
            ask,
            sizes,
        }) = rmp_serde::from_slice(bytes)
        else {
            return Self::Unknown;
        };
        let all = [Self::Pause, Self::Resume, Self::Drain, Self::Stop];
        let all = all.into_iter().chain([Self::Resize(sizes)]);
        let mut named = all.filter(|one| one.name() == ask);
        named.next().unwrap_or(Self::Unknown)
    }
}

impl Reply {
    pub fn unknown() -> Self {
        Self::Unknown {
            penstock: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    pub fn encode(self) -> Bytes {
        let map = ReplyMap {
            v: VERSION,
            ..ReplyMap::default()
        };
        encode(&match self {
            Self::Done(standing) => ReplyMap {
                state: Some(state_name(standing.state).to_owned()),
                slots: standing.slots,
                busy: standing.busy,
                ends_within_ms: standing.ends_within_ms,
                ..map
            },
            Self::Refused(why) => ReplyMap {
                refused: Some(why),
                ..map
            },
            Self::Unknown { penstock } => ReplyMap {
                unknown: Some(penstock),
                ..map
            },
        })
    }

    /// Reads a reply; `None` if it is none, or of another version.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let map: ReplyMap = rmp_serde::from_slice(bytes).ok()?;
        if map.v != VERSION {
            return None;
        }
        Some(match map {
            ReplyMap {
                refused: Some(why), ..
            } => Self::Refused(why),
            ReplyMap {
                unknown: Some(penstock),
                ..
            } => Self::Unknown { penstock },
            map => Self::Done(Standing {
                state: state_of(map.state.as_deref()?),
                slots: map.slots,
                busy: map.busy,
                ends_within_ms: map.ends_within_ms,
            }),
        })
    }
}

/// Names of all states, for people and programs.
const STATES: [(WorkerState, &str); 5] = [
    (WorkerState::Unsaid, "unknown"),
    (WorkerState::Serving, "serving"),
    (WorkerState::Paused, "paused"),
    (WorkerState::Draining, "draining"),
    (WorkerState::Ending, "ending"),
];

/// Returns the name of a state, for people and programs.
pub fn state_name(state: WorkerState) -> &'static str {
    let named = STATES.iter().find(|(one, _)| *one == state);
    named.map_or("unknown", |(_, name)| name)
}

fn state_of(name: &str) -> WorkerState {
    let named = STATES.iter().find(|(_, one)| *one == name);
    named.map_or(WorkerState::Unsaid, |(state, _)| *state)
}

fn encode(map: &impl Serialize) -> Bytes {
    // Writing maps of strings and numbers into memory can't fail.
    rmp_serde::to_vec_named(map).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_arrive_as_they_were_asked() {
        let sizes = Sizes {
            concurrency: Some(8),
            async_slots: Some(200),
            ..Sizes::default()
        };
        for question in [
            Question::Pause,
            Question::Resume,
            Question::Drain,
            Question::Stop,
            Question::Resize(sizes),
        ] {
            assert_eq!(Question::decode(&question.encode()), question);
        }
    }

    #[test]
    fn a_question_that_is_not_known_is_told_from_one_that_is() {
        let ask = |v: u32, ask: &str, more: &str| {
            let map = std::collections::BTreeMap::from([("ask", ask), ("depth", more)]);
            let mut value = serde_json::to_value(map).unwrap();
            value["v"] = v.into();
            rmp_serde::to_vec_named(&value).unwrap()
        };
        assert_eq!(Question::decode(&ask(1, "stack", "9")), Question::Unknown);
        assert_eq!(Question::decode(&ask(2, "pause", "9")), Question::Unknown);
        // Fields that were added later are ignored.
        assert_eq!(Question::decode(&ask(1, "pause", "9")), Question::Pause);
        assert_eq!(Question::decode(b"\xc1"), Question::Unknown);
        assert_eq!(Question::decode(b""), Question::Unknown);
    }

    #[test]
    fn replies_arrive_as_they_were_made() {
        let standing = |state| Standing {
            state,
            slots: 8,
            busy: 3,
            ends_within_ms: Some(25_000),
        };
        let done = STATES.map(|(state, _)| Reply::Done(standing(state)));
        let others = [Reply::Refused("no".to_owned()), Reply::unknown()];
        for reply in done.into_iter().chain(others) {
            assert_eq!(Reply::decode(&reply.clone().encode()), Some(reply));
        }
        assert_eq!(Reply::decode(b"\xc1"), None);
    }
}
