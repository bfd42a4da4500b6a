"""The benchmark measures what it claims to, survives a failing contestant, and leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import client
import disk
import plan
import pytest
import run
import servers
from processes import descendants, end, is_alive
from results import Results


@pytest.mark.parametrize("workload", plan.WORKLOADS, ids=lambda workload: workload.key)
def test_plan_names_what_exists(workload: plan.Workload) -> None:
    assert workload.measurement in client.MEASUREMENTS
    assert set(workload.contestants) <= set(plan.BY_KEY)
    assert set(workload.contestants_of(quick=True)) <= set(workload.contestants)
    assert set(workload.own) <= set(workload.contestants)
    for key in workload.contestants:
        module = plan.BY_KEY[key].module
        assert module is None or (run.HERE / "contestants" / f"{module}.py").exists()


@pytest.mark.parametrize("workload", plan.WORKLOADS, ids=lambda workload: workload.key)
def test_a_quick_run_is_never_longer(workload: plan.Workload) -> None:
    for key in workload.contestants_of(quick=True):
        full = workload.parameters_of(key, quick=False)
        assert all(value <= full[name] for name, value in workload.parameters_of(key, quick=True).items())


def test_every_peer_is_pinned_exactly() -> None:
    lines = (run.HERE / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def test_steady_rate_leaves_out_the_start_and_the_stragglers() -> None:
    curve = [(0.01 * sample, 0) for sample in range(100)]  # a second until the worker is up
    curve += [(1 + 0.01 * sample, 10 * sample) for sample in range(101)]  # then 1,000 jobs/s
    curve += [(5.0, 1_001)]  # and one straggler
    assert client.steady_rate(curve) == pytest.approx(1_000, rel=0.03)


def test_steady_rate_of_a_drain_too_quick_to_cut() -> None:
    assert client.steady_rate([(0.0, 0), (1.0, 0), (1.01, 400), (1.02, 1_000)]) == pytest.approx(50_000)


def test_nothing_of_a_process_is_left(tmp_path: Path) -> None:
    # A child in its own session, and one that ignores SIGTERM: neither exits with its parent.
    script = "setsid sleep 60 & (trap '' TERM; sleep 60; sleep 60) & echo ready; wait"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    family = [process.pid, *descendants(process.pid)]
    assert len(family) >= 3
    end(process, grace_s=0.2)
    process.stdout.close()
    assert not [pid for pid in family if is_alive(pid)]


def test_processes_of_a_running_server_are_left_alone() -> None:
    # The server starts a process for a client that has come after the server: for each line that it reads.
    script = "while read line; do sleep 60 & echo $!; done"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        before = descendants(os.getpid())
        server.stdin.write(b"a client comes\n")
        server.stdin.flush()
        connection = int(server.stdout.readline())
        with subprocess.Popen(["sleep", "60"]) as other:
            assert {connection, other.pid} <= set(descendants(os.getpid()))
            started = descendants(os.getpid(), apart_from=before)
            assert other.pid in started
            assert connection not in started
            end(other)
        end(server)


def test_a_contestant_that_fails_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workload,) = [workload for workload in plan.WORKLOADS if workload.key == "one"]
    broken = plan.Contestant("penstock-broken", "broken", "no_such_module", None, "L0", "")
    arena = run.Arena(tmp_path, None)
    found = Results()
    for contestant in (broken, plan.BY_KEY["bare-sync"]):
        run.measure(arena, found, contestant, workload, True, {}, "1/1")
    assert "ModuleNotFoundError" in found.failures["one", "penstock-broken"]
    assert found.runs["one", "bare-sync"][0]["calls_per_s"] > 0
    assert "failed: ModuleNotFoundError" in capsys.readouterr().out


def test_bare_sync_loop_leaves_no_file(tmp_path: Path) -> None:
    figures = disk.append_and_sync(tmp_path, 0.05)
    assert 0 < figures["p50_us"] <= figures["p99_us"]
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match="no contestant or workload has this prefix"):
        run.chosen(["penstok"], quick=True)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Pretend that no server is installed, and record the calls that would install one."""
    installed: list[list[str]] = []
    monkeypatch.delenv("BENCH_INSTALL", raising=False)
    monkeypatch.setattr(servers, "missing", lambda packages: list(packages))
    monkeypatch.setattr(servers, "install", installed.append)
    return installed


