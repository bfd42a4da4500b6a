//! Messages arrive as they were sent, however the bytes are split; all other input is a typed error, never a panic.

use bytes::{Bytes, BytesMut};
use penstock_message::{
    Answer, AppRelease, AppVersion, Applied, AskQuery, BrokerCounts, CancelOrder, CatchUp, Claim,
    Condition, Conflict, Delivery, Due, Durability, Extras, FailedJob, FailedPage, FailedQuery,
    Failure, Filter, HeaderPatch, Hold, InputShape, Inputs, JobCounts, JoinOutcome, JoinPolicy,
    Key, KeyState, Lease, Member, Message, MessageId, MessageInfo, MessageState, NoReply,
    NodeState, Notice, OnRunning, Op, Open, OperationStatus, Others, Overflow, Overlap,
    ProducingRun, Query, QueueLimits, QueueStatus, Receipt, Refusal, ReleaseReason, ReleaseTimes,
    Retries, Rhythm, RunningJob, ScheduleInfo, ScheduleName, SchedulePlan, ScheduleStep,
    ScheduleTally, ScheduleTiming, SchedulesPage, SchedulesQuery, Scope, Skipped, Status,
    StatusCursor, StatusPage, StatusQuery, Tallied, Target, TaskStatus, Tx, Unsealed, Until, Value,
    ValueStatus, WorkerState, WorkerStatus, WorkflowCounts, WorkflowInfo, WorkflowState,
    WorkflowsPage, WorkflowsQuery,
};
use penstock_wire::{
    Decoder, FRAME_HEADER_BYTES, Heard, MAX_FRAME_BYTES, WireError, convert, encode_frame, proto,
};
use proptest::collection::vec;
use proptest::option::of as option;
use proptest::prelude::*;
use proptest::sample::select;

type ToBroker = proto::ToBroker;
type ToClient = proto::ToClient;

fn any_id() -> impl Strategy<Value = MessageId> {
    any::<[u8; 16]>().prop_map(MessageId)
}

fn any_bytes() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn any_lease() -> impl Strategy<Value = Lease> {
    (any_id(), any::<u32>(), any::<u64>()).prop_map(|(message, epoch, grant)| Lease {
        message,
        epoch,
        grant,
    })
}

fn any_due() -> impl Strategy<Value = Due> {
    prop_oneof![
        any::<u64>().prop_map(Due::AfterMs),
        any::<u64>().prop_map(Due::At)
    ]
}

fn any_key() -> impl Strategy<Value = Key> {
    prop_oneof![
        any_id().prop_map(Key::Result),
        any_bytes().prop_map(Key::Named),
        (proptest::sample::select(&Scope::ALL[..]), any_bytes())
            .prop_map(|(scope, key)| Key::Scoped(scope, key)),
    ]
}

fn any_claim() -> impl Strategy<Value = Box<Claim>> {
    let until = prop_oneof![
        Just(Until::Ended),
        Just(Until::Started),
        any::<u64>().prop_map(Until::ForMs),
    ];
    let conflict = prop_oneof![
        Just(Conflict::Skip),
        Just(Conflict::Refuse),
        any::<Option<u64>>().prop_map(|max_wait_ms| Conflict::Replace { max_wait_ms }),
    ];
    (any_key(), until, conflict).prop_map(|(key, until, conflict)| {
        Box::new(Claim {
            key,
            until,
            conflict,
        })
    })
}

fn any_value() -> impl Strategy<Value = Value> {
    let status = prop_oneof![
        Just(ValueStatus::Succeeded),
        Just(ValueStatus::Failed),
        Just(ValueStatus::Expired),
        Just(ValueStatus::Crashed),
        Just(ValueStatus::Cancelled),
        Just(ValueStatus::Upstream),
        Just(ValueStatus::Replaced),
        Just(ValueStatus::Gathered),
        Just(ValueStatus::TimedOut),
    ];
    (status, any_bytes()).prop_map(|(status, body)| Value::new(status, body))
}

prop_compose! {
    fn any_run()(task in ".{0,8}", queue in ".{0,8}", attempt: u32, generation: u32, ended_at: u64) -> ProducingRun {
        ProducingRun { task, queue, attempt, generation, ended_at }
    }
}

/// Makes a value as a broker sends it.
fn any_told_value() -> impl Strategy<Value = Value> {
    (any_value(), option(any_run())).prop_map(|(value, run)| Value {
        run: run.map(Box::new),
        ..value
    })
}

fn any_treatment() -> impl Strategy<Value = OnRunning> {
    prop::sample::select(OnRunning::ALL.to_vec())
}

fn any_state() -> impl Strategy<Value = MessageState> {
    prop_oneof![
        Just(MessageState::Ready),
        Just(MessageState::Delayed),
        Just(MessageState::Running),
        Just(MessageState::Held),
        Just(MessageState::Failed),
        Just(MessageState::Blocked),
        Just(MessageState::Cancelling),
        Just(MessageState::Parked),
    ]
}

prop_compose! {
    fn any_failure()(class in ".{0,8}", message in ".{0,8}", fingerprint: u64, preview in any_bytes()) -> Failure {
        Failure { class, message, fingerprint, preview }
    }
}

prop_compose! {
    fn any_filter()(
        queue in option(".{0,8}"), task in option(".{0,8}"), workflow in option(any_id()), class in option(".{0,8}"),
        fingerprint: Option<u64>, failed_from: Option<u64>, failed_before: Option<u64>,
    ) -> Filter {
        Filter { queue, task, workflow, class, fingerprint, failed_from, failed_before }
    }
}

fn any_target() -> impl Strategy<Value = Target> {
    prop_oneof![
        any_id().prop_map(Target::Job),
        any_filter().prop_map(Target::Filter)
    ]
}

