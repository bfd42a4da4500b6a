"""Recreates `format-1/`. Only the program of commit 75ba5aa can do so: it was the last to write format 1.

Run this in a checkout of that commit, built with `make build`, as root (small segments need a small disk). HERE is
this directory:

    cp HERE/make_format_1.rs crates/penstock-server/examples/special.rs
    cargo build --release --package penstock-server --example special
    TZ=UTC FAKETIME_DONT_FAKE_MONOTONIC=1 faketime -f '@2026-01-15 12:00:00' \
        .venv/bin/python HERE/make_format_1.py target/release/examples/special HERE/format-1

The output is `journal.tar.gz`, the journal once the server had stopped, and `jobs.txt`: each job and what the
program of that version reported about it. Ids differ between runs, so commit both.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shop import add, app, charge, deliver, fill, hello, segfault, segfault_once, send

from penstock import Job, _core
from penstock.errors import ResultExpired

# Segments are then 2 MiB, so the first ones are reclaimed after few jobs.
DISK_MEGABYTES = 128
PENSTOCK = Path(sys.executable).with_name("penstock")
DAY = 86_400.0
Jobs = dict[str, Job[Any]]
ENDS = ("succeeded", "failed", "expired", "crashed", "cancelled")
HEADING = """\
# Each job in this directory, and what the program that wrote it said of it:
# id, state, how it has ended ("-": not yet, or nobody knows), queue, task, attempts that failed, crashes, what it is.
# "unknown": no such message is held, any more or at all.
"""


def main(special: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        disk = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m", "penstock", place]
        subprocess.run(disk, check=True)
        try:
            make(special, target, Path(place))
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)


def make(special: str, target: Path, place: Path) -> None:
    url = f"unix:{place}/socket"
    os.environ["PENSTOCK_URL"] = url
    # Tracebacks show its path.
    shutil.copy(Path(__file__).with_name("shop.py"), place)
    serve = [PENSTOCK, "server", "--listen", url, "--data", place / "data"]
    server = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    while "listening on" not in server.stderr.readline():
        assert server.poll() is None

    # The journal's first segments get reclaimed, so these jobs are carried forward.
    old: Jobs = {
        "add(20, 22), carried forward": add.options(result_ttl=30 * DAY).delay(20, 22),
        "charge(17), carried forward": charge.options(result_ttl=30 * DAY).delay(17),
        "send('ada') of queue mail, carried forward": send.options(result_ttl=30 * DAY).delay("ada"),
        "segfault(), twice, carried forward": segfault.options(result_ttl=30 * DAY).delay(),
        "segfault_once() of queue mail, carried forward": segfault_once.options(result_ttl=30 * DAY).delay(),
        "deliver(18), waits for its retry, carried forward": deliver.options(result_ttl=30 * DAY).delay(18),
        "hello('Grace') of a user's own queue, carried forward": hello.options(queue="dead", result_ttl=30 * DAY).delay(
            "Grace"
        ),
    }
    work(place, "default", "mail")
    for _ in range(40):
        fill.map(["x" * 100_000] * 5)
        work(place, "default")
    # These jobs stay where they were first written.
    new: Jobs = {
        "add(1, 2)": add.options(result_ttl=30 * DAY).delay(1, 2),
        "charge(19)": charge.options(result_ttl=30 * DAY).delay(19),
        "send('alan') of queue mail": send.options(result_ttl=30 * DAY).delay("alan"),
        "segfault(), twice": segfault.options(result_ttl=30 * DAY).delay(),
        "deliver(20), waits for its retry": deliver.options(result_ttl=30 * DAY).delay(20),
        "hello('Barbara') of a user's own queue": hello.options(queue="dead", result_ttl=30 * DAY).delay("Barbara"),
        "hello('nobody'), purged": hello.options(queue="purged", result_ttl=30 * DAY).delay("nobody"),
        "hello('late'), expired": hello.options(queue="late", expires=0.001, result_ttl=30 * DAY).delay("late"),
    }
    work(place, "default", "mail", "late")
    client = _core.Client(url)
    client.purge("purged", 10)
    february = datetime(2026, 2, 1, tzinfo=UTC)
    waiting: Jobs = {
        "hello('Edsger')": hello.options(result_ttl=30 * DAY).delay("Edsger"),
        "hello('Tony'), first of all": hello.options(priority=9, result_ttl=30 * DAY).delay("Tony"),
        "hello('Ada'), in 20 days": hello.options(countdown=20 * DAY, result_ttl=30 * DAY).delay("Ada"),
        "hello('Alan'), in February": hello.options(eta=february, result_ttl=30 * DAY).delay("Alan"),
        "hello('Kurt'), within 10 days": hello.options(expires=10 * DAY, result_ttl=30 * DAY).delay("Kurt"),
    }
    lines = [described(client, job, what) for what, job in (old | new | waiting).items()]
    client.close(10)
    app.close()
    with subprocess.Popen([special, f"{place}/socket"], stdout=subprocess.PIPE, text=True) as specialist:
        assert specialist.stdout is not None
        while (line := specialist.stdout.readline()) != "ready\n":
            lines.append(line)
        # This client doesn't say goodbye, so its lease is kept.
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.stderr.read()

    target.mkdir(exist_ok=True)
    (target / "jobs.txt").write_text(HEADING + "".join(lines))
    names = sorted(path.name for path in (place / "data" / "journal").iterdir())
    assert "0000000000000001.segment" not in names, names
    pack = ["tar", "-C", place / "data", "--sparse", "--sort=name", "--owner=0", "--group=0", "-czf"]
    subprocess.run([*pack, target / "journal.tar.gz", "journal"], check=True)
    print(*names, sep="\n")


def work(place: Path, *queues: str) -> None:
    worker = [PENSTOCK, "worker", "shop:app", "--burst", "-c", "1", "-Q", ",".join(queues)]
    subprocess.run(worker, cwd=place, check=True)


def described(client: _core.Client, job: Job[Any], what: str) -> str:
    held = client.message_info(job._id, 10)
    try:
        end = client.peek(job._id, 10)
    except ResultExpired:
        end = None
    ended = ENDS[end[0]] if end else "-"
    if held is None:
        return f"{job.id} unknown {ended} - - - - {what}\n"
    known = f"{held['state']} {ended} {held['queue']} {held['task']} {held['attempt']} {held['crashes']}"
    return f"{job.id} {known} {what}\n"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
