"""Run the Python tests on each supported Python of this machine, or on those that are named: ``make test-pythons``

    tools/test_pythons.py [--pythons 3.12,3.13] [pytest's arguments]

The extension module is one file for all of them (abi3), so nothing is compiled again: each Python has an environment in
.cache/pythons, with the pinned packages and this checkout's build.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".cache" / "pythons"
PINNED = ROOT / "requirements" / "dev.txt"
VERSIONS = ["3.11", "3.12", "3.13", "3.14"]


def interpreter(version: str) -> Path | None:
    """Find a Python of this version. pyenv leaves names on PATH that run nothing, so each is tried."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for name in (shutil.which(f"python{version}"), *pyenv):
        if name and subprocess.run([name, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return Path(name)
    return None


def environment(version: str, base: Path) -> Path:
    """Return the Python of the version's environment, with the pinned packages and the checkout's penstock."""
    place = PLACE / version
    python, stamp = place / "bin" / "python", place / "installed"
    wanted = hashlib.sha256(PINNED.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing packages for Python {version}", flush=True)
        subprocess.run([base, "-m", "venv", "--clear", place], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", PINNED], check=True)
        stamp.write_text(wanted)
    link(place, python)
    return python


def link(place: Path, python: Path) -> None:
    """Install what the editable build of .venv has installed: a path, the metadata and a command."""
    ours = Path(sysconfig.get_path("purelib"))
    (theirs,) = place.glob("lib/python*/site-packages")
    for name in (path.name for path in ours.glob("penstock*") if path.suffix in (".pth", ".dist-info")):
        if (ours / name).is_dir():
            shutil.rmtree(theirs / name, ignore_errors=True)
            shutil.copytree(ours / name, theirs / name)
        else:
            shutil.copy(ours / name, theirs / name)
    command = (Path(sys.executable).parent / "penstock").read_text().splitlines(keepends=True)
    script = place / "bin" / "penstock"
    script.write_text("".join([f"#!{python}\n", *command[1:]]))
    script.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-pythons", description="Run the tests on each Python found here.")
    parser.add_argument("--pythons", default=",".join(VERSIONS), help="(%(default)s)")
    options, arguments = parser.parse_known_args()
    results = {}
    for version in options.pythons.split(","):
        base = interpreter(version)
        if base is None:
            results[version] = "not found here"
            continue
        python = environment(version, base)
        print(f"Python {version}", flush=True)
        run = subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT)
        results[version] = "passed" if run.returncode == 0 else f"failed, exit code {run.returncode}"
    print("\n".join(f"Python {version}: {result}" for version, result in results.items()))
    return 0 if "passed" in results.values() and not any("failed" in one for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
