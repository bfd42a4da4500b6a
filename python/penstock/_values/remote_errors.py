"""Transports an error from a worker to the caller that waits for the result."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import penstock
from penstock._values.codec import CannotEncode, Codec
from penstock._values.envelope import ErrorRecord
from penstock._values.secrets import MASK
from penstock._values.shapes import module_name
from penstock.errors import RemoteTraceback, TaskError

if TYPE_CHECKING:
    from penstock._values.masking import Masking

# Long enough to be useful; the broker keeps one for each attempt.
_LONGEST_TRACEBACK = 16_384
_LONGEST_MESSAGE = 4_096
_LARGEST_ARGUMENTS_BYTES = 65_536


def record_of(
    error: BaseException,
    codec: Codec,
    *,
    skip: str,
    attempt: int,
    worker: str,
    started_ms: int,
    finished_ms: int,
    masking: Masking,
) -> ErrorRecord:
    """Record an error. ``skip``: file whose frames lead to the task, which do not help a reader."""
    kind = type(error)
    return ErrorRecord(
        module=sound(module_name(kind.__module__)),
        qualname=sound(kind.__qualname__),
        # Masked before it is cut, because half a secret would not be found.
        message=_shorten(masking.text(message_of(error)), _LONGEST_MESSAGE),
        arguments=_encode_arguments(error, codec, masking),
        traceback=_shorten(masking.text(traceback_of(error, skip)), _LONGEST_TRACEBACK),
        attempt=attempt,
        worker=worker,
        started_ms=started_ms,
        finished_ms=finished_ms,
    )


def rebuild(record: ErrorRecord, codec: Codec) -> BaseException:
    """Rebuild the error, as its own type where that is possible here, else a ``TaskError``."""
    error = _rebuild(record, codec) or TaskError(shown_type(record), record.message)
    error.__cause__ = RemoteTraceback(record.traceback)
    return error


def shown_type(record: ErrorRecord) -> str:
    """Return the full name of the error's type, or just the name of a built-in one."""
    return record.qualname if record.module == "builtins" else f"{record.module}.{record.qualname}"


def _rebuild(record: ErrorRecord, codec: Codec) -> Exception | None:
    kind = _find_type(record.module, record.qualname)
    if kind is None or record.arguments is None:
        return None
    try:
        args, attributes, constructed_with = codec.decode(record.arguments)
    except Exception:
        return None
    # An __init__ that does not pass on its arguments cannot be called with `args`. Skipping it still yields an error of
    # the right type with the same message.
    makers: list[Callable[[], Exception]]
    makers = [lambda: kind(*constructed_with), functools.partial(kind.__new__, kind, *args)]
    for make in makers:
        try:
            error = make()
            vars(error).update(attributes)
            # Quotation marks around a mask may differ from those around the secret.
            if error.args == args and (message_of(error) == record.message or MASK in record.message):
                return error
        except Exception:
            continue
    return None


def _find_type(module: str, qualname: str) -> type[Exception] | None:
    """Look up the type in modules that this process has already imported: a record never loads code."""
    found: Any = sys.modules.get(module)
    if found is None and module == module_name("__main__"):
        found = sys.modules["__main__"]
    if module == "penstock" and qualname in penstock.__all__:
        # One of Penstock's own classes, which the package imports on first use.
        getattr(penstock, qualname)
    for part in qualname.split("."):
        # Not getattr, which can run a module's __getattr__ and so an import.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _encode_arguments(error: BaseException, codec: Codec, masking: Masking) -> bytes | None:
    attributes: dict[str, object] = {}
    try:
        for name, value in vars(error).items():
            try:
                codec.encode(value)
            except CannotEncode:
                continue  # such as a response or a connection: the error is recorded without it
            attributes[name] = value
        # The arguments for pickling: an OSError keeps its file name apart from its args.
        reduced: Any = error.__reduce__()
        constructed_with = reduced[1] if reduced[0] is type(error) else error.args
        encoded = codec.encode(masking.value([error.args, attributes, constructed_with]))
    except BaseException:  # whatever the error's own methods raise
        return None
    # The user's own objects may still contain secrets. Then only the masked message is sent.
    return encoded if len(encoded) <= _LARGEST_ARGUMENTS_BYTES and not masking.is_in(encoded) else None


def message_of(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as broken:
        text = f"<its str() raised {type(broken).__name__}>"
    return sound(text)


def sound(text: object) -> str:
    """Return text that UTF-8 can encode: a str may contain a lone surrogate, and ``__module__`` may be anything."""
    return str(text).encode(errors="backslashreplace").decode()


def traceback_of(error: BaseException, skip: str) -> str:
    try:
        lines = traceback.format_exception(type(error), error, below(error.__traceback__, skip))
        return "".join(lines).encode(errors="backslashreplace").decode()
    except BaseException as broken:
        return f"<the traceback could not be formatted: {type(broken).__name__}>"


def below(frames: TracebackType | None, skip: str) -> TracebackType | None:
    """Skip the first frames, which are in the file ``skip``."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename == skip:
        first = first.tb_next
    return first or frames


def _shorten(text: str, longest: int) -> str:
    """Cut out the middle: the start and the final message matter most."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n  … {len(text) - 2 * half} characters left out …\n{text[-half:]}"