fn any_inputs() -> impl Strategy<Value = Inputs> {
    let shape = prop_oneof![
        Just(InputShape::One),
        Just(InputShape::List),
        Just(InputShape::Named)
    ];
    (any_id(), shape).prop_map(|(join, shape)| Inputs { join, shape })
}

fn any_retries() -> impl Strategy<Value = Retries> {
    prop_oneof![
        any::<u32>().prop_map(Retries::AtMost),
        vec(any::<u64>(), 0..4).prop_map(Retries::After)
    ]
}

prop_compose! {
    fn any_extras()(
        (member, inputs, workflow, parent) in (
            option((any_id(), any::<u32>())), option(any_inputs()), option(any_id()), option(any_id()),
        ),
        when in proptest::sample::select(&JoinOutcome::ALL[..]),
        key in option(any_bytes()), headers in vec((".{0,8}", any_bytes()), 0..3),
        generation: u32, attempts_before: u32, retries in option(any_retries()),
        timeout_ms: Option<u64>, soft_timeout_ms: Option<u64>, suspects: u8, args_hash: Option<u64>,
    ) -> Extras {
        let member = member.map(|(join, index)| Member { join, index });
        Extras {
            member, inputs, when, later: None, workflow, key, headers, generation, attempts_before, retries, timeout_ms,
            soft_timeout_ms, suspects, parent, args_hash,
        }
    }
}

prop_compose! {
    fn any_message()(
        id in any_id(), task in ".{0,12}", priority: u8, expires_at in option(any_due()),
        result_ttl_ms: Option<u64>, max_deliveries: u8, attempt: u32, crashes: u8, enqueued_at: u64,
        notes in vec(any_bytes(), 0..3), body in any_bytes(), extras in option(any_extras()),
    ) -> Message {
        Message { id, task, priority, expires_at, result_ttl_ms, max_deliveries, attempt, crashes, enqueued_at, notes, body, extras: extras.and_then(Extras::boxed), }
    }
}

prop_compose! {
    fn any_held()(
        mut message in any_message(), due in option(any_due()), expires_after_ms: Option<u64>,
    ) -> Message {
        let later = ReleaseTimes { due, expires_after_ms };
        if later != ReleaseTimes::default() {
            message.extras.get_or_insert_default().later = Some(Box::new(later));
        }
        message
    }
}

prop_compose! {
    fn any_move()(
        lease in any_lease(), queue in option(".{0,8}"), due in option(any_due()),
        next_attempt: bool, note in option(any_bytes()), expires_at in option(any_due()),
        cost_us: u64,
    ) -> Op {
        Op::Move { lease, queue, due, patch: HeaderPatch { next_attempt, note, expires_at }, cost_us }
    }
}

prop_compose! {
    fn any_fail()(
        lease in any_lease(), value in option(any_bytes()), note in any_bytes(), failure in any_failure(), cost_us: u64,
    ) -> Op {
        Op::Fail { lease, value, note, failure, cost_us }
    }
}

prop_compose! {
    fn any_open()(
        workflow in any_id(), name in ".{0,8}", description in any_bytes(), deadline in option(any_due()),
        kept_ms: Option<u64>, parent in option(any_id()),
    ) -> Op {
        Op::Open(Open { workflow, name, description, deadline, kept_ms, parent })
    }
}

fn any_timing() -> impl Strategy<Value = ScheduleTiming> {
    let rhythm = prop_oneof![
        ".{0,8}".prop_map(Rhythm::Cron),
        any::<u64>().prop_map(Rhythm::Every),
        any::<u64>().prop_map(Rhythm::At),
    ];
    (rhythm, ".{0,8}", any::<u64>()).prop_map(|(rhythm, zone, jitter_ms)| ScheduleTiming {
        rhythm,
        zone,
        jitter_ms,
    })
}

prop_compose! {
    fn any_schedule_name()(app in ".{0,8}", name in ".{0,8}") -> ScheduleName {
        ScheduleName { app, name }
    }
}

prop_compose! {
    fn any_plan()(
        timing in any_timing(), overlap in select(&Overlap::ALL[..]), catch_up in select(&CatchUp::ALL[..]),
        window_ms: u64, queue in ".{0,8}", message in any_message(),
    ) -> Box<SchedulePlan> {
        Box::new(SchedulePlan { timing, overlap, catch_up, window_ms, queue, message })
    }
}

fn any_schedule() -> impl Strategy<Value = Op> {
    let version = prop_oneof![
        Just(AppVersion::Unnamed),
        any::<u64>().prop_map(AppVersion::Number),
        ".{0,8}".prop_map(AppVersion::Text),
    ];
    let generation = (version, any::<u64>()).prop_map(|(version, started_at)| AppRelease {
        version,
        started_at,
    });
    let step = prop_oneof![
        (any_plan(), generation).prop_map(|(plan, code)| ScheduleStep::Declare(plan, code)),
        any_plan().prop_map(ScheduleStep::Set),
        any_plan().prop_map(|plan| ScheduleStep::Retime(Box::new(plan.into_parts().0))),
        Just(ScheduleStep::Pause),
        Just(ScheduleStep::Resume),
        Just(ScheduleStep::Run),
        Just(ScheduleStep::Reset),
    ];
    prop_oneof![
        (any_schedule_name(), step).prop_map(|(schedule, step)| Op::Schedule { schedule, step }),
        any_schedule_name().prop_map(|schedule| Op::Unschedule { schedule }),
    ]
}

