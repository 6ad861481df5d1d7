"""The SQL statements of recovery, the same for both tables of work: who owns rows, whose owner is gone, what is due."""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import OWNED, remember_expired
from durable.storage.sql.statement import Batched, Statement
from durable.storage.sql.work import INBOX, OUTBOX, WorkTable

REFUSED_OWNER = -1
"""Owner of a row that the database lets become neither anything nor a dead letter: no node claims or releases it."""

# Expired messages of which types become dead letters: all but these, or these alone.
_BURIED: Final = "CAST(:buries_others AS boolean) <> (message_type = ANY (CAST(:excepted AS text[])))"
_LATE: Final = "deliver_by < now() AND owner_id = 0 AND %s{only} ORDER BY deliver_by LIMIT :batch_size"
_STILL_OWNED: Final = " AND row.owner_id = :node"


class Recovery:
    """The statements of recovery for one of the two tables of work."""

    def __init__(self, table: WorkTable) -> None:
        rows, lane, address = table.rows, table.lane, table.address
        one = f"id = :id AND {address} = :address AND epoch = :epoch"
        self.owners = Statement(table.names("owner_id", OWNED))
        owned, free = "owner_id = :node{only}", "owner_id = 0, epoch = row.epoch + 1"
        # A dead node's rows, bounded, each marked: its owner died while it had it.
        self.release_dormant = _update(
            table, f"{owned} LIMIT :batch_size", f"{free}, interruptions = row.interruptions + 1", _STILL_OWNED
        )
        # A membership that this process has lost: nothing of it was a death.
        self.release_former = _update(table, f"{owned} LIMIT :batch_size", free, _STILL_OWNED)
        # A node that stops: its rows were not being worked on.
        self.release_all = _update(table, owned, free)
        self.owned_by = Statement(f"SELECT id, {address} AS address, epoch FROM {rows} WHERE owner_id = :node")
        interrupted = "interruptions = row.interruptions + CAST(CAST(:is_interrupted AS boolean) AS integer)"
        self.release = Statement(f"UPDATE {rows} AS row SET {free}, {interrupted} FROM {table.mine}")
        self.promote_due = _update(
            table,
            "execution_time <= now() AND owner_id = 0{only} ORDER BY execution_time LIMIT :batch_size",
            "execution_time = NULL",
        )
        known = f"{remember_expired('expired')}, " if table is INBOX else ""
        self.expire = table.next(
            _LATE % f"NOT ({_BURIED})",
            f""", expired AS (
    DELETE FROM {rows} AS row USING picked WHERE {table.same_as("picked")} RETURNING row.*
), {known}{table.history("expired", "expired", error=f"'{table.late}'")}
SELECT count(*) FROM expired
""",
        )
        # What the database refuses to change, it may still let go. The history is left out: it may be what refuses.
        self.quarantine = Statement(f"""
WITH moved AS (
    DELETE FROM {rows} WHERE {one} RETURNING *
)
{table.letters()}
RETURNING id, message_type, partition_key, ordering_key
""")
        self.mark_refused = Statement(f"""
UPDATE {rows} SET owner_id = {REFUSED_OWNER}, epoch = epoch + 1, ordering_key = NULL, fair_key = NULL,
    execution_time = NULL
WHERE {one} RETURNING id
""")
        self.claim_late = table.next(_LATE % _BURIED, f", {table.claimed()}")
        self.backlog = Statement(f"""
SELECT {lane} AS name, count(*) AS total, count(*) FILTER (WHERE owner_id = 0) AS unowned,
    count(*) FILTER (WHERE execution_time IS NOT NULL) AS scheduled,
    clock_timestamp() - min(sent_at) FILTER (WHERE execution_time IS NULL) AS oldest_age,
    clock_timestamp() - min(sent_at) FILTER (WHERE execution_time IS NULL AND owner_id = 0) AS oldest_unowned_age
FROM {rows} GROUP BY {lane} ORDER BY {lane}
""")
        self.owned_counts = Statement(f"""
SELECT owner_id, count(*) AS count FROM {rows} WHERE {OWNED} GROUP BY owner_id
""")


def _update(table: WorkTable, choice: str, change: str, condition: str = "") -> Batched:
    """Change the rows that are chosen, and count them."""
    return table.next(
        choice,
        f""", changed AS (
    UPDATE {table.rows} AS row SET {change} FROM picked WHERE {table.same_as("picked")}{condition}
    RETURNING 1
)
SELECT count(*) FROM changed
""",
    )


OUTGOING = Recovery(OUTBOX)
INCOMING = Recovery(INBOX)
