"""The handle of a workflow, middleware and headers around it, and its visibility in tests."""

from __future__ import annotations

import pickle

import pytest

import penstock
from penstock import (
    App,
    Failure,
    GroupError,
    JobState,
    Middleware,
    NoSuchJob,
    ResultExpired,
    chain,
    chord,
    chunks,
    group,
)
from penstock.testing import capture, worker


class TestTheHandle:
    def test_members_are_found_by_their_places(self, shop):
        members = group(shop.add.s(i, i) for i in range(4)).delay()
        members.result(shop.patience_s)
        assert [job.result(0) for job in members] == [0, 2, 4, 6]
        assert (len(members), members[1].result(0), members[-1].result(0)) == (4, 2, 6)
        with pytest.raises(IndexError, match="4 members, so there is none at index 4"):
            members[4]
        with pytest.raises(TypeError, match=r"by position or by name, not by 0\.5"):
            members[0.5]
        steps = (shop.add.s(1, 2) | group(shop.add.s(1), shop.add.s(2)) | shop.total.s()).delay()
        steps.result(shop.patience_s)
        assert [job.result(0) for job in steps] == [3, [4, 5], 9]
        header = (group(shop.add.s(1, 1), shop.add.s(2, 2)) | shop.total.s()).delay()
        header.result(shop.patience_s)
        assert [job.result(0) for job in header] == [2, 4]
        nested = group(group(shop.add.s(1, 1)), shop.add.s(1, 2) | shop.add.s(3)).delay()
        nested.result(shop.patience_s)
        assert [job.result(0) for job in nested] == [[2], 6]
        assert nested[0].info().state is JobState.SUCCEEDED

    def test_members_can_be_waited_for_as_other_jobs(self, shop):
        members = group(group(shop.add.s(1, 1)), shop.add.s(2, 2)).delay()
        assert penstock.results(members, shop.patience_s) == [[2], 4]
        done, pending = penstock.wait(members, 0)
        assert [job.result(0) for job in done] == [[2], 4] and pending == []
        assert sorted(map(str, (job.result(0) for job in members.as_completed(shop.patience_s or 1)))) == ["4", "[2]"]

    async def test_everything_can_be_awaited(self, shop):
        members = await group(shop.add.s(1, 1), group(shop.add.s(2, 2))).adelay()
        assert await members == [2, [4]] == await members.aresult(timeout=shop.patience_s)
        results = await members.aresults(shop.patience_s)
        assert [value async for value in results] == [2, [4]] == await results.aok()
        assert await results.afailures() == []
        assert await members.apartial() == penstock.PartialResults(2, 0, 0, {0: 2, 1: [4]})
        assert (await members.astate(), await members.adone()) == (JobState.SUCCEEDED, True)
        assert sorted([str(await job) async for job in members.as_completed(shop.patience_s or 1)]) == ["2", "[4]"]
        assert await penstock.aresults(members, shop.patience_s) == [2, [4]]
        await members.acancel()
        linked = await shop.add.s(1, 2).link(shop.note.s()).adelay()
        assert isinstance(linked, penstock.Job) and await linked == 3
        failed = await group(shop.fail.s(), shop.add.s(1, 1)).adelay()
        with pytest.raises(GroupError, match="no paper"):
            await failed
        first, second = await failed.aresults(shop.patience_s)
        assert isinstance(first, Failure) and second == 2
        assert await group([]).adelay() == group([]).delay()
        assert await (await group([]).adelay()) == []

    def test_results_are_read_through_a_thousand_at_a_time(self, shop):
        count = 2_345
        results = group(shop.add.s(i, i) for i in range(count)).delay().results(shop.patience_s)
        asked = []
        connection = shop.app._connected()
        read_all = connection.read_all
        try:
            connection.read_all = lambda ids, timeout: (asked.append(len(ids)), read_all(ids, timeout))[1]
            assert (len(results), results[0], results[-1], results[2_000:2_003]) == (
                count,
                0,
                4_688,
                [4000, 4002, 4004],
            )
            assert asked == [1_000, 345]
            assert list(results) == [2 * i for i in range(count)]
            assert asked == [1_000, 345, 1_000, 1_000, 345]
        finally:
            del connection.read_all
        assert results.index(10) == 5 and 4_688 in results
        with pytest.raises(IndexError):
            results[count]

    def test_what_has_no_list_of_results_says_so(self, shop):
        chain = (shop.add.s(1, 2) | shop.show.s()).delay()
        with pytest.raises(TypeError, match=r"its result is one value, not a group's: use result\(\)"):
            chain.results(shop.patience_s)
        failed = (shop.fail.s() | group(shop.add.s(1))).delay()
        with pytest.raises(GroupError, match="no paper"):
            failed.results(shop.patience_s)

    def test_a_result_that_is_not_kept_is_named(self, shop):
        members = group(shop.quiet.s(1), shop.quiet.s(2)).delay()
        with pytest.raises(ResultExpired, match="it was member 0 of its group, and its result is not kept"):
            members.result(shop.patience_s)

    def test_a_handle_is_pickled_and_equal_by_its_id(self, shop):
        members = group(shop.add.s(i, i) for i in range(3)).delay()
        again = pickle.loads(pickle.dumps(members))
        assert again == members == shop.app.workflow(members.id) and hash(again) == hash(members)
        assert again != group(shop.add.s(1, 1)).delay()
        assert len(again) == 3 and again[2] == members[2]
        assert repr(again) == f"<Workflow {members.id}>"

    def test_what_nobody_sent_is_no_workflow(self, shop):
        unknown = shop.app.workflow("01a207ab-1773-73f8-b3fa-45ec11000000")
        with pytest.raises(NoSuchJob, match="does not know it"):
            unknown.state()
        with pytest.raises(NoSuchJob, match=f"^workflow {unknown.id}: the broker at .* does not know it"):
            unknown.result(0)
        with pytest.raises(NoSuchJob, match="does not list this workflow"):
            len(unknown)

    async def test_members_of_a_workflow_that_is_found_by_its_id_are_asked_for(self, shop):
        """Such a chain used to have only one member, its last step."""
        add, total, show = shop.add, shop.total, shop.show
        for step in (
            add.s(1, 2) | add.s(3) | show.s(),
            add.s(1, 2) | group(add.s(3), add.s(4)) | total.s(),
            group(add.s(i, i) for i in range(3)),
            group(add.s(i, i) for i in range(20)) | total.s(),
            add.s(1, 2) | show.s().link(show.s()),
        ):
            sent = step.delay()
            sent.wait(shop.patience_s)
            assert list(shop.app.workflow(sent.id)) == list(sent), step
            assert len(shop.app.workflow(sent.id)) == len(sent)
            assert shop.app.workflow(sent.id)[1] == sent[1]
            assert shop.app.workflow(sent.id)[-1] == sent[-1]
            assert shop.app.workflow(sent.id).partial() == sent.partial() == await shop.app.workflow(sent.id).apartial()

    async def test_the_results_of_a_failed_group_are_read_by_its_id(self, shop):
        """The other members' results used to be out of reach."""
        sent = group(shop.add.s(1, 1), shop.fail.s(), shop.add.s(2, 2)).delay()
        sent.wait(shop.patience_s)
        for results in (
            shop.app.workflow(sent.id).results(shop.patience_s),
            await shop.app.workflow(sent.id).aresults(shop.patience_s),
        ):
            assert (results[0], results[2], results.failures()[0].index) == (2, 4, 1)

    def test_members_that_were_not_described_are_not_made_up(self, shop):
        sent = chain(shop.add.options(countdown=600).s(1, 1), *(shop.add.s(1) for _ in range(3000))).delay()
        with pytest.raises(LookupError, match="it has more steps than the broker lists"):
            list(shop.app.workflow(sent.id))
        sent.cancel()

    def test_jobs_know_their_workflow(self, shop):
        for step in (group(shop.whose.s()), shop.add.s(1, 1) | shop.whose.si(), group(shop.whose.s()) | shop.show.s()):
            workflow = step.delay()
            result = workflow.result(shop.patience_s)
            assert workflow.id in str(result) or result == workflow.id
        assert shop.whose.delay().result(shop.patience_s) is None

    def test_failures_rebuild_their_errors_and_travel(self, shop):
        failed = (group(shop.fail.s(why="no ink"), shop.fail.s()) | shop.total.s()).delay()
        with pytest.raises(GroupError) as e:
            failed.result(shop.patience_s)
        failure = e.value.failures[0]
        assert isinstance(failure.exception(), shop.OutOfPaper)
        again = pickle.loads(pickle.dumps(e.value))
        assert (str(again), again.failed, again.failures) == (str(e.value), e.value.failed, e.value.failures)
        assert pickle.loads(pickle.dumps(failure)) == failure
        crashed = Failure("id", None, "penstock.WorkerCrashed", "it died")
        assert isinstance(crashed.exception(), penstock.WorkerCrashed)
        assert isinstance(Failure("id", None, "shop.Unknown", "?").exception(), penstock.TaskError)


