"""Uses of workflows, with the errors that type checkers must report. Read by test_typing.py; never run. See
accepted_and_refused.py."""

from typing import Any, assert_type

from penstock import (
    App,
    Chain,
    Chord,
    CurrentJob,
    Failure,
    Graph,
    Group,
    Job,
    JobState,
    Partial,
    PartialResults,
    Results,
    Signature,
    Workflow,
    chain,
    chord,
    chunks,
    current_job,
    graph,
    group,
)

app = App("shop")


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def send(to: str, body: str = "hello") -> int:
    return 0


@app.task
async def size(path: str) -> float:
    return 0.0


@app.task
def total(values: list[int]) -> int:
    return sum(values)


@app.task
def streamed(values: Results[int]) -> int:
    return 0


@app.task
def lenient(values: list[int | Failure]) -> int:
    return 0


@app.task
def show(number: int) -> str:
    return str(number)


@app.task
def join(texts: list[str]) -> str:
    return ""


@app.task
def log(*lines: str) -> None: ...


@app.task
def tidy() -> bool:
    return True


@app.task
def caught(failure: Failure) -> None: ...


# Calls: with all arguments, or without the first one.
assert_type(send.s("ada"), Signature[int])
assert_type(send.s(), Partial[str, int])
assert_type(send.s(body="hello"), Partial[str, int])
assert_type(add.s(1), Partial[int, int])
assert_type(log.s("a", "b"), Signature[None])
assert_type(tidy.s(), Signature[bool])
assert_type(add.s(1).options(queue="mail"), Partial[int, int])
add.s("a")  # E: call-overload
add.s(1, 2, 3)  # E: call-overload
add.s(1).delay()  # E: attr-defined
app.enqueue(add.s(1))  # E: call-overload
assert_type(app.enqueue(add.s(1, 2)), Job[int])

# Chains
assert_type(add.s(1, 2) | add.s(3), Chain[int])
assert_type(add.s(1, 2) | add.s(3) | show.s(), Chain[str])
assert_type(add.s(1, 2) | (add.s(3) | show.s()), Chain[str])
assert_type(add.s(1) | show.s(), Partial[int, str])
assert_type(add.s(1, 2) | tidy.si(), Chain[bool])
assert_type(chain(add.s(1, 2)), Signature[int])
assert_type(chain(add.s(1, 2), show.s()), Chain[str])
assert_type(chain(add.s(1, 2), add.s(1), add.s(1), show.s()), Chain[str])
assert_type(chain(add.s(1), show.s()), Partial[int, str])
add.s(1, 2) | send.s()  # E: operator
add.s(1, 2) | show  # E: operator
add.s(1, 2) | 3  # E: operator
chain(add.s(1, 2), size.s())  # E: misc

# Groups and chords
assert_type(group(add.s(i, i) for i in range(3)), Group[int])
assert_type(group(add.s(1, 1), add.s(2, 2)), Group[int])
assert_type(group([add.s(1, 1)], max_failures=1), Group[int | Failure])
assert_type(group(group(add.s(i, i) for i in range(3)) for _ in range(3)), Group[list[int]])
assert_type(group(add.s(1), add.s(2)), Partial[int, list[int]])
assert_type(group(add.s(1, 1)) | total.s(), Chord[int])
assert_type(group(add.s(1, 1)) | streamed.s(), Chord[int])
assert_type(chord(group(add.s(1, 1)), streamed.s()), Chord[int])
assert_type(group(add.s(1, 1)) | total.s() | show.s(), Chain[str])
assert_type(group([add.s(1, 1)], max_failures=1) | lenient.s(), Chord[int])
assert_type(add.s(1, 2) | group(add.s(1), add.s(2)), Chain[list[int]])
assert_type(group(add.s(1, 1)) | group(total.s(), total.s()), Chord[list[int]])
assert_type(chord(group(add.s(1, 1)), total.s()), Chord[int])
assert_type(chord([add.s(1, 1)], total.s()), Chord[int])
assert_type(chunks(add, [(1, 2), (3, 4)], 100), Group[list[int]])
assert_type(join.map_reduce([["a"]], join.s()), Chord[str])
group(add, add)  # E: call-overload
group(add.s(1)).delay()  # E: attr-defined
group(add.s(1, 1)) | show.s()  # E: operator
group([add.s(1, 1)], max_failures=1) | total.s()  # E: operator
chord(group(add.s(1, 1)), show.s())  # E: arg-type
chunks(add, [(1, "2")], 100)  # E: misc
show.map_reduce([1], total.s())  # E: arg-type

