//! Scripts for a broker: a line says what happens, and after the arrow which outputs the broker sends.
//!
//! ```text
//!     a hello                      -> a welcome 0
//!     a publish one                -> a confirm 1
//!     w hello                      -> w welcome 0
//!     w consume default 10         -> w deliver one
//!     w ack one; put one yes       -> w confirm 1
//! ```
//!
//! Clients are words, and so are messages, queues and keys. Operations of one transaction are separated by `;`,
//! transactions of one commit by `|`. Before the next line the disk has synced, unless a line made it `stall`. At
//! the end of each script the broker is recovered from its records, and the copy must look like the original.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use penstock_broker::{
    Boot, Broker, BrokerOptions, CloseReason, ConnId, Input, Notice, Now, Output, Position, Query,
    Read, Recovery,
};
use penstock_message::{
    AskQuery, Consume, Durability, FailedQuery, InputValues, Key, Lease, Op, Others, Progress,
    SchedulesQuery, SessionId, Space, StatusQuery, TaskSelection, Tx, WorkerReport, WorkerState,
    WorkflowState, WorkflowsQuery,
};

mod journal;
mod operations;
mod words;

use words::{
    ScriptOptions, describe_answer, describe_given, describe_receipt, describe_value, filter,
    job_counts, message_id, name_of_message, number, tallied,
};

/// Runs a script and compares each line's outputs with those after its arrow.
pub fn check(script: &str) {
    // The outputs must be the same whether all bodies are in memory or none.
    for resident_bodies_bytes in [None, Some(0)] {
        let options = BrokerOptions {
            resident_bodies_bytes,
            ..BrokerOptions::default()
        };
        check_with(options, script);
    }
}

pub fn check_with(options: BrokerOptions, script: &str) {
    let mut world = ScriptWorld::new(options);
    world.tells_deadlines = true;
    for line in script.lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (command, expected) = line.split_once("->").unwrap_or((line, ""));
        let expected: Vec<&str> = expected
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .collect();
        let outputs = by_client(world.run(command.trim()));
        let expected = by_client(expected);
        assert_eq!(
            outputs, expected,
            "\nafter the line: {line}\nof the script:\n{script}"
        );
    }
    world.check_recovery();
}

/// Returns the bytes of a question or a reply; `MiB:N` stands for N MiB.
fn words(text: &str) -> Bytes {
    match text.strip_prefix("MiB:") {
        Some(mib) => vec![0; number(mib) as usize * (1 << 20) + 1].into(),
        None => text.to_owned().into(),
    }
}

/// Sorts outputs by client: outputs to one client have an order, outputs to several have none.
fn by_client<T: AsRef<str>>(mut outputs: Vec<T>) -> Vec<T> {
    outputs.sort_by(|one, other| {
        let client = |line: &T| line.as_ref().split(' ').next().map(str::to_owned);
        client(one).cmp(&client(other))
    });
    outputs
}

pub struct ScriptWorld {
    options: BrokerOptions,
    broker: Broker,
    now: Now,
    epoch: u32,
    /// Records of the journal, in order; `None` where a segment was reclaimed.
    journal: Vec<Option<Vec<u8>>>,
    /// Number of synced records.
    synced: usize,
    is_stalled: bool,
    /// Records that can no longer be read.
    damaged: BTreeSet<usize>,
    /// Reads that the disk has yet to answer; `None` if it answers at once.
    held_reads: Option<Vec<Read>>,
    /// End of the segment that `carry` empties.
    mark: usize,
    clients: BTreeMap<String, ScriptClient>,
    connections: u64,
    /// Last lease of each message, and the one before as `old-` and its name.
    leases: BTreeMap<String, Lease>,
    messages: BTreeSet<String>,
    /// Messages of several queues, whose copies have separate leases.
    copied: BTreeSet<String>,
    keys: BTreeSet<String>,
    /// Whether deliveries are shown with the deadlines of their workflows, which older texts lack.
    tells_deadlines: bool,
    was_repaired: bool,
}

#[derive(Default)]
struct ScriptClient {
    conn: Option<ConnId>,
    session: SessionId,
    seq: u64,
}