class TestManyCallsInAJob:
    def test_chunks_run_their_calls_one_after_another(self, shop):
        pairs = [(i, i) for i in range(7)]
        assert shop.run(chunks(shop.add, pairs, 3)) == [[0, 2, 4], [6, 8, 10], [12]]
        assert shop.run(chunks(shop.aadd, pairs, 4) | shop.show.s()) == "[[0, 2, 4, 6], [8, 10, 12]]"
        assert shop.run(chunks(shop.add, [], 3)) == []
        assert shop.run(chunks(shop.make_order, [(1,)], 3)) == [[shop.Order(1)]]

    def test_a_chunk_fails_as_a_whole_and_tells_of_its_arguments(self, shop):
        workflow = chunks(shop.log_in, [("ada", "hunter2"), ("bob", "qwertz")], 2).delay()
        with pytest.raises(GroupError, match=r"ada can't log in with \*\*\*"):
            workflow.result(shop.patience_s)
        (job,) = shop.app.failed(id=workflow[0])
        assert job.arguments == "user[0]='ada', password[0]=***, user[1]='bob', password[1]=***"

    def test_arguments_of_a_chunk_are_checked_where_it_runs_if_not_before(self, real):
        unknown = App("elsewhere", real.app.url).remote_task("flow_tasks.add")
        with pytest.raises(GroupError, match=r"ArgumentMismatch: .*argument b must be int"):
            real.run(chunks(unknown, [(1, 2), (1, "2")], 2))

    def test_map_reduce_reduces_in_levels(self, shop):
        workflow = shop.show.map_reduce(range(7), shop.show.s(), fan_in=3).delay()
        assert workflow.result(shop.patience_s).count("[") == 3
        total = shop.total.map_reduce([[i] for i in range(50)], shop.total.s(), fan_in=4)
        assert shop.run(total) == sum(range(50))
        assert shop.run(shop.total.map_reduce([[5]], shop.total.s())) == 5
        assert shop.run(shop.total.map_reduce([], shop.total.s())) == 0


