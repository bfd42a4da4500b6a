"""The peers' servers, from Debian's packages: private data, free loopback ports, stopped by process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from processes import running, tail

PACKAGES = {"redis-server": "/usr/bin/redis-server", "rabbitmq-server": "/usr/lib/rabbitmq/bin/rabbitmq-server"}
START_S = 60


class InstallFailed(Exception):
    """The missing servers can't be installed from here."""


def missing(packages: Iterable[str] = PACKAGES) -> list[str]:
    """Return the packages whose server is not installed."""
    return [package for package in packages if not os.access(PACKAGES[package], os.X_OK)]


def may_install(missing: list[str]) -> bool:
    """Ask on a terminal; elsewhere only ``BENCH_INSTALL=1`` agrees, so that no script installs by surprise."""
    if "BENCH_INSTALL" in os.environ:
        return os.environ["BENCH_INSTALL"] == "1"
    if not sys.stdin.isatty():
        return False
    answer = input(f"The peers need {' and '.join(missing)}. Install with apt-get now? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def install(missing: list[str]) -> None:
    """Install these packages, as root on Debian or Ubuntu. No service starts."""
    by_hand = f"install them yourself: apt-get install {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise InstallFailed(f"only root can install {' and '.join(missing)}, with apt-get; {by_hand}")
    print(f"installing {' '.join(missing)} ...", flush=True)
    with services_held_back():
        for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            outcome = subprocess.run(
                ["apt-get", "-q", *command],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
            if outcome.returncode != 0:
                raise InstallFailed(f"apt-get {command[0]} failed; {by_hand}\n{outcome.stderr.strip()}")


@contextlib.contextmanager
def services_held_back() -> Iterator[None]:
    """Stop Debian from starting a daemon when it installs one: this script refuses with exit status 101."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():  # the machine's owner has already decided
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[0]} exited at its start:\n{tail(log)}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args[0]} did not listen within {START_S} s:\n{tail(log)}")


@contextlib.contextmanager
def redis(directory: Path, appendfsync: str) -> Iterator[str]:
    """Run a Redis with an append-only file, synced every second or before each round of replies; yield its URL."""
    directory.mkdir(parents=True)
    port = free_port()
    log = directory / "redis.log"
    command = [
        PACKAGES["redis-server"],
        "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--daemonize", "no",
        "--appendonly", "yes", "--appendfsync", appendfsync,
        "--save", "", "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    with running(command, log=log) as process:
        wait_for_port(port, process, log)
        yield f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def rabbitmq(directory: Path) -> Iterator[str]:
    """Run a private RabbitMQ node, with its own data, cookie, port mapper and distribution port; yield its URL."""
    directory.mkdir(parents=True)
    port, mapper_port, distribution_port = free_port(), free_port(), free_port()
    log = directory / "rabbitmq.out"
    (directory / "enabled_plugins").write_text("[].\n")
    (directory / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
    env = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "HOME": str(directory),  # for Erlang's cookie
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(mapper_port),
        "RABBITMQ_NODENAME": "penstock-bench@localhost",
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_LOGS": "-",
    }
    # Started here, because the node would otherwise start one that outlives it.
    with (
        running(
            ["/usr/bin/epmd", "-address", "127.0.0.1", "-port", str(mapper_port)], log=directory / "epmd.log", env=env
        ),
        running([PACKAGES["rabbitmq-server"]], log=log, env=env, cwd=directory, grace_s=20) as process,
    ):
        wait_for_port(port, process, log)
        yield f"amqp://guest:guest@127.0.0.1:{port}//"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        query = subprocess.run(["dpkg-query", "-W", "-f=${Version}", package], capture_output=True, text=True)
        if query.returncode == 0:
            found[package] = query.stdout.strip()
    return found
