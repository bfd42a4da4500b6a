"""Uses of Penstock, with the errors that type checkers must report. Read by test_typing.py; never run.

A line that must be refused ends with the codes of mypy's errors there: ``# E: arg-type``, or ``# E(mypy): arg-type``
where pyright accepts it. On all other lines neither of them may find any. ``assert_type`` is refused when the type is
another one.
"""

import datetime
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, assert_type

import penstock
import penstock.testing as testing
from penstock import (
    App,
    AsyncTask,
    Call,
    CurrentJob,
    Job,
    JobInfo,
    JobState,
    Middleware,
    Partial,
    Progress,
    Retry,
    Signature,
    Task,
    current_job,
)
from penstock.testing import Calls, capture, inline, worker

app = App("shop", url="memory:", call_timeout=2)
App("shop", call_timeout="2")  # E: arg-type
App()  # E: call-arg


@app.task
def send(to: str, body: str = "hello") -> int:
    return len(to + body)


@app.task(queue="mail", retries=5, backoff=datetime.timedelta(seconds=1), retry_on=(OSError,), on_crash="fail")
async def fetch(url: str, *, limit: int = 0) -> bytes:
    raise Retry(countdown=3)


@app.task(store_result=False)
def log(*lines: str, **fields: int) -> None: ...


@app.task
def size(path: str) -> float:
    return 0.0


class Mail:
    @staticmethod
    @app.task
    def deliver(number: int) -> bool:
        return True


# The decorator gives tasks that know the function's own parameters and result.
as_task: Task[[str], float] = size
assert_type(size.function("a"), float)
fetched: Coroutine[Any, Any, bytes] = fetch.function("a")
fetched_text: Coroutine[Any, Any, str] = fetch.function("a")  # E: assignment
assert_type(send.delay("a"), Job[int])
assert_type(send.delay("a", body="b"), Job[int])
assert_type(fetch.delay("a", limit=3), Job[bytes])
assert_type(log.delay("a", "b", c=1), Job[None])
assert_type(Mail.deliver.delay(1), Job[bool])
send.delay()  # E: call-arg
send.delay(1)  # E: arg-type
send.delay("a", "b", "c")  # E: call-arg
send.delay("a", subject="b")  # E: call-arg
send.delay("a", body=None)  # E: arg-type
fetch.delay("a", 3)  # E: call-arg
log.delay("a", 1)  # E: arg-type
log.delay("a", c="1")  # E: arg-type
Mail.deliver.delay("1")  # E: arg-type

# Options of the decorator
app.task(retires=5)  # E: call-overload
app.task(retries="5")  # E: arg-type
app.task(on_crash="ignore")  # E: call-overload
app.task(3)  # E: call-overload

# A direct call is a call of the function.
assert_type(send("a"), int)
send(1)  # E: arg-type
_ = send("a").id  # E: attr-defined


async def direct() -> None:
    assert_type(await fetch("a"), bytes)
    await send("a")  # E: misc
    fetch("a")  # E: unused-coroutine


# options() keeps the types.
assert_type(send.options(countdown=1.5, priority=9).delay("a"), Job[int])
assert_type(fetch.options(eta=datetime.datetime.now(datetime.UTC)).options(queue="x").delay("a"), Job[bytes])
send.options(countdown=3).delay(1)  # E: arg-type
send.options(coutdown=3)  # E: call-arg
send.options(countdown="3")  # E: arg-type
send.options(eta=3)  # E: arg-type
send.options(durability="tape")  # E: arg-type
assert_type(send.options(retries=[1, 5]).delay("a"), Job[int])
send.options(retries="3")  # E: arg-type
send.options(backoff=3)  # E: call-arg
assert_type(send.options(timeout=datetime.timedelta(minutes=1), soft_timeout=50).delay("a"), Job[int])
send.options(timeout="1 m")  # E: arg-type
send.options(time_limit=3)  # E: call-arg

