//! Handles frames from the broker.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use penstock_message::{
    Answer, CancelOrder, Capabilities, Delivery, Key, KeyState, Lease, Query, Receipt, RefusedWait,
};
use penstock_wire::{convert, encode_frame, proto};

use super::outgoing::refused;
use super::{
    APPLIED, Call, CallDone, CallId, DriverSession, LinkEnd, LinkState, PendingTx, SessionEvent,
};
use crate::ErrorKind;
use crate::encoded::Encoded;

/// Version of this client, for people.
const OUR_VERSION: &str = env!("CARGO_PKG_VERSION");
/// Room for this many transactions is kept while none is unconfirmed.
const KEPT_TRANSACTIONS: usize = 1024;
/// Id of the query that stops an older broker. Other calls are numbered from 1.
const TAKE_OVER: u64 = 0;

impl DriverSession {
    /// Handles the welcome, which answers the hello. It is in the highest version that both sides speak, or in
    /// the broker's own if it knows no better.
    pub(super) fn welcomed(&mut self, welcome: proto::Welcome) -> Result<(), LinkEnd> {
        if welcome.protocol_version > self.config.versions.highest {
            return Err(self.no_common_version(&welcome));
        }
        self.resolve_window(&welcome);
        let is_older = welcome.protocol_version < self.config.versions.highest;
        if is_older && self.config.takes_over {
            self.take_over(welcome);
            return Ok(());
        }
        self.open(welcome)
    }

    /// Asks an older broker to stop. Its journal keeps everything of this session and others, including leases,
    /// for the broker that is started next.
    fn take_over(&mut self, welcome: proto::Welcome) {
        tracing::info!(
            "the broker at {} (penstock {}) speaks version {} of the protocol and this client (penstock \
             {OUR_VERSION}) version {}. Stopping it to start one of this version; nothing is lost",
            self.config.broker,
            welcome.broker_version,
            welcome.protocol_version,
            self.config.versions.highest,
        );
        self.takes_over = true;
        let frame = proto::ToBroker {
            queries: vec![(TAKE_OVER, Query::Stop).into()],
            ..Default::default()
        };
        encode_frame(&frame, &mut self.out);
        self.link = LinkState::TakingOver(Box::new(welcome));
    }

    /// Handles the answer of an older broker: either it stops now, or it is used as it is.
    pub(super) fn take_over_answered(
        &mut self,
        welcome: &proto::Welcome,
        answer: proto::Answer,
    ) -> Result<(), LinkEnd> {
        match answer.try_into()? {
            (TAKE_OVER, Answer::Refused(_)) => self.open(welcome.clone()),
            _ => Ok(()),
        }
    }

    /// Whether the only call is a stop, which every version knows: a newer penstock can stop any broker.
    fn asks_only_to_stop(&self) -> bool {
        let is_stop = |call: &Call| {
            matches!(
                call.done,
                CallDone::Query {
                    query: Query::Stop,
                    ..
                }
            )
        };
        let has_no_other_wish = !self.awaits_values() && self.consumers.is_empty();
        has_no_other_wish && !self.calls.is_empty() && self.calls.values().all(is_stop)
    }

    fn no_common_version(&self, welcome: &proto::Welcome) -> LinkEnd {
        let theirs = &welcome.broker_version;
        let advice = match welcome.protocol_version > self.config.versions.highest {
            true => format!("install penstock {theirs} for this client"),
            false => format!(
                "stop that broker (with `penstock broker stop`, if it is a local one) and start penstock {OUR_VERSION} in \
                 its place; everything that was confirmed is kept"
            ),
        };
        LinkEnd::Hopeless(
            ErrorKind::Invalid,
            format!(
                "the broker at {} (penstock {theirs}) speaks version {} of the protocol and this client \
                 (penstock {OUR_VERSION}) {}: {advice}",
                self.config.broker, welcome.protocol_version, self.config.versions
            ),
        )
    }

    fn open(&mut self, welcome: proto::Welcome) -> Result<(), LinkEnd> {
        let is_too_old = welcome.protocol_version < self.config.versions.lowest;
        if is_too_old && !self.asks_only_to_stop() {
            return Err(self.no_common_version(&welcome));
        }
        self.link = LinkState::Up;
        self.up_since = self.last_received;
        self.stopped = false;
        self.takes_over = false;
        self.down_because = None;
        self.heartbeat = Duration::from_millis(welcome.heartbeat_ms);
        self.max_frame_bytes = welcome.max_frame_bytes as usize;
        self.version = welcome.protocol_version;
        let said = welcome.capabilities.clone().unwrap_or_default();
        let capabilities = Capabilities::from(said);
        self.offered = capabilities.features();
        self.capabilities = Arc::new(capabilities);
        self.unwritten = (0, 0);
        self.refuse_in_window();
        self.come_up(welcome)
    }

