"""The SQL statements of publishing in bulk: rows gather in staging tables, and move into the outbox or the inbox.

A staging table belongs to one attempt of one task. It is unlogged, and a crash of the server empties it: so what moves
is counted. Functions of the schema's owner make and drop it; the runtime role needs no DDL rights.

`{staged}` stands for one staging table or more, as `durable.storage.staging` names them.
"""

from __future__ import annotations

from typing import Final

from durable.storage.sql.columns import DATED, NO_TERMS, carried_digest, carries_digest, remember_undated
from durable.storage.sql.statement import Statement

_ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body, sent_at, "
    "deliver_by, execution_time"
)
_SELECT_ENVELOPE: Final = _ENVELOPE.replace("headers", "CAST(headers AS jsonb)")
_QUEUEING: Final = "owner_id, ordering_key, fair_key"
_SELECT_QUEUEING: Final = "0, ordering_key, fair_key"

MAKE_STAGING = Statement("SELECT {schema}.make_staging(CAST(:staging AS text), CAST(current_user AS text))")
# One table, or, when the name ends with an underscore, all that begin with it.
DROP_STAGING = Statement("SELECT {schema}.drop_staging(CAST(:chosen AS text), CAST(:keep AS interval))")
COUNT_STAGED = Statement("SELECT count(*) FROM {staged}")

# `seq` follows the positions. What comes in no order has none, and is sorted by id, so that the primary key grows from
# left to right. ON CONFLICT costs a quarter of an insert, and is only needed
# where some of the rows are there.
_MOVE_REMOTE: Final = f"""
INSERT INTO {{schema}}.outgoing_envelopes (destination, {_ENVELOPE}, {_QUEUEING})
SELECT destination, {_SELECT_ENVELOPE}, {_SELECT_QUEUEING} FROM {{staged}} WHERE endpoint IS NULL
ORDER BY position, id
"""
MOVE_REMOTE_NEW = Statement(_MOVE_REMOTE)
MOVE_REMOTE = Statement(f"{_MOVE_REMOTE} ON CONFLICT DO NOTHING")


def _fresh(address: str, digest: str, those: str) -> str:
    """The keys of staged rows that were not known; they are known from now on."""
    rows = (
        f"SELECT DISTINCT ON (id, {address}) id, {address}, {digest}, sent_at, carried, {NO_TERMS} FROM {{staged}} "
        f"WHERE {those}"
    )
    return f"""dated AS (
    INSERT INTO {{schema}}.received_ids (id, endpoint, message_digest, carried)
    SELECT id, {address}, {digest}, carried FROM {{staged}} WHERE {those} AND {DATED}
    ORDER BY id
    ON CONFLICT DO NOTHING RETURNING id, endpoint
), undated AS (
    {remember_undated(f"{rows} AND NOT {DATED} ORDER BY id, {address}")}
), fresh AS (
    SELECT id, endpoint AS {address} FROM dated UNION ALL SELECT id, endpoint FROM undated
)"""


# An outbox forgets what it has sent. What is to be published once, also after that, is remembered as what was received.
MOVE_REMOTE_ONCE = Statement(f"""
WITH {_fresh("destination", "message_digest", "endpoint IS NULL")}
INSERT INTO {{schema}}.outgoing_envelopes (destination, {_ENVELOPE}, {_QUEUEING})
SELECT destination, {_SELECT_ENVELOPE}, {_SELECT_QUEUEING} FROM {{staged}} JOIN fresh USING (id, destination)
WHERE endpoint IS NULL
ORDER BY position, id
ON CONFLICT DO NOTHING
""")


def _move_local(those: str) -> Statement:
    """Move local rows; as for all arrivals, the insert of the id is the check for duplicates."""
    return Statement(f"""
WITH {_fresh("endpoint", "message_digest", those)}
INSERT INTO {{schema}}.incoming_envelopes (endpoint, {_ENVELOPE}, {_QUEUEING})
SELECT endpoint, {_SELECT_ENVELOPE}, {_SELECT_QUEUEING} FROM (
    SELECT DISTINCT ON (id, endpoint) * FROM {{staged}} JOIN fresh USING (id, endpoint)
    ORDER BY id, endpoint, position
) AS first
ORDER BY position, id
ON CONFLICT (id, endpoint) DO NOTHING
""")


MOVE_LOCAL = _move_local("endpoint IS NOT NULL")
# Local messages with generated ids are not among those ids: the history knows which of them were here.
MOVE_LOCAL_ONCE = _move_local("""endpoint IS NOT NULL AND NOT EXISTS (
        SELECT FROM {schema}.envelope_history AS past
        WHERE past.id = staged.id AND past.side = 'incoming' AND past.address = staged.endpoint)""")
