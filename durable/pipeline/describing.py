"""Descriptions in the lake's own tables, for readers without durable: comments, properties, a format.

    a column's comment         shown by DESCRIBE TABLE, catalogs and notebooks
    durable.format             raised when older versions must not touch a table any more; they refuse it then
    statistics                 of columns that hold no content: the log keeps them for longer than the rows

Columns that a newer version has added are no other format: they are passed over, and stay NULL in rows of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Literal

from durable.errors import InvalidSetting

if TYPE_CHECKING:
    import pyarrow
    from deltalake import DeltaTable

Table = Literal["history", "dead_letters"]

FORMAT: Final = 1
_FORMAT: Final = "durable.format"

DESCRIPTIONS: Final[Mapping[Table, str]] = {
    "history": "what became of each envelope on each side, archived from Postgres by durable",
    "dead_letters": "each state of each dead letter, archived from Postgres by durable; the highest xid counts",
}
_STATISTICS: Final[Mapping[Table, str]] = {
    "history": "service,database,side,outcome,address,message_type,finished_at,xid",
    "dead_letters": "service,database,side,address,message_type,failed_at,letter_id,xid",
}

_COMMON: Final = {
    "service": "the service whose database this row is from",
    "database": "the name that durable gave that database; NULL in rows of the first version",
    "id": "the message's UUID, 16 bytes in the order of its text",
    "side": "outgoing: written by the sender; incoming: by the receiver",
    "address": "outgoing: the destination's URI; incoming: the endpoint that it came in by",
    "message_type": "the name of the message's type",
    "source": "the service that sent the message",
    "correlation_id": "the conversation: the id of its first message",
    "causation_id": "the message whose handler sent this one; NULL where none did",
    "partition_key": "messages with one key are kept in order; NULL after an erasure",
    "sent_at": "when send() was called, by the sender's clock",
    "deliver_by": "after it the message has expired; NULL where it never does",
    "attempts": "attempts that failed, with the last one of what was given up",
    "interruptions": "attempts that ended with their node, or with an outage",
    "node_id": "the node that wrote the row",
    "content_type": "how the body is encoded",
    "headers": "a JSON object of texts",
    "body": "the encoded message",
    "xid": "the transaction that wrote the row; rises over dumps and restores of the database",
    "erasure_id": "the erasure that emptied key, headers, body and error texts of this row; else NULL",
}
_ONLY: Final[Mapping[Table, Mapping[str, str]]] = {
    "history": {
        "outcome": "sent, handled, dead-lettered, expired or cancelled",
        "received_at": "incoming: when it was stored in the inbox",
        "finished_at": "when it came to this outcome, by the database's clock",
        "error": "why it was dead-lettered",
        "seq": "the place of the message in the order of commits of its database; NULL in rows of the first version",
        "day": "the UTC day of finished_at",
    },
    "dead_letters": {
        "letter_id": "the number of the letter within its database; with id and failed_at it tells letters apart",
        "exception_type": "the class of the last exception",
        "reason": "the text of the last exception",
        "traceback": "where it was raised",
        "fingerprint": "the same for letters of one cause",
        "failed_at": "when it was given up",
        "replay_count": "how often it has been replayed",
        "epoch": "how often the message has changed hands",
        "message_digest": "a digest of the message, by which a duplicate is told from another message",
        "replayable": "whether it holds a whole envelope",
        "resolution": "replayed, handled or discarded; NULL while it is open",
        "resolved_at": "when it was resolved",
        "resolved_by": "who resolved it",
        "resolution_reason": "why",
        "edited_body": "the body that it was replayed with, where that was another one",
        "ordering_key": "the key under which it waited for its turn",
        "fair_key": "the key by which turns were shared out",
        "day": "the UTC day of failed_at",
    },
}


def comments(table: Table) -> Mapping[str, str]:
    """The comment of each column."""
    return {**_COMMON, **_ONLY[table]}


def properties(table: Table) -> dict[str, str]:
    """The properties of a table. The retentions are Delta's own: vacuum and checkpoints go by them."""
    return {
        _FORMAT: str(FORMAT),
        "delta.dataSkippingStatsColumns": _STATISTICS[table],
        "delta.logRetentionDuration": "interval 30 days",
        "delta.deletedFileRetentionDuration": "interval 7 days",
    }


def commented(schema: pyarrow.Schema, table: Table) -> pyarrow.Schema:
    """A schema whose fields carry their comments, as Delta keeps them."""
    import pyarrow as pa

    of = comments(table)
    return pa.schema([field.with_metadata({"comment": of[field.name]}) for field in schema])


def describe(opened: DeltaTable, table: Table) -> None:
    """Bring comments and properties of a table up to date; nothing is committed where they are."""
    lacking = {
        name: value for name, value in properties(table).items() if opened.metadata().configuration.get(name) != value
    }
    if lacking:
        opened.alter.set_table_properties(lacking, raise_if_not_exists=False)
    if opened.metadata().description != DESCRIPTIONS[table]:
        opened.alter.set_table_description(DESCRIPTIONS[table])
    for name, comment in _uncommented(opened, table):
        opened.alter.set_column_metadata(name, {"comment": comment})


def refuse_newer(opened: DeltaTable, url: str) -> None:
    """Raise InvalidSetting for a table of a format that this version does not know."""
    given = opened.metadata().configuration.get(_FORMAT) or str(FORMAT)
    if not given.isdecimal() or int(given) > FORMAT:
        raise InvalidSetting(
            f"lake {url}: format {given} is unknown, and this version of durable knows formats up to {FORMAT}; "
            "upgrade durable wherever this lake is read or written"
        )


def refuse_unknown_columns(opened: DeltaTable, table: Table, url: str) -> None:
    """Raise InvalidSetting where a newer version has added columns, which this one would not carry over."""
    known = comments(table)
    unknown = sorted(field.name for field in opened.schema().fields if field.name not in known)
    if unknown:
        raise InvalidSetting(
            f"lake {url}: {table} has columns that this version of durable does not know ({', '.join(unknown)}), and "
            "rows cannot be rewritten without them; upgrade durable"
        )


def _uncommented(opened: DeltaTable, table: Table) -> Iterator[tuple[str, str]]:
    of = comments(table)
    for field in opened.schema().fields:
        if field.name in of and field.metadata.get("comment") != of[field.name]:
            yield field.name, of[field.name]
