//! Work of clients: plain messages, groups behind a join, locks; how jobs end; and the orders of operators
//! for queues.

use std::collections::VecDeque;

use bytes::Bytes;
use penstock_jobs::{DeliveryHead, Outcome, settle};
use penstock_journal::sim::Rng;
use penstock_message::{
    AppRelease, AppVersion, CatchUp, Claim, Condition, Conflict, DEFAULT_PRIORITY, Delivery, Due,
    Durability, Extras, Failure, Filter, Hold, IdSource, InputShape, InputValue, InputValues,
    Inputs, JoinOutcome, JoinPolicy, Key, Member, Message, MessageId, OnRunning, Op, Open,
    Overflow, Overlap, QueueLimits, Rhythm, ScheduleName, SchedulePlan, ScheduleStep,
    ScheduleTiming, Scope, Target, Tx, Until, Value, ValueStatus, place_of_heir,
};

pub const QUEUES: [&str; 3] = ["default", "mail", "slow"];
pub const TASKS: [&str; 3] = ["shop.send", "shop.count", "shop.merge"];
/// Number of jobs that exceeds one step of the broker.
const CROWD: usize = 1_100;
const LOCKS: [&str; 3] = ["lock-a", "lock-b", "lock-c"];
const SCHEDULES: [&str; 3] = ["poll", "report", "clean-up"];
/// Keys of calls that run one job at a time, of calls that are made once, and of calls that wait for a pause.
const UNIQUE: [&str; 3] = ["page-a", "page-b", "page-c"];
const ONCE: [&str; 3] = ["order-a", "order-b", "order-c"];
const QUIETED: [&str; 3] = ["text-a", "text-b", "text-c"];

/// Habits of a client, drawn once.
#[derive(Clone, Debug)]
pub struct Habits {
    pub queues: Vec<String>,
    pub durabilities: Vec<Durability>,
    pub publishes: bool,
    pub consumes: bool,
    /// Tasks that it can run; `None`: any.
    pub tasks: Option<Vec<String>>,
    pub delays: bool,
    pub groups: bool,
    pub locks: bool,
    pub purges: bool,
    /// Whether it cancels running jobs.
    pub cancels: bool,
    /// Whether it cancels all jobs of a task or a queue.
    pub cancels_many: bool,
    /// Whether it publishes, once, more jobs than one step of the broker takes.
    pub crowds: bool,
    /// Whether it publishes trees of steps.
    pub trees: bool,
    /// Whether other steps take the place of jobs that it runs.
    pub replaces: bool,
    /// Whether some of the messages that it publishes are unique.
    pub unique: bool,
    /// Whether it declares and changes schedules.
    pub schedules: bool,
    /// Whether most jobs wait for others, and few slots can be lent.
    pub short_of_slots: bool,
}

impl Habits {
    pub fn drop(&mut self, name: &str) {
        match name {
            "delays" => self.delays = false,
            "groups" => self.groups = false,
            "locks" => self.locks = false,
            "purges" => self.purges = false,
            "cancels" => self.cancels = false,
            "cancels of many" => self.cancels_many = false,
            "crowds" => self.crowds = false,
            "trees" => self.trees = false,
            "replaced jobs" => self.replaces = false,
            "unique keys" => self.unique = false,
            "schedules" => self.schedules = false,
            "few slots" => self.short_of_slots = false,
            _ => {}
        }
    }
}

/// Publishes and settles jobs.
pub struct Author {
    pub habits: Habits,
    /// Results that it is interested in.
    pub wanted: Vec<Key>,
    /// Queue that it has filled, and empties next.
    to_purge: Option<String>,
    /// Messages that it has published, latest last; some are cancelled, retried or dropped.
    recent: VecDeque<MessageId>,
    /// Members of groups that it has published, latest last; failed ones are retried.
    members: VecDeque<MessageId>,
    /// Workflows that it has opened, latest last; some are cancelled.
    workflows: VecDeque<MessageId>,
    /// Unique messages that it has published, latest last; some are cancelled, retried or dropped.
    unique: VecDeque<MessageId>,
    /// Trees that it has published and whose results it is interested in, latest last.
    pub roots: VecDeque<MessageId>,
    /// Some running messages, of any client.
    pub running: Vec<MessageId>,
}

const RECENT: usize = 30;
/// Maximum depth of a tree of steps, and maximum number of its jobs with a place in a join.
const TREE_DEPTH: u64 = 6;
const TREE_JOBS: u64 = 40;
/// Length of the part of a result that shows what its job computed from its inputs.
pub const MADE_BYTES: usize = 8;

