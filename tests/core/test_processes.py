"""Importing starts nothing, a fork starts a new session, and a killed broker loses nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import penstock
from penstock import _core, errors

PROGRAM = str(Path(penstock.__file__).with_name("_bin") / "penstock")

PRELUDE = f"""
import os, sys, warnings
# Python 3.12 and newer warn about a fork in a program with threads, which is under test here.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from penstock import _core, errors
client = _core.Client(os.environ["PENSTOCK_URL"], program={PROGRAM!r})
job = _core.Options("task")

def sockets():
    found = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{{fd}}")]
    return [link for link in found if link.startswith("socket:")]
"""


def test_importing_and_making_a_client_starts_and_opens_nothing(project):
    said = project.python(
        PRELUDE
        + """
files = len(os.listdir("/proc/self/fd"))
import threading
clients = [_core.Client(f"local:{os.getcwd()}/{number}") for number in range(5)]
print(len(os.listdir("/proc/self/task")), threading.active_count(), len(os.listdir("/proc/self/fd")) - files)
"""
    )
    assert said.split() == ["1", "1", "0"]
    assert not project.data.exists()


def test_a_fork_begins_anew_and_leaves_the_parent_as_it_was(project):
    said = project.python(
        PRELUDE
        + """
ids = [client.publish(job, b"", 5.0) for _ in range(3)]
[inherited] = sockets()
children = []
for number in range(4):
    end, child_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        first = client.publish(job, b"", 5.0)
        [own] = sockets()
        assert own != inherited
        os.write(child_end, first)
        # The parent's end of the world must not end ours, nor ours the parent's.
        client.close(5.0)
        os._exit(0)
    os.close(child_end)
    children.append((pid, end))
ids += [client.publish(job, b"", 5.0) for _ in range(3)]
for pid, end in children:
    ids.append(os.read(end, 16))
    assert os.waitpid(pid, 0)[1] == 0
ids.append(client.publish(job, b"", 5.0))
assert sockets() == [inherited]
print(len(set(ids)), client.status(5.0)["ready"]["default"])
"""
    )
    assert said.split() == ["11", "11"]


def test_a_child_may_fork_again_and_forget_the_client_without_a_word(project):
    said = project.python(
        PRELUDE
        + """
client.publish(job, b"", 5.0)
for generation in range(3):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        os._exit(0) if generation else sys.exit(print("done", flush=True))
    if generation == 1:
        client.publish(job, b"", 5.0)
# The last child drops what it inherited, in an orderly end of the interpreter.
del client
"""
    )
    assert "done" in said


def test_every_job_confirmed_through_kills_of_the_broker_is_there(project, client):
    """Eight threads enqueue while the broker is killed three times. Every answer they got stays true."""
    job = _core.Options("task")
    confirmed: list[bytes] = []
    refused: list[BaseException] = []
    over = threading.Event()
    # Ensures that commits are in flight when the kill comes.
    progress = threading.Condition()

    def publish() -> None:
        while not over.is_set():
            try:
                accepted = [client.publish(job, b"", 20.0), *client.publish_same(job, [b""] * 20, 20.0)]
            except errors.PenstockError as error:
                refused.append(error)
                return
            with progress:
                confirmed.extend(accepted)
                progress.notify()

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        with progress:
            goal = len(confirmed) + 2_000
            assert progress.wait_for(lambda goal=goal: refused or len(confirmed) >= goal, 30)
        project.kill_broker()
    with progress:
        goal = len(confirmed) + 500
        assert progress.wait_for(lambda: refused or len(confirmed) >= goal, 30)
    over.set()
    for thread in threads:
        thread.join(60)
    assert not refused
    assert len(set(confirmed)) == len(confirmed)
    lost = [job for job in confirmed if client.message_info(job, 10.0) is None]
    assert not lost
    # No job is there twice: calls that were sent again after a kill were applied once.
    assert client.status(10.0)["ready"]["default"] == len(confirmed)


def test_a_wait_without_a_timeout_goes_on_through_kills(project, client):
    [job] = client.publish_same(_core.Options("task"), [b""], 5.0)
    end: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: end.append(client.wait(job, None)))
    thread.start()
    project.kill_broker()
    client.purge("default", 10.0)
    thread.join(60)
    assert [status for status, _ in end] == [4]
    with pytest.raises(errors.ResultExpired):
        client.wait(bytes(16), 5.0)
