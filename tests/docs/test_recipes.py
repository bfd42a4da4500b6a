"""The recipes of docs/middleware.md with the real libraries, end to end: a server gets events, the output has spans."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import pytest
from blocks import ROOT, blocks
from project import eventually


@pytest.fixture
def page(project):
    """Write the page's files into the project."""
    for block in blocks(ROOT / "docs" / "middleware.md", "python"):
        if block.file is not None:
            project.write(block.file, block.text)
    return project


@pytest.fixture
def sentry() -> Iterator[tuple[str, Queue[dict]]]:
    """Yield a DSN, and a queue of the events that arrive there."""
    events: Queue[dict] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for line in body.splitlines():
                item = json.loads(line)
                if "exception" in item:
                    events.put(item)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://key@127.0.0.1:{server.server_port}/1", events
    server.shutdown()
    thread.join()
    server.server_close()


def test_sentry_hears_of_a_failed_job_once_and_of_which_task_it_was(page, sentry):
    dsn, events = sentry
    shop = page.tasks("sentry_shop.py")
    worker = page.worker("sentry_shop:app", "-c", "1", SENTRY_DSN=dsn)
    with pytest.raises(ConnectionError, match="no route to the bank"):
        shop.charge.delay("1234").result(timeout=30)
    worker.end()
    event = events.get(timeout=30)
    assert event["tags"]["task"] == "sentry_shop.charge"
    assert event["exception"]["values"][-1]["value"] == "no route to the bank"
    assert events.empty()


def test_opentelemetry_s_spans_follow_a_job_that_a_job_enqueued(page):
    shop = page.tasks("traced_shop.py")
    worker = page.worker("traced_shop:app", "-c", "2")
    shop.order.delay(3).result(timeout=30)
    eventually(lambda: '"name": "traced_shop.pay"' in worker.output)
    spans = {
        span["name"]: span
        for span in map(json.loads, re.findall(r"^\{$.*?^\}$", worker.output, re.DOTALL | re.MULTILINE))
    }
    order, pay, bank = spans["traced_shop.order"], spans["traced_shop.pay"], spans["bank"]
    assert order["parent_id"] is None
    assert pay["parent_id"] == order["context"]["span_id"]
    assert bank["parent_id"] == pay["context"]["span_id"]
    assert {span["context"]["trace_id"] for span in spans.values()} == {order["context"]["trace_id"]}
