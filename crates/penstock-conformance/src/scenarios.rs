//! Lists the scenarios. Each new promise becomes another one, in the file of its subject.

mod cancels;
mod jobs;
mod keys;
mod kills;
mod queues;
mod times;
mod transactions;
mod workers;
mod workflows;

use std::time::Duration;

use bytes::Bytes;
use penstock_message::Feature::*;
use penstock_message::{Delivery, Feature, Key, Op, Receipt, Refusal, ReleaseReason};

use crate::{Ability, Scenario};
use cancels::*;
use jobs::*;
use keys::*;
use kills::*;
use queues::*;
use times::*;
use transactions::*;
use workers::*;
use workflows::*;

/// Smallest unit of an engine's time. A unit that has begun counts in full.
const ENGINE_TICK: Duration = Duration::from_millis(1);

/// Lists the scenarios, and defines the macro that generates a test for each. `$d` is a dollar sign.
macro_rules! scenarios {
    ($d:tt $($name:ident { shows $shows:tt needs $needs:tt $(by $by:tt)? })*) => {
        pub static SCENARIOS: &[Scenario] = &[$(
            Scenario {
                name: stringify!($name),
                shows: {
                    const SHOWS: &[Feature] = &$shows;
                    SHOWS
                },
                needs: {
                    const NEEDS: &[Feature] = &$needs;
                    NEEDS
                },
                abilities: {
                    const ABILITIES: &[Ability] = &[$(Ability::$by)?];
                    ABILITIES
                },
                run: $name,
            },
        )*];

        /// Generates a test for each scenario. The argument creates a fresh [`TestEngine`](crate::TestEngine).
        #[macro_export]
        macro_rules! tests {
            ($d fresh:expr) => {
                $(
                    #[test]
                    fn $name() {
                        $d crate::check(stringify!($name), &$d fresh());
                    }
                )*
            };
        }
    };
}

scenarios! { $
    a_job_is_run_and_acknowledged { shows [] needs [] }
    a_job_is_published_run_and_settled_in_one_step { shows [OneStepSettlement] needs [Values, Pending] }
    a_lease_that_was_lost_changes_nothing { shows [Fencing] needs [Values, Pending] }
    a_transaction_is_applied_whole_or_not_at_all { shows [OneStepSettlement] needs [Dedupe] }
    guards_decide { shows [Keys] needs [OneStepSettlement, Pending] }
    an_id_is_accepted_once { shows [] needs [Dedupe] }
    a_publish_under_a_key_is_skipped_while_the_key_exists { shows [Keys] needs [] }
    a_unique_job_is_one_until_its_key_is_free { shows [Claims] needs [Values, Pending] }
    the_last_of_quick_calls_is_due_in_time { shows [Debounce] needs [Claims, Delays] }
    one_body_goes_to_any_number_of_queues { shows [] needs [] }
    a_delay_is_kept_by_the_broker { shows [Delays] needs [] }
    what_expires_is_not_handed_out_and_ends_as_expired { shows [] needs [Values] }
    higher_priority_goes_first_and_equals_stay_in_order { shows [Priorities] needs [] }
    quick_jobs_are_not_kept_waiting_by_long_ones { shows [FairFlows] needs [] }
    a_retry_keeps_id_and_body_and_counts { shows [] needs [Delays, Values] }
    a_lease_handed_back_burns_no_attempt_and_a_crash_counts { shows [] needs [] }
    a_job_that_is_handed_back_keeps_its_place { shows [KeepsPlace] needs [] }
    a_suspect_is_charged_with_no_crash_and_is_told_of_it { shows [] needs [Values] }
    too_many_crashes_end_the_job { shows [] needs [Values] }
    a_key_is_told_of_when_it_is_there_and_gone_when_it_never_will_be { shows [Pending] needs [Values] }
    a_result_is_kept { shows [Values] needs [] }
    a_join_releases_what_it_holds_once { shows [Joins] needs [] }
    a_watch_outlives_the_broker { shows [] needs [Values, Pending, OsDurability] by Kill }
    what_was_confirmed_outlives_the_broker { shows [OsDurability] needs [Values, Delays] by Kill }
    what_was_confirmed_from_disk_outlives_the_broker { shows [DiskDurability] needs [Values] by Kill }
    what_was_in_flight_is_applied_once_through_a_kill { shows [Dedupe] needs [OsDurability] by Kill }
    running_work_is_not_handed_out_again_after_a_kill { shows [LeasesOfSessions] needs [Values, OsDurability] by Kill }
    a_large_transaction_arrives_whole { shows [] needs [OneStepSettlement, Dedupe, Values, Pending] }
    a_large_body_arrives_whole { shows [] needs [Values] }
    every_durability_is_confirmed { shows [] needs [OsDurability, DiskDurability] }
    a_goodbye_hands_leases_to_others_at_once { shows [] needs [] by SeveralClients }
    a_paused_queue_hands_out_nothing_until_it_is_resumed { shows [Pause] needs [] }
    a_full_queue_refuses_and_takes_again_once_there_is_room { shows [Limits] needs [] }
    a_purge_cancels { shows [Purge] needs [Values] }
    a_failed_job_is_kept_listed_retried_and_dropped { shows [FailedJobs] needs [Values, Inspection, Fencing] }
    a_workflow_is_listed_with_its_jobs { shows [Workflows] needs [] }
    a_schedule_makes_jobs_until_it_is_removed { shows [Schedules] needs [] }
    a_job_is_cancelled_or_it_is_said_why_not { shows [CancelWaiting] needs [Values] }
    a_running_job_that_is_cancelled_ends_and_is_never_run_again { shows [CancelRunning] needs [CancelWaiting, Values, Inspection] }
    an_order_to_stop_outlives_the_broker { shows [] needs [CancelRunning, CancelWaiting, LeasesOfSessions, Values, OsDurability] by Kill }
    a_worker_gets_only_the_tasks_that_it_names { shows [TasksOfConsumers] needs [] }
    a_clock_that_is_moved_makes_delayed_jobs_due { shows [MovableClock] needs [Delays] }
    a_countdown_does_not_follow_the_clock_on_the_wall { shows [SteadyClock] needs [Delays, OsDurability] by SetWallClock }
    the_status_counts_jobs_and_workers { shows [] needs [Delays] }
    the_progress_of_a_running_job_is_told { shows [Progress] needs [] }
    a_worker_is_asked_and_replies { shows [Asks] needs [] }
    a_job_can_be_looked_at { shows [Inspection] needs [Delays] }
    what_a_driver_declares_is_true { shows [] needs [] }
}

fn ids(taken: &[Delivery]) -> Vec<penstock_message::MessageId> {
    taken.iter().map(|delivery| delivery.message.id).collect()
}

fn named(name: &'static str) -> Key {
    Key::Named(Bytes::from_static(name.as_bytes()))
}

fn release(delivery: &penstock_message::Delivery, reason: ReleaseReason) -> Op {
    Op::Release {
        lease: delivery.lease,
        reason,
    }
}

fn refusal(receipt: Receipt) -> Refusal {
    match receipt {
        Receipt::Refused { why, .. } => why,
        other => panic!("{other:?} is no refusal"),
    }
}
