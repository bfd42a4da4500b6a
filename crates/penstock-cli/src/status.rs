use clap::Args;
use penstock_message::{
    Capabilities, JobCounts, Notice, Others, QueueStatus, RunningJob, Space, Status, TaskStatus,
    WorkerState, WorkerStatus,
};
use penstock_worker::state_name;
use serde_json::{Value, json};

use crate::exit::CommandError;
use crate::limit::overflow_name;
use crate::remote::BrokerArguments;
use crate::text::{TextTable, bytes, count, duration_ms, limits, printable, show, sync_us};
use crate::times::now_ms;

/// Number of running jobs that the status shows.
const SHOWN_RUNNING: usize = 10;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    broker: BrokerArguments,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let broker = arguments.broker.find()?;
    let status = broker.status()?;
    let engine = broker.capabilities()?;
    show(&match arguments.json {
        true => format!("{}\n", as_json(&status, &engine)),
        false => for_people(&broker.shown, &status, &engine),
    })
}

fn as_json(status: &Status, engine: &Capabilities) -> Value {
    json!({
        "engine": {
            "name": engine.engine,
            "durability": engine.highest_durability.name(),
        },
        "queues": status.queues.iter().map(queue_json).collect::<Vec<_>>(),
        "tasks": status.tasks.iter().map(task_json).collect::<Vec<_>>(),
        "others": {
            "queues": status.others.queues,
            "tasks": status.others.tasks,
            "queue_counts": job_counts_json(&status.others.of_queues),
            "task_counts": job_counts_json(&status.others.of_tasks),
            "refused": status.others.refused,
        },
        "workers": status.workers.iter().map(worker_json).collect::<Vec<_>>(),
        "clients": status.clients,
        "results": status.results,
        "results_bytes": status.results_bytes,
        "evicted": status.evicted,
        "unreadable": status.unreadable,
        "failed": status.failed,
        "failed_bytes": status.failed_bytes,
        "failed_dropped": status.failed_dropped,
        "broker": {
            "version": status.process.version,
            "pid": status.process.pid,
            "uptime_ms": status.process.uptime_ms,
            "sync_p50_us": status.process.sync_p50_us,
            "sync_p99_us": status.process.sync_p99_us,
            "journal_bytes": status.process.journal_bytes,
            "unsynced_records": status.process.unsynced_records,
            "unsynced_bytes": status.process.unsynced_bytes,
            "batch_records": status.process.batch_records,
            "batch_bytes": status.process.batch_bytes,
            "reclaim_debt_bytes": status.process.reclaim_debt_bytes,
            "reserves": status.process.reserves,
            "space": space(status.space),
            "blocked": status.process.blocked,
            "memory_bytes": status.process.memory_bytes,
            "memory_limit_bytes": status.process.memory_limit_bytes,
            "memory_is_full": status.memory_is_full,
            "full_connections": status.process.full_connections,
            "cost_ns": status.process.cost_ns,
        },
        "counts": {
            "published": status.counts.published,
            "delivered": status.counts.delivered,
            "settled": status.counts.settled,
            "expired": status.counts.expired,
            "dropped": status.counts.dropped,
            "refused": status.counts.refused,
            "failed": status.counts.failed,
            "cancelled": status.counts.cancelled,
        },
    })
}

pub fn queue_json(queue: &QueueStatus) -> Value {
    json!({
        "name": queue.name,
        "ready": queue.ready,
        "delayed": queue.delayed,
        "running": queue.running,
        "failed": queue.failed,
        "unknown": queue.unknown,
        "ending": queue.ending,
        "oldest_ready_ms": queue.oldest_ready_ms,
        "paused": queue.paused,
        "consumers": queue.consumers,
        "capacity_permille": queue.capacity_permille,
        "waiting_bytes": queue.waiting_bytes,
        "max_length": queue.limits.max_length,
        "max_bytes": queue.limits.max_bytes,
        "overflow": overflow_name(queue.limits.overflow),
        "refused": queue.refused,
        "dropped": queue.dropped,
        "counts": job_counts_json(&queue.tallied.counts),
        "last_minute": job_counts_json(&queue.tallied.last_minute),
    })
}

pub fn task_json(task: &TaskStatus) -> Value {
    json!({
        "name": task.name,
        "counts": job_counts_json(&task.tallied.counts),
        "last_minute": job_counts_json(&task.tallied.last_minute),
    })
}

