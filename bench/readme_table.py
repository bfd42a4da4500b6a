"""Put the tables of bench/results/latest.json between the markers of the documents that show them.

    python bench/readme_table.py            write them
    python bench/readme_table.py --check    fail if a document shows anything else

A document marks the place: ``<!-- bench: summary -->`` or ``<!-- bench: full -->``, then ``<!-- bench: end -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import results
import table

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "docs/benchmarks.md"]
TABLES = {"summary": table.summary, "full": table.full}
MARKED = re.compile(r"(<!-- bench: (?P<table>\w+) -->\n).*?(<!-- bench: end -->)", re.DOTALL)


def rendered(document: str, figures: dict[str, Any] | None) -> str:
    """Return the document with every marked part rendered again."""

    def part(found: re.Match[str]) -> str:
        shown = "No run is kept yet; `make bench` makes one." if figures is None else TABLES[found["table"]](figures)
        return f"{found[1]}{shown}\n{found[3]}"

    return MARKED.sub(part, document)


def main() -> int:
    parser = argparse.ArgumentParser(description="Render the benchmark's tables into the documents.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a document is out of date")
    check = parser.parse_args().check
    figures = json.loads(results.LATEST.read_text()) if results.LATEST.exists() else None
    stale = []
    for path in (ROOT / name for name in DOCUMENTS):
        if path.exists():
            document = path.read_text()
            if (fresh := rendered(document, figures)) != document:
                stale.append(path.relative_to(ROOT))
                if not check:
                    path.write_text(fresh)
    for path in stale:
        print(
            f"{path}: {'is not what bench/results/latest.json says: run bench/readme_table.py' if check else 'written'}"
        )
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
