//! What the driver's thread leaves for the supervisor's.

use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mio::Waker;
use penstock_driver::{DeliverySink, DriverError};
use penstock_message::{Answer, Delivery, Lease, Receipt, Refusal};
use rustc_hash::FxHashSet;

/// What has come since the supervisor looked last.
#[derive(Default)]
pub struct News {
    pub deliveries: Vec<Delivery>,
    /// Leases that did not outlast a reconnect.
    pub lost: Vec<Lease>,
    /// Settlements that the broker refused for a reason of their own: the jobs are still leased.
    pub refused: Vec<(Lease, String)>,
    pub answers: Vec<Result<Answer, DriverError>>,
    /// The driver can't go on.
    pub failed: Option<DriverError>,
}

/// Deliveries come in on the driver's thread; receipts too. The supervisor takes both in batches.
pub struct Inbox {
    news: Mutex<News>,
    waker: Waker,
    woken: AtomicBool,
    /// The leases that this worker answers for: from their delivery until their settlement is
    /// confirmed. A settlement that was sent and not confirmed would otherwise be lost with the
    /// connection: its lease would not be presented, and the job run again.
    held: Mutex<FxHashSet<Lease>>,
    unconfirmed: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these, and each change leaves them whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inbox {
    pub fn new(waker: Waker) -> Self {
        Self {
            news: Mutex::default(),
            waker,
            woken: AtomicBool::new(false),
            held: Mutex::default(),
            unconfirmed: AtomicUsize::new(0),
        }
    }

    fn tell(&self, add: impl FnOnce(&mut News)) {
        add(&mut lock(&self.news));
        self.wake();
    }

    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel)
            && let Err(error) = self.waker.wake()
        {
            tracing::error!(%error, "the worker's loop cannot be woken");
        }
    }

    /// What is new. Whatever comes after this call wakes the supervisor again.
    pub fn take(&self) -> News {
        self.woken.store(false, Ordering::Release);
        take(&mut lock(&self.news))
    }

    pub fn answered(&self, answer: Result<Answer, DriverError>) {
        self.tell(|news| news.answers.push(answer));
    }

    /// So many settlements go to the driver; it answers with [`Inbox::confirmed`].
    pub fn committing(&self, settlements: usize) {
        self.unconfirmed.fetch_add(settlements, Ordering::AcqRel);
    }

    pub fn unconfirmed(&self) -> usize {
        self.unconfirmed.load(Ordering::Acquire)
    }

    /// The settlements of these leases, in this order, ended so.
    pub fn confirmed(&self, leases: &[Lease], receipts: Result<Vec<Receipt>, DriverError>) {
        let mut refused = Vec::new();
        let mut failed = None;
        match receipts {
            Ok(receipts) => {
                let mut held = lock(&self.held);
                for (lease, receipt) in leases.iter().zip(receipts) {
                    if let Receipt::Refused { why, .. } = &receipt
                        && *why != Refusal::LeaseLost
                    {
                        refused.push((*lease, refusal_text(why)));
                        continue;
                    }
                    held.remove(lease);
                    report_receipt(*lease, &receipt);
                }
            }
            Err(error) => failed = Some(error),
        }
        let left = self.unconfirmed.fetch_sub(leases.len(), Ordering::AcqRel) - leases.len();
        if failed.is_some() || !refused.is_empty() {
            self.tell(|news| {
                news.refused.append(&mut refused);
                news.failed = failed.or(news.failed.take());
            });
        } else if left == 0 {
            // Who waits for the last confirm is woken.
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
            "the broker has forgotten this worker's session: whether the job's outcome was stored is not known"
        ),
    }
}

fn refusal_text(why: &Refusal) -> String {
    match why {
        Refusal::TooLarge(text) | Refusal::QueueFull(text) | Refusal::Invalid(text) => text.clone(),
        Refusal::LeaseLost => "its lease was lost".to_owned(),
        Refusal::GuardFailed => "a guard did not hold".to_owned(),
        Refusal::AlreadyExists => "a message with its id is held already".to_owned(),
        Refusal::DiskFull => "the broker's disk is full".to_owned(),
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

    fn held_leases(&self) -> Vec<Lease> {
        lock(&self.held).iter().copied().collect()
    }

    fn leases_kept(&self, kept: &[Lease]) {
        let kept: FxHashSet<Lease> = kept.iter().copied().collect();
        let mut lost = Vec::new();
        lock(&self.held).retain(|lease| {
            let keep = kept.contains(lease);
            if !keep {
                lost.push(*lease);
            }
            keep
        });
        if !lost.is_empty() {
            self.tell(|news| news.lost.append(&mut lost));
        }
    }
}
