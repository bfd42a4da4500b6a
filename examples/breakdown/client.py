"""Request the page in one way, repeatedly and from several threads at once; prints the time of each request.

$ python -m examples.breakdown.client group 16 2
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    way = importlib.import_module(f"examples.breakdown.ways.{sys.argv[1]}")
    clients, requests = int(sys.argv[2]), int(sys.argv[3])
    together = threading.Barrier(clients)

    def request_pages() -> tuple[list[float], list[list[int]]]:
        page = way.page()  # connects
        together.wait(timeout=300)
        taken = []
        for _ in range(requests):
            begun = time.perf_counter()
            rows = way.page()
            taken.append(time.perf_counter() - begun)
            if rows != page:
                raise AssertionError(f"two requests of one page differ: {rows} and {page}")
        return taken, page

    with ThreadPoolExecutor(clients) as threads:
        outcomes = [outcome.result() for outcome in [threads.submit(request_pages) for _ in range(clients)]]
    print(json.dumps({"seconds": [one for taken, _ in outcomes for one in taken], "page": outcomes[0][1]}))


if __name__ == "__main__":
    main()
