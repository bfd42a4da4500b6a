"""For tests of code that enqueues: run each job here, at once, without a broker or a worker.

    from penstock.testing import inline

    def test_signup_sends_a_mail():
        with inline(app) as calls:
            signup("ada@example.org")
        assert [call.task for call in calls] == ["shop.send"]

Arguments and results are encoded and decoded, errors retried (without the wait), and ``result()``
raises as it does in production. Countdowns, priorities and expiry are not acted upon.

For tests of when jobs are due, an ``App`` with the URL ``memory:`` has a real broker of its own, which keeps everything
in memory, and whose clock ``move_clock`` moves on. No worker can reach it.
"""

from penstock.testing._clock import move_clock
from penstock.testing._inline import Call, inline

__all__ = ["Call", "inline", "move_clock"]

# Shown as it is imported, like the public classes of `penstock`.
Call.__module__ = __name__
