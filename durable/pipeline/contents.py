"""Contents of a batch in a few numbers: the same rows are the same batch, however tasks share them.

For each destination digests of id, type and body are counted, added up and xored, which can be done in any order and in
any number of parts. Two batches do not come to the same by chance, and corrected bodies are another batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

Sums: TypeAlias = tuple[int, int, int, int, int]
"""How many rows, and of the two halves of their digests the sums and the xors."""
Contents: TypeAlias = Mapping[str, Sums]
"""By destination."""

NOTHING: Final[Contents] = {}
_WORD: Final = (1 << 64) - 1


def of(batch: pa.RecordBatch) -> Contents:
    """The contents of one batch of sound rows."""
    encoded = batch.column("destination").dictionary_encode()
    places = encoded.indices.to_numpy(zero_copy_only=False)
    counts = np.bincount(places, minlength=len(encoded.dictionary))
    together = _halves(_digests(batch))[np.argsort(places, kind="stable")]
    first = np.cumsum(counts) - counts  # each has a row at least, as reduceat() wants it
    sums = np.add.reduceat(together, first, axis=0, dtype="u8").tolist() if len(first) else []
    xors = np.bitwise_xor.reduceat(together, first, axis=0).tolist() if len(first) else []
    each = zip(encoded.dictionary.to_pylist(), counts.tolist(), sums, xors, strict=True)
    return {name: (count, *added, *xored) for name, count, added, xored in each}


def merged(parts: Iterable[Contents]) -> Contents:
    """The contents of several parts."""
    found: dict[str, Sums] = {}
    for part in parts:
        for name, sums in part.items():
            found[name] = _added(found.get(name, (0, 0, 0, 0, 0)), sums)
    return found


def name_of(contents: Contents) -> str:
    """The name of a batch that was given none."""
    text = "\n".join(f"{name}\0{sums}" for name, sums in sorted(contents.items()))
    return f"rows {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _digests(batch: pa.RecordBatch) -> pa.Array:
    rows = zip(*(batch.column(name).to_pylist() for name in ("id", "message_type", "body")), strict=True)
    found = [hashlib.blake2b(id_ + kind.encode() + b"\0" + body, digest_size=16).digest() for id_, kind, body in rows]
    return pa.array(found, pa.binary())


def _halves(digests: pa.Array) -> np.ndarray:
    return np.frombuffer(b"".join(digests.to_pylist()), dtype=">u8").astype("u8").reshape(-1, 2)


def _added(one: Sums, other: Sums) -> Sums:
    return (
        one[0] + other[0],
        (one[1] + other[1]) & _WORD,
        (one[2] + other[2]) & _WORD,
        one[3] ^ other[3],
        one[4] ^ other[4],
    )
