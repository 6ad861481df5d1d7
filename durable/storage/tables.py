"""The tables as SQLAlchemy Core describes them, for applications that query them or put them into their own MetaData.

The migrations own the database; a test holds these definitions against what the migrations make.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    FetchedValue,
    ForeignKey,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine


def define(metadata: MetaData, schema: str = "durable") -> dict[str, Table]:
    """Add durable's tables to this metadata and return them by name."""
    tables = [
        Table(
            "outgoing_envelopes",
            metadata,
            Column("destination", Text, nullable=False),
            *_envelope(),
            PrimaryKeyConstraint("id", "destination"),
            schema=schema,
        ),
        Table(
            "incoming_envelopes",
            metadata,
            Column("endpoint", Text, nullable=False),
            *_envelope(),
            _defaulted("received_at", _TIME),
            PrimaryKeyConstraint("id", "endpoint"),
            schema=schema,
        ),
        Table(
            "received_ids",
            metadata,
            Column("id", Uuid, nullable=False),
            Column("endpoint", Text, nullable=False),
            Column("message_digest", BigInteger, nullable=False),
            _defaulted("received_at", _TIME),
            PrimaryKeyConstraint("id", "endpoint"),
            schema=schema,
        ),
        Table(
            "envelope_history",
            metadata,
            Column("id", Uuid, nullable=False),
            *(Column(name, Text, nullable=False) for name in ("side", "outcome", "address", "message_type", "source")),
            Column("correlation_id", Uuid, nullable=False),
            Column("causation_id", Uuid),
            Column("partition_key", Text),
            Column("sent_at", _TIME, nullable=False),
            Column("deliver_by", _TIME),
            Column("received_at", _TIME),
            _defaulted("finished_at", _TIME),
            Column("attempts", Integer, nullable=False),
            Column("interruptions", Integer, nullable=False),
            Column("node_id", Integer, nullable=False),
            Column("error", Text),
            Column("content_type", Text),
            Column("headers", JSONB),
            Column("body", LargeBinary),
            _defaulted("xid", BigInteger()),
            schema=schema,
        ),
        Table(
            "dead_letters",
            metadata,
            Column("letter_id", BigInteger, Identity(always=True), primary_key=True),
            Column("side", Text, nullable=False),
            Column("address", Text, nullable=False),
            Column("id", Uuid),
            Column("message_type", Text),
            Column("source", Text),
            Column("correlation_id", Uuid),
            Column("causation_id", Uuid),
            Column("partition_key", Text),
            Column("content_type", Text),
            _defaulted("headers", JSONB()),
            Column("body", LargeBinary, nullable=False),
            Column("sent_at", _TIME),
            Column("deliver_by", _TIME),
            _defaulted("attempts", Integer()),
            _defaulted("interruptions", Integer()),
            Column("exception_type", Text, nullable=False),
            Column("reason", Text, nullable=False),
            Column("traceback", Text),
            Column("fingerprint", Text, nullable=False),
            _defaulted("failed_at", _TIME),
            _defaulted("replay_count", Integer()),
            Column("node_id", Integer, nullable=False),
            _defaulted("epoch", Integer()),
            Column("message_digest", BigInteger),
            _defaulted("replayable", Boolean()),
            Column("resolution", Text),
            Column("resolved_at", _TIME),
            Column("resolved_by", Text),
            Column("resolution_reason", Text),
            Column("edited_body", LargeBinary),
            _defaulted("xid", BigInteger()),
            *_queueing(),
            schema=schema,
        ),
        Table(
            "archives",
            metadata,
            Column("table_name", Text, primary_key=True),
            *(Column(name, Text, nullable=False) for name in ("service", "app_id", "lake", "lake_id")),
            *(_defaulted(name, BigInteger()) for name in ("claimed_below", "archived_below")),
            Column("archived_at", _TIME),
            _defaulted("identity", Text()),
            schema=schema,
        ),
        Table(
            "archive_commits",
            metadata,
            Column("table_name", Text, primary_key=True),
            Column("high", BigInteger, primary_key=True, autoincrement=False),
            Column("low", BigInteger, nullable=False),
            Column("day", Date, primary_key=True),
            Column("row_count", BigInteger, nullable=False),
            _defaulted("archived_at", _TIME),
            schema=schema,
        ),
        Table(
            "generations",
            metadata,
            Column("generation", Integer, primary_key=True, autoincrement=False),
            Column("database", Text, nullable=False),
            _defaulted("began_at", _TIME),
            schema=schema,
        ),
        Table(
            "failed_attempts",
            metadata,
            Column("attempt_id", BigInteger, Identity(always=True), primary_key=True),
            Column("id", Uuid, nullable=False),
            Column("endpoint", Text, nullable=False),
            Column("number", Integer, nullable=False),
            Column("failed_at", _TIME, nullable=False),
            Column("node_id", Integer, nullable=False),
            *(Column(name, Text, nullable=False) for name in ("exception_type", "reason", "traceback")),
            Column("letter_id", BigInteger, ForeignKey(f"{schema}.dead_letters.letter_id", ondelete="CASCADE")),
            schema=schema,
        ),
        Table(
            "nodes",
            metadata,
            Column("node_id", Integer, primary_key=True, server_default=FetchedValue()),
            *(Column(name, Text, nullable=False) for name in ("service", "description", "version")),
            _defaulted("started_at", _TIME),
            _defaulted("heartbeat_at", _TIME),
            _defaulted("capabilities", JSONB()),
            schema=schema,
        ),
        Table(
            "circuits",
            metadata,
            Column("kind", Text, nullable=False),
            Column("key", Text, nullable=False),
            Column("reason", Text, nullable=False),
            _defaulted("since", _TIME),
            Column("until", _TIME),
            Column("actor", Text, nullable=False),
            _defaulted("probing", Boolean()),
            PrimaryKeyConstraint("kind", "key"),
            schema=schema,
        ),
        Table(
            "schedules",
            metadata,
            Column("name", Text, primary_key=True),
            *(Column(name, Text, nullable=False) for name in ("cron", "tz", "missed")),
            Column("message_type", Text),
            Column("destination", Text),
            Column("declaration", Text, nullable=False),
            Column("declared_by", Integer, nullable=False),
            _defaulted("declared_at", _TIME),
            Column("occurrence_at", _TIME),
            Column("due_at", _TIME, nullable=False),
            *(Column(name, _TIME) for name in ("asked_at", "last_at", "ran_at")),
            Column("changed_by", Text),
            Column("changed_at", _TIME),
            Column("error", Text),
            schema=schema,
        ),
        Table(
            "published_batches",
            metadata,
            Column("batch", Text, primary_key=True),
            Column("job", Uuid, nullable=False),
            Column("number", BigInteger),
            _defaulted("row_count", BigInteger()),
            _defaulted("added_count", BigInteger()),
            _defaulted("published_at", _TIME),
            schema=schema,
        ),
    ]
    return {table.name: table for table in tables}


