"""Outcomes of attempts in a worker, and what the caller learns of them."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime as dt
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

import penstock
from penstock import App, CurrentJob, JobState, Retry, TaskError, UnknownTask, current_job
from penstock._jobs.current import Extras
from penstock._worker import runner
from penstock.errors import NotOffered, PayloadTooLarge, RemoteTraceback
from penstock.testing import inline


class Refused(Exception):
    """Passes on fewer arguments than it received, like many exceptions."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
        self.response = object()


class Coded(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd(Exception):
    __module__ = "\ud800"


class Attempts:
    """Runs a task like a worker, attempt after attempt, and keeps each outcome."""

    made: ClassVar[list[Attempts]] = []

    def __init__(self, function: Any, **options: Any) -> None:
        self.app = App("shop", max_payload_bytes=100_000)
        self.task = self.app.task(name="shop.send", **options)(function)
        self.runner = runner.Runner([self.app], "worker-1")
        self.notes: list[bytes] = []
        self.made.append(self)

    def run(
        self,
        *args: Any,
        wants_result: bool = True,
        crashes: int = 0,
        extras: Extras | None = None,
    ) -> runner.Outcome:
        return self.run_encoded(
            self.task.arguments.encode(args, {}), wants_result=wants_result, crashes=crashes, extras=extras
        )

    def run_encoded(
        self,
        body: bytes = b"\x92\x90\x80",
        *,
        task: str = "shop.send",
        attempt: int | None = None,
        wants_result: bool = True,
        crashes: int = 0,
        extras: Extras | None = None,
    ) -> runner.Outcome:
        if attempt is None:
            attempt = len(self.notes)
        outcome = self.runner.run(
            (task, b"i" * 16, attempt, crashes, crashes > 0, wants_result, 1_000, body, self.notes, extras)
        )
        if outcome[0] == runner.RETRY:
            assert outcome[3] is not None
            self.notes.append(outcome[3])
        return outcome

    def ended(self, outcome: runner.Outcome, generation: int | None = None) -> penstock.Job[Any]:
        """Return the job as its caller sees it after this outcome. ``generation``: given by a broker that knows the
        run."""
        kind, _, value, _, _ = outcome
        assert kind in (runner.SUCCEEDED, runner.FAILED)
        status = 0 if kind == runner.SUCCEEDED else 1
        run = None if generation is None else ("shop.send", "mail", 0, generation, 9_000)

        class Connection:
            def peek(self, job_id: bytes, timeout_s: float) -> object:
                return status, value, run

            def wait(self, job_id: bytes, timeout_s: float | None) -> object:
                return status, value

            def message_info(self, job_id: bytes, timeout_s: float) -> None:
                return None

        vars(self.app)["_connected"] = Connection
        return self.app.job("69" * 16)


def test_a_job_that_ends_while_its_info_is_asked_for_is_not_unknown():
    """Such a job used to be unknown: its message was gone by the first query, and its result not there yet at the
    second."""
    attempts = Attempts(lambda: 7)
    ended = attempts.ended(attempts.run())
    kept = attempts.app._connected()

    class Connection:
        def __init__(self) -> None:
            self.answers = [None, kept.peek(b"", 5)]

        def peek(self, job_id: bytes, timeout_s: float) -> object:
            return self.answers.pop(0)

        def message_info(self, job_id: bytes, timeout_s: float) -> None:
            return None

        async def peek_async(self, job_id: bytes, timeout_s: float) -> object:
            return self.answers.pop(0)

        async def message_info_async(self, job_id: bytes, timeout_s: float) -> None:
            return None

    vars(attempts.app)["_connected"] = Connection
    for info in (ended.info(), asyncio.run(ended.ainfo())):
        assert (info.state, info.task) == (JobState.SUCCEEDED, "shop.send")


@pytest.fixture(autouse=True)
def close_event_loops() -> Iterator[None]:
    yield
    while Attempts.made:
        Attempts.made.pop().runner.close()


def raise_(error: BaseException) -> Any:
    raise error


def test_a_result_arrives():
    attempts = Attempts(lambda a, b: {a: (b,)})
    job = attempts.ended(attempts.run("x", 2**70))
    assert job.result() == {"x": (2**70,)}
    info = job.info()
    assert info.state is JobState.SUCCEEDED
    assert (info.task, info.worker, info.attempts, info.crashes) == ("shop.send", "worker-1", 1, 0)
    assert info.enqueued_at == dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
    assert info.started_at is not None
    assert info.finished_at is not None
    assert info.started_at <= info.finished_at <= dt.datetime.now(dt.UTC)
    assert (info.errors, info.error, info.traceback) == ((), None, None)


def test_a_result_that_nobody_wants_is_not_encoded():
    attempts = Attempts(lambda: object())
    assert attempts.run(wants_result=False) == (runner.SUCCEEDED, 0, None, None, None)


def test_coroutines_run_in_one_loop_that_is_kept_between_jobs():
    loops = []

    async def send(number: int) -> int:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return number + 1

    attempts = Attempts(send)
    assert attempts.ended(attempts.run(1)).result() == 2
    assert attempts.ended(attempts.run(2)).result() == 3
    assert loops[0] is loops[1]
    attempts.runner.close()
    assert loops[0].is_closed()


async def _cancelled() -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("function", "type_name", "message"),
    [
        (lambda: 1 / 0, "ZeroDivisionError", "division by zero"),
        (lambda: sys.exit(3), "SystemExit", "3"),
        (lambda: raise_(KeyboardInterrupt()), "KeyboardInterrupt", ""),
        (lambda: raise_(GeneratorExit()), "GeneratorExit", ""),
        (lambda: raise_(MemoryError()), "MemoryError", ""),
        (lambda: raise_(Unprintable()), f"{__name__}.Unprintable", "<its str() raised RuntimeError>"),
        (lambda: raise_(ValueError("\ud800")), "ValueError", "\\ud800"),
        (lambda: raise_(Odd("x")), "\\ud800.Odd", "x"),
        (lambda: raise_(BaseExceptionGroup("g", [KeyboardInterrupt()])), "BaseExceptionGroup", "g (1 sub-exception)"),
        (_cancelled, "asyncio.exceptions.CancelledError", ""),
        (
            lambda: object(),
            "TypeError",
            "shop.send(): the result is an object: pass plain data instead, or add",
        ),
        (
            lambda: "x" * 100_000,
            "penstock.PayloadTooLarge",
            "shop.send(): the result takes 100,005 bytes, but 100,000",
        ),
    ],
)
def test_whatever_a_task_does_the_worker_goes_on(function, type_name, message, caplog):
    # pytest-xdist cannot carry a log that is not Unicode.
    caplog.set_level(logging.CRITICAL, "penstock.job")
    attempts = Attempts(function)
    job = attempts.ended(attempts.run())
    info = job.info()
    assert info.state is JobState.FAILED
    assert info.errors[0].type_name == type_name
    assert info.errors[0].message.startswith(message)
    with pytest.raises(BaseException) as caught:
        job.result()
    assert isinstance(caught.value, Exception)


