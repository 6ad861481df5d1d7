"""Ends of transactions, and savepoints, in statements as text: SQLAlchemy tells of neither."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Literal

_ENDS: Final = re.compile(
    r"\s*(?:COMMIT|END|ABORT|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b)|PREPARE\s+TRANSACTION)\b", re.IGNORECASE
)
_MAY_END: Final = re.compile(r"\b(?:commit|end|abort|rollback|prepare)\b", re.IGNORECASE)
# Text in quotes, bodies in dollars and comments: what looks like a statement there is none.
_NO_STATEMENT: Final = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | \$(\w*)\$.*?\$\1\$ | --[^\n]* | /\*.*?\*/""", re.DOTALL | re.VERBOSE
)
_SAVEPOINT: Final = re.compile(
    r"\s*(?:(SAVEPOINT)|(ROLLBACK)(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?|RELEASE(?:\s+SAVEPOINT)?)\s+"
    r'("[^"]+"|\w+)',
    re.IGNORECASE,
)
_OF_SQLALCHEMY: Final = "sa_savepoint_"  # events tell of these

Verb = Literal["savepoint", "rollback", "release"]


@lru_cache(maxsize=1_024)
def ends_transaction(sql: str) -> bool:
    """Tell whether one of these statements ends its transaction.

    >>> [ends_transaction(sql) for sql in ("COMMIT", "ROLLBACK TO a", "SELECT 1; end", "SELECT ';COMMIT'")]
    [True, False, True, False]
    """
    if _MAY_END.search(sql) is None:
        return False
    return any(_ENDS.match(statement) for statement in _NO_STATEMENT.sub(" ", sql).split(";"))


@lru_cache(maxsize=1_024)
def savepoints(sql: str) -> tuple[tuple[Verb, str], ...]:
    """Return the savepoints that these statements name, in order, each with what becomes of it.

    >>> savepoints("SAVEPOINT a; ROLLBACK TO SAVEPOINT b; RELEASE c")
    (('savepoint', 'a'), ('rollback', 'b'), ('release', 'c'))
    """
    if "savepoint" not in (lower := sql.lower()) and "rollback" not in lower and "release" not in lower:
        return ()
    found = filter(None, (_SAVEPOINT.match(statement) for statement in sql.split(";")))
    named: list[tuple[Verb, str]] = [
        ("savepoint" if match[1] else "rollback" if match[2] else "release", match[3].strip('"').lower())
        for match in found
    ]
    return tuple((verb, name) for verb, name in named if not name.startswith(_OF_SQLALCHEMY))