fn job_counts_json(counts: &JobCounts) -> Value {
    json!({
        "enqueued": counts.enqueued,
        "started": counts.started,
        "succeeded": counts.succeeded,
        "failed": counts.failed,
        "retried": counts.retried,
        "expired": counts.expired,
        "cancelled": counts.cancelled,
        "crashed": counts.crashed,
        "dropped": counts.dropped,
    })
}

pub fn worker_json(worker: &WorkerStatus) -> Value {
    json!({
        "name": worker.name,
        "queues": worker.queues,
        "slots": worker.slots,
        "busy": worker.busy,
        "parked": worker.parked,
        "leases": worker.leases,
        "connected": worker.connected,
        "state": state_name(worker.state),
        "running": worker.running.iter().map(running_json).collect::<Vec<_>>(),
    })
}

fn running_json(job: &RunningJob) -> Value {
    json!({
        "id": job.id.to_string(),
        "task": job.task,
        "queue": job.queue,
        "started_at_ms": job.started_at,
    })
}

/// Names the disk's space level in one word. It says which work is suspended.
fn space(space: Space) -> &'static str {
    match space {
        Space::Plenty => "plenty",
        Space::NoPublishes => "no-publishes",
        Space::NoLeases => "no-leases",
        Space::NoSettlements => "no-settlements",
    }
}

/// Lists the reasons why the broker accepts no new work, one line each.
fn troubles(status: &Status) -> String {
    let mut lines = String::new();
    if status.space != Space::Plenty {
        lines += &format!("trouble  {}\n", Notice::Space(status.space));
    }
    if status.memory_is_full {
        let limit_bytes = status.process.memory_limit_bytes;
        let notice = Notice::Memory {
            is_full: true,
            limit_bytes,
        };
        lines += &format!("trouble  {notice}\n");
    }
    lines
}

fn for_people(shown: &str, status: &Status, engine: &Capabilities) -> String {
    let process = &status.process;
    let evicted = match status.evicted {
        0 => String::new(),
        count => format!(", {count} evicted before they expired"),
    };
    let unreadable = match status.unreadable {
        0 => String::new(),
        count => {
            format!("damaged  {count} jobs failed because their bodies can't be read\n")
        }
    };
    let failed = match (status.failed, status.failed_dropped) {
        (0, 0) => String::new(),
        (count, dropped) => {
            let dropped = match dropped {
                0 => String::new(),
                _ => format!(", {dropped} dropped to stay within limits"),
            };
            format!(
                "failed   {count} ({}){dropped}\n",
                bytes(status.failed_bytes)
            )
        }
    };
    let shown = printable(shown);
    let mut text = format!(
        "broker   {shown} (pid {}, up {}, penstock {})\n\
         engine   {}; up to durability=\"{}\"\n\
         journal  {}, a sync takes {} (p99 {})\n\
         memory   {} of {}\n\
         results  {} ({}){evicted}\n\
         {failed}{unreadable}clients  {}\n",
        process.pid,
        duration_ms(process.uptime_ms),
        printable(&process.version),
        printable(&engine.engine),
        engine.highest_durability.name(),
        bytes(process.journal_bytes),
        sync_us(process.sync_p50_us),
        sync_us(process.sync_p99_us),
        bytes(process.memory_bytes),
        match process.memory_limit_bytes {
            0 => "no limit".to_owned(),
            limit => bytes(limit),
        },
        status.results,
        bytes(status.results_bytes),
        status.clients,
    );

    text.push_str(&troubles(status));

    let queues = queue_table(&status.queues, &status.others);
    text + "\n"
        + &queues
        + "\n"
        + &worker_table(&status.workers)
        + &running_table(&status.workers, SHOWN_RUNNING, now_ms())
}

/// Lists the longest-running jobs of all workers, after an empty line.
pub fn running_table(workers: &[WorkerStatus], most: usize, now_ms: u64) -> String {
    let jobs = workers
        .iter()
        .flat_map(|worker| worker.running.iter().map(move |job| (job, worker)));
    let mut jobs: Vec<(&RunningJob, &WorkerStatus)> = jobs.collect();
    if jobs.is_empty() {
        return String::new();
    }
    jobs.sort_by_key(|(job, _)| (job.started_at, job.id));
    jobs.truncate(most);
    let mut table = TextTable::new(&["RUNNING", "ID", "TASK", "QUEUE", "WORKER"]);
    for (job, worker) in &jobs {
        table.row(vec![
            duration_ms(now_ms.saturating_sub(job.started_at)),
            job.id.to_string(),
            job.task.clone(),
            job.queue.clone(),
            worker.name.clone(),
        ]);
    }
    let leases: usize = workers.iter().map(|worker| worker.leases as usize).sum();
    let rest = match leases.saturating_sub(jobs.len()) {
        0 => String::new(),
        more => format!(
            "and {}\n",
            count(more as u64, "job").replacen(' ', " more ", 1)
        ),
    };
    format!("\n{table}{rest}")
}