/// Steps of a workflow, as they are drawn.
struct Tree {
    ops: Vec<Op>,
    workflow: Option<MessageId>,
    /// Body of its jobs.
    body: Bytes,
    /// Number of places in joins that are still available to it.
    left: u64,
}

/// Place of a step in a tree.
struct Place {
    /// Id of the job whose result is the step's result.
    id: MessageId,
    member: Option<Member>,
    /// The step's place in a join; `None`: it can't be a member.
    takes: Option<Member>,
}

impl Author {
    pub fn new(habits: Habits) -> Self {
        Self {
            habits,
            wanted: Vec::new(),
            to_purge: None,
            recent: VecDeque::new(),
            members: VecDeque::new(),
            workflows: VecDeque::new(),
            unique: VecDeque::new(),
            roots: VecDeque::new(),
            running: Vec::new(),
        }
    }

    pub fn durability(&self, rng: &mut Rng) -> Durability {
        let durabilities = &self.habits.durabilities;
        durabilities[rng.below(durabilities.len() as u64) as usize]
    }

    /// Draws the end of a job.
    pub fn settlement(&mut self, delivery: &Delivery, rng: &mut Rng, wall_ms: u64) -> Tx {
        let note = Bytes::from_static(b"an error");
        let cost_us = rng.below(5_000);
        let head = DeliveryHead::from(delivery);
        let outcome = match rng.below(12) {
            0 => {
                let delay_ms = if self.habits.delays {
                    rng.below(500)
                } else {
                    0
                };
                Outcome::Retry {
                    delay_ms,
                    note,
                    cost_us,
                }
            }
            1 if delivery.message.max_deliveries < u8::MAX => {
                let failure = Failure {
                    class: "Error".to_string(),
                    message: "the last error".to_string(),
                    fingerprint: 7,
                    preview: Bytes::new(),
                };
                let value = Some(Bytes::from_static(b"the last error"));
                let mut tx = settle(
                    &head,
                    Outcome::Failed {
                        value,
                        note,
                        failure,
                        cost_us,
                    },
                );
                tx.ops.extend(join_of(&delivery.message, false));
                return tx;
            }
            2 => Outcome::Crashed {
                reason: "killed by signal 9".to_string(),
            },
            // Copies must not fail, since nobody could tell dead ones apart.
            3 if delivery.message.max_deliveries < u8::MAX && rng.bool() => Outcome::Suspected {
                reason: "one of several".to_string(),
            },
            3 => Outcome::Returned,
            // Copies can't be replaced.
            4 | 5 if self.habits.replaces && delivery.message.max_deliveries < u8::MAX => {
                let steps = self.replacement(&delivery.message, rng, wall_ms);
                Outcome::Replaced { steps, cost_us }
            }
            _ => {
                let mut tx = success(delivery);
                if rng.one_in(3) {
                    let spawned = self.spawned(&delivery.message, rng, wall_ms);
                    tx.ops.push(spawned);
                }
                if self.habits.trees && rng.one_in(5) {
                    tx.ops = self.grown(&delivery.message, tx.ops, rng, wall_ms);
                }
                if rng.one_in(3) {
                    // A member that reports its end twice counts once.
                    tx.ops.extend(join_of(&delivery.message, true));
                }
                return tx;
            }
        };
        settle(&head, outcome)
    }

    /// Draws a job that is published with the outcome of another one, and belongs to its workflow.
    fn spawned(&mut self, by: &Message, rng: &mut Rng, wall_ms: u64) -> Op {
        let mut publish = self.publish(rng, wall_ms);
        let workflow = by.extras.as_ref().and_then(|extras| extras.workflow);
        if let Op::Publish {
            message, queues, ..
        } = &mut publish
            && workflow.is_some()
            && queues.len() == 1
        {
            let extras = Extras {
                workflow,
                parent: Some(by.id),
                ..Extras::default()
            };
            message.extras = extras.boxed();
        }
        publish
    }

    /// Adds a member to the group of the job, if it is a member: a job, or a few of them.
    fn grown(&mut self, by: &Message, settlement: Vec<Op>, rng: &mut Rng, wall_ms: u64) -> Vec<Op> {
        let Some(extras) = by.extras.as_deref().filter(|it| it.member.is_some()) else {
            return settlement;
        };
        let mut steps = Vec::new();
        let mut ops = Vec::new();
        for _ in 0..1 + rng.below(2) {
            let id = new_id(rng, wall_ms);
            let place = Place {
                id,
                member: [None, place_of_heir(id)][rng.below(2) as usize],
                takes: place_of_heir(id),
            };
            let mut tree = Tree {
                ops: Vec::new(),
                workflow: extras.workflow,
                body: Bytes::new(),
                left: 1 + rng.below(3),
            };
            let depth = rng.below(3);
            self.step(&mut tree, place, depth, rng, wall_ms);
            steps.append(&mut tree.ops);
            ops.push(Op::Grow {
                job: by.id,
                member: id,
                outer: false,
            });
        }
        ops.extend(settlement);
        ops.append(&mut steps);
        ops
    }