def test_endless_recursion_fails_the_job_with_a_readable_traceback():
    def endless(n: int) -> int:
        return endless(n + 1)

    attempts = Attempts(endless)
    info = attempts.ended(attempts.run(0)).info()
    assert info.error is not None
    assert info.error.startswith("RecursionError: maximum recursion depth exceeded")
    assert info.traceback is not None
    assert "[Previous line repeated" in info.traceback


def test_arguments_of_another_version_fail_without_a_retry():
    attempts = Attempts(lambda: None, retries=5)
    outcome = attempts.run_encoded(b"\x92\x91\xc7\x00\x3f\x80")
    assert outcome[0] == runner.FAILED
    with pytest.raises(TypeError, match="do not fit this version of the task: it holds a value of an unknown kind"):
        attempts.ended(outcome).result()


def test_an_unknown_task_fails_with_close_matches():
    attempts = Attempts(lambda: None)
    outcome = attempts.run_encoded(task="shop.sent")
    with pytest.raises(UnknownTask, match=r"the app 'shop' has no task 'shop.sent'; did you mean shop.send\?"):
        attempts.ended(outcome).result()


class Hostile(Exception):
    """Raises something worse than an Exception from every method."""

    def __str__(self) -> str:
        raise SystemExit("str")

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt("reduce")


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class TestNothingGetsOut:
    @pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
    @pytest.mark.parametrize("fails", [False, True])
    def test_of_a_logging_filter_that_raises(self, fails, level, caplog, capsys):
        caplog.set_level(level, "penstock.job")

        def broken(record: logging.LogRecord) -> bool:
            raise RuntimeError("broken filter")

        attempts = Attempts(lambda: 1 / 0 if fails else 42, retries=1)
        logger = logging.getLogger("penstock.job")
        logger.addFilter(broken)
        try:
            outcomes = [attempts.run(), attempts.run()]
        finally:
            logger.removeFilter(broken)
        if fails:
            assert [kind for kind, *_ in outcomes] == [runner.RETRY, runner.FAILED]
            assert attempts.ended(outcomes[1]).info().error == "ZeroDivisionError: division by zero"
        else:
            assert [attempts.ended(outcome).result() for outcome in outcomes] == [42, 42]
        # Reported like a logging handler that raises, and only if there was a line to write.
        assert ("broken filter" in capsys.readouterr().err) == (fails or level == logging.INFO)

    def test_of_a_policy_that_cannot_decide(self, monkeypatch):
        def undecided(*arguments: object) -> int:
            raise RuntimeError("undecided")

        monkeypatch.setattr("penstock._tasks.retries.RetryPolicy.delay_ms", undecided)
        info = (attempts := Attempts(lambda: 1 / 0, retries=1)).ended(attempts.run()).info()
        assert info.error == "ZeroDivisionError: division by zero"
        assert "penstock could not decide whether to retry it: RuntimeError: undecided" in str(info.traceback)

    def test_of_an_error_that_cannot_be_looked_at(self):
        attempts = Attempts(lambda: raise_(Hostile()))
        info = attempts.ended(attempts.run()).info()
        assert info.error == f"{__name__}.Hostile: <its str() raised SystemExit>"
        attempts = Attempts(lambda: raise_(Nameless("Odd", (Exception,), {})()))
        info = attempts.ended(attempts.run()).info()
        assert info.error == "Odd: <it could not be recorded: RuntimeError: no name>"

    def test_of_a_codec_that_exits(self):
        attempts = Attempts(lambda value: None)
        attempts.app.codec(Refused, lambda refused: None, lambda state: sys.exit(3))
        info = attempts.ended(attempts.run(Refused(1, reason="x"))).info()
        assert info.error == "SystemExit: 3"


