//! Tests the suite itself, on brokers that lack features or that lie about them.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use penstock_conformance::{
    Ability, SCENARIOS, Scenario, ScenarioOutcome, has_wall_clock, is_asked_for, unproven,
};
use penstock_driver::{BrokerStart, Dial, DialError, Driver, DriverConfig, native};
use penstock_message::{Capabilities, Durability, Feature};
use penstock_wire::native::{in_memory, on_disk};
use penstock_wire::proto;

use crate::liar::Liar;
use crate::support::*;
use crate::versions::carry;

/// Runs all of them, a few at a time.
fn for_each<T: Sync>(all: &[T], run: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(one);
                }
            });
        }
    });
}

/// Broker without a feature: a real one, behind a proxy that removes the feature. So the refusals here are
/// those that users get.
struct Lesser {
    capabilities: Capabilities,
    /// `None` if the broker is in memory.
    server: Option<BrokerPlace>,
    only_driver: Option<Arc<dyn Driver>>,
}

impl Lesser {
    fn in_memory(lacks: Feature) -> Self {
        let mut lesser = Self {
            capabilities: Self::less(in_memory(), lacks),
            server: None,
            only_driver: None,
        };
        lesser.only_driver = Some(lesser.dialled());
        lesser
    }

    fn on_disk(lacks: Feature) -> Self {
        Self {
            capabilities: Self::less(on_disk(), lacks),
            server: Some(BrokerPlace::unix()),
            only_driver: None,
        }
    }

    fn less(all: &Capabilities, lacks: Feature) -> Capabilities {
        let mut rest = all.clone().without(lacks);
        rest.engine = format!("Lesser 1, without {}", lacks.name());
        rest
    }

    fn dialled(&self) -> Arc<dyn Driver> {
        let carried = Carried {
            socket: self.server.as_ref().map(|place| place.url.clone()),
            capabilities: self.capabilities.clone(),
            broker: Mutex::default(),
        };
        let (config, bound) = match &self.server {
            Some(place) => (place.config(), on_disk()),
            None => (DriverConfig::new("memory:"), in_memory()),
        };
        native(config, Box::new(carried), bound, false).unwrap()
    }
}

impl penstock_conformance::TestEngine for Lesser {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn driver(&self) -> Arc<dyn Driver> {
        let only = self.only_driver.clone();
        only.unwrap_or_else(|| self.dialled())
    }

    fn can(&self, ability: Ability) -> bool {
        self.server.as_ref().is_some_and(|place| place.can(ability))
    }

    fn set_wall_clock(&self, ahead: Duration) {
        self.server
            .as_ref()
            .expect("a server")
            .set_wall_clock(ahead);
    }

    fn kill(&self) {
        self.server.as_ref().expect("a server").kill();
    }
}

/// Connects to a broker or starts one in memory, and forwards the frames of both sides.
struct Carried {
    socket: Option<String>,
    capabilities: Capabilities,
    broker: Mutex<Option<Child>>,
}

impl Carried {
    fn connect(&self) -> io::Result<OwnedFd> {
        let broker = match &self.socket {
            Some(url) => UnixStream::connect(url.trim_start_matches("unix:"))?,
            None => {
                let (ours, theirs) = UnixStream::pair()?;
                let child = Command::new(program())
                    .args(["server", "--memory", &std::process::id().to_string()])
                    .stdin(Stdio::from(OwnedFd::from(theirs)))
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()?;
                *self.broker.lock().unwrap() = Some(child);
                ours
            }
        };
        let (client, ours) = UnixStream::pair()?;
        carry(&ours, &broker, |_: &mut proto::ToBroker| {});
        let capabilities = self.capabilities.clone();
        carry(&broker, &ours, move |frame: &mut proto::ToClient| {
            if let Some(welcome) = &mut frame.welcome {
                welcome.capabilities = Some((&capabilities).into());
            }
        });
        client.set_nonblocking(true)?;
        Ok(client.into())
    }
}

impl Dial for Carried {
    fn dial(&self, _: Instant, _: BrokerStart) -> Result<OwnedFd, DialError> {
        self.connect()
            .map_err(|error| DialError::Unreachable(error.to_string()))
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        if let Some(mut broker) = self.broker.lock().unwrap().take() {
            broker.kill().unwrap();
            broker.wait().unwrap();
        }
    }
}

