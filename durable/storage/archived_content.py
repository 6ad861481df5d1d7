"""Digests of the archived rows that are still here, to be compared with those of the lake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import Connection

from durable.storage.days import beginning, end
from durable.storage.sql import archive as statements

_WORD: Final = (1 << 64) - 1

Key: TypeAlias = tuple[Any, ...]
"""The identity of a row: the values of durable.storage.sql.archive.KEYS, an id as its 16 bytes."""


class Block(NamedTuple):
    """Some of the rows of a side of a day."""

    day: date
    side: str
    number: int


class Digest(NamedTuple):
    """Digest of rows: their number, and the sum of their digests."""

    rows: int
    digest: int
    """64 bits."""


def digests(
    conn: Connection, schema: str, table: str, high: int, since: date | None = None, until: date | None = None
) -> dict[Block, Digest]:
    """The content of what is archived and here, by block; `since` is included, `until` is not."""
    params = {"high": high, "since": beginning(since), "until": end(until)}
    rows = conn.execute(statements.BY_TRANSACTION[table].digest_blocks.within(schema), params)
    return {Block(row.day, row.side, row.block): Digest(row.rows, int(row.digest) & _WORD) for row in rows}


def row_digests(
    conn: Connection, schema: str, table: str, high: int, day: date, blocks: Sequence[int]
) -> Iterator[tuple[Key, int]]:
    """The key of each archived row of these blocks of a day, and the digest of its content, 64 bits."""
    params = {"high": high, "since": beginning(day), "until": end(day + timedelta(days=1)), "blocks": list(blocks)}
    for row in conn.execute(statements.BY_TRANSACTION[table].digest_rows.within(schema), params):
        *key, digest = row
        yield tuple(each.bytes if isinstance(each, UUID) else each for each in key), digest & _WORD