# What reaches the receiver of a message, besides its id and its address.
_NAMED: Final = (
    *("message_type", "source", "body", "correlation_id", "causation_id", "partition_key", "content_type", "headers"),
    *("sent_at", "deliver_by", "execution_time"),
)
_NOT_IN_HISTORY: Final = ("execution_time",)
_KEPT_WITH_BODIES: Final = ("content_type", "headers", "body")


# An empty key is none, headers are compared whatever their order, and a time that was not given is that of staging.
_VALUES: Final = {
    "partition_key": "NULLIF({0}.partition_key, '')",
    "headers": "CAST({0}.headers AS jsonb)",
    "sent_at": "CASE WHEN {0}.dated THEN {0}.sent_at END",
}
UNTOLD: Final = "body, which cannot be compared"
"""In place of a column: one of the bodies is encrypted, and not under a key that the other has a digest of."""


def _body_differs(known: str) -> str:
    """'body' where the message of a staged row has another digest than this one, UNTOLD where nobody can tell."""
    return f"""CASE
        WHEN {known} IN (0, staged.message_digest) OR {known} = ANY(CAST(staged.digests AS bigint[])) THEN NULL
        WHEN {known} & 1 = 0 AND staged.message_digest & 1 = 0 THEN 'body'
        WHEN {known} & 1 = 1 AND EXISTS (
            SELECT FROM unnest(CAST(staged.digests AS bigint[]) || staged.message_digest) AS given
            WHERE given & 1 = 1 AND given >> 44 = {known} >> 44) THEN 'body'
        ELSE '{UNTOLD}' END"""


def _copied(column: str) -> str:
    if column == "body":
        return "CASE WHEN count(DISTINCT (message_type, message_digest)) > count(DISTINCT message_type) THEN 'body' END"
    value = _VALUES.get(column, f"staged.{column}").format("staged")
    return f"CASE WHEN count(DISTINCT ROW({value})) > 1 THEN '{column}' END"


# Two rows under one id that are two messages: one of them would be lost without a word.
FIND_AMBIGUOUS = Statement(f"""
SELECT id, min(message_type) AS message_type, array_remove(ARRAY[{", ".join(map(_copied, _NAMED))}], NULL) AS columns
FROM {{staged}} GROUP BY id, destination, endpoint
HAVING count(DISTINCT carried) > 1 OR count(DISTINCT message_digest) > 1 LIMIT 1
""")


def _differs(known: str, column: str) -> str:
    differs = f"{known}.{column} IS DISTINCT FROM staged.{column}"
    if column == "body":  # digests are of the type, too
        return f"CASE WHEN {known}.message_type = staged.message_type THEN {_bodies_differ(known)} END"
    if column in ("headers", "partition_key"):
        differs = f"{_VALUES[column].format(known)} IS DISTINCT FROM {_VALUES[column].format('staged')}"
    if column == "sent_at":
        differs += " AND staged.dated"
    elif column == "deliver_by":  # taken away where a dead letter is sent once more
        differs += f" AND ({known}.deliver_by IS NOT NULL OR staged.deliver_by > now())"
    elif column == "execution_time":  # taken away when it has come; an attempt that failed has another
        differs += f" AND {known}.attempts = 0 AND ({known}.{column} IS NOT NULL OR staged.{column} > now())"
    elif known == "past" and column in _KEPT_WITH_BODIES:
        differs += " AND past.content_type IS NOT NULL"
    return f"CASE WHEN {differs} THEN '{column}' END"


def _bodies_differ(known: str) -> str:
    if known != "known":
        return "staged.body_differs"
    return f"""CASE WHEN {carries_digest("known.body")} THEN {_body_differs(carried_digest("known.body"))}
        WHEN staged.message_digest & 1 = 1 THEN '{UNTOLD}'
        WHEN known.body <> staged.body THEN 'body' END"""


def _differing(known: str) -> str:
    """The array of the columns in which a staged row differs from a known message."""
    columns = [column for column in _NAMED if known != "past" or column not in _NOT_IN_HISTORY]
    return f"array_remove(ARRAY[{', '.join(_differs(known, column) for column in columns)}], NULL)"


