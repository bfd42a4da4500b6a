"""Threads, asyncio and forks: one App serves them all."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from project import eventually

TASKS = """
    from penstock import App

    app = App("shop")

    @app.task
    def double(number: int) -> int:
        return 2 * number
"""

WEB = """
    import json, os
    import tasks

    # This connection is made before the fork, in the server's first process, and must not reach the children.
    at_import = tasks.double.delay(0)

    def application(environ, start_response):
        number = int(environ["QUERY_STRING"])
        value = tasks.double.delay(number).result(timeout=20)
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"value": value, "pid": os.getpid()}).encode()]
"""


@pytest.fixture
def shop(project):
    project.write("tasks.py", TASKS)
    project.worker("tasks:app", "-c", "2")
    return project


async def test_threads_and_an_event_loop_share_an_app(shop):
    double = shop.tasks().double

    def in_a_thread(start: int) -> list[int]:
        return [double.delay(number).result(timeout=30) for number in range(start, start + 25)]

    async def in_the_loop(number: int) -> int:
        job = await double.adelay(number)
        return await job

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(4) as pool:
        threads = [loop.run_in_executor(pool, in_a_thread, 100 * index) for index in range(4)]
        awaited = await asyncio.gather(*(in_the_loop(number) for number in range(100)))
        assert awaited == [2 * number for number in range(100)]
        for index, values in enumerate(await asyncio.gather(*threads)):
            assert values == [2 * number for number in range(100 * index, 100 * index + 25)]


def test_one_event_loop_after_another(shop):
    double = shop.tasks().double

    async def once(number: int) -> int:
        return await (await double.adelay(number))

    assert [asyncio.run(once(number)) for number in range(3)] == [0, 2, 4]


@pytest.mark.parametrize("options", [[], ["--preload"]], ids=["each imports", "preloaded"])
def test_a_pre_forking_web_server(shop, options):
    shop.write("web.py", WEB)
    address = shop.directory / "web.sock"
    server = shop.start(
        "gunicorn", "--workers", "4", "--bind", f"unix:{address}", "--timeout", "60", *options, "web:application"
    )
    eventually(lambda: listens(address), 30, lambda: server.output)

    with ThreadPoolExecutor(8) as pool:
        pids: set[int] = set()
        # The kernel chooses which child accepts a request, so ask until each has answered.
        for _ in range(50):
            answers = list(pool.map(lambda number: get(address, number), range(20)))
            assert [answer["value"] for answer in answers] == [2 * number for number in range(20)]
            pids |= {answer["pid"] for answer in answers}
            if len(pids) == 4:
                break
    assert len(pids) == 4
    assert server.returncode is None, server.output


def listens(address: Path) -> bool:
    """A socket file appears before its process listens, so try to connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(str(address)) == 0


def get(address: Path, number: int) -> dict[str, int]:
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(30)
    connection.sock.connect(str(address))
    try:
        connection.request("GET", f"/?{number}")
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        return dict(json.loads(body))
    finally:
        connection.close()
