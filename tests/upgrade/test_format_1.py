"""A journal written by an earlier version opens with every job in its state, and its jobs run on."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from project import Process, Project
from upgrade.format_1 import at_the_time, jobs, unpack

ASK = """\
    import json
    import sys

    from penstock import _core
    from penstock._connection import penstock_program
    from penstock._jobs.job import job_id_of
    from penstock.errors import ResultExpired

    client = _core.Client(sys.argv[1], program=penstock_program())
    found = {}
    for job in sys.argv[2:]:
        held = client.message_info(job_id_of(job), 20)
        if held:
            held["notes"] = [note.decode(errors="replace") for note in held["notes"]]
        try:
            end = client.peek(job_id_of(job), 20)
        except ResultExpired:
            end = None
        found[job] = (held, end and end[0])
    client.close(10)
    print(json.dumps(found))
"""
RESULTS = """\
    import sys

    from shop import app

    for job in sys.argv[1:]:
        print(app.job(job).result(timeout=20))
"""
ENDS = ("succeeded", "failed", "expired", "crashed", "cancelled")


@pytest.fixture
def left(project: Project) -> Project:
    """Return a project whose broker's directory is as an old program left it, at that time."""
    project.environment |= at_the_time()
    unpack(project.data)
    shutil.copy(Path(__file__).with_name("shop.py"), project.directory)
    return project


def local(project: Project) -> str:
    return project.url


def server(project: Project) -> str:
    assert project.penstock("journal", "upgrade", str(project.data)).returncode == 0
    url = f"unix:{project.directory}/socket"
    project.environment["PENSTOCK_URL"] = url
    serve(project, url).wait_for_output("listening on")
    return url


def serve(project: Project, url: str) -> Process:
    return project.start("penstock", "server", "--listen", url, "--data", project.data)


@pytest.mark.parametrize("broker", [local, server])
def test_every_job_of_format_1_is_in_its_state_and_goes_on(left, broker):
    url = broker(left)
    known = jobs()
    found = json.loads(left.python(ASK, url, *(job.id for job in known)))
    for job in known:
        held, end = found[job.id]
        assert (None if end is None else ENDS[end]) == job.ended, job
        assert (held and held["state"]) == job.state, job
        if held:
            told = (held["queue"], held["task"], held["attempt"], held["crashes"])
            assert told == (job.queue, job.task, job.attempt, job.crashes)
            errors = job.ended == "failed" or job.attempt
            assert any("shop.py" in note for note in held["notes"]) == bool(errors), job
        if job.state == "running":
            assert held["worker"] == "special"
    queues = {queue["name"]: queue for queue in left.status()["queues"]}
    assert queues["newsletters"]["paused"]
    assert (queues["thumbnails"]["max_length"], queues["thumbnails"]["max_bytes"]) == (1, 1_000_000)

    # Waiting jobs run, and finished jobs have their results.
    worked = left.penstock("worker", "shop:app", "--burst", "-c", "1")
    assert worked.returncode == 0, worked.output
    expected = {}
    for job in known:
        if job.ended == "succeeded":
            expected[job.id] = {"add(20, 22), carried forward": "42", "add(1, 2)": "3"}[job.what]
        elif (job.state, job.task, job.queue) == ("ready", "shop.hello", "default"):
            expected[job.id] = "hello, " + job.what.split("'")[1]
    assert len(expected) == 5
    assert left.python(RESULTS, *expected).splitlines() == list(expected.values())


def test_a_local_broker_upgrades_its_own_journal_and_its_log_says_so(left):
    left.python(ASK, left.url, jobs()[0].id)
    assert "format 1 to 2: earlier programs refuse it" in (left.data / "broker.log").read_text()
    left.kill_broker()
    again = left.penstock("journal", "upgrade", str(left.data))
    assert "in format 2" in again.output and "nothing was changed" in again.output


def test_a_server_changes_nothing_before_the_upgrade_and_says_what_to_type(left):
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (left.data / "journal").iterdir()}

    before = files()
    refused = serve(left, f"unix:{left.directory}/socket")
    assert refused.wait() == 78
    assert "is in format 1, and this program writes format 2" in refused.output
    assert files() == before
    # Type the command exactly as the message shows it.
    _, command, *_ = refused.output.split("`")
    upgraded = left.run(*shlex.split(command))
    assert upgraded.returncode == 0, upgraded.output
    assert "upgraded from format 1 to 2" in upgraded.output
    assert server(left)
    assert left.status()["queues"]
