//! Driver that claims everything its broker can do, and breaks one promise.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use penstock_conformance::Ability;
use penstock_driver::{DeliverySink, Done, Driver, DriverError, LeadToken, ValueSink, WatchId};
use penstock_message::{
    Answer, Applied, Ask, CancelOrder, Capabilities, Conflict, Consume, DEFAULT_PRIORITY, Delivery,
    Due, Durability, Feature, HeaderPatch, Key, KeyState, Lease, MessageState, NoReply, Notice,
    OnRunning, Op, Progress, Query, Receipt, Refusal, ReleaseReason, Target, TaskSelection, Tx,
    Value, ValueStatus, WorkerReport,
};

use crate::support::*;

/// Time that a kill waits for a commit that it can interrupt.
const IN_FLIGHT_WITHIN: Duration = Duration::from_secs(1);

pub struct Liar {
    place: BrokerPlace,
    lie: Feature,
    patience: Duration,
    books: Arc<LieBooks>,
}

/// State that a lie needs.
#[derive(Default)]
struct LieBooks {
    engine: Mutex<KilledEngine>,
    committing: Condvar,
    /// Undoes confirmed operations that must be forgotten.
    forget: Mutex<Vec<Op>>,
}

#[derive(Default)]
struct KilledEngine {
    kills: u32,
    /// Number of unanswered commits.
    in_flight: u32,
}

impl LieBooks {
    /// Notes a commit; returns the number of kills of the engine.
    fn begin(&self) -> u32 {
        let mut engine = self.engine.lock().unwrap();
        engine.in_flight += 1;
        self.committing.notify_all();
        engine.kills
    }

    /// Notes an answer; returns the number of kills of the engine so far.
    fn end(&self) -> u32 {
        let mut engine = self.engine.lock().unwrap();
        engine.in_flight -= 1;
        engine.kills
    }
}

impl Liar {
    pub fn about(lie: Feature, patience: Duration) -> Self {
        let needs_kills = matches!(
            lie,
            Feature::DiskDurability
                | Feature::OsDurability
                | Feature::LeasesOfSessions
                | Feature::Dedupe
                | Feature::SteadyClock
        );
        Self {
            place: match needs_kills {
                true => BrokerPlace::unix(),
                false => BrokerPlace::memory(),
            },
            lie,
            patience,
            books: Arc::default(),
        }
    }
}

impl penstock_conformance::TestEngine for Liar {
    fn capabilities(&self) -> Capabilities {
        penstock_conformance::TestEngine::capabilities(&self.place)
    }

    fn driver(&self) -> Arc<dyn Driver> {
        Arc::new(Lying {
            inner: self.place.client().driver,
            lie: self.lie,
            books: Arc::clone(&self.books),
        })
    }

    fn can(&self, ability: Ability) -> bool {
        self.place.can(ability)
    }

    fn kill(&self) {
        let mut engine = self.books.engine.lock().unwrap();
        if self.lie == Feature::Dedupe {
            // A lie needs a commit on its way; between two commits there is none.
            let (at_work, _) = self
                .books
                .committing
                .wait_timeout_while(engine, IN_FLIGHT_WITHIN, |engine| engine.in_flight == 0)
                .unwrap();
            engine = at_work;
        }
        engine.kills += 1;
        drop(engine);
        self.place.kill();
        let forget = std::mem::take(&mut *self.books.forget.lock().unwrap());
        for op in forget {
            self.place.client().commit(vec![op]);
        }
    }

    fn set_wall_clock(&self, ahead: Duration) {
        self.place.set_wall_clock(ahead);
    }

    fn patience(&self) -> Duration {
        self.patience
    }
}

struct Lying {
    inner: Arc<dyn Driver>,
    lie: Feature,
    books: Arc<LieBooks>,
}

