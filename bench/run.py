"""Measure Penstock and its peers side by side on this machine: ``make bench``.

Everything is private to the run and ends with it: servers on free loopback ports, data in a temporary directory.
Prints a table with the guarantee level of each figure, and writes bench/results/latest.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import against
import disk
import plan
import results
import servers
import table
from plan import BY_KEY, Contestant, Workload
from processes import descendants, end, end_pids, tail, take_charge
from results import Results

HERE = Path(__file__).parent
PEERS_VENV = HERE.parent / ".cache" / "bench" / "venv"
LIMIT_S = 300  # one measurement
BUSY = 0.3  # load average a core


class Arena:
    """Runs measurements, each in its own process with its own log, in one temporary directory."""

    def __init__(self, directory: Path, peers_python: Path | None) -> None:
        self.directory = directory
        self.peers_python = peers_python
        self.measured = 0

    def measure(
        self, contestant: Contestant, workload: Workload, quick: bool, urls: dict[str, str]
    ) -> dict[str, float]:
        """Raises RuntimeError with the reason when there is no figure."""
        self.measured += 1
        parameters = workload.parameters_of(contestant.key, quick)
        if contestant.module is None:
            figures = disk.append_and_sync(self.directory, parameters["seconds"])
            return {figure.key: figures[figure.key] for figure in workload.figures}
        log = self.directory / f"{self.measured}-{contestant.key}-{workload.key}.log"
        python = Path(sys.executable) if contestant.is_penstock else self.peers_python
        env = {**os.environ, **contestant.env, **urls, "BENCH_LOG": str(log)}
        data = self.directory / f"penstock-{self.measured}"
        if contestant.uses_packages and self.peers_python is not None:
            env["BENCH_PACKAGES"] = str(next(self.peers_python.parents[1].glob("lib/python*/site-packages")))
        if contestant.is_penstock:
            env["PENSTOCK_URL"] = f"local:{data}"
        pairs = [f"{key}={value}" for key, value in parameters.items()]
        command = [str(python), str(HERE / "client.py"), contestant.module, workload.measurement, *pairs]
        servers_running = descendants(os.getpid())
        with log.open("ab") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=HERE
            )
        try:
            answer, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no result within {LIMIT_S} s") from None
        finally:
            end(process, grace_s=0.5)
            # Penstock's broker is nobody's child: it would stay for a minute.
            end_pids(pid for pid in descendants(os.getpid()) if pid not in servers_running)
            shutil.rmtree(data, ignore_errors=True)
        if process.returncode != 0:
            lines = tail(log).splitlines() or ["nothing in its log"]
            raise RuntimeError("\n".join([lines[-1], *lines[:-1]]))
        return {str(name): float(value) for name, value in json.loads(answer.decode().splitlines()[-1]).items()}


@contextlib.contextmanager
def celery_servers(directory: Path) -> Iterator[dict[str, str]]:
    with (
        servers.rabbitmq(directory / "rabbitmq") as amqp_url,
        servers.redis(directory / "redis", "everysec") as redis_url,
    ):
        yield {"BENCH_AMQP_URL": amqp_url, "BENCH_REDIS_URL": redis_url}


@contextlib.contextmanager
def redis_server(directory: Path, appendfsync: str) -> Iterator[dict[str, str]]:
    with servers.redis(directory / "redis", appendfsync) as redis_url:
        yield {"BENCH_REDIS_URL": redis_url}


SERVERS: dict[str | None, Callable[[Path], AbstractContextManager[dict[str, str]]]] = {
    None: lambda directory: contextlib.nullcontext({}),
    "rabbitmq": celery_servers,
    "redis-everysec": lambda directory: redis_server(directory, "everysec"),
    "redis-always": lambda directory: redis_server(directory, "always"),
}


def peers_python() -> Path:
    """The peers' interpreter, in an environment of their own: nothing of theirs touches Penstock's."""
    wanted = HERE / "requirements.txt"
    stamp = PEERS_VENV / "installed"
    python = PEERS_VENV / "bin" / "python"
    version = f"{sys.version_info[:2]} {hashlib.sha256(wanted.read_bytes()).hexdigest()}"
    if not stamp.exists() or stamp.read_text() != version:
        print("installing the peers' packages ...", flush=True)
        shutil.rmtree(PEERS_VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", PEERS_VENV], check=True, timeout=120)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", wanted],
            check=True,
            timeout=600,
        )
        stamp.write_text(version)
    return python


def versions(peers: Path | None) -> dict[str, str]:
    found = servers.versions()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["penstock"] = importlib.metadata.version("penstock")
    if peers is not None:
        pinned = (HERE / "requirements.txt").read_text().splitlines()
        found |= dict(line.split("==") for line in pinned if "==" in line)
    return found


def chosen(only: list[str], quick: bool) -> dict[str | None, list[tuple[Contestant, Workload]]]:
    """What to measure, by the server it needs. ``only`` names workloads, or the beginnings of contestants' names."""
    workload_keys = {workload.key for workload in plan.WORKLOADS}
    wanted_workloads = [name for name in only if name in workload_keys]
    wanted_contestants = [name for name in only if name not in workload_keys]
    unknown = [name for name in wanted_contestants if not any(key.startswith(name) for key in BY_KEY)]
    if unknown:
        known = ", ".join([*BY_KEY, *workload_keys])
        raise SystemExit(f"--only {unknown[0]}: no contestant or workload begins like that; there are {known}")
    groups: dict[str | None, list[tuple[Contestant, Workload]]] = {}
    for workload in plan.WORKLOADS:
        for key in workload.contestants_of(quick and not wanted_workloads):
            if wanted_workloads and workload.key not in wanted_workloads:
                continue
            if wanted_contestants and not any(is_meant(key, name) for name in wanted_contestants):
                continue
            groups.setdefault(BY_KEY[key].server, []).append((BY_KEY[key], workload))
    return groups


