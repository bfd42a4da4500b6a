"""docs/web.md with the real frameworks and servers: a request enqueues, a worker runs, a request reads the state."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import pytest
from blocks import ROOT, blocks
from project import eventually


@pytest.fixture
def page(project):
    """Write the page's files into the project."""
    for block in blocks(ROOT / "docs" / "web.md", "python"):
        assert block.file is not None
        project.write(block.file, block.text)
    return project


def request(method: str, url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def address(server, pattern: str) -> str:
    """Return the address of a server that chose a free port."""
    eventually(lambda: re.search(pattern, server.output) or server.returncode is not None)
    found = re.search(pattern, server.output)
    assert found, server.output
    return found[1]


def test_a_task_has_the_application_context_of_flask(page):
    server = page.start("gunicorn", "-w", "2", "-b", "127.0.0.1:0", "flask_shop:create_app()")
    url = address(server, r"Listening at: (http://[\d.:]+)")
    status, answer = request("POST", f"{url}/orders/7")
    assert status == 202
    assert request("GET", f"{url}/jobs/{answer['job']}") == (200, {"state": "waiting", "error": None})
    worker = page.worker("flask_shop", "-c", "1")

    def state() -> str:
        return str(request("GET", f"{url}/jobs/{answer['job']}")[1]["state"])

    eventually(lambda: state() in ("succeeded", "failed"))
    assert state() == "succeeded", worker.output
    result = page.python(f"import flask_shop; print(flask_shop.queue.job({answer['job']!r}).result())")
    assert result == "receipt of 7, from shop@example.org\n"


def test_fastapi_enqueues_and_asks_without_blocking(page):
    server = page.start("uvicorn", "--port", "0", "fastapi_shop:app")
    url = address(server, r"running on (http://[\d.:]+)")
    status, answer = request("POST", f"{url}/photos/7")
    assert status == 202
    assert request("GET", f"{url}/jobs/{answer['job']}") == (200, {"state": "waiting", "error": None})
    assert request("GET", f"{url}/jobs/{'0' * 32}")[0] == 404
    assert request("GET", f"{url}/jobs/what")[0] == 422
    page.worker("fastapi_shop:queue", "-c", "1")
    eventually(lambda: request("GET", f"{url}/jobs/{answer['job']}")[1]["state"] == "succeeded")
    assert "blocks" not in server.output
