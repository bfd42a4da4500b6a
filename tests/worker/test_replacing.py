"""Steps that a job leaves behind, from slots of every kind: they are sent with its end, or not at all."""

from __future__ import annotations

from project import Project, eventually
from worker.kinds import Kind, named, notes

KINDS = [
    Kind("process", ("-c", "2")),
    Kind("thread", ("-c", "1", "--threads", "4")),
    Kind("async", ("-c", "1", "--async", "4")),
    Kind("isolated", ("-c", "1", "--isolated", "2")),
]

SOURCE = """
    import asyncio, os, signal, time
    from penstock import App, Retry, current_job, group

    app = App("leaves")

    @NOTES

    @app.task(slot="@KIND")
    @DEF twice(n: int) -> int:
        return 2 * n

    @app.task(slot="@KIND")
    @DEF tell(text: str) -> None:
        note("told", text)

    @app.task(slot="@KIND")
    @DEF hands_over(n: int) -> list[int]:
        current_job().spawn(tell.s("hands-over"))
        return app.replace(group(twice.s(n), twice.s(n + 1)))

    @app.task(slot="@KIND")
    @DEF total(numbers: list[int]) -> int:
        current_job().spawn(tell.s(f"total-{sum(numbers)}"))
        return sum(numbers)

    @app.task(slot="@KIND", retries=1, backoff=0.01, max_crashes=2)
    @DEF ends_badly_first(how: str) -> int:
        current_job().spawn(tell.s(how))
        step = app.replace(twice.s(4))
        if not (here / how).exists():
            (here / how).touch()
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"fails": LookupError("first"), "retries": Retry("first")}[how]
        return step
"""


@named(KINDS)
def test_a_job_of_any_kind_leaves_behind_what_it_says_and_an_attempt_that_ends_badly_leaves_nothing(
    project: Project, kind: Kind
) -> None:
    project.write("leaves.py", kind.source(SOURCE))
    tasks = project.tasks("leaves.py")
    worker = project.worker("leaves:app", *kind.options)
    told = ["hands-over", "total-14"]
    assert (tasks.hands_over.s(3) | tasks.total.s()).delay().result(timeout=60) == 14, worker.output
    for how in ("fails", "retries", "dies"):
        assert tasks.ends_badly_first.delay(how).result(timeout=60) == 8, worker.output
        told.append(how)
    eventually(lambda: len(notes(project, "told")) >= len(told), 60, lambda: worker.output)
    # What an attempt before had sent would have begun by the end of this one.
    tasks.tell.delay("the-end").result(timeout=60)
    assert sorted(notes(project, "told")) == sorted([*told, "the-end"])