def _remembered(ids: str, condition: str = "") -> str:
    body_differs = _body_differs("known.message_digest")
    return f"""SELECT staged.*, known.endpoint AS address, {body_differs} AS body_differs FROM {{staged}}
    JOIN {{schema}}.{ids} AS known ON known.id = staged.id AND known.endpoint = COALESCE(staged.endpoint, destination)
    WHERE (known.carried <> staged.carried OR {body_differs} IS NOT NULL) {condition}"""


# Messages that wait in the outbox are compared as they are, others by what is remembered with their ids.
_REMEMBERED: Final = f"""remembered AS (
    SELECT * FROM (
        {_remembered("received_ids")} UNION ALL {_remembered("undated_ids", " AND NOT known.given_up")}
    ) AS each
    WHERE endpoint IS NOT NULL OR NOT EXISTS (
        SELECT FROM {{schema}}.outgoing_envelopes AS row WHERE row.id = each.id AND row.destination = each.destination)
)"""
_COUNTED: Final = "SELECT columns, count(*) AS rows, min(CAST(id AS text)) AS id"

# Staged rows under whose ids other messages are there: how many differ in these columns; NULL: it has to be looked up.
FIND_CHANGED = Statement(f"""
WITH {_REMEMBERED}, changed AS (
    SELECT DISTINCT staged.id, destination, {_differing("known")} AS columns
    FROM {{staged}} JOIN {{schema}}.outgoing_envelopes AS known USING (id, destination) WHERE staged.endpoint IS NULL
    UNION ALL
    SELECT DISTINCT id, address, CAST(NULL AS text[]) FROM remembered
)
{_COUNTED} FROM changed WHERE columns IS NULL OR columns <> '{{}}' GROUP BY columns
""")
# The same for those that are remembered, with the columns as far as they are kept: history has no index by id.
NAME_CHANGED = Statement(f"""
WITH {_REMEMBERED}, past AS (
    SELECT DISTINCT ON (history.id, history.side, history.address) history.*
    FROM {{schema}}.envelope_history AS history JOIN remembered ON remembered.id = history.id
        AND remembered.address = history.address AND history.side = CASE
            WHEN remembered.endpoint IS NULL THEN 'outgoing' ELSE 'incoming' END
    WHERE erasure_id IS NULL ORDER BY history.id, history.side, history.address, finished_at
), changed AS (
    SELECT DISTINCT staged.id, staged.address, CASE WHEN waiting.id IS NOT NULL THEN {_differing("waiting")}
        WHEN past.id IS NOT NULL THEN {_differing("past")}
        ELSE array_remove(ARRAY[staged.body_differs], NULL) END AS columns
    FROM remembered AS staged
    LEFT JOIN {{schema}}.incoming_envelopes AS waiting
        ON waiting.id = staged.id AND waiting.endpoint = staged.endpoint
    LEFT JOIN past ON past.id = staged.id AND past.address = staged.address
)
{_COUNTED} FROM changed GROUP BY columns
""")
# A row comes back unless this batch, or this or a later micro-batch of a stream, was published before. Who publishes
# the same batch at the same time waits here for the first. Of a stream the contents of the last micro-batch are kept.
BEGIN_BATCH = Statement("""
INSERT INTO {schema}.published_batches AS known (batch, job, number, contents)
VALUES (:batch, CAST(:job AS uuid), CAST(:number AS bigint), CAST(:contents AS jsonb))
ON CONFLICT (batch) DO UPDATE SET job = excluded.job, number = excluded.number, contents = excluded.contents,
    published_at = clock_timestamp()
WHERE known.number < excluded.number
RETURNING batch
""")
FIND_NAME = Statement("SELECT min(batch) FROM {schema}.published_batches WHERE batch = ANY(CAST(:batches AS text[]))")
READ_CONTENTS = Statement("SELECT number, contents FROM {schema}.published_batches WHERE batch = :batch")
COUNT_BATCH = Statement("""
UPDATE {schema}.published_batches SET row_count = :row_count, added_count = :added_count WHERE batch = :batch
""")
READ_BATCH = Statement("""
SELECT batch, row_count, added_count FROM {schema}.published_batches WHERE job = CAST(:job AS uuid)
""")
READ_BATCHES = Statement("""
SELECT batch, row_count, added_count, number, published_at
FROM {schema}.published_batches ORDER BY published_at DESC, batch LIMIT :limit
""")
NOTIFY = Statement("SELECT pg_notify(CAST(:channel AS text), '')")
# What streams have come to is kept: a query may be started again on its checkpoint after any time.
PURGE_BATCHES = Statement("""
DELETE FROM {schema}.published_batches WHERE number IS NULL AND published_at < now() - CAST(:keep AS interval)
""")
