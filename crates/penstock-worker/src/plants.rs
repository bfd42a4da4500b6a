//! Defines planted bugs in the memory that a supervisor shares with its children, where no simulator reaches.
//! Each has a test that must find it. A test that passes despite its planted bug tests nothing.
//!
//! Tests plant bugs in their own thread only, so other threads are unaffected.

use penstock_faults::{Finder, PLANTS, is_found_by};

use crate::{inbox, limits, memory, order, outstanding, page, policy, supervisor};

#[rustfmt::skip]
const FOUND_BY: &[(&str, fn())] = &[
    ("order-without-index", order::tests::an_order_is_for_one_job_alone),
    ("order-outdone-by-less", outstanding::tests::an_order_reaches_the_job_that_runs_and_never_the_next),
    ("order-carried-out-twice", outstanding::tests::an_order_reaches_the_job_that_runs_and_never_the_next),
    ("shield-against-the-end", outstanding::tests::a_shield_keeps_off_orders_but_for_the_end_of_a_jobs_time),
    ("shield-outlives-its-job", outstanding::tests::a_shield_keeps_off_orders_but_for_the_end_of_a_jobs_time),
    ("limit-not-armed-again", outstanding::tests::a_job_is_looked_at_when_its_limit_can_be_over_and_others_never),
    ("limit-from-the-hand-out", outstanding::tests::a_job_is_looked_at_when_its_limit_can_be_over_and_others_never),
    ("remind-never", limits::tests::a_job_is_warned_then_stopped_then_condemned_each_in_its_time),
    ("cancel-gains-time", limits::tests::a_cancelled_job_gains_no_time_by_its_limit),
    ("kill-after-the-grace", limits::tests::a_job_that_is_to_be_killed_has_no_time),
    ("kill-when-others-are-due", outstanding::tests::a_job_that_is_to_be_killed_is_looked_at_at_once),
    ("alarm-too-late", limits::tests::a_place_is_looked_at_at_the_earliest_of_its_times_and_once),
    ("claim-a-former-packet", outstanding::tests::a_packet_that_was_pulled_and_not_claimed_runs_once),
    ("begin-what-was-taken-back", page::tests::what_was_taken_back_can_not_be_claimed_or_begun),
    ("take-back-what-has-begun", outstanding::tests::what_a_child_ran_has_ended_what_it_began_is_charged_and_the_rest_comes_back),
    ("closing-ignored-mid-packet", outstanding::tests::a_child_that_is_closed_in_the_midst_of_a_packet_begins_nothing_more),
    ("close-the-successor", page::tests::a_child_is_closed_alone_and_a_new_one_of_its_number_is_not),
    ("fault-of-the-one-before", page::tests::a_fault_is_of_the_child_s_own_packets_or_of_none),
    ("fault-of-anybody", page::tests::a_fault_is_of_the_child_s_own_packets_or_of_none),
    ("admission-counts-twice", supervisor::admission::tests::memory_that_a_job_has_taken_is_not_reserved_for_it_any_more),
    ("kill-explains-two-deaths", memory::tests::a_kill_explains_one_death_and_an_old_one_none),
    ("grow-old-together", supervisor::recycle::tests::processes_of_one_moment_grow_old_at_different_times),
    ("resume-beyond-the-slots", policy::tests::a_job_that_waits_lends_its_slot_and_has_one_back_before_any_job_begins),
    ("order-for-a-settled-job", inbox::tests::an_order_to_stop_a_job_is_for_the_one_that_holds_it),
];

#[test]
fn every_planted_bug_of_the_worker_is_found() {
    for plant in PLANTS.iter().filter(|plant| plant.finder == Finder::Worker) {
        let found_by = FOUND_BY.iter().find(|(name, _)| *name == plant.name);
        let (_, test) = found_by.unwrap_or_else(|| panic!("no test is to find {}", plant.name));
        assert!(
            is_found_by(plant.name, test),
            "{} was not found",
            plant.name
        );
    }
}
