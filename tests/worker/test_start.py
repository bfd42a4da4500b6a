"""Start of a worker: its tasks, the broker that it serves, and a broker that it has to wait for."""

from __future__ import annotations

import os
import signal

import pytest
from project import Project, eventually

PACKAGE = {
    "acme/__init__.py": "",
    "acme/app.py": """
        from penstock import App

        app = App("acme", include=["acme.mail"])
    """,
    "acme/mail.py": """
        from acme.app import app

        @app.task(queue="mail")
        def send(to: str) -> str:
            return f"sent to {to}"

        @app.task
        def spool() -> None: ...
    """,
    "acme/pay.py": """
        from acme.app import app

        @app.task
        def charge(amount: int) -> int:
            return amount
    """,
}


@pytest.fixture
def acme(project: Project) -> Project:
    for name, source in PACKAGE.items():
        project.write(name, source)
    return project


def test_a_worker_says_which_tasks_it_has_and_from_where(acme: Project) -> None:
    plain = acme.worker("acme.app:app", "--burst")
    assert plain.wait(30) == 0, plain.output
    assert "has loaded acme.app:app: 2 tasks from acme.mail (2)" in plain.output
    assert "task acme.mail.send" not in plain.output
    more = acme.worker("acme.app", "--burst", "-v", "-I", "acme.pay", "-I", "acme.mail")
    assert more.wait(30) == 0, more.output
    assert "has loaded acme.app:app: 3 tasks from acme.mail (2), acme.pay (1)" in more.output
    for task in ("acme.mail.send", "acme.mail.spool", "acme.pay.charge"):
        assert f"task {task}\n" in more.output


def test_a_module_that_is_named_on_the_command_line_is_imported(acme: Project) -> None:
    job = acme.python("import acme.pay; print(acme.pay.charge.delay(7).id)").strip()
    acme.worker("acme.app", "-c", "1", "-I", "acme.pay")
    assert acme.python(f"import acme.app; print(acme.app.app.job({job!r}).result(timeout=30))").strip() == "7"


def test_a_worker_serves_the_broker_that_its_app_names(project: Project) -> None:
    own = f"local:{project.directory}/own"
    project.write("thing.py", APP.format(url=own))
    project.environment["PENSTOCK_URL"] = ""
    thing = project.tasks("thing.py")
    worker = project.worker("thing", "-c", "2")
    assert thing.first.delay().result(timeout=30) == "second ran"
    assert f"slots from {own}; queues: default" in worker.output
    assert "the app's own broker" not in worker.output
    stop(project, own)


def stop(project: Project, *urls: str) -> None:
    for url in urls:
        assert project.penstock("broker", "stop", "--url", url).returncode == 0


APP = """
    from penstock import App

    app = App("thing", url="{url}")

    @app.task
    def first() -> str:
        return second.delay().result(timeout=20)

    @app.task
    def second() -> str:
        return "second ran"
"""


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_worker_that_is_told_another_broker_says_so(project: Project, by: str) -> None:
    own, other = f"local:{project.directory}/own", f"local:{project.directory}/other"
    project.write("thing.py", APP.format(url=own))
    options, environment = (["--url", other], "") if by == "option" else ([], other)
    worker = project.worker("thing", "-c", "1", *options, PENSTOCK_URL=environment)
    worker.wait_for_output("is connected and runs")
    assert f"slot from {other}; queues: default" in worker.output
    assert f"the app's own broker is {own}, but this worker serves {other}" in worker.output
    # The same URL spelled differently isn't reported as another one.
    same = project.worker("thing", "--burst", "--url", "local:own", PENSTOCK_URL="")
    assert same.wait(30) == 0, same.output
    assert "own broker is" not in same.output
    stop(project, own, other)


def test_tasks_of_an_app_without_a_url_enqueue_where_their_worker_is(project: Project) -> None:
    url = f"local:{project.directory}/elsewhere"
    project.write("thing.py", APP.replace(', url="{url}"', ""))
    project.environment["PENSTOCK_URL"] = ""
    project.worker("thing", "-c", "2", "--url", url)
    assert project.python("import thing; print(thing.first.delay().result(timeout=30))", PENSTOCK_URL=url) == (
        "second ran\n"
    )
    stop(project, url)


def test_a_worker_says_that_it_waits_for_its_broker_and_when_it_is_there(acme: Project) -> None:
    url = f"unix:{acme.directory}/socket"
    worker = acme.worker("acme.app", "-c", "1", "--url", url)
    worker.wait_for_output(f"this worker has waited 5 s for the broker at {url}, and keeps trying")
    assert "runs acme.app:app" not in worker.output
    serve = ("penstock", "server", "--listen", url, "--data", acme.directory / "data")
    server = acme.start(*serve)
    worker.wait_for_output(f"is connected and runs acme.app:app on 1 slot from {url}; queues: default, mail")
    os.kill(server.popen.pid, signal.SIGKILL)
    server.wait(30)
    acme.start(*serve)
    worker.wait_for_output(f"reconnected to the broker at {url}")
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0


def test_the_directory_of_a_local_broker_is_said_in_full(acme: Project) -> None:
    worker = acme.worker("acme.app", "-c", "1", PENSTOCK_URL="local:.penstock")
    eventually(lambda: "is connected" in worker.output)
    assert f"from local:{acme.directory}/.penstock" in worker.output


def test_a_queue_that_no_task_names_is_told_of(acme: Project) -> None:
    """The name is probably mistyped; but `options` may send jobs there, so it's only a warning."""
    typo = acme.worker("acme.app", "--burst", "-Q", "mail,maill")
    assert typo.wait(30) == 0, typo.output
    assert 'WARN no task of the app names the queue "maill"; its tasks name default, mail.' in typo.output
    right = acme.worker("acme.app", "--burst", "-Q", "mail")
    assert right.wait(30) == 0 and "WARN" not in right.output, right.output