@pytest.mark.parametrize("module", ["_retry", "fail"])
def test_a_job_is_given_back_even_while_its_end_is_written_down(module, monkeypatch):
    attempts = Attempts(lambda: 1 / 0, retries=1 if module == "_retry" else 0)
    monkeypatch.setattr(runner, "record_of", lambda *args, **kwargs: raise_(runner.GiveBack()))
    assert attempts.run() == (runner.GIVEN_BACK, 0, None, None, None)


def test_a_signal_handler_can_give_the_job_back():
    attempts = Attempts(lambda: raise_(runner.GiveBack()), retries=3)
    assert attempts.run() == (runner.GIVEN_BACK, 0, None, None, None)


@dataclasses.dataclass
class Slip:
    number: int


def test_a_result_of_an_unknown_class_says_which_module_to_import():
    def send() -> Slip:
        return Slip(1)

    attempts = Attempts(send)
    job = attempts.ended(attempts.run())
    assert job.result() == Slip(1)
    del attempts.app.tasks["shop.send"]
    with pytest.raises(penstock.CannotDecode) as caught:
        job.result()
    assert isinstance(caught.value, penstock.PenstockError)
    assert str(caught.value) == (
        f"job {job.id}: the result of shop.send can't be read here: it holds a {__name__}.Slip, which the"
        " annotations do not name here; import the module that defines it. The job succeeded, and its result is kept"
    )


def test_a_result_that_its_codec_refuses_is_an_error_of_ours():
    attempts = Attempts(lambda: Refused(1, reason="x"))
    attempts.app.codec(Refused, lambda refused: None, lambda state: raise_(KeyError("code")))
    job = attempts.ended(attempts.run())
    with pytest.raises(penstock.CannotDecode, match=r"the app's codec for .*Refused raised KeyError: 'code'"):
        job.result()


