//! Implements a worker without processes: threads of one process each take the next job here. Tests of
//! applications run their jobs this way, in the process that enqueued them.
//!
//! Keeps track of waiting threads, of deliveries that the broker may still send, and of running jobs. The
//! caller owns the connection.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_driver::{DeliverySink, DriverError};
use penstock_jobs::{DeliveryHead, Outcome, settle};
use penstock_message::{Delivery, Lease, MessageId, Tx};

/// Jobs on their way from the driver's thread to the threads that take them, and jobs that were taken.
#[derive(Default)]
pub struct Desk {
    state: Mutex<DeskState>,
    changed: Condvar,
}

#[derive(Default)]
struct DeskState {
    arrived: VecDeque<Delivery>,
    /// Taken jobs that are not settled, with the time at which they were taken.
    running: HashMap<MessageId, (DeliveryHead, Instant)>,
    /// Number of deliveries that the broker may still send.
    credit: u32,
    /// Number of threads that wait for a job.
    takers: u32,
    stopped: bool,
    failed: Option<DriverError>,
}

/// Number of jobs for this desk, as the broker counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    pub ready: u64,
    pub leased: u64,
}

/// Outcome of one attempt to take a job.
#[derive(Debug)]
pub enum TakeOutcome {
    Job(Box<Delivery>),
    /// There is no job, and none will come.
    Nothing,
    NotYet,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, DeskState> {
        // No holder of the lock panics, and each change leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that another thread wants a job. Returns the credit to give the broker.
    pub fn begin_take(&self) -> u32 {
        let mut state = self.lock();
        state.takers += 1;
        let coming = state.credit + state.arrived.len() as u32;
        let add_credit = state.takers.saturating_sub(coming);
        state.credit += add_credit;
        add_credit
    }

    /// Notes that a thread has its job, or no longer wants one. Returns whether to withdraw the broker's credit
    /// because no thread waits for more.
    pub fn end_take(&self) -> bool {
        let mut state = self.lock();
        state.takers -= 1;
        let withdraw = state.takers == 0 && state.credit > 0;
        if withdraw {
            state.credit = 0;
        }
        withdraw
    }

    /// Whether all jobs have arrived: any job that the broker counts as leased and that is not here is still on
    /// its way.
    pub fn nothing_is_left(&self, left: Left) -> bool {
        let state = self.lock();
        left.ready == 0 && left.leased <= (state.running.len() + state.arrived.len()) as u64
    }

    /// Takes a job; waits this long for one, unless `none_will_come`.
    pub fn look(
        &self,
        patience: Duration,
        none_will_come: bool,
    ) -> Result<TakeOutcome, DriverError> {
        let is_quiet = |state: &mut DeskState| {
            let has_news = !state.arrived.is_empty() || state.failed.is_some() || state.stopped;
            !has_news && !none_will_come
        };
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), patience, is_quiet);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if state.stopped {
            return Ok(TakeOutcome::Nothing);
        }
        Ok(match state.arrived.pop_front() {
            Some(delivery) => {
                let head = DeliveryHead::from(&delivery);
                let now = Instant::now();
                state.running.insert(delivery.message.id, (head, now));
                TakeOutcome::Job(Box::new(delivery))
            }
            None if none_will_come => TakeOutcome::Nothing,
            None => TakeOutcome::NotYet,
        })
    }

    /// Returns the transaction that settles a taken job. `outcome` receives its run time in microseconds.
    /// `None`: no such job was taken, or it was settled.
    pub fn finish(&self, job: MessageId, outcome: impl FnOnce(u64) -> Outcome) -> Option<Tx> {
        let (head, taken_at) = self.lock().running.remove(&job)?;
        let cost_us = taken_at.elapsed().as_micros() as u64;
        Some(settle(&head, outcome(cost_us)))
    }

    /// Returns the lease of a job that was taken and not settled.
    pub fn lease(&self, job: MessageId) -> Option<Lease> {
        let state = self.lock();
        state.running.get(&job).map(|(head, _)| head.lease)
    }

    /// Ends every wait, now and later. Returns the transactions that hand back jobs that were not taken.
    pub fn stop(&self) -> Vec<Tx> {
        let mut state = self.lock();
        state.stopped = true;
        state.credit = 0;
        let give_back = |delivery| settle(&DeliveryHead::from(&delivery), Outcome::Returned);
        let given_back = state.arrived.drain(..).map(give_back).collect();
        drop(state);
        self.changed.notify_all();
        given_back
    }
}

impl DeliverySink for Desk {
    fn deliver(&self, deliveries: Vec<Delivery>) {
        let mut state = self.lock();
        state.credit = state.credit.saturating_sub(deliveries.len() as u32);
        state.arrived.extend(deliveries);
        self.changed.notify_all();
    }

    fn held_leases(&self) -> Vec<Lease> {
        let state = self.lock();
        let running = state.running.values().map(|(head, _)| head.lease);
        let arrived = state.arrived.iter().map(|delivery| delivery.lease);
        running.chain(arrived).collect()
    }

    fn leases_kept(&self, kept: &[Lease]) {
        // Running jobs continue; their outcomes are refused if their leases are lost.
        let is_kept = |delivery: &Delivery| kept.contains(&delivery.lease);
        self.lock().arrived.retain(is_kept);
    }

