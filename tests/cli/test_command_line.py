"""Command line: fast help, tables, JSON, exit codes, and errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import resource
import sys

import pytest
from project import SCRIPTS, eventually, pidfd

TASKS = """
    from penstock import App

    app = App("shop")

    @app.task
    def double(number: int) -> int:
        return 2 * number

    @app.task(queue="mail")
    def send(to: str) -> None:
        pass
"""

COMMANDS = [
    "worker", "workers", "server", "status", "ping", "queue", "purge", "limit", "pause", "resume",
    "job", "failed", "journal", "broker", "demo",
]  # fmt: skip


@pytest.fixture
def shop(project):
    project.write("tasks.py", TASKS)
    return project


def test_help_takes_less_than_150_ms_of_a_processor(project):
    # Measured in CPU time, because wall time includes other work of this machine. The command waits for nothing.
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = []
    for _ in range(9):
        before = spent()
        assert project.run(SCRIPTS / "penstock", "--help").returncode == 0
        times.append(spent() - before)
    assert min(times) < 0.150, times


def test_help_names_every_command(project):
    output = project.penstock("--help").output
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", output, re.MULTILINE), output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(project, command):
    run = project.penstock(command, "--help")
    assert run.returncode == 0
    assert "Usage: penstock" in run.output


def test_the_version_is_that_of_the_package(project):
    import penstock

    assert project.penstock("--version").output.strip() == f"penstock {penstock.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["worker"],
        ["purge"],
        ["status", "--frobnicate"],
        ["limit"],
        ["limit", "mail"],
        ["worker", "tasks:app", "-Q", ""],
        ["worker", "tasks:app", "-Q", "a,,b"],
        ["worker", "tasks:app", "-Q", "a,"],
        ["pause", "queue:"],
        ["pause", "what:mail"],
        ["status", "--url", "amqp://rabbit"],
        ["status", "--url", "memory:"],
    ],
)
def test_a_wrong_call_exits_with_2(project, arguments):
    run = project.penstock(*arguments)
    assert run.returncode == 2, run.output
    assert "Traceback" not in run.output


def test_an_empty_url_in_the_environment_names_no_broker(project):
    run = project.penstock("status", PENSTOCK_URL="")
    assert run.returncode == 69, run.output
    assert f"no broker is running for {project.directory}" in run.output
    assert "or a new worker, starts it" in run.output


@pytest.mark.parametrize(
    ("level", "said", "unsaid"),
    [
        ("error", ["boom"], ["retry 1 of 1", "shop:app", "succeeded"]),
        ("warning", ["boom", "retry 1 of 1"], ["shop:app", "succeeded"]),
        ("info", ["boom", "retry 1 of 1", "shop:app"], ["succeeded"]),
        ("debug", ["boom", "retry 1 of 1", "shop:app", "succeeded"], []),
    ],
)
def test_a_worker_says_as_much_as_it_is_asked_to(project, level, said, unsaid):
    project.write(
        "shop.py",
        """
        import penstock

        app = penstock.App("shop")


        @app.task(retries=1, backoff=0)
        def fail() -> None:
            raise ValueError("boom")


        @app.task
        def work() -> None:
            pass
        """,
    )
    project.python("import shop; shop.fail.delay(); shop.work.delay()")
    worker = project.start("penstock", "worker", "shop:app", "-c1", "--burst", "--log-level", level)
    assert worker.wait(60) == 0
    assert all(text in worker.output for text in said), worker.output
    assert not any(text in worker.output for text in unsaid), worker.output


def test_an_address_of_a_kind_that_is_not_built_says_so(project):
    for command in (["pause"], ["resume"], ["purge", "-y"], ["limit", "set", "--max-length", "1"], ["limit", "rm"]):
        run = project.penstock(*command, "task:tasks.send")
        assert run.returncode == 75, run.output
        assert "task:tasks.send is not offered yet" in run.output


@pytest.mark.parametrize(
    "entry", [[SCRIPTS / "penstock"], [sys.executable, "-m", "penstock"]], ids=["script", "module"]
)
def test_a_script_and_a_module_become_the_program(shop, entry):
    assert shop.run(*entry, "--version").output == shop.penstock("--version").output
    assert shop.run(*entry, "frobnicate").returncode == 2
    job = shop.tasks().double.delay(4)
    # Its workers run in the interpreter of the entry point, and so with the same packages.
    worker = shop.run(*entry, "worker", "tasks:app", "-c1", "--burst", PATH=os.defpath)
    assert worker.returncode == 0, worker.output
    assert job.result(timeout=30) == 8


def test_old_names_and_celery_habits_get_an_answer(project):
    for line, says in {
        "fsck .penstock": "penstock journal check",
        "stop": "penstock broker stop",
        "limit mail --none": "penstock limit set",
        "worker -A tasks": "first argument",
        "worker tasks:app -l info": "--log-level",
    }.items():
        run = project.penstock(*line.split())
        assert run.returncode == 2 and says in run.output, run.output


def test_ping_says_whether_a_broker_answers(shop):
    nobody = shop.penstock("ping")
    assert nobody.returncode == 69 and "no broker is running" in nobody.output
    shop.tasks().double.delay(1)
    assert "answered in" in shop.penstock("ping").output
    assert json.loads(shop.penstock("ping", "--json").output)["pid"] == shop.broker_pid()


def test_queues_and_workers_are_listed_apart(shop):
    tasks = shop.tasks()
    tasks.send.delay("a")
    shop.worker("tasks:app", "-c", "2", "-Q", "default")
    assert tasks.double.delay(2).result(timeout=30) == 4
    queues = json.loads(shop.penstock("queue", "ls", "--json").output)
    assert {queue["name"]: queue["ready"] for queue in queues} == {"default": 0, "mail": 1}
    assert re.search(r"^mail +1 ", shop.penstock("queue", "ls").output, re.MULTILINE)
    (worker,) = json.loads(shop.penstock("workers", "ls", "--json").output)
    assert (worker["slots"], worker["queues"]) == (2, ["default"])
    assert "of 2 slots are busy" in shop.penstock("workers", "ls").output


def test_a_paused_queue_keeps_its_jobs_until_it_is_resumed(shop):
    tasks = shop.tasks()
    job = tasks.send.delay("a")
    assert shop.penstock("pause", "mail").returncode == 0
    shop.worker("tasks:app", "-c", "1")
    assert tasks.double.delay(2).result(timeout=30) == 4
    assert job.info().state == "waiting"
    assert json.loads(shop.penstock("resume", "queue:mail", "--json").output) == {
        "address": "queue:mail",
        "paused": False,
    }
    assert job.result(timeout=30) is None


def test_limits_are_set_listed_and_removed(shop):
    shop.tasks().send.delay("a")
    for queue in ("mail", "queue:a:b"):
        assert shop.penstock("limit", "set", queue, "--max-length", "3").returncode == 0
    listed = json.loads(shop.penstock("limit", "ls", "--json").output)
    assert [limit["address"] for limit in listed] == ["queue:a:b", "queue:mail"]
    assert listed[1]["max_length"] == 3
    assert shop.penstock("limit", "rm", "mail").returncode == 0
    assert "queue:mail" not in shop.penstock("limit", "ls").output


def test_status_shows_queues_and_workers(shop):
    tasks = shop.tasks()
    tasks.send.map(["a", "b", "c"])
    worker = shop.worker("tasks:app", "-c", "3", "-Q", "default")
    assert tasks.double.delay(2).result(timeout=30) == 4

    status = shop.status()
    queues = {queue["name"]: queue for queue in status["queues"]}
    assert queues["mail"]["ready"] == 3
    assert queues["mail"]["running"] == 0
    assert queues["default"]["ready"] == 0
    (shown,) = status["workers"]
    assert str(worker.pid) in shown["name"]
    assert shown["slots"] == 3
    assert shown["queues"] == ["default"]

    table = shop.penstock("status").output
    assert re.search(r"^\s*mail\s+3\b", table, re.MULTILINE), table
    assert "worker@" in table


def test_status_of_a_directory_that_nobody_serves_starts_nothing(project):
    run = project.penstock("status")
    assert project.broker_pid() is None
    assert run.output.strip()


def test_purge_drops_what_waits(shop):
    tasks = shop.tasks()
    tasks.send.map(["a", "b", "c"])
    tasks.double.delay(1)
    unasked = shop.penstock("purge", "mail")
    assert unasked.returncode == 2 and "3 waiting jobs of queue:mail" in unasked.output
    assert {queue["name"]: queue["ready"] for queue in shop.status()["queues"]}["mail"] == 3
    run = shop.penstock("purge", "mail", "-y")
    assert run.returncode == 0, run.output
    assert "dropped 3 waiting jobs of queue:mail" in run.output
    queues = {queue["name"]: queue["ready"] for queue in shop.status()["queues"]}
    assert queues.get("mail", 0) == 0
    assert queues["default"] == 1


def test_a_burst_worker_ends_when_the_queues_are_empty(shop):
    tasks = shop.tasks()
    jobs = tasks.double.map(range(100))
    worker = shop.worker("tasks:app", "--burst")
    assert worker.wait(60) == 0, worker.output
    assert [job.result(timeout=30) for job in jobs] == [2 * number for number in range(100)]


def test_a_worker_ends_gracefully_at_sigterm(shop):
    import signal

    tasks = shop.tasks()
    worker = shop.worker("tasks:app", "-c", "1")
    assert tasks.double.delay(1).result(timeout=30) == 2
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0, worker.output
    eventually(lambda: not [line for line in shop.processes().values() if "server" not in line])


@pytest.mark.parametrize(
    ("app", "says"),
    [
        ("nowhere:app", "nowhere"),
        ("tasks:nothing", "nothing"),
        ("empty", "module:app"),
        ("broken:app", "SyntaxError"),
    ],
)
def test_an_app_that_is_not_there_is_a_clear_error(shop, app, says):
    shop.write("broken.py", "def")
    shop.write("empty.py", "")
    worker = shop.worker(app)
    assert worker.wait(30) not in (0, None), worker.output
    assert says in worker.output


def test_an_upgrade_of_the_newest_format_changes_nothing_and_a_newer_one_is_refused(shop):
    tasks = shop.tasks()
    tasks.double.delay(1)
    with pidfd(shop.broker_pid()) as ended:
        tasks.app.close()
        assert shop.penstock("broker", "stop").returncode == 0
        ended.wait(30)

    def files():
        return {path.name: path.read_bytes() for path in (shop.data / "journal").iterdir()}

    before = files()
    upgraded = shop.penstock("journal", "upgrade", str(shop.data))
    assert upgraded.returncode == 0, upgraded.output
    assert "format 2" in upgraded.output and "nothing was changed" in upgraded.output
    assert files() == before
    nowhere = shop.penstock("journal", "upgrade", str(shop.data / "nowhere"))
    assert nowhere.returncode == 1 and "nowhere" in nowhere.output


def test_what_a_disk_forgets_after_a_stop_is_missed(shop):
    tasks = shop.tasks()
    for number in range(3):
        tasks.double.delay(number)
    with pidfd(shop.broker_pid()) as ended:
        tasks.app.close()
        assert shop.penstock("broker", "stop").returncode == 0
        ended.wait(30)
    good = shop.penstock("journal", "check", str(shop.data))
    assert good.returncode == 0 and "it was closed cleanly" in good.output, good.output

    newest = max((shop.data / "journal").glob("*.segment"))
    content = newest.read_bytes()
    used = len(content.rstrip(b"\0"))
    for page in range(0, used, 4096):
        newest.write_bytes(content[:page] + bytes(4096) + content[page + 4096 :])
        bad = shop.penstock("journal", "check", str(shop.data))
        assert bad.returncode == 65 and newest.name in bad.output, bad.output
    assert page >= 8192, "a page for the header, one for the jobs, one for what proves them"
    newest.write_bytes(content[: used - 5000] + bytes(len(content) - used + 5000))
    assert shop.penstock("journal", "check", str(shop.data)).returncode == 65

    newest.unlink()
    missing = shop.penstock("journal", "check", str(shop.data))
    assert missing.returncode == 65 and "the file is missing" in missing.output, missing.output
    # No new journal is begun, and the client learns why.
    run = shop.start_python("import tasks\ntasks.double.delay(1)")
    assert run.wait(60) == 1
    assert f"{newest.name} is damaged at byte 0: the file is missing" in run.output

    newest.write_bytes(content)
    run = shop.start_python("import tasks\ntasks.double.delay(1)")
    assert run.wait(60) == 0, run.output
    assert sum(queue["ready"] for queue in shop.status()["queues"]) == 4


def test_fsck_tells_good_from_rotten(shop):
    tasks = shop.tasks()
    tasks.double.map(range(2000))
    with pidfd(shop.broker_pid()) as ended:
        tasks.app.close()
        assert shop.penstock("broker", "stop").returncode == 0
        ended.wait(30)
    good = shop.penstock("journal", "check", str(shop.data))
    assert good.returncode == 0, good.output

    segments = (shop.data / "journal").glob("*.segment")
    segment = max(segments, key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[12_000] ^= 0xFF
    segment.write_bytes(content)
    rotten = shop.penstock("journal", "check", str(shop.data))
    assert rotten.returncode not in (0, 2), rotten.output
    assert segment.name in rotten.output

    # No broker serves a damaged journal, and the client learns why.
    run = shop.start_python("import tasks\ntasks.double.delay(1)")
    assert run.wait(60) == 1
    assert segment.name in run.output

    # A repair keeps everything except the damaged part, and reports that part.
    repaired = shop.penstock("journal", "repair", str(shop.data))
    assert repaired.returncode == 65, repaired.output
    assert "lost: record" in repaired.output and segment.name in repaired.output
    aside = next((shop.data / "journal").glob("damaged-*"))
    assert (aside / segment.name).read_bytes() == content
    assert shop.penstock("journal", "check", str(shop.data)).returncode == 0
    run = shop.start_python("import tasks\ntasks.double.delay(1)")
    assert run.wait(60) == 0, run.output
    waiting = sum(queue["ready"] for queue in shop.status()["queues"])
    # All jobs of one call of map are in one record; the report names as many as are readable.
    assert waiting >= 1
    assert repaired.output.count("  with job ") > 50, repaired.output
    again = shop.penstock("journal", "repair", str(shop.data))
    assert again.returncode == 6, "the broker runs"


def test_a_server_beyond_loopback_wants_a_token(project):
    run = project.penstock("server", "--listen", "tcp://0.0.0.0:0", "--data", str(project.directory / "data"))
    assert run.returncode not in (0, None)
    assert "PENSTOCK_TOKEN" in run.output


def test_a_server_serves_who_has_the_token_and_nobody_else(shop):
    data = shop.directory / "data"
    server = shop.start("penstock", "server", "--listen", "tcp://127.0.0.1:0", "--data", data, PENSTOCK_TOKEN="secret")
    eventually(lambda: re.search(r"tcp://127\.0\.0\.1:\d+", server.output), 60, lambda: server.output)
    url = re.search(r"tcp://127\.0\.0\.1:\d+", server.output)[0]
    enqueue = "import tasks\nprint(tasks.double.delay(1).id)"
    assert shop.python(enqueue, PENSTOCK_URL=url, PENSTOCK_TOKEN="secret").strip()
    for token in ({}, {"PENSTOCK_TOKEN": "guess"}):
        run = shop.start_python(enqueue, PENSTOCK_URL=url, **token)
        assert run.wait() == 1
        assert "Unauthorized" in run.output
        assert "PENSTOCK_TOKEN" in run.output
        # Restarting either would not help a service manager.
        for command in (("status",), ("worker", "tasks:app")):
            run = shop.start("penstock", *command, PENSTOCK_URL=url, **token)
            assert run.wait(60) == 78, run.output
            assert run.output.count("refused this client") == 1
    status = json.loads(shop.penstock("status", "--json", PENSTOCK_URL=url, PENSTOCK_TOKEN="secret").output)
    assert status["queues"][0]["ready"] == 1