    /// Draws the steps that replace a job: another job, a tree that ends with one, or a group.
    fn replacement(&mut self, job: &Message, rng: &mut Rng, wall_ms: u64) -> Vec<Op> {
        let extras = job.extras.as_deref();
        let workflow = extras.and_then(|extras| extras.workflow);
        let member = extras.and_then(|extras| extras.member);
        let place = Place {
            id: job.id,
            member: [None, member, place_of_heir(job.id)][rng.below(3) as usize],
            takes: place_of_heir(job.id),
        };
        // A member that reports its own end does so wherever it is moved.
        let reports = join_of(job, true).is_some();
        let depth = if reports { 0 } else { rng.below(3) };
        let opens = workflow.is_none() && depth > 0;
        let mut tree = Tree {
            ops: Vec::new(),
            workflow: if opens { Some(job.id) } else { workflow },
            body: if reports {
                job.body.clone()
            } else {
                Bytes::new()
            },
            left: 1 + rng.below(6),
        };
        if opens {
            self.open(&mut tree.ops, job.id, rng, wall_ms);
        }
        self.step(&mut tree, place, depth, rng, wall_ms);
        tree.ops
    }

    /// Draws a workflow of nested steps.
    fn tree(&mut self, rng: &mut Rng, wall_ms: u64) -> Tx {
        let id = new_id(rng, wall_ms);
        let mut tree = Tree {
            ops: Vec::new(),
            workflow: Some(id),
            body: Bytes::new(),
            left: match rng.below(16) {
                0 => TREE_JOBS,
                1..4 => 12,
                _ => 5,
            },
        };
        self.open(&mut tree.ops, id, rng, wall_ms);
        let place = Place {
            id,
            member: None,
            takes: None,
        };
        let depth = 1 + rng.below(TREE_DEPTH);
        self.step(&mut tree, place, depth, rng, wall_ms);
        tree.ops.into()
    }

    /// Opens a workflow.
    fn open(&mut self, ops: &mut Vec<Op>, workflow: MessageId, rng: &mut Rng, wall_ms: u64) {
        if self.workflows.len() == RECENT {
            self.workflows.pop_front();
        }
        self.workflows.push_back(workflow);
        let deadline = match rng.below(8) {
            0 if self.habits.delays => Some(Due::AfterMs(50 + rng.below(5_000))),
            1 if self.habits.delays => Some(Due::At(wall_ms + rng.below(5_000))),
            _ => None,
        };
        let open = Open {
            workflow,
            name: "nightly".to_owned(),
            deadline,
            ..Open::default()
        };
        ops.insert(0, Op::Open(open));
    }

    /// Adds a step of a tree, and those before it: a job, a job behind others, or a group.
    fn step(&mut self, tree: &mut Tree, place: Place, depth: u64, rng: &mut Rng, wall_ms: u64) {
        let kind = match depth {
            0 => 0,
            _ => rng.below(6),
        };
        let join = MessageId::new_join(id_source(rng, wall_ms));
        let count = match (kind, rng.below(8)) {
            (0 | 1, _) => 0,
            (_, 0) => 0,
            (_, 1..4) => 1,
            (_, 4) => tree.left,
            _ => 1 + rng.below(4),
        };
        let count = count.min(tree.left);
        tree.left -= count;
        match kind {
            0 | 1 => {
                let message = self.member_of(tree, &place, rng, wall_ms);
                tree.ops.push(Op::Publish {
                    queues: vec![drawn(QUEUES, rng)],
                    message,
                    due: None,
                    unless_key: None,
                });
            }
            // A group needs a place that can be named.
            2 if place.takes.is_some() => tree.ops.push(Op::Hold(Hold {
                join,
                count: count as u32,
                then: place.takes.into_iter().collect(),
                result_ttl_ms: Some(86_400_000),
                ..Hold::default()
            })),
            _ => {
                let mut message = self.member_of(tree, &place, rng, wall_ms);
                if !rng.one_in(4) {
                    let shape = InputShape::List;
                    message.extras.get_or_insert_default().inputs = Some(Inputs { join, shape });
                }
                let mut messages = vec![(drawn(QUEUES, rng), message)];
                if rng.one_in(4) {
                    messages.push((drawn(QUEUES, rng), self.errback(tree, rng, wall_ms)));
                }
                tree.ops.push(Op::Hold(Hold {
                    join,
                    count: count as u32,
                    messages,
                    policy: match rng.below(6) {
                        0 => JoinPolicy::AllEnded,
                        1 => JoinPolicy::UpTo(1 + rng.below(2) as u32),
                        _ => JoinPolicy::AllSucceeded,
                    },
                    ..Hold::default()
                }));
            }
        }
        if kind < 2 {
            return;
        }
        for index in 0..count as u32 {
            let member = Member { join, index };
            let place = Place {
                id: MessageId::member(join, index),
                member: Some(member),
                takes: Some(member),
            };
            self.step(tree, place, depth - 1, rng, wall_ms);
        }
    }

