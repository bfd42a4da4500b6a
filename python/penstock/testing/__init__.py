"""Helpers for testing code that enqueues jobs: run the jobs in the test's process, or inspect them.

    from penstock.testing import inline

    def test_signup_sends_a_mail():
        with inline(app) as calls:
            signup("ada@example.org")
        calls.assert_enqueued(send, args=("ada@example.org",))

``inline`` runs each job inside the call that enqueues it, ``capture`` records it, and ``worker`` runs it in a thread.
Each replaces the app's own broker with another real one: a process that keeps everything in memory, and whose clock
``move_clock`` advances. In pytest they are the fixtures ``penstock_inline``, ``penstock_capture`` and
``penstock_worker``. ``penstock_clock`` moves the time, and ``penstock_server`` starts real workers. See
docs/testing.md.
"""

TYPE_CHECKING = False

if TYPE_CHECKING:
    from penstock.testing._calls import Call, Calls
    from penstock.testing._clock import Clock, move_clock
    from penstock.testing._doubles import CapturedCalls, WorkerCalls, capture, inline, worker
    from penstock.testing._errors import BrokerNotAllowed
    from penstock.testing._server import Server, ServerWorker

__all__ = [
    "BrokerNotAllowed",
    "Call",
    "Calls",
    "CapturedCalls",
    "Clock",
    "Server",
    "ServerWorker",
    "WorkerCalls",
    "capture",
    "inline",
    "move_clock",
    "worker",
]

_HOMES = ("_calls", "_clock", "_doubles", "_server", "_errors")


def __getattr__(name: str) -> object:
    # The pytest plugin is in this package, and every run of pytest loads it. So names are imported on first use.
    from importlib import import_module

    if name in __all__:
        for home in _HOMES:
            found = vars(import_module(f"penstock.testing.{home}"))
            if name in found:
                if isinstance(found[name], type):
                    # Shown under the name by which it is imported, like the public classes of `penstock`.
                    found[name].__module__ = __name__
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
