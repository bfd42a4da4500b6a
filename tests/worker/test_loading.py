"""How a worker loads an app: once, before it forks, and with one clear message if it can't."""

from __future__ import annotations

import os
import socket
import sys
import textwrap

import pytest
from project import Project
from worker.odd_shop import Shop

APP_ERROR = 3


@pytest.mark.parametrize(
    ("place", "source", "says"),
    [
        ("missing:app", "", "there is no module 'missing'"),
        ("thing:app", "import nosuch", "ModuleNotFoundError: No module named 'nosuch'"),
        ("thing:app", "1 / 0", 'thing.py", line 1'),
        ("thing:app", "def", "SyntaxError"),
        ("thing:nothing", "from penstock import App\napp = App('x')", "has no 'nothing'; it has thing:app"),
        ("thing:text", "text = 'x'", "'thing:text' is a str, not a penstock.App"),
        (":app", "", "write module:app"),
        ("thing:", "", "write module:app"),
        ("../thing.py", "", "write module:app"),
        ("thing.py", "", "did you mean thing:app?"),
        ("./thing.py:shop", "", "did you mean thing:shop?"),
        ("thing", "", "the module 'thing' has no penstock.App"),
        (
            "thing",
            "from penstock import App\na, b = App('a'), App('b')",
            "has several apps; name one: thing:a, thing:b",
        ),
        ("thing:app", "from penstock import App\napp = App('x')", "the app 'x' has no tasks"),
        ("thing:app", "from penstock import App\napp = App('x', include=['nosuch'])", "there is no module 'nosuch'"),
        ("thing:app", "raise SystemExit(0)", "SystemExit"),
        (
            "thing:app",
            "from penstock import App\napp = App('x')\n@app.task\ndef work(when: 'Missing') -> None: ...",
            "Missing",
        ),
        (
            "thing:app",
            "from penstock import App\napp = App('x')\n@app.on_worker_start\ndef f(): raise OSError('no model here')",
            "no model here",
        ),
    ],
)
def test_an_app_that_can_not_be_loaded(project: Project, place: str, source: str, says: str) -> None:
    project.write("thing.py", source)
    worker = project.worker(place)
    assert worker.wait(30) == APP_ERROR, worker.output
    assert says in worker.output
    assert worker.output.count("cannot load") == 1
    assert "zygote.py" not in worker.output


def test_worker_start_hooks_run_once_and_what_they_leave_is_shared(project: Project) -> None:
    project.write(
        "thing.py",
        """
        import os
        from penstock import App

        app = App("thing")
        cache = {}

        @app.on_worker_start
        def fill():
            cache["by"] = os.getpid()
            with open("preloads.txt", "a") as file:
                file.write("once\\n")

        @app.task
        def who() -> tuple[int, int]:
            return cache["by"], os.getppid()
        """,
    )
    thing = project.tasks("thing.py")
    project.worker("thing:app", "-c", "3")
    for job in [thing.who.delay() for _ in range(6)]:
        filled_by, parent = job.result(timeout=30)
        assert filled_by == parent
    assert (project.directory / "preloads.txt").read_text() == "once\n"


def test_threads_that_an_app_starts_at_import_are_named(project: Project) -> None:
    project.write(
        "thing.py",
        """
        import threading
        from penstock import App

        app = App("thing")
        threading.Thread(target=threading.Event().wait, name="exporter", daemon=True).start()

        @app.task
        def work() -> None: ...
        """,
    )
    worker = project.worker("thing:app", "--burst")
    assert worker.wait(30) == 0, worker.output
    assert "started 1 thread(s) while it was loaded (exporter)" in worker.output


def test_it_serves_the_queues_that_its_tasks_name(project: Project) -> None:
    project.write(
        "thing.py",
        """
        from penstock import App

        app = App("thing")

        @app.task(queue="mail")
        def send() -> str:
            return "sent"

        @app.task
        def work() -> str:
            return "done"
        """,
    )
    thing = project.tasks("thing.py")
    sent, done, elsewhere = thing.send.delay(), thing.work.delay(), thing.work.options(queue="other").delay()
    worker = project.worker("thing:app", "--burst")
    assert worker.wait(30) == 0, worker.output
    assert (sent.result(timeout=30), done.result(timeout=30)) == ("sent", "done")
    assert "queues: default, mail" in worker.output
    assert elsewhere.info().state == "waiting"
    assert project.worker("thing:app", "--burst", "-Q", "other").wait(30) == 0
    assert elsewhere.result(timeout=30) == "done"


