//! Gathers the values of keys as a driver reports them, in any order.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use penstock_driver::{Driver, DriverError, ValueSink, WatchId};
use penstock_message::{Key, KeyState, MessageId, RefusedWait};

use crate::errors::ClientError;
use crate::port::{CallEnd, CallInbox};

type Finish = Box<dyn FnOnce(Result<Vec<KeyState>, ClientError>) + Send>;

/// Calls back once: with the states of all jobs in order, or with the first error.
pub(crate) struct Gather {
    state: Mutex<GatherState>,
}

struct GatherState {
    /// Callback, taken when the wait is over. Later reports are dropped.
    finish: Option<Finish>,
    states: Vec<KeyState>,
    untold: usize,
    /// Indices of each job in `states`. A job that was named twice has two.
    places: HashMap<MessageId, Vec<usize>>,
    ends_at_pending: bool,
    /// Job inside which the caller waits.
    waiter: Option<MessageId>,
    /// Whether the broker has reported a key and is reachable as far as known.
    is_reachable: bool,
}

impl Gather {
    /// Waits for the end of each job. `waiter` is the job inside which the caller waits.
    pub(crate) fn ends(jobs: &[MessageId], waiter: Option<MessageId>, finish: Finish) -> Arc<Self> {
        Self::new(jobs, false, waiter, finish)
    }

    /// Fetches the job's present state.
    pub(crate) fn state_of(job: MessageId, finish: Finish) -> Arc<Self> {
        Self::new(&[job], true, None, finish)
    }

    fn new(
        jobs: &[MessageId],
        ends_at_pending: bool,
        waiter: Option<MessageId>,
        finish: Finish,
    ) -> Arc<Self> {
        let mut places: HashMap<MessageId, Vec<usize>> = HashMap::new();
        for (place, job) in jobs.iter().enumerate() {
            places.entry(*job).or_default().push(place);
        }
        Arc::new(Self {
            state: Mutex::new(GatherState {
                finish: Some(finish),
                states: vec![KeyState::Pending; jobs.len()],
                untold: places.len(),
                places,
                ends_at_pending,
                waiter,
                is_reachable: false,
            }),
        })
    }

    /// Makes the driver call that fetches the states.
    pub(crate) fn begin(
        self: Arc<Self>,
        driver: &dyn Driver,
        keys: Vec<Key>,
        deadline: Option<Instant>,
    ) -> WatchId {
        let state = self.state.lock().unwrap();
        let (ends_at_pending, waiter) = (state.ends_at_pending, state.waiter);
        drop(state);
        match waiter {
            _ if ends_at_pending => driver.peek(keys, deadline, self),
            Some(waiter) => driver.wait_inside(waiter, keys, deadline, self),
            None => driver.watch(keys, deadline, self),
        }
    }

    /// Returns each key once.
    pub(crate) fn keys(&self) -> Vec<Key> {
        let state = self.state.lock().unwrap();
        state.places.keys().copied().map(Key::Result).collect()
    }

    /// Returns the error for a caller whose time is up.
    pub(crate) fn timeout_error(&self, trouble: Option<String>) -> ClientError {
        let state = self.state.lock().unwrap();
        match state.is_reachable {
            true => ClientError::still_pending(),
            false => ClientError::unanswered(trouble),
        }
    }

    fn finish(&self, outcome: impl FnOnce(&mut GatherState) -> Result<Vec<KeyState>, ClientError>) {
        let mut state = self.state.lock().unwrap();
        if let Some(finish) = state.finish.take() {
            let outcome = outcome(&mut state);
            drop(state);
            finish(outcome);
        }
    }
}

impl ValueSink for Gather {
    fn value(&self, key: Key, told: KeyState) {
        let Key::Result(job) = key else {
            return;
        };
        let mut state = self.state.lock().unwrap();
        let state_now = &mut *state;
        if state_now.finish.is_none() {
            return;
        }
        let Some(places) = state_now.places.remove(&job) else {
            return;
        };
        for place in places {
            state_now.states[place] = told.clone();
        }
        state_now.untold -= 1;
        let over = state_now.untold == 0;
        drop(state);
        if over {
            self.finish(|state| Ok(std::mem::take(&mut state.states)));
        }
    }

    fn pending(&self, _key: Key) {
        let mut state = self.state.lock().unwrap();
        state.is_reachable = true;
        let over = state.ends_at_pending;
        drop(state);
        if over {
            self.finish(|state| Ok(std::mem::take(&mut state.states)));
        }
    }

    fn reachable(&self, reachable: bool) {
        self.state.lock().unwrap().is_reachable &= reachable;
    }

    fn failed(&self, error: DriverError) {
        self.finish(|_| Err(ClientError::of_query(error)));
    }

    fn timed_out(&self, trouble: Option<String>) {
        let failure = self.timeout_error(trouble);
        self.finish(|_| Err(failure));
    }

    fn refused(&self, refused: RefusedWait) {
        self.finish(|_| Err(ClientError::of_refused_wait(&refused)));
    }
}

/// Reports each job to a port as it ends.
pub(crate) struct Each {
    inbox: Arc<CallInbox>,
    token: u64,
    /// Indices of the jobs that have not ended.
    places: Mutex<HashMap<MessageId, Vec<usize>>>,
    /// Whether to report unfinished jobs at once, too.
    only_asks: bool,
    is_reachable: AtomicBool,
}

impl Each {
    pub(crate) fn new(
        jobs: &[MessageId],
        only_asks: bool,
        inbox: Arc<CallInbox>,
        token: u64,
    ) -> Arc<Self> {
        let mut places: HashMap<MessageId, Vec<usize>> = HashMap::new();
        for (place, job) in jobs.iter().enumerate() {
            places.entry(*job).or_default().push(place);
        }
        Arc::new(Self {
            inbox,
            token,
            places: Mutex::new(places),
            only_asks,
            is_reachable: AtomicBool::new(false),
        })
    }

    /// Returns each key once.
    pub(crate) fn keys(&self) -> Vec<Key> {
        let places = self.places.lock().unwrap();
        places.keys().copied().map(Key::Result).collect()
    }
}

impl Each {
    fn tell(&self, key: Key, told: &KeyState) {
        let Key::Result(job) = key else {
            return;
        };
        let places = self.places.lock().unwrap().remove(&job);
        for place in places.into_iter().flatten() {
            self.inbox
                .tell(self.token, CallEnd::JobOfMany(place, told.clone()));
        }
    }
}

impl ValueSink for Each {
    fn value(&self, key: Key, told: KeyState) {
        self.tell(key, &told);
    }

    fn pending(&self, key: Key) {
        self.is_reachable.store(true, Ordering::Relaxed);
        if self.only_asks {
            self.tell(key, &KeyState::Pending);
        }
    }

    fn reachable(&self, reachable: bool) {
        self.is_reachable.fetch_and(reachable, Ordering::Relaxed);
    }

    fn failed(&self, error: DriverError) {
        self.inbox
            .end(self.token, Err(ClientError::of_query(error)));
    }

    fn timed_out(&self, trouble: Option<String>) {
        let failure = match self.is_reachable.load(Ordering::Relaxed) {
            true => ClientError::still_pending(),
            false => ClientError::unanswered(trouble),
        };
        self.inbox.end(self.token, Err(failure));
    }

    fn refused(&self, refused: RefusedWait) {
        let failure = ClientError::of_refused_wait(&refused);
        self.inbox.end(self.token, Err(failure));
    }
}
