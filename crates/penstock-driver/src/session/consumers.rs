//! Keeps the consumers of this client, and their changes that the broker lacks.

use std::collections::BTreeMap;
use std::sync::Arc;

use penstock_message::{Consume, Delivery, Features, TaskSelection};
use penstock_wire::proto;

use crate::DeliverySink;

#[derive(Default)]
pub(super) struct ClientConsumers {
    by_number: BTreeMap<u32, ClientConsumer>,
    /// Whether all consumers were stopped for good, so that the next broker need not know them.
    are_over: bool,
}

struct ClientConsumer {
    sink: Arc<dyn DeliverySink>,
    /// State that the next connection must send.
    wanted: Consume,
    /// Credit that the broker has not used for deliveries.
    credit: u32,
    /// Part of the credit that the broker has not received.
    unsent_credit: u32,
    /// Whether the broker lacks changes of the app, queues and tasks.
    wanted_changed: bool,
    stopped: bool,
    changed: bool,
}

impl ClientConsumer {
    fn stop(&mut self) {
        self.credit = 0;
        self.unsent_credit = 0;
        self.changed |= !self.stopped;
        self.stopped = true;
    }
}

impl ClientConsumers {
    pub(super) fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    pub(super) fn consume(&mut self, consume: Consume, sink: Arc<dyn DeliverySink>) {
        self.are_over = false;
        let add_credit = consume.add_credit;
        let consumer = self
            .by_number
            .entry(consume.consumer)
            .or_insert_with(|| ClientConsumer {
                sink: Arc::clone(&sink),
                wanted: Consume {
                    consumer: consume.consumer,
                    ..Consume::default()
                },
                credit: 0,
                unsent_credit: 0,
                wanted_changed: true,
                stopped: false,
                changed: false,
            });
        consumer.sink = sink;
        let wanted = &mut consumer.wanted;
        if !consume.app.is_empty() && consume.app != wanted.app {
            wanted.app = consume.app;
            consumer.wanted_changed = true;
        }
        if !consume.queues.is_empty() && consume.queues != wanted.queues {
            wanted.queues = consume.queues;
            consumer.wanted_changed = true;
        }
        if consume.tasks != TaskSelection::Same && consume.tasks != wanted.tasks {
            wanted.tasks = consume.tasks;
            consumer.wanted_changed = true;
        }
        if let Some(held_by) = consume.held_by
            && wanted.held_by.as_ref().is_none_or(|was| *was != held_by)
        {
            wanted.held_by = Some(held_by);
            consumer.wanted_changed = true;
        }
        consumer.credit += add_credit;
        consumer.unsent_credit += add_credit;
        // A change of only its queues or tasks leaves it stopped.
        consumer.stopped &= add_credit == 0;
        consumer.changed = true;
    }

    pub(super) fn stop(&mut self) {
        self.are_over = true;
        self.by_number.values_mut().for_each(ClientConsumer::stop);
    }

    pub(super) fn stop_one(&mut self, number: u32) {
        if let Some(consumer) = self.by_number.get_mut(&number) {
            consumer.stop();
        }
    }

    /// Marks all consumers as unknown to the broker, for a new connection.
    pub(super) fn begin_connection(&mut self) {
        if self.are_over {
            return;
        }
        for consumer in self.by_number.values_mut() {
            consumer.unsent_credit = consumer.credit;
            consumer.wanted_changed = true;
            consumer.changed = true;
        }
    }

    /// Removes consumers that need more than the engine offers, and returns the sink of each.
    pub(super) fn refuse_beyond(
        &mut self,
        offered: Features,
    ) -> Vec<(Features, Arc<dyn DeliverySink>)> {
        let mut refused = Vec::new();
        self.by_number.retain(|_, consumer| {
            let missing = Features::of_consumer(&consumer.wanted).minus(offered);
            if !missing.is_empty() {
                refused.push((missing, Arc::clone(&consumer.sink)));
            }
            missing.is_empty()
        });
        refused
    }

    /// Returns the changes that the broker has not received.
    pub(super) fn take_changes(&mut self) -> Vec<proto::Consumer> {
        let changed = self.by_number.values_mut();
        let changed = changed.filter(|consumer| consumer.changed);
        let reported = changed.flat_map(|consumer| {
            consumer.changed = false;
            let number = consumer.wanted.consumer;
            let has_wish = std::mem::take(&mut consumer.wanted_changed);
            let mut consume = match has_wish {
                true => consumer.wanted.clone(),
                false => Consume {
                    consumer: number,
                    ..Consume::default()
                },
            };
            consume.add_credit = std::mem::take(&mut consumer.unsent_credit);
            // The broker reads only the number of a consumer that stops.
            let stop = consumer.stopped.then(|| proto::Consumer {
                consumer: number,
                stop: true,
                ..proto::Consumer::default()
            });
            let wanted = (has_wish || !consumer.stopped).then(|| consume.into());
            wanted.into_iter().chain(stop)
        });
        reported.collect()
    }

    /// Returns the sink for each run of deliveries to one consumer. Drops deliveries for unknown consumers.
    pub(super) fn deliver(
        &mut self,
        deliveries: Vec<Delivery>,
    ) -> Vec<(Arc<dyn DeliverySink>, Vec<Delivery>)> {
        let mut runs: Vec<(u32, Vec<Delivery>)> = Vec::new();
        for delivery in deliveries {
            match runs.last_mut() {
                Some((consumer, run)) if *consumer == delivery.consumer => run.push(delivery),
                _ => runs.push((delivery.consumer, vec![delivery])),
            }
        }
        let runs = runs.into_iter().filter_map(|(number, run)| {
            let consumer = self.by_number.get_mut(&number)?;
            consumer.credit = consumer.credit.saturating_sub(run.len() as u32);
            Some((Arc::clone(&consumer.sink), run))
        });
        runs.collect()
    }

    /// Returns each sink once, even if several consumers share it.
    pub(super) fn sinks(&self) -> Vec<Arc<dyn DeliverySink>> {
        let mut sinks: Vec<Arc<dyn DeliverySink>> = Vec::new();
        for consumer in self.by_number.values() {
            if !sinks.iter().any(|sink| Arc::ptr_eq(sink, &consumer.sink)) {
                sinks.push(Arc::clone(&consumer.sink));
            }
        }
        sinks
    }
}
