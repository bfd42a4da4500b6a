"""Calls of an event loop finish at its port; the loop itself never waits."""

from __future__ import annotations

import asyncio
import select
import time

import pytest
from project import within

from penstock import _core, errors

JOB = _core.Options("task")
SHORT_LIVED = _core.Options("task", expires_after_ms=1)
EXPIRED = 2


def ends(port: _core.Port, count: int) -> dict[int, object]:
    """Return the next ``count`` outcomes by token."""
    got: dict[int, object] = {}
    while len(got) < count:
        assert select.select([port.fileno()], [], [], 10)[0], got
        got.update(port.drain())
    return got


def test_each_call_ends_under_its_token(client):
    port = _core.Port()
    jobs = client.submit([(JOB, b"a"), (SHORT_LIVED, b"b")], 5.0, port, 1)
    assert ends(port, 1) == {1: []}
    client.watch(jobs[1], None, port, 2)
    client.peek_async(jobs[0], 5.0, port, 3)
    client.message_info_async(jobs[0], 5.0, port, 4)
    client.watch(bytes(16), None, port, 5)
    got = ends(port, 4)
    assert got[2] == (EXPIRED, b"")
    assert got[3] is None
    assert isinstance(got[4], dict)
    assert got[4]["state"] == "ready"
    assert isinstance(got[5], errors.ResultExpired)
    assert port.drain() == []


def test_a_deadline_ends_a_watch_at_the_port(client):
    port = _core.Port()
    [job] = client.submit([(JOB, b"")], 5.0, port, 1)
    assert ends(port, 1) == {1: []}
    began = time.monotonic()
    client.watch(job, 0.2, port, 2)
    assert isinstance(ends(port, 1)[2], errors.ResultTimeout)
    assert 0.2 <= time.monotonic() - began < 10


def test_what_was_forgotten_does_not_come(client):
    port = _core.Port()
    [job] = client.submit([(JOB, b"")], 5.0, port, 1)
    assert ends(port, 1) == {1: []}
    client.watch(job, None, port, 2)
    client.watch(job, None, port, 3)
    client.forget(port, 2)
    client.forget(port, 99)
    client.purge("default", 5.0)
    assert list(ends(port, 1)) == [3]
    assert port.drain() == []


def test_a_stopped_broker_ends_them_at_their_deadline(client, stopped_broker):
    port = _core.Port()
    client.publish(JOB, b"", 5.0)
    with stopped_broker():
        with within(3, "calls that wait for nothing"):
            client.submit([(JOB, b"")], 3.0, port, 1)
            client.message_info_async(bytes(16), 3.0, port, 2)
            client.peek_async(bytes(16), 3.0, port, 3)
        got = ends(port, 3)
        assert {token: type(end) for token, end in got.items()} == dict.fromkeys((1, 2, 3), errors.CallTimeout)
        assert got[1].maybe_accepted
        assert not got[2].maybe_accepted


def test_a_call_that_a_close_cuts_off_says_whether_it_was_sent(client, stopped_broker):
    """The error used to say nothing about it, and the job was accepted when the broker continued."""
    port = _core.Port()
    client.publish(JOB, b"", 5.0)
    with stopped_broker():
        client.submit([(JOB, b"")], 30.0, port, 1)
        client.close(0.1)
        end = ends(port, 1)[1]
        assert isinstance(end, errors.ClientClosed)
        assert end.maybe_accepted
        assert "may have been accepted" in str(end)
    with pytest.raises(errors.ClientClosed) as caught:
        client.publish(JOB, b"", 5.0)
    assert not caught.value.maybe_accepted


async def test_a_loop_awaits_a_thousand_jobs_at_once(client):
    port = _core.Port()
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[object]] = {}

    def drain() -> None:
        for token, end in port.drain():
            future = waiting.pop(token)
            if isinstance(end, BaseException):
                future.set_exception(end)
            else:
                future.set_result(end)

    def begin(token: int) -> asyncio.Future[object]:
        waiting[token] = loop.create_future()
        return waiting[token]

    loop.add_reader(port.fileno(), drain)
    submitted = []
    for token in range(1000):
        future = begin(token)
        [job] = client.submit([(SHORT_LIVED, b"")], 10.0, port, token)
        submitted.append((job, future))
    await asyncio.wait_for(asyncio.gather(*(future for _, future in submitted)), 30)
    futures = []
    for token, (job, _) in enumerate(submitted, 1000):
        futures.append(begin(token))
        client.watch(job, None, port, token)
    got = await asyncio.wait_for(asyncio.gather(*futures), 30)
    assert got == [(EXPIRED, b"")] * 1000
    loop.remove_reader(port.fileno())
    port.close()


def test_after_its_close_a_port_takes_nothing(client):
    port = _core.Port()
    client.submit([(JOB, b"")], 5.0, port, 1)
    port.close()
    client.status(5.0)
    assert port.drain() == []
    with pytest.raises(TypeError):
        client.submit([("no options", b"")], 5.0, port, 1)
