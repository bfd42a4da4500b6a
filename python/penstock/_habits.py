"""Names of Celery and RQ methods with their equivalents here, for users who migrate."""

from __future__ import annotations

from inspect import getattr_static

_TASK = {
    "AsyncResult": "use task.job(id)",
    "add_to_chord": 'use current_job().spawn(step, into="group")',
    "apply": "task(...) calls it directly; in tests, penstock.testing.inline() runs its jobs",
    "apply_async": "use task.options(countdown=...).delay(...)",
    "chunks": "use penstock.chunks(task, calls, n)",
    "enqueue": "use delay(...)",
    "replace": "in the task, return app.replace(step)",
    "request": "current_job() describes the running job",
    "retry": "raise Retry(countdown=...) in the task asks for another attempt",
    "run": "task(...) calls it directly",
    "send": "use delay(...)",
    "send_with_options": "use task.options(countdown=...).delay(...)",
    "signature": "use task.s(...)",
    "subtask": "use task.s(...)",
    "update_state": "use current_job().progress(done, total, message)",
}

_RESULT = {
    "collect": "result() returns the results of a group, too",
    "failed": "info().state is how a job ended",
    "fetch": "info() asks for all details",
    "forget": "a result is gone after its result_ttl",
    "get": "use result(timeout=...)",
    "get_status": "use info().state",
    "is_failed": "info().state is how a job ended",
    "is_finished": "use done()",
    "ready": "use done()",
    "refresh": "info() asks for all details",
    "return_value": "use result()",
    "revoke": "use cancel(...)",
    "state": "info().state asks for it",
    "status": "info().state asks for it",
    "successful": "info().state is how a job ended",
    "then": "task.s(...).link(step) runs a step after it",
    "traceback": "info().errors has one for each attempt",
}

_WORKFLOW = {
    "completed_count": "partial() counts successes and failures",
    "children": "iterate over it for its jobs",
    "failed": "state() is how it ended",
    "forget": "results are gone after their result_ttl",
    "get": "use result(timeout=...)",
    "info": "status() reports its progress",
    "iterate": "use as_completed()",
    "join": "use result(), or results() for a group with failures",
    "join_native": "use result(), or results() for a group with failures",
    "ready": "use done()",
    "restore": "use app.workflow(id)",
    "revoke": "use cancel(...)",
    "save": "nothing has to be saved; use app.workflow(id)",
    "successful": "state() is how it ended",
    "waiting": "use done()",
}

_STEP = {
    "apply": "delay() sends it; in tests, penstock.testing.inline() runs its jobs",
    "apply_async": "delay() sends it; set options on its calls: task.s(...).options(countdown=...)",
    "clone": "steps are immutable, so use it as often as you like",
    "get": "delay() sends it, and returns a handle with result()",
    "map": "use the method of the task, which enqueues a job for each item",
    "on_error": "use link_error(...)",
    "replace": "in a task, return app.replace(step)",
    "set": "use options(...), which returns a new call",
    "set_immutable": "task.si(...) makes a call that takes no result",
    "starmap": "use the method of the task, which enqueues a job for each item",
    "then": "use link(...)",
    "unchain_tasks": "use chain.steps",
}

_APP = {
    "AsyncResult": "use app.job(id)",
    "GroupResult": "use app.workflow(id)",
    "add_periodic_task": "use @app.periodic(...) above @app.task(...), or app.schedules.set(...)",
    "autodiscover_tasks": "App(include=[...]) names the modules with tasks",
    "conf": "use options of App(...), and its defaults=... for its tasks",
    "config_from_object": "use options of App(...), and its defaults=... for its tasks",
    "control": "use job.cancel(), app.workflow(id).cancel(), or a command: penstock --help",
    "on_after_configure": "declare schedules with @app.periodic(...) above @app.task(...)",
    "purge": "use the command: penstock purge QUEUE",
    "register_task": "use app.task(function), or app.add(task) for one of @shared_task",
    "send_task": "use app.send(name, ...)",
    "signature": "use app.remote_task(name).s(...)",
    "start": "use the command: penstock worker MODULE:APP",
    "worker_main": "use the command: penstock worker MODULE:APP",
}

_BY_CLASS = {"Sender": _TASK, "Job": _RESULT, "Workflow": _WORKFLOW, "Partial": _STEP, "App": _APP}


class Habit:
    """Missing attribute whose ``AttributeError`` names the equivalent.

    A ``__getattr__`` could do the same, but slows down every attribute lookup of its class: it cost each job 0.9 of 4.3
    µs in the process that runs it.
    """

    __slots__ = ("_hint", "_name")

    def __init__(self, name: str, hint: str) -> None:
        self._name = name
        self._hint = hint

    def __get__(self, instance: object, owner: type) -> Habit:
        """Raise ``AttributeError`` for an instance; return the descriptor itself for the class."""
        if instance is None:
            return self
        text = f"{owner.__name__!r} object has no attribute {self._name!r}: {self._hint}"
        raise AttributeError(text, name=self._name, obj=instance)


def answer_habits(kind: type) -> None:
    """Make a class point users of Celery and RQ method names to its own. ``dir()`` does not list those names."""
    names = _BY_CLASS[kind.__name__]
    for name, hint in names.items():
        if not hasattr(kind, name):
            setattr(kind, name, Habit(name, hint))

    def listed(self: object) -> list[str]:
        cls = type(self)
        return [name for name in object.__dir__(self) if not isinstance(getattr_static(cls, name, None), Habit)]

    kind.__dir__ = listed  # type: ignore[assignment]
