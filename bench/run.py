"""Measure Penstock and its peers side by side on this machine: ``make bench``.

Everything is private to the run and stops with it: servers on free loopback ports, data in a temporary directory.
Prints a table with the guarantee level of each figure, and writes bench/results/latest.json.

Missing servers are installed only after a yes on the terminal, or with ``BENCH_INSTALL=1``. Otherwise the run measures
the contestants that need none, and names those that it left out.
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
BUSY = 0.3  # load average per core
REPEATS = 3

Groups = dict[str | None, list[tuple[Contestant, Workload]]]  # by the server they need


class Arena:
    """Runs each measurement in its own process with its own log, in one temporary directory."""

    def __init__(self, directory: Path, peers_python: Path | None) -> None:
        self.directory = directory
        self.peers_python = peers_python
        self.measured = 0

    def measure(
        self, contestant: Contestant, workload: Workload, quick: bool, urls: dict[str, str]
    ) -> dict[str, float]:
        """Return the figures, or raise RuntimeError with the reason why there are none."""
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
            # Penstock's broker isn't a child of the client, and would stay for a minute.
            end_pids(descendants(os.getpid(), apart_from=servers_running))
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


NEEDS = {
    None: [],
    "rabbitmq": ["rabbitmq-server", "redis-server"],
    "redis-everysec": ["redis-server"],
    "redis-always": ["redis-server"],
}
SERVERS: dict[str | None, Callable[[Path], AbstractContextManager[dict[str, str]]]] = {
    None: lambda directory: contextlib.nullcontext({}),
    "rabbitmq": celery_servers,
    "redis-everysec": lambda directory: redis_server(directory, "everysec"),
    "redis-always": lambda directory: redis_server(directory, "always"),
}


def peers_python() -> Path:
    """Return the peers' interpreter, in its own environment apart from Penstock's."""
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


def chosen(only: list[str], quick: bool) -> Groups:
    """Return the measurements by the server they need. ``only`` has workloads, or prefixes of contestants' names."""
    workload_keys = {workload.key for workload in plan.WORKLOADS}
    wanted_workloads = [name for name in only if name in workload_keys]
    wanted_contestants = [name for name in only if name not in workload_keys]
    unknown = [name for name in wanted_contestants if not any(key.startswith(name) for key in BY_KEY)]
    if unknown:
        known = ", ".join([*BY_KEY, *workload_keys])
        raise SystemExit(f"--only {unknown[0]}: no contestant or workload has this prefix; the known names are {known}")
    groups: Groups = {}
    for workload in plan.WORKLOADS:
        for key in workload.contestants_of(quick and not wanted_workloads):
            if wanted_workloads and workload.key not in wanted_workloads:
                continue
            if wanted_contestants and not any(is_meant(key, name) for name in wanted_contestants):
                continue
            groups.setdefault(BY_KEY[key].server, []).append((BY_KEY[key], workload))
    return groups


def is_meant(contestant: str, name: str) -> bool:
    """Match a name from ``--only``: ``dramatiq`` means both of its rows; ``penstock``, itself a key, only that one."""
    return contestant == name or (name not in BY_KEY and contestant.startswith(name))


def run(arena: Arena, groups: Groups, repeats: int, quick: bool) -> Results:
    """Measure all groups, each while its server runs. The order of the groups rotates from one repeat to the next."""
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


def without_missing_servers(groups: Groups) -> tuple[Groups, list[str]]:
    """Install missing servers if the user agrees; else leave out their contestants. Returns the lines that say so."""
    needed = {package for server in groups for package in NEEDS[server]}
    missing = servers.missing(sorted(needed))
    if not missing:
        return groups, []
    if servers.may_install(missing):
        try:
            servers.install(missing)
        except servers.InstallFailed as failure:
            raise SystemExit(str(failure)) from None
        return groups, []
    lost = {server for server in groups if set(NEEDS[server]) & set(missing)}
    names = dict.fromkeys(one.name for server in lost for one, _ in groups[server])
    lines = [
        f"left out, since {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
        f"{', '.join(sorted(names))}",
        f"BENCH_INSTALL=1 installs what is missing, or run: apt-get install {' '.join(missing)}",
    ]
    return {server: group for server, group in groups.items() if server not in lost}, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/run.py", description="Measure Penstock and its peers side by side.")
    parser.add_argument("--quick", action="store_true", help="one short run of the main workloads, a minute or two")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a contestant or a workload; may be repeated"
    )
    parser.add_argument("--repeats", type=int, help=f"runs of each measurement ({REPEATS}; 1 when quick)")
    parser.add_argument("--output", type=Path, help="where the JSON goes (bench/results/latest.json for a whole run)")
    against_options = parser.add_argument_group("against another build, see bench/against.py")
    against_options.add_argument(
        "--against", type=Path, metavar="DIR", help="compare CPU per job with the built checkout in DIR"
    )
    against_options.add_argument("--pairs", type=int, default=against.PAIRS, help=f"({against.PAIRS})")
    against_options.add_argument("--against-target", metavar="DIR", help="its CARGO_TARGET_DIR (its folder target)")
    against_options.add_argument("--jobs", type=int, default=against.JOBS, help=f"in each run ({against.JOBS:,})")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise SystemExit("the benchmark runs on Linux only: it reads /proc")

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

    repeats = options.repeats or (1 if options.quick else REPEATS)
    groups, left_out = without_missing_servers(chosen(options.only, options.quick))
    if not groups:
        raise SystemExit("\n".join(["nothing to measure", *left_out]))
    for line in left_out:
        print(line, flush=True)
    peers: Path | None = None
    if any(one.module and (not one.is_penstock or one.uses_packages) for group in groups.values() for one, _ in group):
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
    # A part of the whole must not pass for the whole, nor a few runs for what the documents promise.
    whole = not options.quick and not options.only and not left_out and repeats >= REPEATS
    output = options.output or (results.LATEST if whole else results.LATEST.with_name("partial.tmp"))
    results.write(document, output)
    # Said again at the end, below the tables.
    notes = [*left_out, f"written to {output} after {document['took_s']} s"]
    print("\n".join(["", table.full(document), "", *notes]))
    return 1 if found.failures else 0


def disk_directory() -> str:
    """Return a temporary directory on a disk: syncing a file in memory would flatter every contestant."""
    for candidate in (tempfile.gettempdir(), "/var/tmp"):
        if not disk.is_memory(Path(candidate)):
            return candidate
    raise SystemExit("temporary files live in memory here; set TMPDIR to a directory on a disk")


if __name__ == "__main__":
    sys.exit(main())
