"""Query of one country as a Celery task, on RabbitMQ with results in Redis."""

from __future__ import annotations

import os

from celery import Celery

from examples.breakdown import queries

app = Celery("breakdown", broker=os.environ["BENCH_AMQP_URL"], backend=os.environ["BENCH_REDIS_URL"] + "/1")


@app.task
def of_country(country: int) -> list[int]:
    return queries.of_country(country)
