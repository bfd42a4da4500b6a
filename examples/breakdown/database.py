"""Temporary PostgreSQL server for the example, and the sales in it."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg

from examples.breakdown import queries
from examples.shared.running import free_port, running, tail, wait_for_port

START_S = 60
DAYS = 91
APPS = 40
MOST_QUARTERS = 80

FILL = """
    INSERT INTO sales
    SELECT country, app, day, hash % 90 + 10, hash % 90000 + 10000
    FROM generate_series(1, {countries}) country, generate_series(1, {apps}) app,
        generate_series({first}, {first} + {days} - 1) day,
        LATERAL (SELECT abs(hashint4(country * 10000000 + app * 10000 + day)::bigint)) drawn(hash)
    ORDER BY country
"""


class PostgresMissing(Exception):
    """PostgreSQL's programs are not on this machine."""


def program(name: str) -> Path:
    """Return the path of one of PostgreSQL's programs. Debian keeps them in a directory per version, off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    if found:
        return found[-1]
    if on_path := shutil.which(name):
        return Path(on_path)
    raise PostgresMissing(f"this example needs PostgreSQL's {name}: apt-get install postgresql")


@contextlib.contextmanager
def postgres(directory: Path) -> Iterator[str]:
    """Run a server with data in ``directory``, on a free port of the loopback interface; yields its DSN."""
    data, log, secret = directory / "data", directory / "postgres.log", directory / "password"
    directory.mkdir()
    password = secrets.token_hex(16)
    secret.touch(mode=0o600)
    secret.write_text(password)
    prefix: list[str] = []
    if os.geteuid() == 0:
        # PostgreSQL refuses to be run by root.
        user = pwd.getpwnam("postgres")
        for path in (directory, secret):
            os.chown(path, user.pw_uid, user.pw_gid)
        prefix = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    made = subprocess.run(
        [
            *prefix, program("initdb"), "-D", data, "-U", "sales", "-A", "scram-sha-256", f"--pwfile={secret}",
            "--no-sync", "-E", "UTF8", "--locale=C",
        ],
        cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    if made.returncode != 0:
        raise RuntimeError(f"initdb failed:\n{made.stderr}")
    port = free_port()
    # The data is temporary, so nothing is synced. Compiling the plan of a UNION of 155 would take seconds, for 0.1 s of
    # work.
    settings = {
        "listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "max_connections": 200,
        "shared_buffers": "512MB", "fsync": "off", "max_wal_size": "4GB", "jit": "off",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    command = [*prefix, str(program("postgres")), "-D", str(data), *options]
    with running(command, log=log, cwd=Path("/")) as process:
        wait_for_port(port, process, log)
        dsn = f"postgresql://sales:{password}@127.0.0.1:{port}/postgres"
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(dsn).close()
                break
            except psycopg.OperationalError:  # it is starting up
                if time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start within {START_S} s:\n{tail(log)}") from None
                time.sleep(0.05)
        yield dsn


def fill(dsn: str, countries: int, one_ms: float, all_ms: float) -> str:
    """Add sales until the query of one country, and that of all countries, take this long; describe the data."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE UNLOGGED TABLE sales (country int, app int, day int, units int, cents int)")
        connection.execute("CREATE INDEX ON sales (country)")
        for quarter in range(MOST_QUARTERS):
            connection.execute(FILL.format(countries=countries, apps=APPS, days=DAYS, first=quarter * DAYS))
            connection.execute("VACUUM (FREEZE, ANALYZE) sales")
            one = least_ms(lambda: queries.of_country(countries // 2), 21)
            union = least_ms(queries.of_all, 5)
            if one >= one_ms and union >= all_ms:
                break
    queries.connection().close()
    rows = countries * APPS * DAYS * (quarter + 1)
    return (
        f"{rows:,} sales: {countries} countries, {APPS} apps, {DAYS * (quarter + 1):,} days. Alone, the query of one"
        f" country takes {one:.1f} ms at least, and the one of all countries {union:.0f} ms."
    )


def least_ms(query: Callable[[], object], times: int) -> float:
    """Return the time of the fastest of several runs. Other load on the machine can only add to it."""
    query()  # connects, and reads what it needs into memory
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        query()
        taken.append((time.perf_counter() - begun) * 1e3)
    return min(taken)
