//! Passes news from the driver's thread to the supervisor's.

use std::collections::HashSet;
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_driver::{DeliverySink, DriverError};
use penstock_faults::planted;
use penstock_message::{
    Answer, Ask, CancelOrder, Delivery, Lease, Receipt, Refusal, SeededSet, SeededState,
};

/// Room for this many leases is kept while fewer are held.
const KEPT_LEASES: usize = 4096;

/// Everything that arrived since the supervisor last looked.
#[derive(Default)]
pub struct News {
    pub deliveries: Vec<Delivery>,
    /// Jobs to stop.
    pub cancels: Vec<CancelOrder>,
    /// Leases that did not survive a reconnect.
    pub lost: Vec<Lease>,
    /// Settlements that the broker refused for other reasons, or whose outcome it no longer knows. Their jobs
    /// are, or may be, still leased.
    pub refused: Vec<(Lease, String)>,
    pub answers: Vec<Result<Answer, DriverError>>,
    /// Questions to this worker.
    pub asks: Vec<Ask>,
    /// The broker became unreachable (false), or came back and reported which leases hold (true).
    pub in_reach: Option<bool>,
    /// Error after which the driver can't continue.
    pub failed: Option<DriverError>,
}

/// Receives deliveries and receipts on the driver's thread. The supervisor takes both in batches.
pub struct Inbox {
    news: Mutex<News>,
    wake: Box<dyn Fn() + Send + Sync>,
    woken: AtomicBool,
    /// Leases that this worker is responsible for, from their delivery until their settlement is confirmed.
    /// Without this, a sent but unconfirmed settlement would be lost with the connection: its lease would not
    /// be presented, and the job would run again.
    held: Mutex<SeededSet<Lease>>,
    unconfirmed: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of these locks panics, and each change leaves the state consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inbox {
    /// Creates the inbox. `wake` is called when there is something new, once until it is taken. `hashing` is
    /// for leases, since clients choose the ids of messages.
    pub fn new(hashing: SeededState, wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            news: Mutex::default(),
            wake: Box::new(wake),
            woken: AtomicBool::new(false),
            held: Mutex::new(SeededSet::with_hasher(hashing)),
            unconfirmed: AtomicUsize::new(0),
        }
    }

    fn tell(&self, add: impl FnOnce(&mut News)) {
        add(&mut lock(&self.news));
        self.wake();
    }

    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            (self.wake)();
        }
    }

    /// Runs something in the supervisor's thread that brings news, which the supervisor takes afterwards.
    pub fn without_waking<R>(&self, run: impl FnOnce() -> R) -> R {
        self.woken.store(true, Ordering::Release);
        run()
    }

    /// Takes everything new. Anything that arrives after this call wakes the supervisor again.
    pub fn take(&self) -> News {
        self.woken.store(false, Ordering::Release);
        take(&mut lock(&self.news))
    }

    pub fn answered(&self, answer: Result<Answer, DriverError>) {
        self.tell(|news| news.answers.push(answer));
    }

    /// Counts settlements that go to the driver, which answers with [`Inbox::confirmed`].
    pub fn committing(&self, settlements: usize) {
        self.unconfirmed.fetch_add(settlements, Ordering::AcqRel);
    }

    pub fn unconfirmed(&self) -> usize {
        self.unconfirmed.load(Ordering::Acquire)
    }

    /// Handles the outcomes of the settlements of these leases, in this order.
    pub fn confirmed(&self, leases: &[Lease], receipts: Result<Vec<Receipt>, DriverError>) {
        let mut refused = Vec::new();
        let mut failed = None;
        match receipts {
            Ok(receipts) => {
                let mut held = lock(&self.held);
                for (lease, receipt) in leases.iter().zip(receipts) {
                    match &receipt {
                        Receipt::Refused { why, .. } if *why != Refusal::LeaseLost => {
                            refused.push((*lease, refusal_text(why)));
                        }
                        // If its lease holds, the settlement was not stored, and nothing else would end the
                        // job.
                        Receipt::Unknown if held.contains(lease) => {
                            let why = "it has forgotten this worker's session".to_owned();
                            refused.push((*lease, why));
                        }
                        _ => {
                            held.remove(lease);
                            report_receipt(*lease, &receipt);
                        }
                    }
                }
            }
            Err(error) => failed = Some(error),
        }
        let left = self.unconfirmed.fetch_sub(leases.len(), Ordering::AcqRel) - leases.len();
        if left == 0 {
            // The table has grown while the broker confirmed slowly, to 33 bytes for each lease of that time.
            let mut held = lock(&self.held);
            if held.capacity() > KEPT_LEASES && held.len() < held.capacity() / 8 {
                held.shrink_to(KEPT_LEASES);
            }
        }
        if failed.is_some() || !refused.is_empty() {
            self.tell(|news| {
                news.refused.append(&mut refused);
                news.failed = failed.or(news.failed.take());
            });
        } else if left == 0 {
            // Wakes the supervisor, which waits for the last confirm.
            self.wake();
        }
    }
}

