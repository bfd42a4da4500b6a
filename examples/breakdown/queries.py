"""Page of sales, broken down by country: one query for each country, or one for all of them.

BREAKDOWN_DSN names the database, and BREAKDOWN_COUNTRIES is the number of countries. Each thread keeps a connection to
the database.
"""

from __future__ import annotations

import os
import threading

import psycopg

SQL = "SELECT {country}, sum(units), sum(cents), max(cents) FROM sales WHERE country = {country}"

Row = list[int]
"""Country, units, and the sum and the largest of the amounts in cents."""

kept = threading.local()


def countries() -> range:
    return range(1, int(os.environ["BREAKDOWN_COUNTRIES"]) + 1)


def connection() -> psycopg.Connection:
    if not hasattr(kept, "connection"):
        kept.connection = psycopg.connect(os.environ["BREAKDOWN_DSN"], autocommit=True)
    return kept.connection


def of_country(country: int) -> Row:
    """Ask for one country."""
    (row,) = connection().execute(SQL.format(country=country)).fetchall()
    return [int(value) for value in row]


def of_all() -> list[Row]:
    """Ask for all countries at once."""
    union = " UNION ALL ".join(SQL.format(country=country) for country in countries())
    return sorted([int(value) for value in row] for row in connection().execute(union).fetchall())
