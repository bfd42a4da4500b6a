"""Minimal SVG charts for these examples, without a library to install."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

INK = "#333"
FAINT = "#ddd"


@dataclass(frozen=True)
class Scale:
    """Places values between two ends of the drawing, evenly or by their logarithms."""

    least: float
    most: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        of: Callable[[float], float] = math.log10 if self.logarithmic else float
        share = (of(value) - of(self.least)) / (of(self.most) - of(self.least))
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return round values: about eight on a linear scale; 1, 2 and 5 of each power of ten on a logarithmic one."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        else:
            rough = (self.most - self.least) / 8
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
            found = [step * number for number in range(math.ceil(self.least / step), int(self.most / step) + 1)]
        return [value for value in found if self.least <= value <= self.most]


class Drawing:
    """Drawing of shapes on a white background, which is readable on dark pages, too."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self.shapes: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = INK) -> None:
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
            f"{escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, colour: str = FAINT, width: float = 1) -> None:
        self.path(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", colour=colour, width=width)

    def path(self, course: str, *, colour: str = "none", width: float = 0, fill: str = "none") -> None:
        self.shapes.append(f'<path d="{course}" fill="{fill}" stroke="{colour}" stroke-width="{width:g}"/>')

    def svg(self) -> str:
        size = f"{self.width:.0f} {self.height:.0f}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif">',
                f'<path d="M0 0H{self.width:.0f}V{self.height:.0f}H0z" fill="#fff"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )
