"""The site of these pages: `make docs` builds it, without a network, into .ran/site."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Penstock"
author = "the Penstock maintainers"
version = release = penstock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
# Links to a heading, as forges make them.
myst_heading_anchors = 4
# Docstrings quote code with two backticks, and a lone pair means the same.
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"Penstock {version}"
html_copy_source = False
html_show_copyright = False


def stay_inside(app: Sphinx, page: str, source: list[str]) -> None:
    """Show links that lead out of docs/ as text: the site has these pages alone."""
    up = page.count("/") + 1
    source[0] = re.sub(rf"\[([^\]]+)\]\((\.\./){{{up}}}[^)]*\)", r"\1", source[0])


def navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Add what the index lists to the navigation, so that one list serves this site and a forge."""
    if page != root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        caption = section.splitlines()[0]
        pages = dict.fromkeys(re.findall(r"\]\((?!\.\.)([\w/-]+)\.(?:md|rst)\)", section))
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def setup(app: Sphinx) -> None:
    app.connect("source-read", stay_inside)
    app.connect("source-read", navigation)
