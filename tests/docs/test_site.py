"""The site builds without warnings and without a network, and its reference has every public name."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
from blocks import ROOT

import penstock
import penstock.errors
import penstock.testing

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.timeout(300)  # needs ten seconds of CPU, which is scarce on a busy machine
def test_it_builds_without_a_warning(project, tmp_path):
    # Nothing listens at this proxy, so any attempt to load something fails.
    offline = dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9")
    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", ROOT / "docs"]
    run = project.run(*build, tmp_path / "site", timeout=280, **offline)
    assert run.returncode == 0, run.output
    # The first page links to every other page, and no page loads anything from elsewhere.
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in ROOT.glob("docs/**/*.md")}
    index = (tmp_path / "site" / "README.html").read_text()
    assert pages - {"README.html"} <= set(re.findall(r'href="([\w/-]+\.html)"', index))
    loaded = r'<(?:script|img|iframe)[^>]* src="(\w+:)?//|<link rel="stylesheet"[^>]* href="(\w+:)?//'
    for page in pages:
        assert not re.search(loaded, (tmp_path / "site" / page).read_text()), page


def documented(page: str) -> list[str]:
    return re.findall(r"^\.\. auto\w+:: penstock\.(?:errors\.|testing\.)?(\w+)", (REFERENCE / page).read_text(), re.M)


@pytest.mark.parametrize(
    ("page", "module", "elsewhere"),
    [
        ("penstock.rst", penstock, penstock.errors.__all__),
        ("errors.rst", penstock.errors, []),
        ("testing.rst", penstock.testing, []),
    ],
)
def test_the_reference_has_every_public_name_once(page: str, module: ModuleType, elsewhere: list[str]):
    names = documented(page)
    assert sorted(names) == sorted(set(module.__all__) - set(elsewhere))
