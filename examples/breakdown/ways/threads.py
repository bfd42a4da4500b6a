"""Way of a thread pool in the program, shared by all requests."""

import os
from concurrent.futures import ThreadPoolExecutor

from examples.breakdown.queries import Row, countries, of_country

pool = ThreadPoolExecutor(int(os.environ["BREAKDOWN_SLOTS"]))


def page() -> list[Row]:
    return list(pool.map(of_country, countries()))
