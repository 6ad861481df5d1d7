"""Limits that a role or a database may have by default, and that no connection of durable takes from them.

    pools of durable (engines)        limits of its settings; of transactions, as the role has it
    a node's own connection           limits of its settings
    pipeline, in driver and tasks     none: a copy, or a publication, takes as long as there are rows
    migrations                        of waits for tables, as the role has it; else none: an index takes as long as
                                      there are rows

What the URL of the database sets by `options` comes before these: in pools, in the pipeline and in migrations.
"""

from __future__ import annotations

from typing import Final

LIMITS: Final = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "transaction_timeout",
)
_HAS_TRANSACTION_TIMEOUT: Final = 17_00_00  # an older Postgres refuses the name


def unlimited(version: int) -> dict[str, str]:
    """Return the settings of a session without limits, on a server of this version, such as 170004."""
    return dict.fromkeys(LIMITS if version >= _HAS_TRANSACTION_TIMEOUT else LIMITS[:-1], "0")
