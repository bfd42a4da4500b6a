//! Checks the duties of every driver, for any engine behind it.
//!
//! An engine's tests implement [`TestEngine`] and generate a test for each scenario:
//!
//! ```text
//!     penstock_conformance::tests!(MyEngine::fresh);     one #[test] for each scenario
//!     penstock_conformance::run(&|| Box::new(…))         or all of them, as a report
//! ```
//!
//! A scenario names the features that it proves and the others that it needs. If the engine declares that it
//! lacks one of them, the scenario must end in `NotOffered`, so nothing is skipped silently. A feature that no
//! call asks for, such as fencing, can't be refused: the report then says that it is not promised.
//!
//! A kill shows that a commit reached the operating system. Only a power cut shows that it reached the disk. No
//! scenario can cut the power, so an engine's own tests must.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use penstock_driver::Driver;
use penstock_message::{Capabilities, Feature, Features, NotOffered};

mod client;
mod scenarios;
mod wall_clock;

pub use client::{PATIENCE, States, TestClient, TestWorker, words};
pub use scenarios::SCENARIOS;
pub use wall_clock::{has_wall_clock, wall_clock};

/// Fresh engine for one scenario.
pub trait TestEngine: Send + Sync {
    /// Returns the known features of this engine. Its driver must declare exactly these.
    fn capabilities(&self) -> Capabilities;

    /// Connects a new driver; returns the only one again if there can't be several clients.
    fn driver(&self) -> Arc<dyn Driver>;

    fn can(&self, ability: Ability) -> bool;

    /// Kills the engine in the way that is worst for its clients, and makes sure that there is a next one.
    fn kill(&self) {
        unreachable!("{} can't be killed", self.capabilities().engine)
    }

    /// Kills the engine; the next one's wall clock is ahead by this much.
    fn set_wall_clock(&self, ahead: Duration) {
        unreachable!("the clock can't be set {ahead:?} ahead")
    }

    /// Time that a scenario waits for an event that must happen.
    fn patience(&self) -> Duration {
        PATIENCE
    }
}

/// Action on an engine from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ability {
    Kill,
    SeveralClients,
    SetWallClock,
}

impl fmt::Display for Ability {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Kill => "killing the engine",
            Self::SeveralClients => "several clients",
            Self::SetWallClock => "setting the clock on the wall",
        })
    }
}

pub struct Scenario {
    pub name: &'static str,
    /// Features that the scenario proves: it fails if one of them is claimed but missing.
    pub shows: &'static [Feature],
    /// Features that the scenario needs in addition.
    pub needs: &'static [Feature],
    pub abilities: &'static [Ability],
    pub(crate) run: fn(&Bench<'_>),
}

impl Scenario {
    pub fn named(name: &str) -> Option<&'static Self> {
        SCENARIOS.iter().find(|scenario| scenario.name == name)
    }

    /// Returns all features that it proves or needs.
    pub fn features(&self) -> Features {
        let all = self.shows.iter().chain(self.needs);
        all.fold(Features::NONE, |all, one| all.with(*one))
    }

    /// Runs on a fresh engine.
    pub fn check(&self, place: &dyn TestEngine) -> ScenarioOutcome {
        let cannot = self.abilities.iter().find(|one| !place.can(**one));
        if let Some(ability) = cannot {
            return ScenarioOutcome::NotShown(*ability);
        }
        let capabilities = place.capabilities();
        let lacking = self.features().minus(capabilities.features());
        let lacking: Vec<Feature> = lacking.iter().collect();
        if let Some(promise) = lacking.iter().find(|one| !is_asked_for(**one)) {
            return ScenarioOutcome::NotPromised(*promise);
        }
        let bench = Bench {
            place,
            capabilities,
        };
        let ended = catch_unwind(AssertUnwindSafe(|| (self.run)(&bench)));
        match (ended, lacking.first()) {
            (Ok(()), None) => ScenarioOutcome::Passed,
            (Ok(()), Some(feature)) => ScenarioOutcome::Failed(format!(
                "{} is not offered, and yet nothing was refused",
                feature.name()
            )),
            (Err(panic), missing) => match (panic.downcast::<NotOffered>(), missing) {
                (Ok(refused), Some(_)) => refusal(&refused, &lacking),
                (Ok(refused), None) => ScenarioOutcome::Failed(refused.to_string()),
                (Err(panic), _) => ScenarioOutcome::Failed(said(&*panic)),
            },
        }
    }
}

/// Whether a refusal names a missing feature, the engine, and a remedy.
fn refusal(refused: &NotOffered, lacking: &[Feature]) -> ScenarioOutcome {
    let named = lacking.iter().find(|one| one.name() == refused.feature);
    match named {
        Some(_) if refused.remedy.is_empty() || refused.engine.is_empty() => {
            ScenarioOutcome::Failed(format!(
                "the refusal names no engine or no remedy: {refused:?}"
            ))
        }
        Some(feature) => ScenarioOutcome::Refused(*feature),
        None => {
            ScenarioOutcome::Failed(format!("{refused}; but what it lacks here is {lacking:?}"))
        }
    }
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "it panicked".to_owned())
}

