"""The SQL statement of a round of recovery: all that waits without an owner, at one moment.

Each part is read in the order of an index, and no further than it is needed, however many rows wait.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import FREE, ORDERED, SHARED
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX, OUTBOX, WorkTable


def _first(table: WorkTable, column: str, condition: str) -> str:
    return f"(SELECT {column} FROM {table.rows} WHERE {condition} ORDER BY {column} LIMIT 1)"


def _is_any(table: WorkTable, column: str, condition: str) -> str:
    return f"{_first(table, column, condition)} IS NOT NULL"


def _is_any_in_either(column: str, condition: str) -> str:
    return " OR ".join(_is_any(table, column, condition) for table in (OUTBOX, INBOX))


_COMING: Final = ", ".join(_first(table, "execution_time", "execution_time > now()") for table in (OUTBOX, INBOX))

# A row is due by now(), or will be: it is in one of the two columns, however long the statement takes.
READ_AGENDA: Final = Statement(f"""
SELECT CASE WHEN CAST(:is_short AS boolean)
        THEN ARRAY ({OUTBOX.known_names("destination", FREE, "known_destinations", "destination_floors")})
        ELSE ARRAY ({OUTBOX.next_names("destination", FREE)}) END AS destinations,
    CASE WHEN CAST(:is_short AS boolean)
        THEN ARRAY ({INBOX.known_names("message_type", FREE, "known_types", "type_floors")})
        ELSE ARRAY ({INBOX.names("message_type", FREE)}) END AS message_types,
    ARRAY ({OUTBOX.names("destination", SHARED)}) AS shared_destinations,
    ARRAY ({INBOX.names("message_type", SHARED)}) AS shared_types,
    {_is_any(OUTBOX, "destination", ORDERED)} OR {_is_any(INBOX, "message_type", ORDERED)} AS is_ordered,
    {_is_any_in_either("execution_time", "execution_time <= now() AND owner_id = 0")} AS is_due,
    {_is_any_in_either("deliver_by", "deliver_by < now() AND owner_id = 0")} AS is_late,
    LEAST({_COMING}) - clock_timestamp() AS next_due_in,
    clock_timestamp() - statement_timestamp() AS took
""")