/// Checks that exactly the scenarios that need the feature are refused for lack of it. Returns their number.
fn lacks(feature: Feature, all: &Capabilities, fresh: impl Fn() -> Lesser, kills: bool) -> usize {
    let mut refused = 0;
    let rest = all.clone().without(feature);
    for scenario in SCENARIOS {
        if kills && scenario.abilities.is_empty() {
            continue;
        }
        let missing = scenario.features().minus(rest.features());
        let missing: Vec<Feature> = missing.iter().collect();
        let outcome = scenario.check(&fresh());
        let is_right = match &outcome {
            ScenarioOutcome::Passed => missing.is_empty(),
            ScenarioOutcome::Refused(named) => missing.contains(named) && is_asked_for(*named),
            ScenarioOutcome::NotPromised(named) => missing.contains(named) && !is_asked_for(*named),
            ScenarioOutcome::NotShown(Ability::SetWallClock) => !has_wall_clock() || !kills,
            ScenarioOutcome::NotShown(_) => !kills,
            ScenarioOutcome::Failed(_) => false,
        };
        assert!(
            is_right,
            "without {feature:?}, {}: {outcome}",
            scenario.name
        );
        refused +=
            usize::from(matches!(outcome, ScenarioOutcome::Refused(named) if all.offers(named)));
    }
    refused
}

#[test]
fn whatever_is_taken_away_is_refused_and_everything_else_goes_on() {
    let offered: Vec<Feature> = in_memory().features().iter().collect();
    for_each(&offered, |feature| {
        let refused = lacks(*feature, in_memory(), || Lesser::in_memory(*feature), false);
        assert_eq!(
            refused > 0,
            is_asked_for(*feature),
            "{refused} scenarios were refused for {feature:?}"
        );
    });
}

/// Where the engine survives kills, claims about them are checked too.
#[test]
fn what_is_taken_away_stays_away_through_a_kill() {
    let offered: Vec<Feature> = on_disk().features().iter().collect();
    for_each(&offered, |feature| {
        lacks(*feature, on_disk(), || Lesser::on_disk(*feature), true);
    });
}

/// Each lie, with the scenario that must catch it and the text of the failure.
const LIES: [(Feature, &str, &str); 30] = [
    (
        Feature::DiskDurability,
        "what_was_confirmed_from_disk_outlives_the_broker",
        "what was confirmed is gone",
    ),
    (
        Feature::OsDurability,
        "what_was_confirmed_outlives_the_broker",
        "what was confirmed is gone",
    ),
    (
        Feature::OneStepSettlement,
        "a_transaction_is_applied_whole_or_not_at_all",
        "what was refused is there",
    ),
    (
        Feature::Fencing,
        "a_lease_that_was_lost_changes_nothing",
        "is no refusal",
    ),
    (
        Feature::Dedupe,
        "what_was_in_flight_is_applied_once_through_a_kill",
        "what was sent again ended as",
    ),
    (
        Feature::LeasesOfSessions,
        "running_work_is_not_handed_out_again_after_a_kill",
        "the lease was lost",
    ),
    (
        Feature::SteadyClock,
        "a_countdown_does_not_follow_the_clock_on_the_wall",
        "a countdown followed the clock on the wall",
    ),
    (
        Feature::Delays,
        "a_delay_is_kept_by_the_broker",
        "a delay was not kept",
    ),
    (
        Feature::Priorities,
        "higher_priority_goes_first_and_equals_stay_in_order",
        "a lower priority went first",
    ),
    (
        Feature::KeepsPlace,
        "a_job_that_is_handed_back_keeps_its_place",
        "has another place",
    ),
    (Feature::Values, "a_result_is_kept", "Gone"),
    (
        Feature::Keys,
        "a_publish_under_a_key_is_skipped_while_the_key_exists",
        "the key is not heeded",
    ),
    (
        Feature::Joins,
        "a_join_releases_what_it_holds_once",
        "the held job came before all had joined",
    ),
    (
        Feature::Pending,
        "a_key_is_told_of_when_it_is_there_and_gone_when_it_never_will_be",
        "there never will be one",
    ),
    (Feature::Purge, "a_purge_cancels", "the key is reported"),
    (
        Feature::Pause,
        "a_paused_queue_hands_out_nothing_until_it_is_resumed",
        "its status says so",
    ),
    (
        Feature::Limits,
        "a_full_queue_refuses_and_takes_again_once_there_is_room",
        "a full queue takes a job",
    ),
    (
        Feature::Inspection,
        "a_job_can_be_looked_at",
        "a job that is held is found",
    ),
    (
        Feature::FailedJobs,
        "a_failed_job_is_kept_listed_retried_and_dropped",
        "a failed job is kept",
    ),
    (
        Feature::Workflows,
        "a_workflow_is_listed_with_its_jobs",
        "a workflow is listed",
    ),
    (
        Feature::Schedules,
        "a_schedule_makes_jobs_until_it_is_removed",
        "a schedule is listed",
    ),
    (
        Feature::Claims,
        "a_unique_job_is_one_until_its_key_is_free",
        "one job waits",
    ),
    (
        Feature::Debounce,
        "the_last_of_quick_calls_is_due_in_time",
        "deliveries came",
    ),
    (
        Feature::CancelWaiting,
        "a_job_is_cancelled_or_it_is_said_why_not",
        "the key is reported",
    ),
    (
        Feature::CancelRunning,
        "a_running_job_that_is_cancelled_ends_and_is_never_run_again",
        "an order to stop comes",
    ),
    (
        Feature::TasksOfConsumers,
        "a_worker_gets_only_the_tasks_that_it_names",
        "a task that it does not name",
    ),
    (
        Feature::FairFlows,
        "quick_jobs_are_not_kept_waiting_by_long_ones",
        "long jobs ran before",
    ),
    (
        Feature::MovableClock,
        "a_clock_that_is_moved_makes_delayed_jobs_due",
        "deliveries came",
    ),
    (
        Feature::Progress,
        "the_progress_of_a_running_job_is_told",
        "the last progress that was told",
    ),
    (
        Feature::Asks,
        "a_worker_is_asked_and_replies",
        "a question is answered",
    ),
];

