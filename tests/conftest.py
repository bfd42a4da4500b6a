"""Fixtures that every folder of tests can use."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import MARK, Project


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A fresh project with a local broker of its own; this process enqueues to it too."""
    # Not pytest's tmp_path: its length would push the socket out of the directory.
    project = Project(Path(tempfile.mkdtemp(prefix="penstock-")))
    monkeypatch.setenv("PENSTOCK_URL", project.url)
    # A broker that this very process starts carries the mark too.
    monkeypatch.setenv(MARK, project.mark)
    try:
        yield project
    finally:
        project.clean_up()