    /// Draws a job that runs once the steps before its own have failed.
    fn errback(&mut self, tree: &Tree, rng: &mut Rng, wall_ms: u64) -> Message {
        let mut message = self.message(rng, wall_ms, Bytes::new());
        let extras = Extras {
            when: JoinOutcome::Failed,
            workflow: tree.workflow,
            ..Extras::default()
        };
        message.extras = extras.boxed();
        message
    }

    /// Draws the job of a step.
    fn member_of(&mut self, tree: &Tree, place: &Place, rng: &mut Rng, wall_ms: u64) -> Message {
        let mut message = self.message(rng, wall_ms, tree.body.clone());
        message.id = place.id;
        let extras = Extras {
            member: place.member,
            workflow: tree.workflow,
            ..Extras::default()
        };
        message.extras = extras.boxed();
        if self.habits.delays && rng.one_in(6) {
            message.result_ttl_ms = Some(50 + rng.below(3_000));
        }
        // A blocked job without a result stays pending until somebody drops the job that blocks it.
        if place.takes.is_none() && message.result_ttl_ms.is_some() {
            self.wanted.push(Key::Result(message.id));
            if self.roots.len() == RECENT {
                self.roots.pop_front();
            }
            self.roots.push_back(message.id);
        }
        if place.member.is_some() {
            if self.members.len() == RECENT {
                self.members.pop_front();
            }
            self.members.push_back(message.id);
        }
        message
    }

