"""The two tables of work, and the parts of statements that are the same for both."""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import ENVELOPE, HISTORY, LETTER, MINE, known_digest
from durable.storage.sql.statement import Batched, Statement, by_key

# `+ 0` hides the owner from the planner: without statistics it takes the index of owned rows, which are all of a
# node's, for the shorter way, and compares each of them with each id.
_FENCE: Final = "row.id = mine.id AND row.epoch = mine.epoch AND row.owner_id + 0 = :node"
# The columns of a claim, in the order of durable.storage.rows.leased.
_CLAIMED: Final = (
    f"{ENVELOPE.replace('headers', 'CAST(headers AS text) AS headers')}, %s, epoch, attempts, interruptions, "
    "ordering_key, seq"
)
# Without the setting history_bodies these three stay NULL, and cost nothing.
_KEPT: Final = ", ".join(
    f"CASE WHEN CAST(:keep_body AS boolean) THEN {column} END" for column in ("content_type", "headers", "body")
)
# A message that was replayed and failed again is another letter, and the count goes on.
_REPLAYS: Final = """(
        SELECT COALESCE(max(replay_count), 0) FROM {schema}.dead_letters AS earlier
        WHERE earlier.id = moved.id AND earlier.address = moved.%s)"""

# Before a statement that goes along an index, and has to, whatever the statistics say. Those of a time without any keys
# make the planner gather and sort all rows for each key (measured: 22 s for 100 keys of 350,000 rows instead of 5 ms);
# those of a table that handled rows crowd make it look through the whole primary key for each destination (26 ms
# instead of 10 µs, Postgres 18). Without jit, which would compile whatever is left to be sorted.
_INDEXES_ONLY: Final = (
    "set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), "
    "set_config('enable_sort', 'off', true), set_config('jit', 'off', true)"
)
ALONG_THE_INDEX: Final = Statement(f"SELECT {_INDEXES_ONLY}")
# The same before one that finds little: to plan it anew each time would take longer (2 ms) than all the rest of it.
ALONG_THE_INDEX_BY_ONE_PLAN: Final = Statement(
    f"SELECT {_INDEXES_ONLY}, set_config('plan_cache_mode', 'force_generic_plan', true)"
)


class WorkTable:
    """Messages that wait to be sent, or to be handled.

    `address` is the column with the place that a message goes to, `lane` that with the group which one agent of a node
    claims.
    """

    def __init__(self, name: str, side: str, *, address: str, lane: str, received_at: str) -> None:
        self.name = name
        self.rows = f"{{schema}}.{name}"
        self.side = side
        self.address = address
        self.lane = lane
        self.key = f"id, {address}, epoch"
        self.mine = f"{MINE} WHERE {_FENCE} AND row.{address} = mine.address"
        """The rows of these leases that still belong to the node, behind FROM or USING."""
        self.late = "expired before it was " + ("handled" if side == "incoming" else "sent")
        """The reason of a message that its deliver_by has ended, whichever agent has seen it."""
        self._received_at = received_at

    def same_as(self, other: str) -> str:
        """Compare `row` with the row of this CTE."""
        return f"row.id = {other}.id AND row.{self.address} = {other}.{self.address}"

    def next(self, choice: str, then: str) -> Batched:
        """Do `then` with the rows `picked` by the conditions, order and limit of `choice`."""
        picked = f"\n    SELECT {self.key}, ctid AS tid FROM {self.rows} WHERE {choice} {{lock}}"
        return Batched(picked, then, key=self.key, only=by_key(self.address))

    def claimed(self, picked: str = "picked", condition: str = "row.ctid = picked.tid") -> str:
        """Make the rows of this CTE the node's, and return them in their order. They are locked, so that they stay in
        their places: by these they are found at once, whatever the planner thinks of the table.
        """
        return f"""claimed AS (
    UPDATE {self.rows} AS row SET owner_id = :node, epoch = row.epoch + 1
    FROM {picked} WHERE {condition}
    RETURNING row.*
)
SELECT {_CLAIMED % self.address} FROM claimed ORDER BY seq
"""

    def history(
        self, outcome: str, finished: str, *, counted: str = "", error: str = "NULL", node: str = ":node"
    ) -> str:
        """Write the history of the rows of this CTE; `counted` adds the failed attempts that they do not count."""
        return f"""history AS (
    INSERT INTO {{schema}}.envelope_history ({HISTORY})
    SELECT id, '{self.side}', '{outcome}', {self.address}, message_type, source, correlation_id, causation_id,
        partition_key, sent_at, deliver_by, {self._received_at}, attempts{counted}, interruptions, seq,
        {_KEPT}, {node}, {error}
    FROM {finished}
)"""

    def letters(self, *, counted: str = "", digest: str = "") -> str:
        """Make dead letters of the rows of the CTE `moved`, whoever owned them."""
        known = known_digest("moved") if self.side == "incoming" else "NULL"
        return f"""INSERT INTO {{schema}}.dead_letters ({LETTER})
    SELECT '{self.side}', {self.address}, {ENVELOPE}, attempts{counted}, interruptions, :exception_type, :reason,
        :traceback, :fingerprint, :node, {digest or known}, true, epoch, {_REPLAYS % self.address}, ordering_key,
        fair_key
    FROM moved"""

    def distinct(self, column: str, condition: str) -> str:
        """The CTE `found` with each `name` in this column, and a NULL: a loose scan of a partial index.

        It takes one step for each name, however many rows that has. Needs WITH RECURSIVE.
        """
        return f"""found AS (
    (SELECT {column} AS name FROM {self.rows} WHERE {condition} ORDER BY {column} LIMIT 1)
    UNION ALL
    SELECT (SELECT {column} FROM {self.rows} WHERE {condition} AND {column} > found.name ORDER BY {column} LIMIT 1)
    FROM found WHERE found.name IS NOT NULL
)"""

    def names(self, column: str, condition: str) -> str:
        """Select each name in this column, as distinct() does."""
        return f"\nWITH RECURSIVE {self.distinct(column, condition)}\nSELECT name FROM found WHERE name IS NOT NULL\n"

    def known_names(self, column: str, condition: str, names: str, floors: str) -> str:
        """Select those of the names in these arrays that have a row at their floor or behind it."""
        return f"""
SELECT known.name FROM unnest(CAST(:{names} AS text[]), CAST(:{floors} AS bigint[])) AS known (name, floor)
CROSS JOIN LATERAL (
    SELECT FROM {self.rows} AS row WHERE row.{column} = known.name AND {condition} AND row.seq >= known.floor
    ORDER BY row.seq LIMIT 1
) AS first
"""

    def next_names(self, column: str, condition: str) -> str:
        """Select the names in this column behind :after, at most :count, as names() does."""
        return f"""
WITH RECURSIVE found AS (
    (SELECT {column} AS name, 1 AS number FROM {self.rows}
     WHERE {condition} AND {column} > :after ORDER BY {column} LIMIT 1)
    UNION ALL
    SELECT (SELECT {column} FROM {self.rows} WHERE {condition} AND {column} > found.name ORDER BY {column} LIMIT 1),
        number + 1
    FROM found WHERE found.name IS NOT NULL AND number < :count
)
SELECT name FROM found WHERE name IS NOT NULL
"""


OUTBOX: Final = WorkTable(
    "outgoing_envelopes",
    "outgoing",
    address="destination",
    lane="destination",
    received_at="CAST(NULL AS timestamptz)",
)
INBOX: Final = WorkTable(
    "incoming_envelopes", "incoming", address="endpoint", lane="message_type", received_at="received_at"
)
