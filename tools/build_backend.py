"""The build backend: maturin, and the `penstock` executable that it does not know of.

maturin builds one Rust crate for each wheel, the extension module. `local:` and the command line need the executable
too, at `penstock/_bin/`. An editable install has it there in the checkout; a wheel gets it when maturin is done, and
the checkout stays as it is. A source distribution has the crates of both, and this file.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import maturin
from maturin import (
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
# What a source distribution holds: all members of the workspace, as cargo reads the manifests of all to build one, and
# the pages that their code includes.
SOURCES = [
    *("CHANGELOG.md", "Cargo.lock", "Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md", "pyproject.toml"),
    *("crates", "docs", "proto", "python", "tools"),
]
# Of those, what was built in the checkout.
BUILT = {"__pycache__", "_bin"}


def built_program() -> Path:
    """Build the executable, and return where cargo has left it."""
    if sys.platform == "win32":
        raise SystemExit("penstock runs on Linux and macOS; on Windows, use it inside WSL")
    if shutil.which("cargo") is None:
        raise SystemExit(
            "building penstock needs Rust, and there is no `cargo` on the PATH: install it from https://rustup.rs"
            " and try again"
        )
    cargo = ["cargo", "build", "--release", "--package", "penstock-cli", "--message-format", "json-render-diagnostics"]
    told = subprocess.run(cargo, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    # Which folder that is depends on the target directory, and on the target that may be configured.
    found = [json.loads(line).get("executable") for line in told.splitlines()]
    return Path(next(name for name in found if name))


def place_program() -> None:
    """Put the executable into the checkout, with the line tables of profilers."""
    program = built_program()
    PROGRAM.parent.mkdir(exist_ok=True)
    # Renamed into place: brokers that run from the old file keep it, and nobody starts half a file.
    fresh = PROGRAM.with_name(f".penstock-{os.getpid()}")
    shutil.copy(program, fresh)
    fresh.replace(PROGRAM)


def build_wheel(wheel_directory: str, *args: Any, **kwargs: Any) -> str:
    program = built_program()
    with tempfile.TemporaryDirectory() as directory:
        name = maturin.build_wheel(directory, *args, **kwargs)
        wheel = [sys.executable, "-m", "wheel"]
        quietly: Any = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([*wheel, "unpack", "--dest", f"{directory}/open", f"{directory}/{name}"], **quietly)
        (opened,) = Path(directory, "open").iterdir()
        place = opened / "penstock" / "_bin" / "penstock"
        place.parent.mkdir()
        shutil.copy(program, place)
        subprocess.run(["strip", "-S", place], check=True)
        subprocess.run([*wheel, "pack", "--dest-dir", wheel_directory, opened], **quietly)
    return name


def build_sdist(sdist_directory: str, *args: Any, **kwargs: Any) -> str:
    """maturin's own has the extension module's crates alone: neither those of the executable nor this file."""
    with tempfile.TemporaryDirectory() as directory:
        name = maturin.build_sdist(directory, *args, **kwargs)
        top = name.removesuffix(".tar.gz")
        with tarfile.open(f"{directory}/{name}") as archive:
            archive.extract(f"{top}/PKG-INFO", directory)
        with tarfile.open(f"{sdist_directory}/{name}", "w:gz") as archive:
            archive.add(f"{directory}/{top}/PKG-INFO", f"{top}/PKG-INFO", filter=_as_source)
            for source in SOURCES:
                archive.add(ROOT / source, f"{top}/{source}", filter=_as_source)
    return name


def _as_source(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what was built, and who has built it."""
    name = os.path.basename(file.name)
    if name in BUILT or name.endswith(".so"):
        return None
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


def build_editable(*args: Any, **kwargs: Any) -> str:
    place_program()
    return maturin.build_editable(*args, **kwargs)


if __name__ == "__main__":
    try:
        place_program()
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)  # cargo has said why
