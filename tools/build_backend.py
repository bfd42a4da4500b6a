"""The build backend of the wheel: maturin, with the `penstock` executable built first.

maturin builds one Rust crate for each wheel, the extension module. `local:` and the command line need
the executable too, so it is built into `python/penstock/_bin/`, from where pyproject.toml includes it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "python" / "penstock" / "_bin" / "penstock"


def place_program(*, stripped: bool = False) -> None:
    """Build the executable and put it into the package; without the line tables of profilers if ``stripped``."""
    if sys.platform == "win32":
        raise SystemExit("penstock runs on Linux and macOS; on Windows, use it inside WSL")
    cargo = ["cargo", "build", "--release", "--package", "penstock-cli"]
    subprocess.run(cargo, cwd=ROOT, check=True)
    built = Path(os.environ.get("CARGO_TARGET_DIR", "target"), "release", "penstock")
    PROGRAM.parent.mkdir(exist_ok=True)
    # Renamed into place: brokers that run from the old file keep it, and nobody starts half a file.
    fresh = PROGRAM.with_name(f".penstock-{os.getpid()}")
    shutil.copy(ROOT / built, fresh)
    if stripped:
        subprocess.run(["strip", "-S", fresh], check=True)
    fresh.replace(PROGRAM)


def build_wheel(*args: Any, **kwargs: Any) -> str:
    place_program(stripped=True)
    return maturin.build_wheel(*args, **kwargs)


def build_editable(*args: Any, **kwargs: Any) -> str:
    place_program()
    return maturin.build_editable(*args, **kwargs)


if __name__ == "__main__":
    try:
        place_program()
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)  # cargo has said why
