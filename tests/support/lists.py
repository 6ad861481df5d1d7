"""Rows of lists that grow with use, as many as a test asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from durable.messages.sealed import KEY_ID_AT, MAGIC, TAG_BYTES
from durable.storage.sql.parked import PARKED_OWNER
from tests.support.tables import Tables

_SEALED: Final = (MAGIC.ljust(KEY_ID_AT, b"\0") + bytes([4])).hex()
_AFTER_KEY_ID: Final = bytes(2 + TAG_BYTES).hex()


def _waiting(side: str, address: str, kind: str, *, body: str = "'{}'", owner: int = 0, due: str = "NULL") -> str:
    place = "destination" if side == "outgoing" else "endpoint"
    return f"""
INSERT INTO durable.{side}_envelopes
    ({place}, id, message_type, source, correlation_id, content_type, body, sent_at, owner_id, execution_time)
SELECT {address}, gen_random_uuid(), {kind}, 'shop', gen_random_uuid(), 'application/json', {body}, now(), {owner},
    {due}
FROM generate_series(1, %s) AS n"""


GROWTHS: Final[Mapping[str, str]] = {
    "keys": """
INSERT INTO durable.circuits (kind, key, reason, actor, since, parked)
SELECT 'key', 'order-' || n, 'dead letter ' || n, 'node 7', now() - n * interval '1 min', true
FROM generate_series(1, %s) AS n""",
    "latches": """
INSERT INTO durable.circuits (kind, key, reason, actor, probing)
SELECT 'destination', 'tcp://127.0.0.1:' || n, 'refused', 'node 7', true FROM generate_series(1, %s) AS n""",
    "nodes": """
INSERT INTO durable.nodes (service, description, version)
SELECT 'shop', 'host:' || n, '1' FROM generate_series(1, %s) AS n""",
    "schedules": """
INSERT INTO durable.schedules (name, cron, tz, misfire, declaration, declared_by, due_at)
SELECT 'daily ' || n, '0 3 * * *', 'UTC', 'once', 'd', 1, now() + interval '1 h' FROM generate_series(1, %s) AS n""",
    "causes": """
INSERT INTO durable.dead_letters (side, address, body, exception_type, reason, fingerprint, node_id)
SELECT 'incoming', 'shop', '{}', 'Error' || n, 'test', 'f' || n, 7 FROM generate_series(1, %s) AS n""",
    "destinations": _waiting("outgoing", "'tcp://127.0.0.1:' || n", "'a.b'"),
    "types": _waiting("incoming", "'shop'", "'a.b' || n"),
    "delayed": _waiting("incoming", "'shop'", "'a.b'", due="now() + n * interval '1 min'"),
    "locked": _waiting(
        "incoming",
        "'shop'",
        "'a.b'",
        body=f"decode('{_SEALED}', 'hex') || convert_to(lpad(CAST(n AS text), 4, '0'), 'UTF8') || "
        f"decode('{_AFTER_KEY_ID}', 'hex')",
        owner=PARKED_OWNER,
    ),
    "providers": """
INSERT INTO durable.offers (service, source, application, node, machine, version, digest, signatures, addresses, since,
    leased_until)
SELECT 'Stock', 'peer ' || n, 'stock', n, 'm', '1', '', '[]', '{}', now(), now() + interval '1 h'
FROM generate_series(1, %s) AS n""",
}
"""Statements that add this number of rows, all of which a list shows."""


def grow(tables: Tables, name: str, count: int) -> None:
    tables.execute(GROWTHS[name], count)