class TestTheOriginalError:
    def result_of(self, error: BaseException) -> BaseException:
        attempts = Attempts(lambda: raise_(error))
        with pytest.raises(Exception) as caught:
            attempts.ended(attempts.run()).result()
        return caught.value

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("a", 1, (2,)),
            KeyError("k"),
            OSError(2, "gone", "file"),
            FileNotFoundError(2, "gone", "file"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
            StopIteration(3),
            PayloadTooLarge("x"),
            penstock.BrokerUnavailable("x", maybe_accepted=True),
            penstock.ClientClosed("x", maybe_accepted=True),
            penstock.InvalidConfiguration("x"),
            TaskError("a.B", "c"),
        ],
    )
    def test_arrives_as_its_own_type(self, error):
        arrived = self.result_of(error)
        assert type(arrived) is type(error)
        assert arrived.args == error.args
        assert str(arrived) == str(error)
        assert vars(arrived) == vars(error)

    def test_brings_its_attributes_as_far_as_they_travel(self):
        arrived = self.result_of(Refused(4, reason="no"))
        assert type(arrived) is Refused
        assert vars(arrived) == {"code": 4, "reason": "no"}
        assert str(arrived) == "4: no"
        assert vars(self.result_of(Coded(5))) == {"code": 5}

    def test_is_chained_from_the_remote_traceback(self):
        arrived = self.result_of(ValueError("x"))
        assert isinstance(arrived.__cause__, RemoteTraceback)
        lines = str(arrived.__cause__).strip().splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert "test_run.py" in lines[1]  # the frames of the machinery are left out
        assert lines[-1] == "ValueError: x"

    def test_keeps_its_notes(self):
        error = ValueError("x")
        error.add_note("while testing")
        assert self.result_of(error).__notes__ == ["while testing"]

    @pytest.mark.parametrize("error", [ValueError(object()), SystemExit(1), ValueError(b"x" * 70_000)])
    def test_is_a_task_error_where_it_cannot_be_rebuilt(self, error):
        arrived = self.result_of(error)
        assert isinstance(arrived, TaskError)
        assert arrived.type_name == type(error).__name__
        assert isinstance(arrived.__cause__, RemoteTraceback)

    def test_is_never_imported(self):
        module = "json.tool"
        sys.modules.pop(module, None)
        kind = type("Strange", (Exception,), {"__module__": module})
        arrived = self.result_of(kind("x"))
        assert (type(arrived), str(arrived)) == (TaskError, "json.tool.Strange: x")
        assert module not in sys.modules

    def test_must_be_an_exception_type(self):
        kind = type("ChainMap", (Exception,), {"__module__": "collections"})
        assert type(self.result_of(kind("x"))) is TaskError

    def test_a_huge_one_is_cut_to_size(self):
        def deep(n: int) -> None:
            try:
                raise ValueError("y" * 1000)
            except ValueError:
                if n:
                    deep(n - 1)
                raise

        attempts = Attempts(lambda: deep(50))
        outcome = attempts.run()
        assert outcome[3] is not None
        assert len(outcome[3]) < 25_000
        assert "characters left out" in str(attempts.ended(outcome).info().traceback)