    fn failed(&self, error: DriverError) {
        self.lock().failed = Some(error);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use penstock_message::{Message, Op, ReleaseReason};

    use super::*;

    const AT_ONCE: Duration = Duration::ZERO;
    const PATIENCE: Duration = Duration::from_secs(30);

    fn job(number: u8) -> MessageId {
        MessageId([number; 16])
    }

    fn delivery(number: u8) -> Delivery {
        Delivery {
            consumer: 0,
            lease: Lease {
                message: job(number),
                epoch: 1,
                grant: number.into(),
            },
            queue: "default".into(),
            redelivered: false,
            message: Message {
                id: job(number),
                task: "work".into(),
                priority: 4,
                expires_at: None,
                result_ttl_ms: None,
                max_deliveries: 3,
                attempt: 0,
                crashes: 0,
                enqueued_at: 0,
                notes: Vec::new(),
                body: bytes::Bytes::new(),
                extras: None,
            },
            inputs: bytes::Bytes::new(),
            deadline: None,
        }
    }

    fn seen(desk: &Desk, none_will_come: bool) -> String {
        match desk.look(AT_ONCE, none_will_come).unwrap() {
            TakeOutcome::Job(delivery) => format!("job {}", delivery.message.id.0[0]),
            TakeOutcome::Nothing => "nothing".into(),
            TakeOutcome::NotYet => "not yet".into(),
        }
    }

    fn left(ready: u64, leased: u64) -> Left {
        Left { ready, leased }
    }

    #[test]
    fn the_broker_may_send_one_job_for_each_thread_that_waits() {
        let desk = Desk::default();
        assert_eq!((desk.begin_take(), desk.begin_take()), (1, 1));
        desk.deliver(vec![delivery(1)]);
        // With a third thread, one job is there, one may come, and one more is needed.
        assert_eq!(desk.begin_take(), 1);
        assert_eq!(seen(&desk, false), "job 1");
        assert!(!desk.end_take(), "two threads wait, and two may come");
        assert!(!desk.end_take());
        assert!(desk.end_take(), "nobody waits for those any more");
        assert!(!{
            desk.begin_take();
            desk.deliver(vec![delivery(2)]);
            seen(&desk, false);
            desk.end_take()
        });
        // A job that arrived while no thread wanted it is there for the next one.
        desk.deliver(vec![delivery(3)]);
        assert_eq!((desk.begin_take(), seen(&desk, false)), (0, "job 3".into()));
    }

    #[test]
    fn what_the_broker_has_leased_and_is_not_here_is_waited_for() {
        let desk = Desk::default();
        let check = |counted, expected| assert_eq!(desk.nothing_is_left(counted), expected);
        check(left(0, 0), true);
        check(left(1, 0), false);
        check(left(0, 1), false);
        desk.deliver(vec![delivery(1)]);
        check(left(0, 1), true);
        check(left(0, 2), false);
        seen(&desk, true);
        check(left(0, 1), true);
        // Jobs that are there go before the end.
        desk.deliver(vec![delivery(2)]);
        assert_eq!(seen(&desk, true), "job 2");
        assert_eq!(
            (seen(&desk, false), seen(&desk, true)),
            ("not yet".into(), "nothing".into())
        );
    }

    #[test]
    fn a_job_is_settled_once_with_its_own_lease() {
        let desk = Desk::default();
        desk.deliver(vec![delivery(1), delivery(2)]);
        seen(&desk, false);
        let succeeded = |cost_us| Outcome::Succeeded {
            value: None,
            cost_us,
        };
        assert_eq!(desk.finish(job(2), succeeded), None, "nobody has taken it");
        let tx = desk.finish(job(1), succeeded).unwrap();
        assert!(matches!(&tx.ops[..], [Op::Ack { lease, .. }] if *lease == delivery(1).lease));
        assert_eq!(desk.finish(job(1), succeeded), None);
        assert_eq!(desk.held_leases(), [delivery(2).lease]);
    }

    #[test]
    fn a_stop_ends_every_wait_and_gives_back_what_nobody_took() {
        let desk = Arc::new(Desk::default());
        let waits = std::thread::spawn({
            let desk = Arc::clone(&desk);
            move || desk.look(PATIENCE, false).unwrap()
        });
        assert!(desk.stop().is_empty());
        assert!(matches!(waits.join().unwrap(), TakeOutcome::Nothing));
        desk.deliver(vec![delivery(1)]);
        assert_eq!(seen(&desk, false), "nothing");
        let given_back = desk.stop();
        let reason = ReleaseReason::Returned;
        let lease = delivery(1).lease;
        assert_eq!(given_back, [Tx::from(vec![Op::Release { lease, reason }])]);
    }

    #[test]
    fn a_driver_that_can_not_go_on_is_told_to_all_that_wait() {
        let desk = Desk::default();
        desk.failed(DriverError::closed());
        assert_eq!(
            desk.look(PATIENCE, false).unwrap_err(),
            DriverError::closed()
        );
    }

    #[test]
    fn a_job_whose_lease_is_lost_before_anybody_took_it_is_dropped() {
        let desk = Desk::default();
        desk.deliver(vec![delivery(1), delivery(2)]);
        desk.leases_kept(&[delivery(2).lease]);
        assert_eq!(
            (seen(&desk, true), seen(&desk, true)),
            ("job 2".into(), "nothing".into())
        );
    }
}
