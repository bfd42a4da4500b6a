"""Graphs, whose steps have names and need each other by name, with a broker and a worker, and inline."""

from __future__ import annotations

import pickle
import time

import pytest
from workflows.flow_shop import FlowShop

from penstock import GroupError, JobCancelled, JobState, chain, group
from penstock import graph as new_graph
from penstock._flows.build import Plan


def diamond(shop, name="diamond"):
    graph = new_graph(name)
    graph.add("base", shop.add.s(1, 1))
    left = graph.add("left", shop.add.s(10), needs=["base"])
    graph.add("right", shop.add.s(20), needs=["base"])
    graph.add("top", shop.show.s("end"), needs=["right", left])
    return graph


class TestWhatRuns:
    def test_values_of_the_needed_steps_lead_the_arguments_in_their_order(self, shop):
        assert shop.run(diamond(shop)) == {"top": "22, 12, 'end'"}

    def test_the_result_has_the_steps_whose_success_no_other_waits_for(self, shop):
        graph = new_graph()
        graph.add("extract", shop.add.s(1, 2))
        graph.add("load", shop.add.s(1), needs=["extract"])
        graph.add("count", shop.add.s(2), needs=["extract"])
        graph.add("mail", shop.show.s(), needs={"load": "ended"})
        assert shop.run(graph) == {"load": 4, "count": 5, "mail": "4"}

    def test_steps_may_be_added_in_any_order(self, shop):
        graph = new_graph()
        graph.add("second", shop.add.s(1), needs=["first"])
        graph.add("first", shop.add.s(1, 1))
        assert shop.run(graph) == {"second": 3}

    def test_si_takes_no_values(self, shop):
        graph = new_graph()
        graph.add("one", shop.note.s("one", label="one"))
        graph.add("two", shop.simply_note.si("two"), needs=["one"])
        assert shop.run(graph) == {"two": "two"}
        assert shop.notes() == ["one: 'one'", "two"]

    def test_steps_may_be_composed(self, shop):
        graph = new_graph()
        graph.add("pages", group(shop.add.s(i, i) for i in range(3)))
        graph.add("sum", shop.total.s() | shop.add.s(1), needs=["pages"])
        graph.add("both", group(shop.show.s(), shop.show.s("b")), needs=["sum", "pages"])
        graph.add("inner", diamond(shop), needs=["sum"])
        with pytest.raises(TypeError, match="add"):
            # The first step of the inner graph already has both arguments, so the result of "sum" doesn't fit.
            graph.delay()
        graph = new_graph()
        graph.add("pages", group(shop.add.s(i, i) for i in range(3)))
        graph.add("sum", shop.total.s() | shop.add.s(1), needs=["pages"])
        graph.add("both", group(shop.show.s(), shop.show.s("b")), needs=["sum", "pages"])
        inner = new_graph("inner")
        inner.add("more", shop.add.s(100))
        inner.add("shown", shop.show.s(), needs=["more"])
        graph.add("inner", inner, needs=["sum"])
        assert shop.run(graph) == {"both": ["7, [0, 2, 4]", "7, [0, 2, 4], 'b'"], "inner": {"shown": "107"}}

    def test_a_graph_is_a_step_of_chains_and_groups(self, shop):
        assert shop.run(diamond(shop) | shop.show.s()) == "{'top': \"22, 12, 'end'\"}"
        after = new_graph()
        after.add("doubled", shop.add.s(3))
        after.add("noted", shop.show.s(), needs=["doubled"])
        assert shop.run(shop.add.s(1, 1) | after | shop.show.s()) == "{'noted': '5'}"
        assert shop.run(group(after_of(shop), shop.add.s(1, 1))) == [{"only": 2}, 2]
        assert shop.run(group(shop.add.s(1, 1)) | group(after_total(shop)) | shop.show.s()) == "[{'sum': 2}]"
        assert shop.run(chain(shop.add.s(1, 1), after)) == {"noted": "5"}

    def test_callbacks_of_a_graph_get_its_result(self, shop):
        assert shop.run(after_of(shop).link(shop.note.s())) == {"only": 2}
        assert shop.wait_for_notes(1) == ["note: {'only': 2}"]

    def test_callbacks_of_a_step_get_its_own(self, shop):
        graph = new_graph()
        graph.add("first", shop.add.s(1, 1).link(shop.note.s()))
        graph.add("one", shop.add.s(1), needs=["first"])
        graph.add("two", shop.add.s(2), needs=["first"])
        assert shop.run(graph) == {"one": 3, "two": 4}
        assert shop.wait_for_notes(1) == ["note: 2"]

    def test_what_a_graph_is_composed_to_does_not_change_with_it(self, shop):
        graph = after_of(shop)
        composed = graph | shop.show.s()
        graph.add("later", shop.add.s(2, 2))
        assert shop.run(composed) == "{'only': 2}"
        assert shop.run(graph) == {"only": 2, "later": 4}

    def test_results_that_a_task_does_not_store_are_there_for_the_next_steps(self, shop):
        graph = new_graph()
        graph.add("quiet", shop.quiet.s(1))
        graph.add("one", shop.add.s(1), needs=["quiet"])
        graph.add("two", shop.add.s(2), needs=["quiet"])
        assert shop.run(graph) == {"one": 3, "two": 4}