# Callbacks and options
assert_type(add.s(1, 2).link(show.s()), Signature[int])
assert_type((add.s(1, 2) | show.s()).link_error(caught.s()), Chain[str])
assert_type(group(add.s(1, 1)).link_error(caught.s(), each=True), Group[int])
assert_type(group(add.s(1, 1)).link(total.s()), Group[int])
add.s(1, 2).link(send.s())  # E: arg-type
add.s(1, 2).link_error(show.s())  # E: arg-type
(add.s(1, 2) | show.s()).link_error(caught.s(), each=True)  # E: call-arg
(add.s(1, 2) | show.s()).options(countdown=3)  # E: arg-type

# Workflows
workflow = (group(add.s(1, 1)) | show.map_reduce([1], join.s())).delay()
assert_type(workflow, Workflow[str])
assert_type(workflow.result(timeout=3), str)
members = group(add.s(1, 1)).delay()
assert_type(members, Workflow[list[int]])
assert_type(members.results(), Results[int])
assert_type(members.results()[0], int | Failure)
assert_type(members.results().ok(), list[int])
assert_type(members.partial(), PartialResults[Any])
assert_type(members.state(), JobState)
assert_type(members[0], Job[Any])
assert_type(app.workflow("id"), Workflow[Any])
workflow.results()  # E: misc
workflow.cancel(running="stop")  # E: arg-type
workflow[0.5]  # E: index

# Graphs.
nightly = graph("nightly")
assert_type(nightly, Graph)
assert_type(nightly.add("extract", add.s(1, 2)), str)
nightly.add("load", add.s(1), needs=["extract"])
nightly.add("mail", send.s(), needs={"load": "ended", "extract": "succeeded"})
nightly.add("twice", group(add.s(1), add.s(2)), needs=["extract"])
assert_type(nightly.delay(), Workflow[dict[str, Any]])
assert_type(nightly.delay().result(), dict[str, Any])
assert_type(nightly.delay()["load"], Job[Any])
nightly.add("task", add)  # E: arg-type
nightly.options(queue="mail")  # E: arg-type


async def in_a_loop() -> None:
    sent = await (add.s(1, 2) | show.s()).adelay()
    assert_type(await sent, str)
    assert_type([each async for each in await members.aresults()], list[int | Failure])
    assert_type(await members.apartial(), PartialResults[Any])


@app.task
def replaced(a: int) -> int:
    return app.replace(add.s(a, 1) | add.s(2))


@app.task
def replaced_by_others(a: int) -> str:
    return app.replace(group(add.s(a, 1), add.s(a, 2)))  # E: return-value


def leaving(job: CurrentJob) -> None:
    assert_type(job.spawn(add.s(1, 2)), Job[int])
    assert_type(job.spawn(add.s(1, 2) | show.s()), Workflow[str])
    job.spawn(add.s(1))  # E: call-overload
    job.spawn(add.s(1, 2), into="group")
    job.spawn(add.s(1, 2) | show.s(), into="group")
    job.spawn(add.s(1, 2), into="chain")  # E: call-overload
    job.spawn(add.s(1, 2), now=True, into="group")  # E: call-overload
    app.replace(add.s(1))  # E: arg-type
    app.replace(add)  # E: arg-type


def inside() -> str | None:
    job = current_job()
    return None if job is None else job.workflow