    /// Draws a transaction that brings new work, or uses locks.
    pub fn new_work(&mut self, rng: &mut Rng, wall_ms: u64) -> Tx {
        let key =
            |rng: &mut Rng| Key::Named(Bytes::from_static(LOCKS[rng.below(3) as usize].as_bytes()));
        if let Some(queue) = self.to_purge.take() {
            let op = match self.habits.cancels_many && rng.bool() {
                true => cancel_many(Some(queue), None, rng),
                false => Op::Purge { queue },
            };
            return vec![op].into();
        }
        if self.habits.crowds && rng.one_in(12) {
            self.habits.crowds = false;
            return self.crowd(rng, wall_ms);
        }
        if self.habits.unique && rng.one_in(3) {
            return self.unique_work(rng, wall_ms);
        }
        if self.habits.schedules && rng.one_in(6) {
            return vec![self.schedule_work(rng, wall_ms)].into();
        }
        match rng.below(12) {
            0 if self.habits.trees && rng.bool() => return self.tree(rng, wall_ms),
            0 if self.habits.groups => return self.group(rng, wall_ms),
            // Deletes a key, then publishes one id twice: only if the key is absent, and unconditionally.
            1 if self.habits.locks && rng.one_in(3) => {
                let key = key(rng);
                let mut first = self.publish(rng, wall_ms);
                if let Op::Publish {
                    unless_key, queues, ..
                } = &mut first
                {
                    queues.truncate(1);
                    *unless_key = Some(key.clone().into());
                }
                let mut second = first.clone();
                if let Op::Publish { unless_key, .. } = &mut second {
                    *unless_key = None;
                }
                return vec![Op::Delete { key }, first, second].into();
            }
            1 | 2 if self.habits.locks => {
                let condition = if rng.bool() {
                    Condition::Absent
                } else {
                    Condition::Present
                };
                let key = key(rng);
                let guard = Op::Guard {
                    key: key.clone(),
                    condition: condition.clone(),
                };
                let change = match condition {
                    Condition::Absent => {
                        let status = ValueStatus::Succeeded;
                        let value = Value::new(status, Bytes::from_static(b"mine"));
                        let ttl_ms = self.habits.delays.then(|| 20 + rng.below(2_000));
                        Op::Put {
                            key,
                            value,
                            ttl_ms,
                            group: "locks".to_string(),
                        }
                    }
                    _ => Op::Delete { key },
                };
                return vec![self.publish(rng, wall_ms), guard, change].into();
            }
            3 if self.habits.locks => {
                let mut op = self.publish(rng, wall_ms);
                if let Op::Publish {
                    unless_key, queues, ..
                } = &mut op
                {
                    queues.truncate(1);
                    *unless_key = Some(key(rng).into());
                }
                return vec![op].into();
            }
            4 if self.habits.purges => {
                let queue = QUEUES[rng.below(3) as usize].to_string();
                let op = match rng.below(5) {
                    0 => Op::Purge { queue },
                    1 => Op::Pause { queue },
                    2 => Op::Resume { queue },
                    _ => Op::Limit {
                        queue,
                        limits: limits(rng),
                    },
                };
                return vec![op].into();
            }
            5 if self.habits.purges && !self.recent.is_empty() => {
                let recent = self.recent[rng.below(self.recent.len() as u64) as usize];
                let target = Target::Job(recent);
                let op = match rng.below(4) {
                    0 | 1 => Op::Cancel {
                        target,
                        reason: String::new(),
                        running: OnRunning::ALL[rng.below(3) as usize],
                    },
                    2 => Op::RetryFailed {
                        target,
                        queue: rng
                            .bool()
                            .then(|| QUEUES[rng.below(3) as usize].to_string()),
                    },
                    _ => Op::DropFailed { target },
                };
                return vec![op].into();
            }
            9 if self.habits.groups && !self.members.is_empty() => {
                let member = rng.below(self.members.len() as u64) as usize;
                let retry = Op::RetryFailed {
                    target: Target::Job(self.members[member]),
                    queue: None,
                };
                return vec![retry].into();
            }
            10 if self.habits.cancels_many && !self.workflows.is_empty() && rng.bool() => {
                let filter = Filter {
                    workflow: Some(self.workflows[rng.below(self.workflows.len() as u64) as usize]),
                    ..Filter::default()
                };
                let cancel = Op::Cancel {
                    target: Target::Filter(filter),
                    reason: "the whole workflow".to_string(),
                    running: OnRunning::ALL[rng.below(3) as usize],
                };
                return vec![cancel].into();
            }
            6 | 7 if self.habits.cancels && !self.running.is_empty() => {
                let running = self.running[rng.below(self.running.len() as u64) as usize];
                let op = Op::Cancel {
                    target: Target::Job(running),
                    reason: "enough".to_string(),
                    running: OnRunning::ALL[rng.below(3) as usize],
                };
                return vec![op].into();
            }
            8 if self.habits.cancels_many && rng.one_in(4) => {
                let queue = rng.below(3).checked_sub(1).map(|_| drawn(QUEUES, rng));
                let task = rng.below(3).checked_sub(1).map(|_| drawn(TASKS, rng));
                let cancel = cancel_many(queue, task, rng);
                // The rest of the transaction does not apply to it.
                return match rng.one_in(4) {
                    true => vec![
                        self.publish(rng, wall_ms),
                        cancel,
                        self.publish(rng, wall_ms),
                    ],
                    false => vec![cancel],
                }
                .into();
            }
            _ => {}
        }
        let count = if rng.one_in(6) { 20 } else { 1 + rng.below(3) };
        let ops: Vec<Op> = (0..count).map(|_| self.publish(rng, wall_ms)).collect();
        ops.into()
    }

    /// Draws an order for a schedule, by code or by a person.
    fn schedule_work(&mut self, rng: &mut Rng, wall_ms: u64) -> Op {
        let schedule = ScheduleName {
            app: "shop".to_owned(),
            name: drawn(SCHEDULES, rng),
        };
        let step = match rng.below(12) {
            0..5 => {
                let generation = AppRelease {
                    version: AppVersion::Number(1 + rng.below(2)),
                    started_at: wall_ms / 20_000,
                };
                ScheduleStep::Declare(Box::new(self.plan(rng, wall_ms)), generation)
            }
            5 => ScheduleStep::Set(Box::new(self.plan(rng, wall_ms))),
            6 => ScheduleStep::Retime(Box::new(self.plan(rng, wall_ms).into_parts().0)),
            7 => ScheduleStep::Pause,
            8 | 9 => ScheduleStep::Resume,
            10 => ScheduleStep::Run,
            _ => ScheduleStep::Reset,
        };
        Op::Schedule { schedule, step }
    }