def is_meant(contestant: str, name: str) -> bool:
    """``dramatiq`` means both of its Redis; ``penstock``, which is a key itself, means just that."""
    return contestant == name or (name not in BY_KEY and contestant.startswith(name))


def run(
    arena: Arena, groups: dict[str | None, list[tuple[Contestant, Workload]]], repeats: int, quick: bool
) -> Results:
    """Each server is up only while its contestants are measured; the order turns from one repeat to the next."""
    found = Results()
    order = list(groups)
    for repeat in range(repeats):
        for server in order[repeat % len(order) :] + order[: repeat % len(order)]:
            directory = arena.directory / f"servers-{repeat}-{server}"
            todo = [(one, workload) for one, workload in groups[server] if not found.has_failed(workload.key, one.key)]
            try:
                with SERVERS[server](directory) as urls:
                    for contestant, workload in todo:
                        measure(arena, found, contestant, workload, quick, urls, f"{repeat + 1}/{repeats}")
            except (OSError, RuntimeError) as failure:  # the server itself
                for contestant, workload in todo:
                    found.fail(workload.key, contestant.key, f"{server}: {failure}")
                print(f"{repeat + 1}/{repeats} {server} failed: {failure}", flush=True)
            shutil.rmtree(directory, ignore_errors=True)
    return found


def measure(
    arena: Arena,
    found: Results,
    contestant: Contestant,
    workload: Workload,
    quick: bool,
    urls: dict[str, str],
    turn: str,
) -> None:
    found.parameters[workload.key, contestant.key] = workload.parameters_of(contestant.key, quick)
    begun = time.monotonic()
    try:
        figures = arena.measure(contestant, workload, quick, urls)
    except RuntimeError as failure:
        found.fail(workload.key, contestant.key, str(failure))
        shown = f"failed: {failure}"
    else:
        found.add(workload.key, contestant.key, figures)
        shown = ", ".join(
            f"{one.title} {table.number(figures[one.key], one.unit)} {one.unit}" for one in workload.figures
        )
    print(f"{turn} {workload.key:10} {contestant.name:28} {shown}  [{time.monotonic() - begun:.1f} s]", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/run.py", description="Measure Penstock and its peers side by side.")
    parser.add_argument("--quick", action="store_true", help="one short run of the main workloads, a minute or two")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a contestant or a workload; may be repeated"
    )
    parser.add_argument("--repeats", type=int, help="runs of each measurement (3; 1 when quick)")
    parser.add_argument("--output", type=Path, help="where the JSON goes (bench/results/latest.json for a whole run)")
    against_options = parser.add_argument_group("against another build, see bench/against.py")
    against_options.add_argument(
        "--against", type=Path, metavar="DIR", help="compare CPU a job with the checkout there, which is built"
    )
    against_options.add_argument("--pairs", type=int, default=against.PAIRS, help=f"({against.PAIRS})")
    against_options.add_argument("--against-target", metavar="DIR", help="its CARGO_TARGET_DIR (target, in it)")
    against_options.add_argument("--jobs", type=int, default=against.JOBS, help=f"in each run ({against.JOBS:,})")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise SystemExit("the benchmark reads /proc and installs Debian's packages: it runs on Linux only")

    if options.against:
        take_charge()
        with tempfile.TemporaryDirectory(
            prefix="penstock-bench-", dir=disk_directory(), ignore_cleanup_errors=True
        ) as name:
            return against.main(
                options.against,
                count=options.pairs,
                target=options.against_target,
                jobs=options.jobs,
                core_jobs=against.CORE_JOBS * options.jobs // against.JOBS,
                directory=Path(name),
                output=options.output,
            )

    repeats = options.repeats or (1 if options.quick else 3)
    groups = chosen(options.only, options.quick)
    peers: Path | None = None
    if any(one.module and (not one.is_penstock or one.uses_packages) for group in groups.values() for one, _ in group):
        servers.install()
        peers = peers_python()

    take_charge()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="penstock-bench-", dir=disk_directory(), ignore_cleanup_errors=True
    ) as name:
        directory = Path(name)
        sync = disk.append_and_sync(directory, 1.0)
        about: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": results.machine(),
            "versions": versions(peers),
            "sync": {"p50_us": sync["p50_us"], "p99_us": sync["p99_us"]},
            "repeats": repeats,
            "quick": options.quick,
        }
        if about["machine"]["load_before"] > BUSY * about["machine"]["cores"]:
            print(
                f"this machine is busy (load {about['machine']['load_before']}): expect figures that are too low",
                flush=True,
            )
        try:
            found = run(Arena(directory, peers), groups, repeats, options.quick)
        finally:
            end_pids(descendants(os.getpid()))
    document = found.as_json({**about, "took_s": round(time.monotonic() - begun)})
    # A part of the whole must not pass for the whole.
    whole = not options.quick and not options.only
    output = options.output or (results.LATEST if whole else results.LATEST.with_name("partial.tmp"))
    results.write(document, output)
    print(f"\n{table.full(document)}\n\nwritten to {output} after {document['took_s']} s")
    return 1 if found.failures else 0


def disk_directory() -> str:
    """Where temporary files are on a disk: syncing a file that lives in memory would flatter everyone."""
    for candidate in (tempfile.gettempdir(), "/var/tmp"):
        if not disk.is_memory(Path(candidate)):
            return candidate
    raise SystemExit("temporary files live in memory here; set TMPDIR to a directory on a disk")


if __name__ == "__main__":
    sys.exit(main())
