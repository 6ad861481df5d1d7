"""Contents of a batch in a few numbers: the same rows are the same batch, however tasks share them.

A word of 64 bits stands for each value of each row. The words of a column are added up and xored, which can be done in
any order and in any number of parts: two batches do not come to the same by chance, and where they differ, the columns
tell in what. Everything that reaches the receiver counts, and nothing else.

    row       which ids, and how often
    whole     which values belong together
    carried   of one row: all that it carries, wherever it goes; remembered with its id
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute

from durable.pipeline.publishable import CARRIED, TIMES

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Contents: TypeAlias = Mapping[str, tuple[int, int]]
"""The sum and the xor of the words of each column. What a column is compared by has its name."""

ROWS: Final = "rows"
NOTHING: Final[Contents] = {}
_IDENTITY: Final = (ROWS, "id", "destination", "message_type", "body")
_WORD: Final = (1 << 64) - 1
_MISSING: Final = np.uint64(0x9E3779B97F4A7C15)
_headers = msgspec.json.Decoder(dict[str, str])


def words(batch: pa.RecordBatch, dated: pa.BooleanArray) -> dict[str, Words]:
    """The words of one batch of sound rows, by column. `dated`: the rows that came with a `sent_at` of their own."""
    rows = _mixed(_numbers(batch.column("id")))
    found = {"id": rows}
    for name in ("destination", *CARRIED):
        column = batch.column(name)
        if name == "sent_at":
            column = pc.if_else(dated, column, pa.scalar(None, column.type))
        if name == "partition_key":
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)  # an empty key is none
        found[name] = _mixed(rows ^ _mixed(_values(name, column) + _salt(name)))
    found["carried"] = _mixed(np.add.reduce([found[name] for name in CARRIED]))
    found["whole"] = _mixed(found["carried"] ^ _mixed(found["destination"]))
    return found


def carried(found: Mapping[str, Words]) -> pa.Array:
    """Return a digest of the contents of each row, as Postgres's signed bigint."""
    return pa.array(found["carried"].view(np.int64), pa.int64())


def of(found: Mapping[str, Words]) -> Contents:
    """The contents of the rows with these words."""
    sums = {
        name: (int(np.add.reduce(column)), int(np.bitwise_xor.reduce(column)))
        for name, column in found.items()
        if name != "carried"
    }
    return {ROWS: (len(found["id"]), 0), **sums}


def merged(parts: Iterable[Contents]) -> Contents:
    """The contents of several parts."""
    found: dict[str, tuple[int, int]] = {}
    for part in parts:
        for name, (added, xored) in part.items():
            before = found.get(name, (0, 0))
            found[name] = (before[0] + added) & _WORD, before[1] ^ xored
    return found


def name_of(contents: Contents) -> str:
    """The name of a batch that was given none: corrected bodies are another batch, and so are other destinations."""
    text = "\n".join(f"{name}\0{contents.get(name)}" for name in _IDENTITY)
    return f"rows {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def written(contents: Contents) -> dict[str, str]:
    """The contents as they are stored."""
    texts = {name: f"{added:016x}{xored:016x}" for name, (added, xored) in contents.items() if name != ROWS}
    return {ROWS: str(contents.get(ROWS, (0, 0))[0]), **texts}


# ---------------------------------------------------------------- words


def _values(name: str, column: pa.Array) -> Words:
    """A number for each value. Each different text is looked at once, and NULL is a value of its own."""
    if name in TIMES:
        numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False).view(np.uint64)
        return np.where(column.is_null().to_numpy(zero_copy_only=False), _MISSING, _mixed(numbers))
    encoded = column.dictionary_encode()
    known = np.array([_hashed(name, value) for value in encoded.dictionary.to_pylist()] + [_MISSING], np.uint64)
    found: Words = known[pc.fill_null(encoded.indices, len(known) - 1).to_numpy(zero_copy_only=False)]
    return found


def _hashed(name: str, value: str | bytes) -> int:
    if name == "headers":
        value = msgspec.json.encode(_headers.decode(value), order="sorted")
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def _numbers(ids: pa.Array) -> Words:
    """16 bytes each, as one word."""
    halves = np.frombuffer(b"".join(ids.to_pylist()), dtype=">u8").astype(np.uint64).reshape(-1, 2)
    mixed: Words = _mixed(halves[:, 0]) + halves[:, 1]
    return mixed


def _salt(name: str) -> np.uint64:
    return np.uint64(_hashed("", name))


def _mixed(numbers: Words) -> Words:
    """Each bit of a number changes half of the bits of its word (the finisher of SplitMix64)."""
    numbers = numbers + _MISSING
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = numbers ^ (numbers >> np.uint64(31))
    return mixed