    /// Resolves sent and unconfirmed transactions by the broker's welcome.
    fn resolve_window(&mut self, welcome: &proto::Welcome) {
        if welcome.forgotten {
            while !self.window.is_empty() {
                self.pop_confirmed(Receipt::Unknown);
            }
            self.window_first_seq = welcome.applied_through + 1;
        }
        // For these numbers, the welcome's receipts say nothing beyond "applied".
        while self.window_first_seq <= welcome.applied_through && !self.window.is_empty() {
            self.pop_confirmed(APPLIED);
        }
    }

    /// Refuses transactions in the window that were sent to a newer broker or another engine, and were not
    /// applied.
    fn refuse_in_window(&mut self) {
        for index in 0..self.window.len() {
            let pending = &self.window[index];
            let Some(lacking) = self.lacking(pending) else {
                continue;
            };
            let refused = refused(&lacking);
            let pending = &mut self.window[index];
            // Its number is taken, so it is sent without operations.
            pending.tx = Encoded::nothing();
            if !std::mem::replace(&mut pending.reported, true) {
                let (call, index) = (pending.call, pending.index);
                self.settle(call, index, refused);
            }
        }
    }

    fn come_up(&mut self, welcome: proto::Welcome) -> Result<(), LinkEnd> {
        self.watch_all_again();
        for watch in self.watches.values() {
            self.events
                .push_back(SessionEvent::Reachable(Arc::clone(&watch.sink), true));
        }
        self.unsent_queries = self
            .calls
            .iter()
            .filter(|(_, call)| matches!(call.done, CallDone::Query { .. }))
            .map(|(id, _)| *id)
            .collect();
        self.answer_probes();
        self.report_changed = self.report.is_some();
        self.consumers.begin_connection();
        let kept: Vec<Lease> = convert::all(welcome.leases)?;
        for sink in self.consumers.sinks() {
            self.events
                .push_back(SessionEvent::LeasesKept(sink, kept.clone()));
        }
        Ok(())
    }

    fn answer_probes(&mut self) {
        let is_probe = |call: &Call| matches!(call.done, CallDone::Probe { .. });
        let probes = self.calls.iter().filter(|(_, call)| is_probe(call));
        let probes: Vec<CallId> = probes.map(|(id, _)| *id).collect();
        for id in probes {
            if let Some(Call {
                done: CallDone::Probe { done },
                ..
            }) = self.remove_call(id)
            {
                let known = Arc::clone(&self.capabilities);
                self.events.push_back(SessionEvent::Probed(done, Ok(known)));
            }
        }
    }

    pub(super) fn confirmed(&mut self, confirm: proto::Confirm) -> Result<(), LinkEnd> {
        for receipt in confirm.receipts {
            let (seq, receipt) = receipt.try_into()?;
            if let Some(pending) = self.in_window(seq) {
                pending.receipt = Some(receipt);
            }
        }
        for seq in confirm.early {
            if let Some(pending) = self.in_window(seq)
                && !pending.reported
            {
                pending.reported = true;
                let (call, index) = (pending.call, pending.index);
                let receipt = pending.receipt.clone().unwrap_or(APPLIED);
                self.settle(call, index, receipt);
            }
        }
        while self.window_first_seq <= confirm.through && !self.window.is_empty() {
            self.pop_confirmed(APPLIED);
            self.refused = None;
        }
        Ok(())
    }

    fn in_window(&mut self, seq: u64) -> Option<&mut PendingTx> {
        let index = seq.checked_sub(self.window_first_seq)?;
        self.window.get_mut(usize::try_from(index).ok()?)
    }

    /// Removes the first transaction of the window, with its own receipt if it has one.
    fn pop_confirmed(&mut self, otherwise: Receipt) {
        let Some(pending) = self.window.pop_front() else {
            return;
        };
        self.window_first_seq += 1;
        self.unwritten = match self.unwritten {
            (0, _) => (0, 0),
            (index, part) => (index - 1, part),
        };
        if self.window.is_empty() && self.waiting.is_empty() {
            // They grow while the broker confirms slowly, to 136 bytes a transaction, and would stay that large.
            for transactions in [&mut self.window, &mut self.waiting] {
                if transactions.capacity() > KEPT_TRANSACTIONS {
                    *transactions = VecDeque::new();
                }
            }
        }
        if !pending.reported {
            let receipt = pending.receipt.unwrap_or(otherwise);
            self.settle(pending.call, pending.index, receipt);
        }
    }

    pub(super) fn settle(&mut self, id: CallId, index: usize, receipt: Receipt) {
        let Some(call) = self.calls.get_mut(&id) else {
            return;
        };
        let CallDone::Commit {
            receipts,
            unconfirmed,
            ..
        } = &mut call.done
        else {
            return;
        };
        receipts[index] = receipt;
        *unconfirmed -= 1;
        if *unconfirmed == 0
            && let Some(call) = self.remove_call(id)
            && let CallDone::Commit { done, receipts, .. } = call.done
        {
            self.events
                .push_back(SessionEvent::Committed(done, Ok(receipts)));
        }
    }

    pub(super) fn answered(&mut self, id: CallId, answer: Answer) {
        match self.calls.get(&id) {
            Some(Call {
                done: CallDone::Query { .. },
                ..
            }) => {}
            _ => return,
        }
        if let Some(call) = self.remove_call(id)
            && let CallDone::Query { done, .. } = call.done
        {
            self.events
                .push_back(SessionEvent::Answered(done, Ok(answer)));
        }
    }

