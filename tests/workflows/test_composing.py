"""Steps before they are sent: how they compose, how they are shown, and which are refused."""

from __future__ import annotations

import pytest

from penstock import App, Chain, Chord, Group, Signature, chain, chord, chunks, group
from penstock.testing import capture, inline


@pytest.fixture
def app() -> App:
    # Nothing listens there, so any call that bypasses the double fails.
    return App("shop", "unix:/nonexistent/broker.sock", call_timeout=0.2)


@pytest.fixture
def add(app):
    @app.task(name="shop.add")
    def add(a: int, b: int) -> int:
        return a + b

    return add


@pytest.fixture
def show(app):
    @app.task(name="shop.show")
    def show(value: object = None) -> str:
        return repr(value)

    return show


def test_every_way_to_write_a_chain_is_the_same(add):
    a, b, c = add.s(1, 2), add.s(3), add.s(4)
    assert chain(a, b, c) == (a | b | c) == (a | (b | c)) == chain(a, chain(b, c))
    assert chain(a) == a
    assert isinstance(a | b, Chain) and not isinstance(a | b, Chord)
    assert len({type(step) for step in (a | b | c).steps} - {Signature}) == 0


def test_every_way_to_write_a_chord_is_the_same(add, show):
    members = [add.s(i, i) for i in range(3)]
    written = group(members) | show.s()
    assert written == chord(members, show.s()) == chord(group(*members), show.s())
    assert isinstance(written, Chord)
    assert (written.header, written.body) == (group(members), show.s())
    assert written != (group(members) | add.s(1))


def test_a_group_is_made_of_any_iterable_and_takes_it_once(add):
    taken = []

    def calls():
        for number in range(3):
            taken.append(number)
            yield add.s(number, number)

    members = group(calls())
    assert isinstance(members, Group) and len(members) == 3
    with inline():
        assert members.delay().result(0) == members.delay().result(0) == [0, 2, 4]
    assert taken == [0, 1, 2]


def test_steps_never_change(add, show):
    step = add.s(1, 2)
    for changed in (step.options(priority=9), step.link(show.s()), step.link_error(show.s()), step | show.s()):
        assert changed != step
    members = group(step)
    for changed in (members.link(show.s()), members.link_error(show.s()), members.link_error(show.s(), each=True)):
        assert changed != members
    assert step == add.s(1, 2) and members == group(step)
    assert step.link(show.s()) == step.link(show.s())
    assert step.link(show.s()).options(priority=9)._links == step.link(show.s())._links


def test_steps_are_shown_as_they_are_written(add, show):
    assert repr(add.s(1, 2) | show.s()) == "<Chain shop.add(1, 2) | shop.show()>"
    assert repr(group(add.s(i, b=0) for i in range(5))) == (
        "<Group group(shop.add(0, b=0), shop.add(1, b=0), shop.add(2, b=0), … 5 in all)>"
    )
    assert repr(add.s(1, 2) | (group(show.s()) | show.s())) == (
        "<Chain shop.add(1, 2) | (group(shop.show()) | shop.show())>"
    )
    assert repr(chunks(add, [(1, 2), (3, 4)], 5)) == "<Group group(2 calls of shop.add)>"


@pytest.mark.parametrize(
    ("compose", "error", "says"),
    [
        (lambda add, show: chain(), ValueError, "at least one step"),
        (lambda add, show: add.s(1, 2) | show, TypeError, r"shop.show is a task; use a call of it: show.s\(...\)"),
        (lambda add, show: group(add, add), TypeError, r"shop.add is a task; use a call of it: add.s\(...\)"),
        (lambda add, show: add | show.s(), TypeError, r"\| takes steps, but shop.add is a task; use a call of it"),
        (lambda add, show: [add.s(1, 2)] | show.s(), TypeError, r"\| takes steps, not a list of them; group\("),
        (lambda add, show: group("ab"), TypeError, r"steps such as task.s\(1\), a chain or a group, not 'ab'"),
        (lambda add, show: group(3), TypeError, "a chain or a group, not 3"),
        (lambda add, show: group([1]), TypeError, "a chain or a group, not 1"),
        (lambda add, show: group([], max_failures=-1), ValueError, "max_failures must be a number of steps, not -1"),
        (lambda add, show: add.s(1, 2).link(3), TypeError, "link takes steps"),
        (lambda add, show: add.s(1, 2).link_error(add.s(1, 2) | show.s()), TypeError, "link_error takes one call"),
        (lambda add, show: (add.s(1) | show.s()).options(priority=3), TypeError, r"such as shop.add.s\(...\).options"),
        (lambda add, show: group(add.s(1, 2)).options(queue="x"), TypeError, "a group has no options of its own"),
        (lambda add, show: chunks(add, [1], 3), TypeError, "a tuple of arguments for each call, not 1"),
        (lambda add, show: chunks(add, [], 0), ValueError, "n must be the number of calls in a job, not 0"),
        (lambda add, show: chunks(3, [], 1), TypeError, "chunks takes a task, not 3"),
        (lambda add, show: show.map_reduce([1], show.s(), fan_in=1), ValueError, "fan_in must be a number from 2"),
        (lambda add, show: add.app.enqueue(add.s(1, 2) | show.s()), TypeError, r"is a workflow: send it"),
        (lambda add, show: add.app.enqueue(add.s(1, 2).link(show.s())), TypeError, "calls without callbacks"),
        (lambda add, show: add.options(link=show.s()), TypeError, r"the method of a call: task.s\(...\).link"),
    ],
)  # fmt: skip
def test_what_is_no_step_is_refused_where_it_is_written(add, show, compose, error, says):
    with pytest.raises(error, match=says):
        compose(add, show)


def test_a_job_that_was_enqueued_is_no_step(add, show):
    with capture() as calls:
        job = add.delay(1, 2)
        with pytest.raises(TypeError, match=r"is already enqueued; task.s\(...\) makes a call for later"):
            group(job)
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("compose", "error", "says"),
    [
        (lambda add, show: add.s(1, 2) | add.s("b"), TypeError, "argument b must be int, not str 'b'"),
        (lambda add, show: add.s(1, 2) | add.s(1, 2), TypeError, r"takes 2 positional .*by .si\(...\) does not get it"),
        (lambda add, show: add.s(1, 2) | add.s(a=1, b=2), TypeError, "multiple values for argument 'a'"),
        (lambda add, show: chain(add.s(1), show.s()), TypeError, "missing 1 required positional argument: 'b'"),
        (lambda add, show: group(add.s(1, "2")), TypeError, "argument b must be int"),
        (lambda add, show: chunks(add, [(1, 2), (1, "2")], 2), TypeError, "argument b must be int"),
    ],
)  # fmt: skip
def test_what_can_t_be_sent_is_refused_before_anything_is(add, show, compose, error, says):
    with capture() as calls, pytest.raises(error, match=says):
        compose(add, show).delay()
    assert calls == []


def test_groups_are_nested_as_deep_as_their_values_can_be_read(add, show):
    step = add.s(1, 2)
    for _ in range(128):
        step = group(step)
    with inline():
        assert (step | show.s()).delay().result(0) == "[" * 128 + "3" + "]" * 128
        with pytest.raises(ValueError, match="nested more than 128 levels deep"):
            group(step).delay()
