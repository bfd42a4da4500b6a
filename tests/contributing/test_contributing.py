"""Commands, files and numbers in the pages for contributors are true."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from blocks import ROOT

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
FILES = subprocess.check_output(["git", "ls-files", "*.md", ".github", ".ci", "*.rs", "*.py"], cwd=ROOT, text=True)
PAGES = [ROOT / name for name in FILES.split() if name.endswith((".md", ".yml")) and (ROOT / name).exists()]
MAKEFILE = (ROOT / "Makefile").read_text()
VERBS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
CARGO = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]


def verbs_of(page: Path) -> set[str]:
    """The verbs of `make` in code: inline, in a block of commands, or indented."""
    text = page.read_text()
    code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?:\$ |    )(.*)", text, re.MULTILINE)
    found: set[str] = set()
    for line in code:
        plain = re.sub(r"\b[A-Z_]+=(\"[^\"]*\"|\S*)", "=", line)
        # Two spaces and more begin a remark.
        for words in re.findall(r"(?:^|= |&& )make((?: (?:=|[a-z][\w-]*))+)", plain):
            found |= set(words.split()) - {"="}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_verb_of_make_in_a_page_exists(page: Path) -> None:
    assert verbs_of(page) <= VERBS


def test_verbs_are_found_in_pages() -> None:
    named = {"demo", "quick", "test", "crash", "simulate", "wire", "python-test", "test-pythons"}
    assert named <= verbs_of(CONTRIBUTING)
    assert "simulate" in verbs_of(ROOT / "docs/internals/simulation.md")


def test_every_verb_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
    assert VERBS - set(phony.split()) == set()


@pytest.mark.parametrize("page", [CONTRIBUTING, ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_the_files_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    links = [target.partition("#")[0] for target in re.findall(r"\]\((?!\w+:)([^)\s]+)", text)]
    code = [word for word in re.findall(r"`([\w./-]+)`", text) if "/" in word and not word.startswith("/")]
    found = {*links, *code}
    assert found
    # One of them is in a crate that the row names, and one stands for any number.
    places = [ROOT, ROOT / "crates/penstock-broker"]
    assert {name for name in found if not any((place / name).exists() for place in places)} <= {"format-N/"}


def test_the_cargo_commands_exist() -> None:
    commands = re.findall(r"cargo (?:run|test) [^`\n#]+", CONTRIBUTING.read_text())
    assert len(commands) >= 4
    for command in commands:
        (package,) = re.findall(r"-p (\S+)", command)
        crate = ROOT / "crates" / package
        assert crate.is_dir(), command
        for example in re.findall(r"--example (\S+)", command):
            assert (crate / "examples" / f"{example}.rs").exists(), command
        for test in re.findall(r"--test (\S+)", command):
            assert (crate / "tests" / test).exists() or (crate / "tests" / f"{test}.rs").exists(), command


def test_the_python_tests_exist() -> None:
    for arguments in re.findall(r"\.venv/bin/python -m pytest (.*)", CONTRIBUTING.read_text()):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments.split()]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout


def test_the_oldest_rust_is_the_same_everywhere() -> None:
    oldest = CARGO["package"]["rust-version"]
    for name in ("CONTRIBUTING.md", "tools/make-venv", "rust-toolchain.toml"):
        assert re.search(rf"\b{re.escape(oldest)}\b[^.]*(?:or newer|rust-version)", (ROOT / name).read_text()), name


def test_the_toolchain_is_the_installed_one() -> None:
    """A version or a date here would be downloaded by each contributor, and fail without a network."""
    toolchain = tomllib.loads((ROOT / "rust-toolchain.toml").read_text())["toolchain"]
    assert toolchain["channel"] == "stable"


def test_no_crate_can_be_published_and_each_says_what_it_is() -> None:
    manifests = [file for member in CARGO["members"] for file in ROOT.glob(f"{member}/Cargo.toml")]
    assert len(manifests) > 15
    for file in manifests:
        package = tomllib.loads(file.read_text())["package"]
        assert package["publish"] == {"workspace": True}, file
        assert package["description"], file
    assert CARGO["package"]["publish"] is False


def test_the_dev_container_has_what_ci_installs() -> None:
    wanted = set(re.findall(r"packages\+=\(([\w-]+)\)", (ROOT / ".ci/run").read_text()))
    assert len(wanted) >= 5
    assert wanted <= set(re.findall(r"[\w-]+", (ROOT / ".devcontainer/Dockerfile").read_text()))


def test_forms_and_hooks_are_well_formed() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        assert file.name == "config.yml" or {"name", "description", "body"} <= form.keys()
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]:
        program, *arguments = hook["entry"].split()
        assert program in {"cargo", "make"} or (ROOT / program).exists(), hook["id"]
        for verb in arguments if program == "make" else []:
            assert verb.startswith("-") or verb in VERBS
        re.compile(hook.get("files", ""))


@pytest.mark.parametrize(
    ("title", "is_good"),
    [
        ("broker: bound the work of a purge", True),
        ("docs, tests: name the seeds", True),
        ("Merge branch 'main'", True),
        ("fixup! broker: bound the work of a purge", True),
        ("What an earlier run saw is told as that", False),
        ("broker: bound the work of a purge.", False),
        ("broker bound the work", False),
        (f"area: {'a' * 66}", True),
        (f"area: {'a' * 67}", False),
    ],
)
def test_titles_of_commits(tmp_path: Path, title: str, is_good: bool) -> None:
    message = tmp_path / "message"
    body = "Body: with more than seventy-two characters in a line, as bodies of commits may well have them."
    message.write_text(f"# a comment\n\n{title}\n\n{body}\n")
    run = subprocess.run([ROOT / "tools/check-title", message], capture_output=True, text=True)
    assert (run.returncode == 0) == is_good
    assert is_good or title in run.stderr
