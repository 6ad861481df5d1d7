"""Encrypted bodies in the tables: counted by key, and encrypted anew, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Row

from durable.envelope import TENANT, Envelope
from durable.errors import DurableError
from durable.storage.isolation import isolated
from durable.storage.sql import encrypted as statements

PLACES: Final = tuple(statements.ROTATIONS)
"""Places whose bodies are encrypted anew. History is written once, and forgotten after history_retention."""

_FIRST: Final = UUID(int=0)
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)


class Wanted(NamedTuple):
    """Keys that bodies should be under: that of their tenant, or `encrypts`. `types`: types that are to be encrypted,
    besides those that are; `everything`: all.
    """

    encrypts: str
    tenants: Mapping[str, str]
    types: Sequence[str] = ()
    everything: bool = False

    def parameters(self) -> dict[str, Any]:
        return {
            "encrypts": self.encrypts,
            "tenants": list(self.tenants),
            "tenant_keys": list(self.tenants.values()),
            "types": list(self.types),
            "everything": self.everything,
        }


class KeyUse(NamedTuple):
    """Number of bodies of a place that need a key; None: of readable ones, `readable` of which should be encrypted."""

    place: str
    key_id: str | None
    rows: int
    readable: int = 0


class Position(NamedTuple):
    """The row that a batch ended with."""

    id: UUID = _FIRST
    address: str = ""


class Batch(NamedTuple):
    """Result of a batch: the rows that were encrypted anew, those that could not be opened or that the database refuses
    to change, each with the reason, and where it ended.

    The end is None when there were no more rows.
    """

    done: int
    unopened: Sequence[tuple[UUID, str]]
    refused: Sequence[tuple[str, str]]
    end: Position | None


class _Resealed(NamedTuple):
    """A row with its body and its edited body encrypted anew."""

    row: Row[Any]
    body: bytes
    edited: bytes | None


Reseal = Callable[[Envelope], bytes]
"""Encrypts the body of an envelope anew. Raises DurableError when it cannot be opened."""


def count_keys(conn: Connection, schema: str, types: Collection[str], *, everything: bool) -> list[KeyUse]:
    """Count the bodies of each key in each place, and readable ones."""
    params = {"types": list(types), "everything": everything}
    return [KeyUse(*row) for row in conn.execute(statements.COUNT_KEYS.within(schema), params)]


def count_locked(conn: Connection, schema: str, key_ids: Collection[str]) -> list[KeyUse]:
    """Count the waiting messages and dead letters whose keys are not among these."""
    return [KeyUse(*row) for row in conn.execute(statements.COUNT_LOCKED.within(schema), {"key_ids": list(key_ids)})]


def count_readable(conn: Connection, schema: str, types: Collection[str], *, everything: bool) -> int:
    """Count the waiting messages and dead letters that are readable, and should be encrypted."""
    params = {"types": list(types), "everything": everything}
    return int(conn.execute(statements.COUNT_READABLE.within(schema), params).scalar_one())


def count_stale(conn: Connection, schema: str, place: str, wanted: Wanted) -> int:
    """Count the bodies of a place that are to be encrypted anew."""
    found = conn.execute(statements.ROTATIONS[place].count.within(schema), wanted.parameters())
    return int(found.scalar_one())


def rotate(
    conn: Connection, schema: str, place: str, wanted: Wanted, reseal: Reseal, *, after: Position, batch_size: int
) -> Batch:
    """Encrypt the next bodies of a place anew. Rows that somebody else has locked are passed over, and rows that the
    database refuses to change are left.
    """
    rotation = statements.ROTATIONS[place]
    position = {"after_id": after.id, "after_address": after.address, "batch_size": batch_size}
    rows = conn.execute(rotation.read.within(schema), wanted.parameters() | position).all()
    resealed: list[_Resealed] = []
    unopened: list[tuple[UUID, str]] = []
    refused: list[tuple[str, str]] = []
    for row in rows:
        envelope = _envelope(row)
        try:
            edited = None if row.edited_body is None else reseal(_with(envelope, row.edited_body))
            resealed.append(_Resealed(row, reseal(envelope), edited))
        except DurableError as error:
            unopened.append((row.id, str(error)))

    def write(part: Sequence[_Resealed]) -> int:
        changed = {
            "ids": [each.row.id for each in part],
            "addresses": [each.row.address for each in part],
            "bodies": [each.body for each in part],
            "edited": [each.edited for each in part],
        }
        conn.execute(rotation.write.within(schema), changed)
        return len(part)

    def leave(each: _Resealed, reason: str) -> None:
        refused.append((f"{rotation.table} {each.row.id}, {rotation.address} {each.row.address!r}", reason))

    done = sum(isolated(conn, resealed, write, leave))
    return Batch(done, unopened, refused, Position(rows[-1].id, rows[-1].address) if rows else None)


def _envelope(row: Row[Any]) -> Envelope:
    """Make an envelope with the parts that its body is sealed with."""
    return Envelope(
        id=row.id,
        message_type=row.message_type,
        destination=row.place,
        source="",
        correlation_id=row.id,
        body=row.body,
        sent_at=_ANY_TIME,
        headers={} if row.tenant is None else {TENANT: row.tenant},
    )


def _with(envelope: Envelope, body: bytes) -> Envelope:
    return msgspec.structs.replace(envelope, body=body)
