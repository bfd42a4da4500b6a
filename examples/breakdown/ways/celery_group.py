"""Way of a group of Celery tasks."""

from __future__ import annotations

from celery import group

from examples.breakdown.celery_tasks import of_country
from examples.breakdown.queries import Row, countries


def page() -> list[Row]:
    rows: list[Row] = group(of_country.s(country) for country in countries())().get(timeout=120)
    return rows
