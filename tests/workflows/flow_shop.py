"""Tasks that serve as workflow steps, with helpers for tests."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from project import Project, eventually

TASKS = """
    import os
    import time
    from dataclasses import dataclass
    from pathlib import Path

    from typing import Any

    from penstock import App, Failure, Results, Step, current_job, graph, group

    app = App("flows")
    here = Path(__file__).parent


    class OutOfPaper(Exception):
        pass


    @dataclass
    class Order:
        number: int


    def write(line: str) -> None:
        with (here / "notes.txt").open("a") as file:
            file.write(f"{line}\\n")


    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    @app.task
    async def aadd(a: int, b: int) -> int:
        return a + b

    @app.task
    def total(values: list[int]) -> int:
        return sum(values)

    @app.task
    def show(*values: object) -> str:
        return ", ".join(map(repr, values))

    @app.task
    def count_in(values: Results[int]) -> tuple[str, int, int]:
        return type(values).__name__, len(values), sum(value for value in values if isinstance(value, int))

    @app.task
    async def acount_in(values: Results[int]) -> int:
        return sum([value async for value in values if isinstance(value, int)])

    @app.task
    def page(number: int) -> str:
        return f"{number:1000}"

    @app.task
    def peak_mb_of_reading(pages: Results[str]) -> float:
        assert all(int(page) == number for number, page in enumerate(pages) if isinstance(page, str))
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

    @app.task
    async def ashow(values: object) -> str:
        return repr(values)

    @app.task(store_result=False)
    def quiet(a: int) -> int:
        return a + 1

    @app.task
    def fail(value: object = None, *, why: str = "no paper") -> int:
        raise OutOfPaper(why)

    @app.task
    def fail_first(value: object, name: str) -> str:
        if not (here / name).exists():
            (here / name).touch()
            raise OutOfPaper(repr(value))
        return repr(value)

    @app.task(retries=2, backoff=0.01, jitter=0)
    def stumble(a: int) -> int:
        job = current_job()
        write(f"attempt {job.attempt}")
        if job.attempt < 3:
            raise OutOfPaper("try again")
        return a

    @app.task
    def note(value: object, label: str = "note") -> str:
        write(f"{label}: {value!r}")
        return label

    @app.task
    def simply_note(label: str) -> str:
        write(label)
        return label

    @app.task
    def caught(failure: Failure, label: str = "caught") -> None:
        write(f"{label}: {failure.type_name}: {failure.message}")

    @app.task
    def caught_badly(failure: Failure) -> None:
        write("caught badly")
        raise OutOfPaper("in the errback")

    @app.task
    def lenient(values: list[int | Failure]) -> str:
        return ", ".join(value.type_name if isinstance(value, Failure) else str(value) for value in values)

    @app.task
    def lenient_one(value: object) -> str:
        return value.type_name if isinstance(value, Failure) else str(value)

    @app.task
    def lenient_both(one: object, other: object) -> str:
        return ", ".join(map(lenient_one, (one, other)))

    @app.task
    def make_order(number: int) -> Order:
        return Order(number)

    @app.task
    def number_of(order: Order) -> int:
        return order.number

    @app.task
    def whose() -> str | None:
        return current_job().workflow

    @app.task
    def until(*values: object) -> float | None:
        deadline = current_job().deadline
        return None if deadline is None else deadline.timestamp()

    @app.task
    def log_in(user: str, password: str) -> str:
        raise OutOfPaper(f"{user} can't log in with {password}")

    @app.task
    def wait_for(name: str) -> str:
        write(f"waits for {name}")
        while not (here / name).exists():
            time.sleep(0.005)
        return name

    @app.task(max_crashes=1)
    def die() -> int:
        os._exit(1)

    @app.task
    def die_once(name: str) -> int:
        if not (here / name).exists():
            (here / name).touch()
            os._exit(1)
        return 1

    @app.task
    def blob(size: int) -> bytes:
        return b"x" * size

    @app.task
    async def asizes(blobs: list[bytes]) -> list[int]:
        return [len(blob) for blob in blobs]

    @app.task
    def sizes(blobs: list[bytes]) -> list[int]:
        return [len(blob) for blob in blobs]

    def way(how: str, a: int, name: str) -> Step[Any]:
        match how:
            case "call":
                return add.s(a, 100)
            case "chain":
                return add.s(a, 100) | add.s(1000)
            case "group":
                return group(add.s(a, n) for n in range(3))
            case "chord":
                return group(add.s(a, n) for n in range(3)) | total.s()
            case "graph":
                steps = graph()
                steps.add("one", add.s(a, 1))
                steps.add("two", add.s(1), needs=["one"])
                return steps
            case "waits":
                return group(wait_for.si(name), add.s(a, 1).options(countdown=600))
            case "until":
                return until.si()
            case "untils":
                return group(until.si(), until.si())
            case "linked":
                return add.s(a, 100).link(note.s("linked"))
            case "nothing":
                return group([])
            case "hollow":
                return group(group([]), add.s(a, 1))
            case "again":
                return replaced.s("call", a)
            case "wait":
                return wait_for.si(name)
            case "stumble":
                return stumble.s(a)
            case "fail":
                return fail.s(why="at last")
            case "fail once":
                return fail_first.s(a, name)
            case "later":
                return add.s(a, 100).options(countdown=0.05, queue="second")
        raise ValueError(how)

    @app.task
    def replaced(how: str, a: int, name: str = "", raises: bool = False) -> Any:
        step = app.replace(way(how, a, name))
        if raises:
            raise step
        return step

    @app.task
    def replaced_after(a: int, how: str, name: str = "") -> Any:
        return app.replace(way(how, a, name))

    @app.task
    async def areplaced(how: str, a: int, raises: bool = False) -> Any:
        step = app.replace(way(how, a, ""))
        if raises:
            raise step
        return step

    @app.task(store_result=False)
    def quietly_replaced(a: int) -> Any:
        return app.replace(add.s(a, 1))

    @app.task
    def replaced_for_ever(times: int = 0) -> Any:
        return app.replace(replaced_for_ever.s(times + 1))

    @app.task
    def not_returned(a: int) -> int:
        app.replace(note.s(a))
        return a

    @app.task(retries=1, backoff=0.01, jitter=0)
    def spawner(label: str, how: str = "call") -> str:
        job = current_job()
        job.spawn({"call": note.s(label), "chain": simply_note.s(label) | note.s("after")}[how])
        if how == "fail":
            raise OutOfPaper
        return label

    @app.task(retries=1, backoff=0.01, jitter=0)
    def spawns_and_stumbles(label: str) -> str:
        job = current_job()
        job.spawn(simply_note.s(f"{label} {job.attempt}"))
        if job.attempt == 1:
            raise OutOfPaper
        return label

    @app.task
    def spawns_and_is_replaced(label: str) -> Any:
        current_job().spawn(simply_note.s(label))
        return app.replace(add.s(1, 2))

    @app.task(retries=1, backoff=0.01, jitter=0)
    def sends_now(label: str, fails: int = 0) -> list[str]:
        job = current_job()
        steps = [
            simply_note.s(label),
            simply_note.s(label),
            simply_note.s(f"{label} first") | note.s(f"{label} then"),
            group(simply_note.s(f"{label} member"), simply_note.s(f"{label} member")),
            group([]),
        ]
        sent = [job.spawn(step, now=True) for step in steps]
        if job.attempt <= fails:
            raise OutOfPaper(label)
        return [each.id for each in sent]

    @app.task
    async def asends_now(label: str) -> Any:
        job = current_job()
        return [await (await job.aspawn(simply_note.s(label))), await (await job.aspawn(group(simply_note.s(label))))]

    @app.task
    def waits_for_what_it_sends() -> Any:
        job = current_job()
        return [job.workflow, job.spawn(whose.s(), now=True).result(), job.spawn(group(whose.s()), now=True).result()]

    @app.task
    def sends_until() -> Any:
        return current_job().spawn(until.s(), now=True).result()

    @app.task
    def sends_and_is_replaced(times: int) -> Any:
        current_job().spawn(simply_note.s(f"{times} left"), now=True)
        return app.replace(sends_and_is_replaced.s(times - 1)) if times else "over"

    @app.task
    def sends_elsewhere(url: str) -> Any:
        other = App("other", url)
        return current_job().spawn(other.task(name="other.task")(lambda: None).s())

    @app.task
    def spawns_a_waiter(name: str) -> str:
        current_job().spawn(wait_for.si(name))
        return name

    @app.task(retries=1, backoff=0.01, jitter=0)
    def grows(label: str, more: int = 1, kind: str = "again") -> str:
        job = current_job()
        for number in range(more):
            step = {
                "again": grows.s(f"{label}.{number}", more - 1),
                "chain": simply_note.s(f"{label} first") | show.s(),
                "group": group(simply_note.s(label), simply_note.s(label)),
                "linked": simply_note.s(label).link(note.s("link")),
                "fails": fail.s(3),
                "empty": group([]),
                "quiet": quietly_replaced.s(5),
            }[kind]
            assert job.spawn(step, into="group") is None
        if job.attempt == 1 and kind == "chain":
            raise OutOfPaper
        return label

    @app.task
    def grows_and_is_replaced(label: str) -> Any:
        current_job().spawn(add.s(3, 4), into="group")
        return app.replace(add.s(1, 2) | show.s())

    @app.task
    def grows_wrongly(**options: Any) -> Any:
        current_job().spawn(add.s(3, 4), **options)
"""


class FlowShop:
    def __init__(self, project: Project, tasks: ModuleType, *, is_real: bool) -> None:
        self.project = project
        self.tasks: Any = tasks
        self.is_real = is_real
        # A worker needs time; inline, everything has happened when `delay` returns.
        self.patience_s = 60 if is_real else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tasks, name)

    def clear(self) -> None:
        """Forget what tasks wrote, and what they failed for once, or a test that is run again would find it done."""
        for file in self.project.directory.iterdir():
            if file.is_file() and not file.suffix:
                file.unlink()
        (self.project.directory / "notes.txt").write_text("")

    def notes(self) -> list[str]:
        return (self.project.directory / "notes.txt").read_text().splitlines()

    def wait_for_notes(self, count: int) -> list[str]:
        eventually(lambda: len(self.notes()) >= count, self.patience_s, lambda: str(self.notes()))
        return self.notes()

    def touch(self, name: str) -> None:
        (self.project.directory / name).touch()

    def run(self, step: Any) -> Any:
        """Send a step and return its result."""
        return step.delay().result(self.patience_s)