    pub(super) fn delivered(&mut self, deliveries: Vec<Delivery>) {
        for (sink, deliveries) in self.consumers.deliver(deliveries) {
            self.events
                .push_back(SessionEvent::Deliver(sink, deliveries));
        }
    }

    pub(super) fn asked_to_cancel(&mut self, orders: &[CancelOrder]) {
        for sink in self.consumers.sinks() {
            self.events
                .push_back(SessionEvent::Cancel(sink, orders.to_vec()));
        }
    }

    /// Passes questions to the consumer that reports this worker's figures: all sinks belong to the worker.
    pub(super) fn asked(&mut self, asks: Vec<proto::Ask>) {
        let Some(sink) = self.consumers.sinks().into_iter().next() else {
            return;
        };
        self.asks.extend(asks.iter().map(|ask| ask.id));
        let asks = asks.into_iter().map(Into::into).collect();
        self.events.push_back(SessionEvent::Asked(sink, asks));
    }

    pub(super) fn value(&mut self, key: Key, state: KeyState) {
        let pending = state == KeyState::Pending;
        let reported = match pending {
            true => self.watchers.get(&key).cloned(),
            false => self.watchers.remove(&key),
        };
        let mut peeked = Vec::new();
        for id in reported.into_iter().flatten() {
            let Some(watch) = self.watches.get_mut(&id) else {
                continue;
            };
            let sink = Arc::clone(&watch.sink);
            self.events
                .push_back(SessionEvent::Value(sink, key.clone(), state.clone()));
            if pending && !watch.peeks {
                continue;
            }
            if pending {
                peeked.push(id);
            }
            watch.unreported -= 1;
            if watch.unreported == 0 {
                self.remove_watch(id);
            }
        }
        if !peeked.is_empty() {
            self.stop_watching(key, None, |watcher| peeked.contains(&watcher));
        }
    }

    /// Ends the waits of a job for a key; other watchers of the key continue.
    pub(super) fn wait_refused(&mut self, refused: &RefusedWait) {
        let reported = self.watchers.get(&refused.key).cloned();
        for id in reported.into_iter().flatten() {
            let watch = self.watches.get(&id);
            let Some(watch) = watch.filter(|watch| watch.waiter == Some(refused.waiter)) else {
                continue;
            };
            let sink = Arc::clone(&watch.sink);
            self.events
                .push_back(SessionEvent::Refused(sink, refused.clone()));
            self.unwatch(id);
        }
    }

    /// Registers all watched keys again on a new connection.
    fn watch_all_again(&mut self) {
        self.unsent_unwatched.clear();
        self.unsent_over.clear();
        self.unsent_keys.clear();
        let watches = &self.watches;
        for (key, watchers) in &self.watchers {
            let waiters = watchers.iter().filter_map(|id| watches.get(id));
            let mut waiters: Vec<_> = waiters.map(|watch| watch.waiter).collect();
            waiters.sort_unstable();
            waiters.dedup();
            let each = waiters.into_iter().map(|waiter| (key.clone(), waiter));
            self.unsent_keys.extend(each);
        }
        // A refusal names only one of the keys.
        self.unsent_keys
            .make_contiguous()
            .sort_by_key(|(_, waiter)| *waiter);
    }

    pub(super) fn link_end(&mut self, close: proto::Close) -> LinkEnd {
        use proto::close::Why;
        let broker = self.config.broker.clone();
        let text = close.text;
        match Why::try_from(close.why) {
            Ok(Why::Unauthorized) => LinkEnd::Hopeless(
                ErrorKind::Unauthorized,
                format!("the broker at {broker} refused this client: {text}"),
            ),
            Ok(Why::Version) => LinkEnd::Hopeless(
                ErrorKind::Invalid,
                format!("the broker at {broker} speaks an incompatible version of the protocol: {text}"),
            ),
            Ok(Why::Protocol) => self.refused(format!(
                "the broker at {broker} refused a frame from this client: {text}"
            )),
            Ok(Why::Fenced) => self.refused(format!(
                "a newer connection of the same session replaced this one at {broker}. Two processes share a session, \
                 as cloned virtual machines do: restart this one"
            )),
            Ok(Why::Stopping) => LinkEnd::Lost("the broker was stopped".into()),
            Ok(Why::TooManyClients) => LinkEnd::Lost(text),
            Ok(Why::Failed) => LinkEnd::Lost(format!("the broker's disk failed: {text}")),
            Err(_) => LinkEnd::Lost(text),
        }
    }

    /// Gives up on a second refusal. The next connection sends the window again. Refused once more, with
    /// nothing confirmed in between, it would be refused forever.
    fn refused(&mut self, why: String) -> LinkEnd {
        match self.refused.take() {
            Some(before) if before == why => LinkEnd::Hopeless(ErrorKind::Invalid, why),
            _ => {
                self.refused = Some(why.clone());
                LinkEnd::Lost(why)
            }
        }
    }
}
