"""What of a Markdown page can run."""

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
        """A Python block that opens with `# shop.py` is that file; any other is a part of the page's script."""
        name = re.match(r"# ([\w/]+\.py)\n", self.text)
        return name[1] if name else None


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text()
    return [
        Block(language, match[1], text.count("\n", 0, match.start(1)) + 1)
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def script(page: Path) -> str:
    """The page's own Python, in order, at the lines it has on the page."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        if block.file is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines)
