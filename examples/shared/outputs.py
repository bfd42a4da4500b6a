"""Outputs of an example's figures: a picture, a page with it, or a document that contains the table."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from examples.shared.running import machine, markdown

KINDS = {".svg": "the picture", ".html": "a page that needs no other file", ".md": "the table, between two markers"}
MARKED = re.compile(r"(<!-- example: begin -->\n).*?(<!-- example: end -->)", re.DOTALL)

BUSY = 0.3  # load average per core
BEFORE = machine()  # measured before the example adds load


def add_option(parser: argparse.ArgumentParser) -> None:
    kinds = ", ".join(f"{suffix} {kind}" for suffix, kind in KINDS.items())
    parser.add_argument("--output", type=output, action="append", default=[], metavar="FILE", help=f"write {kinds}")


def output(name: str) -> Path:
    """Parse and check an output path, so that a wrong one is refused before minutes of measuring."""
    path = Path(name)
    if path.suffix not in KINDS:
        raise argparse.ArgumentTypeError(f"{name} ends in none of {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    if path.suffix == ".md" and not (path.exists() and MARKED.search(path.read_text())):
        raise argparse.ArgumentTypeError(f"{name} has no marks `<!-- example: begin -->` and `<!-- example: end -->`")
    return path


def show(paths: Sequence[Path], title: str, header: list[str], rows: list[list[str]], note: str, picture: str) -> None:
    """Print the table and the note, and write each of ``paths`` in the format of its suffix."""
    note += f" {datetime.now(UTC).date()}, {BEFORE['cores']} cores of {BEFORE['cpu']}, Python {BEFORE['python']}."
    if BEFORE["load_before"] > BUSY * BEFORE["cores"]:
        busy = f"The machine had much else to do (load {BEFORE['load_before']:.1f})"
        note += f" {busy}: expect better figures on an idle one."
    table = f"{markdown(header, rows, left=1)}\n\n{note}\n"
    print(table)
    for path in paths:
        if path.suffix == ".svg":
            path.write_text(picture)
        elif path.suffix == ".html":
            path.write_text(html_page(title, [html_table(header, rows), f"<p>{escape(note)}</p>", picture]))
        else:
            path.write_text(MARKED.sub(lambda marks: f"{marks[1]}{table}{marks[2]}", path.read_text()))
        print(f"written: {path}")


def html_page(title: str, parts: Sequence[str]) -> str:
    """Return an HTML page that needs no other file."""
    style = (
        "body{font:15px sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#333;background:#fff}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;"
        "text-align:right}td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>\n'
        f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</html>\n"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in header)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"
