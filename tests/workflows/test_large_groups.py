"""Groups sent in several transactions: members run before the last one is sent; the group is complete or cancelled."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator

import pytest
from project import eventually
from workflows.flow_shop import FlowShop

import penstock
from penstock import GroupError, Middleware, QueueFull, chain, chord, chunks, graph, group

LARGE = 50


@pytest.fixture
def shop(real, monkeypatch):
    """The shop with a worker, where a group of more than 50 calls is large."""
    monkeypatch.setattr("penstock._flows.steps.AT_ONCE", LARGE)
    monkeypatch.setattr("penstock._flows.build.AT_ONCE", LARGE)
    monkeypatch.setattr("penstock._jobs.waits.BLOCK", LARGE)
    monkeypatch.setattr("penstock._flows.workflow.BLOCK", LARGE)
    real.clear()
    return real


class Sent(Middleware):
    """Counts the calls in each transaction."""

    def __init__(self):
        self.calls = []

    def enqueue(self, calls, next):
        self.calls.append(len(calls))
        return next(calls)


def limit(shop: FlowShop, queue: str, length: int) -> None:
    # The first job starts the broker.
    shop.add.delay(1, 1)
    ended = shop.project.penstock("limit", "set", queue, "--max-length", str(length))
    assert ended.returncode == 0, ended.output


@pytest.fixture
def sent(shop, monkeypatch) -> Iterator[list[int]]:
    layer = Sent()
    monkeypatch.setattr(shop.app, "_middleware", [])
    monkeypatch.setattr(shop.app, "_enqueue_layers", None)
    shop.app.use(layer)
    return layer.calls


def test_its_result_is_that_of_any_group(shop):
    count = 5 * LARGE + 7
    workflow = group(shop.add.s(i, i) for i in range(count)).delay()
    doubled = [2 * i for i in range(count)]
    assert workflow.result(shop.patience_s) == doubled == list(workflow.results(shop.patience_s))
    assert (len(workflow), workflow[count - 1].result(0), workflow.partial().done) == (count, doubled[-1], count)
    assert sorted(job.result(0) for job in workflow.as_completed(shop.patience_s)) == doubled
    assert pickle.loads(pickle.dumps(workflow)).result(0) == doubled


async def test_it_can_be_awaited(shop):
    count = 5 * LARGE + 7
    workflow = await (group(shop.add.s(i, i) for i in range(count)) | shop.total.s()).adelay()
    assert await workflow.aresult(shop.patience_s) == count * (count - 1)
    assert (await workflow.apartial()).done == count
    assert len([job async for job in workflow.as_completed(shop.patience_s)]) == count


@pytest.mark.parametrize("of", [iter, list])
def test_it_may_be_a_chord_and_the_beginning_of_a_chain(shop, of):
    steps = of([shop.add.s(i, 0) | shop.add.s(1) for i in range(3 * LARGE)])
    total = sum(range(3 * LARGE)) + 3 * LARGE
    assert shop.run(chord(steps, shop.total.s()) | shop.add.s(5)) == total + 5


def test_calls_in_chunks_and_of_map_reduce_may_be_many(shop):
    pairs = ((i, i) for i in range(200))
    assert list(itertools.chain(*shop.run(chunks(shop.add, pairs, 3)))) == [2 * i for i in range(200)]
    items = range(7 * LARGE)
    assert shop.run(shop.quiet.map_reduce(items, shop.total.s(), fan_in=10)) == sum(items) + len(items)


def test_it_is_sent_in_several_transactions_and_smaller_ones_in_one(shop, sent):
    assert len(group(shop.add.s(i, i) for i in range(LARGE)).delay()) == LARGE
    assert sent == [LARGE]
    sent.clear()
    assert shop.run(group(shop.add.s(i, i) for i in range(2 * LARGE + 1)) | shop.total.s()) == 2 * LARGE * (
        2 * LARGE + 1
    )
    assert sent == [LARGE + 1, LARGE, 1]
    sent.clear()
    assert len(group(shop.add.s(i, i) for i in range(3 * LARGE)).delay(atomic=True)) == 3 * LARGE
    assert sent == [3 * LARGE]


def test_its_members_may_be_graphs_and_empty_groups(shop, sent):
    def steps():
        yield from (shop.add.s(i, i) for i in range(LARGE))
        for i in range(LARGE):
            named = graph()
            named.add("sum", shop.add.s(i, 1))
            named.add("twice", shop.add.s(i), needs=["sum"])
            yield named
        yield from (group([]) for _ in range(2 * LARGE))
        yield group([group([])])

    expected = (
        [2 * i for i in range(LARGE)] + [{"twice": 2 * i + 1} for i in range(LARGE)] + [[]] * (2 * LARGE) + [[[]]]
    )
    assert group(steps()).delay().result(shop.patience_s) == expected
    assert max(sent) <= LARGE


def test_the_first_members_run_before_the_last_ones_are_made(shop):
    def steps():
        for number in range(LARGE):
            yield shop.note.si(number)
        yield shop.note.si("the last of the first part")
        shop.wait_for_notes(LARGE)
        yield shop.simply_note.s("made after that")

    workflow = group(steps()).delay()
    assert len(workflow.result(shop.patience_s)) == LARGE + 2
    assert shop.notes().index("made after that") >= LARGE


def test_its_status_knows_the_members_that_have_come(shop):
    steps = itertools.chain([shop.wait_for.si("it-was-seen")], (shop.note.si(number) for number in range(2 * LARGE)))
    workflow = group(steps).delay()
    eventually(lambda: workflow.partial().done == 2 * LARGE)
    assert f"group of {2 * LARGE + 1} or more x " in str(workflow.status())
    assert f"{2 * LARGE} of {2 * LARGE + 1} have ended" in str(workflow.status())
    shop.touch("it-was-seen")


def test_a_group_that_fails_is_sent_no_further(shop):
    made = itertools.count()
    workflow = (group(shop.fail.si(str(next(made))) for _ in itertools.repeat(None)) | shop.note.s()).delay()
    with pytest.raises(GroupError, match="OutOfPaper"):
        workflow.result(shop.patience_s)
    assert len(workflow) <= next(made)
    ends = workflow.partial()
    assert ends.done == 0 and ends.failed + ends.pending == len(workflow)
    assert shop.notes() == []


def test_what_was_sent_is_cancelled_when_the_rest_can_t_be_made(shop):
    def steps():
        for _ in range(2 * LARGE):
            yield shop.wait_for.si("it-can-be-made")
        raise LookupError("no more steps")

    group_of_all = group(steps()) | shop.note.s()
    with pytest.raises(LookupError, match="no more steps") as raised:
        group_of_all.delay()
    (note,) = raised.value.__notes__
    assert "jobs of workflow" in note and "had been accepted. It was cancelled after" in note
    workflow = shop.app.workflow(note.split()[note.split().index("workflow") + 1])
    with pytest.raises(penstock.JobCancelled, match="not all of the workflow could be sent"):
        workflow.result(shop.patience_s)
    assert [line for line in shop.notes() if line.startswith("note")] == []


def test_nothing_runs_of_an_atomic_one_whose_steps_can_t_all_be_made(shop):
    def steps():
        for _ in range(2 * LARGE):
            yield shop.simply_note.si("ran")
        raise LookupError("no more steps")

    with pytest.raises(LookupError) as raised:
        group(steps()).delay(atomic=True)
    assert not hasattr(raised.value, "__notes__")
    shop.run(shop.add.s(1, 1))
    assert shop.notes() == []


def test_40_a_part_that_is_refused_is_tried_again_until_there_is_room(shop):
    limit(shop, "shallow", LARGE + 5)
    shop.project.worker("flow_tasks:app", "-c", "1", "-Q", "shallow")
    members = [shop.add.s(i, i).options(queue="shallow") for i in range(4 * LARGE)]
    assert shop.run(group(iter(members)) | shop.total.s()) == sum(2 * i for i in range(4 * LARGE))


def test_40_a_group_that_finds_no_room_is_cancelled_and_says_how_much_of_it_ran(shop, monkeypatch):
    limit(shop, "tight", LARGE + 5)
    monkeypatch.setattr(shop.app, "call_timeout", 1.0)
    step = shop.simply_note.si("ran").options(queue="tight")
    with pytest.raises(
        QueueFull, match=r"tight.*50 jobs of workflow \S+ had been accepted.*0 of them had begun"
    ) as raised:
        group(itertools.repeat(step, 4 * LARGE)).delay()
    assert raised.value.maybe_accepted
    assert shop.notes() == []


def test_steps_of_an_iterator_are_sent_once_and_those_of_a_list_again(shop):
    made = group(shop.add.s(i, i) for i in range(2 * LARGE))
    assert "more than 50 in all" in str(made)
    made.delay()
    with pytest.raises(ValueError, match="was already sent, and its iterator"):
        made.delay()
    kept = group([shop.add.s(i, i) for i in range(2 * LARGE)])
    assert kept.delay() != kept.delay()
    assert (len(kept), len(kept.steps)) == (2 * LARGE, 2 * LARGE)


def test_a_long_chain_and_deep_groups_are_sent_and_run(shop):
    long = chain(shop.add.s(0, 1), *(shop.add.s(1) for _ in range(199)))
    assert shop.run(long) == 200
    deep = shop.add.s(1, 1)
    for _ in range(100):
        deep = group(deep)
    value = shop.run(deep)
    for _ in range(100):
        (value,) = value
    assert value == 2


def test_sending_200_000_calls_takes_a_few_megabytes(real):
    script = """
        from flow_tasks import add
        from penstock import group

        def peak_mb():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

        step = add.options(queue="nobody-takes-these")
        step.si(0, 0).delay()
        before = peak_mb()
        workflow = group(step.si(i, i) for i in range(200_000)).delay()
        workflow.cancel()
        # Print last: the broker's notice that nobody takes these jobs may come before.
        print(len(workflow), peak_mb() - before)
    """
    *_, count, megabytes = real.project.python(script).split()
    assert int(count) == 200_000
    # In a single transaction, half as many took 190 MB.
    assert float(megabytes) < 24


def test_a_later_step_reads_20_mb_of_results_in_a_few(real):
    read = real.peak_mb_of_reading.s().options(queue="readers")
    # The same process reads both.
    real.project.worker("flow_tasks:app", "-c", "1", "-Q", "readers")
    few, many = (real.run(group(real.page.s(number) for number in range(count)) | read) for count in (10, 20_000))
    assert many - few < 10


def test_its_members_add_others_only_if_it_was_sent_at_once(shop):
    calls = [*(shop.add.s(i, i) for i in range(LARGE)), shop.grows.s("a")]
    with pytest.raises(GroupError, match="must have been sent at once"):
        group(calls).delay().result(shop.patience_s)
    assert group(calls).delay(atomic=True).result(shop.patience_s)[LARGE:] == ["a", "a.0"]
