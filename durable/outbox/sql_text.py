"""Statements as text that end the transaction they are in. SQLAlchemy sees no end in them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_ENDS: Final = re.compile(
    r"\s*(?:COMMIT|END|ABORT|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b)|PREPARE\s+TRANSACTION)\b", re.IGNORECASE
)
_MAY_END: Final = re.compile(r"\b(?:commit|end|abort|rollback|prepare)\b", re.IGNORECASE)
# Text in quotes, bodies in dollars and comments: what looks like a statement there is none.
_NO_STATEMENT: Final = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | \$(\w*)\$.*?\$\1\$ | --[^\n]* | /\*.*?\*/""", re.DOTALL | re.VERBOSE
)


@lru_cache(maxsize=1_024)
def ends_transaction(sql: str) -> bool:
    """Tell whether one of these statements ends its transaction.

    >>> [ends_transaction(sql) for sql in ("COMMIT", "ROLLBACK TO a", "SELECT 1; end", "SELECT ';COMMIT'")]
    [True, False, True, False]
    """
    if _MAY_END.search(sql) is None:
        return False
    return any(_ENDS.match(statement) for statement in _NO_STATEMENT.sub(" ", sql).split(";"))
