"""The packages under test: the sdist of this checkout, and a wheel built from an unpacked copy of it.

The copy has a fixed place below the target directory, and its build profile favours compile time. So no build
writes into the checkout while other tests use it, and a second run compiles only changed files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from blocks import ROOT
from builds import TARGET, build_environment, in_turns, make_alike


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = "import sys, build_backend; build_backend.build_sdist(sys.argv[1])"
    place = tmp_path_factory.mktemp("sdist")
    tools = {**build_environment(), "PYTHONPATH": f"{ROOT}/tools"}
    subprocess.run([sys.executable, "-c", code, place], cwd=ROOT, check=True, env=tools)
    (built,) = place.glob("*.tar.gz")
    return built


@pytest.fixture(scope="session")
def source(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the sdist, and return its directory."""
    opened = tmp_path_factory.mktemp("opened")
    with tarfile.open(sdist) as archive:
        archive.extractall(opened, filter="data")
    with in_turns():
        make_alike(TARGET / "source", next(opened.iterdir()))
    return TARGET / "source"


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel once, in whichever test process needs it first."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    place = tmp_path_factory.getbasetemp().parent / "wheel" if shared else tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", place]
    with in_turns():
        if not any(place.glob("*.whl")):
            subprocess.run([*build, source], check=True, env=build_environment())
    (built,) = place.glob("*.whl")
    return built
