"""Tasks that trees consist of (trees.py), and the conversion of trees to steps.

Each run first writes a line into the books: its job, its attempt, and the runs that produced its arguments.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

import trees

import penstock
from penstock import App, Failure, chunks, current_job

# Long enough that no call fails while its broker is killed: the next one starts much sooner.
app = App("trees", call_timeout=30)

_books: list[int] = []


class Boom(Exception):
    pass


def write(event: str, **about: object) -> None:
    if not _books:
        _books.append(os.open(os.environ["BOOKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # One call per line: a kill -9 tears none, and their order is an order in which things happened.
    os.write(_books[0], (json.dumps({"event": event, **about}) + "\n").encode())


def shape(value: Any) -> Any:
    """Return a value that a task received or a client read, in the evaluator's form."""
    match value:
        case {"value": str(text), "pad": str(pad)} if pad == "x" * len(pad) and text.endswith(f"+{len(pad)}"):
            return text
        case {"value": str(text), "label": _, "run": _} if "pad" not in value:
            return text
        case list():
            return [shape(each) for each in value]
        case Failure():
            return "!"
    return f"no value of a tree: {value!r:.200}"


def runs_in(value: Any) -> list[list[str]]:
    match value:
        case {"label": label, "run": run}:
            return [[label, run]]
        case list():
            return [run for each in value for run in runs_in(each)]
    return []


def failures_in(value: Any) -> list[str]:
    match value:
        case Failure():
            return [f"{value.type_name}: {value.message}"]
        case list():
            return [found for each in value for found in failures_in(each)]
    return []


def begin(label: str, values: list[Any]) -> str:
    job = current_job()
    assert job is not None
    run = uuid.uuid4().hex[:12]
    write(
        "begin",
        label=label,
        job=job.id,
        attempt=job.attempt,
        run=run,
        given=[shape(value) for value in values],
        saw=runs_in(values),
        failures=failures_in(values),
    )
    # Long enough that some runs are killed.
    time.sleep(random.Random(label).choice([0, 0, 0.002, 0.02]))
    return run


def add_to_group(labels: Sequence[str]) -> None:
    """Add calls to the group of the running job. An attempt that fails adds none."""
    job = current_job()
    assert job is not None
    for label in labels:
        job.spawn(step.si(label=label), into="group")


@app.task(max_crashes=255)
def step(*values: object, label: str, fails: bool = False, pad: int = 0, adds: Sequence[str] = ()) -> dict[str, object]:
    run = begin(label, list(values))
    add_to_group(adds)
    if fails:
        raise Boom(f"boom {label}.")
    return result(label, run, 1, list(values), pad)


@app.task(max_crashes=255)
async def astep(
    *values: object, label: str, fails: bool = False, pad: int = 0, adds: Sequence[str] = ()
) -> dict[str, object]:
    run = begin(label, list(values))
    add_to_group(adds)
    await asyncio.sleep(random.Random(label).choice([0, 0.002, 0.02]))
    if fails:
        raise Boom(f"boom {label}.")
    return result(label, run, 1, list(values), pad)


@app.task(max_crashes=255, retries=trees.RETRIES, backoff=0.02, jitter=0)
def retried(*values: object, label: str, failures: int, pad: int = 0, adds: Sequence[str] = ()) -> dict[str, object]:
    run = begin(label, list(values))
    add_to_group(adds)
    job = current_job()
    assert job is not None
    if job.attempt <= failures:
        raise Boom(f"boom {label}.")
    return result(label, run, job.attempt, list(values), pad)


@app.task(max_crashes=255)
def leaf(*values: object, label: str = "") -> dict[str, object]:
    # The item is the last argument; the result of the previous step may precede it.
    label, _, kind = str(values[-1]).partition(" ")
    run = begin(label, [])
    if kind == "fail":
        raise Boom(f"boom {label}.")
    return {"label": label, "run": run, "value": label}


@app.task(max_crashes=255)
def reduce(values: list[dict[str, object]], label: str) -> dict[str, object]:
    run = begin(label, [values])
    return {"label": f"{label} {run}", "run": run, "value": trees.reduced([str(each["value"]) for each in values])}


def result(label: str, run: str, attempt: int, values: list[Any], pad: int) -> dict[str, object]:
    given = [shape(value) for value in values]
    return {"label": label, "run": run, "value": trees.pure(label, attempt, given, pad), "pad": "x" * pad}


# From trees to steps.


def built(tree: trees.Tree, chance: random.Random, added: tuple[trees.Call, ...] = ()) -> Any:
    """Compose the steps of a tree, in one of the equivalent ways to write it. ``added``: calls that it adds to its
    group."""
    match tree:
        case trees.Call():
            made = call(tree, added)
        case trees.Chain():
            steps = [built(each, chance) for each in tree.steps]
            # `group([]) | step` is a chord, whose body gets a list; in a chain the group is skipped.
            can_pipe = tree.steps[0] != trees.Group(())
            made = piped(steps) if can_pipe and chance.random() < 0.5 else penstock.chain(*steps)
        case trees.Group():
            members = [
                built(each, chance, tree.added if place == tree.adder else ())
                for place, each in enumerate(tree.members)
            ]
            made = penstock.group(members, max_failures=tree.max_failures)
            for errback in tree.each:
                made = made.link_error(built(errback, chance), each=True)
        case trees.EmptyChord():
            made = penstock.chord([], built(tree.body, chance))
        case trees.MapReduce():
            items = [f"{tree.label}.{index} {kind}" for index, kind in enumerate(tree.items)]
            made = leaf.map_reduce(items, reduce.s(label=tree.label), fan_in=tree.fan_in)
        case trees.Chunks():
            calls = [(f"{tree.label}.{index} {kind}",) for index, kind in enumerate(tree.items)]
            made = chunks(leaf, calls, tree.size)
    for link in tree.links:
        made = made.link(built(link, chance))
    for errback in tree.errbacks:
        made = made.link_error(built(errback, chance))
    return made


def piped(steps: list[Any]) -> Any:
    made = steps[0]
    for step in steps[1:]:
        made = made | step
    return made


def call(tree: trees.Call, added: tuple[trees.Call, ...]) -> Any:
    options: dict[str, Any] = {}
    if tree.kind == "late":
        options.update(countdown=0.2, expires=0.05)
    if tree.kept == "briefly":
        options.update(result_ttl=0.05)
    if tree.kept == "not":
        options.update(store_result=False)
    if tree.kind in ("flaky", "stubborn"):
        sender, about = retried.options(**options), {"failures": tree.failures}
    else:
        task = astep if tree.is_async else step
        sender, about = task.options(**options), {"fails": tree.kind == "fail"}
    make = sender.s if tree.takes else sender.si
    if added:
        about = {**about, "adds": [each.label for each in added]}
    return make(label=tree.label, pad=tree.pad, **about)