_TIME = DateTime(timezone=True)


def _defaulted(name: str, kind: TypeEngine[Any]) -> Column[Any]:
    """A column that the database fills when the insert does not."""
    return Column(name, kind, nullable=False, server_default=FetchedValue())


def _envelope() -> list[Column[Any]]:
    columns: list[Column[Any]] = [
        Column("seq", BigInteger, Identity(always=True), nullable=False),
        Column("id", Uuid, nullable=False),
        Column("message_type", Text, nullable=False),
        Column("source", Text, nullable=False),
        Column("correlation_id", Uuid, nullable=False),
        Column("causation_id", Uuid),
        Column("partition_key", Text),
        Column("content_type", Text, nullable=False),
        _defaulted("headers", JSONB()),
        Column("body", LargeBinary, nullable=False),
        Column("sent_at", _TIME, nullable=False),
        Column("deliver_by", _TIME),
        Column("execution_time", _TIME),
        _defaulted("attempts", Integer()),
        _defaulted("interruptions", Integer()),
        Column("owner_id", Integer, nullable=False),
        *_queueing(),
        _defaulted("epoch", Integer()),
    ]
    return columns


def _queueing() -> list[Column[Any]]:
    return [Column("ordering_key", Text(collation="C")), Column("fair_key", Text(collation="C"))]