class TestRetries:
    def test_wait_longer_each_time_up_to_the_cap_and_then_fail(self, caplog):
        attempts = Attempts(
            lambda: raise_(ValueError(f"attempt {len(attempts.notes)}")),
            retries=4, backoff=1, max_backoff=3, jitter=0,
        )  # fmt: skip
        outcomes = [attempts.run() for _ in range(5)]
        assert [kind for kind, *_ in outcomes] == [runner.RETRY] * 4 + [runner.FAILED]
        assert [delay_ms for _, delay_ms, *_ in outcomes] == [1000, 2000, 3000, 3000, 0]
        info = attempts.ended(outcomes[-1]).info()
        assert [error.message for error in info.errors] == [f"attempt {n}" for n in range(5)]
        assert [error.attempt for error in info.errors] == [1, 2, 3, 4, 5]
        assert info.attempts == 5
        assert info.error == "ValueError: attempt 4"
        levels = [(record.name, record.levelname, bool(record.exc_info)) for record in caplog.records]
        assert levels == [("penstock.job", "WARNING", False)] * 4 + [("penstock.job", "ERROR", True)]
        assert "(ValueError: attempt 0); retry 1 of 4 in 1.0 s" in caplog.messages[0]

    def test_jitter_takes_a_share_of_the_wait(self):
        attempts = Attempts(lambda: 1 / 0, retries=1000, backoff=10, backoff_factor=1, jitter=0.3)
        delays = [attempts.run()[1] for _ in range(300)]
        assert min(delays) >= 7_000
        assert max(delays) <= 10_000
        assert max(delays) - min(delays) > 2_000

    @pytest.mark.parametrize(("backoff", "delay_ms"), [(0, 0), (0.001, 600_000)])
    def test_however_many_and_however_steep_have_a_wait(self, backoff, delay_ms):
        attempts = Attempts(lambda: 1 / 0, retries=10_000, backoff=backoff, backoff_factor=1e200, jitter=0)
        assert attempts.run_encoded(attempt=5_000)[:2] == (runner.RETRY, delay_ms)

    @pytest.mark.parametrize(
        ("options", "error", "retried"),
        [
            ({}, ValueError(), True),
            ({}, SystemExit(), False),
            ({"retry_on": SystemExit}, SystemExit(), True),
            ({"retry_on": OSError}, ValueError(), False),
            ({"retry_on": (OSError, ValueError)}, ValueError(), True),
            ({"no_retry_on": ValueError}, UnicodeError(), False),
            ({"retry_on": OSError, "no_retry_on": [FileNotFoundError]}, FileNotFoundError(), False),
            ({"retry_on": OSError, "no_retry_on": [FileNotFoundError]}, PermissionError(), True),
            ({"no_retry_on": Exception}, Retry(), True),
        ],
    )
    def test_follow_the_errors_that_are_worth_it(self, options, error, retried):
        attempts = Attempts(lambda: raise_(error), retries=1, **options)
        assert attempts.run()[0] == (runner.RETRY if retried else runner.FAILED)

    def test_can_be_asked_for_with_a_time(self):
        attempts = Attempts(lambda: raise_(Retry(countdown=dt.timedelta(minutes=2))), retries=1)
        assert attempts.run()[:2] == (runner.RETRY, 120_000)
        with pytest.raises(Retry, match=r"no retries left: shop\.send has retries=1"):
            attempts.ended(attempts.run()).result()

    def test_are_said_to_be_used_up_where_nothing_else_is_said(self):
        attempts = Attempts(lambda: raise_(Retry(countdown=5)))
        outcome = attempts.run()
        assert attempts.ended(outcome).info().error == "penstock.Retry: no retries left: shop.send has retries=0"
        attempts = Attempts(lambda: raise_(Retry("the printer is busy")))
        error = attempts.ended(attempts.run()).info().error
        assert error == "penstock.Retry: no retries left: shop.send has retries=0 (the printer is busy)"

    def test_that_are_asked_for_from_none_hide_the_error_behind_them(self):
        def send() -> None:
            try:
                raise ValueError("hidden")
            except ValueError:
                raise Retry("asked") from None

        attempts = Attempts(send)
        assert "(asked)" in str(attempts.ended(attempts.run()).info().error)

    def test_take_a_delay_by_its_name_only(self):
        with pytest.raises(TypeError, match=r"must be a string, not 30; for a delay write Retry\(countdown=...\)"):
            Retry(30)  # type: ignore[arg-type]

    def test_that_are_asked_for_keep_the_error_behind_them(self):
        def send() -> None:
            try:
                raise ValueError("behind")
            except ValueError as error:
                raise Retry("asked", countdown=1) from error

        attempts = Attempts(send, retries=1)
        attempts.run()
        job = attempts.ended(attempts.run())
        assert [error.message for error in job.info().errors] == ["behind", "behind"]
        with pytest.raises(ValueError, match="behind"):
            job.result()

    def test_are_kept_after_a_success(self):
        def send() -> str:
            if not attempts.notes:
                raise ValueError("first")
            return "fine"

        attempts = Attempts(send, retries=1)
        attempts.run()
        info = attempts.ended(attempts.run(crashes=2)).info()
        assert info.state is JobState.SUCCEEDED
        assert (info.attempts, info.crashes) == (4, 2)
        assert [error.message for error in info.errors] == ["first"]

    def test_and_crashes_between_them_are_told_in_order(self):
        attempts = Attempts(lambda: 1 / 0, retries=1)
        attempts.notes.append(b"killed by signal 11 (SIGSEGV)")
        attempts.run_encoded(attempt=0, crashes=1)
        attempts.notes.append("tué".encode())
        outcome = attempts.run_encoded(attempt=1, crashes=2)
        info = attempts.ended(outcome).info()
        assert [(error.attempt, error.type_name, error.message) for error in info.errors] == [
            (1, "penstock.WorkerCrashed", "killed by signal 11 (SIGSEGV)"),
            (1, "ZeroDivisionError", "division by zero"),
            (2, "penstock.WorkerCrashed", "tué"),
            (2, "ZeroDivisionError", "division by zero"),
        ]
        assert (info.attempts, info.crashes) == (4, 2)

    def test_begin_anew_when_a_job_is_retried_that_had_failed_for_good(self, caplog):
        seen = []

        def send() -> None:
            job = current_job()
            assert job is not None
            seen.append((job.generation, job.attempt, job.retries_left))
            raise ValueError("again")

        attempts = Attempts(send, retries=2, backoff=1, jitter=0)
        outcomes = [attempts.run() for _ in range(3)]
        assert outcomes[2][0] == runner.FAILED
        attempts.notes.append(b"why it had failed")
        # As the broker counts: the failed attempt belongs to the earlier ones.
        extras = (1, 3, None, {}, (None, None), (None, None, None, None))
        again = [attempts.run_encoded(attempt=attempt, extras=extras) for attempt in (3, 4, 5)]
        assert [kind for kind, *_ in again] == [runner.RETRY, runner.RETRY, runner.FAILED]
        assert [delay_ms for _, delay_ms, *_ in again] == [1000, 2000, 0]
        assert seen == [(0, 1, 2), (0, 2, 1), (0, 3, 0), (1, 4, 2), (1, 5, 1), (1, 6, 0)]
        assert "retry 1 of 2 in 1.0 s" in caplog.messages[3]
        info = attempts.ended(again[-1], generation=1).info()
        assert (info.generation, info.queue, info.attempts) == (1, "mail", 6)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"retries": -1}, "retries must be an integer from 0, None for no limit, or a list of delays, not -1"),
            ({"retries": 1.5}, "retries must be an integer from 0"),
            ({"jitter": 2}, "jitter must be a number between 0 and 1, not 2"),
            ({"jitter": "half"}, "jitter must be a number between 0 and 1, not 'half'"),
            ({"backoff": "1"}, "backoff must be seconds or a timedelta, not '1'"),
            ({"backoff": dt.timedelta(seconds=-5)}, "backoff must be between 0 seconds and 100 years"),
            ({"max_backoff": dt.timedelta(seconds=-1)}, "max_backoff must be between 0 seconds and 100 years"),
            ({"backoff_factor": 0.5}, "backoff_factor must be a number of at least 1, not 0.5"),
            ({"backoff_factor": "2"}, "backoff_factor must be a number of at least 1, not '2'"),
            ({"retry_on": "ValueError"}, "retry_on must be an exception type or several, not 'ValueError'"),
            ({"retires": 1}, "@app.task got an unknown option 'retires'; did you mean 'retries'?"),
            ({"bind": True}, "@app.task got an unknown option 'bind'; current_job() describes the running job"),
            ({"max_deliveries": 3}, "@app.task got an unknown option 'max_deliveries'; use max_crashes"),
            (
                {"periodic": 3},
                "@app.task got an unknown option 'periodic'; use @app.periodic(...) above @app.task(...)",
            ),
            ({"acks_late": True}, "@app.task got an unknown option 'acks_late'; always on"),
            (
                {"schedule": 5},
                "@app.task got an unknown option 'schedule'; use @app.periodic(...) above @app.task(...)",
            ),
            ({"on_crash": "ignore"}, 'on_crash must be "retry" or "fail", not \'ignore\''),
        ],
    )
    def test_options_that_make_no_sense_are_refused_where_they_stand(self, options, says):
        with pytest.raises((ValueError, TypeError, NotOffered)) as caught:
            Attempts(lambda: None, **options)
        assert says in str(caught.value)


