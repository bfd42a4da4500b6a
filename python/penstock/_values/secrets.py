"""Arguments that nobody should read: they are masked wherever penstock shows arguments or errors to people."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from penstock._values.hints import parts_of

T = TypeVar("T")

MASK = "***"


class Mark:
    """Marks an annotation; see ``Secret``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "secret"


_MARK = Mark()

Secret = Annotated[T, _MARK]
"""A parameter or field whose value is never shown: ``def log_in(user: str, code: Secret[str]) -> None``.

Type checkers see ``str``. The value travels and is stored as any other is; it is masked as ``***`` where
penstock shows arguments, or errors of jobs, to people.
"""

# Hyphens and underscores apart: `api_key`, `apikey` and `X-Api-Key` are one.
_WORDS = ("password", "passwd", "secret", "token", "apikey", "authorization")


def is_secret_name(name: str) -> bool:
    """Whether a parameter, field or key of this name holds a secret, as far as a name tells."""
    plain = name.lower().replace("_", "").replace("-", "")
    return any(word in plain for word in _WORDS)


def is_secret_hint(hint: Any) -> bool:
    """Whether an annotation has ``Secret``, or pydantic's ``SecretStr`` or the like, anywhere in it."""
    seen: list[Any] = []
    waiting = [hint]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mark) or is_secret_type(part):
            return True
        # By identity, as annotations need not be hashable.
        if not any(part is other for other in seen):
            seen.append(part)
            waiting.extend(parts_of(part))
    return False


def is_secret_type(kind: Any) -> bool:
    """Whether values of a class hide themselves unless asked, as pydantic's secrets do."""
    return isinstance(kind, type) and callable(getattr(kind, "get_secret_value", None))
