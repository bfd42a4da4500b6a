//! Capabilities of an engine.

use std::time::Duration;

use penstock_message::{
    Capabilities, Dedupe, Durability, LeaseLife, LimitSupport, Priorities, Settlement,
};

use super::durability;
use crate::proto;
use crate::proto::capabilities as wire;

impl From<&Capabilities> for proto::Capabilities {
    fn from(from: &Capabilities) -> Self {
        let (settlement, settlement_window) = match from.settlement {
            Settlement::PublishThenAck => (wire::Settlement::PublishThenAck, Duration::ZERO),
            Settlement::Idempotent { window } => (wire::Settlement::Idempotent, window),
            Settlement::OneStep => (wire::Settlement::OneStep, Duration::ZERO),
        };
        let (dedupe, dedupe_window) = match from.dedupe {
            Dedupe::None => (wire::Dedupe::NoDedupe, Duration::ZERO),
            Dedupe::Window(window) => (wire::Dedupe::Window, window),
            Dedupe::Session => (wire::Dedupe::Session, Duration::ZERO),
        };
        let (priorities, strict_priorities) = match from.priorities {
            Priorities::None => (0, false),
            Priorities::Levels(levels) => (levels, false),
            Priorities::Strict(levels) => (levels, true),
        };
        let limits = match from.limits {
            LimitSupport::None => wire::Limits::NoLimits,
            LimitSupport::AtDeclaration => wire::Limits::AtDeclaration,
            LimitSupport::Live => wire::Limits::Live,
        };
        Self {
            engine: from.engine.clone(),
            is_double: from.is_double,
            highest_durability: Some(proto::Durability::from(from.highest_durability).into()),
            settlement: settlement.into(),
            settlement_window_ms: settlement_window.as_millis() as u64,
            fencing: from.fencing,
            dedupe: dedupe.into(),
            dedupe_window_ms: dedupe_window.as_millis() as u64,
            leases_of_sessions: from.lease == LeaseLife::Session,
            delays_us: from.delays.map(|delays| delays.as_micros() as u64),
            priorities: priorities.into(),
            strict_priorities,
            keeps_place: from.keeps_place,
            values: from.values,
            keys: from.keys,
            joins: from.joins,
            max_group: from.max_group,
            pending: from.pending,
            purge: from.purge,
            pause: from.pause,
            limits: limits.into(),
            inspect: from.inspect,
            failed_jobs: from.failed_jobs,
            cancel_waiting: from.cancel_waiting,
            cancel_running: from.cancel_running,
            tasks_of_consumers: from.tasks_of_consumers,
            fair_flows: from.fair_flows,
            steady_clock: from.steady_clock,
            workflows: from.workflows,
            value_streams: from.value_streams,
            claims: from.claims,
            debounce: from.debounce,
            rate_limits_us: from
                .rate_limits
                .map(|precision| precision.as_micros() as u64),
            fair_share: from.fair_share,
            batching: from.batching,
            schedules: from.schedules,
            progress: from.progress,
            why: from.why,
            parking: from.parking,
            movable_clock: from.movable_clock,
            asks: from.asks,
        }
    }
}

/// Capabilities of a newer broker that this program can't name count as not offered.
impl From<proto::Capabilities> for Capabilities {
    fn from(wire: proto::Capabilities) -> Self {
        let mut to = Self::NOTHING;
        to.highest_durability = wire
            .highest_durability
            .and_then(|highest| durability(highest).ok())
            .unwrap_or(Durability::None);
        to.settlement = match wire.settlement() {
            wire::Settlement::PublishThenAck => Settlement::PublishThenAck,
            wire::Settlement::Idempotent => Settlement::Idempotent {
                window: Duration::from_millis(wire.settlement_window_ms),
            },
            wire::Settlement::OneStep => Settlement::OneStep,
        };
        to.dedupe = match wire.dedupe() {
            wire::Dedupe::NoDedupe => Dedupe::None,
            wire::Dedupe::Window => Dedupe::Window(Duration::from_millis(wire.dedupe_window_ms)),
            wire::Dedupe::Session => Dedupe::Session,
        };
        to.lease = match wire.leases_of_sessions {
            true => LeaseLife::Session,
            false => LeaseLife::Connection,
        };
        let levels = u8::try_from(wire.priorities).unwrap_or(u8::MAX);
        to.priorities = match (levels, wire.strict_priorities) {
            (0, _) => Priorities::None,
            (levels, true) => Priorities::Strict(levels),
            (levels, false) => Priorities::Levels(levels),
        };
        to.limits = match wire.limits() {
            wire::Limits::NoLimits => LimitSupport::None,
            wire::Limits::AtDeclaration => LimitSupport::AtDeclaration,
            wire::Limits::Live => LimitSupport::Live,
        };
        to.engine = wire.engine;
        to.is_double = wire.is_double;
        to.fencing = wire.fencing;
        to.delays = wire.delays_us.map(Duration::from_micros);
        to.keeps_place = wire.keeps_place;
        to.values = wire.values;
        to.keys = wire.keys;
        to.joins = wire.joins;
        to.max_group = wire.max_group;
        to.pending = wire.pending;
        to.purge = wire.purge;
        to.pause = wire.pause;
        to.inspect = wire.inspect;
        to.failed_jobs = wire.failed_jobs;
        to.cancel_waiting = wire.cancel_waiting;
        to.cancel_running = wire.cancel_running;
        to.tasks_of_consumers = wire.tasks_of_consumers;
        to.fair_flows = wire.fair_flows;
        to.steady_clock = wire.steady_clock;
        to.workflows = wire.workflows;
        to.value_streams = wire.value_streams;
        to.claims = wire.claims;
        to.debounce = wire.debounce;
        to.rate_limits = wire.rate_limits_us.map(Duration::from_micros);
        to.fair_share = wire.fair_share;
        to.batching = wire.batching;
        to.schedules = wire.schedules;
        to.progress = wire.progress;
        to.why = wire.why;
        to.parking = wire.parking;
        to.movable_clock = wire.movable_clock;
        to.asks = wire.asks;
        to
    }
}

#[cfg(test)]
mod tests {
    use penstock_message::Feature;

    use super::*;
    use crate::native;

    #[test]
    fn each_field_arrives_as_it_was_declared() {
        let mut all = native::on_disk().clone();
        all.is_double = true;
        all.cancel_running = true;
        all.workflows = true;
        all.value_streams = true;
        all.claims = true;
        all.debounce = true;
        all.rate_limits = Some(Duration::from_micros(1_500));
        all.fair_share = true;
        all.batching = true;
        all.schedules = true;
        all.progress = true;
        all.why = true;
        all.parking = true;
        all.movable_clock = true;
        all.highest_durability = Durability::Replicated;
        let arrives = |sent: &Capabilities| {
            let arrived = Capabilities::from(proto::Capabilities::from(sent));
            assert_eq!(&arrived, sent);
        };
        arrives(&all);
        for feature in Feature::ALL {
            assert!(all.offers(feature), "{feature:?} is not covered");
            arrives(&all.clone().without(feature));
        }
        let window = Duration::from_secs(3_600);
        all.settlement = Settlement::Idempotent { window };
        all.dedupe = Dedupe::Window(window);
        all.priorities = Priorities::Levels(2);
        all.limits = LimitSupport::AtDeclaration;
        arrives(&all);
    }

    #[test]
    fn a_broker_that_says_nothing_offers_nothing() {
        let said = Capabilities::from(proto::Capabilities::default());
        assert_eq!(said, Capabilities::default());
    }
}