/// Whether calls ask for the feature, so that an engine without it refuses them. All other features are
/// promises about how calls are carried out.
pub fn is_asked_for(feature: Feature) -> bool {
    matches!(
        feature,
        Feature::ReplicatedDurability
            | Feature::DiskDurability
            | Feature::OsDurability
            | Feature::Delays
            | Feature::Priorities
            | Feature::Values
            | Feature::Keys
            | Feature::Joins
            | Feature::Purge
            | Feature::Pause
            | Feature::Limits
            | Feature::Inspection
            | Feature::FailedJobs
            | Feature::Workflows
            | Feature::Schedules
            | Feature::Claims
            | Feature::Debounce
            | Feature::CancelWaiting
            | Feature::CancelRunning
            | Feature::TasksOfConsumers
            | Feature::MovableClock
            | Feature::Asks
    )
}

/// Outcome of a scenario.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScenarioOutcome {
    Passed,
    /// The engine declares that it lacks this feature, and refused the call that needs it.
    Refused(Feature),
    /// The engine does not promise this feature, which no call asks for. The scenario did not run.
    NotPromised(Feature),
    /// The ability is not available with this engine. The scenario did not run.
    NotShown(Ability),
    Failed(String),
}

impl fmt::Display for ScenarioOutcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => out.write_str("passed"),
            Self::Refused(feature) => write!(out, "refused, as it has to be: {}", feature.name()),
            Self::NotPromised(feature) => write!(out, "not promised: {}", feature.name()),
            Self::NotShown(ability) => write!(out, "not shown, for want of {ability}"),
            Self::Failed(why) => write!(out, "FAILED: {why}"),
        }
    }
}

/// Outcomes of all scenarios, by name.
#[derive(Clone, Debug)]
pub struct SuiteReport {
    pub engine: String,
    pub outcomes: Vec<(&'static str, ScenarioOutcome)>,
    /// Features that the engine claims and that no scenario proves.
    pub unproven: Vec<Feature>,
}

impl SuiteReport {
    pub fn failed(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.outcomes
            .iter()
            .filter_map(|(name, outcome)| match outcome {
                ScenarioOutcome::Failed(why) => Some((*name, why.as_str())),
                _ => None,
            })
    }

    pub fn is_sound(&self) -> bool {
        self.failed().next().is_none() && self.unproven.is_empty()
    }
}

impl fmt::Display for SuiteReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}", self.engine)?;
        for (name, outcome) in &self.outcomes {
            writeln!(out, "    {name}: {outcome}")?;
        }
        for feature in &self.unproven {
            writeln!(
                out,
                "    {}: FAILED: it is claimed, and no scenario shows it",
                feature.name()
            )?;
        }
        Ok(())
    }
}

/// Returns the features that the engine claims and that no scenario proves.
pub fn unproven(capabilities: &Capabilities) -> Vec<Feature> {
    let shown = |one: &Feature| {
        SCENARIOS
            .iter()
            .any(|scenario| scenario.shows.contains(one))
    };
    let claimed = Feature::ALL.into_iter();
    let claimed = claimed.filter(|one| capabilities.offers(*one));
    claimed.filter(|one| !shown(one)).collect()
}

/// Runs every scenario, each on a fresh engine.
pub fn run(fresh: &dyn Fn() -> Box<dyn TestEngine>) -> SuiteReport {
    let capabilities = fresh().capabilities();
    let outcomes = SCENARIOS
        .iter()
        .map(|scenario| (scenario.name, scenario.check(&*fresh())));
    SuiteReport {
        outcomes: outcomes.collect(),
        unproven: unproven(&capabilities),
        engine: capabilities.engine,
    }
}

/// Runs one scenario as a test: prints its outcome, and panics if it failed.
pub fn check(name: &str, place: &dyn TestEngine) {
    let scenario = Scenario::named(name).expect("a scenario of this name");
    let outcome = scenario.check(place);
    println!("{name}: {outcome}");
    assert!(!matches!(outcome, ScenarioOutcome::Failed(_)), "{outcome}");
}

/// Engine of a scenario, with its capabilities.
pub(crate) struct Bench<'a> {
    pub(crate) place: &'a dyn TestEngine,
    pub(crate) capabilities: Capabilities,
}

impl Bench<'_> {
    /// Connects a new client, if there can be several.
    pub(crate) fn client(&self) -> TestClient {
        TestClient {
            driver: self.place.driver(),
            durability: self.capabilities.settle_at(),
            patience: self.place.patience(),
        }
    }

    pub(crate) fn kill(&self) {
        self.place.kill();
    }

    pub(crate) fn several_clients(&self) -> bool {
        self.place.can(Ability::SeveralClients)
    }
}
