"""Lists of columns and conditions that several statements share, in the order of durable.storage.rows."""

from __future__ import annotations

from typing import Final

from durable.messages.sealed import DIGEST_BYTES, KEY_ID_AT, LONGEST_KEY_ID, MAGIC, TAG_BYTES

ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body, sent_at, "
    "deliver_by"
)
UNNEST_ENVELOPE: Final = """
    CAST(:id AS uuid[]), CAST(:message_type AS text[]), CAST(:source AS text[]), CAST(:correlation_id AS uuid[]),
    CAST(:causation_id AS uuid[]), CAST(:partition_key AS text[]), CAST(:content_type AS text[]),
    CAST(:headers AS text[]), CAST(:body AS bytea[]), CAST(:sent_at AS timestamptz[]),
    CAST(:deliver_by AS timestamptz[])"""
VALUES_ENVELOPE: Final = """
    CAST(:id AS uuid), CAST(:message_type AS text), CAST(:source AS text), CAST(:correlation_id AS uuid),
    CAST(:causation_id AS uuid), CAST(:partition_key AS text), CAST(:content_type AS text),
    CAST(CAST(:headers AS text) AS jsonb), CAST(:body AS bytea), CAST(:sent_at AS timestamptz),
    CAST(:deliver_by AS timestamptz)"""
SELECT_ENVELOPE: Final = (
    "id, message_type, source, correlation_id, causation_id, partition_key, content_type, "
    "CAST(headers AS jsonb), body, sent_at, deliver_by"
)
QUEUEING: Final = "owner_id, ordering_key, fair_key"
UNNEST_QUEUEING: Final = "CAST(:owner_id AS integer[]), CAST(:ordering_key AS text[]), CAST(:fair_key AS text[])"
VALUES_QUEUEING: Final = "CAST(:owner_id AS integer), CAST(:ordering_key AS text), CAST(:fair_key AS text)"
# A sub-select hides the length of an array from the planner. One that it sees makes each plan for few rows look cheaper
# than the plan for all lengths, so that the statement would be planned anew each time, which takes longer than it does.
MINE: Final = """unnest(
        (SELECT CAST(:ids AS uuid[])), (SELECT CAST(:addresses AS text[])), (SELECT CAST(:epochs AS integer[]))
    ) AS mine (id, address, epoch)"""

HISTORY: Final = (
    "id, side, outcome, address, message_type, source, correlation_id, causation_id, partition_key, sent_at, "
    "deliver_by, received_at, attempts, interruptions, seq, content_type, headers, body, node_id, error"
)
# The unowned rows that are due, by whether their place among others matters; word for word as in the partial indexes.
FREE: Final = "owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL AND fair_key IS NULL"
ORDERED: Final = "ordering_key IS NOT NULL AND owner_id = 0 AND execution_time IS NULL"
SHARED: Final = "fair_key IS NOT NULL AND owner_id = 0 AND execution_time IS NULL AND ordering_key IS NULL"
QUEUED: Final = "owner_id = 0 AND execution_time IS NULL AND (ordering_key IS NOT NULL OR fair_key IS NOT NULL)"
OWNED: Final = "owner_id > 0"
"""A row of a node. Owner 0 is any node; rows below it are taken by none (PARKED_OWNER, REFUSED_OWNER)."""
LETTER: Final = (
    "side, address, id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, "
    "body, sent_at, deliver_by, attempts, interruptions, exception_type, reason, traceback, fingerprint, node_id, "
    "message_digest, replayable, epoch, replay_count, ordering_key, fair_key"
)
# The version as durable.envelope reads it: an id of another variant than RFC 9562's has none.
_VERSION: Final = "CASE WHEN get_byte(uuid_send(id), 8) >> 6 = 2 THEN get_byte(uuid_send(id), 6) >> 4 ELSE 0 END"
DATED: Final = f"({_VERSION} = 7)"
"""An id that carries its day lies in received_ids, any other in undated_ids: so none fills the default partition."""
GENERATED: Final = f"({_VERSION} IN (7, 8))"

REMEMBERED: Final = "id, endpoint, message_digest, sent_at, CAST(NULL AS bigint)"
"""What is remembered of a message that did not come in bulk, besides its terms and the time it was put off to."""
NO_TERMS: Final = "0, CAST(NULL AS timestamptz)"


# A conversion would fail at other bytes. Each dot is a digit of hex.
_UTF8_IN_HEX: Final = (
    "^([0-7].|(c[2-9a-f]|d.)[89ab].|(e0[ab].|e[1-9abcef][89ab].|ed[89].)[89ab].|"
    "(f0[9ab].|f[123][89ab].|f48.)[89ab].[89ab].)*$"
)


