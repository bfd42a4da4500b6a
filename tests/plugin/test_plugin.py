"""The pytest plugin, tested in runs of pytest such as users have."""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import subprocess
import sys

import pytest
from project import Process, Project, is_quick, pidfd

SHOP = """
    import threading

    from penstock import App

    app = App("shop")


    @app.task(queue="mail")
    def send(to: str) -> str:
        return f"to {to} from {threading.current_thread().name}"


    def sign_up(name: str):
        return send.delay(f"{name}@example.org")
"""


@pytest.fixture
def shop(project: Project) -> Project:
    project.write("shop.py", SHOP)
    project.write("pytest.ini", "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    return project


def without_others(*kept: str) -> list[str]:
    """Return options that disable this environment's other plugins, which take most of the time of a short run."""
    found = {each.name for each in importlib.metadata.entry_points(group="pytest11")}
    assert {"penstock", *kept} <= found
    return [word for name in sorted(found - {"penstock", *kept}) for word in ("-p", f"no:{name}")]


def run(project: Project, source: str, *options: str, **environment: str) -> Process:
    """Run pytest on one test file."""
    project.write("test_shop.py", source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    return project.run(*command, *without_others("asyncio"), *options, PYTHONPATH=str(project.directory), **environment)


def outcomes(process: Process) -> dict[str, int]:
    last = process.output.strip().splitlines()[-1]
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}


class TestFixtures:
    def test_inline_runs_jobs_of_all_apps_inside_the_call(self, shop):
        process = run(
            shop,
            """
            import pytest, shop

            @pytest.fixture(autouse=True)
            def always(penstock_inline): ...

            def test_signup(penstock_inline):
                assert shop.sign_up("ada").result() == "to ada@example.org from MainThread"
                penstock_inline.assert_enqueued(shop.send, args=("ada@example.org",), queue="mail")

            async def test_signup_in_a_loop(penstock_inline):
                assert (await shop.send.adelay("bob")).done()
                assert len(penstock_inline) == 1

            def test_a_block_within(penstock_inline):
                from penstock.testing import inline
                with inline(shop.app):
                    shop.sign_up("eve")
                assert penstock_inline == []
            """,
        )
        assert outcomes(process) == {"passed": 3}, process.output
        assert not shop.data.exists()

    def test_capture_records_them(self, shop):
        process = run(
            shop,
            """
            import pytest, shop
            from penstock import JobState
            from penstock.testing import move_clock

            def test_signup(penstock_capture):
                job = shop.sign_up("ada")
                assert job.info().state is JobState.WAITING
                assert penstock_capture.run_until_idle() == 1
                assert job.result() == "to ada@example.org from MainThread"

            def test_another_begins_anew(penstock_capture):
                penstock_capture.refute_enqueued(shop.send)
                penstock_capture.assert_enqueued(shop.send)
            """,
        )
        assert outcomes(process) == {"passed": 1, "failed": 1}, process.output
        assert (
            "AssertionError: expected shop.send(...) to be enqueued, but it was not. Nothing was enqueued."
            in process.output
        )

    def test_worker_runs_them_in_threads(self, shop):
        process = run(
            shop,
            """
            import shop

            def test_signup(penstock_worker):
                job = shop.sign_up("ada")
                assert job.result(timeout=30).startswith("to ada@example.org from penstock worker")
                shop.sign_up("bob")
                penstock_worker.run_until_idle()
                assert len(penstock_worker) == 2
            """,
        )
        assert outcomes(process) == {"passed": 1}, process.output
        assert not shop.data.exists()

    def test_server_runs_them_in_real_processes(self, shop):
        process = run(
            shop,
            """
            import os, subprocess, sys
            import pytest, shop
            from penstock import App, PenstockError, current_job

            # This app names its own broker; the test's broker replaces it.
            bank = App("bank", "unix:/nonexistent/broker.sock")

            @bank.task
            def pay() -> int:
                return os.getpid()

            def test_signup(penstock_server, tmp_path):
                worker = penstock_server.start_worker(shop.app)
                assert shop.sign_up("ada").result(timeout=60) == "to ada@example.org from MainThread"
                assert penstock_server.directory == tmp_path / ".penstock"
                # A program that the test starts finds the broker too.
                script = "import shop; print(shop.sign_up('bob').result(timeout=60))"
                done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
                assert done.stdout == "to bob@example.org from MainThread\\n"
                assert "is connected and runs shop:app" in worker.stop()
                assert worker.process.returncode == 0
                pid = penstock_server.start_worker("test_shop:bank", "--concurrency", "2").process.pid
                assert pay.delay().result(timeout=60) not in (os.getpid(), pid)
                (tmp_path / "broker").write_text(str(shop.app._connected()._client.status(5.0)["broker_pid"]))

            def test_a_worker_that_ends_says_why(penstock_server):
                with pytest.raises(PenstockError, match="the worker exited; it wrote:(.|\\n)*no module 'nothere' here"):
                    penstock_server.start_worker("nothere:app")
                with pytest.raises(PenstockError, match="no module has <App 'hidden'"):
                    penstock_server.start_worker(App("hidden"))

            def test_each_has_a_broker_of_its_own(penstock_server):
                job = shop.sign_up("eve")
                assert shop.app._connected()._client.status(5.0)["ready"] == {"mail": 1}
            """,
            "--basetemp=pytest",
        )
        assert outcomes(process) == {"passed": 3}, process.output
        # No process remains; the `project` fixture checks for those too.
        (broker,) = {file.resolve() for file in shop.directory.glob("pytest/*/broker")}
        try:
            with pidfd(int(broker.read_text())) as ended:
                ended.wait(30)
        except ProcessLookupError:
            pass


class TestGuard:
    FORGETFUL = """
        import os, subprocess, sys
        import pytest, shop
        from penstock import App
        from penstock.testing import BrokerNotAllowed, inline

        def test_signup():
            shop.sign_up("ada")
    """

    def test_an_enqueue_that_nothing_allowed_fails_with_the_remedy(self, shop):
        process = run(shop, self.FORGETFUL)
        assert outcomes(process) == {"failed": 1}, process.output
        assert (
            "penstock.testing.BrokerNotAllowed: test_shop.py::test_signup would use the real broker of <App 'shop'"
            in process.output
        )
        for remedy in (
            "penstock_inline", "penstock_capture", "penstock_worker", "penstock_server", "penstock_broker", "a url",
            "penstock_guard = false",
        ):  # fmt: skip
            assert remedy in process.output
        # No broker was even started: the environment's URL was for something else.
        assert not shop.data.exists()

    def test_each_remedy_helps(self, shop):
        process = run(
            shop,
            """
            import pytest, shop
            from penstock import App

            @pytest.mark.penstock_broker
            def test_marked():
                assert not shop.sign_up("ada").done()

            def test_not_marked():
                # The previous test's connection is still open.
                with pytest.raises(Exception, match="would use the real broker of"):
                    shop.sign_up("ada")

            @pytest.mark.penstock_broker
            class TestMarked:
                def test_in_a_class(self):
                    assert not shop.sign_up("ada").done()

            def test_a_broker_in_memory(monkeypatch):
                monkeypatch.setenv("PENSTOCK_URL", "memory:")
                app = App("shop")
                assert not app.task(lambda: None).delay().done()
                app.close()

            def test_an_explicit_url():
                app = App("named", "local:.penstock")
                assert not app.task(lambda: None).delay().done()
                app.close()

            def test_a_fixture(penstock_inline):
                assert shop.sign_up("ada").done()

            def test_after_a_fixture():
                with pytest.raises(Exception, match="would use the real broker of"):
                    shop.sign_up("ada")
            """,
        )
        assert outcomes(process) == {"passed": 7}, process.output
        assert {queue["name"]: queue["ready"] for queue in shop.status()["queues"]} == {"default": 1, "mail": 2}

    def test_other_processes_are_none_of_its_business(self, shop):
        process = run(
            shop,
            """
            import multiprocessing, subprocess, sys
            import shop

            def enqueue(said):
                said.send(shop.sign_up("bob").done())

            def test_a_program_that_it_starts():
                script = "import shop; print(shop.sign_up('ada').done())"
                done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
                assert done.stdout == "False\\n"

            def test_a_fork():
                context = multiprocessing.get_context("fork")
                heard, said = context.Pipe(duplex=False)
                child = context.Process(target=enqueue, args=(said,))
                child.start()
                assert heard.recv() is False
                child.join(30)
            """,
        )
        assert outcomes(process) == {"passed": 2}, process.output
        assert shop.status()["queues"][0]["ready"] == 2

    def test_at_import_there_is_no_test_to_name(self, shop):
        process = run(shop, "import shop\nshop.sign_up('ada')\ndef test_nothing(): ...")
        assert "code outside of any test, such as a module that is being imported, would use" in process.output
        assert not shop.data.exists()

    def test_questions_are_refused_like_calls(self, shop):
        process = run(
            shop,
            """
            import pytest, shop
            from penstock.testing import BrokerNotAllowed

            async def test_all():
                for ask in (lambda: shop.app.job("0" * 32).info(), lambda: shop.app.failed().count()):
                    with pytest.raises(BrokerNotAllowed):
                        ask()
                with pytest.raises(BrokerNotAllowed):
                    await shop.send.adelay("ada")
            """,
        )
        assert outcomes(process) == {"passed": 1}, process.output

    @pytest.mark.parametrize("how", ["-openstock_guard=false", "-pno:penstock"])
    def test_it_can_be_turned_off(self, shop, how):
        process = run(shop, "import shop\ndef test_signup():\n    assert not shop.sign_up('ada').done()", how)
        assert outcomes(process) == {"passed": 1}, process.output
        assert shop.status()["queues"][0]["ready"] == 1


def test_the_plugin_imports_none_of_penstock_before_a_test_needs_it(shop):
    process = run(
        shop,
        """
        import sys

        def test_nothing_more():
            mine = {name for name in sys.modules if name.split(".")[0] == "penstock"}
            assert mine == {"penstock", "penstock._guard", "penstock.testing", "penstock.testing._plugin"}
        """,
    )
    assert outcomes(process) == {"passed": 1}, process.output


PYTEST = """
import os, sys
command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]
silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=silent)
_, status, usage = os.wait4(pid, 0)
assert status == 0, status
print(usage.ru_utime + usage.ru_stime)
"""


@pytest.mark.alone
def test_the_plugin_costs_a_run_of_pytest_5_ms_at_most(shop):
    """CPU time, without this environment's other plugins, which take a hundred times as long and vary more."""

    def ms(*options: str) -> float:
        command = [sys.executable, "-c", PYTEST, *without_others(), *options]
        done = subprocess.run(
            command, cwd=shop.directory, env=shop.environment, capture_output=True, text=True, check=True
        )
        return float(done.stdout) * 1000

    shop.write("test_nothing.py", "def test_nothing(): ...")
    shop.write("pytest.ini", "")
    ms()
    # With a median of ten pairs, a busy machine can make the plugin look slower, but not faster.
    rounds = []
    for _ in range(5):
        rounds.append(statistics.median(ms() - ms("-p", "no:penstock") for _ in range(10)))
        if rounds[-1] <= 5:
            break
    is_quick(rounds[-1] / 1000, 0.005, "the plugin")
    print(f"the plugin costs {rounds[-1]:.1f} ms")
