"""The bodies of rows as numbers, by which they are compared with others: encrypted ones without their keys.

    own     the digest that a body is stored with: of its bytes, or the one that an encrypted body carries
    views   of rows that were encrypted here: their digests under each of the keys that are given, and of their bytes

A view has the digest under one key, of all rows that have one, and of the others their own. So the same rows have a
view in common before and after a rotation, as long as one key is known both times. The view of bytes never leaves the
job: a reader of the database could try out what is in a short message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from durable.messages.digest import mark_of, message_digest
from durable.messages.sealed import DIGEST_BYTES

Digests: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

PLAIN: Final = "plain"


class Bodies(NamedTuple):
    """The digests of the bodies of some rows."""

    own: Digests
    views: Mapping[str, Digests]
    others: pa.Array
    """Digests under each of the keys, as Postgres writes an array of bigint; NULL where there are none."""


def of(batch: pa.RecordBatch, digests: pa.Array | None) -> Bodies:
    """The bodies of whole rows, and the digests that they had before they were encrypted."""
    pairs = zip(batch.column("message_type").to_pylist(), batch.column("body").to_pylist(), strict=True)
    own = np.array([message_digest(kind, body) for kind, body in pairs], np.int64)
    views: dict[str, Digests] = {}
    others: list[str | None] = [None] * batch.num_rows
    for row, given in enumerate([] if digests is None else digests.to_pylist()):
        known = _numbers(given)
        if any(each & 1 for each in known):
            others[row] = "{" + ",".join(str(each) for each in known if each & 1) + "}"
        for each in known if own[row] & 1 else ():
            views.setdefault(_name(each), own.copy())[row] = each
    for name in {_name(int(each)) for each in own[own & 1 == 1]}:
        views.setdefault(name, own)
    return Bodies(own, views, pa.array(others, pa.string()))


def _numbers(given: bytes | None) -> list[int]:
    return [] if given is None else np.frombuffer(given, dtype=f">i{DIGEST_BYTES}").tolist()


def _name(digest: int) -> str:
    mark = mark_of(digest)
    return PLAIN if mark is None else f"{mark:05x}"
