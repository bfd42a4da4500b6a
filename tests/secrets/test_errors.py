"""Values of secret arguments are masked in errors too, in every form that an error is likely to show."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import pytest

from penstock import App, Secret
from penstock._values.envelope import decode_error, decode_failure
from penstock._values.remote_errors import rebuild
from penstock._worker.runner import Delivered, Runner

PLANTED = "Tr0ub4dor & 'Söhne'"
KEY = "-----BEGIN KEY-----\nMC4CAQAwBQ\nYDK2VwBCIE\n-----END KEY-----\n"


class Refused(Exception):
    def __init__(self, user: str, code: str) -> None:
        super().__init__(user, code)
        self.code = code


@dataclasses.dataclass
class Login:
    user: str
    password: str

    def __str__(self) -> str:
        return f"{self.user}:{self.password}"


class Unseen:
    """Has a codec, and no field whose name suggests a secret."""

    def __init__(self, word: str) -> None:
        self.word = word


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Collect everything that a worker's processes log, formatted."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logger = logging.getLogger("penstock.job")
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)


def attempt(number: int, body: bytes) -> Delivered:
    return "shop.send", bytes(16), number, 0, False, True, 0, body, [], None


class Failed:
    """Runs a task that raises, and holds everything that is kept about it."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        app = App("shop")
        app.codec(pydantic.SecretStr, pydantic.SecretStr.get_secret_value, pydantic.SecretStr)
        app.codec(Unseen, lambda unseen: unseen.word, Unseen)
        task = app.task(name="shop.send", retries=1, backoff=0)(function)
        runner, body = Runner([app], "worker-1"), task.arguments.encode(args, kwargs)
        _, _, _, retried, _ = runner.run(attempt(0, body))
        _, _, value, note, listing = runner.run(attempt(1, body))
        assert retried is not None and value is not None and note is not None and listing is not None
        self.record = decode_error(decode_failure(value).notes[-1])
        self.error = rebuild(self.record, app._plain_codec)
        self.stored = [retried, value, note, *map(str.encode, listing[:2]), listing[3]]

    def has(self, text: str) -> bool:
        return any(text.encode() in stored for stored in self.stored)


def test_no_form_of_a_secret_is_stored_or_logged(log: io.StringIO) -> None:
    def send(user: str, code: Secret[str]) -> None:
        try:
            try:
                raise KeyError(code)
            except KeyError as error:
                error.add_note(f"in {[code]!r}")
                raise ConnectionError(f"https://bank/?code={urllib.parse.quote_plus(code)}") from error
        except ConnectionError:
            raise Refused(user, f"{code}, {json.dumps({'code': code})}, {code.encode()!r}, and twice {code}") from None

    def chained(user: str, code: Secret[str]) -> None:
        try:
            send(user, code)
        except Refused as error:
            raise RuntimeError(urllib.parse.quote(code)) from error

    for task in (send, chained):
        failed = Failed(task, "ada", PLANTED)
        for form in ("Tr0ub4dor", "Söhne", "S%C3%B6hne", r"S\xc3\xb6hne", r"S\u00f6hne"):
            assert not failed.has(form), form
            assert form not in log.getvalue(), log.getvalue()
        assert failed.has("ada") and "Traceback" in log.getvalue() and "retry 1 of 1" in log.getvalue()
        assert "***" in failed.record.message and "test_errors.py" in failed.record.traceback


def test_an_error_without_its_secret_is_still_of_its_type() -> None:
    def send(user: str, token: str, amount: int) -> None:
        raise Refused(user, token)

    error = Failed(send, "ada", PLANTED, 7).error
    assert isinstance(error, Refused)
    assert error.args == ("ada", "***") and error.code == "***"


def test_secrets_are_found_wherever_arguments_have_them() -> None:
    def raised(*parts: object) -> None:
        raise ValueError("; ".join(map(str, parts)))

    def by_annotation(a: Secret[str], b: pydantic.SecretStr, *c: Secret[str]) -> None:
        raised(a, b.get_secret_value(), *c)

    def by_name(api_key: str, **more: str) -> None:
        raised(api_key, *more.values())

    def by_key(config: dict[str, Any]) -> None:
        raised(config["a"][0]["X-Api-Key"])

    def by_field(login: Login) -> None:
        raised(login)

    def inside(tokens: list[tuple[str, ...]], secret: dict[str, str], password: Login) -> None:
        raised(tokens[0][1], secret["k"], password.user)

    def numbers(pin: Secret[int], other: Secret[bytes], unseen: Secret[Unseen]) -> None:
        raised(pin, other, unseen.word)

    word, more = "correct-horse", "battery-staple"
    calls: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any], str]] = [
        (by_annotation, (word, pydantic.SecretStr(more), word), {}, "***; ***; ***"),
        (by_name, (word,), {"refresh_token": more, "user": "ada"}, "***; ***; ada"),
        (by_key, ({"a": [{"X-Api-Key": word}]},), {}, "***"),
        (by_field, (Login("ada", word),), {}, "ada:***"),
        (inside, ([("ada", word)], {"k": more}, Login(word, more)), {}, "***; ***; ***"),
        (numbers, (90210, b"\xff-battery", Unseen(word)), {}, "***; b'***'; ***"),
    ]
    for task, args, kwargs, message in calls:
        assert Failed(task, *args, **kwargs).record.message == message, task.__name__


def test_a_line_of_a_longer_secret_is_masked_and_a_cut_leaves_no_half() -> None:
    def parse(private_key_secret: str, token: str) -> None:
        line = private_key_secret.splitlines()[1]
        raise ValueError(f"{'x' * 2_040}{token}{'y' * 3_000}: can't read {line}")

    failed = Failed(parse, KEY, "abcdefghijklmnop")
    assert not failed.has("MC4CAQAwBQ") and not failed.has("abcdefgh")


def test_short_values_and_keys_are_left_and_what_is_not_there_costs_no_traceback(log: io.StringIO) -> None:
    def send(user: str, token: str, secret: dict[str, None], password: range) -> None:
        raise ValueError(f"{user} has {token}, {list(secret)}")

    failed = Failed(send, "ada", "abc", {"tokens-of-north": None}, range(10**12))
    assert failed.record.message == "ada has abc, ['tokens-of-north']"

    def pay(user: str, token: str) -> None:
        raise ValueError(f"{user} can't pay")

    handled: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = handled.append  # type: ignore[method-assign]
    logging.getLogger("penstock.job").addHandler(handler)
    Failed(pay, "ada", PLANTED)
    logging.getLogger("penstock.job").removeHandler(handler)
    # The error itself, for handlers that do more than print it.
    assert handled[-1].exc_info is not None and isinstance(handled[-1].exc_info[1], ValueError)


def test_arguments_that_fit_no_more_are_masked_in_the_error_that_says_so() -> None:
    app = App("shop")

    def before(config: dict[str, str]) -> None: ...

    def after(config: list[str]) -> None: ...

    body = app.task(name="shop.send")(before).arguments.encode(({"password": "correct-horse"},), {})
    newer = App("shop", version_grace=0)
    newer.task(name="shop.send")(after)
    run = Runner([newer], "worker-1").run(attempt(0, body))
    record = decode_error(run[3] or b"")
    assert record.qualname == "ArgumentMismatch"
    assert "config must be list[str], not dict {'password': '***'}" in record.message