class TestInsideATask:
    def test_the_current_job_is_known(self):
        seen: list[CurrentJob | None] = []
        attempts = Attempts(lambda: seen.append(current_job()), retries=2)
        attempts.notes = [b"", b""]
        attempts.run(crashes=1)
        text = "69696969-6969-6969-6969-696969696969"
        assert seen == [
            CurrentJob(text, "shop.send", attempt=3, crashes=1, redelivered=True, retries_left=0, worker="worker-1")
        ]
        assert current_job() is None

    def test_and_in_its_coroutines(self):
        async def send() -> int:
            job = await asyncio.create_task(_current())
            assert job is not None
            return job.attempt

        async def _current() -> CurrentJob | None:
            return current_job()

        attempts = Attempts(send)
        assert attempts.ended(attempts.run()).result() == 1

    def test_context_variables_do_not_leak_into_the_next_job(self):
        variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

        def send() -> int:
            before = variable.get()
            variable.set(1)
            return before

        attempts = Attempts(send)
        assert [attempts.ended(attempts.run()).result() for _ in range(2)] == [0, 0]


class TestWhatAFailedJobIsListedBy:
    """Type and first line of the error, and a fingerprint."""

    @pytest.fixture(autouse=True)
    def no_log(self, caplog: pytest.LogCaptureFixture) -> None:
        # pytest-xdist cannot carry a log that is not Unicode.
        caplog.set_level(logging.CRITICAL, "penstock.job")

    def listing(self, function: Any) -> tuple[str, str, int]:
        outcome = Attempts(function).run()
        assert outcome[0] == runner.FAILED
        assert outcome[4] is not None
        return outcome[4]

    def test_names_the_type_as_people_know_it_and_the_first_line(self):
        def listed(error: BaseException) -> tuple[str, str]:
            return self.listing(lambda: raise_(error))[:2]

        assert listed(ValueError("one\ntwo")) == ("ValueError", "one")
        assert listed(Refused(4, reason="no")) == (f"{__name__}.Refused", "4: no")
        assert listed(ValueError("\n\n  the second\n")) == ("ValueError", "the second")
        assert listed(KeyboardInterrupt()) == ("KeyboardInterrupt", "")
        assert listed(Unprintable()) == (f"{__name__}.Unprintable", "<its str() raised RuntimeError>")
        assert listed(ValueError("\ud800")) == ("ValueError", "\\ud800")
        assert listed(Odd("x")) == ("\\ud800.Odd", "x")

    def test_is_cut_to_two_hundred_bytes_between_two_characters(self):
        kind = type("N" * 300, (Exception,), {"__module__": "shop"})
        name, message, *_ = self.listing(lambda: raise_(kind("é" * 300)))
        assert name == "shop." + "N" * 195
        assert message == "é" * 100
        _, message, *_ = self.listing(lambda: raise_(ValueError("x" + "é" * 300)))
        assert message == "x" + "é" * 99

    def test_is_one_for_all_that_one_function_raises_of_a_type(self):
        def pay(amount: int) -> None:
            if amount < 0:
                raise ValueError(f"{amount} is negative")
            raise ValueError(f"{amount} is too much")

        prints = {self.listing(lambda amount=amount: pay(amount))[2] for amount in (-1, -2, 3)}
        assert len(prints) == 1

    def test_differs_by_type_and_by_function(self):
        def one(kind: type[Exception]) -> None:
            raise kind("x")

        def other(kind: type[Exception]) -> None:
            raise kind("x")

        prints = [
            self.listing(lambda: one(ValueError))[2],
            self.listing(lambda: one(KeyError))[2],
            self.listing(lambda: other(ValueError))[2],
            self.listing(lambda: raise_(ValueError("x")))[2],
        ]
        assert len(set(prints)) == 4

    def test_looks_past_python_and_what_is_installed_for_the_users_own_function(self):
        def send(text: str) -> object:
            return json.loads(text)

        def parse(text: str) -> object:
            raise json.JSONDecodeError("odd", text, 0)

        # The same type, raised in Python's own module for `send`.
        raised_within, raised_here = self.listing(lambda: send("{"))[2], self.listing(lambda: parse("{"))[2]
        assert raised_within == fingerprint("json.decoder.JSONDecodeError", __name__, send.__qualname__)
        assert raised_here == fingerprint("json.decoder.JSONDecodeError", __name__, parse.__qualname__)

        installed = compile("def call(function): raise OSError('x')", "/env/lib/site-packages/odd.py", "exec")
        names: dict[str, Any] = {"__name__": "odd"}
        exec(installed, names)

        def through() -> None:
            names["call"](None)

        assert self.listing(through)[2] == fingerprint("OSError", __name__, through.__qualname__)

    def test_is_the_same_in_a_comprehension_whichever_python_runs_it(self):
        def ratios() -> list[float]:
            return [1 / number for number in (1, 0)]

        assert self.listing(ratios)[2] == fingerprint("ZeroDivisionError", __name__, ratios.__qualname__)

    def test_has_no_function_where_nothing_of_the_user_ran(self):
        outcome = Attempts(lambda: None).run_encoded(task="shop.sent")
        assert outcome[4] is not None
        name, message, print_, preview = outcome[4]
        assert name == "penstock.UnknownTask"
        assert message.startswith("the app 'shop' has no task 'shop.sent'")
        assert print_ == fingerprint("penstock.UnknownTask", "", "")
        assert preview == b"", "no task, no signature"

    def test_is_that_of_the_error_behind_a_retry_that_was_asked_for(self):
        def send() -> None:
            try:
                raise ValueError("behind")
            except ValueError as error:
                raise Retry("asked") from error

        name, message, *_ = self.listing(send)
        assert (name, message) == ("ValueError", "behind")

    def test_is_given_for_no_other_end(self):
        attempts = Attempts(lambda number: 1 / number, retries=1)
        assert attempts.run(1)[4] is None
        assert attempts.run(0)[4] is None
        assert attempts.run(0)[4] is not None


