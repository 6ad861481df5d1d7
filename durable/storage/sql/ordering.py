"""The claims of rows that come in an order, and of rows that are shared out; messages.ordering has the argument.

A claim of ordered rows is two statements in one transaction: LOCK, then CLAIM with a snapshot that was taken when the
locks were held. Runs are taken in rounds, one row of each key after another, so that a batch serves many keys.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import ORDERED, SHARED
from durable.storage.sql.statement import Batched, Statement, by_key
from durable.storage.sql.work import INBOX, OUTBOX, WorkTable

# Word for word the predicate of the partial index: otherwise the planner does not take it.
HELD: Final = "ordering_key IS NOT NULL AND (owner_id <> 0 OR (execution_time IS NOT NULL AND attempts > 0))"
_IN_TIME: Final = "(deliver_by IS NULL OR deliver_by > now())"
_OPEN: Final = "(probing OR until IS NULL OR until > now())"
# A trial is of what failures have stopped, and of nothing that is paused or parked besides.
_UNTRIED: Final = "NOT (probing AND CAST(:is_trial AS boolean))"

_NOT_LATCHED: Final = f"""NOT EXISTS (
            SELECT FROM {{schema}}.circuits WHERE kind = 'destination' AND key = %s AND {_OPEN})"""
# By a handler that is not stopped, be it that of a newer version, and the type itself is not stopped either.
_HANDLED_HERE: Final = f"""EXISTS (
            SELECT FROM unnest(CAST(:message_types AS text[]), CAST(:handlers AS text[])) AS here (name, handler)
            WHERE here.name = first.message_type AND NOT EXISTS (
                SELECT FROM {{schema}}.circuits
                WHERE kind = 'handler' AND key IN (here.name, here.handler) AND NOT parked
                    AND {_OPEN} AND {_UNTRIED}))"""
# A key by its name, which is none of an ordered handler; that one by the key of its stream, which nodes with other
# versions have, too.
_NOT_PARKED: Final = f"""NOT EXISTS (
                SELECT FROM {{schema}}.circuits WHERE kind = 'key' AND key = found.key AND {_OPEN})
            AND NOT EXISTS (
                SELECT FROM {{schema}}.circuits WHERE kind = 'handler' AND parked AND ordering_key = found.key)"""


class Ordered:
    """The statements for one of the two tables of work. Each does its work for many destinations at once.

    A key has a `scope`, which is its destination in the outbox, and '' in the inbox. `is_scoped` says which it is;
    `fits_head` says of a row behind the head of its key whether it can be in the same run, `may_start` of the head
    whether it may be claimed now, and `is_open` whether its key is not parked.
    """

    def __init__(self, table: WorkTable, *, is_scoped: bool, may_start: str, is_open: str, fits_head: str) -> None:
        rows, address, lane = table.rows, table.address, table.lane
        within = "destination = found.scope AND " if is_scoped else ""
        turns = "unnest(CAST(:scopes AS text[]), CAST(:keys AS text[])) AS found (scope, key)"
        head = f"""
        SELECT id, {address}, epoch, seq, message_type FROM {rows}
        WHERE {within}{ORDERED} AND ordering_key = found.key AND {_IN_TIME} ORDER BY seq LIMIT 1"""
        # Of a key that is free: the first row that waits for its retry, if any. No row comes of one that is owned.
        free = f"""
        SELECT true AS is_free, min(seq) AS seq FROM {rows} WHERE {within}{HELD} AND ordering_key = found.key
        HAVING count(*) FILTER (WHERE owner_id <> 0) = 0"""
        turn = "(free.seq IS NULL OR free.seq > first.seq)"

        # The next keys that have unowned rows of each lane, by a loose scan that is bounded in keys, and the type of
        # each that could be claimed from. Whoever comes to the end begins again at '': so every key has its turn.
        self.scan = Statement(f"""
SELECT lane.name, found.key, CASE WHEN free.is_free AND {turn} AND {is_open} THEN first.message_type END AS message_type
FROM unnest(CAST(:lanes AS text[]), CAST(:afters AS text[])) WITH ORDINALITY AS lane (name, after, place)
CROSS JOIN LATERAL (
    WITH RECURSIVE keys AS (
        (SELECT ordering_key AS key, 1 AS number FROM {rows}
         WHERE {lane} = lane.name AND {ORDERED} AND ordering_key > lane.after ORDER BY ordering_key LIMIT 1)
        UNION ALL
        SELECT (SELECT ordering_key FROM {rows}
                WHERE {lane} = lane.name AND {ORDERED} AND ordering_key > keys.key ORDER BY ordering_key LIMIT 1),
            number + 1
        FROM keys WHERE keys.key IS NOT NULL AND number < :count
    )
    SELECT lane.name AS scope, key, number FROM keys WHERE key IS NOT NULL
) AS found
LEFT JOIN LATERAL ({head}) AS first ON true
LEFT JOIN LATERAL ({free}) AS free ON true
ORDER BY lane.place, found.number
""")
        self.lock = Statement("""