pub fn queue_table(queues: &[QueueStatus], others: &Others) -> String {
    if queues.is_empty() && others.queues == 0 {
        return "no queues yet\n".to_owned();
    }
    let mut table = TextTable::new(&[
        "QUEUE",
        ">READY",
        ">DELAYED",
        ">RUNNING",
        ">FAILED",
        ">IN/S",
        ">DONE/S",
        ">OLDEST",
        ">CONSUMERS",
        "",
    ]);
    for queue in queues {
        table.row(vec![
            queue.name.clone(),
            queue.ready.to_string(),
            queue.delayed.to_string(),
            queue.running.to_string(),
            queue.failed.to_string(),
            per_second(queue.tallied.last_minute.enqueued),
            per_second(done(&queue.tallied.last_minute)),
            match queue.ready {
                0 => "-".to_owned(),
                _ => duration_ms(queue.oldest_ready_ms),
            },
            queue.consumers.to_string(),
            remarks(queue),
        ]);
    }
    if others.queues > 0 {
        let mut row = vec!["others".to_owned()];
        row.resize(9, "-".to_owned());
        row.push(others_remarks(others));
        table.row(row);
    }
    table.to_string()
}

/// Returns the number of jobs that ended in any way.
fn done(counts: &JobCounts) -> u64 {
    counts.succeeded + counts.failed + counts.expired + counts.cancelled + counts.dropped
}

/// Formats a count over a minute as a rate per second.
fn per_second(of_minute: u64) -> String {
    match of_minute {
        0 => "-".to_owned(),
        1..600 => format!("{:.1}", (of_minute as f64 / 60.0).max(0.1)),
        _ => (of_minute.saturating_add(30) / 60).to_string(),
    }
}

fn others_remarks(others: &Others) -> String {
    let JobCounts {
        enqueued, failed, ..
    } = others.of_queues;
    let mut remarks = format!(
        "{} unused for an hour: {enqueued} in, {} done",
        count(others.queues, "queue"),
        done(&others.of_queues)
    );
    if failed > 0 {
        remarks += &format!(", {failed} of them failed");
    }
    remarks
}

pub fn worker_table(workers: &[WorkerStatus]) -> String {
    if workers.is_empty() {
        return "no workers; start one with: penstock worker MODULE:APP\n".to_owned();
    }
    let mut table = TextTable::new(&["WORKER", ">SLOTS", ">BUSY", ">LEASES", "QUEUES", ""]);
    for worker in workers {
        table.row(vec![
            worker.name.clone(),
            worker.slots.to_string(),
            worker.busy.to_string(),
            worker.leases.to_string(),
            worker.queues.join(", "),
            worker_remarks(worker),
        ]);
    }
    let slots: u32 = workers.iter().map(|worker| worker.slots).sum();
    let busy: u32 = workers.iter().map(|worker| worker.busy).sum();
    let are = match busy {
        1 => "is",
        _ => "are",
    };
    format!("{table}\n{busy} of {slots} slots {are} busy\n")
}

/// Lists anything unusual about a worker.
fn worker_remarks(worker: &WorkerStatus) -> String {
    let state = match (worker.connected, worker.state) {
        (false, _) => Some("unreachable".to_owned()),
        (true, WorkerState::Serving | WorkerState::Unsaid) => None,
        (true, state) => Some(state_name(state).to_owned()),
    };
    let parked = (worker.parked > 0).then(|| format!("{} parked", worker.parked));
    let remarks: Vec<String> = state.into_iter().chain(parked).collect();
    remarks.join("; ")
}

