//! Words of a script: how a line is read, and how an output is described.

use penstock_broker::{Answer, Broker, ConnId, Input, Now, Output, Position, Query};
use penstock_message::{
    AppRelease, AppVersion, BrokerCounts, CatchUp, Due, Extras, Filter, InputValue, InputValues,
    JobCounts, JoinOutcome, Key, KeyState, Member, Message, MessageId, NodeState, Others, Overlap,
    Receipt, Refusal, Retries, Rhythm, ScheduleInfo, ScheduleName, SchedulePlan, ScheduleTally,
    ScheduleTiming, SchedulesQuery, SessionId, Space, StatusQuery, Tallied, Target, ValueStatus,
    WorkflowInfo, WorkflowsQuery, read_gathered,
};

pub(super) struct ScriptOptions<'a>(Vec<(&'a str, &'a str)>);

impl<'a> ScriptOptions<'a> {
    pub(super) fn new(words: &[&'a str]) -> Self {
        Self(
            words
                .iter()
                .map(|word| word.split_once('=').unwrap_or((word, "")))
                .collect(),
        )
    }

    pub(super) fn text(&self, name: &str) -> Option<&'a str> {
        self.0
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| *value)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.text(name).map(number)
    }

    pub(super) fn due(&self, after: &str, at: &str) -> Option<Due> {
        let after = self.number(after).map(Due::AfterMs);
        after.or_else(|| self.number(at).map(|ms| Due::At(1_700_000_000_000 + ms)))
    }
}

/// Reads `member=join:index`, `headers=name:value`, `retries=3`.
pub(super) fn extras(options: &ScriptOptions<'_>) -> Option<Box<Extras>> {
    let member = options.text("member").map(|member| {
        let (join, index) = member.split_once(':').expect("join:index");
        Member {
            join: join_id(join),
            index: number(index) as u32,
        }
    });
    let headers = options.text("headers").map(|header| {
        let (name, value) = header.split_once(':').expect("name:value");
        (name.to_owned(), value.to_owned().into())
    });
    let extras = Extras {
        member,
        when: when(options.text("when")),
        workflow: options.text("workflow").map(message_id),
        parent: options.text("parent").map(message_id),
        headers: headers.into_iter().collect(),
        retries: options
            .number("retries")
            .map(|count| Retries::AtMost(count as u32)),
        ..Extras::default()
    };
    extras.boxed()
}

pub(super) fn when(outcome: Option<&str>) -> JoinOutcome {
    match outcome {
        None | Some("succeeded") => JoinOutcome::Succeeded,
        Some("failed") => JoinOutcome::Failed,
        Some("ended") => JoinOutcome::Ended,
        Some(other) => panic!("no such outcome: {other}"),
    }
}

/// Reads a message by its name, or all that match: `all queue=mail task=send`.
pub(super) fn target(name: &str, options: &ScriptOptions<'_>) -> Target {
    match name {
        "all" => Target::Filter(filter(options)),
        name => Target::Job(message_id(name)),
    }
}

pub(super) fn filter(options: &ScriptOptions<'_>) -> Filter {
    let text = |name| options.text(name).map(str::to_owned);
    Filter {
        workflow: options.text("workflow").map(message_id),
        queue: text("queue"),
        task: text("task"),
        class: text("class"),
        fingerprint: options.number("fingerprint"),
        failed_from: options.number("from").map(|ms| 1_700_000_000_000 + ms),
        failed_before: options.number("until").map(|ms| 1_700_000_000_000 + ms),
    }
}

pub(super) fn number(text: &str) -> u64 {
    text.parse()
        .unwrap_or_else(|_| panic!("{text:?} is no number"))
}

