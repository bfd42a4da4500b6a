"""Chart of the number of unfinished polls, for each overlap policy."""

from __future__ import annotations

from dataclasses import dataclass

from examples.shared.svg import Drawing, Scale

WIDTH = 900
HEIGHT = 320
MARGIN = 40
COLOURS = ("#1a7f37", "#0969da", "#cf222e")


@dataclass(frozen=True)
class Curve:
    name: str
    samples: list[tuple[float, int]]


def draw(curves: list[Curve], seconds: float, slow: tuple[float, float]) -> str:
    most = max(count for curve in curves for _, count in curve.samples)
    drawing = Drawing(WIDTH, HEIGHT)
    across = Scale(0, seconds, MARGIN, WIDTH - MARGIN)
    up = Scale(0, max(most, 4), HEIGHT - MARGIN, MARGIN)
    drawing.path(
        f"M{across(slow[0]):.1f} {MARGIN}H{across(min(slow[1], seconds)):.1f}V{HEIGHT - MARGIN}H{across(slow[0]):.1f}z",
        fill="#f3f3f3",
    )
    drawing.text(across(slow[0]) + 6, MARGIN + 14, "the service is slow")
    for second in across.ticks():
        drawing.text(across(second), HEIGHT - MARGIN + 18, f"{second:g} s", size=11, anchor="middle")
    for count in up.ticks():
        drawing.line(MARGIN, up(count), WIDTH - MARGIN, up(count))
        drawing.text(MARGIN - 6, up(count) + 4, f"{count:g}", size=11, anchor="end")
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=True)):
        points = [f"{across(at):.1f} {up(count):.1f}" for at, count in curve.samples]
        drawing.path("M" + "L".join(points), colour=colour, width=2)
        drawing.text(MARGIN + 110 * number, 20, f"overlap={curve.name}", colour=colour, size=13)
    return drawing.svg()
