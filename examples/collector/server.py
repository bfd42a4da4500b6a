"""Run the service: HTTP/1.1 on a free port of the loopback interface, which it prints.

$ python -m examples.collector.server '{"pages": 20, "objects": 300, "least_ms": 50, "most_ms": 150, "seed": 1}'
"""

from __future__ import annotations

import json
import socketserver
import sys
import time

from .catalogue import Catalogue


class Handler(socketserver.StreamRequestHandler):
    """Answers the requests of one connection in turn, each after its own latency."""

    disable_nagle_algorithm = True
    catalogue: Catalogue

    def handle(self) -> None:
        while words := self.rfile.readline().split():
            path = words[1].decode()
            while self.rfile.readline().strip():
                pass  # a header
            time.sleep(self.catalogue.latency_s(path))
            try:
                status, body = "200 OK", json.dumps(self.catalogue.answer(path)).encode()
            except (KeyError, ValueError):
                status, body = "404 Not Found", b"null"
            self.wfile.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1_000


def main() -> None:
    Handler.catalogue = Catalogue(**json.loads(sys.argv[1]))
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
