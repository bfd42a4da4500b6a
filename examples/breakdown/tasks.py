"""Query of one country as a Penstock task."""

from examples.breakdown import queries
from penstock import App

app = App("breakdown")


@app.task
def of_country(country: int) -> list[int]:
    return queries.of_country(country)
