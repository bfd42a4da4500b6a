"""The README as PyPI shows it: there, a link relative to the repository leads nowhere.

With `Repository` among the `[project.urls]` of pyproject.toml, such links become absolute, at the tag of the version.
Without one, their text stays and the link goes.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[(?P<text>(?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\((?P<target>[^)\s]+)\)")
IMAGE_TAG = re.compile(r"""<img\b[^>]*?\bsrc="(?P<target>[^"]+)"[^>]*>""")
ELSEWHERE = re.compile(r"\w+:|//")


def as_on_pypi(readme: str) -> str:
    """Return the README without relative links; a README that has none stays as it is."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        repository = tomllib.load(file)["project"].get("urls", {}).get("Repository")
    return with_absolute_links(readme, repository, _version())


def with_absolute_links(readme: str, repository: str | None, version: str) -> str:
    """Make links and images absolute, at the repository's tag of this version; without a repository, remove them."""
    parts = FENCED.split(readme)  # each second one is code, and stays
    return "".join(part if at % 2 else _rewritten(part, repository, version) for at, part in enumerate(parts))


def _rewritten(text: str, repository: str | None, version: str) -> str:
    def absolute(found: re.Match[str], kind: str) -> str:
        target, whole = found["target"], found[0]
        if ELSEWHERE.match(target) or (target.startswith("#") and kind == "blob"):
            return whole
        if repository is None:
            return "" if kind == "raw" else found["text"]
        start, end = (place - found.start() for place in found.span("target"))
        return f"{whole[:start]}{repository}/{kind}/v{version}/{target.removeprefix('./')}{whole[end:]}"

    text = IMAGE_TAG.sub(lambda found: absolute(found, "raw"), text)
    text = IMAGE.sub(lambda found: absolute(found, "raw"), text)
    return LINK.sub(lambda found: absolute(found, "blob"), text)


def _version() -> str:
    with (ROOT / "Cargo.toml").open("rb") as file:
        return str(tomllib.load(file)["workspace"]["package"]["version"])
