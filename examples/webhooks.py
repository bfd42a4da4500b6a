"""Notify other people's servers of events, although they are not always reachable.

$ penstock worker webhooks:app
$ python webhooks.py
"""

import http.server
import json
import threading
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock import App

app = App("webhooks")


@dataclass
class Event:
    name: str
    at: datetime


@app.task(queue="webhooks", retries=8, backoff=0.05, retry_on=OSError, expires=3600)
def tell(url: str, event: Event) -> int:
    """Post an event. If the server is unreachable or refuses it, the job is retried after growing delays."""
    body = json.dumps({"event": event.name, "at": event.at.isoformat()}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
        return int(answer.status)


class MoodyServer(http.server.BaseHTTPRequestHandler):
    """Refuses the first two posts."""

    posts = 0

    def do_POST(self) -> None:
        MoodyServer.posts += 1
        self.send_response(503 if MoodyServer.posts <= 2 else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), MoodyServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        job = tell.delay(f"http://127.0.0.1:{server.server_port}/", Event("order paid", datetime.now(UTC)))
        print("answer:", job.result(timeout=30))
        print("attempts:", job.info().attempts)
        server.shutdown()