def test_exit_handlers_of_the_app_run_in_each_process_in_order(project: Project) -> None:
    project.write(
        "thing.py",
        """
        import atexit, os
        from penstock import App

        app = App("thing")
        runs = []

        @app.task
        def work() -> int:
            atexit.register(lambda: open(f"left-{os.getpid()}", "w").close())
            return os.getpid()
        """,
    )
    thing = project.tasks("thing.py")
    job = thing.work.delay()
    assert project.worker("thing:app", "-c", "1", "--burst").wait(30) == 0
    assert (project.directory / f"left-{job.result(timeout=30)}").exists()


def test_a_process_leaves_in_order_and_is_not_taken_apart(project: Project) -> None:
    """Finalising would copy the whole heap of a fork, so live objects stay as they are."""
    project.write(
        "thing.py",
        """
        import atexit, concurrent.futures, ctypes, logging, logging.handlers, os, sys, threading, time
        from pathlib import Path
        from penstock import App

        app = App("thing")

        here = Path(__file__).parent

        class Alive:
            def __del__(self, write=os.write, pid=os.getpid):
                write(2, b"finalised %d, " % pid())

        # Objects held by the app's modules survive once they are exempt from garbage collection.
        sys.alive = Alive()
        kept = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(here / "kept.log"))
        logging.getLogger("kept").addHandler(kept)
        pool = concurrent.futures.ThreadPoolExecutor(1)

        def goes_on(name) -> None:
            time.sleep(0.2)
            (here / name).touch()

        def fails() -> None:
            raise ValueError("an exit handler")

        @app.task
        def work() -> int:
            threading.Thread(target=goes_on, args=("thread",)).start()
            pool.submit(goes_on, "pool")
            atexit.register((here / "exit").touch)
            atexit.register(fails)
            logging.getLogger("kept").error("buffered")
            sys.stdout.write("by Python")
            ctypes.CDLL(None).printf(b"by C")
            return os.getpid()
        """,
    )
    thing = project.tasks("thing.py")
    del sys.__dict__["alive"]
    job = thing.work.delay()
    worker = project.worker("thing:app", "-c", "1", "--burst", PYTHONUNBUFFERED="")
    assert worker.wait(30) == 0, worker.output
    assert job.result(timeout=30)
    for name in ("thread", "pool", "exit"):
        assert (project.directory / name).exists(), name
    assert (project.directory / "kept.log").read_text() == "buffered\n"
    assert "by Python" in worker.output and "by C" in worker.output
    assert "ValueError: an exit handler" in worker.output
    assert "finalised" not in worker.output, "neither the process that ran it nor the zygote"


def test_what_the_loaded_app_cleans_up_at_its_end_stays_until_then(project: Project) -> None:
    """Each process used to run finalizers of the zygote's objects; the first removed resources that all others used."""
    project.write(
        "thing.py",
        """
        import os, tempfile, weakref
        from pathlib import Path
        from penstock import App

        app = App("thing", defaults={"slot": "isolated"})
        here = Path(__file__).parent

        class Made:
            pass

        @app.on_worker_start
        def prepare() -> None:
            global shared
            shared = tempfile.TemporaryDirectory(dir=here, prefix="shared-")
            loaded.append(Made())
            weakref.finalize(loaded[0], lambda: (here / f"loaded-{os.getpid()}").touch())

        loaded = []

        @app.task
        def work() -> tuple[str, int]:
            global made
            loaded.clear()
            assert (here / f"loaded-{os.getpid()}").exists(), "its object has ended in this process"
            made = Made()
            weakref.finalize(made, (here / f"made-{os.getpid()}").touch)
            assert Path(shared.name).is_dir()
            return shared.name, os.getpid()
        """,
    )
    thing = project.tasks("thing.py")
    jobs = [thing.work.delay() for _ in range(5)]
    worker = project.worker("thing:app", "-c", "1", "--isolated", "1", "--burst")
    assert worker.wait(60) == 0, worker.output
    found = [job.result(timeout=30) for job in jobs]
    assert len({name for name, _ in found}) == 1
    assert all((project.directory / f"made-{pid}").exists() for _, pid in found), "a job's own objects are cleaned up"
    assert not (project.directory / found[0][0]).exists(), "the zygote has cleaned up as the last"


