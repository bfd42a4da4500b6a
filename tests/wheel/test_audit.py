"""A wheel's tag is correct for both of its binaries, and the links of its README work on PyPI."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import package_readme
import pytest
import wheels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`make wheels` builds for Linux")

OLD = "int answer(void) { return 42; }"
# getrandom() came with glibc 2.25.
NEWER = "#include <sys/random.h>\nint main(void) { return getrandom(0, 0, 0); }"


def compiled(directory: Path, name: str, code: str, *options: str) -> Path:
    source = directory / f"{name}.c"
    source.write_text(code)
    subprocess.run(["cc", *options, source, "-o", directory / name], check=True)
    return directory / name


def made_wheel(directory: Path, program: str) -> Path:
    """Make a wheel whose library fits an old system, and whose tag says so."""
    root = directory / "penstock-0.1.0"
    about = root / "penstock-0.1.0.dist-info"
    (root / "penstock" / "_bin").mkdir(parents=True)
    about.mkdir()
    compiled(directory, "library", OLD, "-shared", "-fPIC", "-nostartfiles").rename(root / wheels.BINARIES[0])
    compiled(directory, "program", program).rename(root / wheels.BINARIES[1])
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: penstock\nVersion: 0.1.0\n")
    (about / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-abi3-manylinux_2_5_{machine()}\n"
    )
    (about / "RECORD").touch()
    pack = [sys.executable, "-m", "wheel", "pack", "--dest-dir", directory, root]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    return wheel


def machine() -> str:
    return platform.machine()


def test_a_newer_program_beside_an_old_library_makes_a_newer_tag(tmp_path: Path) -> None:
    tagged = wheels.tagged_by_audit(made_wheel(tmp_path, NEWER), machine())
    assert list(tmp_path.glob("*.whl")) == [tagged]
    kind, major, minor = tagged.stem.split("-")[-1].removesuffix(f"_{machine()}").split("_")
    assert kind == "manylinux" and (int(major), int(minor)) >= (2, 25), tagged.name


def test_a_program_for_another_machine_makes_no_wheel(tmp_path: Path) -> None:
    other = "aarch64" if machine() == "x86_64" else "x86_64"
    with pytest.raises(wheels.NotBuilt, match=f"penstock/_core.abi3.so is not for {other}"):
        wheels.tagged_by_audit(made_wheel(tmp_path, NEWER), other)
    assert list(tmp_path.glob("*.whl")) == []


def test_a_program_that_needs_a_library_of_this_machine_makes_no_wheel(tmp_path: Path) -> None:
    wheel = made_wheel(tmp_path, NEWER)
    strange = compiled(tmp_path, "libstrange.so", OLD, "-shared", "-fPIC", "-Wl,-soname,libstrange.so.1")
    binary = tmp_path / "penstock-0.1.0" / wheels.BINARIES[1]
    (tmp_path / "program.c").write_text("int answer(void); int main(void) { return answer(); }")
    subprocess.run(["cc", tmp_path / "program.c", strange, "-o", binary], check=True)
    pack = [sys.executable, "-m", "wheel", "pack", "--dest-dir", tmp_path, tmp_path / "penstock-0.1.0"]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(wheels.NotBuilt, match="it runs only on machines like this one"):
        wheels.tagged_by_audit(wheel, machine())
    assert list(tmp_path.glob("*.whl")) == []


def test_a_target_that_is_not_installed_is_named_with_its_remedy() -> None:
    reason = wheels.missing_for("riscv64gc-unknown-linux-gnu")
    assert reason == "its Rust target is not installed (rustup target add riscv64gc-unknown-linux-gnu)"


README = """\
[Tasks](docs/tasks.md#progress), [CHANGELOG.md](CHANGELOG.md), [Rust](https://rustup.rs), [below](#below)
![a tree](docs/tree.svg) <img alt="it" src="./docs/it.png" width=10> [![a badge](badge.svg)](docs/README.md)

```python
links = [call](docs/tasks.md)
```
"""
CODE = README[README.index("```") :]


def test_links_of_the_readme_become_absolute() -> None:
    at = "https://example.org/penstock"
    assert package_readme.with_absolute_links(README, at, "1.2.3") == (
        f"[Tasks]({at}/blob/v1.2.3/docs/tasks.md#progress), [CHANGELOG.md]({at}/blob/v1.2.3/CHANGELOG.md), "
        "[Rust](https://rustup.rs), [below](#below)\n"
        f'![a tree]({at}/raw/v1.2.3/docs/tree.svg) <img alt="it" src="{at}/raw/v1.2.3/docs/it.png" width=10> '
        f"[![a badge]({at}/raw/v1.2.3/badge.svg)]({at}/blob/v1.2.3/docs/README.md)\n\n{CODE}"
    )


def test_without_a_repository_no_link_leads_nowhere() -> None:
    assert package_readme.with_absolute_links(README, None, "1.2.3") == (
        f"Tasks, CHANGELOG.md, [Rust](https://rustup.rs), [below](#below)\n  \n\n{CODE}"
    )