fn report_receipt(lease: Lease, receipt: &Receipt) {
    let job = lease.message;
    match receipt {
        Receipt::Applied { .. } | Receipt::Duplicate => {}
        Receipt::Refused { .. } => tracing::warn!(
            %job,
            "the lease of this job was lost while it ran, so its outcome was fenced off: another worker may run it again"
        ),
        Receipt::Unknown => tracing::warn!(
            %job,
            "the broker has forgotten this worker's session: it is unknown whether the job's outcome was stored"
        ),
    }
}

/// Names the broker's reason for the refusal, for the log.
pub(crate) fn refusal_text(why: &Refusal) -> String {
    match why {
        Refusal::TooLarge(text)
        | Refusal::QueueFull(text)
        | Refusal::Invalid(text)
        | Refusal::NotOffered(text) => text.clone(),
        Refusal::LeaseLost => "its lease was lost".to_owned(),
        Refusal::GuardFailed => "a guard did not hold".to_owned(),
        Refusal::AlreadyExists => "a message with its id is held already".to_owned(),
        Refusal::DiskFull => "the broker's disk is full".to_owned(),
        Refusal::NoSuchJob => "no such job is held".to_owned(),
        Refusal::TooLate(state) => format!("the job is already {state:?}"),
        Refusal::Claimed(owner) => format!("its key belongs to job {owner}"),
    }
}

impl DeliverySink for Inbox {
    fn deliver(&self, mut deliveries: Vec<Delivery>) {
        lock(&self.held).extend(deliveries.iter().map(|delivery| delivery.lease));
        self.tell(|news| {
            if news.deliveries.is_empty() {
                news.deliveries = deliveries;
            } else {
                news.deliveries.append(&mut deliveries);
            }
        });
    }

    fn cancel(&self, mut orders: Vec<CancelOrder>) {
        let held = lock(&self.held);
        // A lease that was settled in the meantime is over.
        orders.retain(|order| held.contains(&order.lease) || planted!("order-for-a-settled-job"));
        drop(held);
        if !orders.is_empty() {
            self.tell(|news| news.cancels.append(&mut orders));
        }
    }

    fn asked(&self, mut asks: Vec<Ask>) {
        self.tell(|news| news.asks.append(&mut asks));
    }

    fn failed(&self, error: DriverError) {
        self.tell(|news| news.failed = Some(error));
    }

    fn held_leases(&self) -> Vec<Lease> {
        lock(&self.held).iter().copied().collect()
    }

    fn out_of_reach(&self) {
        self.tell(|news| news.in_reach = Some(false));
    }

