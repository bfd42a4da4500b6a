"""Behaviour of the client of one process."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid

import pytest

from penstock import _core, errors

JOB = _core.Options("task")
# No worker runs in these tests, so jobs end by expiring.
SHORT_LIVED = _core.Options("task", expires_after_ms=1)
SUCCEEDED, FAILED, EXPIRED, CRASHED, CANCELLED = range(5)


def ready(client: _core.Client) -> int:
    queues = client.status(5.0)["ready"]
    assert isinstance(queues, dict)
    return sum(queues.values())


def test_a_job_is_accepted_under_an_id_of_its_own(client):
    ids = [client.publish(JOB, b"body", 5.0) for _ in range(10)]
    assert len(set(ids)) == 10
    assert all(uuid.UUID(bytes=job).version == 7 for job in ids)
    assert ready(client) == 10


def test_many_jobs_are_one_transaction(client):
    same = client.publish_same(JOB, [b"%d" % number for number in range(20_000)], 30.0)
    many = client.publish_many([(JOB, b""), (_core.Options("other", queue="slow"), b"x")], 5.0)
    assert len({*same, *many}) == 20_002
    assert ready(client) == 20_002
    slow = client.message_info(many[1], 5.0)
    assert slow is not None
    assert (slow["task"], slow["queue"]) == ("other", "slow")
    assert client.publish_same(JOB, [], 5.0) == []
    assert client.publish_many([], 5.0) == []


def test_one_refused_job_refuses_all_of_its_transaction(client):
    too_large = bytes((16 << 20) + 1)
    with pytest.raises(errors.PayloadTooLarge):
        client.publish_many([(JOB, b"fits"), (JOB, too_large)], 30.0)
    assert ready(client) == 0


def test_a_wait_ends_with_the_job(client):
    job = client.publish(SHORT_LIVED, b"", 5.0)
    assert client.wait(job, 10.0) == (EXPIRED, b"")
    status, body, run = client.peek(job, 5.0)
    assert (status, body) == (EXPIRED, b"")
    assert run is not None
    task, queue, attempt, generation, ended_at_ms = run
    assert (task, queue, attempt, generation) == ("task", "default", 0, 0)
    assert abs(ended_at_ms / 1000 - time.time()) < 60


def test_a_wait_for_what_does_not_end_says_that_it_goes_on(client):
    job = client.publish(JOB, b"", 5.0)
    assert client.peek(job, 5.0) is None
    began = time.monotonic()
    with pytest.raises(errors.ResultTimeout, match="was not cancelled"):
        client.wait(job, 0.2)
    assert 0.2 <= time.monotonic() - began < 10
    client.purge("default", 5.0)
    status, reason = client.wait(job, 10.0)
    assert status == CANCELLED
    assert reason.decode()


def test_a_result_that_will_never_be_there_is_said_to_be_gone(client):
    unknown = bytes(16)
    with pytest.raises(errors.ResultExpired):
        client.wait(unknown, None)
    with pytest.raises(errors.ResultExpired):
        client.peek(unknown, 5.0)
    assert client.message_info(unknown, 5.0) is None


def test_all_ends_come_in_the_order_of_the_ids(client):
    expires, pending = client.publish_same(SHORT_LIVED, [b"", b""], 5.0)
    ends = client.wait_all([bytes(16), pending, expires, bytes(16), expires], 10.0)
    assert ends == [(-1, b""), (EXPIRED, b""), (EXPIRED, b""), (-1, b""), (EXPIRED, b"")]
    assert client.wait_all([], None) == []


def test_the_broker_tells_what_it_knows_of_a_job(client):
    before = int(time.time() * 1000) - 1000
    job = client.publish(_core.Options("task", countdown_ms=3_600_000, queue="later"), b"", 5.0)
    info = client.message_info(job, 5.0)
    assert info is not None
    assert info["state"] == "delayed"
    assert before < info["enqueued_at_ms"] < before + 60_000
    assert info["due_at_ms"] - info["enqueued_at_ms"] == pytest.approx(3_600_000, abs=1000)
    assert {name: info[name] for name in ("started_at_ms", "attempt", "crashes", "worker", "notes")} == {
        "started_at_ms": None,
        "attempt": 0,
        "crashes": 0,
        "worker": None,
        "notes": [],
    }


def test_status_tells_of_the_broker(client):
    client.publish(JOB, b"", 5.0)
    status = client.status(5.0)
    assert status["clients"] == 1
    assert status["broker_version"] == _core.__version__
    assert status["journal_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": ""}, "name of the task is empty"),
        ({"task": "t", "queue": "q" * 256}, "name of the queue takes 256 bytes"),
        ({"task": "t", "priority": 10}, "priority is 10; give 0 to 9"),
        ({"task": "t", "max_crashes": 0}, "max_crashes is 0; give 1 to 255"),
        ({"task": "t", "durability": "paper"}, 'give "replicated", "disk", "os" or "none"'),
        ({"task": "t", "countdown_ms": 1, "eta_ms": 1}, "countdown or eta, not both"),
        ({"task": "t", "expires_after_ms": 1, "expires_at_ms": 1}, "not both"),
    ],
)
def test_a_wrong_option_is_named(options, said):
    with pytest.raises(errors.InvalidConfiguration, match=said):
        _core.Options(**options)


@pytest.mark.parametrize("url", ["local:", "amqp://host", "nonsense", "tcp://host:port"])
def test_a_wrong_url_is_told_at_once(url):
    with pytest.raises(errors.InvalidConfiguration, match="give local:PATH"):
        _core.Client(url)


@pytest.mark.parametrize("durability", ["disk", "os", "none"])
def test_each_durability_is_confirmed(client, durability):
    client.publish(_core.Options("task", durability=durability), b"", 5.0)
    assert ready(client) == 1


def test_replicated_is_offered_by_no_engine_of_today(client):
    with pytest.raises(errors.NotOffered, match=r'no current engine .* "disk" is the safest level\. Nothing was sent'):
        client.publish(_core.Options("task", durability="replicated"), b"", 5.0)
    assert client.status(5.0)["ready"] == {}


def test_a_closed_client_says_so(client):
    client.publish(JOB, b"", 5.0)
    client.close(5.0)
    client.close(5.0)
    for call in (
        lambda: client.publish(JOB, b"", 5.0),
        lambda: client.wait(bytes(16), 5.0),
        lambda: client.status(5.0),
    ):
        with pytest.raises(errors.ClientClosed):
            call()


def test_closing_ends_what_waits(client):
    job = client.publish(JOB, b"", 5.0)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait(job, None)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close(5.0)
    thread.join(10)
    assert [type(error) for error in caught] == [errors.ClientClosed]


def test_ctrl_c_gets_through_to_a_wait(client):
    job = client.publish(JOB, b"", 5.0)

    def wait_and_press() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        client.wait(job, None)

    with pytest.raises(KeyboardInterrupt):
        wait_and_press()
    assert client.peek(job, 5.0) is None


def test_sixteen_threads_share_one_client(client):
    ids: list[list[bytes]] = [[] for _ in range(16)]

    def publish(mine: list[bytes]) -> None:
        for _ in range(100):
            mine.append(client.publish(JOB, b"", 10.0))

    threads = [threading.Thread(target=publish, args=(mine,)) for mine in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({job for mine in ids for job in mine}) == 1600
    assert ready(client) == 1600
    assert client.status(5.0)["clients"] == 1


def test_a_wait_leaves_the_interpreter_to_others(client, stopped_broker):
    ends: list[BaseException] = []

    def publish() -> None:
        try:
            client.publish(JOB, b"", 60.0)
        except errors.BrokerUnavailable as error:
            ends.append(error)

    client.publish(JOB, b"", 5.0)
    waiting = threading.Thread(target=publish)
    with stopped_broker():
        waiting.start()
        for _ in range(200):
            time.sleep(0.001)
        assert waiting.is_alive() and not ends, "nobody else got on before the wait was over"
    waiting.join(60)
    assert not ends
    assert ready(client) == 2


def test_a_stopped_broker_ends_calls_at_their_deadline(client, new_client, stopped_broker):
    job = client.publish(JOB, b"", 5.0)
    with stopped_broker():
        began = time.monotonic()
        with pytest.raises(errors.CallTimeout, match="may have been accepted") as caught:
            client.publish(JOB, b"", 0.5)
        assert caught.value.maybe_accepted
        assert 0.5 <= time.monotonic() - began < 14
        with pytest.raises(errors.CallTimeout) as caught:
            client.wait(job, 0.2)
        assert not caught.value.maybe_accepted
        with pytest.raises(errors.CallTimeout):
            client.status(0.2)
        # The broker cannot even welcome this client, so no part of the call was sent.
        with pytest.raises(errors.BrokerUnavailable, match="was not accepted") as caught:
            new_client().publish(JOB, b"", 0.2)
        assert not caught.value.maybe_accepted
    # The call that was sent was accepted, the other one was given up.
    client.publish(JOB, b"", 10.0)
    assert ready(client) == 3


def test_a_start_that_cannot_succeed_is_told_in_one_message(project):
    client = _core.Client(project.url, program="/nowhere/penstock")
    with pytest.raises(errors.InvalidConfiguration, match=r"can't start a broker for .*/nowhere/penstock"):
        client.publish(JOB, b"", 5.0)
    client.close(1.0)