SELECT found.scope, found.key FROM unnest(CAST(:scopes AS text[]), CAST(:keys AS text[])) AS found (scope, key)
WHERE pg_try_advisory_xact_lock(:class_id, hashtext(found.scope || found.key))
""")
        self.claim = Statement(f"""
WITH heads AS MATERIALIZED (
    SELECT found.scope, found.key, first.message_type, COALESCE(free.seq, 9223372036854775807) AS ends_before
    FROM {turns}
    CROSS JOIN LATERAL ({free}) AS free
    CROSS JOIN LATERAL ({head}) AS first
    WHERE {turn} AND {may_start}
), run AS MATERIALIZED (
    SELECT each.id, each.{address} FROM heads AS found CROSS JOIN LATERAL (
        SELECT id, {address}, row_number() OVER (ORDER BY seq) AS round,
            bool_and({fits_head}) OVER (ORDER BY seq) AS fits
        FROM (
            SELECT id, {address}, seq, message_type FROM {rows}
            WHERE {within}{ORDERED} AND ordering_key = found.key AND {_IN_TIME} AND seq < found.ends_before
            ORDER BY seq LIMIT :longest_run
        ) AS row
    ) AS each
    WHERE each.fits ORDER BY each.round LIMIT :batch_size
), {table.claimed("run", f"{table.same_as('run')} AND row.owner_id = 0")}
""")
        # The row that a claim of each of these keys begins with.
        self.heads = Statement(f"""
SELECT found.key, first.id, first.{address}, first.epoch FROM {turns}
CROSS JOIN LATERAL ({free}) AS free
CROSS JOIN LATERAL ({head}) AS first
WHERE {turn}
""")
        # Tell the other nodes of keys that are free and come next to handlers which this one does not have.
        self.tell = Statement(f"""
SELECT pg_notify(CAST(:channel AS text), '') FROM (
    SELECT FROM unnest(CAST(:keys AS text[])) AS found (key)
    CROSS JOIN LATERAL ({free}) AS free
    CROSS JOIN LATERAL ({head}) AS first
    WHERE {turn} AND first.message_type <> ALL (CAST(:message_types AS text[])) LIMIT 1
) AS others
""")


OUTGOING: Final = Ordered(
    OUTBOX,
    is_scoped=True,
    may_start=_NOT_LATCHED % "found.scope",
    is_open="true",
    fits_head="true",
)
INCOMING: Final = Ordered(
    INBOX,
    is_scoped=False,
    may_start=f"{_HANDLED_HERE} AND {_NOT_PARKED}",
    is_open=_NOT_PARKED,
    fits_head="message_type = found.message_type",
)

ORDERED_DESTINATIONS: Final = Statement(OUTBOX.next_names("destination", ORDERED))
ORDERED_TYPES: Final = Statement(INBOX.names("message_type", ORDERED))

# ---------------------------------------------------------------- shares


class Shared:
    """The statements for one of the two tables of work; a share is what waits of one tenant in a lane, which is a
    message type or a destination. `may_start` says whether it is stopped."""

    def __init__(self, table: WorkTable, may_start: str) -> None:
        rows, address, lane = table.rows, table.address, table.lane
        # The next tenants that have unowned work, one step for each, however much that is.
        self.next = Statement(f"""
WITH RECURSIVE shares AS (
    (SELECT fair_key AS key, 1 AS number FROM {rows}
     WHERE {lane} = :lane AND {SHARED} AND fair_key >= :start ORDER BY fair_key LIMIT 1)
    UNION ALL
    SELECT (SELECT fair_key FROM {rows}
            WHERE {lane} = :lane AND {SHARED} AND fair_key > shares.key ORDER BY fair_key LIMIT 1),
        number + 1
    FROM shares WHERE shares.key IS NOT NULL AND number < :count
)
SELECT key FROM shares WHERE key IS NOT NULL
""")
        # The quotas add up to no more than a batch; the LIMIT says so to the planner, which would else expect a tenth
        # of all rows and join the whole table to them.
        self.claim = Batched(
            f"""
    SELECT each.id, each.{address}, each.epoch, each.tid
    FROM unnest(CAST(:keys AS text[]), CAST(:quotas AS bigint[])) AS share (key, quota)
    CROSS JOIN LATERAL (
        SELECT id, {address}, epoch, ctid AS tid FROM {rows}
        WHERE {lane} = :lane AND {SHARED} AND fair_key = share.key AND {_IN_TIME}{{only}}
        ORDER BY seq LIMIT share.quota {{lock}}
    ) AS each
    WHERE {may_start}
    LIMIT :batch_size""",
            f", {table.claimed()}",
            key=table.key,
            only=by_key(address),
        )


SHARED_OUTGOING: Final = Shared(OUTBOX, _NOT_LATCHED % ":lane")
SHARED_INCOMING: Final = Shared(
    INBOX,
    f"""NOT EXISTS (
        SELECT FROM {{schema}}.circuits
        WHERE kind = 'handler' AND key IN (:lane, :handler) AND NOT parked AND {_OPEN} AND {_UNTRIED})""",
)
