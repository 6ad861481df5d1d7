"""Survivors that are no fault of the tests, each with its reason.

A row names the file, and the changed lines as they are and as the mutant has them: rows stay right when lines move.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Known(NamedTuple):
    file: str
    before: str
    after: str
    reason: str


KNOWN: Final[tuple[Known, ...]] = ()


def reasons() -> dict[tuple[str, str, str], str]:
    return {(each.file, each.before, each.after): each.reason for each in KNOWN}
