"""The build backend: maturin, plus the `penstock` program that maturin knows nothing about.

maturin builds one Rust crate for each wheel, the extension module. `local:` and the command line also need the program,
at `penstock/_bin/`. An editable install has it there in the checkout. A wheel receives it after maturin has finished,
and the checkout stays unchanged. A source distribution has the crates of both, and this file.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import maturin
from maturin import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)
from package_readme import as_on_pypi

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
PLACE = Path("penstock", "_bin", "penstock")
PROGRAM = ROOT / "python" / PLACE
CARGO = ("cargo", "build")
# Contents of a source distribution: all members of the workspace, because cargo reads every manifest to build one of
# them, and the pages that their code includes.
SOURCES = [
    *("CHANGELOG.md", "Cargo.lock", "Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md", "pyproject.toml"),
    *("crates", "docs", "proto", "python", "tools"),
]
# Names among them that a build has left in the checkout.
BUILT = {"__pycache__", "_bin"}


class Program(NamedTuple):
    path: Path
    version: str


def built_program(command: tuple[str, ...] = CARGO, target: str | None = None) -> Program:
    """Build the program, and return where cargo put it."""
    if sys.platform == "win32":
        raise SystemExit("penstock runs on Linux and macOS; on Windows, use it inside WSL")
    if shutil.which("cargo") is None:
        raise SystemExit(
            "building penstock needs Rust, and there is no `cargo` on the PATH: install it from https://rustup.rs"
            " and try again"
        )
    options = ["--release", "--locked", "--package", "penstock-cli", "--message-format", "json-render-diagnostics"]
    if target:
        options += ["--target", target]
    printed = subprocess.run([*command, *options], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    # The path depends on the target directory, and on the target, which may be configured.
    (artifact,) = (found for found in map(json.loads, printed.splitlines()) if found.get("executable"))
    path, version = Path(artifact["executable"]), re.split("[#@]", artifact["package_id"])[-1]
    if (said := _said_version(path)) not in (None, version):
        raise SystemExit(f"cargo built penstock {version}, and {path} says that it is {said}")
    return Program(path, version)


def _said_version(program: Path) -> str | None:
    """Return what the program calls its version; ``None`` when it was built for another machine."""
    try:
        run = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    except OSError:
        return None
    return run.stdout.split()[-1]


def place_program() -> Program:
    """Put the program into the checkout, with the line tables that profilers need."""
    program = built_program()
    PROGRAM.parent.mkdir(exist_ok=True)
    # Renamed into place: running brokers keep the old file, and no process starts half a file.
    fresh = PROGRAM.with_name(f".penstock-{os.getpid()}")
    shutil.copy(program.path, fresh)
    fresh.replace(PROGRAM)
    return program


@contextlib.contextmanager
def announced(program: Program) -> Iterator[None]:
    """Pass the program's version on to the extension module's build.rs, which compares it with the package's."""
    name = "PENSTOCK_PROGRAM_VERSION"
    before = os.environ.get(name)
    os.environ[name] = program.version
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    program = built_program(target=_target_of(maturin.get_maturin_pep517_args(config_settings)))
    with tempfile.TemporaryDirectory() as directory, announced(program):
        # Without `metadata_directory`: maturin would take its description, and this adds one of its own.
        name = maturin.build_wheel(directory, config_settings)
        complete_wheel(Path(directory, name), program, Path(wheel_directory))
    return name


def _target_of(options: list[str]) -> str | None:
    """Return the target triple in maturin's options. Without one, cargo and maturin both read CARGO_BUILD_TARGET."""
    for option, value in itertools.pairwise([*options, ""]):
        if option == "--target":
            return value
        if option.startswith("--target="):
            return option.removeprefix("--target=")
    return None


def complete_wheel(made: Path, program: Program, directory: Path) -> Path:
    """Add the program to maturin's wheel, and make its description one for PyPI. Returns the wheel in `directory`."""
    wheel = [sys.executable, "-m", "wheel"]
    with tempfile.TemporaryDirectory() as opened_in:
        subprocess.run([*wheel, "unpack", "--dest", opened_in, made], check=True, stdout=subprocess.DEVNULL)
        (opened,) = Path(opened_in).iterdir()
        place = opened / PLACE
        place.parent.mkdir(exist_ok=True)
        shutil.copy(program.path, place)
        _strip(place)
        (metadata,) = opened.glob("*.dist-info/METADATA")
        _describe(metadata)
        subprocess.run([*wheel, "pack", "--dest-dir", directory, opened], check=True, stdout=subprocess.DEVNULL)
    return directory / made.name


def _strip(program: Path) -> None:
    """Remove the line tables. `strip` knows its own machine's format only; LLVM's knows all."""
    for tool in filter(shutil.which, ("strip", "llvm-strip")):
        if subprocess.run([tool, "-S", program], capture_output=True).returncode == 0:
            return
    print(f"{program.name} keeps its line tables: install llvm-strip for a smaller package", file=sys.stderr)


def _describe(metadata: Path) -> None:
    """Replace the README in a package's metadata by the one for PyPI, where relative links lead nowhere."""
    headers, separator, readme = metadata.read_text().partition("\n\n")
    metadata.write_text(headers + separator + as_on_pypi(readme))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    name = maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    _describe(Path(metadata_directory, name, "METADATA"))
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build an sdist with both crates and this file; maturin's own holds only the extension module's crates."""
    with tempfile.TemporaryDirectory() as directory:
        name = maturin.build_sdist(directory, config_settings)
        top = name.removesuffix(".tar.gz")
        with tarfile.open(f"{directory}/{name}") as archive:
            archive.extract(f"{top}/PKG-INFO", directory)
        _describe(Path(directory, top, "PKG-INFO"))
        with tarfile.open(f"{sdist_directory}/{name}", "w:gz") as archive:
            archive.add(f"{directory}/{top}/PKG-INFO", f"{top}/PKG-INFO", filter=_as_source)
            for source in SOURCES:
                archive.add(ROOT / source, f"{top}/{source}", filter=_as_source)
    return name


def _as_source(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out built files, and the name of the user who built them."""
    name = os.path.basename(file.name)
    if name in BUILT or name.endswith(".so"):
        return None
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    with announced(place_program()):
        return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


if __name__ == "__main__":
    try:
        place_program()
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)  # cargo has said why
