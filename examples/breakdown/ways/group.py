"""Way of a group of Penstock jobs."""

from examples.breakdown.queries import Row, countries
from examples.breakdown.tasks import of_country
from penstock import group


def page() -> list[Row]:
    return list(group(of_country.s(country) for country in countries()).delay().results(timeout=120))
