"""Poll of a service: one request to a given port."""

from __future__ import annotations

import http.client

from penstock import App

app = App("poller")


@app.task
def poll(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", "/news")
    response = connection.getresponse()
    response.read()
    return response.status