impl Lying {
    /// Returns the operations that replace an operation: none, one or several.
    fn twist(&self, op: Op) -> Vec<Op> {
        match (self.lie, op) {
            (
                Feature::Delays,
                Op::Publish {
                    queues,
                    message,
                    unless_key,
                    ..
                },
            ) => vec![Op::Publish {
                queues,
                message,
                due: None,
                unless_key,
            }],
            (
                Feature::SteadyClock,
                Op::Publish {
                    queues,
                    message,
                    // A short time would be over, by this clock, before a busy broker receives it.
                    due: Some(Due::AfterMs(after_ms @ 60_000..)),
                    unless_key,
                },
            ) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                let due = Some(Due::At(now.as_millis() as u64 + after_ms));
                vec![Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key,
                }]
            }
            (
                lie @ (Feature::Keys | Feature::Claims),
                Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key: Some(claim),
                },
            ) => {
                let is_named = matches!(claim.key, Key::Named(_));
                let heeds = is_named != (lie == Feature::Keys);
                vec![Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key: heeds.then_some(claim),
                }]
            }
            (
                Feature::Debounce,
                Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key: Some(mut claim),
                },
            ) if matches!(claim.conflict, Conflict::Replace { .. }) => {
                claim.conflict = Conflict::Replace { max_wait_ms: None };
                vec![Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key: Some(claim),
                }]
            }
            (
                Feature::Priorities,
                Op::Publish {
                    queues,
                    mut message,
                    due,
                    unless_key,
                },
            ) => {
                message.priority = DEFAULT_PRIORITY;
                vec![Op::Publish {
                    queues,
                    message,
                    due,
                    unless_key,
                }]
            }
            (
                Feature::KeepsPlace,
                Op::Release {
                    lease,
                    reason: ReleaseReason::Returned,
                },
            ) => vec![Op::Move {
                lease,
                queue: None,
                due: None,
                patch: HeaderPatch::default(),
                cost_us: 0,
            }],
            (Feature::FairFlows, Op::Ack { lease, .. }) => vec![Op::Ack { lease, cost_us: 0 }],
            (Feature::Joins, Op::Hold(hold)) => {
                let messages = hold.messages.into_iter();
                messages.map(|(_, message)| publish(message)).collect()
            }
            (
                Feature::FailedJobs,
                Op::Fail {
                    lease,
                    value: body,
                    cost_us,
                    ..
                },
            ) => vec![
                Op::Ack { lease, cost_us },
                Op::Put {
                    key: Key::Result(lease.message),
                    value: Value::new(ValueStatus::Failed, body.unwrap_or_default()),
                    ttl_ms: Some(60_000),
                    group: "task".into(),
                },
            ],
            (
                Feature::Values,
                Op::Put {
                    key: Key::Result(_),
                    ..
                },
            )
            | (Feature::Joins, Op::Join { .. })
            | (Feature::Purge, Op::Purge { .. })
            | (Feature::Pause, Op::Pause { .. })
            | (Feature::Limits, Op::Limit { .. })
            | (Feature::Workflows, Op::Open(_))
            | (Feature::Schedules, Op::Schedule { .. })
            | (Feature::CancelWaiting, Op::Cancel { .. }) => Vec::new(),
            (Feature::CancelRunning, Op::Cancel { running, .. }) if running != OnRunning::Leave => {
                Vec::new()
            }
            (_, op) => vec![op],
        }
    }

    fn remember(&self, tx: &Tx) {
        let mut forget = self.books.forget.lock().unwrap();
        forget.extend(tx.ops.iter().filter_map(|op| match op {
            Op::Publish { message, .. } => Some(Op::Cancel {
                target: Target::Job(message.id),
                reason: "forgotten".into(),
                running: OnRunning::Leave,
            }),
            Op::Put { key, .. } => Some(Op::Delete { key: key.clone() }),
            _ => None,
        }));
    }

    /// Returns the answer that replaces an answer. Some lies take another commit.
    fn answer(&self, txs: Vec<Tx>, done: Done<Vec<Receipt>>) -> Done<Vec<Receipt>> {
        let (lie, inner) = (self.lie, Arc::clone(&self.inner));
        let books = Arc::clone(&self.books);
        let kills = books.begin();
        Box::new(move |ended| {
            let was_killed = kills < books.end();
            let mut receipts = match ended {
                Ok(receipts) => receipts,
                Err(error) => return done(Err(error)),
            };
            let mut second = None;
            for (tx, receipt) in txs.into_iter().zip(&mut receipts) {
                match (lie, &receipt) {
                    (Feature::OneStepSettlement, Receipt::Refused { op: 1.., .. }) => {
                        let Receipt::Refused { op, .. } = *receipt else {
                            unreachable!()
                        };
                        let mut ops = tx.ops;
                        ops.truncate(op as usize);
                        second = Some((ops, receipt.clone()));
                    }
                    (
                        Feature::Fencing,
                        Receipt::Refused {
                            why: Refusal::LeaseLost,
                            ..
                        },
                    ) => {
                        let mut ops = tx.ops;
                        ops.retain(|op| !op.is_settlement());
                        second = Some((ops, applied()));
                    }
                    _ if lie == Feature::Dedupe && was_killed => {
                        // Pretends that the engine does not know that it had this already.
                        let deadline = Some(Instant::now() + PATIENCE);
                        return inner.commit(vec![tx], Durability::Os, deadline, done);
                    }
                    _ => {}
                }
            }
            match second {
                Some((ops, receipt)) => {
                    let deadline = Some(Instant::now() + PATIENCE);
                    let done: Done<Vec<Receipt>> = Box::new(move |_| done(Ok(vec![receipt])));
                    inner.commit(vec![Tx { ops }], Durability::None, deadline, done);
                }
                None => done(Ok(receipts)),
            }
        })
    }

    fn twisted(&self, txs: Vec<Tx>) -> Vec<Tx> {
        let twist = |tx: Tx| Tx {
            ops: tx.ops.into_iter().flat_map(|op| self.twist(op)).collect(),
        };
        txs.into_iter().map(twist).collect()
    }
}

