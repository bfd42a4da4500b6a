"""Semantics of workflows, case by case: each runs with a broker and a worker, and inline.

The numbers are those of the design's list of cases. Cases 1 to 24, 26 to 29, 31, 32, 36, 38 and 39 are here.
The others:

- 25, repeating a step that has succeeded: not offered.
- 30, 37 and 40, groups sent in several transactions: test_large_groups.py.
- 33, `penstock why`: not offered yet.
- 34, members that no worker ends: left out until requested.
- 35, a failed job that is forgotten: not visible from Python.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from project import eventually
from workflows.flow_shop import TASKS, FlowShop

import penstock
from penstock import Failure, GroupError, JobCancelled, JobState, ResultTimeout, chain, chord, group


def names(failures):
    return [(failure.type_name, failure.message) for failure in failures]


class TestEmptyAndSmallGroups:
    def test_1_an_empty_group_succeeds_at_once_with_an_empty_list(self, shop):
        workflow = group([]).delay()
        assert workflow.result() == []
        assert list(workflow.results()) == []
        assert workflow.state() is JobState.SUCCEEDED and workflow.done()
        assert len(workflow) == 0 and list(workflow) == [] and list(workflow.as_completed()) == []
        assert workflow.partial() == penstock.PartialResults(0, 0, 0, {})
        workflow.cancel()

    def test_2_the_body_of_a_chord_without_members_gets_an_empty_list(self, shop):
        assert shop.run(chord([], shop.show.s())) == "[]"
        assert shop.run(group([]) | shop.show.s() | shop.show.s()) == "'[]'"
        assert shop.run(group([]) | group(shop.show.s(), shop.total.s())) == ["[]", 0]
        assert shop.run(shop.add.s(1, 2) | chord([], shop.show.s())) == "[]"
        assert shop.run(chord([], shop.simply_note.si("ran"))) == "ran"
        assert shop.run(shop.add.s(1, 2) | chord([], shop.show.s() | shop.show.s("x"))) == "'[]', 'x'"
        assert shop.run(shop.add.s(1, 2) | chord([], group(shop.show.s(), shop.total.s()))) == ["[]", 0]

    def test_3_an_empty_group_inside_a_chain_is_skipped(self, shop):
        assert shop.run(shop.add.s(1, 2) | group([]) | shop.show.s()) == "3"
        assert shop.run(chain(shop.add.s(1, 2), group([]))) == 3
        assert chain(group([]), group([]), chain(group([]))).delay().result() == []
        assert shop.run(group(shop.add.s(1, 2)) | group(chain(group([]), shop.show.s()))) == ["[3]"]

    def test_3_an_empty_group_in_a_group_has_an_empty_list_in_its_place(self, shop):
        assert shop.run(group(group([]), shop.add.s(1, 1))) == [[], 2]
        assert shop.run(group(shop.add.s(1, 1), group([]), group(group([]))) | shop.show.s()) == "[2, [], [[]]]"
        assert shop.run(shop.add.s(1, 2) | group(group([]), shop.add.s(1)) | shop.show.s()) == "[[], 4]"
        assert shop.run(group(shop.add.s(1, 1)) | group(group([]), group([group([])]))) == [[], [[]]]
        assert shop.run(shop.add.s(1, 2) | group(group([])) | shop.show.s()) == "[[]]"
        assert shop.run(group(chord([], shop.show.s()), shop.add.s(1, 1))) == ["[]", 2]
        assert shop.run(group([group([]), shop.fail.s()], max_failures=1))[0] == []
        assert group(group([]), chain(group([group([])]))).delay().result() == [[], [[]]]

    def test_3_nothing_is_taken_for_done_before_what_an_empty_group_comes_after(self, shop):
        with pytest.raises(GroupError, match="no paper"):
            shop.run(shop.fail.s() | group(group([])) | shop.note.s())
        with pytest.raises(GroupError, match="no paper"):
            shop.run(group(shop.fail.s()) | group(group([]), group([])))
        assert shop.notes() == []

    def test_3_a_step_of_a_graph_may_be_empty(self, shop):
        graph = penstock.graph()
        graph.add("first", shop.add.s(1, 1))
        graph.add("none", group([]), needs=["first"])
        graph.add("list", shop.show.s(), needs=["none", "first"])
        assert shop.run(graph) == {"list": "[], 2"}

    def test_4_a_group_of_one_has_a_list_of_one(self, shop):
        assert shop.run(group(shop.add.s(1, 2))) == [3]
        assert shop.run(group(shop.add.s(1, 2)) | shop.show.s()) == "[3]"
        assert shop.run(shop.add.s(1, 2) | group(shop.add.s(3)) | shop.show.s()) == "[6]"


class TestShape:
    def test_5_a_group_in_a_group_is_a_list_in_a_list(self, shop):
        rows = group(group(shop.add.s(row, column) for column in range(2)) for row in range(3))
        assert shop.run(rows) == [[0, 1], [1, 2], [2, 3]]
        assert shop.run(rows | shop.show.s()) == "[[0, 1], [1, 2], [2, 3]]"
        deep = group(group(group(shop.add.s(1, 1))), shop.add.s(1, 2))
        assert shop.run(deep) == [[[2]], 3]
        tail = group(shop.add.s(1, 2) | group(shop.add.s(1), shop.add.s(2)), shop.add.s(0, 0))
        assert shop.run(tail) == [[4, 5], 0]
        assert shop.run(tail | shop.show.s()) == "[[4, 5], 0]"

    def test_6_each_member_of_a_group_after_a_group_gets_the_whole_list(self, shop):
        both = group(shop.add.s(1, 1), shop.add.s(2, 2)) | group(shop.total.s(), shop.show.s(), shop.add.si(5, 5))
        assert shop.run(both) == [6, "[2, 4]", 10]
        assert shop.run(both | shop.show.s()) == "[6, '[2, 4]', 10]"

    def test_7_chords_stand_in_chains_and_chains_in_groups(self, shop):
        header = group(shop.add.si(1, 1) | shop.add.s(10), shop.add.si(2, 2) | shop.add.s(20) | shop.add.s(100))
        assert shop.run(shop.add.s(0, 0) | shop.show.s() | (header | shop.total.s()) | shop.add.s(1)) == 137
        assert shop.run(group(header | shop.total.s(), shop.add.s(1, 1)) | shop.total.s()) == 138
        nested = chord([chord([shop.add.s(1, 1)], shop.total.s()), shop.add.s(2, 2)], shop.total.s())
        assert shop.run(nested | shop.add.s(1)) == 7

    def test_async_tasks_are_steps_as_well(self, shop):
        assert shop.run(group(shop.aadd.s(1, 1), shop.add.s(2, 2)) | shop.ashow.s()) == "[2, 4]"

    def test_si_takes_no_result(self, shop):
        assert shop.run(shop.add.s(1, 2) | shop.add.si(5, 6) | shop.show.s("x")) == "11, 'x'"

    def test_the_result_is_the_first_argument_before_those_of_the_step(self, shop):
        assert shop.run(shop.add.s(1, 2) | shop.show.s("b", "c")) == "3, 'b', 'c'"
        assert shop.run(shop.add.s(1, 2) | shop.note.s(label="kept")) == "kept"

    def test_results_that_a_task_does_not_store_are_there_for_the_next_step(self, shop):
        assert shop.run(shop.quiet.s(1) | shop.quiet.s() | shop.show.s()) == "3"
        assert shop.run(group(shop.quiet.s(1), shop.quiet.s(2)) | shop.total.s()) == 5

    def test_values_of_the_application_s_own_classes_travel(self, shop):
        assert shop.run(shop.make_order.s(7) | shop.number_of.s()) == 7
        assert shop.run(group(shop.make_order.s(7), shop.make_order.s(8))) == [shop.Order(7), shop.Order(8)]


class TestOptionsOfLaterSteps:
    def test_39_a_countdown_begins_when_the_step_may_run(self, shop):
        begun = time.monotonic()
        assert shop.run(shop.add.s(1, 2) | shop.show.s().options(countdown=0.3) | shop.show.s()) == "'3'"
        # Inline, countdowns are skipped.
        assert not shop.is_real or time.monotonic() - begun >= 0.3

    def test_39_an_expiry_counts_from_there_too(self, shop):
        slow = shop.add.s(1, 2).options(countdown=0.4)
        assert shop.run(slow | shop.show.s().options(expires=0.3)) == "3"

    def test_39_a_step_that_is_late_has_expired_which_is_a_failure(self, shop):
        late = shop.show.s().options(countdown=0.3, expires=0.05)
        with pytest.raises(GroupError, match=r"penstock\.JobExpired"):
            shop.run(shop.add.s(1, 2) | late | shop.note.s())
        assert shop.run(group([shop.add.s(1, 2) | late, shop.add.s(1, 1)], max_failures=1) | shop.lenient.s()) == (
            "penstock.JobExpired, 2"
        )
        past = datetime.now(UTC) - timedelta(hours=1)
        with pytest.raises((GroupError, penstock.JobExpired), match="expired"):
            shop.run(shop.add.s(1, 2) | shop.show.s().options(expires=past))
        assert shop.notes() == []

    def test_39_an_eta_that_is_past_does_not_hold_a_step_up(self, shop):
        past = datetime.now(UTC) - timedelta(hours=1)
        assert shop.run(shop.add.s(1, 2) | shop.show.s().options(eta=past)) == "3"
        soon = datetime.now(UTC) + timedelta(seconds=0.3)
        assert shop.run(shop.add.s(1, 2) | shop.show.s().options(eta=soon)) == "3"
        assert not shop.is_real or datetime.now(UTC) >= soon

    def test_39_an_errback_may_wait_as_well(self, shop):
        with pytest.raises(shop.OutOfPaper):
            shop.run(shop.fail.s().link_error(shop.caught.s().options(countdown=0.05)))
        assert shop.wait_for_notes(1) == ["caught: flow_tasks.OutOfPaper: no paper"]


class TestDeadlines:
    def test_29_nothing_starts_after_the_deadline_but_errbacks_do(self, shop):
        past = datetime.now(UTC) - timedelta(hours=1)
        for deadline in [past, 0, timedelta(0)]:
            shop.clear()
            steps = shop.simply_note.s("first") | shop.note.s()
            workflow = steps.link_error(shop.caught.s()).delay(deadline=deadline)
            with pytest.raises(JobCancelled, match="the deadline of its workflow has passed"):
                workflow.result(shop.patience_s)
            assert shop.wait_for_notes(1) == ["caught: penstock.JobCancelled: the deadline of its workflow has passed"]
            assert workflow.state() is JobState.CANCELLED
        with pytest.raises(GroupError, match=r"penstock\.JobCancelled: .*the deadline of its workflow has passed"):
            group(shop.add.s(1, 1), shop.add.s(2, 2)).delay(deadline=0).result(shop.patience_s)

    def test_29_what_ends_in_time_is_as_any_other(self, shop):
        for deadline in [3600, timedelta(days=3), datetime.now(UTC) + timedelta(hours=1)]:
            workflow = (group(shop.add.s(1, 1), shop.add.s(2, 2)) | shop.total.s()).delay(deadline=deadline)
            assert workflow.result(shop.patience_s) == 6
            assert workflow.status().deadline > datetime.now(UTC) + timedelta(minutes=50)
        assert group([]).delay(deadline=0).result(shop.patience_s) == []

    def test_29_a_job_knows_the_deadline_of_its_workflow(self, shop):
        workflow = (shop.until.s() | shop.until.s()).delay(deadline=3600)
        workflow.result(shop.patience_s)
        deadline = workflow.status().deadline.timestamp()
        # The broker's clock, which never steps, and the wall clock may differ by a millisecond.
        assert [job.result() for job in workflow] == [pytest.approx(deadline, abs=0.01)] * 2
        at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
        assert shop.run(chain(group(shop.until.s()))) == [None]
        assert group(shop.until.s()).delay(deadline=at).result(shop.patience_s) == [at.timestamp()]
        assert shop.run(shop.until.s()) is None

    def test_29_a_job_that_replaces_another_one_or_is_spawned_knows_it_too(self, shop):
        at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
        steps = group(shop.replaced.s("until", 1), shop.replaced.s("untils", 1), shop.sends_until.s())
        assert steps.delay(deadline=at).result(shop.patience_s) == [
            at.timestamp(),
            [at.timestamp()] * 2,
            at.timestamp(),
        ]

    @pytest.mark.parametrize(
        ("deadline", "error", "says"),
        [
            (-1, ValueError, "deadline must be between 0 seconds and 100 years"),
            ("soon", TypeError, "deadline must be seconds, a timedelta or a datetime"),
            (datetime(2030, 1, 1), ValueError, "deadline must have a time zone"),
        ],
    )
    def test_29_a_deadline_that_is_no_time_is_refused(self, shop, deadline, error, says):
        with pytest.raises(error, match=says):
            (shop.simply_note.s("first") | shop.note.s()).delay(deadline=deadline)
        assert shop.notes() == []


class TestReplacedJobs:
    def test_15_the_outcome_of_a_step_is_that_of_the_job_that_it_replaces(self, shop):
        assert shop.run(shop.replaced.s("call", 1)) == 101
        assert shop.run(shop.replaced.s("chain", 1)) == 1101
        assert shop.run(shop.replaced.s("chord", 1)) == 6
        assert shop.run(shop.areplaced.s("chain", 1)) == 1101
        assert shop.run(shop.replaced.s("again", 1)) == 101
        assert shop.run(shop.replaced.s("stumble", 1)) == 1
        assert shop.run(shop.replaced.s("later", 1)) == 101
        assert shop.run(shop.replaced.s("graph", 1)) == {"two": 3}
        assert shop.run(shop.replaced.s("linked", 1)) == 101

    def test_15_raising_is_as_good_as_returning(self, shop):
        assert shop.run(shop.replaced.s("chain", 1, raises=True)) == 1101
        assert shop.run(shop.areplaced.s("call", 1, raises=True)) == 101

    def test_15_a_job_keeps_its_id_and_is_waited_for_by_it(self, shop):
        if not shop.is_real:
            shop.touch("kept")
        job = shop.replaced.delay("wait", 1, "kept")
        if shop.is_real:
            shop.wait_for_notes(1)
            assert shop.app.job(job.id).info().state is JobState.RUNNING
            shop.touch("kept")
        assert job.result(shop.patience_s) == "kept"
        assert job.info().task == "flow_tasks.wait_for"

    def test_15_in_each_place_of_a_workflow(self, shop):
        for how, value in ("call", 103), ("chain", 1103), ("chord", 12):
            replaced = shop.replaced_after.s(how)
            assert shop.run(shop.add.s(1, 2) | replaced | shop.add.s(1)) == value + 1
            assert shop.run(shop.add.s(1, 2) | replaced) == value
            assert shop.run(replaced.task.s(3, how) | shop.show.s()) == repr(value)
            assert shop.run(group(shop.add.s(1, 2) | replaced, replaced.task.s(3, how)) | shop.show.s()) == (
                f"[{value}, {value}]"
            )
            assert shop.run(group(shop.add.s(1, 1), shop.add.s(0, 1)) | shop.total.s() | replaced) == value

    def test_15_a_body_is_replaced_and_has_its_callbacks(self, shop):
        body = shop.replaced_after.s("chain").link(shop.note.s("linked"))
        assert shop.run(chord([shop.add.s(1, 1), shop.add.s(0, 1)], shop.total.s() | body)) == 1103
        assert shop.wait_for_notes(1) == ["linked: 1103"]

    def test_15_its_failure_is_that_of_the_job(self, shop):
        with pytest.raises(shop.OutOfPaper, match="at last"):
            shop.run(shop.replaced.s("fail", 1))
        step = (shop.replaced_after.s(1, "fail") | shop.show.s()).link_error(shop.caught.s("chain"))
        with pytest.raises(GroupError, match="at last"):
            shop.run(step)
        assert shop.wait_for_notes(1) == ["chain: flow_tasks.OutOfPaper: at last"]

    def test_15_a_person_retries_what_has_replaced_a_job(self, shop):
        workflow = (shop.replaced_after.s(1, "fail once", f"once-{shop.is_real}") | shop.show.s()).delay()
        with pytest.raises(GroupError):
            workflow.result(shop.patience_s)
        workflow.retry_failed()
        assert workflow.result(shop.patience_s) == "'1'"

    def test_15_a_result_that_nobody_reads_is_not_stored(self, shop):
        job = shop.quietly_replaced.delay(1)
        if shop.is_real:
            eventually(lambda: job.info().state is JobState.ENDED, shop.patience_s)
        with pytest.raises(penstock.PenstockError):
            job.result(0)

    def test_15_a_job_is_replaced_256_times_at_most(self, shop):
        with pytest.raises(RuntimeError, match="was replaced 256 times in a row"):
            shop.run(shop.replaced_for_ever.s())

    def test_15_a_replacement_that_is_not_returned_is_not_sent(self, shop, caplog):
        assert shop.run(shop.not_returned.s(7)) == 7
        assert shop.notes() == []
        if not shop.is_real:  # a worker writes it to its own log
            assert "called app.replace() and returned something else" in caplog.text

    def test_15_outside_of_a_job_there_is_nothing_to_replace(self, shop):
        with pytest.raises(RuntimeError, match="no job runs here"):
            shop.app.replace(shop.add.s(1, 2))

    def test_15_the_cancelling_of_a_workflow_reaches_what_has_replaced_a_job(self, shop):
        if not shop.is_real:
            pytest.skip("inline all has happened when delay returns")
        workflow = (shop.replaced_after.s(1, "wait", "never") | shop.note.s()).delay()
        shop.wait_for_notes(1)
        assert "running" in str(workflow.status())
        workflow.cancel()
        with pytest.raises(JobCancelled):
            workflow.result(shop.patience_s)
        shop.touch("never")
        eventually(lambda: workflow.status().jobs.running == 0, shop.patience_s)
        assert shop.notes() == ["waits for never"]

    @pytest.mark.parametrize("whole", [False, True], ids=["job", "workflow"])
    def test_15_the_cancelling_of_a_job_reaches_the_group_in_its_place(self, shop, whole):
        if not shop.is_real:
            pytest.skip("inline all has happened when delay returns")
        job = shop.replaced.delay("waits", 1, f"never-{whole}")
        shop.wait_for_notes(1)
        workflow = shop.app.workflow(job.id)
        if whole:
            workflow.cancel("enough")
        else:
            assert job.cancel("enough") is JobState.CANCELLING
        with pytest.raises(GroupError, match=r"JobCancelled: .*enough"):
            job.result(shop.patience_s)
        eventually(lambda: workflow.status().ended_at is not None, shop.patience_s)
        assert workflow.status().jobs.cancelled == 2
        steps = (shop.replaced.s("waits", 1, f"never-{whole}") | shop.note.s()).delay()
        shop.wait_for_notes(2)
        if whole:
            steps.cancel("enough")
        else:
            steps[0].cancel("enough")
        with pytest.raises(JobCancelled if whole else GroupError, match="enough"):
            steps.result(shop.patience_s)
        eventually(lambda: steps.status().jobs.running == 0, shop.patience_s)
        assert shop.notes() == [f"waits for never-{whole}"] * 2

    def test_16_the_values_of_a_group_are_the_result_of_the_job(self, shop):
        assert shop.run(shop.replaced.s("group", 1)) == [1, 2, 3]
        assert shop.run(shop.replaced.s("hollow", 1)) == [[], 2]
        assert shop.run(shop.replaced_after.s(1, "group") | shop.total.s()) == 6
        assert shop.run(shop.add.s(0, 1) | shop.replaced_after.s("group") | shop.total.s()) == 6
        assert shop.run(group(shop.replaced.s("group", 1), shop.add.s(1, 1)) | shop.show.s()) == "[[1, 2, 3], 2]"
        assert shop.run(shop.add.s(0, 1) | shop.replaced_after.s("group")) == [1, 2, 3]

    def test_17_an_empty_group_is_as_returning_an_empty_list(self, shop):
        assert shop.run(shop.replaced.s("nothing", 1)) == []
        assert shop.run(shop.replaced.s("nothing", 1, raises=True)) == []
        assert shop.run(shop.replaced_after.s(1, "nothing") | shop.show.s()) == "[]"
        assert shop.run(group(shop.replaced.s("nothing", 1)) | shop.show.s()) == "[[]]"


class TestSpawnedSteps:
    def test_18_a_spawned_step_runs_once_its_job_has_succeeded(self, shop):
        assert shop.run(shop.spawner.s("one")) == "one"
        assert shop.wait_for_notes(1) == ["note: 'one'"]
        assert shop.run(shop.spawner.s("two", "chain")) == "two"
        assert shop.wait_for_notes(3)[1:] == ["two", "after: 'two'"]

    def test_18_an_attempt_that_fails_leaves_nothing_behind(self, shop):
        assert shop.run(shop.spawns_and_stumbles.s("attempt")) == "attempt"
        assert shop.wait_for_notes(1) == ["attempt 2"]

    def test_18_a_job_spawns_steps_and_is_replaced(self, shop):
        assert shop.run(shop.spawns_and_is_replaced.s("both")) == 3
        assert shop.wait_for_notes(1) == ["both"]

    def test_18_a_step_that_is_sent_at_once_is_sent_once_for_all_attempts(self, shop):
        said = ["again"] * 2 + ["again first", "again member", "again member", "again then: 'again first'"]
        job = shop.sends_now.delay("again", fails=1)
        one, other, chained, together, nothing = job.result(shop.patience_s)
        assert one != other and nothing == ""
        assert [shop.app.job(each).result(shop.patience_s) for each in (one, other)] == ["again"] * 2
        assert shop.app.workflow(chained).result(shop.patience_s) == "again then"
        assert shop.app.workflow(together).result(shop.patience_s) == ["again member"] * 2
        assert sorted(shop.notes()) == said

    def test_18_it_stays_sent_when_the_job_fails_and_is_not_sent_by_a_person_s_retry(self, shop):
        with pytest.raises(shop.OutOfPaper):
            (job := shop.sends_now.delay("fails", fails=2)).result(shop.patience_s)
        assert len(shop.wait_for_notes(6)) == 6
        shop.app.failed(id=job.id).retry()
        one, *_ = job.result(shop.patience_s)
        assert shop.app.job(one).result(shop.patience_s) == "fails"
        shop.run(shop.simply_note.s("end"))
        assert len(shop.notes()) == 7

    def test_18_it_belongs_to_the_workflow_of_its_job_and_can_be_waited_for(self, shop):
        assert shop.run(shop.waits_for_what_it_sends.s())[:2] == [None, None]
        workflow = (shop.add.si(1, 1) | shop.waits_for_what_it_sends.si()).delay()
        assert workflow.result(shop.patience_s) == [workflow.id, workflow.id, [workflow.id]]
        assert workflow.status().jobs.succeeded == 4
        assert shop.run(shop.asends_now.s("awaited")) == ["awaited", ["awaited"]]

    def test_18_what_replaces_a_job_sends_its_own(self, shop):
        assert shop.run(shop.sends_and_is_replaced.s(2)) == "over"
        assert sorted(shop.wait_for_notes(3)) == ["0 left", "1 left", "2 left"]

    def test_18_a_step_of_another_broker_is_refused(self, shop):
        with pytest.raises(ValueError, match="whose broker is the job's own"):
            shop.run(shop.sends_elsewhere.s("local:elsewhere"))

    def test_18_outside_of_a_job_nothing_is_spawned(self, shop):
        job = penstock.CurrentJob("id", "task", 1, 0, False, None, "worker")
        for now in False, True:
            with pytest.raises(RuntimeError, match="only while it runs, from its own process"):
                job.spawn(shop.add.s(1, 2), now=now)

    def test_18_the_workflow_ends_after_it_and_the_body_does_not_wait(self, shop):
        name = "loose"
        if not shop.is_real:
            shop.touch(name)
        workflow = (group(shop.spawns_a_waiter.s(name)) | shop.show.s()).delay()
        assert workflow.result(shop.patience_s) == f"['{name}']"
        if shop.is_real:
            shop.wait_for_notes(1)
            assert workflow.status().ended_at is None
            shop.touch(name)
        eventually(lambda: workflow.status().ended_at is not None, shop.patience_s)
        assert workflow.status().jobs.succeeded == 3


class TestNewMembers:
    def test_18_a_member_adds_others_which_add_others(self, shop):
        workflow = group(shop.grows.s("a", 2), shop.simply_note.s("b")).delay()
        values = workflow.result(shop.patience_s)
        assert values[:4] == ["a", "b", "a.0", "a.1"]
        assert sorted(values[4:]) == ["a.0.0", "a.1.0"]
        assert list(workflow.results(shop.patience_s)) == values
        assert workflow.status().jobs.succeeded == 6

    def test_18_the_body_waits_for_a_new_member_and_gets_its_value_last(self, shop):
        assert shop.run(group(shop.grows.s("c"), shop.add.s(1, 2)) | shop.show.s()) == "['c', 3, 'c.0']"
        assert shop.run(group(shop.grows.s("q", 1, "quiet")) | shop.show.s()) == "['q', 6]"

    def test_18_a_new_member_may_be_a_chain_or_a_group(self, shop):
        # The first attempt fails, and adds nothing.
        assert shop.run(group(shop.grows.s("d", 1, "chain"))) == ["d", "'d first'"]
        assert shop.notes() == ["d first"]
        assert shop.run(group(shop.grows.s("e", 1, "group"))) == ["e", ["e", "e"]]
        assert shop.run(group(shop.grows.s("f", 2, "linked"))) == ["f", "f", "f"]
        assert shop.run(group(shop.grows.s("g", 1, "empty"))) == ["g"]

    def test_18_a_member_with_callbacks_adds_others(self, shop):
        linked = shop.grows.s("h").link(shop.note.s("link"))
        assert shop.run(group(linked)) == ["h", "h.0"]
        assert shop.run(group(linked, shop.add.s(1, 1)) | shop.show.s()) == "['h', 2, 'h.0']"
        assert shop.wait_for_notes(2) == ["link: 'h'", "link: 'h'"]

    def test_18_a_member_that_ends_a_chain_or_is_replaced_adds_others(self, shop):
        assert shop.run(group(shop.add.s(1, 1) | shop.grows.si("i"))) == ["i", "i.0"]
        assert shop.run(group(shop.grows_and_is_replaced.s("j"))) == ["3", 7]

    def test_18_a_new_member_that_fails_fails_the_group(self, shop):
        for workflow in group(shop.grows.s("k", 1, "fails")), group(shop.grows.s("k", 1, "fails")) | shop.show.s():
            with pytest.raises(penstock.GroupError) as caught:
                shop.run(workflow)
            assert [failure.task for failure in caught.value.failures] == ["flow_tasks.fail"]
        workflow = group(shop.grows.s("k", 1, "fails")).delay()
        first, second = workflow.results(shop.patience_s)
        assert (first, second.index, second.message) == ("k", 1, "no paper")

    def test_18_a_group_that_tolerates_failures_tolerates_those_of_new_members(self, shop):
        first, second = shop.run(group([shop.grows.s("l", 1, "fails")], max_failures=1))
        assert (first, type(second)) == ("l", penstock.Failure)

    @pytest.mark.parametrize("how", ["alone", "first in a chain", "first in a member", "in a graph", "body"])
    def test_18_a_job_that_is_not_itself_a_member_adds_nothing(self, shop, how):
        graph = penstock.graph("steps")
        graph.add("only", shop.grows.s("m"))
        step = {
            "alone": shop.grows.s("m"),
            "first in a chain": shop.grows.s("m") | shop.show.s(),
            "first in a member": group(shop.grows.s("m") | shop.show.s()),
            "in a graph": graph,
            "body": group(shop.add.s(1, 1)) | shop.grows.si("m"),
        }[how]
        workflow = step.delay()
        with pytest.raises((RuntimeError, penstock.GroupError), match="itself a member of a group"):
            workflow.result(shop.patience_s)

    def test_18_only_a_group_can_be_joined_and_not_at_once(self, shop):
        with pytest.raises(ValueError, match="into must be \"group\", not 'chain'"):
            shop.run(shop.grows_wrongly.s(into="chain"))
        with pytest.raises(ValueError, match="now=True does not fit"):
            shop.run(shop.grows_wrongly.s(into="group", now=True))


class TestFailures:
    def test_8_a_member_with_attempts_left_has_not_arrived(self, shop):
        assert shop.run(group(shop.stumble.s(5), shop.add.s(1, 1)) | shop.total.s()) == 7
        assert shop.notes() == ["attempt 1", "attempt 2", "attempt 3"]

    def test_8_a_step_that_is_retried_gets_the_same_value_again(self, shop):
        assert shop.run(shop.add.s(1, 2) | shop.stumble.s() | shop.add.s(1)) == 4
        assert shop.notes() == ["attempt 1", "attempt 2", "attempt 3"]

    def test_9_a_failed_member_blocks_the_body_and_the_others_go_on(self, shop):
        workflow = (group(shop.fail.s(1), shop.simply_note.s("other")) | shop.note.s()).delay()
        with pytest.raises(
            GroupError, match=r"a job has failed: job .* \(flow_tasks.fail\): .*OutOfPaper: no paper"
        ) as e:
            workflow.result(shop.patience_s)
        assert (e.value.failed, names(e.value.failures)) == (1, [("flow_tasks.OutOfPaper", "no paper")])
        assert isinstance(e.value.__cause__, shop.OutOfPaper)
        assert e.value.failures[0].job_id == workflow[0].id
        assert shop.wait_for_notes(1) == ["other"]
        assert workflow[1].result(shop.patience_s) == "other"
        assert workflow.state() is JobState.FAILED
        body = shop.app.job(workflow.id)
        assert body.info().state is JobState.BLOCKED
        with pytest.raises(GroupError, match="no paper"):
            body.result(shop.patience_s)

    def test_9_a_failed_group_names_its_members(self, shop):
        workflow = group(shop.add.s(1, 1), shop.fail.s(why="no ink")).delay()
        with pytest.raises(GroupError, match=r"member 1, job .*no ink") as e:
            workflow.result(shop.patience_s)
        assert [failure.index for failure in e.value.failures] == [1]
        results = workflow.results(shop.patience_s)
        assert results[0] == 2 and names(results.failures()) == [("flow_tasks.OutOfPaper", "no ink")]
        assert results.ok() == [2]

    def test_9_a_chain_ends_at_its_first_failed_step(self, shop):
        workflow = (shop.add.s(1, 2) | shop.fail.s() | shop.note.s() | shop.note.s()).delay()
        with pytest.raises(GroupError, match="no paper") as e:
            workflow.result(shop.patience_s)
        assert e.value.failures[0].job_id == workflow[1].id
        with pytest.raises(shop.OutOfPaper):
            workflow[1].result(shop.patience_s)
        assert shop.notes() == []

    def test_10_failures_that_a_group_puts_up_with_are_in_their_places(self, shop):
        members = [shop.add.s(1, 1), shop.fail.s(), shop.fail.s() | shop.add.s(1), shop.add.s(2, 2)]
        workflow = group(members, max_failures=2).delay()
        first, second, third, fourth = workflow.result(shop.patience_s)
        assert (first, fourth) == (2, 4)
        assert isinstance(second, Failure) and isinstance(third, Failure)
        assert (second.index, third.index, second.task) == (1, 2, "flow_tasks.fail")
        assert isinstance(third.exception(), shop.OutOfPaper) and "in fail" in third.traceback
        assert shop.run(group(members, max_failures=2) | shop.lenient.s()) == (
            "2, flow_tasks.OutOfPaper, flow_tasks.OutOfPaper, 4"
        )
        with pytest.raises(GroupError, match="2 jobs have failed"):
            shop.run(group(members, max_failures=1))

    def test_11_an_expired_member_has_failed(self, shop):
        late = shop.add.s(1, 1).options(expires=0.05, countdown=0.2)
        with pytest.raises(GroupError, match=r"penstock.JobExpired"):
            shop.run(group(late, shop.add.s(2, 2)) | shop.total.s())
        assert shop.run(group([late, shop.add.s(2, 2)], max_failures=1) | shop.lenient.s()) == "penstock.JobExpired, 4"

    def test_19_a_body_that_fails_is_an_ordinary_failed_job(self, shop):
        workflow = (group(shop.add.s(1, 1)) | shop.fail.s()).link_error(shop.caught.s()).delay()
        with pytest.raises(shop.OutOfPaper, match="no paper"):
            workflow.result(shop.patience_s)
        assert shop.wait_for_notes(1) == ["caught: flow_tasks.OutOfPaper: no paper"]
        assert workflow.state() is JobState.FAILED

    def test_19_a_body_that_a_person_retries_gets_the_same_list_again(self, shop):
        workflow = (group(shop.add.s(1, 1), shop.add.s(2, 2)) | shop.fail_first.s(f"again {shop.is_real}")).delay()
        with pytest.raises(shop.OutOfPaper, match=r"\[2, 4\]"):
            workflow.result(shop.patience_s)
        shop.app.failed(id=workflow.id).retry()
        assert workflow.result(shop.patience_s) == "[2, 4]"

    def test_a_result_that_does_not_fit_the_next_step_is_named(self, shop):
        with pytest.raises(
            penstock.ArgumentMismatch, match=r"the result of the step before .* values must be list\[int\]"
        ):
            shop.run(shop.show.s(1) | shop.total.s())


class TestCallbacks:
    def test_20_a_callback_runs_after_success_and_changes_nothing(self, shop):
        linked = shop.add.s(1, 2).link(shop.note.s()).link(shop.fail.s())
        assert shop.run(linked) == 3
        assert shop.wait_for_notes(1) == ["note: 3"]
        assert shop.run(linked | shop.show.s()) == "3"
        assert shop.run(group(linked, shop.add.s(1, 1))) == [3, 2]
        assert shop.run(group(linked, shop.add.s(1, 1)) | shop.total.s()) == 5
        assert shop.run(group(linked)) == [3]
        assert shop.wait_for_notes(5) == ["note: 3"] * 5

    def test_20_a_callback_of_a_group_gets_the_list(self, shop):
        linked = group(shop.add.s(1, 1), shop.add.s(2, 2)).link(shop.note.s())
        assert shop.run(linked) == [2, 4]
        assert shop.run(linked | shop.total.s()) == 6
        assert shop.run(shop.add.s(1, 2) | group(shop.add.s(1)).link(shop.note.s())) == [4]
        assert sorted(shop.wait_for_notes(3)) == ["note: [2, 4]", "note: [2, 4]", "note: [4]"]
        chained = (shop.add.s(1, 1) | group(shop.add.s(1), shop.add.s(2))).link(shop.note.s())
        assert shop.run(chained | shop.show.s()) == "[3, 4]"
        assert shop.wait_for_notes(4)[3] == "note: [3, 4]"

    def test_20_a_callback_may_be_a_chain_and_may_take_nothing(self, shop):
        assert shop.run(shop.add.s(1, 2).link(shop.add.s(1) | shop.note.s()).link(shop.simply_note.si("also"))) == 3
        assert sorted(shop.wait_for_notes(2)) == ["also", "note: 4"]

    def test_21_an_errback_runs_once_for_its_unit(self, shop):
        no_paper = "caught: flow_tasks.OutOfPaper: no paper"
        jobs = [
            shop.fail.s().link_error(shop.caught.s()),
            (shop.add.s(1, 2) | shop.fail.s() | shop.add.s(1) | shop.add.s(1)).link_error(shop.caught.s()),
            (group(shop.add.s(1, 2), shop.fail.s()) | shop.total.s()).link_error(shop.caught.s()),
            group(shop.fail.s().link_error(shop.caught.s()), shop.add.s(1, 1)),
            shop.add.s(1, 1) | shop.fail.s().link_error(shop.caught.s()) | shop.note.s(),
        ]
        for number, job in enumerate(jobs, 1):
            with pytest.raises((GroupError, shop.OutOfPaper)):
                shop.run(job)
            assert shop.wait_for_notes(number) == [no_paper] * number

    def test_21_a_group_s_errback_gets_one_failure_for_all(self, shop):
        with pytest.raises(GroupError):
            shop.run(group([shop.fail.s(), shop.fail.s()], max_failures=1).link_error(shop.caught.s()))
        (line,) = shop.wait_for_notes(1)
        # Members are listed in the order in which they failed.
        assert re.match(
            r"caught: penstock.GroupError: 2 jobs have failed: member [01], job .*; member [01], job ", line
        )

    def test_21_each_failed_member_can_have_its_own(self, shop):
        members = group([shop.fail.s(), shop.add.s(1, 1), shop.fail.s(why="no ink")], max_failures=2)
        assert shop.run(members.link_error(shop.caught.s(), each=True))[1] == 2
        said = ["caught: flow_tasks.OutOfPaper: no ink", "caught: flow_tasks.OutOfPaper: no paper"]
        assert sorted(shop.wait_for_notes(2)) == said

    def test_21_an_errback_by_si_takes_nothing(self, shop):
        with pytest.raises(shop.OutOfPaper):
            shop.run(shop.fail.s().link_error(shop.simply_note.si("failed")))
        assert shop.wait_for_notes(1) == ["failed"]

    def test_22_an_errback_that_is_not_needed_leaves_nothing(self, shop):
        failed = shop.app.failed().count()
        assert shop.run((shop.add.s(1, 2) | shop.add.s(3)).link_error(shop.caught.s())) == 6
        assert shop.run(group(shop.add.s(1, 2)).link_error(shop.caught.s()) | shop.show.s()) == "[3]"
        assert shop.notes() == []
        assert shop.app.failed().count() == failed

    def test_23_an_errback_that_fails_is_a_failed_job(self, shop):
        with pytest.raises(shop.OutOfPaper):
            shop.run(shop.fail.s().link_error(shop.caught_badly.s().link_error(shop.caught.s())))
        assert shop.wait_for_notes(2) == ["caught badly", "caught: flow_tasks.OutOfPaper: in the errback"]
        assert shop.app.failed(task="flow_tasks.caught_badly").count() >= 1

    def test_callbacks_of_an_empty_group_run_with_an_empty_list(self, shop):
        assert group([]).link(shop.note.s()).link_error(shop.caught.s()).delay().result() == []
        assert shop.wait_for_notes(1) == ["note: []"]


class TestRetryingWhatHasFailed:
    def test_24_a_chord_goes_on_when_its_failed_members_are_retried(self, shop):
        members = [shop.fail_first.s(number, f"24 {number} {shop.is_real}") for number in range(2)]
        workflow = (group(shop.simply_note.s("once"), *members) | shop.show.s()).link_error(shop.caught.s()).delay()
        with pytest.raises(GroupError):
            workflow.result(shop.patience_s)
        assert len(list(workflow.as_completed(shop.patience_s))) == 3
        assert len(shop.wait_for_notes(2)) == 2
        assert workflow.retry_failed() == 2
        assert workflow.result(shop.patience_s) == "['once', '0', '1']"
        assert workflow.state() is JobState.SUCCEEDED
        # Neither the member that had succeeded nor the errback ran again.
        assert [line.split(":")[0] for line in sorted(shop.notes())] == ["caught", "once"]
        assert workflow.retry_failed() == 0

    def test_24_one_failed_job_of_any_kind_of_workflow_is_retried(self, shop):
        def first(name):
            return shop.fail_first.s("x", f"24 {name} {shop.is_real}")

        expected = {
            "chain": (first("chain") | shop.show.s() | shop.show.s(), repr(repr(repr("x")))),
            "group": (group(first("group"), shop.add.s(1, 1)), ["'x'", 2]),
            "nested": (group(group(first("nested")), shop.add.s(1, 1)) | shop.show.s(), repr([["'x'"], 2])),
            "groups": (group(first("groups")) | group(shop.show.s(), shop.show.s()) | shop.show.s(), None),
            "linked": (group(first("linked").link(shop.note.s()).link_error(shop.caught.s())), ["'x'"]),
        }
        for name, (step, result) in expected.items():
            workflow = step.delay()
            with pytest.raises(GroupError):
                workflow.result(shop.patience_s)
            (failed,) = shop.app.failed(workflow=workflow)
            failed.retry()
            assert workflow.result(shop.patience_s) == (result or repr([repr(["'x'"])] * 2)), name
        assert sorted(shop.wait_for_notes(2)) == [
            "caught: flow_tasks.OutOfPaper: 'x'",
            "note: \"'x'\"",
        ]

    def test_24_a_member_that_fails_again_fails_its_workflow_again(self, shop):
        workflow = (shop.fail.s() | shop.show.s()).delay()
        for _ in range(3):
            with pytest.raises(GroupError, match="no paper"):
                workflow.result(shop.patience_s)
            assert workflow.retry_failed() == 1
        with pytest.raises(GroupError, match="no paper"):
            workflow.result(shop.patience_s)


class TestWithARealWorker:
    @pytest.fixture
    def shop(self, real):
        real.clear()
        return real

    def test_9_and_13_a_body_runs_once(self, shop):
        assert shop.run(group(shop.add.s(i, i) for i in range(300)) | shop.note.s(label="body")) == "body"
        assert shop.run(shop.add.s(1, 1)) == 2
        assert [line.partition(":")[0] for line in shop.notes()] == ["body"]

    def test_11_a_member_whose_process_dies_for_good_has_failed(self, shop):
        assert shop.run(group([shop.die.s(), shop.add.s(2, 2)], max_failures=1) | shop.lenient.s()) == (
            "penstock.WorkerCrashed, 4"
        )

    def test_12_a_member_whose_process_died_runs_again(self, shop):
        assert shop.run(group(shop.die_once.s("died-12"), shop.add.s(1, 1)) | shop.total.s()) == 3

    def test_14_results_are_kept_until_the_body_has_them(self, shop):
        gone = shop.add.s(1, 1).options(result_ttl=0.05)
        workflow = (group(gone, shop.wait_for.s("go-14")) | shop.show.s()).delay()
        shop.wait_for_notes(1)
        eventually(lambda: workflow[0].done())
        other = shop.add.options(result_ttl=0.05).delay(1, 1)
        eventually(lambda: other.info().state is JobState.ENDED)
        shop.touch("go-14")
        assert workflow.result(shop.patience_s) == "[2, 'go-14']"

    def test_26_a_cancelled_member_has_failed(self, shop):
        waits = shop.add.s(1, 1).options(countdown=600)
        workflow = (group([waits, shop.add.s(2, 2)], max_failures=1) | shop.lenient.s()).delay()
        assert workflow[0].cancel("not now") is JobState.DELAYED
        assert workflow.result(shop.patience_s) == "penstock.JobCancelled, 4"
        workflow = group(waits, shop.add.s(2, 2)).delay()
        workflow[0].cancel("not now")
        with pytest.raises(GroupError, match=r"penstock.JobCancelled: .*not now"):
            workflow.result(shop.patience_s)

    def test_27_a_cancelled_workflow_starts_no_more_jobs(self, shop):
        delayed = shop.simply_note.s("delayed").options(countdown=600)
        workflow = (group(shop.wait_for.s("never-27"), delayed) | shop.note.s(label="body")).delay()
        shop.wait_for_notes(1)
        workflow.cancel("the shop is closed")
        with pytest.raises(JobCancelled, match="the shop is closed"):
            workflow.result(shop.patience_s)
        for job in workflow:
            with pytest.raises(JobCancelled, match=r"the shop is closed|while it ran"):
                job.result(shop.patience_s)
        assert workflow.done() and shop.notes() == ["waits for never-27"]

    def test_28_a_member_that_succeeds_after_the_cancellation_keeps_its_result(self, shop):
        workflow = group(shop.wait_for.s("go-28"), shop.add.s(1, 1).options(countdown=600)).delay()
        shop.wait_for_notes(1)
        workflow.cancel(running="leave")
        shop.touch("go-28")
        assert workflow[0].result(shop.patience_s) == "go-28"
        with pytest.raises(GroupError, match="JobCancelled"):
            workflow.result(shop.patience_s)

    def test_29_a_workflow_that_has_not_ended_at_its_deadline_is_cancelled(self, shop):
        delayed = shop.simply_note.s("delayed").options(countdown=600)
        steps = group(shop.wait_for.s("never-29"), delayed) | shop.note.s(label="body")
        workflow = steps.link_error(shop.caught.s()).delay(deadline=timedelta(seconds=1))
        with pytest.raises(JobCancelled, match="the deadline of its workflow has passed"):
            workflow.result(shop.patience_s)
        for job in workflow:
            with pytest.raises(JobCancelled, match="the deadline of its workflow has passed"):
                job.result(shop.patience_s)
        caught = "caught: penstock.JobCancelled: the deadline of its workflow has passed"
        assert sorted(shop.wait_for_notes(2)) == [caught, "waits for never-29"]
        eventually(lambda: workflow.status().ended_at is not None)
        status = workflow.status()
        assert status.state is JobState.CANCELLED
        assert abs(status.deadline - status.sent_at - timedelta(seconds=1)) < timedelta(seconds=0.1)
        assert status.deadline <= status.ended_at

    def test_29_a_workflow_that_ends_before_its_deadline_is_as_any_other(self, shop):
        workflow = group(shop.add.s(i, i) for i in range(3)).delay(deadline=datetime.now(UTC) + timedelta(seconds=0.5))
        assert workflow.result(shop.patience_s) == [0, 2, 4]
        eventually(lambda: datetime.now(UTC) > workflow.status().deadline)
        assert workflow.state() is JobState.SUCCEEDED

    def test_32_a_body_is_not_refused_by_a_full_queue(self, shop):
        limit = shop.project.penstock("limit", "set", "narrow", "--max-length", "1")
        assert limit.returncode == 0, limit.output
        shop.simply_note.options(queue="narrow").delay("fills the queue")
        workflow = (group(shop.add.s(1, 1)) | shop.total.s().options(queue="narrow")).delay()
        eventually(lambda: shop.app.job(workflow.id).info().state is JobState.WAITING)
        workflow.cancel()

    def test_36_a_workflow_is_found_by_its_id_from_elsewhere(self, shop):
        sent = (group(shop.add.s(i, i) for i in range(3)) | shop.total.s()).delay()
        sent.result(shop.patience_s)
        members = group(shop.add.s(i, i) for i in range(3)).delay()
        members.result(shop.patience_s)
        script = """
            import sys
            from flow_tasks import app

            print(app.workflow(sys.argv[1]).result(30), app.workflow(sys.argv[1]).state())
            workflow = app.workflow(sys.argv[2])
            print(workflow.result(30), list(workflow.results(30)), workflow[2].result(30))
        """
        said = shop.project.python(script, sent.id, members.id)
        assert said.splitlines() == ["6 succeeded", "[0, 2, 4] [0, 2, 4] 4"]

    def test_a_workflow_that_has_not_ended_says_how_far_it_is(self, shop):
        workflow = group(shop.add.s(1, 1), shop.add.s(1, 1).options(countdown=600)).delay()
        assert workflow[0].result(shop.patience_s) == 2
        with pytest.raises(ResultTimeout, match=rf"workflow {workflow.id}: .* 1 of 2 members have ended"):
            workflow.result(0)
        assert workflow.state() is JobState.RUNNING and not workflow.done()
        assert workflow.partial() == penstock.PartialResults(1, 0, 1, {0: 2})
        workflow.cancel()

    def test_steps_run_in_the_queues_that_their_options_name(self, shop):
        body = shop.show.s().options(queue="second", priority=9)
        workflow = (group(shop.add.s(1, 1).options(queue="second")) | body).delay()
        assert workflow.result(shop.patience_s) == "[2]"
        assert shop.app.job(workflow.id).info().queue == "second"


def test_31_what_is_sent_twice_is_two_workflows(shop):
    step = group(shop.add.s(1, 1))
    first, second = step.delay(), step.delay()
    assert first != second and first.result(shop.patience_s) == second.result(shop.patience_s) == [2]


def test_37_a_group_of_too_many_is_refused(shop, monkeypatch):
    monkeypatch.setattr("penstock._flows.build.MOST_MEMBERS", 3)
    with pytest.raises(ValueError, match=r"may have at most 16,777,215 members.*chunks\(task, calls, n\).*map_reduce"):
        group(shop.add.s(1, 1) for _ in range(4)).delay()


def test_38_tasks_of_two_apps_are_no_workflow(shop):
    other = penstock.App("other", shop.app.url)
    task = other.task(name="other.task")(lambda value: None)
    with pytest.raises(ValueError, match=r"flow_tasks.add belongs to .* and other.task to .*: all tasks of a workflow"):
        (shop.add.s(1, 2) | task.s()).delay()


def test_a_workflow_goes_on_where_it_was_when_its_broker_was_killed(project):
    project.write("flow_tasks.py", TASKS)
    shop = FlowShop(project, project.tasks("flow_tasks.py"), is_real=True)
    shop.clear()
    project.worker("flow_tasks:app", "-c", "2")
    members = [shop.wait_for.si("go-on"), *(shop.add.si(i, i) for i in range(20))]
    body = shop.show.s().link(shop.note.s()) | shop.note.s(label="end")
    workflow = (shop.add.s(1, 1) | group(members) | body).delay()
    shop.wait_for_notes(1)
    project.kill_broker()
    shop.touch("go-on")
    assert workflow.result(shop.patience_s) == "end"
    assert len(shop.wait_for_notes(3)) == 3
