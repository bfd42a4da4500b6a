"""Run a service that slows down for a while: HTTP on a free port of the loopback interface, which it prints.

While slow it handles one request at a time, like a database behind a lock: each request waits for the earlier ones.

$ python -m examples.poller.server '{"slow_from_s": 10, "slow_to_s": 40, "quick_s": 0.05, "slow_s": 3}'
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import time


class Service:
    """Service with a slow period. Times are in seconds from the first request."""

    def __init__(self, slow_from_s: float, slow_to_s: float, quick_s: float, slow_s: float) -> None:
        self.slow_from_s = slow_from_s
        self.slow_to_s = slow_to_s
        self.quick_s = quick_s
        self.slow_s = slow_s
        self._began: float | None = None
        self._one_at_a_time = threading.Lock()

    def serve(self) -> None:
        """Wait for the duration of a request."""
        if self._began is None:
            self._began = time.monotonic()
        if self._is_slow():
            with self._one_at_a_time:
                if self._is_slow():
                    time.sleep(self.slow_s)
                    return
        time.sleep(self.quick_s)

    def _is_slow(self) -> bool:
        assert self._began is not None
        return self.slow_from_s <= time.monotonic() - self._began < self.slow_to_s


class Handler(socketserver.StreamRequestHandler):
    """Answers one request."""

    service: Service

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass  # the request, and its headers
        self.service.serve()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnews")


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1_000


def main() -> None:
    Handler.service = Service(**json.loads(sys.argv[1]))
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
