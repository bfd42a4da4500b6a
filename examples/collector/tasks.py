"""Tasks of the collector. Each slot keeps a connection to the service at COLLECTOR_ADDRESS."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from penstock import App, group

app = App("collector")
kept = threading.local()


@dataclass
class Answer:
    """Answer of the service, with its times in seconds of the monotonic clock."""

    page: int
    value: Any
    asked: float
    came: float


@dataclass
class Page:
    number: int
    size: int
    """Total size of its objects."""
    answers: list[Answer]


def get(page: int, path: str) -> Answer:
    asked = time.monotonic()
    if not hasattr(kept, "connection"):
        kept.connection = http.client.HTTPConnection(os.environ["COLLECTOR_ADDRESS"], timeout=30)
    kept.connection.request("GET", path)
    response = kept.connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise LookupError(f"{path}: the service answered {response.status}")
    return Answer(page, json.loads(body), asked, time.monotonic())


def page_of(answers: list[Answer], listing: Answer) -> Page:
    return Page(listing.page, sum(answer.value["size"] for answer in answers), [listing, *answers])


def collect(page: int) -> Page:
    """Collect the objects of a page one after another."""
    listing = get(page, f"/pages/{page}")
    return page_of([get(page, f"/objects/{number}") for number in listing.value], listing)


@app.task
def collect_page(page: int) -> Page:
    return collect(page)


@app.task
def fetch(page: int, number: int) -> Answer:
    return get(page, f"/objects/{number}")


@app.task
def gather(answers: list[Answer], listing: Answer) -> Page:
    return page_of(answers, listing)


@app.task
def begin_page(page: int) -> str:
    """List a page, and send the chord that collects it. Returns the chord's id at once, which frees the slot."""
    listing = get(page, f"/pages/{page}")
    return (group(fetch.s(page, number) for number in listing.value) | gather.s(listing)).delay().id


@app.task
def rest() -> None:
    time.sleep(0.05)
