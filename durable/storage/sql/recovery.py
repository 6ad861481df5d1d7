"""The SQL statements of recovery, the same for both tables of work: who owns rows, whose owner is gone, what is due."""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import (
    CLAIMED,
    FENCE,
    FROM_INCOMING,
    FROM_OUTGOING,
    HISTORY,
    LETTER_FROM_MOVED,
    MINE,
    known_digest,
)
from durable.storage.sql.statement import Batched, Statement, by_key

REFUSED_OWNER = -1
"""Owner of a row that the database lets become neither anything nor a dead letter: no node claims or releases it."""

READ_CLOCK = Statement("SELECT clock_timestamp()")
# Expired messages of which types become dead letters: all but these, or these alone.
_BURIED: Final = "CAST(:buries_others AS boolean) <> (message_type = ANY (CAST(:excepted AS text[])))"


class Recovery:
    """The statements of recovery for one of the two tables of work."""

    def __init__(self, table: str, side: str, group_column: str, address_column: str, history: str) -> None:
        rows = f"{{schema}}.{table}"
        picked = f"id, {address_column}, epoch"
        this = f"row.id = picked.id AND row.{address_column} = picked.{address_column}"
        only = by_key(address_column)
        one = f"id = :id AND {address_column} = :address AND epoch = :epoch"
        # The groups (destinations or message types) that have unowned work, by a loose scan of the partial index:
        # one step for each group, however many rows it has. What is ordered, or shared out, is looked for elsewhere.
        unowned = "owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL AND fair_key IS NULL"
        self.unowned_groups = Statement(f"""
WITH RECURSIVE found AS (
    (SELECT {group_column} AS name FROM {{schema}}.{table} WHERE {unowned}
     ORDER BY {group_column} LIMIT 1)
    UNION ALL
    SELECT (SELECT {group_column} FROM {{schema}}.{table}
            WHERE {unowned} AND {group_column} > found.name
            ORDER BY {group_column} LIMIT 1)
    FROM found WHERE found.name IS NOT NULL
)
SELECT name FROM found WHERE name IS NOT NULL
""")
        self.owners = Statement(f"""
WITH RECURSIVE found AS (
    (SELECT owner_id FROM {{schema}}.{table} WHERE owner_id <> 0 AND owner_id > {REFUSED_OWNER}
     ORDER BY owner_id LIMIT 1)
    UNION ALL
    SELECT (SELECT owner_id FROM {{schema}}.{table} WHERE owner_id <> 0 AND owner_id > found.owner_id
            ORDER BY owner_id LIMIT 1)
    FROM found WHERE found.owner_id IS NOT NULL
)
SELECT owner_id FROM found WHERE owner_id IS NOT NULL
""")
        # A dead node's rows, bounded, each marked: its owner died while it had it.
        self.release_dormant = Batched(
            f"""
    SELECT {picked} FROM {rows} WHERE owner_id = :node{{only}}
    LIMIT :batch_size {{lock}}""",
            f""", released AS (
    UPDATE {rows} AS row SET owner_id = 0, epoch = row.epoch + 1, interruptions = row.interruptions + 1
    FROM picked WHERE {this} AND row.owner_id = :node RETURNING 1
)
SELECT count(*) FROM released
""",
            key=picked,
            only=only,
        )
        # A membership that this process has lost: nothing of it was a death.
        self.release_former = Batched(
            f"""
    SELECT {picked} FROM {rows} WHERE owner_id = :node{{only}}
    LIMIT :batch_size {{lock}}""",
            f""", released AS (
    UPDATE {rows} AS row SET owner_id = 0, epoch = row.epoch + 1
    FROM picked WHERE {this} AND row.owner_id = :node RETURNING 1
)
SELECT count(*) FROM released
""",
            key=picked,
            only=only,
        )
        # A node that stops: its rows were not being worked on.
        self.release_all = Batched(
            f"""
    SELECT {picked} FROM {rows} WHERE owner_id = :node{{only}} {{lock}}""",
            f""", released AS (
    UPDATE {rows} AS row SET owner_id = 0, epoch = row.epoch + 1 FROM picked WHERE {this} RETURNING 1
)
SELECT count(*) FROM released
""",
            key=picked,
            only=only,
        )
        self.owned_by = Statement(f"""
SELECT id, {address_column} AS address, epoch FROM {{schema}}.{table} WHERE owner_id = :node
""")
        self.release = Statement(f"""
UPDATE {{schema}}.{table} AS row SET owner_id = 0, epoch = row.epoch + 1
FROM {MINE} WHERE {FENCE} AND row.{address_column} = mine.address
""")
        self.promote_due = Batched(
            f"""
    SELECT {picked} FROM {rows} WHERE execution_time <= now() AND owner_id = 0{{only}}
    ORDER BY execution_time LIMIT :batch_size {{lock}}""",
            f""", promoted AS (
    UPDATE {rows} AS row SET execution_time = NULL FROM picked WHERE {this} RETURNING 1
)
SELECT count(*) FROM promoted
""",
            key=picked,
            only=only,
        )
        self.expire = Batched(
            f"""
    SELECT {picked} FROM {rows} WHERE deliver_by < now() AND owner_id = 0 AND NOT ({_BURIED}){{only}}
    ORDER BY deliver_by LIMIT :batch_size {{lock}}""",
            f""", expired AS (
    DELETE FROM {rows} AS row USING picked WHERE {this} RETURNING row.*
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, '{side}', 'expired', {history}, :node, 'expired while it waited' FROM expired
)
SELECT count(*) FROM expired
""",
            key=picked,
            only=only,
        )
        digest = known_digest("moved") if side == "incoming" else "NULL"
        # What the database refuses to change, it may still let go. The history is left out: it may be what refuses.
        self.quarantine = Statement(f"""
WITH moved AS (
    DELETE FROM {rows} WHERE {one} RETURNING *
)
{LETTER_FROM_MOVED % {"side": side, "address": address_column, "digest": digest}}
RETURNING letter_id
""")
        self.mark_refused = Statement(f"""
UPDATE {rows} SET owner_id = {REFUSED_OWNER}, epoch = epoch + 1, ordering_key = NULL, fair_key = NULL,
    execution_time = NULL
WHERE {one} RETURNING id
""")
        self.claim_late = Batched(
            f"""
    SELECT {picked} FROM {rows} WHERE deliver_by < now() AND owner_id = 0 AND {_BURIED}{{only}}
    ORDER BY deliver_by LIMIT :batch_size {{lock}}""",
            f""", claimed AS (
    UPDATE {rows} AS row SET owner_id = :node, epoch = row.epoch + 1 FROM picked WHERE {this} RETURNING row.*
)
SELECT {CLAIMED % address_column} FROM claimed ORDER BY seq
""",
            key=picked,
            only=only,
        )
        self.backlog = Statement(f"""
SELECT {group_column} AS name, count(*) AS total, count(*) FILTER (WHERE owner_id = 0) AS unowned,
    count(*) FILTER (WHERE execution_time IS NOT NULL) AS scheduled,
    clock_timestamp() - min(sent_at) FILTER (WHERE execution_time IS NULL) AS oldest_age,
    clock_timestamp() - min(sent_at) FILTER (WHERE execution_time IS NULL AND owner_id = 0) AS oldest_unowned_age
FROM {{schema}}.{table} GROUP BY {group_column} ORDER BY {group_column}
""")
        self.owned_counts = Statement(f"""
SELECT owner_id, count(*) AS count FROM {{schema}}.{table} WHERE owner_id <> 0 GROUP BY owner_id
""")


OUTGOING = Recovery("outgoing_envelopes", "outgoing", "destination", "destination", FROM_OUTGOING)
INCOMING = Recovery("incoming_envelopes", "incoming", "message_type", "endpoint", FROM_INCOMING)
