"""An app as heavy as many are: 300 classes mapped by SQLAlchemy, pandas, and a model of ``BENCH_MODEL_MB``.

``BENCH_PACKAGES`` is where both packages are installed: with the peers, as Penstock's own environment has neither.
"""

from __future__ import annotations

import os
import sys

if packages := os.environ.get("BENCH_PACKAGES"):
    sys.path.append(packages)

import pandas
from sqlalchemy import ForeignKey, String, select
from sqlalchemy.orm import DeclarativeBase, Mapped, configure_mappers, mapped_column, relationship

CLASSES = 300
MODEL_MB = int(os.environ.get("BENCH_MODEL_MB", "0"))


class Base(DeclarativeBase):
    pass


def mapped_class(number: int) -> type[Base]:
    parent = f"Table{number - 1}" if number % 10 else None
    body: dict[str, object] = {
        "__tablename__": f"table_{number}",
        "__annotations__": {"id": Mapped[int], "name": Mapped[str], "size": Mapped[int]},
        "id": mapped_column(primary_key=True),
        "name": mapped_column(String(100), index=True),
        "size": mapped_column(),
    }
    if parent is not None:
        body["parent_id"] = mapped_column(ForeignKey(f"table_{number - 1}.id"))
        body["parent"] = relationship(parent)
    return type(f"Table{number}", (Base,), body)


TABLES = [mapped_class(number) for number in range(CLASSES)]
configure_mappers()
# Small objects, like those of a dictionary or an index: their many pages make a fork expensive.
MODEL = [bytes(967) for _ in range(MODEL_MB * 1000)]


def work(number: int) -> int:
    """Take about a millisecond in a process that has run it before: a statement, and a small table."""
    table = TABLES[number % CLASSES]
    statement = select(table).where(table.size > number).order_by(table.name)  # type: ignore[attr-defined]
    frame = pandas.DataFrame({"key": [1, 2, 3] * 10, "size": range(30)})
    return len(str(statement)) + int(frame["size"].sum())


work(0)  # fills caches before the fork, so that all processes share them
