"""Ends of transactions, and savepoints, in statements as text: SQLAlchemy tells of neither."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

_ENDS: Final = re.compile(
    r"\s*(?:COMMIT|END|ABORT|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b)|PREPARE\s+TRANSACTION)\b", re.IGNORECASE
)
_MAY_CONTROL: Final = re.compile(r"\b(?:commit|end|abort|rollback|prepare|savepoint|release)\b", re.IGNORECASE)
# Text in quotes, bodies in dollars and comments: what looks like a statement there is none. A name in quotes stays.
_NO_STATEMENT: Final = re.compile(
    r"""\bE'(?:[^'\\]|''|\\.)*' | '(?:[^']|'')*' | (?P<name>"(?:[^"]|"")*") | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$
    | --[^\n]* | /\*.*?\*/""",
    re.DOTALL | re.VERBOSE | re.IGNORECASE,
)
_SAVEPOINT: Final = re.compile(
    r"\s*(?:(SAVEPOINT)|(ROLLBACK)(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?|RELEASE(?:\s+SAVEPOINT)?)\s+"
    r'("[^"]+"|\w+)',
    re.IGNORECASE,
)
_OF_SQLALCHEMY: Final = "sa_savepoint_"  # events tell of these

_LONGEST_KEPT: Final = 2_000  # characters; the answers for longer statements are not kept

Verb = Literal["savepoint", "rollback", "release"]


class Control(NamedTuple):
    """Effects of statements on their transaction."""

    ends: bool
    savepoints: tuple[tuple[Verb, str], ...]
    """Those of the statements, in order, each with what becomes of it."""


def ends_transaction(sql: str) -> bool:
    """Tell whether one of these statements ends its transaction.

    >>> [ends_transaction(sql) for sql in ("COMMIT", "ROLLBACK TO a", "SELECT 1; end", "SELECT ';COMMIT'")]
    [True, False, True, False]
    """
    return control_of(sql).ends


def control_of(sql: str) -> Control:
    """Return what these statements do to their transaction.

    >>> control_of("SAVEPOINT a; ROLLBACK TO SAVEPOINT B; RELEASE \\"C\\"; SELECT '; RELEASE d'").savepoints
    (('savepoint', 'a'), ('rollback', 'b'), ('release', 'C'))
    """
    return _kept(sql) if len(sql) <= _LONGEST_KEPT else _control_of(sql)


def _control_of(sql: str) -> Control:
    if _MAY_CONTROL.search(sql) is None:
        return Control(ends=False, savepoints=())
    statements = _NO_STATEMENT.sub(lambda found: (found["name"] or " ").replace(";", ","), sql).split(";")
    return Control(any(map(_ENDS.match, statements)), tuple(_savepoints(statements)))


_kept = lru_cache(maxsize=1_024)(_control_of)


def _savepoints(statements: Iterable[str]) -> Iterator[tuple[Verb, str]]:
    for match in filter(None, map(_SAVEPOINT.match, statements)):
        name = match[3][1:-1] if match[3].startswith('"') else match[3].lower()
        if not name.startswith(_OF_SQLALCHEMY):
            yield ("savepoint" if match[1] else "rollback" if match[2] else "release"), name