def after_of(shop):
    graph = new_graph()
    graph.add("only", shop.add.s(1, 1))
    return graph


def after_total(shop):
    graph = new_graph()
    graph.add("sum", shop.total.s())
    return graph


class TestFailures:
    def test_a_failed_step_blocks_those_that_need_it(self, shop):
        graph = new_graph("nightly")
        graph.add("extract", shop.fail.s())
        graph.add("load", shop.note.s(), needs=["extract"])
        graph.add("other", shop.simply_note.s("other"))
        workflow = graph.delay()
        with pytest.raises(GroupError, match=r"graph .*: a job has failed: job .*fail\): .*no paper") as e:
            workflow.result(shop.patience_s)
        assert e.value.failures[0].job_id == workflow["extract"].id
        assert workflow["other"].result(shop.patience_s) == "other"
        assert workflow["load"].info().state is JobState.BLOCKED
        assert shop.notes() == ["other"]

    def test_ended_is_either_and_failed_gets_the_failure(self, shop):
        for step, said, noted in [
            (shop.fail.s(), "flow_tasks.OutOfPaper", ["alarm: flow_tasks.OutOfPaper: no paper", "page"]),
            (shop.add.s(1, 1), "2", []),
        ]:
            shop.clear()
            graph = new_graph()
            graph.add("load", step)
            graph.add("mail", group(shop.lenient_one.s()), needs={"load": "ended"})
            graph.add("alarm", shop.caught.s("alarm"), needs={"load": "failed"})
            graph.add("page", shop.simply_note.si("page"), needs=["alarm"])
            workflow = graph.delay()
            assert workflow["mail"].result(shop.patience_s) == [said]
            assert shop.wait_for_notes(len(noted)) == noted
            if noted:
                # A step that waits for the failure doesn't turn it into a success.
                with pytest.raises(GroupError, match="no paper"):
                    workflow.result(shop.patience_s)
                assert workflow["page"].result(shop.patience_s) == "page"
            else:
                assert workflow.result(shop.patience_s) == {"load": 2, "mail": ["2"]}
                for name in ("alarm", "page"):
                    with pytest.raises(JobCancelled, match="it was not needed: nothing that it waited for has failed"):
                        workflow[name].result(shop.patience_s)
            assert shop.app.failed(task="flow_tasks.caught").count() == 0

    def test_a_step_may_wait_for_a_failure_and_for_a_success(self, shop):
        graph = new_graph()
        graph.add("bad", shop.fail.s())
        graph.add("good", shop.add.s(1, 1))
        graph.add("both", shop.lenient_both.s(), needs={"good": "succeeded", "bad": "failed"})
        workflow = graph.delay()
        assert workflow["both"].result(shop.patience_s) == "2, flow_tasks.OutOfPaper"

    def test_a_step_is_not_needed_once_the_failure_that_it_waits_for_is_mended(self, shop):
        graph = new_graph()
        graph.add("good", shop.fail.s())
        graph.add("bad", shop.fail_first.s("x", f"mended {shop.is_real}"))
        graph.add("both", shop.lenient_both.s(), needs={"good": "succeeded", "bad": "failed"})
        workflow = graph.delay()
        for name, error in [("good", shop.OutOfPaper), ("bad", shop.OutOfPaper), ("both", GroupError)]:
            with pytest.raises(error):
                workflow[name].result(shop.patience_s)
        assert shop.app.failed(task="flow_tasks.fail_first", workflow=workflow).retry() == 1
        assert workflow["bad"].result(shop.patience_s) == "'x'"
        assert workflow["both"].info().state is JobState.BLOCKED
        assert workflow.retry_failed() == 1
        with pytest.raises(JobCancelled, match="it was not needed"):
            workflow["both"].result(shop.patience_s)

    def test_an_errback_of_a_graph_runs_once(self, shop):
        graph = new_graph()
        graph.add("one", shop.fail.s())
        graph.add("two", shop.add.s(1), needs=["one"])
        graph.add("three", shop.add.s(1), needs=["one"])
        with pytest.raises(GroupError):
            shop.run(graph.link_error(shop.caught.s()))
        (line,) = shop.wait_for_notes(1)
        assert line.startswith("caught: penstock.GroupError: a job has failed: job ")


