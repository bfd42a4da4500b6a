"""Secret arguments, which are masked wherever penstock shows arguments or errors to people."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from penstock._values.hints import parts_of

T = TypeVar("T")

MASK = "***"


class Mark:
    """Marker in an annotation: see ``Secret``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "secret"


_MARK = Mark()

Secret = Annotated[T, _MARK]
"""Annotation of a parameter or field whose value is never shown: ``def log_in(user: str, code: Secret[str]) -> None``.

Type checkers see ``str``. The value is sent and stored like any other. It is masked as ``***`` where penstock shows
arguments or errors of jobs to people.
"""

# Compared without hyphens and underscores: `api_key`, `apikey` and `X-Api-Key` all match.
_WORDS = ("password", "passwd", "secret", "token", "apikey", "authorization")


def is_secret_name(name: str) -> bool:
    """Whether the name of a parameter, field or key suggests a secret."""
    plain = name.lower().replace("_", "").replace("-", "")
    return any(word in plain for word in _WORDS)


def is_secret_hint(hint: Any) -> bool:
    """Whether an annotation contains ``Secret``, or a type such as pydantic's ``SecretStr``."""
    seen: list[Any] = []
    waiting = [hint]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mark) or is_secret_type(part):
            return True
        # Compared by identity, because annotations need not be hashable.
        if not any(part is other for other in seen):
            seen.append(part)
            waiting.extend(parts_of(part))
    return False


def is_secret_type(kind: Any) -> bool:
    """Whether values of a class hide their content by default, like pydantic's secrets."""
    return isinstance(kind, type) and callable(getattr(kind, "get_secret_value", None))
