"""Names of Celery and RQ methods with their equivalents here, for users who migrate."""

from __future__ import annotations

from inspect import getattr_static

_TASK = {
    "AsyncResult": "task.job(id) does that",
    "add_to_chord": "current_job().spawn(step) does that",
    "apply": "task(...) runs it here and now; penstock.testing.inline() has tests run its jobs",
    "apply_async": "task.options(countdown=...).delay(...) does that",
    "chunks": "penstock.chunks(task, calls, n) does that",
    "enqueue": "it is delay(...)",
    "replace": "return app.replace(step) does that",
    "request": "current_job() tells a task about its job",
    "retry": "raise Retry(countdown=...) in the task asks for another attempt",
    "run": "task(...) runs it here and now",
    "send": "it is delay(...)",
    "send_with_options": "task.options(countdown=...).delay(...) does that",
    "signature": "it is task.s(...)",
    "subtask": "it is task.s(...)",
    "update_state": "current_job().progress(done, total, message) tells how far it has come",
}

_RESULT = {
    "collect": "result() has the results of a group, too",
    "failed": "info().state says how a job has ended",
    "fetch": "info() asks for all details",
    "forget": "a result is gone after its result_ttl",
    "get": "it is result(timeout=...)",
    "get_status": "info().state does that",
    "is_failed": "info().state says how a job has ended",
    "is_finished": "it is done()",
    "ready": "it is done()",
    "refresh": "info() asks for all details",
    "return_value": "it is result()",
    "revoke": "it is cancel(...)",
    "state": "info().state asks for it",
    "status": "info().state asks for it",
    "successful": "info().state says how a job has ended",
    "then": "task.s(...).link(step) has a step run after it",
    "traceback": "info().errors has it for each attempt",
}

_WORKFLOW = {
    "completed_count": "partial() says how many have succeeded and failed",
    "children": "its jobs are those that it iterates over",
    "failed": "state() says how it has ended",
    "forget": "results are gone after their result_ttl",
    "get": "it is result(timeout=...)",
    "info": "status() tells how far it has come",
    "iterate": "it is as_completed()",
    "join": "it is result(), or results() for a group with failures",
    "join_native": "it is result(), or results() for a group with failures",
    "ready": "it is done()",
    "restore": "app.workflow(id) finds it",
    "revoke": "it is cancel(...)",
    "save": "nothing has to be saved: app.workflow(id) finds it",
    "successful": "state() says how it has ended",
    "waiting": "done() says whether it has ended",
}

_STEP = {
    "apply": "delay() sends it; penstock.testing.inline() has tests run its jobs",
    "apply_async": "delay() sends it; options belong to its calls, as in task.s(...).options(countdown=...)",
    "clone": "a step never changes, and can be used as often as you like",
    "get": "delay() sends it, and returns what has result()",
    "map": "it is a method of the task, and enqueues a job for each item",
    "on_error": "it is link_error(...)",
    "replace": "return app.replace(step) in a task does that",
    "set": "it is options(...), which returns a new call",
    "set_immutable": "task.si(...) makes a call that takes no result",
    "starmap": "it is a method of the task, and enqueues a job for each item",
    "then": "it is link(...)",
    "unchain_tasks": "chain.steps has its steps",
}

_APP = {
    "AsyncResult": "it is app.job(id)",
    "GroupResult": "it is app.workflow(id)",
    "add_periodic_task": "it is @app.periodic(...) above @app.task(...), or app.schedules.set(...)",
    "autodiscover_tasks": "App(include=[...]) names the modules with tasks",
    "conf": "options are those of App(...), and defaults=... has those of its tasks",
    "config_from_object": "options are those of App(...), and defaults=... has those of its tasks",
    "control": "job.cancel() and app.workflow(id).cancel() are here, and the rest are commands: penstock --help",
    "on_after_configure": "schedules are declared by @app.periodic(...) above @app.task(...)",
    "purge": "it is a command: penstock purge QUEUE",
    "register_task": "it is app.task(function), or app.add(task) for one of @shared_task",
    "send_task": "it is app.send(name, ...)",
    "signature": "it is app.remote_task(name).s(...)",
    "start": "it is a command: penstock worker MODULE:APP",
    "worker_main": "it is a command: penstock worker MODULE:APP",
}

_OF = {"Sender": _TASK, "Job": _RESULT, "Workflow": _WORKFLOW, "Partial": _STEP, "App": _APP}


class Habit:
    """Missing attribute whose ``AttributeError`` names the equivalent.

    A ``__getattr__`` could do the same, but slows down every attribute lookup of its class: it cost each job 0.9 of 4.3
    µs in the process that runs it.
    """

    __slots__ = ("_hint", "_name")

    def __init__(self, name: str, hint: str) -> None:
        self._name = name
        self._hint = hint

    def __get__(self, of: object, owner: type) -> Habit:
        """Raise ``AttributeError`` for an instance; return the descriptor itself for the class."""
        if of is None:
            return self
        text = f"{owner.__name__!r} object has no attribute {self._name!r}: {self._hint}"
        raise AttributeError(text, name=self._name, obj=of)


def answer_habits(kind: type) -> None:
    """Make a class point users of Celery and RQ method names to its own. ``dir()`` does not list those names."""
    names = _OF[kind.__name__]
    for name, hint in names.items():
        if not hasattr(kind, name):
            setattr(kind, name, Habit(name, hint))

    def listed(self: object) -> list[str]:
        of = type(self)
        return [name for name in object.__dir__(self) if not isinstance(getattr_static(of, name, None), Habit)]

    kind.__dir__ = listed  # type: ignore[assignment]