    /// Draws the times of a schedule, their policies, and the job.
    fn plan(&mut self, rng: &mut Rng, wall_ms: u64) -> SchedulePlan {
        let rhythm = match rng.below(8) {
            0 => Rhythm::Cron("* * * * *".to_owned()),
            1 => Rhythm::Cron("*/2 0-23 * * *".to_owned()),
            2 => Rhythm::At(wall_ms + rng.below(5_000)),
            _ => Rhythm::Every([1_000, 1_000, 1_700, 2_500][rng.below(4) as usize]),
        };
        let zone = ["UTC", "Europe/Paris"][rng.below(2) as usize];
        let jitter_ms = if rng.one_in(4) { rng.below(3_000) } else { 0 };
        let mut message = self.message(rng, wall_ms, Bytes::from_static(b"at its time"));
        message.id = MessageId([0; 16]);
        message.result_ttl_ms = Some(86_400_000);
        SchedulePlan {
            timing: ScheduleTiming {
                rhythm,
                zone: zone.to_owned(),
                jitter_ms,
            },
            overlap: Overlap::ALL[rng.below(4) as usize],
            catch_up: CatchUp::ALL[rng.below(3) as usize],
            window_ms: [1_000, 60_000, 3_600_000][rng.below(3) as usize],
            queue: drawn(QUEUES, rng),
            message,
        }
    }

    /// Draws messages that are unique, or an order for one that was published before.
    fn unique_work(&mut self, rng: &mut Rng, wall_ms: u64) -> Tx {
        if !self.unique.is_empty() && rng.one_in(4) {
            let target = Target::Job(self.unique[rng.below(self.unique.len() as u64) as usize]);
            let op = match rng.below(8) {
                0 => Op::DropFailed { target },
                1 => Op::Cancel {
                    target,
                    reason: String::new(),
                    running: OnRunning::ALL[rng.below(3) as usize],
                },
                _ => Op::RetryFailed {
                    target,
                    queue: rng.bool().then(|| drawn(QUEUES, rng)),
                },
            };
            return vec![op].into();
        }
        let count = if rng.one_in(4) { 2 } else { 1 };
        let ops: Vec<Op> = (0..count)
            .map(|_| self.unique_publish(rng, wall_ms))
            .collect();
        ops.into()
    }

    /// Draws a message, the key that it claims, and what happens if another message has the key.
    fn unique_publish(&mut self, rng: &mut Rng, wall_ms: u64) -> Op {
        let mut op = self.publish(rng, wall_ms);
        let is_debounced = rng.one_in(3);
        let (scope, names) = match (is_debounced, rng.one_in(4)) {
            (true, _) => (Scope::Unique, QUIETED),
            (false, true) => (Scope::Idempotency, ONCE),
            (false, false) => (Scope::Unique, UNIQUE),
        };
        let key = Bytes::from_static(names[rng.below(3) as usize].as_bytes());
        let (until, conflict) = match (is_debounced, scope) {
            (true, _) => {
                let max_wait_ms = Some(10 + rng.below(300));
                (Until::Started, Conflict::Replace { max_wait_ms })
            }
            (false, Scope::Idempotency) => {
                let conflict = [Conflict::Skip, Conflict::Refuse][rng.below(2) as usize];
                (Until::ForMs(20 + rng.below(3_000)), conflict)
            }
            (false, Scope::Unique) => {
                let replace = Conflict::Replace { max_wait_ms: None };
                let conflicts = [Conflict::Skip, Conflict::Refuse, replace];
                let until = [Until::Ended, Until::Started][rng.below(2) as usize];
                (until, conflicts[rng.below(3) as usize])
            }
        };
        if let Op::Publish {
            queues,
            message,
            due,
            unless_key,
        } = &mut op
        {
            queues.truncate(1);
            if is_debounced {
                *due = Some(Due::AfterMs(1 + rng.below(3_000)));
            }
            if self.unique.len() == RECENT {
                self.unique.pop_front();
            }
            self.unique.push_back(message.id);
            let key = Key::Scoped(scope, key);
            let claim = Claim {
                key,
                until,
                conflict,
            };
            *unless_key = Some(Box::new(claim));
        }
        op
    }

