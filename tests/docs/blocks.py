"""Finds the runnable code blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass
class Block:
    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The path in a Python block's first line, such as `# shop.py`; None for a part of the page's script."""
        name = re.match(r"# ([\w/]+\.py)\n", self.text)
        return name[1] if name else None


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text()
    return [
        Block(language, match[1], text.count("\n", 0, match.start(1)) + 1)
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


@dataclass
class Chapter:
    """Some files and the page's script that uses them; the script keeps its line numbers on the page."""

    files: dict[str, str]
    script: str = ""


def chapters(page: Path) -> list[Chapter]:
    """Split a page into chapters. A file after a script begins one: another app, another broker."""
    found: list[Chapter] = []
    for block in blocks(page, "python"):
        if not found or (block.file and found[-1].script):
            found.append(Chapter({}))
        if block.file:
            found[-1].files[block.file] = block.text
        else:
            missing = block.line - 1 - found[-1].script.count("\n")
            found[-1].script += "\n" * missing + block.text
    return [chapter for chapter in found if chapter.script]
