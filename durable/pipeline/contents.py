"""Contents of a batch in a few numbers: the same rows are the same batch, however tasks share them.

A word of 64 bits stands for each value of each row. The words of a column are added up and xored, which can be done in
any order and in any number of parts: two batches do not come to the same by chance, and where they differ, the columns
tell in what. Everything that reaches the receiver counts, and nothing else.

    rows      how many
    whole     which values belong together
    carried   of one row: all that it carries but its body, wherever it goes; remembered with its id

Bodies are their digests, in all views (durable.pipeline.bodies): `body` and `whole` are of the digests that the rows
are stored with, `body 1a2b3` and `whole 1a2b3` of those under that key. In the tasks a view is what it adds to these,
so that parts of which some have no such view can be merged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute

from durable.pipeline.bodies import PLAIN, Bodies, Digests
from durable.pipeline.publishable import CARRIED, TIMES

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Contents: TypeAlias = Mapping[str, tuple[int, int]]
"""The sum and the xor of the words of each column. What a column is compared by has its name."""

ROWS: Final = "rows"
NOTHING: Final[Contents] = {}
SEALED: Final = "sealed"
_IDENTITY: Final = (ROWS, "id", "destination", "message_type")
_VIEWED: Final = ("body", "whole")
_BESIDES: Final = tuple(name for name in CARRIED if name != "body")
_WORD: Final = (1 << 64) - 1
_MISSING: Final = np.uint64(0x9E3779B97F4A7C15)
_headers = msgspec.json.Decoder(dict[str, str])


def words(batch: pa.RecordBatch, dated: pa.BooleanArray, bodies: Bodies) -> dict[str, Words]:
    """The words of one batch of sound rows, by column. `dated`: the rows that came with a `sent_at` of their own."""
    rows = _mixed(_numbers(batch.column("id")))
    found = {"id": rows}
    for name in ("destination", *_BESIDES):
        column = batch.column(name)
        if name == "sent_at":
            column = pc.if_else(dated, column, pa.scalar(None, column.type))
        if name == "partition_key":
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)  # an empty key is none
        found[name] = _mixed(rows ^ _mixed(_values(name, column) + _salt(name)))
    found["carried"] = _mixed(np.add.reduce([found[name] for name in _BESIDES]))
    besides = found["carried"] ^ _mixed(found["destination"])
    for view, digests in (("", bodies.own), *((f" {name}", each) for name, each in bodies.views.items())):
        found[f"body{view}"] = _body(rows, digests)
        found[f"whole{view}"] = _mixed(besides ^ _mixed(found[f"body{view}"]))
    found[SEALED] = (bodies.own & 1).astype(np.uint64)
    return found


def carried(found: Mapping[str, Words]) -> pa.Array:
    """Return a digest of the contents of each row, as Postgres's signed bigint."""
    return pa.array(found["carried"].view(np.int64), pa.int64())


def of(found: Mapping[str, Words]) -> Contents:
    """The contents of the rows with these words."""
    sums = {
        name: (int(np.add.reduce(column)), int(np.bitwise_xor.reduce(column)))
        for name, column in found.items()
        if name not in ("carried", SEALED)
    }
    for name in sums:
        if (base := name.partition(" ")[0]) != name:
            sums[name] = (sums[name][0] - sums[base][0]) & _WORD, sums[name][1] ^ sums[base][1]
    return {ROWS: (len(found["id"]), 0), **sums, SEALED: (int(found[SEALED].sum()), 0)}


def merged(parts: Iterable[Contents]) -> Contents:
    """The contents of several parts."""
    found: dict[str, tuple[int, int]] = {}
    for part in parts:
        for name, (added, xored) in part.items():
            before = found.get(name, (0, 0))
            found[name] = (before[0] + added) & _WORD, before[1] ^ xored
    return found


def names_of(contents: Contents) -> list[str]:
    """The names of a batch that was given none, in each view of its bodies: the first is its own, and a batch that is
    remembered under another is the same. Corrected bodies are another batch, and so are other destinations.
    """
    views = sorted(name for name in contents if name.startswith("body "))
    marks = [name for name in views if name != f"body {PLAIN}"]
    whole = _whole(contents)
    return list(dict.fromkeys(_name(whole, name) for name in (*marks, "body", *views)))


def written(contents: Contents) -> dict[str, str]:
    """The contents as they are stored."""
    counts = {name: str(contents.get(name, (0, 0))[0]) for name in (ROWS, SEALED)}
    return {**counts, **_texts({name: each for name, each in _whole(contents).items() if PLAIN not in name.split()})}


def plain(contents: Contents) -> dict[str, str] | None:
    """The columns of bodies as of rows that are not encrypted, to compare with such, and never to be stored; None where
    nothing was encrypted.
    """
    whole = _whole(contents)
    found = {base: whole[f"{base} {PLAIN}"] for base in _VIEWED if f"{base} {PLAIN}" in whole}
    return _texts(found) or None


def _whole(contents: Contents) -> dict[str, tuple[int, int]]:
    """The contents with whole views, in place of what they add."""
    found = dict(contents)
    for name, (added, xored) in contents.items():
        if (base := name.partition(" ")[0]) != name:
            own = contents[base]
            found[name] = (own[0] + added) & _WORD, own[1] ^ xored
    return found


def _texts(contents: Contents) -> dict[str, str]:
    numbered = {name: each for name, each in contents.items() if name not in (ROWS, SEALED)}
    return {name: f"{added:016x}{xored:016x}" for name, (added, xored) in numbered.items()}


def _name(contents: Contents, body: str) -> str:
    columns = {**{name: contents.get(name) for name in _IDENTITY}, "body": contents.get(body)}
    text = "\n".join(f"{name}\0{each}" for name, each in columns.items())
    return f"rows {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


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


def _body(rows: Words, digests: Digests) -> Words:
    return _mixed(rows ^ _mixed(digests.view(np.uint64) + _salt("body")))


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