pub(super) fn padded(name: &str) -> [u8; 16] {
    let mut bytes = [b' '; 16];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

/// Returns the id of a name: `g/` is a join, `g/2` its member with index 2; any other name stands for itself.
pub(super) fn message_id(name: &str) -> MessageId {
    match name.split_once('/') {
        Some((join, "")) => MessageId(padded(join)).join_of(),
        Some((join, index)) => {
            MessageId::member(MessageId(padded(join)).join_of(), number(index) as u32)
        }
        None => MessageId(padded(name)),
    }
}

pub(super) fn join_id(name: &str) -> MessageId {
    message_id(name)
}

pub(super) fn name_of_message(id: &MessageId) -> String {
    // No name begins with this byte, as the time in a schedule's job does.
    if let [0x01, ..] = id.0 {
        let ms = id.0[..6]
            .iter()
            .fold(0, |ms, byte| ms << 8 | u64::from(*byte));
        return format!("at{}", ms as i64 - 1_700_000_000_000);
    }
    let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    // The tail of a name is text, which is a much larger number.
    match id.index_in_join() {
        None => format!("{}/", name(&id.0[..13])),
        Some(index @ 0..=0xffff) => format!("{}/{index}", name(&id.0[..13])),
        Some(_) => name(&id.0),
    }
}

pub(super) fn schedule_name(name: &str) -> ScheduleName {
    ScheduleName {
        app: "shop".to_owned(),
        name: name.to_owned(),
    }
}

/// Reads a plan: `every=60000`, `at=5000`, `cron=30_2_*_*_* zone=Europe/Paris`; `overlap=queue catch-up=all window=5000
/// jitter=1000`.
pub(super) fn plan(message: Message, options: &ScriptOptions<'_>) -> SchedulePlan {
    let every = options.number("every").map(Rhythm::Every);
    let at = options
        .number("at")
        .map(|ms| Rhythm::At(1_700_000_000_000 + ms));
    let cron = options
        .text("cron")
        .map(|line| Rhythm::Cron(line.replace('_', " ")));
    let overlap = options.text("overlap").map(|wanted| {
        let mut all = Overlap::ALL.into_iter();
        all.find(|overlap| overlap.name() == wanted)
            .expect("an overlap")
    });
    let catch_up = options.text("catch-up").map(|wanted| {
        let mut all = CatchUp::ALL.into_iter();
        all.find(|catch_up| catch_up.name() == wanted)
            .expect("a policy")
    });
    SchedulePlan {
        timing: ScheduleTiming {
            rhythm: every.or(at).or(cron).expect("a rhythm"),
            zone: options.text("zone").unwrap_or("UTC").to_owned(),
            jitter_ms: options.number("jitter").unwrap_or(0),
        },
        overlap: overlap.unwrap_or_default(),
        catch_up: catch_up.unwrap_or_default(),
        window_ms: options.number("window").unwrap_or(3_600_000),
        queue: options.text("queue").unwrap_or("default").to_owned(),
        message: Message {
            id: MessageId::default(),
            ..message
        },
    }
}

/// Reads `version=2 started=7`, or `version=v2`.
pub(super) fn generation(options: &ScriptOptions<'_>) -> AppRelease {
    AppRelease {
        version: match options.text("version") {
            None => AppVersion::Unnamed,
            Some(version) => match version.parse() {
                Ok(number) => AppVersion::Number(number),
                Err(_) => AppVersion::Text(version.to_owned()),
            },
        },
        started_at: options.number("started").unwrap_or(0),
    }
}

/// Describes a schedule, such as `nightly:every60000:1+0+0:last0:next60000`: fired, skipped, missed.
fn describe_schedule(schedule: &ScheduleInfo) -> String {
    let ms = |time: u64| time as i64 - 1_700_000_000_000;
    let mut line = schedule.name.name.clone();
    line += &match &schedule.timing.rhythm {
        Rhythm::Cron(line) => format!(":{}", line.replace(' ', "_")),
        Rhythm::Every(ms) => format!(":every{ms}"),
        Rhythm::At(at) => format!(":at{}", ms(*at)),
    };
    let ScheduleTally {
        fired,
        skipped,
        missed,
    } = schedule.tally;
    line += &format!(":{fired}+{skipped}+{missed}");
    for (flag, word) in [
        (schedule.is_set, ":set"),
        (schedule.is_paused, ":paused"),
        (schedule.is_running, ":running"),
        (schedule.is_queued, ":queued"),
    ] {
        line += if flag { word } else { "" };
    }
    if let Some((time, _)) = schedule.last {
        line += &format!(":last{}", ms(time));
    }
    if let Some((time, why)) = schedule.skipped {
        line += &format!(":{why:?}{}", ms(time));
    }
    for time in &schedule.next {
        line += &format!(":next{}", ms(*time));
    }
    line
}

pub(super) fn describe_receipt(receipt: &Receipt) -> String {
    match receipt {
        Receipt::Applied(applied) => {
            let mut said = Vec::new();
            if !applied.skipped.is_empty() {
                let skipped: Vec<String> = applied.skipped.iter().map(u32::to_string).collect();
                said.push(format!("skipped[{}]", skipped.join("+")));
            }
            for (op, owner) in &applied.owners {
                said.push(format!("{op}:owner-{}", name_of_message(owner)));
            }
            if let Some(found) = applied.found {
                said.push(format!("{found:?}"));
            }
            if let Some(operation) = applied.operation {
                said.push(format!("operation-{operation}"));
            }
            said.join("+")
        }
        Receipt::Duplicate => "duplicate".to_owned(),
        Receipt::Unknown => "unknown".to_owned(),
        Receipt::Refused { op, why } => {
            let why = match why {
                Refusal::TooLarge(_) => "TooLarge".to_owned(),
                Refusal::Invalid(_) => "Invalid".to_owned(),
                Refusal::QueueFull(_) => "QueueFull".to_owned(),
                Refusal::NotOffered(_) => "NotOffered".to_owned(),
                Refusal::Claimed(owner) => format!("Claimed by {}", name_of_message(owner)),
                other => format!("{other:?}"),
            };
            format!("refused {op} {why}")
        }
    }
}

pub(super) fn describe_value(key: &Key, state: &KeyState) -> String {
    let key = match key {
        Key::Result(id) => name_of_message(id),
        Key::Named(name) | Key::Scoped(_, name) => String::from_utf8_lossy(name).into_owned(),
    };
    match state {
        KeyState::Present(value) if value.body.len() > 60 => {
            format!("{key} {:?} of {} bytes", value.status, value.body.len())
        }
        KeyState::Present(value) => {
            let body = describe_body(value.status, &value.body);
            format!("{key} {:?} {body}", value.status)
                .trim_end()
                .to_owned()
        }
        KeyState::Pending => format!("{key} pending"),
        KeyState::Gone => format!("{key} gone"),
    }
}

fn describe_body(status: ValueStatus, body: &[u8]) -> String {
    match status {
        ValueStatus::Upstream => {
            let ids = body.chunks_exact(16).map(|id| {
                let id = id.try_into().expect("sixteen bytes");
                name_of_message(&MessageId(id))
            });
            ids.collect::<Vec<_>>().join("+")
        }
        ValueStatus::Gathered => match read_gathered(body) {
            Some((join, count)) => format!("{} of {count}", name_of_message(&join)),
            None => "unreadable".to_owned(),
        },
        ValueStatus::Replaced => {
            let id = body.try_into().expect("sixteen bytes");
            name_of_message(&MessageId(id))
        }
        _ => String::from_utf8_lossy(body).into_owned(),
    }
}

/// Describes the values that a job is given: `[a b]`, `[a [b c]]`, `[Failed:error gone]`.
pub(super) fn describe_given(given: &InputValues) -> String {
    let Some(values) = &given.values else {
        return format!("[{} by reference]", given.count);
    };
    let value = |value: &InputValue| match value {
        InputValue::Of(ValueStatus::Succeeded, body) if body.len() > 60 => {
            format!("{} bytes", body.len())
        }
        InputValue::Of(ValueStatus::Succeeded, body) => String::from_utf8_lossy(body).into_owned(),
        InputValue::Of(status, body) => {
            let text = format!("{status:?}:{}", describe_body(*status, body));
            text.trim_end_matches(':').to_owned()
        }
        InputValue::Gathered(inner) => describe_given(inner),
        InputValue::Gone => "gone".to_owned(),
    };
    let values: Vec<String> = values.iter().map(value).collect();
    format!("[{}]", values.join(" "))
}

pub(super) fn describe_answer(answer: &Answer) -> String {
    match answer {
        Answer::Message(None) => "knows nothing".to_owned(),
        Answer::Message(Some(info)) => {
            let notes: Vec<_> = info
                .notes
                .iter()
                .map(|note| String::from_utf8_lossy(note))
                .collect();
            let mut line = format!(
                "knows {:?} in {} attempt {} crashes {}",
                info.state, info.queue, info.attempt, info.crashes
            );
            if info.generation > 0 {
                line += &format!(" generation {}", info.generation);
            }
            if let Some(failed) = &info.failed {
                let (_, failure) = &**failed;
                line += &format!(" failed {}:{}", failure.class, failure.message);
            }
            if let Some(worker) = &info.worker {
                line += &format!(" at {worker}");
            }
            if !notes.is_empty() {
                line += &format!(" notes {}", notes.join("+"));
            }
            if info.task_unknown {
                line += " and no consumer that has its task";
            }
            line
        }
        Answer::Failed(page) => {
            let mut line = "failed".to_owned();
            for job in &page.jobs {
                let id = name_of_message(&job.id);
                let queue = job.queue.as_deref().unwrap_or("?");
                let failure = &job.failure;
                line += &format!(
                    " {id}:{}@{queue}#{}:{}:{}",
                    job.task, job.attempt, failure.class, failure.message
                );
            }
            if let Some(next) = page.next {
                line += &format!(" next {next}");
            }
            line
        }
        Answer::Workflows(page) => {
            let mut line = "workflows".to_owned();
            for workflow in &page.workflows {
                line += &format!(" {}", describe_workflow(workflow));
            }
            for node in &page.nodes {
                line += &format!(" {}", describe_node(node));
            }
            if let Some(next) = page.next {
                line += &format!(" next {}", name_of_message(&next));
            }
            line
        }
        Answer::Schedules(page) => {
            let schedules = page.schedules.iter();
            let schedules = schedules.map(|schedule| format!(" {}", describe_schedule(schedule)));
            format!("schedules{}", schedules.collect::<String>())
        }
        Answer::Progress(None) => "told nothing".to_owned(),
        Answer::Progress(Some(body)) => format!("told {}", String::from_utf8_lossy(body)),
        Answer::Asked(Ok(reply)) => format!("hears {}", String::from_utf8_lossy(reply)),
        Answer::Asked(Err(why)) => format!("hears nothing: {why:?}"),
        Answer::Operation(None) => "operation unknown".to_owned(),
        Answer::Operation(Some(operation)) => format!(
            "operation {}/{}/{}{}{}",
            operation.matched,
            operation.done,
            operation.spared,
            match operation.asked {
                0 => String::new(),
                asked => format!(" asked {asked}"),
            },
            if operation.is_over { " over" } else { "" }
        ),
        Answer::Status(page) => {
            let status = &page.status;
            let mut line = "status".to_owned();
            for queue in &status.queues {
                line += &format!(
                    " {}:{}/{}/{}",
                    queue.name, queue.ready, queue.delayed, queue.running
                );
                if queue.ending > 0 {
                    line += &format!("-ending{}", queue.ending);
                }
                if queue.failed > 0 {
                    line += &format!("-failed{}", queue.failed);
                }
                if queue.unknown > 0 {
                    line += &format!("-unknown{}", queue.unknown);
                }
                if queue.paused {
                    line += "-paused";
                }
                if !queue.limits.is_none() {
                    let shown = |limit: Option<u64>| {
                        limit.map_or("-".to_owned(), |limit| limit.to_string())
                    };
                    line += &format!(
                        "-limit{}/{}/{:?}-waiting{}B",
                        shown(queue.limits.max_length),
                        shown(queue.limits.max_bytes),
                        queue.limits.overflow,
                        queue.waiting_bytes,
                    );
                }
                if queue.oldest_ready_ms > 0 {
                    line += &format!("-{}ms", queue.oldest_ready_ms);
                }
            }
            // Pages list them in the broker's own order.
            let mut workers: Vec<_> = status.workers.iter().collect();
            workers.sort_by(|one, other| one.name.cmp(&other.name));
            for worker in workers {
                let away = if worker.connected { "" } else { "-away" };
                line += &format!(
                    " {}={}/{}/{}{away}",
                    worker.name, worker.slots, worker.busy, worker.leases
                );
            }
            line += &format!(
                " clients {} results {} evicted {}",
                status.clients, status.results, status.evicted
            );
            line
        }
        other => format!("{other:?}"),
    }
}

/// Describes a workflow: `body:nightly:failed:waiting1+failed1`, and `-over` once it has ended.
fn describe_workflow(workflow: &WorkflowInfo) -> String {
    let WorkflowInfo {
        id, name, state, ..
    } = workflow;
    let jobs = &workflow.jobs;
    let all = [
        ("waiting", jobs.waiting),
        ("running", jobs.running),
        ("succeeded", jobs.succeeded),
        ("failed", jobs.failed),
        ("cancelled", jobs.cancelled),
        ("blocked", jobs.blocked),
    ];
    let some = all.iter().filter(|(_, count)| *count > 0);
    let some: Vec<String> = some.map(|(what, count)| format!("{what}{count}")).collect();
    let mut text = format!(
        "{}:{name}:{}:{}",
        name_of_message(id),
        state.name(),
        some.join("+")
    );
    if workflow.ended_at.is_some() {
        text += "-over";
    }
    if !workflow.description.is_empty() {
        text += &format!(":{}", String::from_utf8_lossy(&workflow.description));
    }
    if let Some(deadline) = workflow.deadline {
        text += &format!(":by{}", deadline - 1_700_000_000_000);
    }
    if let Some(parent) = &workflow.parent {
        text += &format!(":of-{}", name_of_message(parent));
    }
    text
}

fn describe_node(node: &NodeState) -> String {
    match node {
        NodeState::Gone => "gone".to_owned(),
        NodeState::Job(state) => format!("{state:?}"),
        NodeState::Ended(status) => format!("{status:?}"),
        NodeState::Join {
            members,
            ended,
            failed,
            state,
        } => format!("{ended}/{members}-failed{failed}-{}", state.name()),
    }
}

/// Describes the counts that are not zero: `enqueued3+started2`.
pub(super) fn job_counts(counts: &JobCounts) -> String {
    let all = [
        ("enqueued", counts.enqueued),
        ("started", counts.started),
        ("succeeded", counts.succeeded),
        ("failed", counts.failed),
        ("retried", counts.retried),
        ("expired", counts.expired),
        ("cancelled", counts.cancelled),
        ("crashed", counts.crashed),
        ("dropped", counts.dropped),
    ];
    let some = all.iter().filter(|(_, count)| *count > 0);
    let some: Vec<String> = some.map(|(what, count)| format!("{what}{count}")).collect();
    match some.is_empty() {
        true => "none".to_owned(),
        false => some.join("+"),
    }
}

/// Describes counts; `lately` if all were within the last minute.
pub(super) fn tallied(tallied: &Tallied) -> String {
    let Tallied {
        counts,
        last_minute,
    } = tallied;
    match counts == last_minute {
        true => format!("{} lately", job_counts(counts)),
        false => format!("{} lately {}", job_counts(counts), job_counts(last_minute)),
    }
}

/// Describes everything visible about a broker from outside.
pub(super) fn describe_whole(
    broker: &mut Broker,
    now: Now,
    keys: &[Key],
    ids: &[MessageId],
    position: Position,
) -> Vec<String> {
    let conn = ConnId(u64::MAX);
    let mut lines = Vec::new();
    let inputs = [
        Input::Connected {
            conn,
            session: SessionId([255; 16]),
            name: "observer".to_owned(),
            heartbeat_ms: 1,
            last_seq: 0,
            leases: Vec::new(),
        },
        Input::Watch {
            conn,
            keys: keys.to_vec(),
            waiter: None,
        },
        Input::Query {
            conn,
            id: 1,
            query: Query::Status(StatusQuery::default()),
        },
        Input::Query {
            conn,
            id: 1,
            query: Query::Workflows(WorkflowsQuery::default()),
        },
        Input::Query {
            conn,
            id: 1,
            query: Query::Schedules(SchedulesQuery {
                times: 3,
                ..SchedulesQuery::default()
            }),
        },
    ];
    let queries = ids.iter().map(|id| Input::Query {
        conn,
        id: 1,
        query: Query::Message(*id),
    });
    broker.handle_durable(position);
    for input in inputs.into_iter().chain(queries) {
        broker.handle(now, input);
        while broker.poll_record().is_some() {}
        broker.handle_durable(Position(broker.next_position().0 - 1));
        while let Some(output) = broker.poll_output() {
            match output {
                Output::Values { values, .. } => {
                    lines.extend(values.iter().map(|(key, state)| describe_value(key, state)));
                }
                // Empty queues are not remembered.
                Output::Answer {
                    answer: Answer::Status(page),
                    ..
                } => {
                    assert_eq!(page.next, None, "a page has room for it");
                    let mut status = page.status;
                    status
                        .workers
                        .sort_by(|one, other| one.name.cmp(&other.name));
                    status.queues.retain(|queue| {
                        queue.ready + queue.delayed + queue.running + queue.failed > 0
                            || queue.paused
                            || !queue.limits.is_none()
                    });
                    (status.unreadable, status.failed_dropped) = (0, 0);
                    *status.counts = BrokerCounts::default();
                    status.tasks.clear();
                    *status.others = Others::default();
                    status.space = Space::Plenty;
                    status.memory_is_full = false;
                    // Counts since the start are not remembered either.
                    for queue in &mut status.queues {
                        (queue.refused, queue.dropped) = (0, 0);
                        queue.tallied = Tallied::default();
                    }
                    status
                        .queues
                        .iter_mut()
                        .for_each(|queue| queue.consumers = 0);
                    status
                        .workers
                        .iter_mut()
                        .for_each(|worker| (worker.slots, worker.busy, worker.parked) = (0, 0, 0));
                    lines.push(format!("{status:#?}"));
                }
                Output::Answer { answer, .. } => lines.push(format!("{answer:#?}")),
                _ => {}
            }
        }
    }
    lines
}