impl ScriptWorld {
    pub fn new(options: BrokerOptions) -> Self {
        let now = Now {
            mono_ms: 1_000,
            wall_ms: 1_700_000_000_000,
            ..Now::default()
        };
        Self {
            broker: Recovery::new(options.clone()).finish(now, 1),
            options,
            now,
            epoch: 1,
            journal: Vec::new(),
            synced: 0,
            is_stalled: false,
            damaged: BTreeSet::new(),
            held_reads: None,
            mark: 0,
            clients: BTreeMap::new(),
            connections: 0,
            leases: BTreeMap::new(),
            messages: BTreeSet::new(),
            copied: BTreeSet::new(),
            keys: BTreeSet::new(),
            tells_deadlines: false,
            was_repaired: false,
        }
    }

    /// Runs one line of a script. Returns the broker's outputs.
    pub fn run(&mut self, command: &str) -> Vec<String> {
        if let Some((first, second)) = command.split_once(" && ") {
            // Both arrive before the broker continues.
            for command in [first, second] {
                let words: Vec<&str> = command.split_whitespace().collect();
                self.run_client(words[0], &words[1..], command);
            }
            return self.settle();
        }
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["counts"] => return self.counts(),
            ["running"] => return self.running(),
            ["capacity"] => return self.capacity(),
            ["wait", ms] => {
                let ms = number(ms);
                self.now.mono_ms += ms;
                self.pass(ms);
                self.broker.handle_deadline(self.now);
            }
            // Time passes from deadline to deadline: how often the broker wakes in this period.
            ["looks", ms] => return vec![self.looks(number(ms)).to_string()],
            ["wall", ms] => {
                self.now.wall_ms = self
                    .now
                    .wall_ms
                    .checked_add_signed(ms.parse().unwrap())
                    .unwrap();
                self.broker.handle_deadline(self.now);
            }
            // The machine starts, and provides its clock from here on.
            ["boot"] => {
                let id = self.now.boot.map_or(1, |boot| boot.id[0] + 1);
                self.now.boot = Some(Boot {
                    id: [id; 16],
                    ms: 0,
                });
            }
            // No broker runs for this long, and meanwhile the wall clock is set.
            ["killed-for", ms, "wall", set_by] => {
                self.take_records();
                self.pass(number(ms));
                let set_by = set_by.parse().unwrap();
                self.now.wall_ms = self.now.wall_ms.checked_add_signed(set_by).unwrap();
                self.restart(self.epoch + 1);
            }
            ["stall"] => self.is_stalled = true,
            ["write"] => {
                self.take_records();
                self.broker
                    .handle_written(Position(self.journal.len() as u64));
            }
            ["sync"] => self.is_stalled = false,
            ["power-cut"] => {
                self.journal.truncate(self.synced);
                self.restart(self.epoch + 1);
            }
            ["kill"] => {
                self.take_records();
                self.restart(self.epoch + 1);
            }
            ["restart"] => {
                self.take_records();
                self.restart(self.epoch);
            }
            ["rot"] => self.damaged.extend(0..self.journal.len()),
            ["hold-reads"] => self.held_reads = Some(Vec::new()),
            ["answer-reads"] => {
                for read in self.held_reads.take().expect("reads are held") {
                    self.answer(read);
                }
            }
            ["disk", "steps-fit"] => self.input(Input::StepsFit(true)),
            ["disk", level] => {
                let space = match level {
                    "plenty" => Space::Plenty,
                    "no-publishes" => Space::NoPublishes,
                    "no-leases" => Space::NoLeases,
                    "no-settlements" => Space::NoSettlements,
                    other => panic!("no such level: {other}"),
                };
                self.input(Input::Space(space));
            }
            ["room", bytes] => {
                let bytes = bytes.parse().expect("a number");
                self.input(Input::Room { bytes });
            }
            ["memory", state] => self.input(Input::Memory {
                is_full: state == "full",
                limit_bytes: 64 << 20,
            }),
            ["mark"] => self.mark = self.journal.len(),
            ["carry"] => self.carry_forward(),
            ["carry", steps] => self.carry_steps(number(steps)),
            [client, ref verb @ ..] => self.run_client(client, verb, command),
            [] => panic!("an empty command"),
        }
        self.settle()
    }

    /// Whether the line names no client without a connection and no lease that was never granted.
    pub fn is_possible(&self, command: &str) -> bool {
        if command.starts_with("carry") {
            return !self.is_stalled;
        }
        let mut words = command.split_whitespace();
        let Some(client) = words.next().and_then(|name| self.clients.get(name)) else {
            return true;
        };
        if words.next() == Some("hello") {
            return words.all(|message| self.leases.contains_key(message));
        }
        client.conn.is_some()
    }

    fn run_client(&mut self, name: &str, verb: &[&str], command: &str) {
        match *verb {
            ["hello", ref arguments @ ..] => {
                let mut session = [0; 16];
                session[..name.len()].copy_from_slice(name.as_bytes());
                self.connections += 1;
                let conn = ConnId(self.connections);
                let client = self.clients.entry(name.to_owned()).or_default();
                client.conn = Some(conn);
                client.session = SessionId(session);
                let mut last_seq = client.seq;
                let mut leases = Vec::new();
                let mut shown = name;
                for argument in arguments {
                    match argument.split_once('=') {
                        Some(("last", seq)) => last_seq = number(seq),
                        Some(("as", other)) => shown = other,
                        _ => leases.push(self.leases[*argument]),
                    }
                }
                client.seq = last_seq;
                self.input(Input::Connected {
                    conn,
                    session: SessionId(session),
                    name: shown.to_owned(),
                    heartbeat_ms: 15_000,
                    last_seq,
                    leases,
                });
            }
            ["bye"] => {
                let conn = self.conn(name);
                self.input(Input::Disconnected { conn, clean: true });
            }
            ["lost"] => {
                let conn = self.conn(name);
                self.input(Input::Disconnected { conn, clean: false });
            }
            // For example `w consume default 2 as=1 tasks=one+two`; no queues: `-`.
            ["consume", queues, credit, ref options @ ..] => {
                let conn = self.conn(name);
                let mut consume = Consume {
                    queues: match queues {
                        "-" => Vec::new(),
                        queues => queues.split('+').map(str::to_owned).collect(),
                    },
                    add_credit: number(credit) as u32,
                    ..Consume::default()
                };
                for option in options {
                    match option
                        .split_once('=')
                        .expect("as=..., app=... or tasks=...")
                    {
                        ("as", consumer) => consume.consumer = number(consumer) as u32,
                        // Jobs that hold all slots; none: `-`.
                        ("held", "-") => consume.held_by = Some(Vec::new()),
                        ("held", jobs) => {
                            let jobs = jobs.split('+').map(message_id);
                            consume.held_by = Some(jobs.collect());
                        }
                        ("app", app) => consume.app = app.to_owned(),
                        ("tasks", "any") => consume.tasks = TaskSelection::Any,
                        ("tasks", tasks) => {
                            let tasks = tasks.split('+').map(str::to_owned);
                            consume.tasks = TaskSelection::Named(tasks.collect());
                        }
                        (other, _) => panic!("a consumer has no {other}"),
                    }
                }
                self.input(Input::Consume { conn, consume });
            }
            ["stop-consuming"] => {
                let conn = self.conn(name);
                let consumer = 0;
                self.input(Input::StopConsuming { conn, consumer });
            }
            ["writable", writable] => {
                let conn = self.conn(name);
                self.input(Input::Writable {
                    conn,
                    writable: writable == "yes",
                });
            }
            ["watch", ref keys @ ..] => {
                let conn = self.conn(name);
                let keys = keys.iter().map(|name| self.key(name)).collect();
                let waiter = None;
                self.input(Input::Watch { conn, keys, waiter });
            }
            // The client waits inside a job.
            ["job", waiter, "awaits", ref keys @ ..] => {
                let conn = self.conn(name);
                let keys = keys.iter().map(|name| self.key(name)).collect();
                let waiter = Some(message_id(waiter));
                self.input(Input::Watch { conn, keys, waiter });
            }
            ["job", waiter, "stops-awaiting", ref keys @ ..] => {
                let conn = self.conn(name);
                let keys = keys.iter().map(|name| self.key(name)).collect();
                let waiter = message_id(waiter);
                self.input(Input::WaitOver { conn, keys, waiter });
            }
            ["unwatch", ref keys @ ..] => {
                let conn = self.conn(name);
                let keys = keys.iter().map(|name| self.key(name)).collect();
                self.input(Input::Unwatch { conn, keys });
            }
            ["report", slots, busy, ref more @ ..] => {
                let conn = self.conn(name);
                let report = WorkerReport {
                    slots: number(slots) as u32,
                    busy: number(busy) as u32,
                    state: match more.contains(&"paused") {
                        true => WorkerState::Paused,
                        false => WorkerState::Unsaid,
                    },
                    takes_asks: more.contains(&"asks"),
                    parked: 0,
                };
                self.input(Input::Report { conn, report });
            }
            ["ask", worker, question, ref arguments @ ..] => {
                let patience_ms = ScriptOptions::new(arguments).number("for").unwrap_or(0);
                let ask = AskQuery {
                    worker: worker.to_owned(),
                    question: words(question),
                    patience_ms,
                };
                self.query(name, Query::Ask(ask));
            }
            ["reply", ask, reply] => {
                let conn = self.conn(name);
                let (ask, reply) = (number(ask), words(reply));
                self.input(Input::Reply { conn, ask, reply });
            }
            // `progress m0 fetching`, for a job that any client has; `told m0` asks for it.
            ["progress", message, body] => {
                let conn = self.conn(name);
                let progress = Progress {
                    lease: self.lease(message),
                    body: words(body),
                };
                self.input(Input::Progress { conn, progress });
            }
            ["told", message] => self.query(name, Query::Progress(message_id(message))),
            ["status"] => self.query(name, Query::Status(StatusQuery::default())),
            ["failed", ref arguments @ ..] => {
                let options = ScriptOptions::new(arguments);
                let query = FailedQuery {
                    filter: filter(&options),
                    after: options.number("behind").unwrap_or(0),
                    limit: options.number("limit").unwrap_or(0) as u32,
                    newest_first: options.has("newest"),
                };
                self.query(name, Query::Failed(query));
            }
            // `workflows state=failed name=nightly`, or `workflows of=body nodes=g/+g/0`.
            ["workflows", ref arguments @ ..] => {
                let options = ScriptOptions::new(arguments);
                let nodes = options.text("nodes").unwrap_or("").split('+');
                let nodes = nodes.filter(|node| !node.is_empty());
                let state = options.text("state").map(|wanted| {
                    let mut all = WorkflowState::ALL.into_iter();
                    all.find(|state| state.name() == wanted).expect("a state")
                });
                let query = WorkflowsQuery {
                    workflow: options.text("of").map(message_id),
                    state,
                    name: options.text("name").map(str::to_owned),
                    after: options.text("behind").map(message_id),
                    limit: options.number("limit").unwrap_or(0) as u32,
                    nodes: nodes.map(message_id).collect(),
                };
                self.query(name, Query::Workflows(query));
            }
            // `schedules times=2`
            ["schedules", ref arguments @ ..] => {
                let options = ScriptOptions::new(arguments);
                let query = SchedulesQuery {
                    name: options.text("name").map(str::to_owned),
                    times: options.number("times").unwrap_or(1) as u32,
                    ..SchedulesQuery::default()
                };
                self.query(name, Query::Schedules(query));
            }
            ["operation", operation] => self.query(name, Query::Operation(number(operation))),
            ["info", message] => self.query(name, Query::Message(message_id(message))),
            ["part", last, ..] => {
                let seq = self.clients[name].seq + 1;
                let ops = command.split_once(last).unwrap().1;
                let tx = self.tx(name, ops);
                if last == "last" {
                    self.clients.get_mut(name).unwrap().seq = seq;
                }
                let conn = self.conn(name);
                self.input(Input::CommitPart {
                    conn,
                    seq,
                    durability: Durability::Disk,
                    tx,
                    last: last == "last",
                });
            }
            _ => self.commit(name, command.split_once(' ').unwrap().1),
        }
    }

    /// Commits `[seq=N] [none|os] tx | tx ...`.
    fn commit(&mut self, name: &str, text: &str) {
        let mut durability = Durability::Disk;
        let mut text = text.trim();
        let mut seq = None;
        loop {
            let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
            match (word, word.split_once('=')) {
                ("none", _) => durability = Durability::None,
                ("os", _) => durability = Durability::Os,
                (_, Some(("seq", number_of_it))) => seq = Some(number(number_of_it)),
                _ => break,
            }
            text = rest;
        }
        let txs: Vec<Tx> = text.split('|').map(|tx| self.tx(name, tx)).collect();
        let client = self.clients.get_mut(name).expect("the client said hello");
        let first_seq = seq.unwrap_or(client.seq + 1);
        client.seq = client.seq.max(first_seq + txs.len() as u64 - 1);
        let conn = self.conn(name);
        self.input(Input::Commit {
            conn,
            first_seq,
            durability,
            txs,
        });
    }

    fn tx(&mut self, _client: &str, text: &str) -> Tx {
        let ops: Vec<Op> = text
            .split(';')
            .map(str::trim)
            .filter(|op| !op.is_empty() && *op != "nothing")
            .map(|op| self.op(op))
            .collect();
        ops.into()
    }

    fn lease(&self, name: &str) -> Lease {
        self.leases.get(name).copied().unwrap_or(Lease {
            message: message_id(name),
            epoch: 1,
            grant: 999,
        })
    }

    fn conn(&self, client: &str) -> ConnId {
        self.clients[client].conn.expect("the client said hello")
    }

    /// Returns the number of workers on each page of the status, as asked for by this client.
    pub fn worker_pages(&mut self, client: &str) -> Vec<usize> {
        let (mut pages, mut after) = (Vec::new(), None);
        loop {
            let conn = self.conn(client);
            let query = Query::Status(StatusQuery {
                after: after.take(),
                ..StatusQuery::default()
            });
            self.input(Input::Query { conn, id: 1, query });
            let mut outputs = std::iter::from_fn(|| self.broker.poll_output());
            let page = outputs.find_map(|output| match output {
                Output::Answer {
                    answer: penstock_message::Answer::Status(page),
                    ..
                } => Some(page),
                _ => None,
            });
            let page = page.expect("a status is answered");
            pages.push(page.status.workers.len());
            after = page.next;
            if after.is_none() {
                return pages;
            }
        }
    }

    /// Lists the jobs that each worker has held the longest, and since when.
    fn running(&mut self) -> Vec<String> {
        let workers = self.broker.status().workers;
        let running = workers.iter().map(|worker| {
            let jobs = worker.running.iter().map(|job| {
                let since = job.started_at - 1_700_000_000_000;
                format!(
                    " {}:{}@{}+{since}",
                    name_of_message(&job.id),
                    job.task,
                    job.queue
                )
            });
            format!("{} runs{}", worker.name, jobs.collect::<String>())
        });
        running.collect()
    }

    fn counts(&mut self) -> Vec<String> {
        let client = self.clients.keys().next().expect("a client").clone();
        self.query(&client, Query::Status(StatusQuery::default()));
        self.settle();
        while self.broker.poll_output().is_some() {}
        let status = self.broker.status();
        let queues = status.queues.iter();
        let queues =
            queues.map(|queue| format!("queue {} {}", queue.name, tallied(&queue.tallied)));
        let tasks = status.tasks.iter();
        let tasks = tasks.map(|task| format!("task {} {}", task.name, tallied(&task.tallied)));
        let Others {
            queues: forgotten,
            tasks: forgotten_tasks,
            of_queues,
            of_tasks,
            refused,
        } = *status.others;
        let others = (forgotten + forgotten_tasks > 0).then(|| {
            format!(
                "others {forgotten} queues {} refused {refused} and {forgotten_tasks} tasks {}",
                job_counts(&of_queues),
                job_counts(&of_tasks)
            )
        });
        queues.chain(tasks).chain(others).collect()
    }

    fn capacity(&self) -> Vec<String> {
        let status = self.broker.status();
        let queues = status.queues.iter();
        let queues = queues.map(|queue| match queue.capacity_permille {
            Some(permille) => format!("{} {permille}", queue.name),
            None => format!("{} none", queue.name),
        });
        queues.collect()
    }

    fn query(&mut self, client: &str, query: Query) {
        let conn = self.conn(client);
        self.input(Input::Query { conn, id: 7, query });
    }

    fn input(&mut self, input: Input) {
        self.broker.handle(self.now, input);
    }

    /// Returns the names of messages and keys.
    pub fn names(&self) -> (Vec<String>, Vec<String>) {
        let names = |set: &BTreeSet<String>| set.iter().cloned().collect();
        (names(&self.messages), names(&self.keys))
    }

    /// Polls, syncs unless the disk is stalled, and polls again, until nothing more comes.
    fn settle(&mut self) -> Vec<String> {
        let mut outputs = Vec::new();
        loop {
            let before = (self.journal.len(), outputs.len());
            self.take_records();
            if !self.is_stalled {
                self.synced = self.journal.len();
                self.broker.handle_durable(Position(self.synced as u64));
            }
            while let Some(output) = self.broker.poll_output() {
                self.describe(output, &mut outputs);
            }
            self.read_back();
            // Work that is done in steps continues at once.
            let due_ms = self.broker.next_deadline();
            let is_idle = due_ms.is_none_or(|due_ms| due_ms > self.now.mono_ms);
            if is_idle && before == (self.journal.len(), outputs.len()) {
                self.broker.assert_consistent();
                return outputs;
            }
            if !is_idle {
                self.broker.handle_deadline(self.now);
            }
        }
    }

    fn pass(&mut self, ms: u64) {
        self.now.wall_ms += ms;
        if let Some(boot) = &mut self.now.boot {
            boot.ms += ms;
        }
    }

    fn looks(&mut self, ms: u64) -> usize {
        let until_ms = self.now.mono_ms + ms;
        let mut looks = 0;
        while let Some(due_ms) = self.broker.next_deadline()
            && due_ms <= until_ms
        {
            self.pass(due_ms - self.now.mono_ms);
            self.now.mono_ms = due_ms;
            self.broker.handle_deadline(self.now);
            self.settle();
            looks += 1;
        }
        self.pass(until_ms - self.now.mono_ms);
        self.now.mono_ms = until_ms;
        looks
    }

    fn describe(&mut self, output: Output, lines: &mut Vec<String>) {
        let name_of = |conn: ConnId| {
            let client = self
                .clients
                .iter()
                .find(|(_, client)| client.conn == Some(conn));
            client.map_or_else(|| format!("old{}", conn.0), |(name, _)| name.clone())
        };
        match output {
            Output::Welcome {
                conn,
                applied_through,
                forgotten,
                leases,
            } => {
                let mut line = format!("{} welcome {applied_through}", name_of(conn));
                if forgotten {
                    line += " forgotten";
                }
                for lease in leases {
                    line += &format!(" {}", name_of_message(&lease.message));
                }
                lines.push(line);
            }
            Output::Confirm {
                conn,
                through,
                receipts,
                early,
            } => {
                let mut line = format!("{} confirm {through}", name_of(conn));
                for seq in early {
                    line += &format!(" early {seq}");
                }
                for (seq, receipt) in receipts {
                    line += &format!(" {seq}:{}", describe_receipt(&receipt));
                }
                lines.push(line);
            }
            Output::Deliver { conn, deliveries } => {
                let mut line = format!("{} deliver", name_of(conn));
                for delivery in deliveries {
                    let name = name_of_message(&delivery.lease.message);
                    line += &format!(" {name}");
                    if let Ok(body) = std::str::from_utf8(&delivery.message.body)
                        && self.messages.contains(body)
                        && self.messages.contains(&name)
                        && body != name
                    {
                        line += &format!(" with the body of {body}");
                    }
                    if delivery.consumer > 0 {
                        line += &format!("/{}", delivery.consumer);
                    }
                    if delivery.queue != "default" {
                        line += &format!("@{}", delivery.queue);
                    }
                    if delivery.redelivered {
                        line += "!";
                    }
                    let extras = delivery.message.extras.as_deref();
                    if let Some(suspects @ 1..) = extras.map(|extras| extras.suspects) {
                        line += &format!("~{suspects}");
                    }
                    if delivery.message.attempt > 0 {
                        line += &format!("#{}", delivery.message.attempt);
                    }
                    if let Some(deadline) = delivery.deadline.filter(|_| self.tells_deadlines) {
                        line += &format!(":by{}", deadline - 1_700_000_000_000);
                    }
                    if !delivery.inputs.is_empty() {
                        let given = InputValues::decode(&delivery.inputs).expect("values");
                        line += &describe_given(&given);
                    }
                    if let Some(old) = self.leases.insert(name.clone(), delivery.lease) {
                        self.leases.insert(format!("old-{name}"), old);
                    }
                }
                lines.push(line);
            }
            Output::Cancels { conn, cancels } => {
                let mut line = format!("{} stop", name_of(conn));
                for order in cancels {
                    let name = name_of_message(&order.lease.message);
                    let is_newest = self.leases.get(&name) == Some(&order.lease);
                    // A repair may have lost the newest lease, and then the broker knows an older one.
                    assert!(
                        is_newest || self.copied.contains(&name) || self.was_repaired,
                        "an order for a lease of {name} that has ended"
                    );
                    let now = if order.kill { "!" } else { "" };
                    line += &format!(" {name}{now} ({})", order.reason);
                }
                lines.push(line);
            }
            Output::Asks { conn, asks } => {
                let mut line = format!("{} asked", name_of(conn));
                for ask in asks {
                    line += &format!(" {}:{}", ask.id, String::from_utf8_lossy(&ask.question));
                }
                lines.push(line);
            }
            Output::RefusedWaits { conn, refused } => {
                for refused in refused {
                    let mut line = format!("{} refused", name_of(conn));
                    let Key::Result(awaited) = refused.key else {
                        panic!("only jobs are waited for");
                    };
                    assert_eq!(refused.jobs[0].id, refused.waiter, "the waiter comes first");
                    line += &format!(" {} {:?}", name_of_message(&awaited), refused.why);
                    for job in &refused.jobs {
                        line += &format!(" {}", name_of_message(&job.id));
                        match job.task.as_str() {
                            "task" => {}
                            "" => line += "(group)",
                            task => line += &format!("({task})"),
                        }
                    }
                    lines.push(line);
                }
            }
            Output::Values { conn, values } => {
                for (key, state) in values {
                    lines.push(format!(
                        "{} sees {}",
                        name_of(conn),
                        describe_value(&key, &state)
                    ));
                }
            }
            Output::Answer { conn, answer, .. } => {
                lines.push(format!("{} {}", name_of(conn), describe_answer(&answer)))
            }
            Output::Notice(Notice::Unserved {
                queue,
                waiting,
                for_ms,
            }) => {
                lines.push(format!(
                    "notice: {waiting} unserved in {queue} for {for_ms}"
                ));
            }
            Output::Notice(Notice::UnknownTask {
                queue,
                task,
                others,
                waiting,
            }) => {
                lines.push(format!(
                    "notice: {waiting} of {task} and {others} others unknown in {queue}"
                ));
            }
            Output::Notice(Notice::SharedTask {
                queue,
                task,
                others,
                app,
                other_app,
            }) => {
                lines.push(format!(
                    "notice: {app} and {other_app} share {task} and {others} others in {queue}"
                ));
            }
            Output::Notice(Notice::Space(space)) => lines.push(format!("notice: {space:?}")),
            Output::Notice(Notice::Memory { is_full, .. }) => {
                let state = if is_full { "full" } else { "free" };
                lines.push(format!("notice: memory {state}"));
            }
            Output::Notice(Notice::Evicting { group, cap_bytes }) => {
                lines.push(format!("notice: {group} over {cap_bytes}"));
            }
            Output::Notice(Notice::FailedDropped { .. }) => {
                lines.push("notice: failed jobs are dropped".to_owned());
            }
            Output::Notice(Notice::Hung {
                schedule,
                job,
                for_ms,
                median_ms,
            }) => {
                let (name, job) = (&schedule.name, name_of_message(&job));
                lines.push(format!(
                    "notice: {job} of {name} hangs for {for_ms} instead of {median_ms}"
                ));
            }
            Output::Notice(Notice::Unreadable { id, queue, .. }) => {
                let name = name_of_message(&id);
                lines.push(format!("notice: {name} of {queue} is unreadable"));
            }
            Output::Close { conn, reason } => {
                let reason = match reason {
                    CloseReason::Fenced => "fenced".to_owned(),
                    CloseReason::Protocol(text) => text.replace(',', ""),
                };
                lines.push(format!("{} close {reason}", name_of(conn)));
                for client in self
                    .clients
                    .values_mut()
                    .filter(|client| client.conn == Some(conn))
                {
                    client.conn = None;
                }
            }
        }
    }
}