impl Driver for Lying {
    fn upper_bound(&self) -> &'static Capabilities {
        self.inner.upper_bound()
    }

    fn probe(&self, deadline: Instant, done: Done<Arc<Capabilities>>) {
        self.inner.probe(deadline, done);
    }

    fn commit(
        &self,
        txs: Vec<Tx>,
        durability: Durability,
        deadline: Option<Instant>,
        done: Done<Vec<Receipt>>,
    ) {
        if self.lie == Feature::of_durability(durability) {
            txs.iter().for_each(|tx| self.remember(tx));
        }
        let had = txs.iter().map(|tx| tx.ops.len()).sum::<usize>();
        let txs = self.twisted(txs);
        if had > 0 && txs.iter().all(|tx| tx.ops.is_empty()) {
            // Claims to have cancelled a waiting job, or to have asked a running one to stop.
            let found = match self.lie {
                Feature::CancelWaiting => Some(MessageState::Ready),
                Feature::CancelRunning => Some(MessageState::Cancelling),
                _ => None,
            };
            let receipt = Receipt::Applied(Applied {
                found,
                ..Applied::default()
            });
            return done(Ok(vec![receipt; txs.len()]));
        }
        let done = self.answer(txs.clone(), done);
        self.inner.commit(txs, durability, deadline, done);
    }

    fn settle(&self, txs: Vec<Tx>, deadline: Option<Instant>, done: Done<Vec<Receipt>>) {
        let txs = self.twisted(txs);
        let done = self.answer(txs.clone(), done);
        self.inner.settle(txs, deadline, done);
    }

    fn consume(&self, mut consume: Consume, sink: Arc<dyn DeliverySink>) {
        if self.lie == Feature::TasksOfConsumers {
            consume.tasks = TaskSelection::Any;
        }
        let lie = self.lie;
        self.inner
            .consume(consume, Arc::new(LyingSink { sink, lie }));
    }

    fn stop_consuming(&self) {
        self.inner.stop_consuming();
    }

    fn stop_consumer(&self, consumer: u32) {
        self.inner.stop_consumer(consumer);
    }

    fn watch(
        &self,
        keys: Vec<Key>,
        deadline: Option<Instant>,
        sink: Arc<dyn ValueSink>,
    ) -> WatchId {
        let lie = self.lie;
        self.inner
            .watch(keys, deadline, Arc::new(LyingValues { sink, lie }))
    }

    fn peek(&self, keys: Vec<Key>, deadline: Option<Instant>, sink: Arc<dyn ValueSink>) -> WatchId {
        let lie = self.lie;
        self.inner
            .peek(keys, deadline, Arc::new(LyingValues { sink, lie }))
    }

    fn unwatch(&self, watch: WatchId) {
        self.inner.unwatch(watch);
    }

    fn query(&self, query: Query, deadline: Instant, done: Done<Answer>) {
        match (self.lie, &query) {
            (Feature::Inspection, Query::Message(_)) => done(Ok(Answer::Message(None))),
            (Feature::MovableClock, Query::SetClock { .. }) => done(Ok(Answer::Clock(1))),
            (Feature::Asks, Query::Ask(_)) => done(Ok(Answer::Asked(Err(NoReply::Silent)))),
            _ => self.inner.query(query, deadline, done),
        }
    }

    fn report(&self, report: WorkerReport) {
        self.inner.report(report);
    }

    fn progress(&self, progress: Progress) {
        if self.lie != Feature::Progress {
            self.inner.progress(progress);
        }
    }

    fn reply(&self, ask: u64, reply: Bytes) {
        self.inner.reply(ask, reply);
    }

    fn take_notices(&self) -> Vec<Notice> {
        self.inner.take_notices()
    }

    fn take_lead(&self) -> Option<LeadToken> {
        self.inner.take_lead()
    }

    fn lead(&self, lead: LeadToken, until: Instant, over: &dyn Fn() -> bool) {
        self.inner.lead(lead, until, over);
    }

    fn leave_lead(&self, lead: LeadToken) {
        self.inner.leave_lead(lead);
    }

    fn trouble(&self) -> Option<String> {
        self.inner.trouble()
    }

    fn abandon(&self) {
        self.inner.abandon();
    }

    fn close(&self, deadline: Instant) {
        self.inner.close(deadline);
    }
}

