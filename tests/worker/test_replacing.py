"""Steps that a job sends, from slots of every kind: atomically with its end, or at once and never twice."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from project import Project, eventually
from worker.kinds import Kind, named, notes

from penstock import group

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
        @NOW(tell.s(f"{how}-now"))
        @NOW(group(tell.s(f"{how}-now"), tell.s(f"{how}-now")))
        step = app.replace(twice.s(4))
        if not (here / how).exists():
            (here / how).touch()
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"fails": LookupError("first"), "retries": Retry("first")}[how]
        return step

    @app.task(slot="@KIND")
    @DEF until() -> float:
        return current_job().deadline.timestamp()

    @app.task(slot="@KIND")
    @DEF tells_until() -> None:
        note("told", current_job().deadline.timestamp())

    @app.task(slot="@KIND")
    @DEF hands_over_until() -> list[float]:
        current_job().spawn(tells_until.s())
        @NOW(tells_until.s())
        return app.replace(group(until.s(), until.s()))
"""


def source_of(kind: Kind) -> str:
    at_once = "await current_job().aspawn({})" if kind.name == "async" else "current_job().spawn({}, now=True)"
    return re.sub(r"@NOW\((.*)\)$", lambda found: at_once.format(found[1]), kind.source(SOURCE), flags=re.MULTILINE)


@named(KINDS)
def test_a_job_of_any_kind_leaves_behind_what_it_says_and_an_attempt_that_ends_badly_leaves_nothing(
    project: Project, kind: Kind
) -> None:
    project.write("leaves.py", source_of(kind))
    tasks = project.tasks("leaves.py")
    worker = project.worker("leaves:app", *kind.options)
    told = ["hands-over", "total-14"]
    assert (tasks.hands_over.s(3) | tasks.total.s()).delay().result(timeout=60) == 14, worker.output
    for how in ("fails", "retries", "dies"):
        assert tasks.ends_badly_first.delay(how).result(timeout=60) == 8, worker.output
        # The first attempt sent its immediate steps, and the second didn't send them again.
        told += [how] + 3 * [f"{how}-now"]
    eventually(lambda: len(notes(project, "told")) >= len(told), 60, lambda: worker.output)
    # Any steps sent by an earlier attempt would have begun before this job ends.
    tasks.tell.delay("the-end").result(timeout=60)
    found = notes(project, "told")
    # A step that ran in the process of the attempt that died, and had told already, runs again.
    again = found.count("dies-now") - told.count("dies-now")
    assert again == 0 or (kind.name in ("thread", "async") and again in (1, 2, 3))
    assert sorted(found) == sorted([*told, *again * ["dies-now"], "the-end"])


@named(KINDS)
def test_a_job_of_any_kind_knows_the_deadline_of_its_workflow_and_so_does_each_that_it_sends(
    project: Project, kind: Kind
) -> None:
    project.write("leaves.py", source_of(kind))
    tasks = project.tasks("leaves.py")
    worker = project.worker("leaves:app", *kind.options)
    deadline = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    at = deadline.timestamp()
    workflow = group(tasks.until.s(), tasks.hands_over_until.s()).delay(deadline=deadline)
    assert workflow.result(timeout=60) == [at, [at, at]], worker.output
    eventually(lambda: len(notes(project, "told")) >= 2, 60, lambda: worker.output)
    assert notes(project, "told") == [str(at)] * 2
