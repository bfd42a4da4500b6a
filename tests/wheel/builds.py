"""Builds of the packages under test."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from blocks import ROOT

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "packages"


def build_environment() -> dict[str, str]:
    """Return the environment of all builds here: tools, one target triple, and a profile that compiles quickly."""
    profile = {"LTO": "off", "OPT_LEVEL": "0", "CODEGEN_UNITS": "16", "DEBUG": "line-tables-only"}
    host = re.search(r"^host: (\S+)$", subprocess.check_output(["rustc", "-vV"], text=True), re.MULTILINE)
    assert host is not None
    return {
        **{name: value for name, value in os.environ.items() if name != "PENSTOCK_PROGRAM_VERSION"},
        **{f"CARGO_PROFILE_RELEASE_{name}": value for name, value in profile.items()},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CARGO_TARGET_DIR": str(TARGET),
        # With a triple, cargo puts the program into a separate folder, which maturin reads too.
        "CARGO_BUILD_TARGET": host[1],
    }


@contextlib.contextmanager
def in_turns() -> Iterator[None]:
    """Let one test process build at a time."""
    TARGET.mkdir(parents=True, exist_ok=True)
    with (TARGET / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_alike(target: Path, source: Path) -> None:
    """Make `target` a copy of `source`, but leave identical files untouched, so cargo doesn't rebuild them."""
    wanted = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
    for file in [file for file in target.rglob("*") if file.is_file() and file.relative_to(target) not in wanted]:
        file.unlink()
    for name in wanted:
        if not (target / name).exists() or (target / name).read_bytes() != (source / name).read_bytes():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
            shutil.copymode(source / name, target / name)
