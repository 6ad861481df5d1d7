"""The SQL statements of recovery, the same for both tables of work: who owns rows, whose owner is gone, what is due."""

from __future__ import annotations

from durable.storage.statements import FENCE, FROM_INCOMING, FROM_OUTGOING, HISTORY, MINE, Statement


class Recovery:
    """The statements of recovery for one of the two tables of work."""

    def __init__(self, table: str, side: str, group_column: str, address_column: str, history: str) -> None:
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
    (SELECT owner_id FROM {{schema}}.{table} WHERE owner_id <> 0 ORDER BY owner_id LIMIT 1)
    UNION ALL
    SELECT (SELECT owner_id FROM {{schema}}.{table} WHERE owner_id <> 0 AND owner_id > found.owner_id
            ORDER BY owner_id LIMIT 1)
    FROM found WHERE found.owner_id IS NOT NULL
)
SELECT owner_id FROM found WHERE owner_id IS NOT NULL
""")
        # A dead node's rows, bounded, each marked: its owner died while it had it.
        self.release_dormant = Statement(f"""
WITH dormant AS (
    SELECT id, {address_column} FROM {{schema}}.{table} WHERE owner_id = :node
    LIMIT :batch_size FOR UPDATE SKIP LOCKED
)
UPDATE {{schema}}.{table} AS row
SET owner_id = 0, epoch = row.epoch + 1, interruptions = row.interruptions + 1
FROM dormant WHERE row.id = dormant.id AND row.{address_column} = dormant.{address_column} AND row.owner_id = :node
""")
        # A node that stops: its rows were not being worked on.
        self.release_all = Statement(f"""
UPDATE {{schema}}.{table} SET owner_id = 0, epoch = epoch + 1 WHERE owner_id = :node
""")
        self.owned_by = Statement(f"""
SELECT id, {address_column} AS address, epoch FROM {{schema}}.{table} WHERE owner_id = :node
""")
        self.release = Statement(f"""
UPDATE {{schema}}.{table} AS row SET owner_id = 0, epoch = row.epoch + 1
FROM {MINE} WHERE {FENCE} AND row.{address_column} = mine.address
""")
        self.promote_due = Statement(f"""
WITH due AS (
    SELECT id, {address_column} FROM {{schema}}.{table} WHERE execution_time <= now() AND owner_id = 0
    ORDER BY execution_time LIMIT :batch_size FOR UPDATE SKIP LOCKED
)
UPDATE {{schema}}.{table} AS row SET execution_time = NULL
FROM due WHERE row.id = due.id AND row.{address_column} = due.{address_column}
""")
        self.expire = Statement(f"""
WITH late AS (
    SELECT id, {address_column} FROM {{schema}}.{table} WHERE deliver_by < now() AND owner_id = 0
    ORDER BY deliver_by LIMIT :batch_size FOR UPDATE SKIP LOCKED
), expired AS (
    DELETE FROM {{schema}}.{table} AS row USING late
    WHERE row.id = late.id AND row.{address_column} = late.{address_column}
    RETURNING row.*
), history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, '{side}', 'expired', {history}, :node, 'expired while it waited' FROM expired
)
SELECT count(*) FROM expired
""")
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