    /// Draws a join with a few members, and the messages that it holds until they have ended.
    fn group(&mut self, rng: &mut Rng, wall_ms: u64) -> Tx {
        let join = MessageId::new_join(id_source(rng, wall_ms));
        let count = 1 + rng.below(4) as u32;
        let policy = match rng.below(3) {
            0 => JoinPolicy::AllSucceeded,
            1 => JoinPolicy::AllEnded,
            _ => JoinPolicy::UpTo(1 + rng.below(2) as u32),
        };
        // Members that the broker knows as such, or that report their own end.
        let may_be_known = rng.one_in(2);
        let mut ops = Vec::new();
        // Its held messages may be members of another join.
        let outer = rng.one_in(3).then(|| {
            let outer = MessageId::new_join(id_source(rng, wall_ms));
            let queue = QUEUES[rng.below(3) as usize].to_string();
            ops.push(Op::Hold(Hold {
                join: outer,
                count: 1,
                messages: vec![(queue, self.message(rng, wall_ms, Bytes::new()))],
                policy: match rng.bool() {
                    true => JoinPolicy::AllSucceeded,
                    false => JoinPolicy::AllEnded,
                },
                ..Hold::default()
            }));
            outer
        });
        let is_known = may_be_known || outer.is_some();
        let held = (0..=rng.below(2)).map(|index| {
            let queue = QUEUES[rng.below(3) as usize].to_string();
            let mut message = self.message(rng, wall_ms, Bytes::new());
            let place = outer.filter(|_| index == 0);
            if let Some(outer) = place {
                message.id = MessageId::member(outer, 0);
                message.extras = member(outer, 0);
            }
            if is_known && rng.one_in(2) {
                let shape = InputShape::List;
                message.extras.get_or_insert_default().inputs = Some(Inputs { join, shape });
            }
            (queue, message)
        });
        ops.push(Op::Hold(Hold {
            join,
            count,
            messages: held.collect(),
            policy,
            ..Hold::default()
        }));
        for index in 0..count {
            let mut body = join.0.to_vec();
            body.extend_from_slice(&index.to_le_bytes());
            let body = if is_known { Bytes::new() } else { body.into() };
            let mut message = self.message(rng, wall_ms, body);
            if is_known {
                message.id = MessageId::member(join, index);
                message.extras = member(join, index);
                if self.members.len() == RECENT {
                    self.members.pop_front();
                }
                self.members.push_back(message.id);
            }
            if message.result_ttl_ms.is_some() {
                self.wanted.push(Key::Result(message.id));
            }
            ops.push(Op::Publish {
                queues: vec![QUEUES[rng.below(3) as usize].to_string()],
                message,
                due: None,
                unless_key: None,
            });
        }
        // Its outcome is that of its first step after the group. Chosen by id, so that all other draws stay the same.
        if is_known && join.0[12] & 1 == 1 {
            self.name_workflow(&mut ops, rng, wall_ms);
        }
        ops.into()
    }

    /// Turns the jobs of a transaction into a workflow, and opens it.
    fn name_workflow(&mut self, ops: &mut Vec<Op>, rng: &mut Rng, wall_ms: u64) {
        let held = ops.iter().find_map(|op| match op {
            Op::Hold(hold) => hold.messages.first(),
            _ => None,
        });
        let Some(workflow) = held.map(|(_, message)| message.id) else {
            return;
        };
        for op in ops.iter_mut() {
            let messages: Vec<&mut Message> = match op {
                Op::Hold(hold) => hold.messages.iter_mut().map(|(_, held)| held).collect(),
                Op::Publish { message, .. } => vec![message],
                _ => Vec::new(),
            };
            for message in messages {
                message.extras.get_or_insert_default().workflow = Some(workflow);
            }
        }
        self.open(ops, workflow, rng, wall_ms);
    }

    /// Publishes enough jobs at once that an operation on all of them takes several steps.
    fn crowd(&mut self, rng: &mut Rng, wall_ms: u64) -> Tx {
        let queue = QUEUES[rng.below(3) as usize].to_string();
        let expires_at = rng.bool().then(|| Due::AfterMs(20 + rng.below(400)));
        if expires_at.is_none() {
            self.to_purge = Some(queue.clone());
        }
        let publish = |_| {
            let mut message = self.message(rng, wall_ms, Bytes::new());
            message.expires_at = expires_at;
            message.result_ttl_ms = None;
            Op::Publish {
                queues: vec![queue.clone()],
                message,
                due: None,
                unless_key: None,
            }
        };
        let ops: Vec<Op> = (0..CROWD).map(publish).collect();
        ops.into()
    }

