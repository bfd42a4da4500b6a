"""Status of workflows: the list, the counts of their jobs, and their steps as a tree, as DOT and as SVG."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest
from project import eventually

from penstock import JobState, NoSuchJob, ResultTimeout, chunks, graph, group
from penstock._flows.build import Described, Plan, _Builder
from penstock._flows.describe import description, name_of


def states(step):
    """Return a step as (state, states of its inner steps), or just its state."""
    return (step.state, [states(inner) for inner in step.steps]) if step.steps else step.state


class TestTheStatus:
    def test_it_has_the_steps_with_their_states_and_counts_of_their_jobs(self, shop):
        steps = group(shop.add.s(i, 1) for i in range(3)) | shop.total.s() | shop.add.s(1)
        workflow = steps.delay(name="nightly")
        assert workflow.result(shop.patience_s) == 7
        status = workflow.status()
        assert (status.id, status.name, status.state) == (workflow.id, "nightly", JobState.SUCCEEDED)
        assert (status.jobs.succeeded, status.jobs.waiting, status.jobs.running) == (5, 0, 0)
        assert (status.jobs.failed, status.jobs.cancelled, status.jobs.blocked) == (0, 0, 0)
        # The broker's clocks count milliseconds.
        assert status.sent_at <= status.ended_at <= datetime.now(UTC) + timedelta(milliseconds=1)
        assert (status.deadline, status.parent, status.failures) == (None, None, ())
        header, body, last = status.steps.steps
        assert (status.steps.kind, header.kind, header.members) == ("chain", "group", 3)
        assert [member.task for member in header.steps] == ["flow_tasks.add"] * 3
        assert (body.kind, body.task, last.id) == ("job", "flow_tasks.total", workflow.id)
        assert {body.state, last.state, status.steps.state, header.state} == {JobState.SUCCEEDED}

    def test_a_group_of_many_is_one_step(self, shop):
        workflow = (group(shop.add.s(i, 1) for i in range(200)) | shop.total.s()).delay()
        workflow.result(shop.patience_s)
        header, _ = workflow.status().steps.steps
        assert (header.members, header.task, header.steps) == (200, "flow_tasks.add", ())
        assert "group of 200 x flow_tasks.add" in str(workflow.status())
        mixed = group([shop.add.s(1, 1), shop.make_order.s(1)] * 20).delay()
        mixed.result(shop.patience_s)
        assert mixed.status().steps.task == "flow_tasks.add or flow_tasks.make_order"
        assert mixed.status().steps.state is JobState.SUCCEEDED

    def test_it_says_what_has_replaced_a_job(self, shop):
        if not shop.is_real:
            shop.touch("status")
        workflow = (shop.replaced.s("call", 1) | shop.replaced_after.s("waits", "status") | shop.show.s()).delay()
        if shop.is_real:
            shop.wait_for_notes(1)
            assert workflow.status().steps.steps[1].replaced_by == "group of 2"
            workflow.cancel()
            workflow.wait(shop.patience_s)
        one, _, last = workflow.status().steps.steps
        assert (one.task, one.replaced_by, last.replaced_by) == ("flow_tasks.replaced", "flow_tasks.add", "")
        workflow = (shop.replaced.s("group", 1) | shop.total.s()).delay()
        workflow.result(shop.patience_s)
        first, body = workflow.status().steps.steps
        assert (first.replaced_by, body.replaced_by) == ("group", "")
        assert "─ flow_tasks.replaced → group  succeeded" in str(workflow.status())

    def test_it_says_what_has_failed_and_what_that_blocks(self, shop):
        workflow = (shop.fail.s(why="no ink") | shop.note.s() | shop.note.s()).delay()
        assert workflow.wait(shop.patience_s) is JobState.FAILED
        status = workflow.status()
        assert (status.state, status.jobs.failed, status.jobs.blocked) == (JobState.FAILED, 1, 2)
        assert states(status.steps) == (JobState.FAILED, [JobState.FAILED, JobState.BLOCKED, JobState.BLOCKED])
        (failure,) = status.failures
        assert (failure.job_id, failure.message) == (workflow[0].id, "no ink")
        assert failure.task == "flow_tasks.fail"

    def test_it_names_no_failures_of_other_workflows(self, shop):
        others = [group(shop.fail.s(why="another")).delay() for _ in range(3)]
        workflow = group(shop.fail.s(why=f"{i}") for i in range(3)).delay()
        for each in (*others, workflow):
            each.wait(shop.patience_s)
        eventually(lambda: workflow.status().ended_at is not None)
        assert sorted(failure.message for failure in workflow.status().failures) == ["0", "1", "2"]

    def test_callbacks_are_steps_of_what_they_are_for(self, shop):
        step = shop.add.s(1, 2).link(shop.note.s()).link_error(shop.caught.s())
        workflow = (step | shop.add.s(3)).delay()
        assert workflow.result(shop.patience_s) == 6
        eventually(lambda: workflow.status().ended_at is not None)
        status = workflow.status()
        links = [(on, link.task, link.state) for on, link in status.steps.steps[0].links]
        assert links[0] == ("succeeded", "flow_tasks.note", JobState.SUCCEEDED)
        assert links[1][:2] == ("failed", "flow_tasks.caught")
        # An errback that wasn't needed doesn't count as a cancelled job.
        assert (status.jobs.succeeded, status.jobs.cancelled) == (3, 0)

    def test_it_is_drawn_as_a_tree_as_dot_and_as_a_picture(self, shop):
        workflow = (shop.add.s(1, 2) | group(shop.add.s(1), shop.add.s(2)) | shop.total.s()).delay(name='"ever<y>"')
        workflow.result(shop.patience_s)
        status = workflow.status()
        assert str(status).splitlines() == [
            '"ever<y>"  succeeded  (4 succeeded)',
            "├─ flow_tasks.add  succeeded",
            "├─ group of 2  succeeded",
            "│  ├─ flow_tasks.add  succeeded",
            "│  └─ flow_tasks.add  succeeded",
            "└─ flow_tasks.total  succeeded",
        ]
        assert status.dot().startswith(r'digraph "\"ever<y>\""') and status.dot().count("->") == 4
        picture = ElementTree.fromstring(status.svg())
        assert len(picture.findall(".//{http://www.w3.org/2000/svg}rect")) == 4

    def test_steps_of_a_graph_have_names_and_say_what_they_need(self, shop):
        steps = graph("nightly")
        steps.add("both", shop.note.si("both"), needs=["one", "two"])
        steps.add("one", shop.add.s(1, 2))
        steps.add("two", shop.add.s(3), needs=["one"])
        steps.add("told", shop.note.si("told"), needs={"both": "ended"})
        workflow = steps.delay()
        workflow.result(shop.patience_s)
        status = workflow.status()
        assert [(step.name, step.needs) for step in status.steps.steps] == [
            ("both", (("one", "succeeded"), ("two", "succeeded"))),
            ("one", ()),
            ("two", (("one", "succeeded"),)),
            ("told", (("both", "ended"),)),
        ]
        assert str(status).splitlines() == [
            "nightly  succeeded  (4 succeeded)",
            "└─ graph of 4  succeeded",
            "   ├─ both: flow_tasks.note  succeeded, after one, two",
            "   ├─ one: flow_tasks.add  succeeded",
            "   ├─ two: flow_tasks.add  succeeded, after one",
            "   └─ told: flow_tasks.note  succeeded, after both however it ends",
        ]
        assert status.dot().count("->") == 4

    async def test_it_can_be_awaited(self, shop):
        workflow = await group(shop.add.s(1, 1)).adelay(name="awaited")
        assert await workflow == [2]
        assert (await workflow.astatus()).name == "awaited"
        assert await workflow.async_wait(shop.patience_s) is JobState.SUCCEEDED
        assert await group([]).delay().async_wait() is JobState.SUCCEEDED
        found = [each async for each in shop.app.workflows(name="awaited")]
        assert workflow.id in [each.id for each in found]

    def test_what_the_broker_does_not_list_is_no_such_job(self, shop):
        with pytest.raises(NoSuchJob, match="does not list this workflow"):
            shop.app.workflow("01890000-0000-7000-8000-000000000000").status()
        with pytest.raises(NoSuchJob, match="has no jobs"):
            group([]).delay().status()

    def test_a_wait_ends_with_the_workflow(self, shop):
        assert group(shop.add.s(1, 1)).delay().wait(shop.patience_s) is JobState.SUCCEEDED
        assert group([]).delay().wait() is JobState.SUCCEEDED

    def test_a_wait_ends_with_its_time(self, real):
        with pytest.raises(ResultTimeout, match="did not end in time"):
            group(real.add.options(countdown=900).s(1, 1)).delay().wait(0)
        with pytest.raises(ResultTimeout, match="0 of 1 members"):
            asyncio.run(group(real.add.options(countdown=900).s(1, 1)).delay().async_wait(0))


class TestTheList:
    def test_workflows_are_listed_the_newest_first(self, shop):
        sent = [group(shop.add.s(i, i)).delay(name="listed") for i in range(3)]
        for each in sent:
            each.result(shop.patience_s)
        failed = group(shop.fail.s()).delay(name="listed")
        failed.wait(shop.patience_s)
        listed = list(shop.app.workflows(name="listed"))[:4]
        assert {each.id for each in listed} == {each.id for each in (failed, *sent)}
        # Ids sort by their milliseconds; the order within one millisecond is unknown.
        times = [each.id[:13] for each in listed]
        assert times == sorted(times, reverse=True)
        (last,) = (each for each in listed if each.id == sent[-1].id)
        assert (last.state, last.jobs.succeeded) == (JobState.SUCCEEDED, 1)
        assert last.workflow == sent[-1] and last.workflow.result(shop.patience_s) == [4]
        assert [each.id for each in shop.app.workflows(name="listed", state="failed")][:1] == [failed.id]
        assert failed.id not in [each.id for each in shop.app.workflows(state=JobState.SUCCEEDED)]
        assert list(shop.app.workflows(name="no such name")) == []
        with pytest.raises(ValueError, match="'running', 'succeeded'"):
            shop.app.workflows(state="waiting")

    def test_a_cancelled_workflow_is_listed_as_that(self, real):
        workflow = group(real.add.options(countdown=900).s(i, i) for i in range(3)).delay(name="cancelled")
        workflow.cancel()
        eventually(lambda: [each.ended_at is not None for each in real.app.workflows(name="cancelled")] == [True])
        (listed,) = real.app.workflows(name="cancelled")
        assert (listed.state, listed.jobs.cancelled) == (JobState.CANCELLED, 3)


class TestNames:
    def test_a_workflow_is_named_by_its_steps_unless_it_is_given_a_name(self, shop):
        add, note = shop.add, shop.note
        for step, name in [
            (add.s(1, 2) | note.s(), "add | note"),
            (group(add.s(1, 2), note.s(3)), "group(add, note)"),
            (group(add.s(i, i) for i in range(9)) | shop.total.s(), "group(9 x add) | total"),
            (chunks(add, [(1, 1), (2, 2)], 1), "group(2 x add)"),
            (add.s(1, 1) | add.s(1) | add.s(1) | add.s(1) | add.s(1), "add | add | add | add | …"),
            (group(add.s(1, 1) | note.s(), note.s(1)), "group(add | note, note)"),
        ]:
            assert name_of(step) == name
            workflow = step.delay()
            workflow.wait(shop.patience_s)
            assert workflow.status().name == name

    @pytest.mark.parametrize(("name", "error"), [("", ValueError), ("n" * 256, ValueError), (7, TypeError)])
    def test_a_name_is_a_text_of_some_length(self, shop, name, error):
        with pytest.raises(error, match="name"):
            group(shop.add.s(1, 1)).delay(name=name)

    def test_descriptions_have_no_more_than_the_broker_takes(self, shop):
        chain = shop.add.s(0, 0)
        for i in range(999):
            chain = chain | shop.add.s(i)
        plan = Plan(chain)
        built = (builder := _Builder(plan._takes, plan._marks, plan.jobs())).build(plan._root, [])
        described = description(Described(plan._root, plan._signatures, built.job_ids, builder.groups))
        assert 1_000 < len(described) <= 16 << 10
        steps = json.loads(described)
        assert len(steps["chain"]) + steps["more"] == 1_000 and len(steps["chain"]) > 50
