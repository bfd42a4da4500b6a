"""The tasks whose jobs are in `format-1/`: its maker ran some of them, and the test runs the rest."""

from __future__ import annotations

import os
from typing import Any

import penstock
from penstock import App

app = App("shop")


def option(format_1: str, now: str, value: float) -> dict[str, Any]:
    """Return an option under the name that the running version of Penstock uses; the maker's version had others."""
    return {now if now in penstock.TaskOptions.__annotations__ else format_1: value}


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def charge(order: int) -> int:
    raise ValueError(f"order {order} can't be charged")


@app.task(queue="mail")
def send(to: str) -> str:
    raise ConnectionError(f"no route to {to}")


@app.task(retries=3, backoff=86_400.0, **option("backoff_cap", "max_backoff", 86_400.0), jitter=0.0)
def deliver(order: int) -> int:
    raise TimeoutError(f"order {order} is late")


@app.task(**option("max_deliveries", "max_crashes", 2))
def segfault() -> None:
    os.abort()


@app.task(queue="mail", on_crash="fail")
def segfault_once() -> None:
    os.abort()


@app.task(store_result=False)
def fill(text: str) -> None:
    """Use up journal space, so that its first segments get reclaimed."""


@app.task
def hello(name: str) -> str:
    return f"hello, {name}"
