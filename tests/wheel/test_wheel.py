"""What `pip install` gives works without the checkout: the extension module, the executable, the command."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from blocks import ROOT, blocks

# Building it takes its time when nothing is compiled yet.
pytestmark = pytest.mark.timeout(900)


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
            build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
            tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
            subprocess.run([*build, "--wheel-dir", place, ROOT], check=True, env=tools)
    (built,) = place.glob("*.whl")
    return built


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
    environment = project.directory / "venv"
    subprocess.run([python, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "--quiet", wheel], check=True)
    path = f"{environment}/bin{os.pathsep}{os.environ['PATH']}"
    file = next(block for block in blocks(ROOT / "README.md", "python") if block.file)
    project.write(file.file, file.text)

    worker = project.start(environment / "bin" / "penstock", "worker", "shop:app", PATH=path)
    run = project.run(environment / "bin" / "python", "shop.py", PATH=path, timeout=60)
    assert run.output == blocks(ROOT / "README.md", "text")[0].text
    assert worker.returncode is None, worker.output


def test_a_build_without_rust_says_what_to_install(tmp_path):
    build = [sys.executable, "tools/build_backend.py"]
    run = subprocess.run(build, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "building penstock needs Rust, and there is no `cargo` on the PATH: install it from https://rustup.rs"
        " and try again"
    ]