    pub fn publish(&mut self, rng: &mut Rng, wall_ms: u64) -> Op {
        let due = match rng.below(8) {
            0 if self.habits.delays => Some(Due::AfterMs(rng.below(3_000))),
            1 if self.habits.delays => Some(Due::At(wall_ms + rng.below(3_000))),
            _ => None,
        };
        let size = if rng.one_in(10) {
            rng.below(6_000)
        } else {
            rng.below(100)
        };
        let body = Bytes::from(vec![rng.draw() as u8; size as usize]);
        let mut message = self.message(rng, wall_ms, body);
        let mut queues = vec![QUEUES[rng.below(3) as usize].to_string()];
        if rng.one_in(16) {
            // Each copy is settled, and may die, on its own. So there is no single result, and nobody could tell dead
            // copies apart.
            message.max_deliveries = u8::MAX;
            message.result_ttl_ms = None;
            queues = QUEUES.iter().map(|queue| (*queue).to_string()).collect();
        }
        if message.result_ttl_ms.is_some() {
            self.wanted.push(Key::Result(message.id));
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(message.id);
        Op::Publish {
            queues,
            message,
            due,
            unless_key: None,
        }
    }

    fn message(&self, rng: &mut Rng, wall_ms: u64, body: Bytes) -> Message {
        let expires_at = match rng.below(10) {
            0 if self.habits.delays => Some(Due::AfterMs(rng.below(4_000))),
            _ => None,
        };
        Message {
            id: new_id(rng, wall_ms),
            task: TASKS[rng.below(3) as usize].to_string(),
            priority: if rng.one_in(4) {
                rng.below(10) as u8
            } else {
                DEFAULT_PRIORITY
            },
            expires_at,
            result_ttl_ms: (!rng.one_in(4)).then_some(86_400_000),
            max_deliveries: 1 + rng.below(3) as u8,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body,
            extras: None,
        }
    }
}

/// Draws limits of a few messages, or none.
fn limits(rng: &mut Rng) -> QueueLimits {
    QueueLimits {
        max_length: rng.one_in(2).then(|| rng.below(20)),
        max_bytes: None,
        overflow: match rng.bool() {
            true => Overflow::DropOldest,
            false => Overflow::Reject,
        },
    }
}

fn drawn(names: [&str; 3], rng: &mut Rng) -> String {
    names[rng.below(3) as usize].to_string()
}

/// Cancels the jobs of a queue and a task; `None`: of any.
fn cancel_many(queue: Option<String>, task: Option<String>, rng: &mut Rng) -> Op {
    let filter = Filter {
        queue,
        task,
        ..Filter::default()
    };
    Op::Cancel {
        target: Target::Filter(filter),
        reason: "all of them".to_string(),
        running: OnRunning::ALL[rng.below(3) as usize],
    }
}

fn new_id(rng: &mut Rng, unix_ms: u64) -> MessageId {
    MessageId::new(id_source(rng, unix_ms))
}

fn id_source(rng: &mut Rng, unix_ms: u64) -> IdSource {
    let mut random = [0; 10];
    random[..8].copy_from_slice(&rng.draw().to_le_bytes());
    IdSource { unix_ms, random }
}

/// Returns a place in a join, as the broker records it.
fn member(join: MessageId, index: u32) -> Option<Box<Extras>> {
    let extras = Extras {
        member: Some(Member { join, index }),
        ..Extras::default()
    };
    extras.boxed()
}

/// Returns the report of a join member that the broker does not know as one, from its body.
pub fn join_of(message: &Message, succeeded: bool) -> Option<Op> {
    let (join, index) = message.body.split_at_checked(16)?;
    let index = u32::from_le_bytes(index.try_into().ok()?);
    let join = MessageId(join.try_into().ok()?);
    Some(Op::Join {
        join,
        index,
        succeeded,
    })
}

/// Returns the result that a job computes from its inputs: the same in each run of this attempt, wherever it runs.
pub fn made_of(task: &str, attempt: u32, inputs: Option<&InputValues>) -> [u8; MADE_BYTES] {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    };
    add(task.as_bytes());
    add(&attempt.to_le_bytes());
    if let Some(inputs) = inputs {
        add_values(inputs, &mut add);
    }
    hash.to_le_bytes()
}

fn add_values(given: &InputValues, add: &mut impl FnMut(&[u8])) {
    add(&given.count.to_le_bytes());
    for value in given.values.iter().flatten() {
        match value {
            InputValue::Of(ValueStatus::Succeeded, body) => {
                add(&body[..body.len().min(MADE_BYTES)]);
            }
            InputValue::Of(status, _) => add(&[*status as u8]),
            InputValue::Gathered(values) => add_values(values, add),
            InputValue::Gone => add(b"gone"),
        }
    }
}

/// Returns the settlement of a job that succeeded. Its result is the computed value, and which run computed it.
pub fn success(delivery: &Delivery) -> Tx {
    let head = DeliveryHead::from(delivery);
    let message = &delivery.message;
    let inputs = InputValues::decode(&delivery.inputs).ok();
    let mut value = made_of(&message.task, message.attempt, inputs.as_ref()).to_vec();
    value.extend_from_slice(&delivery.lease.grant.to_le_bytes());
    let value = Some(value.into());
    let mut tx = settle(
        &head,
        Outcome::Succeeded {
            value,
            cost_us: 100,
        },
    );
    tx.ops.extend(join_of(&delivery.message, true));
    tx
}
