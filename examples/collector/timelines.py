"""Chart of what each slot waited for, over the same seconds for each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from examples.shared.svg import INK, Drawing, Scale

WIDTH = 900
MARGIN = 20
ROW = 2.5
TITLE = 26
AXIS = 30


class Bar(NamedTuple):
    """Request of a way, in seconds from the way's start."""

    page: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    name: str
    seconds: float
    scale: float
    bars: list[Bar]


def rows_of(bars: list[Bar]) -> list[list[Bar]]:
    """Put each request into a free row, preferably after a request of the same page.

    There are as many rows as the largest number of requests that waited at once.
    """
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.begin):
        free = [row for row in rows if row[-1].end <= bar.begin]
        row = next((row for row in free if row[-1].page == bar.page), None)
        if row is None:
            row = next(iter(free), None)
        if row is None:
            rows.append(row := [])
        row.append(bar)
    return rows


def joined(row: list[Bar], gap_s: float) -> list[Bar]:
    """Join requests of one page where the gap between them is too small to see."""
    found: list[Bar] = []
    for bar in row:
        if found and found[-1].page == bar.page and bar.begin - found[-1].end < gap_s:
            found[-1] = found[-1]._replace(end=bar.end)
        else:
            found.append(bar)
    return found


def colour(page: int) -> str:
    # Steps of the golden angle, so that neighbours have different colours.
    return f"hsl({page * 137.5 % 360:.0f},60%,{45 + page % 3 * 10}%)"


def draw(timelines: list[Timeline], slots: int) -> str:
    # The scaled way takes far longer than all others, and runs off the edge.
    shown_s = 1.03 * max(one.seconds for one in timelines if one.scale == 1)
    panels = [(one, rows_of(one.bars)) for one in timelines]
    height = AXIS + sum(TITLE + max(3, len(rows)) * ROW + 14 for _, rows in panels)
    drawing = Drawing(WIDTH, height)
    across = Scale(0, shown_s, MARGIN, WIDTH - MARGIN)
    for second in across.ticks():
        drawing.line(across(second), 8, across(second), height - AXIS + 4)
        drawing.text(across(second), height - AXIS + 18, f"{second:g} s", size=11, anchor="middle")
    top = 0.0
    for one, rows in panels:
        top += TITLE
        about = f"{one.seconds:.1f} s" if one.scale == 1 else f"{one.seconds:.0f} s, scaled; it goes on to the right"
        used = f"{len(rows)} of {slots} slots" if len(rows) > 1 else "one request at a time"
        drawing.text(MARGIN, top - 6, f"{one.name}: {about} ({used})", size=13)
        courses: dict[int, str] = {}
        row_height = max(ROW, 3 * ROW / len(rows))
        for number, row in enumerate(rows):
            y = top + (number + 0.5) * row_height
            for bar in joined(row, gap_s=0.3 * shown_s / WIDTH):
                if bar.begin < shown_s:
                    end = across(min(bar.end, shown_s))
                    courses[bar.page] = courses.get(bar.page, "") + f"M{across(bar.begin):.1f} {y:.1f}H{end:.1f}"
        for page, course in courses.items():
            drawing.path(course, colour=colour(page), width=row_height * 0.85)
        top += len(rows) * row_height
        if one.scale == 1:
            drawing.line(across(one.seconds), top - len(rows) * row_height, across(one.seconds), top, colour=INK)
        top += 14
    return drawing.svg()
