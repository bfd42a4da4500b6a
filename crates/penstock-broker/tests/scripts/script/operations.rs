//! Reads the operations of a script's transactions.

use penstock_message::{
    Claim, Condition, Conflict, Failure, HeaderPatch, Hold, InputShape, Inputs, JoinPolicy, Key,
    Member, Message, OnRunning, Op, Open, Overflow, QueueLimits, ReleaseReason, ReleaseTimes,
    ScheduleStep, Scope, Unsealed, Until, Value, ValueStatus, place_of_heir,
};

use super::ScriptWorld;
use super::words::{
    ScriptOptions, extras, generation, join_id, message_id, number, plan, schedule_name, target,
    when,
};

impl ScriptWorld {
    pub(super) fn op(&mut self, text: &str) -> Op {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (name, options) = (words[1], ScriptOptions::new(&words[2..]));
        match words[0] {
            "publish" => {
                let queues = options.text("queue").unwrap_or("default");
                if queues.contains('+') {
                    self.copied.insert(name.to_owned());
                }
                Op::Publish {
                    queues: queues.split('+').map(str::to_owned).collect(),
                    message: self.message(name, &options),
                    due: options.due("after", "at"),
                    unless_key: self.claim(&options),
                }
            }
            "ack" => Op::Ack {
                lease: self.lease(name),
                cost_us: options.number("cost").unwrap_or(1000),
            },
            "replace" => Op::Replace {
                lease: self.lease(name),
                cost_us: options.number("cost").unwrap_or(1000),
            },
            "return" => Op::Release {
                lease: self.lease(name),
                reason: ReleaseReason::Returned,
            },
            "crash" => Op::Release {
                lease: self.lease(name),
                reason: ReleaseReason::Crashed(
                    options.text("reason").unwrap_or("killed").to_owned(),
                ),
            },
            "suspect" => Op::Release {
                lease: self.lease(name),
                reason: ReleaseReason::Suspected(
                    options.text("reason").unwrap_or("killed").to_owned(),
                ),
            },
            "move" => Op::Move {
                lease: self.lease(name),
                queue: options.text("queue").map(str::to_owned),
                due: options.due("after", "at"),
                patch: HeaderPatch {
                    next_attempt: options.has("next"),
                    note: options.text("note").map(|note| note.to_owned().into()),
                    expires_at: options.due("expires", "expires-at"),
                },
                cost_us: 1000,
            },
            "fail" => Op::Fail {
                lease: self.lease(name),
                value: (!options.has("no-value")).then(|| "error".into()),
                note: options.text("note").unwrap_or("raised").to_owned().into(),
                failure: Failure {
                    class: options.text("class").unwrap_or("Error").to_owned(),
                    message: options.text("message").unwrap_or("boom").to_owned(),
                    fingerprint: options.number("fingerprint").unwrap_or(7),
                    preview: options.text("preview").unwrap_or("").to_owned().into(),
                },
                cost_us: 1000,
            },
            "cancel" => Op::Cancel {
                target: target(name, &options),
                reason: options.text("reason").unwrap_or("").to_owned(),
                running: match (options.has("ask"), options.has("kill")) {
                    (_, true) => OnRunning::Kill,
                    (true, _) => OnRunning::Ask,
                    (false, false) => OnRunning::Leave,
                },
            },
            "retry" => Op::RetryFailed {
                target: target(name, &options),
                queue: options.text("to").map(str::to_owned),
            },
            "drop" => Op::DropFailed {
                target: target(name, &options),
            },
            "unnamed" => Op::Unnamed,
            "set" | "declare" => {
                let plan = Box::new(plan(self.message(name, &options), &options));
                Op::Schedule {
                    schedule: schedule_name(name),
                    step: match words[0] {
                        "set" => ScheduleStep::Set(plan),
                        _ => ScheduleStep::Declare(plan, generation(&options)),
                    },
                }
            }
            "retime" => {
                let plan = plan(self.message(name, &options), &options);
                Op::Schedule {
                    schedule: schedule_name(name),
                    step: ScheduleStep::Retime(Box::new(plan.into_parts().0)),
                }
            }
            "schedule" => Op::Schedule {
                schedule: schedule_name(name),
                step: match words[2] {
                    "pause" => ScheduleStep::Pause,
                    "resume" => ScheduleStep::Resume,
                    "run" => ScheduleStep::Run,
                    "reset" => ScheduleStep::Reset,
                    other => panic!("no such step: {other}"),
                },
            },
            "unschedule" => Op::Unschedule {
                schedule: schedule_name(name),
            },
            "put" => Op::Put {
                key: self.key(name),
                value: Value::new(
                    match options.has("failed") {
                        true => ValueStatus::Failed,
                        false => ValueStatus::Succeeded,
                    },
                    match options.number("bytes") {
                        Some(bytes) => vec![b'v'; bytes as usize].into(),
                        None => words[2].to_owned().into(),
                    },
                ),
                ttl_ms: options.number("ttl"),
                group: options.text("group").unwrap_or("task").to_owned(),
            },
            "delete" => Op::Delete {
                key: self.key(name),
            },
            "guard" => Op::Guard {
                key: self.key(name),
                condition: match words[2] {
                    "absent" => Condition::Absent,
                    "present" => Condition::Present,
                    body => Condition::Is(body.to_owned().into()),
                },
            },
            "hold" => {
                Op::Hold(Hold {
                    join: join_id(name),
                    count: options.number("count").unwrap_or(0) as u32,
                    messages: options
                        .text("messages")
                        .unwrap_or("")
                        .split('+')
                        .filter(|message| !message.is_empty())
                        .map(|message| {
                            let queue = options.text("queue").unwrap_or("default");
                            let mut held = self.message(message, &options);
                            // For example `each=o/`: each message is the member of that join that its name says.
                            if let Some(join) = options.text("each") {
                                let (_, index) = message.split_once('/').expect("join/index");
                                let extras = held.extras.get_or_insert_default();
                                extras.member = Some(Member {
                                    join: join_id(join),
                                    index: number(index) as u32,
                                });
                            }
                            if let Some(shape) = options.text("inputs") {
                                let shape = match shape {
                                    "one" => InputShape::One,
                                    "list" => InputShape::List,
                                    other => panic!("no such shape: {other}"),
                                };
                                let join = join_id(name);
                                let extras = held.extras.get_or_insert_default();
                                extras.inputs = Some(Inputs { join, shape });
                            }
                            let times = ReleaseTimes {
                                due: options.due("later", "later-at"),
                                expires_after_ms: options.number("later-expires"),
                            };
                            if times != ReleaseTimes::default() {
                                held.extras.get_or_insert_default().later = Some(Box::new(times));
                            }
                            (queue.to_owned(), held)
                        })
                        .collect(),
                    policy: match options.has("all-ended") {
                        true => JoinPolicy::AllEnded,
                        false => {
                            let failures = options.number("max-failures").unwrap_or(0);
                            JoinPolicy::of_max_failures(failures as u32)
                        }
                    },
                    expects: options
                        .text("expects")
                        .into_iter()
                        .flat_map(|expects| expects.split('+'))
                        .map(|expected| {
                            let (index, outcome) = expected.split_once(':').expect("index:outcome");
                            (number(index) as u32, when(Some(outcome)))
                        })
                        .collect(),
                    then: options
                        .text("then")
                        .into_iter()
                        .flat_map(|then| then.split('+'))
                        .map(|place| {
                            let (join, index) = place.split_once(':').expect("join:index");
                            Member {
                                join: join_id(join),
                                index: number(index) as u32,
                            }
                        })
                        .chain(options.text("takes").map(|job| {
                            let job = self.lease(job).message;
                            place_of_heir(job).expect("the id of a job")
                        }))
                        .chain(options.text("then-of").map(|member| {
                            place_of_heir(message_id(member)).expect("the id of a job")
                        }))
                        .collect(),
                    result_ttl_ms: options.number("result"),
                    unsealed: options.text("unsealed").map(|workflow| Unsealed {
                        workflow: message_id(workflow),
                        creator: options.text("creator").map(message_id),
                    }),
                })
            }
            "open" => Op::Open(Open {
                workflow: message_id(name),
                name: options.text("name").unwrap_or("nightly").to_owned(),
                description: options.text("steps").unwrap_or("a|b").to_owned().into(),
                deadline: options.due("deadline", "deadline-at"),
                kept_ms: options.number("kept"),
                parent: options.text("parent").map(message_id),
            }),
            "seal" => Op::Seal {
                join: join_id(name),
                count: options.number("count").expect("a seal names its count") as u32,
            },
            "grow" => Op::Grow {
                job: self.lease(name).message,
                member: message_id(options.text("member").expect("a growth names its member")),
                outer: options.has("outer"),
            },
            "join" => Op::Join {
                join: join_id(name),
                index: options.number("index").expect("a join names its index") as u32,
                succeeded: !options.has("failed"),
            },
            "purge" => Op::Purge {
                queue: name.to_owned(),
            },
            "pause" => Op::Pause {
                queue: name.to_owned(),
            },
            "resume" => Op::Resume {
                queue: name.to_owned(),
            },
            "limit" => Op::Limit {
                queue: name.to_owned(),
                limits: QueueLimits {
                    max_length: options.number("length"),
                    max_bytes: options.number("size"),
                    overflow: match options.has("drop-oldest") {
                        true => Overflow::DropOldest,
                        false => Overflow::Reject,
                    },
                },
            },
            other => panic!("no such operation: {other}"),
        }
    }

