"""The SQL over encrypted bodies: which keys they need, and which of them are to be encrypted anew.

Keys are counted by reading every row: an operator asks, before a key is thrown away.
"""

from __future__ import annotations

from typing import Final

from durable.envelope import TENANT
from durable.storage.sql.columns import OWNED, is_sealed, key_id_of
from durable.storage.sql.statement import Statement
from durable.storage.sql.work import INBOX, OUTBOX, WorkTable

_OF_LETTERS: Final = "FROM {schema}.dead_letters WHERE erasure_id IS NULL"
_CAN_ROTATE: Final = "replayable AND id IS NOT NULL AND message_type IS NOT NULL"
# The bodies, or a row without one, with their types, whether a readable one can be encrypted anew, and whether the
# message waits. An edited body counts for itself where it differs from the first in what it needs.
_PLACES: Final = {
    "outbox": f"SELECT body, message_type, true AS can_rotate, true AS waits FROM {OUTBOX.rows}",
    "inbox": f"SELECT body, message_type, true AS can_rotate, true AS waits FROM {INBOX.rows}",
    "dead letters": " UNION ALL ".join(
        f"SELECT {body}, message_type, {_CAN_ROTATE} AS can_rotate, resolved_at IS NULL AS waits "
        f"{_OF_LETTERS} AND {condition}"
        for body, condition in {
            "body": "true",
            "edited_body": f"edited_body IS NOT NULL AND ({is_sealed('body')}, {key_id_of('body')}) "
            f"IS DISTINCT FROM ({is_sealed('edited_body')}, {key_id_of('edited_body')})",
        }.items()
    ),
    "history": "SELECT body, message_type, true AS can_rotate, false AS waits FROM {schema}.envelope_history "
    "WHERE body IS NOT NULL AND erasure_id IS NULL",
    "answers": "SELECT body, message_type, true AS can_rotate, false AS waits FROM {schema}.answers "
    "WHERE body IS NOT NULL",
}
_IS_READABLE: Final = (
    f"NOT {is_sealed('body')} AND can_rotate "
    "AND (CAST(:everything AS boolean) OR message_type = ANY (CAST(:types AS text[])))"
)
COUNT_KEYS = Statement(
    " UNION ALL ".join(
        f"SELECT '{place}' AS place, {key_id_of('body')} AS key_id, count(*) AS rows, "
        f"count(*) FILTER (WHERE {_IS_READABLE}) AS readable FROM ({rows}) AS bodies GROUP BY 2"
        for place, rows in _PLACES.items()
    )
)
_ROTATED: Final = ("outbox", "inbox", "dead letters")
COUNT_READABLE = Statement(
    f"SELECT count(*) FROM ({' UNION ALL '.join(_PLACES[place] for place in _ROTATED)}) AS bodies WHERE {_IS_READABLE}"
)
# What waits, and needs a key that is not among these. NULL <> ALL of none is true.
COUNT_LOCKED = Statement(
    " UNION ALL ".join(
        f"SELECT '{place}' AS place, key_id, count(*) AS rows "
        f"FROM (SELECT {key_id_of('body')} AS key_id FROM ({_PLACES[place]}) AS bodies WHERE waits) AS needed "
        f"WHERE key_id IS NOT NULL AND key_id <> ALL (CAST(:key_ids AS text[])) GROUP BY key_id"
        for place in _ROTATED
    )
)

# ---------------------------------------------------------------- rotating

_WANTED: Final = f"""COALESCE(
        (SELECT named.key_id FROM unnest(CAST(:tenants AS text[]), CAST(:tenant_keys AS text[]))
            AS named (tenant, key_id) WHERE named.tenant = row.headers->>'{TENANT}'), CAST(:encrypts AS text))"""
_OF_A_TYPE: Final = "(CAST(:everything AS boolean) OR row.message_type = ANY (CAST(:types AS text[])))"


def _is_stale(body: str) -> str:
    """The condition that a body is under another key than its tenant's, or readable and should not be."""
    return f"CASE WHEN {is_sealed(body)} THEN {key_id_of(body)} <> {_WANTED} ELSE {_OF_A_TYPE} END"


class Rotation:
    """The statements that encrypt the bodies of one place anew; `address` is the column that tells rows of one id apart
    in its table.
    """

    def __init__(self, table: str, address: str, *, count: str, read: str, write: str) -> None:
        self.table = table
        self.address = address
        self.count = Statement(count)
        self.read = Statement(read)
        self.write = Statement(write)


def _work(table: WorkTable) -> Rotation:
    stale = f"FROM {table.rows} AS row WHERE {_is_stale('row.body')}"
    place = f"(row.id, row.{table.address}) > (CAST(:after_id AS uuid), CAST(:after_address AS text))"
    return Rotation(
        table.name,
        table.address,
        count=f"SELECT count(*) {stale}",
        # A row that a node has in its memory is left to it: it comes to its end soon, or back.
        read=f"""SELECT row.id, row.{table.address} AS address, row.{table.address} AS place, row.message_type,
            row.headers->>'{TENANT}' AS tenant, row.body, CAST(NULL AS bytea) AS edited_body
            {stale} AND NOT row.{OWNED} AND {place}
            ORDER BY row.id, row.{table.address} LIMIT :batch_size FOR UPDATE SKIP LOCKED""",
        write=f"""UPDATE {table.rows} AS row SET body = new.body
            FROM unnest(CAST(:ids AS uuid[]), CAST(:addresses AS text[]), CAST(:bodies AS bytea[]),
                CAST(:edited AS bytea[])) AS new (id, address, body, edited)
            WHERE row.id = new.id AND row.{table.address} = new.address""",
    )


def _letters() -> Rotation:
    edited = f"(row.edited_body IS NOT NULL AND {_is_stale('row.edited_body')})"
    rows = f"""FROM {{schema}}.dead_letters AS row WHERE row.id IS NOT NULL AND row.message_type IS NOT NULL
        AND row.erasure_id IS NULL AND (row.replayable OR {is_sealed("row.body")})
        AND ({_is_stale("row.body")} OR {edited})"""
    return Rotation(
        "dead_letters",
        "letter_id",
        count=f"SELECT count(*) {rows}",
        read=f"""SELECT row.id, CAST(row.letter_id AS text) AS address, row.address AS place, row.message_type,
            row.headers->>'{TENANT}' AS tenant, row.body, row.edited_body
            {rows} AND row.letter_id > CAST(COALESCE(NULLIF(:after_address, ''), '0') AS bigint)
            AND CAST(:after_id AS uuid) IS NOT NULL
            ORDER BY row.letter_id LIMIT :batch_size FOR UPDATE SKIP LOCKED""",
        # It is archived again, as after any other change.
        write="""UPDATE {schema}.dead_letters AS row
            SET body = new.body, edited_body = new.edited, xid = DEFAULT
            FROM unnest(CAST(:ids AS uuid[]), CAST(:addresses AS text[]), CAST(:bodies AS bytea[]),
                CAST(:edited AS bytea[])) AS new (id, address, body, edited)
            WHERE row.letter_id = CAST(new.address AS bigint) AND row.id = new.id""",
    )


ROTATIONS: Final = {
    "outbox": _work(OUTBOX),
    "inbox": _work(INBOX),
    "dead letters": _letters(),
}