# Many at once
assert_type(size.map(["a", "b"]), list[Job[float]])
assert_type(send.map(name for name in "ab"), list[Job[int]])  # its other parameter has a default
assert_type(fetch.options(priority=1).map(["a"]), list[Job[bytes]])
assert_type(send.starmap([("a", "b")]), list[Job[int]])
size.map([1])  # E: list-item
size.map("a", "b")  # E: call-arg
send.starmap([("a", 1)])  # E: list-item
send.starmap([("a", "b", "c")])  # E: list-item

# Signatures
assert_type(send.s("a"), Signature[int])
assert_type(send.s(), Partial[str, int])  # without its first argument: a step adds that
assert_type(send.si("a").options(countdown=1).delay(), Job[int])
assert_type(app.enqueue([send.s("a"), send.si("b")]), list[Job[int]])
send.si()  # E: call-arg
send.si(1)  # E: arg-type
app.enqueue([send])  # E: arg-type
assert_type(app.enqueue(send.s("a")), Job[int])
assert_type(app.enqueue(send.s("a"), size.s("b")), tuple[Job[int], Job[float]])
assert_type(app.enqueue(send.s("a"), size.s("b"), fetch.s("c")), tuple[Job[int], Job[float], Job[bytes]])


# Jobs
def look(job: Job[int], anything: Job[object]) -> None:
    assert_type(job.result(), int)
    assert_type(job.result(timeout=1.5), int)
    assert_type(job.id, str)
    assert_type(job.cancel("no longer wanted"), JobState)
    assert_type(job.info(), JobInfo)
    assert_type(job.done(), bool)
    job.cancel(3)  # E: arg-type
    assert_type(job.cancel(running="kill"), JobState)
    job.cancel(running="stop")  # E: arg-type
    job.result("1")  # E: arg-type
    job.id = "x"  # E: misc
    look(job, job)
    look(anything, job)  # E: arg-type
    assert_type(app.job("0" * 32), Job[Any])
    assert_type(send.job("0" * 32), Job[int])


# Many jobs
def look_at_many(jobs: list[Job[int]], others: tuple[Job[bytes], ...]) -> None:
    assert_type(penstock.results(jobs), list[int])
    assert_type(penstock.results(others, timeout=3, return_errors=False), list[bytes])
    assert_type(penstock.results(jobs, return_errors=True), list[int | BaseException])
    assert_type(penstock.wait(jobs).done, list[Job[int]])
    _done, pending = penstock.wait(jobs, return_when="first")
    assert_type(pending, list[Job[int]])
    for job in penstock.as_completed(jobs):
        assert_type(job.result(), int)
    penstock.results([1])  # E: arg-type
    penstock.wait(jobs, return_when="any")  # E: arg-type


# Middleware, headers, hooks
class Trace(Middleware):
    def enqueue(self, calls: Sequence[Call], next: Callable[[Sequence[Call]], list[Job[Any]]]) -> list[Job[Any]]:
        for call in calls:
            call.headers["trace"] = "1"
            call.headers["trace"] = 1  # E: assignment
        return next(calls)

    def run(self, job: CurrentJob, next: Callable[[], object]) -> object:
        assert_type(job.headers, Mapping[str, str])
        return next()


class Wrong(Middleware):
    def run(self, job: str, next: Callable[[], object]) -> object:  # E: override
        return next()


app.use(Trace())
app.use(Trace)  # E: arg-type
with app.headers(tenant="north"):
    pass
app.headers(tenant=3)  # E: arg-type
App("defaults", defaults={"retries": None, "queue": "mail"})
App("defaults", defaults={"retires": 3})  # E: arg-type
assert_type(send.__name__, str)