def fingerprint(type_name: str, module: str, function: str) -> int:
    text = "\0".join((type_name, module, function)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def test_success_is_logged_at_info_only(caplog):
    attempts = Attempts(lambda: None)
    attempts.run()
    assert caplog.records == []
    with caplog.at_level(logging.INFO, "penstock.job"):
        attempts.run()
    assert caplog.messages[0].startswith("shop.send 69696969-6969-6969-6969-696969696969 succeeded in ")


@dataclasses.dataclass
class Receipt:
    number: int


def test_jobs_run_inline_for_tests_of_applications():
    app = App("shop")

    @app.task(name="shop.pay", retries=2, queue="money")
    def pay(amount: int) -> Receipt:
        job = current_job()
        if job is None or job.attempt < 2:
            raise ValueError("not yet")
        return Receipt(amount)

    with inline(app) as calls:
        job = pay.delay(3)
        assert job.result() == Receipt(3)
        assert job.info().state is JobState.SUCCEEDED
        assert len(job.info().errors) == 1
        assert [each.result() for each in app.enqueue([pay.s(1), pay.si(2)])] == [Receipt(1), Receipt(2)]
        assert [each.result() for each in pay.map([4])] == [Receipt(4)]

        async def main() -> Receipt:
            return await (await pay.adelay(amount=5))

        assert asyncio.run(main()) == Receipt(5)
        with pytest.raises(TypeError):
            pay.delay("3")  # type: ignore[arg-type]
    assert [(call.task, call.args, call.kwargs, call.queue) for call in calls] == [
        ("shop.pay", (3,), {}, "money"),
        ("shop.pay", (1,), {}, "money"),
        ("shop.pay", (2,), {}, "money"),
        ("shop.pay", (4,), {}, "money"),
        ("shop.pay", (), {"amount": 5}, "money"),
    ]


def test_what_a_process_calls_itself_is_found_again(monkeypatch):
    """Enqueued by ``python shop.py``, run by ``penstock worker shop:app``: one name for both."""
    main = type(sys)("__main__")
    main.__file__ = os.path.join("/srv", "shop.py")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def send(receipt): ...

    kind = dataclasses.make_dataclass("Paid", [("number", int)])
    kind.__module__ = send.__module__ = "__main__"
    send.__qualname__ = "send"
    send.__annotations__ = {"receipt": kind}
    here = App("shop").task(send)
    assert here.name == "shop.send"
    kind.__module__ = "shop"
    there = App("shop").task(name="there")(send)
    assert there.arguments.decode(here.arguments.encode((kind(1),), {}))[0] == [kind(1)]
