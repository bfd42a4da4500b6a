"""What `pip install` gives works without the checkout: the extension module, the executable, the command."""

from __future__ import annotations

import fcntl
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
from project import Project

# Building it takes its time when nothing is compiled yet.
pytestmark = pytest.mark.timeout(900)

WITH_TOOLS = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def interpreters() -> list[str]:
    """This Python and, where there is one, the newest other that Penstock supports."""
    found = {}
    for minor in range(11, 15):
        names = [shutil.which(f"python3.{minor}"), *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
        for name in filter(None, names):
            # pyenv leaves names on PATH that run nothing.
            if subprocess.run([name, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                found[minor] = str(name)
    found.pop(sys.version_info.minor, None)
    return [sys.executable, *[found[max(found)]][:1]] if found else [sys.executable]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built once, by the first test process that comes: two builds at a time take each other's files away."""
    in_turns = "PYTEST_XDIST_WORKER" in os.environ
    place = tmp_path_factory.getbasetemp().parent / "wheel" if in_turns else tmp_path_factory.mktemp("wheel")
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(place.glob("*.whl")):
            make_wheel(ROOT, place)
    (built,) = place.glob("*.whl")
    return built


def make_wheel(source: Path, place: Path, **environment: str) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", place]
    subprocess.run([*build, source], check=True, env={**os.environ, **WITH_TOOLS, **environment})


def test_it_holds_what_it_needs_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        modes = {item.filename: item.external_attr >> 16 for item in archive.infolist()}
    assert modes["penstock/_bin/penstock"] & 0o111 == 0o111
    assert {"penstock/_core.abi3.so", "penstock/_core.pyi", "penstock/py.typed", "penstock/__init__.py"} <= modes.keys()
    assert all(name.startswith(("penstock/", "penstock-")) for name in modes), sorted(modes)
    assert any(name.endswith("licenses/LICENSE-MIT") for name in modes)
    assert "abi3" in wheel.name


def test_its_program_has_no_line_tables_and_that_of_the_checkout_keeps_them(wheel):
    with zipfile.ZipFile(wheel) as archive:
        without_bytes = archive.getinfo("penstock/_bin/penstock").file_size
    # Building a wheel used to leave its program in the checkout, under the tests that ran just then.
    assert without_bytes * 2 < (ROOT / "python/penstock/_bin/penstock").stat().st_size


def test_it_holds_no_planted_bug(wheel):
    table = (ROOT / "crates/penstock-faults/src/table.rs").read_text()
    names = re.findall(r'plant\(\s*"([a-z-]+)"', table)
    assert len(names) >= 30
    with zipfile.ZipFile(wheel) as archive:
        for file in ["penstock/_bin/penstock", "penstock/_core.abi3.so"]:
            code = archive.read(file)
            assert [name for name in names if name.encode() in code] == []


@pytest.mark.parametrize("python", interpreters())
def test_the_quickstart_runs_from_another_directory(project, wheel, python):
    run_quickstart(project, wheel, python)


def run_quickstart(project: Project, wheel: Path, python: str) -> None:
    environment = project.directory / "venv"
    # By this environment's pip: half of the time would go into installing another.
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


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    code = "import sys, build_backend; build_backend.build_sdist(sys.argv[1])"
    place = tmp_path_factory.mktemp("sdist")
    tools = {**os.environ, **WITH_TOOLS, "PYTHONPATH": f"{ROOT}/tools"}
    subprocess.run([sys.executable, "-c", code, place], cwd=ROOT, check=True, env=tools)
    (built,) = place.glob("*.tar.gz")
    return built


def test_the_sdist_holds_all_that_is_built_and_nothing_that_was(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
        names = {name.partition("/")[2] for name in archive.getnames()}
    (source,) = tmp_path.iterdir()
    assert {"PKG-INFO", "pyproject.toml", "tools/build_backend.py", "crates/penstock-cli/src/main.rs"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", "_bin/penstock"))]
    files = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    assert files - {"PKG-INFO"} == {
        name
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        if name in files or name.startswith(("crates/", "python/", "tools/"))
    }
    # With all members of the workspace and their versions, which cargo wants to see before it builds one of them.
    metadata = ["cargo", "metadata", "--locked", "--offline", "--format-version=1", "--no-deps"]
    subprocess.run(metadata, cwd=source, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="compiles everything once more; CI does")
def test_a_wheel_of_the_sdist_works(sdist, project, tmp_path):
    # The profile of a release would take minutes more and show nothing else.
    profile = {"LTO": "off", "OPT_LEVEL": "0", "CODEGEN_UNITS": "16", "DEBUG": "false"}
    profile = {f"CARGO_PROFILE_RELEASE_{name}": value for name, value in profile.items()}
    make_wheel(sdist, tmp_path, CARGO_TARGET_DIR=str(tmp_path / "target"), **profile)
    (wheel,) = tmp_path.glob("*.whl")
    run_quickstart(project, wheel, sys.executable)


def test_a_build_without_rust_says_what_to_install(tmp_path):
    build = [sys.executable, "tools/build_backend.py"]
    run = subprocess.run(build, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "building penstock needs Rust, and there is no `cargo` on the PATH: install it from https://rustup.rs"
        " and try again"
    ]
