"""Arguments of failed jobs are shown to people without their secrets, and appear nowhere else."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, NewType

import msgspec
import pydantic
import pytest
from project import Project, eventually

from penstock import App, JobState, Secret
from penstock._values.preview import LONGEST_BYTES, preview_of

PLANTED = "Tr0ub4dor"
app = App("shop")
Code = NewType("Code", Secret[str])  # type: ignore[valid-newtype]


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Account:
    user: str
    pin: Secret[int]
    passwords: list[str]

    def __repr__(self) -> str:
        return f"Account({self.passwords})"


class Login(pydantic.BaseModel):
    user: str
    code: pydantic.SecretStr


class Card(msgspec.Struct):
    number: Secret[str] | None
    name: str


def preview(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    app = App("shop")
    app.codec(pydantic.SecretStr, pydantic.SecretStr.get_secret_value, pydantic.SecretStr)
    task = app.task(function)
    return preview_of(task.arguments, task.arguments.encode(args, kwargs)).decode()


def test_arguments_are_written_as_they_were_given() -> None:
    def task(a: object = None, b: object = None, *rest: object, c: object = None, **more: object) -> None: ...

    assert preview(task) == ""
    assert preview(task, 1, "x", True, c=None, d=1.5) == "a=1, b='x', rest[0]=True, c=None, d=1.5"
    assert preview(task, [1, (2,), {3}], {"k": b"1234"}) == "a=[1, (2,), {3}], b={'k': <4 bytes>}"
    assert preview(task, collections.deque([1])) == "a=[1]"
    assert preview(task, decimal.Decimal("1.50"), uuid.UUID(int=7)) == f"a=1.50, b={uuid.UUID(int=7)}"
    assert preview(task, datetime.date(2026, 1, 31)) == "a=2026-01-31"
    assert preview(task, -(10**5000)) == "a=<int of 16610 bits>"


def test_values_of_classes_are_written_field_by_field() -> None:
    def task(color: Color, point: Point, account: Account, login: Login, card: Card) -> None: ...

    given = (
        Color.RED,
        Point(1, 2),
        Account("ada", 1234, [PLANTED]),
        Login(user="ada", code=pydantic.SecretStr(PLANTED)),
        Card(PLANTED, "Ada"),
    )
    assert preview(task, *given) == (
        "color=Color.RED, point=Point(x=1, y=2), account=Account(user='ada', pin=***, passwords=***), "
        "login=Login(user='ada', code=***), card=Card(number=***, name='Ada')"
    )


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "PASSWORD",
        "db_passwd",
        "client_secret",
        "token",
        "refreshToken",
        "api_key",
        "apikey",
        "authorization",
    ],
)
def test_a_name_may_tell_that_it_is_a_secret(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def task(user: str, {name}: str) -> None: ...", namespace)
    assert preview(namespace["task"], "ada", PLANTED) == f"user='ada', {name}=***"

    def nested(config: dict[str, object], **more: str) -> None: ...

    assert preview(nested, {"a": [{name: PLANTED}]}) == f"config={{'a': [{{'{name}': ***}}]}}"
    assert preview(nested, {}, **{name: PLANTED}) == f"config={{}}, {name}=***"


def test_an_annotation_may_tell_that_it_is_a_secret() -> None:
    def task(
        one: Secret[str],
        two: Secret[str] | None,
        three: list[Secret[int]],
        four: pydantic.SecretStr,
        five: Code,
        *six: Secret[str],
        **seven: Secret[str],
    ) -> None: ...

    given = (PLANTED, PLANTED, [1], pydantic.SecretStr(PLANTED), PLANTED, PLANTED)
    assert preview(task, *given, more=PLANTED) == (
        "one=***, two=***, three=***, four=***, five=***, six[0]=***, more=***"
    )


def test_a_preview_is_cut_between_letters() -> None:
    def task(a: object, password: str) -> None: ...

    for text in ("ü" * 2000, "x" * 5_000_000, [10**70] * 1000, {"k" * 2000: 1}):
        written = preview(task, text, PLANTED).encode()
        assert len(written) <= LONGEST_BYTES
        assert PLANTED.encode() not in written
    long = preview(task, "x" * 1020, PLANTED)
    assert len(long.encode()) == LONGEST_BYTES and long.endswith("…")
    deep: list[Any] = []
    for _ in range(50):
        deep = [deep]
    assert preview(task, deep, PLANTED) == "a=[[[[[[…]]]]]], password=***"


def test_an_argument_of_the_wrong_type_is_not_repeated_when_it_is_a_secret() -> None:
    @app.task
    def log_in(user: str, password: str, code: Secret[str]) -> None: ...

    for kwargs in ({"password": PLANTED.encode()}, {"code": [PLANTED]}):
        with pytest.raises(TypeError) as wrong:
            log_in.arguments.encode(("ada",), {"password": "", "code": "", **kwargs})
        assert PLANTED not in str(wrong.value) and "must be" in str(wrong.value)
    with pytest.raises(TypeError, match=r"user must be str, not bytes b'ada'"):
        log_in.arguments.encode((b"ada", "", ""), {})


TASKS = """
    import os
    import signal
    from dataclasses import dataclass

    from penstock import App, Secret

    app = App("shop")


    @dataclass
    class Login:
        user: str
        password: str


    @app.task
    def sign(user: str, code: Secret[str], login: Login, options: dict[str, str]) -> None:
        # Values that the task derives from its arguments aren't shown either.
        options["note"] = code
        try:
            {}[login.password]
        except KeyError as error:
            raise ValueError(f"{user} can't sign with {code}\\n{options}") from error


    @app.task(on_crash="fail")
    def die(user: str, unmarked: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


    @app.task
    def work(user: str, unmarked: str) -> str:
        return unmarked
"""


def test_a_planted_secret_is_nowhere_in_the_output_of_commands_and_logs(project: Project) -> None:
    project.write("tasks.py", TASKS)
    tasks = project.tasks()
    # This process imported the module separately, so its classes differ from those of the worker's `tasks`.
    signed = tasks.sign.delay("ada", PLANTED, tasks.Login("ada", PLANTED), {"api_key": PLANTED})
    died, worked = tasks.die.delay("ada", PLANTED), tasks.work.delay("ada", PLANTED)
    waiting = tasks.work.options(queue="nobody").delay("ada", PLANTED)
    worker = project.worker("tasks:app", "-c", "2", "-v", "--log-format", "json")
    eventually(
        lambda: (
            (signed.info().state, died.info().state, worked.info().state)
            == (JobState.FAILED, JobState.CRASHED, JobState.SUCCEEDED)
        )
    )
    outputs = [worker.output, (project.data / "broker.log").read_text()]
    commands = [
        ["status"],
        ["queue", "ls"],
        ["workers", "ls"],
        ["failed", "ls"],
        ["failed", "ls", "--group"],
        *(["failed", "show", job.id] for job in (signed, died)),
        *(["job", "show", job.id] for job in (signed, died, worked, waiting)),
        ["failed", "retry", "--all"],
        ["failed", "rm", "--task", "tasks.die"],
        ["purge", "nobody"],
    ]
    for command in commands:
        outputs += [project.penstock(*command).output, project.penstock(*command, "--json").output]
    for output in outputs:
        assert PLANTED not in output
    (shown,) = json.loads(project.penstock("failed", "ls", "--task", "tasks.sign", "--json").output)
    assert shown["arguments"] == (
        "user='ada', code=***, login=Login(user='ada', password=***), options={'api_key': ***}"
    )
    (unseen,) = json.loads(project.penstock("failed", "ls", "--task", "tasks.die", "--json").output)
    assert unseen["arguments"] is None and unseen["argument_bytes"] > len(PLANTED)
    assert "user='ada', code=***" in project.penstock("failed", "show", signed.id).output
