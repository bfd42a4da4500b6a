"""Chart of how long requests took, in each way and with each number of clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from examples.shared.svg import INK, Drawing, Scale

WIDTH = 900
HEIGHT = 480
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 50, 50
COLOURS = ["#4477aa", "#228833", "#ccbb44", "#ee6677", "#aa3377"]
STEPS = 80


def density(logarithms: Sequence[float], at: float, width: float) -> float:
    """Return the kernel density with a Gaussian of the given width, not normalized."""
    return sum(math.exp(-(((at - one) / width) ** 2) / 2) for one in logarithms)


def outline(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points of a violin, from the shortest time to the longest: seconds, and a width between 0 and 1."""
    logarithms = [math.log(one) for one in seconds]
    spread = statistics.stdev(logarithms) if len(logarithms) > 1 else 0.0
    # Silverman's rule, but wide enough that a single request is not a spike.
    kernel = max(1.06 * spread * len(logarithms) ** -0.2, 0.01)
    low, high = min(logarithms) - kernel, max(logarithms) + kernel
    places = [low + (high - low) * step / STEPS for step in range(STEPS + 1)]
    widths = [density(logarithms, place, kernel) for place in places]
    return [(math.exp(place), width / max(widths)) for place, width in zip(places, widths, strict=True)]


def draw(taken: dict[str, dict[int, list[float]]]) -> str:
    """Draw the chart. ``taken``: seconds of each request, by the name of the way and the number of clients."""
    drawing = Drawing(WIDTH, HEIGHT)
    every = [one for by_clients in taken.values() for seconds in by_clients.values() for one in seconds]
    up = Scale(min(every) / 1.2, max(every) * 1.2, HEIGHT - BOTTOM, TOP, logarithmic=True)
    for second in up.ticks():
        drawing.line(LEFT, up(second), WIDTH - RIGHT, up(second))
        label = f"{second * 1e3:g} ms" if second < 1 else f"{second:g} s"
        drawing.text(LEFT - 6, up(second) + 4, label, size=11, anchor="end")

    clients = sorted({number for by_clients in taken.values() for number in by_clients})
    group_width = (WIDTH - LEFT - RIGHT) / len(clients)
    place_width = group_width * 0.86 / len(taken)
    for place, number in enumerate(clients):
        middle = LEFT + (place + 0.5) * group_width
        drawing.text(middle, HEIGHT - BOTTOM + 20, "1 client" if number == 1 else f"{number} clients", anchor="middle")
        for column, (name, by_clients) in enumerate(taken.items()):
            if number in by_clients:
                x = middle + (column - (len(taken) - 1) / 2) * place_width
                violin(drawing, up, x, place_width * 0.46, by_clients[number], colour_of(list(taken), name))
    for column, name in enumerate(taken):
        drawing.path(f"M{LEFT + column * 200} 18h14v14h-14z", fill=colour_of(list(taken), name))
        drawing.text(LEFT + column * 200 + 20, 30, name)
    drawing.text(
        WIDTH / 2, HEIGHT - 8, "time of a request; the line in each violin is the median", size=11, anchor="middle"
    )
    return drawing.svg()


def colour_of(names: list[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def violin(drawing: Drawing, up: Scale, x: float, half_width: float, seconds: list[float], colour: str) -> None:
    points = outline(seconds)
    right = [f"{x + half_width * width:.1f} {up(at):.1f}" for at, width in points]
    left = [f"{x - half_width * width:.1f} {up(at):.1f}" for at, width in reversed(points)]
    drawing.path(f"M{'L'.join([*right, *left])}z", fill=colour)
    median = up(statistics.median(seconds))
    drawing.line(x - half_width, median, x + half_width, median, colour=INK, width=1.5)
