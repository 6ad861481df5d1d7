"""Rows that no key seals: each is named in the words of the writer, which would have refused it as well."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from durable.encryption.keys import Keys
from durable.errors import InvalidMessage
from durable.messages.sealed import is_sealed
from durable.pipeline.publishable import DIGESTS
from durable.pipeline.sealing import OLD_ID, Sealing, seal_batch

ID = UUID(int=7)
WHOLE: dict[str, Any] = {
    "id": ID.bytes,
    "message_type": "orders.placed",
    "destination": "tcp://billing:2301",
    "headers": '{"a":"b"}',
    "body": b"{}",
    OLD_ID: None,
    DIGESTS: None,
}
KEYS = Keys({"a": bytes(range(32))})
NO_HEADERS = rf"column headers: is no JSON object of texts \(.*\) \(row {ID}, orders.placed\)"
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "short id": ({"id": b"7"}, r"column id: has not 16 bytes \(row no id, orders.placed\)"),
    "no JSON": ({"headers": "a"}, NO_HEADERS),
    "a list": ({"headers": "[]"}, NO_HEADERS),
    "a number": ({"headers": '{"a":1}'}, NO_HEADERS),
}


def sealed(row: dict[str, Any], sealing: Sealing) -> list[dict[str, Any]]:
    kinds = {OLD_ID: pa.binary(), DIGESTS: pa.binary()}
    batch = pa.RecordBatch.from_pydict({name: pa.array([value], kinds.get(name)) for name, value in row.items()})
    return list(seal_batch(batch, sealing, sealing.ring).to_pylist())


@pytest.mark.parametrize("what", UNFIT)
def test_row_unfit_to_be_sealed_is_named(what: str) -> None:
    changed, said = UNFIT[what]
    with pytest.raises(InvalidMessage, match=f"^{said}$"):
        sealed(WHOLE | changed, Sealing(KEYS, everything=True))


def test_whole_row_is_sealed() -> None:
    (row,) = sealed(WHOLE, Sealing(KEYS, everything=True))
    assert is_sealed(row["body"])


def test_row_sealed_for_a_broken_id_is_named() -> None:
    (row,) = sealed(WHOLE, Sealing(KEYS, everything=True))
    with pytest.raises(InvalidMessage, match="column id: has not 16 bytes"):
        sealed(row | {OLD_ID: b"7"}, Sealing(KEYS))