/// Lists anything unusual about a queue.
fn remarks(queue: &QueueStatus) -> String {
    let mut remarks = Vec::new();
    if queue.paused {
        remarks.push("paused".to_owned());
    }
    if !queue.limits.is_none() {
        remarks.push(limits(&queue.limits));
    }
    if queue.unknown > 0 {
        remarks.push(format!("{} of tasks that no worker has", queue.unknown));
    }
    if queue.ending > 0 {
        remarks.push(format!("{} still to be purged", queue.ending));
    }
    if queue.refused > 0 {
        remarks.push(format!("{} refused", queue.refused));
    }
    if queue.dropped > 0 {
        remarks.push(format!("{} dropped", queue.dropped));
    }
    remarks.join("; ")
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use penstock_broker::{Broker, BrokerOptions, ConnId, Input, Now, Output, Position, Recovery};
    use penstock_message::{
        Consume, DEFAULT_PRIORITY, Durability, Failure, Filter, Message, MessageId, Op,
        ProcessStatus, QueueLimits, SessionId, Tallied, Target, Tx,
    };

    use super::*;

    #[test]
    fn a_person_sees_a_table() {
        let status = Status {
            queues: vec![QueueStatus {
                name: "mail".to_owned(),
                ready: 3,
                failed: 2,
                ending: 1,
                unknown: 2,
                oldest_ready_ms: 61_000,
                paused: true,
                limits: QueueLimits {
                    max_length: Some(5),
                    ..QueueLimits::NONE
                },
                refused: 7,
                tallied: Tallied {
                    last_minute: JobCounts {
                        enqueued: 90_000,
                        succeeded: 29,
                        failed: 1,
                        ..JobCounts::default()
                    },
                    ..Tallied::default()
                },
                ..QueueStatus::default()
            }],
            others: Box::new(Others {
                queues: 2,
                of_queues: JobCounts {
                    enqueued: 12,
                    succeeded: 8,
                    failed: 3,
                    ..JobCounts::default()
                },
                ..Others::default()
            }),
            workers: vec![WorkerStatus {
                name: "worker@host:7".to_owned(),
                queues: vec!["default".to_owned(), "mail".to_owned()],
                slots: 4,
                busy: 1,
                parked: 3,
                leases: 2,
                connected: false,
                state: WorkerState::Serving,
                running: vec![RunningJob {
                    id: MessageId([1; 16]),
                    task: "send".to_owned(),
                    queue: "mail".to_owned(),
                    started_at: now_ms() - 61_000,
                }],
            }],
            clients: 2,
            results: 10,
            results_bytes: 2048,
            evicted: 1,
            unreadable: 0,
            failed: 2,
            failed_bytes: 600,
            failed_dropped: 4,
            process: Box::new(ProcessStatus {
                version: "0.1.0".to_owned(),
                pid: 42,
                uptime_ms: 5000,
                sync_p50_us: 110,
                sync_p99_us: 300,
                journal_bytes: 1 << 20,
                memory_bytes: 8 << 20,
                memory_limit_bytes: 1 << 30,
                ..ProcessStatus::default()
            }),
            space: Space::NoPublishes,
            ..Status::default()
        };
        let expected = "\
broker   local:/data (pid 42, up 5.0 s, penstock 0.1.0)
engine   Test 1; up to durability=\"os\"
journal  1.0 MiB, a sync takes 110 µs (p99 300 µs)
memory   8.0 MiB of 1.0 GiB
results  10 (2.0 KiB), 1 evicted before they expired
failed   2 (600 B), 4 dropped to stay within limits
clients  2
trouble  the broker's disk is nearly full: it accepts no new jobs until there is space; workers continue; drain the \
queues or free some space on its machine

QUEUE   READY  DELAYED  RUNNING  FAILED  IN/S  DONE/S     OLDEST  CONSUMERS
mail        3        0        0       2  1500     0.5  1 min 1 s          0  paused; at most 5 jobs; 2 of tasks that no worker has; 1 still to be purged; 7 refused
others      -        -        -       -     -       -          -          -  2 queues unused for an hour: 12 in, 11 done, 3 of them failed

WORKER         SLOTS  BUSY  LEASES  QUEUES
worker@host:7      4     1       2  default, mail  unreachable; 3 parked

1 of 4 slots is busy

RUNNING    ID                                    TASK  QUEUE  WORKER
1 min 1 s  01010101-0101-0101-0101-010101010101  send  mail   worker@host:7
and 1 more job
";
        let mut engine = Capabilities::NOTHING;
        engine.engine = "Test 1".to_owned();
        engine.highest_durability = Durability::Os;
        assert_eq!(for_people("local:/data", &status, &engine), expected);
    }

    /// Broker with a clock that the test moves.
    struct TestBroker {
        broker: Broker,
        now: Now,
        synced: Position,
        seqs: [u64; 2],
    }

    const CLIENT: usize = 0;
    const WORKER: usize = 1;

    fn conn(of: usize) -> ConnId {
        ConnId(of as u64 + 1)
    }

    impl TestBroker {
        fn new() -> Self {
            let now = Now {
                wall_ms: 1_700_000_000_000,
                ..Now::default()
            };
            let mut world = Self {
                broker: Recovery::new(BrokerOptions::default()).finish(now, 1),
                now,
                synced: Position(0),
                seqs: [0, 0],
            };
            for of in [CLIENT, WORKER] {
                world.handle(Input::Connected {
                    conn: conn(of),
                    session: SessionId([of as u8; 16]),
                    name: "client".to_owned(),
                    heartbeat_ms: 15_000,
                    last_seq: 0,
                    leases: Vec::new(),
                });
            }
            world
        }

        /// Handles an input, then returns the outputs as if all records were durable.
        fn handle(&mut self, input: Input) -> Vec<Output> {
            self.broker.handle(self.now, input);
            self.settle()
        }

        fn settle(&mut self) -> Vec<Output> {
            let mut outputs = Vec::new();
            loop {
                let before = (self.synced, outputs.len());
                while let Some(record) = self.broker.poll_record() {
                    self.synced = record.position;
                }
                self.broker.handle_durable(self.synced);
                outputs.extend(std::iter::from_fn(|| self.broker.poll_output()));
                let due_ms = self.broker.next_deadline();
                let is_idle = due_ms.is_none_or(|due_ms| due_ms > self.now.mono_ms);
                if is_idle && before == (self.synced, outputs.len()) {
                    return outputs;
                }
            }
        }

        fn commit(&mut self, by: usize, ops: Vec<Op>) {
            self.seqs[by] += 1;
            self.handle(Input::Commit {
                conn: conn(by),
                first_seq: self.seqs[by],
                durability: Durability::Disk,
                txs: vec![Tx { ops }],
            });
        }

        fn move_on(&mut self, ms: u64) {
            self.now.move_on(ms);
            self.broker.handle_deadline(self.now);
            self.settle();
        }
    }

    fn publish(number: u8, queue: &str) -> Op {
        Op::Publish {
            queues: vec![queue.to_owned()],
            message: Message {
                id: MessageId([number; 16]),
                task: "send".to_owned(),
                priority: DEFAULT_PRIORITY,
                expires_at: None,
                result_ttl_ms: None,
                max_deliveries: 3,
                attempt: 0,
                crashes: 0,
                enqueued_at: 0,
                notes: Vec::new(),
                body: Bytes::new(),
                extras: None,
            },
            due: None,
            unless_key: None,
        }
    }

    #[test]
    fn a_queue_that_is_not_in_use_is_counted_among_others_an_hour_later() {
        let mut world = TestBroker::new();
        let jobs = vec![publish(1, "old"), publish(2, "older"), publish(3, "older")];
        world.commit(CLIENT, jobs);
        let delivered = world.handle(Input::Consume {
            conn: conn(WORKER),
            consume: Consume {
                queues: vec!["old".to_owned()],
                add_credit: 1,
                ..Consume::default()
            },
        });
        let lease = delivered.iter().find_map(|output| match output {
            Output::Deliver { deliveries, .. } => Some(deliveries[0].lease),
            _ => None,
        });
        let fail = Op::Fail {
            lease: lease.expect("a job waits"),
            value: None,
            note: Bytes::new(),
            failure: Failure::default(),
            cost_us: 0,
        };
        world.commit(WORKER, vec![fail]);
        world.handle(Input::Disconnected {
            conn: conn(WORKER),
            clean: true,
        });
        let all_failed = Target::Filter(Filter::default());
        let empty = vec![
            Op::DropFailed { target: all_failed },
            Op::Purge {
                queue: "older".to_owned(),
            },
        ];
        world.commit(CLIENT, empty);
        let shown = |world: &TestBroker| {
            let status = world.broker.status();
            let table = queue_table(&status.queues, &status.others);
            let json = as_json(&status, &Capabilities::NOTHING);
            (table, json["others"].clone())
        };

        let (table, json) = shown(&world);
        assert!(
            table.contains("old ") && table.contains("older "),
            "{table}"
        );
        assert!(!table.contains("others"), "{table}");
        assert_eq!(json["queues"], 0);

        world.commit(CLIENT, vec![publish(4, "new")]);
        world.move_on(3_700_000);
        let (table, json) = shown(&world);
        let row = "others      -        -        -       -     -       -          -          -  2 queues unused for an hour: \
                   3 in, 3 done, 1 of them failed\n";
        assert!(table.ends_with(row), "{table}");
        assert!(table.contains("\nnew "), "{table}");
        assert!(!table.contains("old"), "{table}");
        assert_eq!((&json["queues"], &json["tasks"]), (&json!(2), &json!(0)));
        let counts = &json["queue_counts"];
        assert_eq!(
            (&counts["enqueued"], &counts["failed"]),
            (&json!(3), &json!(1))
        );
    }
}
