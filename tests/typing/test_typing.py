"""The types that users see: wrong calls are refused at the exact line, right ones are accepted."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from mypy import api, stubtest

EXAMPLES = Path(__file__).with_name("accepted_and_refused.py")
ROOT = Path(__file__).parents[2]


def test_mypy_refuses_exactly_what_is_wrong():
    expected = {}
    for number, line in enumerate(EXAMPLES.read_text().splitlines(), 1):
        if mark := re.search(r"# E: ([\w -]+)$", line):
            expected[number] = sorted(mark[1].split())
    found = defaultdict(list)
    arguments = ["--strict", "--show-error-codes", "--no-error-summary", "--no-pretty", "--config-file="]
    output, problems, _ = api.run([*arguments, f"--cache-dir={ROOT / '.mypy_cache'}", str(EXAMPLES)])
    assert problems == ""
    for line in output.splitlines():
        if ": note: " in line:
            continue
        match = re.fullmatch(r"(.+):(\d+): error: (.*)  \[([\w-]+)\]", line)
        assert match, line
        assert Path(match[1]).name == EXAMPLES.name, line
        found[int(match[2])].append(match[4])
    assert {number: sorted(codes) for number, codes in found.items()} == expected


def test_the_stub_of_the_core_is_what_was_compiled(capsys):
    options = stubtest.parse_options(["penstock._core", "--concise"])
    assert stubtest.test_stubs(options) == 0, capsys.readouterr().out


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "python" / "penstock" / "py.typed").is_file()
