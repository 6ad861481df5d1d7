"""The places of rows that are published: behind whom each queues, in whose share, and where it stands in its order.

The rules are those of send() (messages.ordering), and what nodes have declared is in the database. Only rows
that come in an order have a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute

from durable.messages.ordering import Rule
from durable.storage.placements import Placements

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

_headers = msgspec.json.Decoder(dict[str, str])


def queueing(
    batch: pa.RecordBatch, local: pa.BooleanArray, positions: pa.Array, placements: Placements
) -> dict[str, pa.Array]:
    """The columns `ordering_key`, `fair_key` and `position` of a whole batch of sound rows."""
    keys = batch.column("partition_key")
    nothing = pa.scalar(None, pa.string())
    ordering = pc.if_else(pc.equal(keys, ""), nothing, keys)
    fair = pa.nulls(batch.num_rows, pa.string())
    for mask, rule in _declared(batch, local, placements):
        if rule.ordering_key is not None:
            ordering = pc.if_else(mask, pa.scalar(rule.ordering_key), ordering)
        if rule.fair_by is not None:
            fair = pc.if_else(mask, _shares(batch, mask, rule), fair)
    position = pc.if_else(pc.is_valid(ordering), positions, pa.scalar(None, pa.binary()))
    return {"ordering_key": ordering, "fair_key": fair, "position": position}


def _declared(
    batch: pa.RecordBatch, local: pa.BooleanArray, placements: Placements
) -> list[tuple[pa.BooleanArray, Rule]]:
    """The rules that say more than the keys do, and the rows of each."""
    sides: tuple[tuple[str, pa.BooleanArray, Mapping[str, Rule]], ...] = (
        ("message_type", local, placements.by_type),
        ("destination", pc.invert(local), placements.by_destination),
    )
    found = [
        (pc.and_(here, pc.equal(batch.column(column), name)), rule)
        for column, here, rules in sides
        for name, rule in rules.items()
    ]
    return [(mask, rule) for mask, rule in found if pc.any(mask).as_py()]


def _shares(batch: pa.RecordBatch, mask: pa.BooleanArray, rule: Rule) -> pa.Array:
    """The shares of the rows of this mask; NULL for all others."""
    parts = zip(mask, batch.column("partition_key"), batch.column("headers"), strict=True)
    return pa.array(
        [
            rule.place(key.as_py(), _headers.decode(headers.as_py())).fair_key if here.as_py() else None
            for here, key, headers in parts
        ],
        pa.string(),
    )
