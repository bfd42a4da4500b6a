"""Draws pictures of terminals from the output of commands.

.venv/bin/python tests/docs/terminal.py     runs the README's quickstart and writes docs/pictures/quickstart.svg
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, unescape

sys.path.insert(0, str(Path(__file__).parents[1]))

from blocks import ROOT, blocks
from project import Project, eventually

PICTURE = ROOT / "docs" / "pictures" / "quickstart.svg"
COLUMNS = 100
CHARACTER, LINE, MARGIN, TITLE = 7.8, 18, 14, 28


@dataclass
class Terminal:
    """A terminal window: a title and lines. Lines that begin with ``$`` were typed by a person."""

    title: str
    text: str

    def lines(self) -> list[str]:
        """Break long lines where a terminal does."""
        return [
            line[start : start + COLUMNS]
            for line in self.text.splitlines()
            for start in range(0, max(len(line), 1), COLUMNS)
        ]


def draw(terminals: list[Terminal]) -> str:
    width = round(COLUMNS * CHARACTER + 2 * MARGIN)
    body = []
    top = 0
    for terminal in terminals:
        lines = terminal.lines()
        height = TITLE + len(lines) * LINE + MARGIN
        body.append(f'<rect y="{top}" width="{width}" height="{height}" rx="8" fill="#1b1f27"/>')
        body += [f'<circle cx="{MARGIN + 6 + 18 * dot}" cy="{top + 15}" r="5" fill="#4a5160"/>' for dot in range(3)]
        body.append(f'<text class="title" x="{width / 2:g}" y="{top + 19}">{escape(terminal.title)}</text>')
        for number, line in enumerate(lines, start=1):
            kind = "typed" if line.startswith("$ ") else "shown"
            body.append(
                f'<text class="{kind}" x="{MARGIN}" y="{top + TITLE + number * LINE - 5}">{escape(line)}</text>'
            )
        top += height + MARGIN
    style = (
        "text { font: 13px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #d5dae3 }"
        " .typed { fill: #8fd18a } .title { text-anchor: middle; fill: #8a92a3 }"
    )
    size = f'width="{width}" height="{top - MARGIN}" viewBox="0 0 {width} {top - MARGIN}"'
    return "\n".join(
        [
            "<!-- written by tests/docs/terminal.py from real output -->",
            f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>',
            f"<style>{style}</style>",
            *body,
            "</svg>\n",
        ]
    )


def shown(picture: str) -> str:
    """Return the text of a picture without its line breaks."""
    return unescape("".join(re.findall(r'<text class="(?:typed|shown)"[^>]*>(.*?)</text>', picture)))


# Text that varies between runs, machines and versions.
CHANGING = [
    (r"[\d-]{10}T[\d:.]+Z", "TIME"),
    (r"worker@[\w.-]+:\d+", "WORKER"),
    (r"pid \d+, up [\d.]+ \w+, penstock [\w.-]+", "PROCESS"),
    (r"engine   penstock [\w.-]+", "ENGINE"),
    (r"journal  .*? \(p99 [\d.]+ .s\)", "JOURNAL"),
    (r"memory   [\d.]+ \w+ of [\d.]+ \w+?iB", "MEMORY"),
    (r"results  4 \(\d+ B\)", "RESULTS"),
    (r"\d+\.\d+", "RATE"),
    (r" +", " "),
]


def masked(picture: str) -> str:
    text = shown(picture)
    for pattern, name in CHANGING:
        text = re.sub(pattern, name, text)
    return text


def quickstart(project: Project) -> str:
    """Run the README's two commands and ``penstock status``, and draw their output."""
    file = next(block for block in blocks(ROOT / "README.md", "python") if block.file)
    assert file.file is not None
    project.write(file.file, file.text)
    # The default is one slot per processor, but pictures must not depend on the machine.
    worker = project.worker("shop:app", "-c", "2")
    worker.wait_for_output("queues: default")
    script = project.run("python", file.file)
    assert script.returncode == 0, script.output
    eventually(lambda: all(each["leases"] == 0 for each in project.status()["workers"]))
    status = project.penstock("status")

    def screen(*commands: tuple[str, str]) -> str:
        text = "\n".join(f"$ {typed}\n{printed}" for typed, printed in commands)
        return text.replace(str(project.directory), "~/shop")

    return draw(
        [
            Terminal("worker", screen(("penstock worker shop:app -c 2", worker.output))),
            Terminal("shop", screen(("python shop.py", script.output), ("penstock status", status.output))),
        ]
    )


if __name__ == "__main__":
    import os

    with Project.fresh() as project:
        os.environ["PENSTOCK_URL"] = project.url
        PICTURE.write_text(quickstart(project))
    print(PICTURE.relative_to(ROOT))
