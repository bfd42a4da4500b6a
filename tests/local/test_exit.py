"""Interpreter shutdown: code that still enqueues can, and no useless message is printed."""

from __future__ import annotations

from project import Project

TASKS = """
    from penstock import App

    app = App("shop")

    @app.task
    def double(number: int) -> int:
        return 2 * number
"""


def test_exit_handlers_may_enqueue_whenever_they_were_registered(project: Project) -> None:
    """The call used to end with ClientClosed although nothing had closed the client."""
    project.write("tasks.py", TASKS)
    script = """
        import atexit

        atexit.register(lambda: print("first registered", tasks.double.delay(1).id is not None))
        import tasks

        atexit.register(lambda: print("last registered", tasks.double.delay(2).id is not None))
        tasks.double.delay(0)
    """
    assert project.python(script) == "last registered True\nfirst registered True\n"
    [queue] = project.status()["queues"]
    assert queue["ready"] == 3


def test_busy_daemon_threads_print_nothing_at_the_end(project: Project) -> None:
    project.write("tasks.py", TASKS)
    script = """
        import threading
        import tasks

        busy = threading.Barrier(5)

        def work():
            tasks.double.delay(0)
            busy.wait()
            while True:
                tasks.double.delay(1)

        def wait():
            job = tasks.double.delay(0)
            busy.wait()
            job.result()

        for target in [work, work, work, wait]:
            threading.Thread(target=target, daemon=True).start()
        busy.wait()
    """
    for _ in range(10):
        process = project.start_python(script)
        assert process.wait(30) == 0, process.output
        assert process.output == ""