class TestHandle:
    def test_steps_are_found_by_name_and_place(self, shop):
        workflow = diamond(shop).delay()
        assert workflow.result(shop.patience_s) == {"top": "22, 12, 'end'"}
        assert [workflow[name].result(shop.patience_s) for name in ("base", "left", "right")] == [2, 12, 22]
        assert len(workflow) == 4 and list(workflow)[1] == workflow["left"] == workflow[1]
        assert pickle.loads(pickle.dumps(workflow))["left"] == workflow["left"]
        with pytest.raises(KeyError, match=r"has no step 'attic'"):
            workflow["attic"]
        with pytest.raises(TypeError, match="its steps have no names"):
            (shop.add.s(1, 1) | shop.show.s()).delay()["left"]
        with pytest.raises(TypeError, match="its result is a graph's, not a group's"):
            workflow.results(shop.patience_s)

    def test_the_members_of_a_chain_with_a_graph_at_its_end_are_its_steps(self, shop):
        graph = new_graph("g")
        graph.add("left", shop.add.s(10))
        sent = (shop.add.s(1, 1) | graph).delay()
        for workflow in (sent, shop.app.workflow(sent.id)):
            assert workflow["left"].result(shop.patience_s) == 12
            assert len(workflow) == 2

    def test_a_graph_is_found_from_elsewhere_by_its_id(self, shop):
        sent = diamond(shop).delay()
        workflow = shop.app.workflow(sent.id)
        assert workflow["left"] == sent["left"]
        assert workflow.result(shop.patience_s) == {"top": "22, 12, 'end'"}
        assert list(workflow) == list(sent) == list(shop.app.workflow(sent.id))


class TestChecks:
    def test_what_can_t_be_run_is_refused_before_anything_is_sent(self, shop):
        graph = new_graph("nightly")
        graph.add("a", shop.show.s(), needs=["b"])
        with pytest.raises(ValueError, match=r"step 'a' of graph 'nightly' needs 'b', but there is no step"):
            graph.delay()
        graph.add("b", shop.show.s(), needs=["c"])
        graph.add("c", shop.show.s(), needs=["x", "b"])
        graph.add("x", shop.show.s())
        graph.add("z", shop.show.s(), needs=["a"])
        with pytest.raises(ValueError, match=r"form a cycle, .*: ('b' -> 'c' -> 'b'|'c' -> 'b' -> 'c')"):
            graph.delay()
        with pytest.raises(ValueError, match=r"graph 'nightly' has a step 'x' already"):
            graph.add("x", shop.show.s())
        with pytest.raises(ValueError, match="step 'y' needs itself"):
            graph.add("y", shop.show.s(), needs=["x", "y"])
        with pytest.raises(ValueError, match="needs 'x' to be 'done'; use 'succeeded', 'failed' or 'ended'"):
            graph.add("y", shop.show.s(), needs={"x": "done"})
        with pytest.raises(TypeError, match="needs must be a list of names"):
            graph.add("y", shop.show.s(), needs="x")
        with pytest.raises(TypeError, match="add takes steps"):
            graph.add("y", shop.show)
        with pytest.raises(TypeError, match="a graph has no options of its own"):
            graph.options(priority=9)
        with pytest.raises(ValueError, match="a graph has no steps"):
            new_graph().delay()

    def test_arguments_must_fit_behind_the_values(self, shop):
        graph = new_graph()
        graph.add("a", shop.add.s(1, 1))
        graph.add("b", shop.add.s(1, 1))
        graph.add("c", shop.add.s(1), needs=["a", "b"])
        with pytest.raises(TypeError, match=r"the results of the 2 steps that it needs are the first arguments"):
            graph.delay()

    def test_a_graph_has_at_most_100_000_steps(self, shop, monkeypatch):
        monkeypatch.setattr("penstock._flows.graph.MOST_STEPS", 2)
        graph = new_graph()
        graph.add("a", shop.add.s(1, 1))
        graph.add("b", shop.add.s(1, 1))
        with pytest.raises(ValueError, match=r"may have at most 2 steps.*one of them can be a group"):
            graph.add("c", shop.add.s(1, 1))


def test_ten_thousand_steps_are_planned_in_a_time_that_goes_by_their_number(real: FlowShop):
    def planned(count: int) -> tuple[float, int]:
        graph = new_graph()
        for number in range(count):
            needs = [f"step {other}" for other in (number - 1, number - 2, number // 2 - 1) if other >= 0]
            graph.add(f"step {number}", real.show.s(), needs=dict.fromkeys(needs, "succeeded"))
        begun = time.process_time()
        plan = Plan(graph)
        built = plan.build(plan.jobs())
        return time.process_time() - begun, len(built.graph)

    # The quickest of several: on a machine with neighbours, CPU time varies as well.
    few_s, few = min(planned(1_000) for _ in range(10))
    many_s, many = min(planned(10_000) for _ in range(3))
    assert many < 10.1 * few
    assert many_s < 30 * few_s