#[test]
fn every_lie_is_caught_by_the_scenario_that_is_meant_for_it() {
    let told: BTreeSet<u8> = LIES.iter().map(|(lie, ..)| *lie as u8).collect();
    for feature in on_disk()
        .features()
        .iter()
        .chain(in_memory().features().iter())
    {
        let is_told = told.contains(&(feature as u8));
        assert!(is_told, "nobody lies about {feature:?}");
    }
    for_each(&LIES, |(lie, meant, says)| {
        let meant = Scenario::named(meant).unwrap_or_else(|| {
            panic!("nothing catches who lies about {lie:?}: no scenario {meant}")
        });
        assert!(
            meant.shows.contains(lie),
            "{} is not meant for {lie:?}",
            meant.name
        );
        // It need not wait long for an event that never comes.
        match meant.check(&Liar::about(*lie, Duration::from_secs(3))) {
            ScenarioOutcome::Failed(why) if why.contains(says) => {}
            ScenarioOutcome::NotShown(Ability::SetWallClock) if !has_wall_clock() => {
                eprintln!("skipped: {lie:?} needs faketime (Debian: apt-get install faketime)");
            }
            other => panic!("{lie:?} is a lie, and {}: {other}", meant.name),
        }
        let others = SCENARIOS.iter();
        for other in others.filter(|one| !one.features().iter().any(|feature| feature == *lie)) {
            let outcome = other.check(&Liar::about(*lie, PATIENCE));
            assert!(
                !matches!(outcome, ScenarioOutcome::Failed(_)),
                "it has nothing to do with {lie:?}, {}: {outcome}",
                other.name
            );
        }
    });
}

#[test]
fn a_claim_that_no_scenario_shows_is_named() {
    assert_eq!(unproven(on_disk()), []);
    assert_eq!(unproven(in_memory()), []);
    let mut boaster = in_memory().clone();
    boaster.highest_durability = Durability::Replicated;
    boaster.value_streams = true;
    boaster.rate_limits = Some(Duration::from_millis(1));
    boaster.fair_share = true;
    boaster.batching = true;
    boaster.progress = true;
    boaster.why = true;
    boaster.parking = true;
    let beyond: Vec<Feature> = boaster
        .features()
        .minus(in_memory().features())
        .iter()
        .collect();
    assert_eq!(
        beyond.len(),
        Feature::ALL.len() - in_memory().features().iter().count()
    );
    assert_eq!(unproven(&boaster), beyond);
}

#[test]
fn a_report_names_each_scenario() {
    let report = penstock_conformance::run(&|| Box::new(Lesser::in_memory(Feature::Delays)));
    assert!(report.is_sound(), "{report}");
    let text = report.to_string();
    for expected in [
        "Lesser 1, without delaying a job\n",
        "    a_delay_is_kept_by_the_broker: refused, as it has to be: delaying a job\n",
        "    a_job_is_run_and_acknowledged: passed\n",
        "    a_watch_outlives_the_broker: not shown, for want of killing the engine\n",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    for scenario in SCENARIOS {
        assert!(text.contains(&format!("    {}: ", scenario.name)), "{text}");
    }
    let report = penstock_conformance::run(&|| {
        Box::new(Liar::about(Feature::Pause, Duration::from_secs(3)))
    });
    assert!(!report.is_sound());
    let failed: Vec<_> = report.failed().map(|(name, _)| name).collect();
    assert_eq!(
        failed,
        ["a_paused_queue_hands_out_nothing_until_it_is_resumed"]
    );
}