def test_without_a_terminal_nothing_is_installed_and_the_rest_is_measured(nothing_installed: list[list[str]]) -> None:
    groups, lines = run.without_missing_servers(run.chosen([], quick=False))
    assert nothing_installed == []
    assert list(groups) == [None]
    assert {"penstock", "bare-sync", "pool"} <= {one.key for one, _ in groups[None]}
    assert "left out, since rabbitmq-server and redis-server are not installed: Celery, RabbitMQ, " in lines[0]
    assert "dramatiq, Redis always" in lines[0] and "Penstock" not in lines[0]
    assert lines[1].startswith("BENCH_INSTALL=1 installs what is missing")


@pytest.mark.parametrize("wish", ["1", "0"])
def test_bench_install_decides_without_a_question(
    nothing_installed: list[list[str]], monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    monkeypatch.setenv("BENCH_INSTALL", wish)
    groups, lines = run.without_missing_servers(run.chosen(["saq"], quick=False))
    assert nothing_installed == ([["redis-server"]] if wish == "1" else [])
    assert list(groups) == (["redis-everysec", "redis-always"] if wish == "1" else [])
    assert bool(lines) == (wish == "0")


@pytest.mark.parametrize(("answer", "installs"), [("y", True), ("", False), ("no", False)])
def test_on_a_terminal_it_asks(
    nothing_installed: list[list[str]], monkeypatch: pytest.MonkeyPatch, answer: str, installs: bool
) -> None:
    questions: list[str] = []
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or answer)
    groups, _ = run.without_missing_servers(run.chosen(["celery"], quick=False))
    assert questions == ["The peers need rabbitmq-server and redis-server. Install with apt-get now? [y/N] "]
    assert nothing_installed == ([["rabbitmq-server", "redis-server"]] if installs else [])
    assert list(groups) == (["rabbitmq"] if installs else [])


def test_what_needs_no_server_asks_for_none(nothing_installed: list[list[str]]) -> None:
    groups = run.chosen(["penstock"], quick=True)
    assert run.without_missing_servers(groups) == (groups, [])


def test_a_run_with_nothing_to_measure_says_why(
    nothing_installed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench/run.py", "--only", "saq"])
    with pytest.raises(SystemExit, match="nothing to measure\nleft out, since redis-server is not installed: SAQ, "):
        run.main()


def test_a_short_run_of_penstock_alone(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    only = ["--only", "penstock", "--only", "no-op"]
    command = [sys.executable, run.HERE / "run.py", "--quick", *only, "--output", output]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    document = json.loads(output.read_text())
    (workload,) = document["workloads"]
    (row,) = workload["rows"]
    assert row["contestant"] == "penstock"
    assert row["parameters"] == {"slots": 2, "count": 5_000}
    assert all(figure["median"] > 0 for figure in row["figures"].values())
    assert "| Penstock | L3" in outcome.stdout


def test_a_short_run_of_workflows(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    only = ["--only", "penstock", "--only", "chord", "--only", "chain", "--only", "group"]
    command = [sys.executable, run.HERE / "run.py", "--quick", *only, "--output", output]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    workloads = {workload["key"]: workload for workload in json.loads(output.read_text())["workloads"]}
    assert {key: workload["rows"][0]["parameters"]["count"] for key, workload in workloads.items()} == {
        "chord": 1_000, "chain": 100, "group": 10_000,
    }  # fmt: skip
    for workload in workloads.values():
        (row,) = workload["rows"]
        assert all(row["figures"][figure["key"]]["median"] > 0 for figure in workload["figures"])
