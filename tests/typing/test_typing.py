"""The types that users see: wrong calls are refused at the exact line, right ones are accepted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from mypy import api, stubtest

EXAMPLES = [Path(__file__).with_name(name) for name in ("accepted_and_refused.py", "workflows_accepted_and_refused.py")]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def marked(examples, pattern):
    """The codes of the errors that are expected, by line."""
    lines = enumerate(examples.read_text().splitlines(), 1)
    return {number: sorted(mark[1].split()) for number, line in lines if (mark := re.search(pattern, line))}


def pyright(*arguments):
    # It asks the first Python on the PATH where packages are.
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(BIN.parent)}
    command = [BIN / "basedpyright", "--outputjson", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment).stdout)


@pytest.mark.parametrize("examples", EXAMPLES, ids=lambda file: file.stem)
def test_mypy_refuses_exactly_what_is_wrong(examples):
    expected = marked(examples, r"# E(?:\(mypy\))?: ([\w -]+)$")
    found = defaultdict(list)
    arguments = ["--strict", "--show-error-codes", "--no-error-summary", "--no-pretty", "--config-file="]
    output, problems, _ = api.run([*arguments, f"--cache-dir={ROOT / '.ran' / 'mypy-samples'}", str(examples)])
    assert problems == ""
    for line in output.splitlines():
        if ": note: " in line:
            continue
        match = re.fullmatch(r"(.+):(\d+): error: (.*)  \[([\w-]+)\]", line)
        assert match, line
        assert Path(match[1]).name == examples.name, line
        found[int(match[2])].append(match[4])
    assert {number: sorted(codes) for number, codes in found.items()} == expected


@pytest.mark.parametrize("examples", EXAMPLES, ids=lambda file: file.stem)
def test_pyright_refuses_exactly_what_is_wrong(examples, tmp_path):
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "include": [str(examples)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    told = pyright("--project", tmp_path)
    assert told["summary"]["filesAnalyzed"] == 1
    errors = [(each["range"]["start"]["line"] + 1, each["message"]) for each in told["generalDiagnostics"]]
    assert {line for line, _ in errors} == marked(examples, r"# E: ([\w -]+)$").keys(), errors


def test_everything_public_has_a_type_that_all_checkers_agree_on():
    told = pyright("--verifytypes", "penstock", "--ignoreexternal")["typeCompleteness"]
    unknown = [each["name"] for each in told["symbols"] if each["isExported"] and not each["isTypeKnown"]]
    assert told["exportedSymbolCounts"]["withKnownType"] > 50
    assert (told["completenessScore"], unknown) == (1, [])


def test_the_stub_of_the_core_is_what_was_compiled(capsys, monkeypatch, tmp_path):
    # It leaves a cache where it is run.
    monkeypatch.chdir(tmp_path)
    options = stubtest.parse_options(["penstock._core", "--concise"])
    assert stubtest.test_stubs(options) == 0, capsys.readouterr().out


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "python" / "penstock" / "py.typed").is_file()
