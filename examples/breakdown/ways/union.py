"""Way of a single query for all countries, in the thread of the request."""

from examples.breakdown.queries import Row, of_all


def page() -> list[Row]:
    return of_all()
