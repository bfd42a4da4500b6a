"""``penstock demo``: count the identifiers of Python's own source, one job a file, compared with a serial loop.

The two tasks are written like those of any application. Below them are the steps of the demo, the processes that it
starts and stops, and the drawing on the terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import keyword
import os
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from penstock import App, Job
from penstock.errors import PenstockError, ResultTimeout

T = TypeVar("T")
Count = tuple[int, dict[str, int]]
"""Number of lines, and the count of each identifier."""

PROGRAM = Path(__file__).parent / "_bin" / "penstock"
SLOTS = 2
ENOUGH_FILES = 1_000
TOP = 10

app = App("demo")


@app.task
def count(path: str) -> Count:
    """Count the lines and the identifiers of one Python file."""
    lines = 0
    identifiers: Counter[str] = Counter()
    try:
        with tokenize.open(path) as source:
            for token in tokenize.generate_tokens(source.readline):
                lines = token.end[0]
                if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                    identifiers[token.string] += 1
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        # Python's tests include files that are broken on purpose; they are counted up to the error.
        pass
    return lines, dict(identifiers)


@app.task
def merge(counts: list[Count]) -> Count:
    """Add up the counts of many files."""
    lines = 0
    identifiers: Counter[str] = Counter()
    for file_lines, file_identifiers in counts:
        lines += file_lines
        identifiers.update(file_identifiers)
    return lines, dict(identifiers)


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


def main() -> int:
    """Run the demo; return exit code 0 when both ways gave the same answer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    screen = Screen()
    try:
        return demonstrate(screen)
    except KeyboardInterrupt:
        screen.clear()
        print("penstock demo: stopped; its worker, broker and data were removed", file=sys.stderr)
        return 130
    except (PenstockError, DemoError) as error:
        screen.clear()
        print(f"penstock demo: {error}", file=sys.stderr)
        return 1


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # The blocks that started a process now stop it; a second Ctrl-C must not interrupt them.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def demonstrate(screen: Screen) -> int:
    files = source_files()
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    print(screen.bold("\n  Penstock: the identifiers in Python's own source, one job a file\n"))
    print(f"  {len(files):,} files, {megabytes:.1f} MB, in {sysconfig.get_path('stdlib')}")

    started = time.perf_counter()
    with broker(), worker() as process:
        # The first job connects the app, which starts the broker.
        result_of(count.delay(os.devnull), process)
        print(f"  broker and worker ({SLOTS} slots) up after {time.perf_counter() - started:.2f} s\n", flush=True)

        started = time.perf_counter()
        jobs = count.map(str(file) for file in files)
        counts = [result_of(job, process) for job in screen.progress("penstock", jobs)]
        queued = result_of(merge.delay(counts), process)
        queued_s = time.perf_counter() - started

        started = time.perf_counter()
        # Calling a task runs it here, as a plain function.
        serial = merge([count(str(file)) for file in screen.progress("serial", files)])
        serial_s = time.perf_counter() - started

    lines, identifiers = queued
    top = Counter(identifiers).most_common(TOP)
    print(screen.bold("  most used identifiers"))
    for name, times in top:
        print(f"    {name:<12}{times:>9,}  {'█' * round(40 * times / top[0][1])}")
    rate = (len(files) + 1) / queued_s
    print(screen.bold("\n  wall time"))
    print(f"    penstock {queued_s:8.2f} s   {rate:,.0f} jobs/s in {SLOTS} slots, each on disk before it ran")
    print(f"    serial   {serial_s:8.2f} s   {serial_s / queued_s:.2f} times as long, in one loop\n")
    if queued != serial:
        raise DemoError("the two answers differ; this is a bug, please report it")
    print(f"  both answers are equal: {len(identifiers):,} identifiers in {lines:,} lines\n")
    return 0


def result_of(job: Job[T], process: subprocess.Popen[bytes]) -> T:
    while True:
        try:
            return job.result(timeout=5)
        except ResultTimeout:
            if process.poll() is not None:
                raise DemoError("the worker exited before its jobs were done") from None


def source_files() -> list[Path]:
    """Find the source of the standard library, plus installed packages where it comes without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)
    if len(files) < ENOUGH_FILES:
        for packages in map(Path, site.getsitepackages()):
            files += sorted(packages.rglob("*.py"))
    if not files:
        raise DemoError(f"this Python has no source files in {library}")
    return files


@contextlib.contextmanager
def broker() -> Generator[None]:
    """Use a broker in a temporary directory, so that the demo touches no user data and leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as directory:
        os.environ["PENSTOCK_URL"] = f"local:{directory}/broker"
        try:
            yield
        finally:
            app.close()
            subprocess.run([PROGRAM, "broker", "stop"], check=True, stdout=subprocess.DEVNULL)
            # The broker holds the lock until its process exits.
            with Path(directory, "broker", "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def worker() -> Generator[subprocess.Popen[bytes]]:
    """Run what ``penstock worker penstock._demo:app -c 2`` runs."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [PROGRAM, "worker", "penstock._demo:app", "-c", str(SLOTS)],
            env={**os.environ, "PENSTOCK_PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C reaches only the demo, which then stops its processes in order.
            start_new_session=True,
        )
        try:
            yield process
        except (PenstockError, DemoError) as error:
            log.seek(0)
            raise DemoError(f"{error}\n{log.read().decode(errors='replace')}".rstrip()) from error
        finally:
            process.terminate()
            process.wait()


class Screen:
    """Output of the demo: a moving bar on a terminal, or one plain line at the end in a file or pipe."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def progress(self, label: str, items: Sequence[T]) -> Iterator[T]:
        """Yield the items one by one and show the progress."""
        started = drawn = time.perf_counter()
        for done, item in enumerate(items):
            now = time.perf_counter()
            if self.live and now - drawn > 0.05:
                drawn = now
                self.draw(label, done, len(items), now - started)
            yield item
        self.clear()
        seconds = time.perf_counter() - started
        print(f"  {label:<9} {len(items):,} files in {seconds:.2f} s", file=sys.stderr, flush=True)

    def draw(self, label: str, done: int, total: int, seconds: float) -> None:
        full = 40 * done // total
        bar = "━" * full + "\x1b[2m" + "─" * (40 - full) + "\x1b[0m"
        text = f"\r  {label:<9} {bar} {done:,}/{total:,}  {done / seconds:,.0f}/s  {seconds:.1f} s\x1b[K"
        print(text, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Run from the module that the worker also imports, so that both use the same task names.
    from penstock import _demo

    sys.exit(_demo.main())