def remember_undated(rows: str) -> str:
    """The insert of these ids without a day, which returns those that are new. `rows` have the columns of REMEMBERED,
    the terms and the due time.

    New is also what was cancelled, or discarded as a dead letter, and is sent again; not what a peer without an answer
    repeats of it, which has the time at which it was sent then.
    """
    return f"""INSERT INTO {{schema}}.undated_ids AS known
        (id, endpoint, message_digest, sent_at, carried, terms, due_at)
    {rows}
    ON CONFLICT (id, endpoint) DO UPDATE SET message_digest = excluded.message_digest, terms = excluded.terms,
        sent_at = excluded.sent_at, carried = excluded.carried, due_at = excluded.due_at, expired = NULL,
        received_at = now(), given_up = false
    WHERE known.given_up AND known.sent_at <> excluded.sent_at
    RETURNING id, endpoint"""


def give_up(finished: str, address: str) -> str:
    """The update that frees the ids of what was cancelled or discarded, for other messages under the same key.

    `finished` has to hold its id: a message that only came under it must not free the id of the one that was handled.
    """
    return f"""UPDATE {{schema}}.undated_ids AS known SET given_up = true, received_at = now()
    FROM {finished} WHERE known.id = {finished}.id AND known.endpoint = {finished}.{address}"""


def remember_expired(expired: str) -> str:
    """The CTEs that note the deadlines of messages which expired with their ids: a message that comes under such an id
    and could still be handled is no duplicate.
    """
    return ", ".join(
        f"""of_{table} AS (
    UPDATE {{schema}}.{table} AS known SET expired = {expired}.deliver_by
    FROM {expired} WHERE known.id = {expired}.id AND known.endpoint = {expired}.endpoint
)"""
        for table in ("received_ids", "undated_ids")
    )


def known_digest(moved: str) -> str:
    """The digest of the message that holds the id of this row: of an edited body it is that of the first one."""
    return f"""COALESCE(
        (SELECT known.message_digest FROM {{schema}}.received_ids AS known
            WHERE known.id = {moved}.id AND known.endpoint = {moved}.endpoint),
        (SELECT known.message_digest FROM {{schema}}.undated_ids AS known
            WHERE known.id = {moved}.id AND known.endpoint = {moved}.endpoint))"""


def is_sealed(body: str) -> str:
    """The condition that a body is encrypted, or looks so (durable.messages.sealed)."""
    return f"(substring({body} FROM 1 FOR {len(MAGIC)}) = decode('{MAGIC.hex()}', 'hex'))"


def key_id_of(body: str) -> str:
    """The id of the key of an encrypted body; NULL for a readable one, and for one that is broken off.

    These are the key ids that durable.messages.sealed.parted() finds.
    """
    # Of a large body only the first bytes are read.
    head = f"substring({body} FROM 1 FOR {KEY_ID_AT + 1 + LONGEST_KEY_ID + 2})"
    key_bytes = f"get_byte({head}, {KEY_ID_AT})"
    ends = f"{KEY_ID_AT + 1} + {key_bytes}"
    address_bytes = f"(256 * get_byte({head}, {ends}) + get_byte({head}, {ends} + 1))"
    key_id = f"encode(substring({body} FROM {KEY_ID_AT + 2} FOR {key_bytes}), 'escape')"
    address = f"encode(substring({body} FROM {ends} + 3 FOR {address_bytes}), 'hex')"
    return f"""CASE WHEN {is_sealed(body)} AND octet_length({body}) > {KEY_ID_AT} THEN
        CASE WHEN octet_length({body}) >= {ends} + 2 AND {key_bytes} BETWEEN 1 AND {LONGEST_KEY_ID} THEN
        CASE WHEN octet_length({body}) >= {ends} + 2 + {address_bytes} + {TAG_BYTES}
            AND {key_id} ~ '^[A-Za-z0-9._-]+$' AND {address} ~ '{_UTF8_IN_HEX}' THEN {key_id} END END END"""


def carries_digest(body: str) -> str:
    """The condition that durable.messages.sealed.digest_of() finds a digest."""
    return f"({is_sealed(body)} AND octet_length({body}) >= {len(MAGIC) + DIGEST_BYTES})"


def carried_digest(body: str) -> str:
    """The digest that an encrypted body carries."""
    digest = f"encode(substring({body} FROM {len(MAGIC) + 1} FOR {DIGEST_BYTES}), 'hex')"
    return f"CAST(CAST('x' || {digest} AS bit(64)) AS bigint)"