LEFT_OPEN = {
    "a connection": (
        """
        connection = socket.create_connection(("127.0.0.1", int(os.environ["DATABASE"])))
        print("port", connection.getpeername()[1])
        """,
        "left 1 socket(s) open while it was loaded (to 127.0.0.1:{port}); all processes that run jobs share them",
    ),
    "a server": (
        """
        listener = socket.create_server(("127.0.0.1", 0))
        print("port", listener.getsockname()[1])
        """,
        "left 1 socket(s) open while it was loaded (listening on 127.0.0.1:{port})",
    ),
    "a loop": (
        "loop = asyncio.new_event_loop()",
        "left 1 event loop(s) open while it was loaded (none running); processes that run jobs share",
    ),
    "a loop that runs": (
        """
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True, name="loop").start()
        while not loop.is_running(): pass
        """,
        "left 1 event loop(s) open while it was loaded (1 of them running in threads",
    ),
}


@pytest.mark.parametrize("left", LEFT_OPEN)
def test_what_processes_must_not_share_is_named_and_jobs_run(project: Project, left: str) -> None:
    source, says = LEFT_OPEN[left]
    head = "import asyncio, os, socket, threading\nfrom penstock import App\napp = App('thing')\n"
    hook = "@app.on_worker_start\ndef prepare():\n    global listener, connection, loop\n"
    task = "@app.task\ndef work() -> int: return 7\n"
    project.write("thing.py", head + hook + textwrap.indent(textwrap.dedent(source), "    ") + "\n" + task)
    job = project.tasks("thing.py").work.delay()
    with socket.create_server(("127.0.0.1", 0)) as database:
        worker = project.worker("thing:app", "--burst", DATABASE=str(database.getsockname()[1]))
        assert worker.wait(30) == 0, worker.output
    assert job.result(timeout=30) == 7
    port = next((line.split()[1] for line in worker.output.splitlines() if line.startswith("port ")), "")
    assert says.format(port=port) in worker.output
    assert worker.output.count("event loop(s) open") + worker.output.count("socket(s) open") == 1


def test_what_was_closed_again_is_not_named(project: Project) -> None:
    project.write(
        "thing.py",
        """
        import asyncio, socket
        from penstock import App

        app = App("thing")
        asyncio.run(asyncio.sleep(0))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname()).close()

        @app.task
        def work() -> None: ...
        """,
    )
    # A service's log may be a socket that the service inherited.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.set_inheritable(theirs.fileno(), True)
        worker = project.worker("thing:app", "--burst")
        assert worker.wait(30) == 0, worker.output
    assert "WARN" not in worker.output


def test_retries_and_failures_are_told_and_successes_only_when_asked(shop: Shop) -> None:
    shop.tasks.exits.delay()
    shop.tasks.tiny.delay(1)
    quiet = shop.worker("-c", "1", "--burst")
    assert quiet.wait(30) == 0
    assert "ERROR" in quiet.output and "not like this" in quiet.output
    assert "succeeded" not in quiet.output
    shop.tasks.tiny.delay(1)
    verbose = shop.worker("-c", "1", "--burst", "-v")
    assert verbose.wait(30) == 0
    assert "tasks.tiny" in verbose.output and "succeeded in" in verbose.output


def test_logging_of_the_app_is_left_alone(project: Project) -> None:
    project.write(
        "thing.py",
        """
        import logging
        from penstock import App

        logging.basicConfig(format="mine: %(levelname)s %(message)s", level=logging.INFO)
        app = App("thing")

        @app.task
        def work() -> None: ...
        """,
    )
    thing = project.tasks("thing.py")
    thing.work.delay()
    worker = project.worker("thing:app", "-c", "1", "--burst")
    assert worker.wait(30) == 0
    lines = [line for line in worker.output.splitlines() if "succeeded in" in line]
    assert len(lines) == 1 and lines[0].startswith("mine: INFO thing.work")


def test_a_worker_that_the_broker_refuses_ends_and_says_why(project: Project) -> None:
    """The worker used to reconnect again and again, and to report that it was running."""
    project.write("thing.py", "from penstock import App\napp = App('x')\n@app.task\ndef work() -> None: ...")
    worker = project.worker("thing:app", "-c", "1", "-Q", "q" * 300)
    assert worker.wait(30) == 78, worker.output
    assert "refused a frame from this client" in worker.output