# asyncio
async def main() -> None:
    assert_type(await send.adelay("a"), Job[int])
    assert_type(await (await fetch.adelay("a")), bytes)
    assert_type(await size.amap(["a"]), list[Job[float]])
    assert_type(await send.astarmap([("a", "b")]), list[Job[int]])
    assert_type(await app.aenqueue([size.s("a")]), list[Job[float]])
    assert_type(await send.s("a").adelay(), Job[int])
    assert_type(await send.delay("a").aresult(timeout=3), int)
    assert_type(await send.delay("a").ainfo(), JobInfo)
    assert_type(await send.delay("a").acancel(), JobState)
    assert_type(await app.aenqueue(size.s("a"), send.s("b")), tuple[Job[float], Job[int]])
    assert_type(await penstock.aresults([await send.adelay("a")]), list[int])
    assert_type((await penstock.async_wait([await send.adelay("a")])).pending, list[Job[int]])
    async for job in penstock.as_completed([await send.adelay("a")]):
        assert_type(job, Job[int])
    await send.adelay(1)  # E: arg-type
    await fetch.adelay("a", limit="3")  # E: arg-type
    await size.amap([1])  # E: list-item
    send.adelay("a")  # E: unused-coroutine


# Inside a task
assert_type(current_job(), CurrentJob | None)
_ = current_job().id  # E: union-attr


def tells_progress(job: CurrentJob, sent: Job[int]) -> None:
    job.progress(3, 10, "fetching")
    job.progress(0.5)
    job.progress("half")  # E: arg-type
    job.progress(3, 10, 7)  # E: arg-type
    assert_type(sent.progress(), Progress | None)
    for progress in sent.progress_updates(timeout=3):
        assert_type(progress, Progress)
        assert_type(progress.fraction, float | None)
    assert_type(sent.wait(progress=True), JobState)


# Passing tasks on
def enqueue_later(task: Task[[str], float] | AsyncTask[[str], float]) -> None:
    assert_type(task.delay("a"), Job[float])
    task.delay(1)  # E: arg-type


# Codecs
app.codec(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts))
app.codec(complex, lambda value: value.reel, lambda parts: complex(*parts))  # E: attr-defined
app.codec(complex, str, lambda text: [text])  # E(mypy): arg-type return-value
app.on_worker_start(lambda: None)
app.on_worker_start(lambda name: None)  # E: type-var


# Tests of one's own
with inline(app) as calls, capture() as captured, worker(app, threads=3) as threaded:
    assert_type(calls, Calls)
    assert_type(calls.assert_enqueued(send, args=("ada",), countdown=60, headers={"a": "b"}), testing.Call)
    assert_type(captured.run_until_idle(), int)
    threaded.run_until_idle(timeout=datetime.timedelta(seconds=1))
    calls.run_until_idle()  # E: attr-defined
    calls.refute_enqueued("shop.send", countdown="60")  # E: arg-type
    calls.assert_enqueued(send, colour="red")  # E: call-arg
with inline("shop"):  # E: arg-type
    pass


@app.task(unique="done")
def refresh(user: int) -> str:
    return str(user)


@app.task(unique=penstock.Unique(by=("user",), until=datetime.timedelta(minutes=5), on_conflict="raise"))
def once(user: int) -> str:
    return str(user)


@app.task(debounce=penstock.Debounce(2.0, max_wait=datetime.timedelta(minutes=1), by=("user",)))
def quiet(user: int) -> str:
    return str(user)


def unique_jobs() -> None:
    job = refresh.delay(1)
    assert_type(job, Job[str])
    assert_type(job.created, bool)
    assert_type(refresh.options(unique=None, idempotency_key="k").delay(1), Job[str])
    refresh.options(debounce=2.0, unique=None)
    refresh.options(unique="started")  # E: arg-type
    refresh.options(idempotency_key=7)  # E: arg-type
    app.task(idempotency_key="k")  # E: call-overload
    penstock.Unique(on_conflict="wait")  # E: arg-type
    try:
        once.delay(1)
    except penstock.JobExists as error:
        assert_type(error.job_id, str)