struct LyingSink {
    sink: Arc<dyn DeliverySink>,
    lie: Feature,
}

impl DeliverySink for LyingSink {
    fn deliver(&self, deliveries: Vec<Delivery>) {
        self.sink.deliver(deliveries);
    }

    fn cancel(&self, orders: Vec<CancelOrder>) {
        self.sink.cancel(orders);
    }

    fn asked(&self, asks: Vec<Ask>) {
        self.sink.asked(asks);
    }

    fn held_leases(&self) -> Vec<Lease> {
        match self.lie {
            Feature::LeasesOfSessions => Vec::new(),
            _ => self.sink.held_leases(),
        }
    }

    fn out_of_reach(&self) {
        self.sink.out_of_reach();
    }

    fn leases_kept(&self, kept: &[Lease]) {
        self.sink.leases_kept(kept);
    }

    fn failed(&self, error: DriverError) {
        self.sink.failed(error);
    }
}

struct LyingValues {
    sink: Arc<dyn ValueSink>,
    lie: Feature,
}

impl ValueSink for LyingValues {
    fn value(&self, key: Key, state: KeyState) {
        match (self.lie, &state) {
            (Feature::Pending, KeyState::Gone) => self.sink.pending(key),
            _ => self.sink.value(key, state),
        }
    }

    fn pending(&self, key: Key) {
        self.sink.pending(key);
    }

    fn reachable(&self, reachable: bool) {
        self.sink.reachable(reachable);
    }

    fn failed(&self, error: DriverError) {
        self.sink.failed(error);
    }

    fn timed_out(&self, trouble: Option<String>) {
        self.sink.timed_out(trouble);
    }
}
