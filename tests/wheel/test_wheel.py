"""`pip install` installs everything that works without a checkout: the extension module, the program, the command."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from blocks import ROOT, blocks
from builds import build_environment, in_turns
from packaging.metadata import Metadata
from project import Project

import penstock

# The first build compiles everything.
pytestmark = pytest.mark.timeout(1800)


def interpreters() -> list[str]:
    """Return this Python and, if installed, the newest other version that Penstock supports."""
    found = {}
    for minor in range(11, 15):
        names = [shutil.which(f"python3.{minor}"), *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
        for name in filter(None, names):
            # pyenv leaves names on PATH that don't run.
            if subprocess.run([name, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                found[minor] = str(name)
    found.pop(sys.version_info.minor, None)
    return [sys.executable, *[found[max(found)]][:1]] if found else [sys.executable]


def test_it_holds_what_it_needs_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        modes = {item.filename: item.external_attr >> 16 for item in archive.infolist()}
    assert modes["penstock/_bin/penstock"] & 0o111 == 0o111
    assert {"penstock/_core.abi3.so", "penstock/_core.pyi", "penstock/py.typed", "penstock/__init__.py"} <= modes.keys()
    assert all(name.startswith(("penstock/", "penstock-")) for name in modes), sorted(modes)
    assert any(name.endswith("licenses/LICENSE-MIT") for name in modes)
    assert "abi3" in wheel.name


def test_the_program_has_the_version_of_the_package(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        program = Path(archive.extract("penstock/_bin/penstock", tmp_path))
    program.chmod(0o755)
    said = subprocess.check_output([program, "--version"], text=True)
    assert said == f"penstock {wheel.name.split('-')[1]}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="line tables are kept elsewhere")
def test_the_program_has_no_line_tables_and_that_of_the_checkout_keeps_them(wheel: Path) -> None:
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive, archive.open("penstock/_bin/penstock") as program:
        assert ELFFile(program).get_section_by_name(".debug_line") is None
    # Building a wheel used to leave its program in the checkout, which running tests were using.
    with (Path(penstock.__file__).parent / "_bin" / "penstock").open("rb") as program:
        assert ELFFile(program).get_section_by_name(".debug_line") is not None


def test_it_holds_no_planted_bug(wheel: Path) -> None:
    table = (ROOT / "crates/penstock-faults/src/table.rs").read_text()
    names = re.findall(r'plant\(\s*"([a-z-]+)"', table)
    assert len(names) >= 30
    with zipfile.ZipFile(wheel) as archive:
        for file in ["penstock/_bin/penstock", "penstock/_core.abi3.so"]:
            code = archive.read(file)
            assert [name for name in names if name.encode() in code] == []


def test_wheel_and_sdist_have_the_same_metadata_as_pypi_wants_it(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        ours = archive.read(name)
    with tarfile.open(sdist) as archive:
        info = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert info is not None and info.read() == ours
    metadata = Metadata.from_email(ours, validate=True)
    assert metadata.description_content_type == "text/markdown; charset=UTF-8; variant=GFM"
    assert metadata.license_expression == "MIT OR Apache-2.0"
    assert metadata.author and metadata.summary and metadata.keywords
    readme = str(email.message_from_bytes(ours).get_payload(decode=True), "utf-8")
    assert readme.startswith("# Penstock\n") and len(readme) > 2_000
    relative = [target for target in re.findall(r"\]\(([^)\s]+)\)", readme) if not target.startswith(("https://", "#"))]
    assert relative == []


@pytest.mark.parametrize("python", interpreters())
def test_the_quickstart_runs_from_another_directory(project: Project, wheel: Path, python: str) -> None:
    environment = project.directory / "venv"
    # Use this environment's pip: installing another would take half of the time.
    subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", wheel], check=True)
    path = f"{environment}/bin{os.pathsep}{os.environ['PATH']}"
    file = next(block for block in blocks(ROOT / "README.md", "python") if block.file)
    project.write(file.file, file.text)

    worker = project.start(environment / "bin" / "penstock", "worker", "shop:app", PATH=path)
    run = project.run(environment / "bin" / "python", "shop.py", PATH=path, timeout=60)
    assert run.output == blocks(ROOT / "README.md", "text")[0].text
    assert worker.returncode is None, worker.output


def files_of(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def test_the_sdist_holds_all_that_is_built_and_nothing_that_was(sdist: Path, source: Path) -> None:
    files = files_of(sdist)
    assert {"PKG-INFO", "pyproject.toml", "tools/build_backend.py", "crates/penstock-cli/src/main.rs"} <= files
    assert not [name for name in files if name.endswith((".so", ".pyc", "_bin/penstock"))]
    assert files - {"PKG-INFO"} == {
        name
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        if name in files or name.startswith(("crates/", "python/", "tools/"))
    }
    # The sdist has all workspace members and their versions, because cargo reads them before it builds any.
    metadata = ["cargo", "metadata", "--locked", "--offline", "--format-version=1", "--no-deps"]
    subprocess.run(metadata, cwd=source, check=True, stdout=subprocess.DEVNULL)


def test_an_sdist_of_maturin_alone_lacks_nothing(sdist: Path, tmp_path: Path) -> None:
    build = ["maturin", "sdist", "--out", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, env=build_environment(), capture_output=True)
    (made,) = tmp_path.glob("*.tar.gz")
    assert files_of(sdist) - files_of(made) == set()


@pytest.mark.parametrize(
    ("version", "error"),
    [
        (
            None,
            "maturin alone would build a package without the penstock program: run `pip wheel .`, `make wheels`, or"
            " `pip install --editable .`",
        ),
        ("0.0.9", "the package is {package}, and the penstock program for it is 0.0.9: build both again"),
    ],
)
def test_maturin_makes_no_wheel_without_the_right_program(
    wheel: Path, source: Path, tmp_path: Path, version: str | None, error: str
) -> None:
    environment = build_environment() | ({"PENSTOCK_PROGRAM_VERSION": version} if version else {})
    with in_turns():
        build = ["maturin", "build", "--release", "--out", tmp_path]
        run = subprocess.run(build, cwd=source, env=environment, capture_output=True, text=True)
    assert run.returncode != 0 and list(tmp_path.iterdir()) == []
    package = wheel.name.split("-")[1]
    assert f"error: penstock-python@{package}: {error.format(package=package)}" in run.stderr.splitlines()


def test_a_program_of_another_version_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import build_backend

    stale = tmp_path / "stale"
    stale.write_text("#!/bin/sh\necho penstock 0.0.9\n")
    artifact = f'{{"executable": "{stale}", "package_id": "path+file:///x/penstock-cli#0.1.0"}}'
    (tmp_path / "cargo").write_text(f"#!/bin/sh\necho '{artifact}'\n")
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SystemExit, match=f"cargo built penstock 0.1.0, and {stale} says that it is 0.0.9"):
        build_backend.built_program()


def test_a_build_without_rust_says_what_to_install(tmp_path: Path) -> None:
    # Its environment says nothing about where bytecode goes, and the checkout has to stay as it is.
    build = [sys.executable, "-B", "tools/build_backend.py"]
    run = subprocess.run(build, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "building penstock needs Rust, and there is no `cargo` on the PATH: install it from https://rustup.rs"
        " and try again"
    ]
