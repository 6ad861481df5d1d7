"""Lists of rows that grow with use: counted as a whole, shown in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

SHOWN: Final = 50
"""Rows of a page, and of a list of a command unless it is told another number."""


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """A page of a list, and the number of all its rows."""

    rows: Sequence[T]
    total: int
    page: int = 1

    @classmethod
    def of(cls, rows: Sequence[T], size: int = SHOWN, page: int = 1) -> Listed[T]:
        """Cut a page out of all rows."""
        return cls(rows[start(size, page) : page * size], len(rows), page)

    @property
    def left(self) -> int:
        """Number of rows that are not on the page."""
        return self.total - len(self.rows)


def start(size: int, page: int) -> int:
    """Return the number of rows before a page."""
    return (page - 1) * size