class TestValues:
    def test_values_that_are_too_large_to_come_along_are_asked_for(self, shop):
        blobs = group(shop.blob.s(100_000) for _ in range(5))
        assert shop.run(blobs | group(shop.sizes.s(), shop.asizes.s())) == [[100_000] * 5] * 2
        assert shop.run(group(blobs, shop.blob.s(1)) | shop.show.s()).count("xxxx") > 5

    def test_many_small_values_are_asked_for_a_thousand_at_a_time(self, shop):
        count = 5_000
        assert shop.run(group(shop.add.s(i, i) for i in range(count)) | shop.total.s()) == sum(range(count)) * 2

    def test_secrets_of_a_step_stay_secret_though_its_first_argument_comes_later(self, shop):
        workflow = (shop.show.s("ada") | shop.log_in.s("hunter2")).delay()
        with pytest.raises(shop.OutOfPaper, match=r"'ada' can't log in with \*\*\*"):
            workflow.result(shop.patience_s)
        (job,) = shop.app.failed(id=workflow.id)
        assert job.arguments == "password=***"


class TestMiddlewareAndHeaders:
    @pytest.fixture
    def app(self):
        return App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)

    @pytest.fixture
    def seen(self, app):
        seen = []

        @app.task(name="shop.see")
        def see(*values: object) -> int:
            job = penstock.current_job()
            assert job is not None
            seen.append(job.headers)
            return len(values)

        app.see = see
        return seen

    async def test_middleware_goes_around_the_transaction_once(self, app, seen):
        transactions = []

        class Stamp(Middleware):
            def enqueue(self, calls, next):
                transactions.append([call.args for call in calls])
                for call in calls:
                    call.headers["stamp"] = str(len(calls))
                return next(calls)

            async def aenqueue(self, calls, next):
                transactions.append([call.args for call in calls])
                return await next(calls)

        app.use(Stamp())
        step = group(app.see.s(i) for i in range(3)) | app.see.s("body").link(app.see.s("link"))
        with worker(app):
            assert step.delay().result(30) == 2
            assert await (await step.adelay()) == 2
        assert transactions == [[(0,), (1,), (2,), ("body",), ("link",)]] * 2
        assert seen[:4] == [{"stamp": "5"}] * 4

    def test_middleware_can_t_leave_calls_out(self, app, seen):
        class Half(Middleware):
            def enqueue(self, calls, next):
                return next(calls[::2])

        app.use(Half())
        with capture(app) as calls, pytest.raises(TypeError, match="must pass on the 2 calls of a workflow, not 1"):
            (app.see.s(1) | app.see.s()).delay()
        assert calls == []

    def test_headers_of_the_context_reach_every_job(self, app, seen):
        with penstock.testing.inline(app) as calls:
            with app.headers(tenant="north"):
                chord([app.see.s(1)], app.see.s().link_error(app.see.s()).options(headers={"own": "1"})).delay()
            chunks(app.see, [(1,), (2,)], 2).delay()
        # Penstock's internal headers aren't shown.
        assert seen == [{"tenant": "north"}, {"tenant": "north", "own": "1"}, {}, {}]
        assert [call.args for call in calls] == [(1,), (), (), ((1,), (2,))]

    def test_jobs_that_a_chunk_or_an_errback_enqueues_are_ordinary_ones(self, app, seen):
        @app.task(name="shop.enqueue")
        def enqueue(value: object) -> None:
            app.see.delay(str(value))

        @app.task(name="shop.fail")
        def fail() -> None:
            raise ValueError

        with penstock.testing.inline(app), app.headers(tenant="north"):
            assert chunks(enqueue, [(1,), (2,)], 2).delay().result(0) == [[None, None]]
            fail.s().link_error(enqueue.s()).delay()
        assert seen == [{"tenant": "north"}] * 3