    fn leases_kept(&self, kept: &[Lease]) {
        let kept: HashSet<Lease> = kept.iter().copied().collect();
        let mut lost = Vec::new();
        lock(&self.held).retain(|lease| {
            let keep = kept.contains(lease);
            if !keep {
                lost.push(*lease);
            }
            keep
        });
        self.tell(|news| {
            // A job to be returned has been settled, or another worker has it.
            let gone = news
                .refused
                .extract_if(.., |(lease, _)| !kept.contains(lease));
            for (lease, _) in gone {
                lost.retain(|other| *other != lease);
                report_receipt(lease, &Receipt::Unknown);
            }
            news.lost.append(&mut lost);
            news.in_reach = Some(true);
        });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use penstock_message::{Message, MessageId};

    use super::*;

    struct InboxBench {
        wakes: Arc<AtomicUsize>,
        inbox: Inbox,
    }

    impl InboxBench {
        fn new() -> Self {
            let wakes = Arc::new(AtomicUsize::new(0));
            let counter = Arc::clone(&wakes);
            let inbox = Inbox::new(SeededState::default(), move || {
                counter.fetch_add(1, Ordering::Relaxed);
            });
            Self { wakes, inbox }
        }

        fn was_woken(&mut self) -> bool {
            self.wakes.swap(0, Ordering::Relaxed) > 0
        }

        fn held(&self) -> Vec<u64> {
            let mut held: Vec<u64> = self
                .inbox
                .held_leases()
                .iter()
                .map(|lease| lease.grant)
                .collect();
            held.sort();
            held
        }
    }

    fn lease(number: u64) -> Lease {
        Lease {
            message: MessageId([number as u8; 16]),
            epoch: 1,
            grant: number,
        }
    }

    fn delivery(number: u64) -> Delivery {
        Delivery {
            consumer: 0,
            lease: lease(number),
            queue: "default".into(),
            redelivered: false,
            message: Message {
                id: lease(number).message,
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

    fn refused(why: Refusal) -> Receipt {
        Receipt::Refused { op: 0, why }
    }

    #[test]
    fn the_supervisor_is_woken_once_for_all_that_comes_before_it_looks() {
        let mut desk = InboxBench::new();
        desk.inbox.deliver(vec![delivery(1)]);
        assert!(desk.was_woken());
        desk.inbox.deliver(vec![delivery(2), delivery(3)]);
        assert!(!desk.was_woken(), "it has not looked yet");
        assert_eq!(desk.inbox.take().deliveries.len(), 3);
        desk.inbox.deliver(vec![delivery(4)]);
        assert!(desk.was_woken());
    }

    #[test]
    fn a_lease_is_held_until_its_settlement_is_confirmed() {
        let mut desk = InboxBench::new();
        desk.inbox.deliver(vec![delivery(1), delivery(2)]);
        desk.inbox.take();
        desk.inbox.committing(1);
        assert_eq!((desk.held(), desk.inbox.unconfirmed()), (vec![1, 2], 1));
        desk.was_woken();
        desk.inbox
            .confirmed(&[lease(1)], Ok(vec![Receipt::applied()]));
        assert_eq!((desk.held(), desk.inbox.unconfirmed()), (vec![2], 0));
        assert!(desk.was_woken(), "somebody may wait for the last one");
    }

    #[test]
    pub(crate) fn an_order_to_stop_a_job_is_for_the_one_that_holds_it() {
        let mut desk = InboxBench::new();
        let order = |number| CancelOrder {
            lease: lease(number),
            reason: "why".to_owned(),
            kill: false,
        };
        desk.inbox.deliver(vec![delivery(1)]);
        desk.inbox.take();
        desk.was_woken();
        desk.inbox.cancel(vec![order(2)]);
        assert!(!desk.was_woken(), "it is another's");
        desk.inbox.cancel(vec![order(1), order(2)]);
        assert!(desk.was_woken());
        assert_eq!(desk.inbox.take().cancels, [order(1)]);
    }

    #[test]
    fn what_did_not_outlast_a_reconnect_is_told_and_no_longer_held() {
        let desk = InboxBench::new();
        desk.inbox
            .deliver(vec![delivery(1), delivery(2), delivery(3)]);
        desk.inbox.leases_kept(&[lease(2)]);
        assert_eq!(desk.held(), [2]);
        assert_eq!(desk.inbox.take().lost.len(), 2);
        desk.inbox.leases_kept(&[lease(2)]);
        assert_eq!(desk.inbox.take().lost, []);
    }

    #[test]
    fn the_supervisor_hears_that_the_broker_is_away_until_it_knows_its_leases() {
        let mut desk = InboxBench::new();
        desk.inbox.out_of_reach();
        assert!(desk.was_woken());
        assert_eq!(desk.inbox.take().in_reach, Some(false));
        desk.inbox.leases_kept(&[]);
        assert!(desk.was_woken());
        assert_eq!(desk.inbox.take().in_reach, Some(true));
        assert_eq!(desk.inbox.take().in_reach, None);
    }

    #[test]
    fn a_fenced_off_outcome_is_over_and_one_refused_for_itself_is_not() {
        let desk = InboxBench::new();
        desk.inbox
            .deliver(vec![delivery(1), delivery(2), delivery(3)]);
        desk.inbox.committing(3);
        let too_large = Refusal::TooLarge("a value may take 16 MiB".into());
        desk.inbox.confirmed(
            &[lease(1), lease(2), lease(3)],
            Ok(vec![
                refused(Refusal::LeaseLost),
                refused(too_large),
                Receipt::applied(),
            ]),
        );
        assert_eq!(desk.held(), [2]);
        let news = desk.inbox.take();
        assert_eq!(
            news.refused,
            [(lease(2), "a value may take 16 MiB".to_owned())]
        );
        assert!(news.failed.is_none());
    }

    #[test]
    fn a_job_whose_lease_outlasts_its_forgotten_settlement_is_handed_back() {
        let desk = InboxBench::new();
        let (one, other) = (lease(1), lease(2));
        desk.inbox.deliver(vec![delivery(1), delivery(2)]);
        desk.inbox.committing(2);
        let unknown = vec![Receipt::Unknown, Receipt::Unknown];
        desk.inbox.confirmed(&[one, other], Ok(unknown));
        // The other settlement was stored, or its lease has ended.
        desk.inbox.leases_kept(&[one]);
        let news = desk.inbox.take();
        assert_eq!(news.refused.len(), 1);
        assert_eq!((news.refused[0].0, news.lost), (one, vec![]));
        assert_eq!(desk.held(), [1]);

        // A settlement that was sent with later ones is answered with them.
        desk.inbox.deliver(vec![delivery(3), delivery(4)]);
        desk.inbox.committing(2);
        desk.inbox.leases_kept(&[one, lease(3)]);
        let answers = vec![Receipt::Unknown, Receipt::Unknown];
        desk.inbox.confirmed(&[lease(3), lease(4)], Ok(answers));
        let news = desk.inbox.take();
        assert_eq!(news.refused.len(), 1);
        assert_eq!((news.refused[0].0, news.lost), (lease(3), vec![lease(4)]));
        assert_eq!(desk.held(), [1, 3]);
    }

    #[test]
    fn a_driver_that_can_not_go_on_is_told() {
        let mut desk = InboxBench::new();
        desk.inbox.committing(1);
        desk.inbox
            .confirmed(&[lease(1)], Err(DriverError::closed()));
        assert!(desk.was_woken());
        assert_eq!(desk.inbox.take().failed, Some(DriverError::closed()));
        assert_eq!(desk.inbox.unconfirmed(), 0);
    }

    #[test]
    fn leases_are_hashed_with_the_seed_of_the_worker() {
        let inbox = Inbox::new(SeededState::new(7), || ());
        assert_eq!(*lock(&inbox.held).hasher(), SeededState::new(7));
    }
}
