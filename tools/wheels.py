"""Build the packages of a release into dist/: an sdist, and a wheel for each Linux target. ``make wheels``

A wheel has two binaries, the extension module and the `penstock` program. Its tag is a promise about both. zig links
both against an old glibc. Then auditwheel reads the symbol versions of both, and its answer becomes
the tag. A wheel that fits no tag is an error, and is not kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".cache" / "release"
PINNED = ROOT / "requirements" / "release.txt"
DIST = ROOT / "dist"
# Debian 10, Ubuntu 18.10, RHEL 8 and Amazon Linux 2023 have at least this glibc.
GLIBC = "2.28"
TARGETS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]
BINARIES = ["penstock/_core.abi3.so", "penstock/_bin/penstock"]
MACHINES = {"x86_64": 62, "aarch64": 183}  # `e_machine` in the header of an ELF file


class NotBuilt(Exception):
    """The target's wheel can't be built here, or must not be kept."""


def tools() -> Path:
    """Return the folder of the pinned tools, in an environment apart from the one for tests."""
    stamp = TOOLS / "installed"
    wanted = f"{sys.version_info[:2]} {hashlib.sha256(PINNED.read_bytes()).hexdigest()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        print("installing zig, auditwheel and twine into .cache/release", flush=True)
        shutil.rmtree(TOOLS, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", TOOLS], check=True)
        pip = [TOOLS / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--requirement", PINNED], check=True)
        stamp.write_text(wanted)
    return TOOLS / "bin"


def missing_for(target: str) -> str | None:
    """Return the reason why this machine can't build for the target."""
    if not target.endswith("-linux-gnu"):
        return "this builds for glibc only"
    found = subprocess.run(["rustc", "--print", "target-libdir", "--target", target], capture_output=True, text=True)
    if found.returncode != 0 or not any(Path(found.stdout.strip()).glob("libstd-*")):
        return f"its Rust target is not installed (rustup target add {target})"
    return None


def build(target: str, directory: Path) -> Path:
    """Build both binaries for the target, and return its audited wheel."""
    import build_backend as backend

    compatibility = f"manylinux_{GLIBC.replace('.', '_')}"
    program = backend.built_program(("cargo-zigbuild", "build"), f"{target}.{GLIBC}")
    options = ["--release", "--locked", "--zig", "--target", target, "--compatibility", compatibility]
    with tempfile.TemporaryDirectory() as made, backend.announced(program):
        subprocess.run(["maturin", "build", *options, "--out", made], cwd=ROOT, check=True)
        (wheel,) = Path(made).glob("*.whl")
        return tagged_by_audit(backend.complete_wheel(wheel, program, directory), target.partition("-")[0])


def tagged_by_audit(wheel: Path, machine: str) -> Path:
    """Give a wheel the tag that both of its binaries fit, whatever tag it had; delete it if there is none."""
    try:
        check_machines(wheel, machine)
        tag = audited_tag(wheel)
    except NotBuilt:
        wheel.unlink()
        raise
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return wheel.with_name(name)


def check_machines(wheel: Path, machine: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in BINARIES:
            header = archive.read(name)[:20]
            if header[:4] != b"\x7fELF" or int.from_bytes(header[18:20], "little") != MACHINES[machine]:
                raise NotBuilt(f"{name} is not for {machine}")


def audited_tag(wheel: Path) -> str:
    """Return the most compatible platform tag that auditwheel allows."""
    command = [sys.executable, "-m", "auditwheel", "show", wheel]
    run = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r'platform\s+tag:\s+"(\w+)"', run.stdout)
    if run.returncode != 0 or found is None:
        raise NotBuilt(f"auditwheel failed: {(run.stderr or run.stdout).strip()}")
    if not found[1].startswith("manylinux_"):
        raise NotBuilt(f"it runs only on machines like this one: {' '.join(run.stdout.split())}")
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make wheels", description="Build the packages of a release into dist/.")
    parser.add_argument("targets", nargs="*", default=TARGETS, help=f"({' '.join(TARGETS)})")
    targets = parser.parse_args().targets
    if not sys.platform.startswith("linux"):
        raise SystemExit("this builds for Linux; on macOS, `pip wheel .` makes a wheel for the machine's own version")
    binaries = tools()
    if not Path(sys.prefix).samefile(TOOLS):
        os.execv(binaries / "python", [str(binaries / "python"), __file__, *targets])
    os.environ["PATH"] = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    # Names the interpreter for tests. A package for many Pythons is built without any.
    os.environ.pop("PYO3_PYTHON", None)

    import build_backend as backend

    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    lines = []
    for target in targets:
        reason = missing_for(target)
        if reason is None:
            try:
                lines.append(f"dist/{build(target, DIST).name}")
                continue
            except NotBuilt as failure:
                reason = str(failure)
            except subprocess.CalledProcessError as failure:
                reason = f"{failure.cmd[0]} failed"
        lines.append(f"no wheel for {target}: {reason}")
    os.chdir(ROOT)
    lines.append(f"dist/{backend.build_sdist(str(DIST))}")
    subprocess.run(["twine", "check", "--strict", *DIST.iterdir()], check=True)
    lines.append("no wheel for musl: the worker does not compile for it; none for macOS: run `pip wheel .` there")
    print("\n".join(["", *lines]))
    return 0 if any(DIST.glob("*.whl")) else 1


if __name__ == "__main__":
    sys.exit(main())