    fn message(&mut self, name: &str, options: &ScriptOptions<'_>) -> Message {
        self.messages.insert(name.to_owned());
        let mut extras = extras(options);
        if let (Some(extras), Some(workflow)) = (&mut extras, options.text("workflow")) {
            // A job that a schedule has made has no word.
            extras.workflow = Some(self.lease(workflow).message);
        }
        Message {
            id: message_id(name),
            task: options.text("task").unwrap_or("task").to_owned(),
            priority: options.number("priority").unwrap_or(4) as u8,
            expires_at: options.due("expires", "expires-at"),
            result_ttl_ms: (!options.has("no-result"))
                .then_some(options.number("ttl").unwrap_or(86_400_000)),
            max_deliveries: options.number("deliveries").unwrap_or(3) as u8,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: match options.number("bytes") {
                Some(bytes) => vec![b'm'; bytes as usize].into(),
                None => name.to_owned().into(),
            },
            extras,
        }
    }

    /// Returns the key for a word: its result if a message of that name was published, otherwise the named key.
    pub(super) fn key(&mut self, name: &str) -> Key {
        if self.messages.contains(name) || name.contains('/') {
            return Key::Result(message_id(name));
        }
        self.keys.insert(name.to_owned());
        Key::Named(name.to_owned().into())
    }

    /// Reads a claim: `unless=key` claims as applications do; `claim=key` claims a derived key with `until=start`, or
    /// `for=` milliseconds, and `conflict=refuse`, `replace`, or a longest wait in milliseconds.
    fn claim(&mut self, options: &ScriptOptions<'_>) -> Option<Box<Claim>> {
        if let Some(key) = options.text("unless") {
            return Some(self.key(key).into());
        }
        let key = options.text("claim")?.to_owned().into();
        Some(Box::new(Claim {
            key: Key::Scoped(Scope::Unique, key),
            until: match (options.text("until"), options.number("for")) {
                (Some("start"), _) => Until::Started,
                (_, Some(ms)) => Until::ForMs(ms),
                _ => Until::Ended,
            },
            conflict: match options.text("conflict") {
                None => Conflict::Skip,
                Some("refuse") => Conflict::Refuse,
                Some("replace") => Conflict::Replace { max_wait_ms: None },
                Some(ms) => Conflict::Replace {
                    max_wait_ms: Some(number(ms)),
                },
            },
        }))
    }
}