class TestDoubles:
    def test_capture_records_all_calls_and_runs_them_when_asked(self):
        app = App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)
        add = app.task(name="shop.add")(lambda a, b: a + b)
        total = app.task(name="shop.total")(sum)
        with capture(app) as calls:
            workflow = (group(add.s(1, 1), add.s(2, 2)) | total.s().options(queue="sums")).delay()
            assert not workflow.done()
            calls.assert_enqueued(total, queue="sums")
            calls.assert_enqueued(add, args=(1, 1))
            assert calls.run_until_idle() == 3
            assert workflow.result(0) == 6

    def test_inline_runs_what_a_failed_step_leaves(self):
        app = App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)
        seen = []

        @app.task(name="shop.charge", retries=2, backoff=60)
        def charge(amount: int) -> int:
            raise ValueError("no money")

        @app.task(name="shop.tell")
        def tell(failure: Failure) -> None:
            seen.append((failure.type_name, failure.message, failure.task))

        with penstock.testing.inline(app):
            workflow = (charge.s(3) | charge.s()).link_error(tell.s()).delay()
            with pytest.raises(GroupError, match="no money"):
                workflow.result(0)
        assert seen == [("ValueError", "no money", "shop.charge")]

    @pytest.mark.parametrize("fixture", ["penstock_inline", "penstock_capture", "penstock_worker"])
    def test_the_fixtures_of_the_plugin_run_workflows(self, request, fixture):
        calls = request.getfixturevalue(fixture)
        app = App("shop")
        add = app.task(name="shop.add")(lambda a, b: a + b)
        total = app.task(name="shop.total")(sum)
        workflow = (group(add.s(i, i) for i in range(3)) | total.s() | add.s(1)).delay()
        if fixture != "penstock_inline":
            calls.run_until_idle()
        assert workflow.result(0) == 7
        assert len(calls) == 5


def test_tasks_of_a_library_are_steps_of_the_app_that_adds_them():
    @penstock.shared_task
    def post(text: str, mark: str) -> str:
        return text + mark

    step = post.s("a", "b") | post.s("c")
    with pytest.raises(RuntimeError, match="has no app yet"):
        step.delay()
    app = App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)
    app.add(post)
    with penstock.testing.inline(app):
        assert step.delay().result(0) == "abc"


def test_failures_can_be_returned_and_passed_on_where_annotations_name_them():
    app = App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)

    @app.task(name="shop.fail")
    def fail() -> int:
        raise ValueError("no paper")

    @app.task(name="shop.pass_on")
    def pass_on(values: list[int | Failure]) -> list[int | Failure]:
        return values

    with penstock.testing.inline(app):
        (failure,) = (group([fail.s()], max_failures=1) | pass_on.s() | pass_on.s()).delay().result(0)
        (again,) = pass_on.delay([failure]).result(0)
    assert isinstance(failure, Failure) and again == failure
    assert isinstance(again.exception(), ValueError)


def test_each_result_of_a_chunk_is_checked():
    app = App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)

    @app.task(name="shop.parse")
    def parse(text: str) -> int:
        return int(text) if text.isdecimal() else text  # type: ignore[return-value]

    with penstock.testing.inline(app):
        assert chunks(parse, [("1",), ("2",)], 2).delay().result(0) == [[1, 2]]
        with pytest.raises(GroupError, match=r"parse\(\) returned list \[1, 'two'\], but is annotated to return int"):
            chunks(parse, [("1",), ("two",)], 2).delay().result(0)


def test_a_step_may_read_the_results_of_a_group_as_a_stream(shop):
    some = group(shop.add.s(i, i) for i in range(3))
    assert shop.run(some | shop.count_in.s()) == ("Results", 3, 6)
    assert shop.run(some | shop.acount_in.s()) == 6
    # Too large to be sent along with a job.
    large = group(shop.blob.s(100_000) for _ in range(5))
    assert shop.run(large | shop.count_in.s()) == ("Results", 5, 0)
    may_fail = group([shop.add.s(1, 1), shop.fail.si()], max_failures=1)
    assert shop.run(may_fail | shop.count_in.s()) == ("Results", 2, 2)
    # A task that expects a list gets a list.
    assert shop.run(some | shop.show.s()) == "[0, 2, 4]"