prop_compose! {
    fn any_schedule_info()(
        name in any_schedule_name(), timing in any_timing(), overlap in select(&Overlap::ALL[..]),
        catch_up in select(&CatchUp::ALL[..]), window_ms: u64, queue in ".{0,8}", task in ".{0,8}", flags: [bool; 5],
        trouble in ".{0,8}", next in vec(any::<u64>(), 0..3), last in option((any::<u64>(), any_id())),
        skipped in option((any::<u64>(), select(&Skipped::ALL[..]))), tally: [u64; 3],
    ) -> ScheduleInfo {
        let [is_paused, is_set, is_declared, is_running, is_queued] = flags;
        let tally = ScheduleTally { fired: tally[0], skipped: tally[1], missed: tally[2] };
        ScheduleInfo {
            name, timing, overlap, catch_up, window_ms, queue, task, is_paused, is_set, is_declared, trouble, next, last,
            skipped, is_running, is_queued, tally,
        }
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    let reason = prop_oneof![
        Just(ReleaseReason::Returned),
        ".{0,20}".prop_map(ReleaseReason::Crashed),
        ".{0,20}".prop_map(ReleaseReason::Suspected)
    ];
    let condition = prop_oneof![
        Just(Condition::Absent),
        Just(Condition::Present),
        any_bytes().prop_map(Condition::Is)
    ];
    let policy = any::<u32>().prop_map(JoinPolicy::of_max_failures);
    let then = vec(
        (any_id(), any::<u32>()).prop_map(|(join, index)| Member { join, index }),
        0..3,
    );
    let when = proptest::sample::select(&JoinOutcome::ALL[..]);
    let places = (vec((any::<u32>(), when), 0..3), then);
    let optional_claim = option(any_claim());
    prop_oneof![
        (any_lease(), any::<u64>()).prop_map(|(lease, cost_us)| Op::Ack { lease, cost_us }),
        (any_lease(), any::<u64>()).prop_map(|(lease, cost_us)| Op::Replace { lease, cost_us }),
        (any_lease(), reason).prop_map(|(lease, reason)| Op::Release { lease, reason }),
        any_move(),
        (
            vec(".{0,8}", 0..3),
            any_message(),
            option(any_due()),
            optional_claim
        )
            .prop_map(|(queues, message, due, unless_key)| Op::Publish {
                queues,
                message,
                due,
                unless_key
            }),
        (any_key(), any_value(), any::<Option<u64>>(), ".{0,8}").prop_map(
            |(key, value, ttl_ms, group)| Op::Put {
                key,
                value,
                ttl_ms,
                group
            }
        ),
        any_key().prop_map(|key| Op::Delete { key }),
        (any_key(), condition).prop_map(|(key, condition)| Op::Guard { key, condition }),
        (
            any_id(),
            any::<u32>(),
            vec((".{0,8}", any_held()), 0..3),
            policy,
            places,
            any::<Option<u64>>(),
            proptest::option::of((any_id(), proptest::option::of(any_id())))
        )
            .prop_map(
                |(join, count, messages, policy, (expects, then), result_ttl_ms, unsealed)| {
                    Op::Hold(Hold {
                        join,
                        count,
                        messages,
                        policy,
                        expects,
                        then,
                        result_ttl_ms,
                        unsealed: unsealed
                            .map(|(workflow, creator)| Unsealed { workflow, creator }),
                    })
                }
            ),
        (any_id(), any::<u32>()).prop_map(|(join, count)| Op::Seal { join, count }),
        (any_id(), any_id(), any::<bool>()).prop_map(|(job, member, outer)| Op::Grow {
            job,
            member,
            outer
        }),
        (any_id(), any::<u32>(), any::<bool>()).prop_map(|(join, index, succeeded)| Op::Join {
            join,
            index,
            succeeded
        }),
        any_fail(),
        (any_target(), ".{0,8}", any_treatment()).prop_map(|(target, reason, running)| {
            Op::Cancel {
                target,
                reason,
                running,
            }
        }),
        (any_target(), option(".{0,8}"))
            .prop_map(|(target, queue)| Op::RetryFailed { target, queue }),
        any_target().prop_map(|target| Op::DropFailed { target }),
        any_open(),
        any_schedule(),
        Just(Op::Unnamed),
        ".{0,8}".prop_map(|queue| Op::Purge { queue }),
        ".{0,8}".prop_map(|queue| Op::Pause { queue }),
        ".{0,8}".prop_map(|queue| Op::Resume { queue }),
        (".{0,8}", any::<(Option<u64>, Option<u64>)>(), any::<bool>()).prop_map(
            |(queue, (max_length, max_bytes), drops)| Op::Limit {
                queue,
                limits: QueueLimits {
                    max_length,
                    max_bytes,
                    overflow: match drops {
                        true => Overflow::DropOldest,
                        false => Overflow::Reject,
                    },
                },
            }
        ),
    ]
}

fn any_receipt() -> impl Strategy<Value = Receipt> {
    let why = prop_oneof![
        Just(Refusal::LeaseLost),
        Just(Refusal::GuardFailed),
        ".{0,9}".prop_map(Refusal::TooLarge),
        Just(Refusal::AlreadyExists),
        ".{0,9}".prop_map(Refusal::QueueFull),
        Just(Refusal::DiskFull),
        ".{0,9}".prop_map(Refusal::Invalid),
        ".{0,9}".prop_map(Refusal::NotOffered),
        Just(Refusal::NoSuchJob),
        any_state().prop_map(Refusal::TooLate),
        any_id().prop_map(Refusal::Claimed),
    ];
    prop_oneof![
        (
            vec(any::<u32>(), 0..4),
            vec((any::<u32>(), any_id()), 0..4),
            option(any_state()),
            any::<Option<u64>>()
        )
            .prop_map(
                |(skipped, owners, found, operation)| Receipt::Applied(Applied {
                    skipped,
                    owners,
                    found,
                    operation
                })
            ),
        Just(Receipt::Duplicate),
        Just(Receipt::Unknown),
        (any::<u32>(), why).prop_map(|(op, why)| Receipt::Refused { op, why }),
    ]
}

fn any_durability() -> impl Strategy<Value = Durability> {
    prop_oneof![
        Just(Durability::Disk),
        Just(Durability::Os),
        Just(Durability::None),
        Just(Durability::Replicated)
    ]
}

fn any_cursor() -> impl Strategy<Value = StatusCursor> {
    prop_oneof![
        ".{0,8}".prop_map(StatusCursor::Queue),
        ".{0,8}".prop_map(StatusCursor::Task),
        any::<u64>().prop_map(StatusCursor::Worker),
    ]
}

fn any_workflow_state() -> impl Strategy<Value = WorkflowState> {
    select(&WorkflowState::ALL[..])
}

prop_compose! {
    fn any_workflows_query()(
        workflow in option(any_id()), state in option(any_workflow_state()), name in option(".{0,8}"),
        after in option(any_id()), limit: u32, nodes in vec(any_id(), 0..3),
    ) -> WorkflowsQuery {
        WorkflowsQuery { workflow, state, name, after, limit, nodes }
    }
}

prop_compose! {
    fn any_workflow()(
        id in any_id(), name in ".{0,8}", description in any_bytes(), state in any_workflow_state(), counts: [u64; 6],
        opened_at: u64, ended_at: Option<u64>, deadline: Option<u64>, parent in option(any_id()),
    ) -> WorkflowInfo {
        let [waiting, running, succeeded, failed, cancelled, blocked] = counts;
        let jobs = WorkflowCounts { waiting, running, succeeded, failed, cancelled, blocked };
        WorkflowInfo { id, name, description, state, jobs, opened_at, ended_at, deadline, parent }
    }
}

fn any_node() -> impl Strategy<Value = NodeState> {
    let numbers = any::<(u32, u32, u32)>();
    prop_oneof![
        Just(NodeState::Gone),
        Just(NodeState::Job(MessageState::Blocked)),
        Just(NodeState::Ended(ValueStatus::Upstream)),
        (numbers, any_workflow_state()).prop_map(|((members, ended, failed), state)| {
            NodeState::Join {
                members,
                ended,
                failed,
                state,
            }
        }),
    ]
}

fn any_query() -> impl Strategy<Value = Query> {
    prop_oneof![
        (vec(".{0,8}", 0..3), option(any_cursor()), any::<u32>()).prop_map(
            |(queues, after, limit)| Query::Status(StatusQuery {
                queues,
                after,
                limit,
            })
        ),
        any_id().prop_map(Query::Message),
        any_id().prop_map(Query::Progress),
        (any_filter(), any::<u64>(), any::<u32>(), any::<bool>()).prop_map(
            |(filter, after, limit, newest_first)| {
                Query::Failed(FailedQuery {
                    filter,
                    after,
                    limit,
                    newest_first,
                })
            }
        ),
        any::<u64>().prop_map(Query::Operation),
        any_workflows_query().prop_map(Query::Workflows),
        (
            option(".{0,8}"),
            option(".{0,8}"),
            option(any_schedule_name()),
            any::<u32>()
        )
            .prop_map(|(app, name, after, times)| {
                Query::Schedules(SchedulesQuery {
                    app,
                    name,
                    after,
                    times,
                })
            }),
        Just(Query::Unnamed),
        Just(Query::Stop),
        (".{0,8}", any_bytes(), any::<u64>()).prop_map(|(worker, question, patience_ms)| {
            Query::Ask(AskQuery {
                worker,
                question,
                patience_ms,
            })
        }),
    ]
}

prop_compose! {
    fn any_failed_job()(
        id in any_id(), task in ".{0,8}", queue in option(".{0,8}"), attempt: u32, crashes: u8,
        generation: u32, enqueued_at: u64, failed_at: u64, failure in any_failure(), body_bytes: u64,
    ) -> FailedJob {
        FailedJob { id, task, queue, attempt, crashes, generation, enqueued_at, failed_at, failure, body_bytes }
    }
}

prop_compose! {
    fn any_info()(
        id in any_id(), task in ".{0,8}", queue in ".{0,8}", state in any_state(), enqueued_at: u64,
        (started_at, due_at) in any::<(Option<u64>, Option<u64>)>(), attempt: u32, crashes: u8,
        worker in option(".{0,8}"), notes in vec(any_bytes(), 0..3), generation: u32,
        failed in option((any::<u64>(), any_failure())), headers in vec((".{0,8}", any_bytes()), 0..3),
        task_unknown: bool,
    ) -> MessageInfo {
        let failed = failed.map(Box::new);
        MessageInfo {
            id, task, queue, state, enqueued_at, started_at, due_at, attempt, crashes, worker, notes, generation, failed,
            headers, task_unknown,
        }
    }
}

fn any_counts() -> impl Strategy<Value = JobCounts> {
    any::<[u64; JobCounts::LEN]>().prop_map(JobCounts::from_array)
}

prop_compose! {
    fn any_tallied()(counts in any_counts(), last_minute in any_counts()) -> Tallied {
        Tallied { counts, last_minute }
    }
}

prop_compose! {
    fn any_others()(
        [queues, tasks, refused]: [u64; 3], of_queues in any_counts(), of_tasks in any_counts(),
    ) -> Others {
        Others { queues, tasks, of_queues, of_tasks, refused }
    }
}

prop_compose! {
    fn any_running()(id in any_id(), task in ".{0,8}", queue in ".{0,8}", started_at: u64) -> RunningJob {
        RunningJob { id, task, queue, started_at }
    }
}

prop_compose! {
    fn any_status()(
        [failed, failed_bytes, failed_dropped, results, unreadable]: [u64; 5],
        queues in vec((".{0,8}", any::<[u64; 5]>(), any_tallied(), proptest::option::of(0..=1000u16)), 0..3),
        counts: [u64; 3], connected_workers: u32,
        tasks in vec((".{0,8}", any_tallied()), 0..3), others in any_others(),
        workers in vec((".{0,8}", any::<u32>(), any_worker_state(), vec(any_running(), 0..3)), 0..3),
    ) -> Status {
        let [published, cancelled, failed_for_good] = counts;
        let counts = Box::new(BrokerCounts { published, cancelled, failed: failed_for_good, ..BrokerCounts::default() });
        let queues = queues.into_iter().map(|(name, numbers, tallied, capacity_permille)| {
            let [ready, running, ending, failed, unknown] = numbers;
            QueueStatus {
                name, ready, running, ending, failed, unknown, tallied, capacity_permille, ..QueueStatus::default()
            }
        }).collect();
        let tasks = tasks.into_iter().map(|(name, tallied)| TaskStatus { name, tallied }).collect();
        let others = Box::new(others);
        let workers = workers.into_iter().map(|(name, leases, state, running)| {
            WorkerStatus { name, leases, state, running, ..WorkerStatus::default() }
        }).collect();
        Status {
            queues, tasks, workers, others, counts, failed, failed_bytes, failed_dropped, results, unreadable, connected_workers,
            ..Status::default()
        }
    }
}

fn any_no_reply() -> impl Strategy<Value = NoReply> {
    select(vec![
        NoReply::UnknownWorker,
        NoReply::SeveralWorkers,
        NoReply::TooOld,
        NoReply::Busy,
        NoReply::Lost,
        NoReply::Silent,
        NoReply::TooLarge,
    ])
}

fn any_worker_state() -> impl Strategy<Value = WorkerState> {
    select(vec![
        WorkerState::Unsaid,
        WorkerState::Serving,
        WorkerState::Paused,
        WorkerState::Draining,
        WorkerState::Ending,
    ])
}

fn any_answer() -> impl Strategy<Value = Answer> {
    let operation =
        (any::<[u64; 4]>(), any::<bool>()).prop_map(|([matched, done, asked, spared], is_over)| {
            OperationStatus {
                matched,
                done,
                asked,
                spared,
                is_over,
            }
        });
    prop_oneof![
        (
            any_status(),
            option(any_cursor()),
            any::<u32>(),
            any::<u64>()
        )
            .prop_map(
                |(status, next, own_leases, own_ready)| Answer::Status(StatusPage {
                    status,
                    next,
                    own_leases,
                    own_ready,
                })
            ),
        option(any_info()).prop_map(Answer::Message),
        (vec(any_failed_job(), 0..3), any::<Option<u64>>())
            .prop_map(|(jobs, next)| Answer::Failed(FailedPage { jobs, next })),
        option(operation).prop_map(Answer::Operation),
        (
            vec(any_workflow(), 0..3),
            option(any_id()),
            vec(any_node(), 0..3),
            vec(".{0,9}", 0..3)
        )
            .prop_map(|(workflows, next, nodes, tasks)| {
                Answer::Workflows(WorkflowsPage {
                    workflows,
                    next,
                    nodes,
                    tasks,
                })
            }),
        (vec(any_schedule_info(), 0..3), option(any_schedule_name()))
            .prop_map(|(schedules, next)| Answer::Schedules(SchedulesPage { schedules, next })),
        option(any_bytes()).prop_map(Answer::Progress),
        Just(Answer::Stopping),
        any_bytes().prop_map(|reply| Answer::Asked(Ok(reply))),
        any_no_reply().prop_map(|why| Answer::Asked(Err(why))),
        any::<u64>().prop_map(Answer::Clock),
        ".{0,9}".prop_map(Answer::Refused),
    ]
}

fn any_notice() -> impl Strategy<Value = Notice> {
    prop_oneof![
        (any_schedule_name(), any_id(), any::<[u64; 2]>()).prop_map(
            |(schedule, job, [for_ms, median_ms])| {
                Notice::Hung {
                    schedule,
                    job,
                    for_ms,
                    median_ms,
                }
            }
        ),
        (".{0,8}", any::<u64>(), any::<u64>()).prop_map(|(queue, waiting, for_ms)| {
            Notice::Unserved {
                queue,
                waiting,
                for_ms,
            }
        }),
        (any::<u64>(), any::<u64>())
            .prop_map(|(kept, kept_bytes)| Notice::FailedDropped { kept, kept_bytes }),
        (any_id(), ".{0,8}", ".{0,8}").prop_map(|(id, queue, reason)| Notice::Unreadable {
            id,
            queue,
            reason
        }),
    ]
}

fn commit_frame(first_seq: u64, durability: Durability, txs: Vec<Tx>) -> ToBroker {
    ToBroker {
        commits: vec![proto::Commit {
            first_seq,
            durability: proto::Durability::from(durability).into(),
            txs: txs.into_iter().map(convert::encode_tx).collect(),
            part: proto::Part::Whole.into(),
        }],
        ..ToBroker::default()
    }
}

/// Feeds `stream` in portions of the sizes in `cuts`, and takes messages as they become whole.
fn hear<T: Heard>(stream: &[u8], cuts: &[usize]) -> Result<Vec<T>, WireError> {
    let mut decoder = Decoder::<T>::new(MAX_FRAME_BYTES);
    let mut heard = Vec::new();
    let mut rest = stream;
    let mut cuts = cuts.iter().cycle();
    while !rest.is_empty() {
        let cut = cuts
            .next()
            .map_or(rest.len(), |cut| (*cut).clamp(1, rest.len()));
        let (portion, after) = rest.split_at(cut);
        decoder.extend(portion);
        while let Some(message) = decoder.next_message()? {
            heard.push(message);
        }
        rest = after;
    }
    assert_eq!(decoder.pending_bytes(), 0, "all that was sent was heard");
    Ok(heard)
}

proptest! {
    #[test]
    fn commits_are_heard_as_they_were_said(
        frames in vec((any::<u64>(), any_durability(), vec(vec(any_op(), 0..4).prop_map(Tx::from), 0..4)), 1..4),
        cuts in vec(1_usize..200, 0..8),
    ) {
        let mut stream = BytesMut::new();
        for (first_seq, durability, txs) in frames.clone() {
            encode_frame(&commit_frame(first_seq, durability, txs), &mut stream);
        }
        let heard = hear::<ToBroker>(&stream, &cuts).unwrap();
        let mut back = Vec::new();
        for frame in heard {
            for commit in frame.commits {
                let durability = convert::durability(commit.durability).unwrap();
                back.push((commit.first_seq, durability, convert::decode_txs(commit.txs).unwrap()));
            }
        }
        prop_assert_eq!(back, frames);
    }

    #[test]
    fn deliveries_values_and_receipts_are_heard_as_they_were_said(
        deliveries in vec((any::<u32>(), any::<u64>(), ".{0,8}", any::<bool>(), any_message(), any_bytes(), any::<Option<u64>>()), 0..4),
        values in vec((any_key(), option(option(any_told_value()))), 0..4),
        cancels in vec((any_id(), any::<u32>(), any::<u64>(), any::<bool>(), ".{0,8}"), 0..4),
        receipts in vec((any::<u64>(), any_receipt()), 0..4),
        cuts in vec(1_usize..200, 0..8),
    ) {
        let deliveries: Vec<_> = deliveries.into_iter().map(|(epoch, grant, queue, redelivered, message, inputs, deadline)| Delivery { consumer: epoch % 5,
            lease: Lease { message: message.id, epoch, grant }, queue, redelivered, message, inputs, deadline,
        }).collect();
        let values: Vec<_> = values.into_iter().map(|(key, state)| (key, match state {
            None => KeyState::Gone,
            Some(None) => KeyState::Pending,
            Some(Some(value)) => KeyState::Present(value),
        })).collect();
        let cancels: Vec<_> = cancels.into_iter().map(|(message, epoch, grant, kill, reason)| CancelOrder {
            lease: Lease { message, epoch, grant }, kill, reason,
        }).collect();
        let frame = ToClient {
            cancels: cancels.iter().cloned().map(Into::into).collect(),
            deliveries: deliveries.iter().cloned().map(Into::into).collect(),
            values: values.iter().cloned().map(Into::into).collect(),
            confirm: Some(proto::Confirm {
                through: 7,
                receipts: receipts.iter().cloned().map(Into::into).collect(),
                early: vec![9],
            }),
            ..ToClient::default()
        };
        let mut stream = BytesMut::new();
        encode_frame(&frame, &mut stream);
        let heard = hear::<ToClient>(&stream, &cuts).unwrap().remove(0);
        prop_assert_eq!(convert::all::<_, Delivery>(heard.deliveries).unwrap(), deliveries);
        prop_assert_eq!(convert::all::<_, (Key, KeyState)>(heard.values).unwrap(), values);
        prop_assert_eq!(convert::all::<_, CancelOrder>(heard.cancels).unwrap(), cancels);
        prop_assert_eq!(convert::all::<_, (u64, Receipt)>(heard.confirm.unwrap().receipts).unwrap(), receipts);
    }

    #[test]
    fn questions_answers_and_notices_are_heard_as_they_were_said(
        queries in vec((any::<u64>(), any_query()), 0..4), answers in vec((any::<u64>(), any_answer()), 0..4),
        notices in vec(any_notice(), 0..4), cuts in vec(1_usize..200, 0..8),
    ) {
        let mut stream = BytesMut::new();
        let asked = ToBroker {
            queries: queries.iter().cloned().map(Into::into).collect(),
            ..ToBroker::default()
        };
        encode_frame(&asked, &mut stream);
        let heard = hear::<ToBroker>(&stream, &cuts).unwrap().remove(0);
        prop_assert_eq!(convert::all::<_, (u64, Query)>(heard.queries).unwrap(), queries);

        let mut stream = BytesMut::new();
        let told = ToClient {
            answers: answers.iter().cloned().map(Into::into).collect(),
            notices: notices.iter().cloned().map(Into::into).collect(),
            ..ToClient::default()
        };
        encode_frame(&told, &mut stream);
        let heard = hear::<ToClient>(&stream, &cuts).unwrap().remove(0);
        prop_assert_eq!(convert::all::<_, (u64, Answer)>(heard.answers).unwrap(), answers);
        prop_assert_eq!(convert::all::<_, Notice>(heard.notices).unwrap(), notices);
    }

    #[test]
    fn garbage_is_an_error_or_a_message_and_never_a_panic(
        garbage in vec(any::<u8>(), 0..400), small_length: bool, cuts in vec(1_usize..50, 0..4),
    ) {
        let mut stream = garbage;
        if small_length && stream.len() > FRAME_HEADER_BYTES {
            // Correct length, so that the garbage reaches the parser.
            let length = (stream.len() - FRAME_HEADER_BYTES) as u32;
            stream[..FRAME_HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
        }
        let mut decoder = Decoder::<ToBroker>::new(MAX_FRAME_BYTES);
        for portion in stream.chunks(cuts.first().copied().unwrap_or(usize::MAX)) {
            decoder.extend(portion);
            match decoder.next_message() {
                Ok(Some(frame)) => convert_all(frame),
                Ok(None) => {}
                Err(_) => break,
            }
        }
    }

    #[test]
    fn a_frame_with_a_byte_changed_is_an_error_or_another_message(
        txs in vec(vec(any_op(), 1..3).prop_map(Tx::from), 1..3), at: proptest::sample::Index, with: u8,
    ) {
        let mut stream = BytesMut::new();
        encode_frame(&commit_frame(1, Durability::Disk, txs), &mut stream);
        let at = FRAME_HEADER_BYTES + at.index(stream.len() - FRAME_HEADER_BYTES);
        stream[at] = with;
        let mut decoder = Decoder::<ToBroker>::new(MAX_FRAME_BYTES);
        decoder.extend(&stream);
        if let Ok(Some(frame)) = decoder.next_message() {
            convert_all(frame);
        }
    }

    #[test]
    fn a_frame_cut_short_waits_for_its_rest(
        txs in vec(vec(any_op(), 1..3).prop_map(Tx::from), 1..3), at: proptest::sample::Index,
    ) {
        let mut stream = BytesMut::new();
        encode_frame(&commit_frame(1, Durability::Disk, txs), &mut stream);
        let mut decoder = Decoder::<ToBroker>::new(MAX_FRAME_BYTES);
        decoder.extend(&stream[..at.index(stream.len())]);
        prop_assert_eq!(decoder.next_message(), Ok(None));
    }
}

fn convert_all(frame: ToBroker) {
    for commit in frame.commits {
        let _either_way = convert::decode_txs(commit.txs);
    }
    let _either_way = frame
        .hello
        .map(|hello| convert::all::<_, Lease>(hello.leases));
}

#[test]
fn a_frame_over_the_limit_is_refused_by_its_length_alone() {
    let mut decoder = Decoder::<ToBroker>::new(100);
    decoder.extend(&100_u32.to_le_bytes());
    assert_eq!(decoder.next_message(), Ok(None));

    let mut decoder = Decoder::<ToBroker>::new(100);
    decoder.extend(&101_u32.to_le_bytes());
    let refused = decoder.next_message().unwrap_err();
    assert_eq!(
        refused,
        WireError::TooLarge {
            length: 101,
            limit: 100
        }
    );
    assert_eq!(
        refused.to_string(),
        "a frame of 101 bytes is over the limit of 100"
    );
}

#[test]
fn what_is_valid_protobuf_but_makes_no_sense_says_why() {
    fn check(op: proto::op::Op, why: &str) {
        let ops = vec![proto::Op { op: Some(op) }];
        let encoded = prost::Message::encode_to_vec(&proto::Tx { ops }).into();
        let refused = convert::decode_tx(encoded).unwrap_err();
        assert_eq!(refused.to_string(), why);
    }
    use proto::op::Op as Wire;
    let lease = |id: &'static [u8]| {
        Some(proto::Lease {
            message: Bytes::from_static(id),
            epoch: 1,
            grant: 1,
        })
    };
    check(
        Wire::Ack(proto::Ack {
            lease: None,
            cost_us: 0,
            carry: false,
        }),
        "an operation on a delivery has no lease",
    );
    check(
        Wire::Ack(proto::Ack {
            lease: lease(b"short"),
            cost_us: 0,
            carry: true,
        }),
        "an id is not 16 bytes long",
    );
    check(
        Wire::Publish(proto::Publish::default()),
        "a publish has no message",
    );
    check(Wire::Delete(proto::KeyRef { key: None }), "a key is empty");
    check(
        Wire::Put(proto::Put::default()),
        "an operation on a key does not name it",
    );
    let eternal = proto::Message {
        head: proto::MessageHead {
            id: Bytes::from_static(&[0; 16]),
            priority: 256,
            ..Default::default()
        },
        extras: None,
    };
    check(
        Wire::Publish(proto::Publish {
            message: Some(eternal),
            ..Default::default()
        }),
        "a priority or a number of deliveries is over 255",
    );
    let undecided = proto::Message {
        head: proto::MessageHead {
            id: Bytes::from_static(&[0; 16]),
            ..Default::default()
        },
        extras: Some(Box::new(proto::MessageExtras {
            retries: Some(proto::Retries {
                at_most: Some(1),
                after_ms: vec![1],
            }),
            ..Default::default()
        })),
    };
    check(
        Wire::Publish(proto::Publish {
            message: Some(undecided),
            ..Default::default()
        }),
        "retries are limited by a number and by a list of delays",
    );
    check(
        Wire::Cancel(proto::Cancel::default()),
        "an operation on jobs has no target",
    );
    assert_eq!(
        convert::durability(4),
        Err(WireError::Invalid("an unknown durability"))
    );
}

#[test]
fn a_body_is_a_slice_of_what_arrived() {
    let message = Message {
        id: MessageId::default(),
        task: "shop.send".to_owned(),
        priority: 4,
        expires_at: None,
        result_ttl_ms: None,
        max_deliveries: 3,
        attempt: 0,
        crashes: 0,
        enqueued_at: 0,
        notes: Vec::new(),
        body: Bytes::from(vec![7; 100_000]),
        extras: None,
    };
    let publish = Op::Publish {
        queues: vec!["mail".to_owned()],
        message,
        due: None,
        unless_key: None,
    };
    let mut stream = BytesMut::new();
    encode_frame(
        &commit_frame(1, Durability::Disk, vec![Tx::from(vec![publish])]),
        &mut stream,
    );
    let mut decoder = Decoder::<ToBroker>::new(MAX_FRAME_BYTES);
    decoder.extend(&stream);
    let mut frame = decoder.next_message().unwrap().unwrap();
    let tx = frame.commits.remove(0).txs.remove(0);
    let start = tx.as_ptr() as usize;
    let tx = convert::decode_tx(tx).unwrap();
    let [Op::Publish { message, .. }] = &tx.ops[..] else {
        panic!("a publish was sent");
    };
    // The body is a slice of the frame's bytes.
    let distance = message.body.as_ptr() as usize - start;
    assert!(distance < 100, "the body was copied");
}

/// Encodes a list field of messages or strings, with entries as short as possible.
fn entries(number: u8, count: usize) -> Vec<u8> {
    [number << 3 | 2, 0].repeat(count)
}

fn field(number: u8, held: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    let mut rest = held.len();
    while rest > 127 {
        bytes.push(rest as u8 | 128);
        rest >>= 7;
    }
    bytes.push(rest as u8);
    bytes.extend_from_slice(held);
    bytes
}

/// Encodes a field whose number takes two bytes.
fn long_field(number: u8, held: &[u8]) -> Vec<u8> {
    let mut bytes = field(number & 15, held);
    bytes[0] |= 0x80;
    bytes.insert(1, number >> 4);
    bytes
}

fn decoded(frame: &[u8]) -> Result<Option<ToBroker>, WireError> {
    let mut decoder = Decoder::<ToBroker>::new(MAX_FRAME_BYTES);
    decoder.extend(&(frame.len() as u32).to_le_bytes());
    decoder.extend(frame);
    decoder.next_message()
}

#[test]
fn a_frame_of_many_tiny_entries_is_refused_before_it_takes_much_more_memory_than_its_own() {
    const MILLION: usize = 1_000_000;
    let operations = |count| field(2, &field(3, &entries(1, count)));
    let lonely_operation = field(3, &entries(1, 1));
    let publish = |inside: &[u8]| field(2, &field(3, &field(1, &field(4, inside))));
    let publishes = |inside: &[u8], count: usize| {
        field(2, &field(3, &field(1, &field(4, inside)).repeat(count)))
    };
    let hold = |inside: &[u8]| field(2, &field(3, &field(1, &field(8, inside))));
    let frames = [
        entries(2, 3 * MILLION),
        field(2, &entries(3, 3 * MILLION)),
        operations(MILLION),
        field(2, &lonely_operation.repeat(MILLION)),
        publish(&entries(1, 3 * MILLION)),
        publish(&field(2, &entries(10, 3 * MILLION))),
        hold(&entries(3, MILLION)),
        entries(5, 3 * MILLION),
        field(1, &entries(7, 3 * MILLION)),
        entries(12, 3 * MILLION),
        field(12, &entries(3, 3 * MILLION)),
        field(12, &field(4, &entries(1, 3 * MILLION))),
        field(4, &entries(1, 3 * MILLION)),
        field(4, &entries(2, 3 * MILLION)),
        publish(&field(2, &long_field(16, &[]).repeat(2 * MILLION))),
        // Numbers take eight bytes each, packed or not.
        publish(&field(
            2,
            &long_field(22, &field(2, &vec![1; 16 * MILLION])),
        )),
        publish(&field(2, &long_field(22, &[2 << 3, 1].repeat(8 * MILLION)))),
        // Rare fields are in a separate box, even for one number.
        publishes(&field(2, &[0x88, 1, 1]), 1 << 17),
        // The beginning of a list does not hide its rest.
        [entries(5, 8 * MILLION), field(15, b"unknown")].concat(),
    ];
    for frame in frames {
        assert!(frame.len() <= MAX_FRAME_BYTES);
        // Other tests run at the same time, so this tries until none of them interferes.
        let took = (0..20).map(|_| {
            let start = std::time::Instant::now();
            assert_eq!(decoded(&frame), Err(WireError::TooManyEntries));
            start.elapsed()
        });
        assert!(took.into_iter().any(|took| took.as_millis() < 1000));
    }
    assert!(decoded(&operations(10_000)).is_ok());
    assert!(decoded(&publishes(&field(2, &[]), 1 << 17)).is_ok());
}

#[test]
fn a_frame_as_long_as_may_be_passes_when_it_is_one_body() {
    let body = vec![1; 16 << 20];
    let frame = field(
        2,
        &field(3, &field(1, &field(4, &field(2, &field(11, &body))))),
    );
    let heard = decoded(&frame).unwrap().expect("a whole frame");
    let tx: proto::Tx = prost::Message::decode(heard.commits[0].txs[0].clone()).unwrap();
    assert_eq!(tx.ops.len(), 1);
}

#[test]
fn a_full_frame_of_the_shortest_settlements_passes() {
    let ack = Op::Ack {
        lease: Lease {
            message: MessageId([1; 16]),
            epoch: 1,
            grant: 1,
        },
        cost_us: 0,
    };
    let mut stream = BytesMut::new();
    let txs = vec![Tx::from(vec![ack]); 36 << 10];
    encode_frame(&commit_frame(1, Durability::Disk, txs), &mut stream);
    assert!(
        stream.len() > 1 << 20,
        "clients end their frames before this"
    );
    let heard = hear::<ToBroker>(&stream, &[]).unwrap();
    assert_eq!(heard[0].commits[0].txs.len(), 36 << 10);
}

#[test]
fn a_transaction_that_is_not_protobuf_is_found_when_it_is_converted() {
    let no_operation = [0x08, 1];
    let cut_short = field(1, &field(4, &[0; 40]));
    let unknown = [field(9, b"later"), field(1, &[])].concat();
    let check = |tx: &[u8]| {
        let frame = decoded(&field(2, &field(3, tx))).unwrap().unwrap();
        convert::decode_txs(frame.commits[0].txs.clone())
    };
    for tx in [&no_operation[..], &cut_short[..20], &[0xff; 100]] {
        let refused = check(tx).unwrap_err();
        assert!(matches!(refused, WireError::NotProtobuf(_)), "{refused}");
    }
    // A field of a later version is skipped, as everywhere.
    assert_eq!(check(&unknown).unwrap()[0].ops.len(), 1);
    assert_eq!(check(&[]), Ok(vec![Tx::default()]));
}

#[test]
fn what_is_not_protobuf_is_said_to_be_so_however_long_it_is() {
    for byte in [0, 7, 0x0b, 0x0c, 0x80, 0xff] {
        let refused = decoded(&vec![byte; 1 << 20]).unwrap_err();
        assert!(
            matches!(refused, WireError::NotProtobuf(_)),
            "{byte}: {refused}"
        );
    }
}
