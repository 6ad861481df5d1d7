"""Envelopes: their ids carry their time, and versions of the program one apart understand each other."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from uuid import UUID, uuid4

import msgspec
import pytest

from durable.envelope import Envelope, LeasedEnvelope, new_id, unix_ms


def make(**changes: object) -> Envelope:
    given = Envelope(
        id=new_id(),
        message_type="orders.placed",
        destination="tcp://billing:1",
        source="orders",
        correlation_id=new_id(),
        body=b"{}",
        sent_at=datetime.now(UTC),
    )
    return msgspec.structs.replace(given, **changes)


def test_ids_sort_in_the_order_of_their_creation() -> None:
    ids = [new_id() for _ in range(1_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 1_000
    assert {made.version for made in ids} == {7}


def test_id_carries_the_time_of_its_creation() -> None:
    before = time.time_ns() // 1_000_000
    made_ms = unix_ms(new_id())
    assert made_ms is not None
    assert before <= made_ms <= time.time_ns() // 1_000_000


def test_an_id_of_another_kind_carries_no_time() -> None:
    assert unix_ms(uuid4()) is None
    assert unix_ms(UUID(int=0)) is None


def test_envelope_of_an_older_version_gets_defaults_for_missing_fields() -> None:
    given = make()
    short = msgspec.to_builtins(given)[:7]
    assert msgspec.convert(short, Envelope) == given


def test_fields_added_by_a_newer_version_are_passed_over() -> None:
    given = make(headers={"a": "b"})
    longer = [*msgspec.msgpack.decode(msgspec.msgpack.encode(given)), "a field of tomorrow"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=Envelope) == given


def test_the_fields_of_the_wire_keep_their_places() -> None:
    assert Envelope.__struct_fields__ == (
        "id",
        "message_type",
        "destination",
        "source",
        "correlation_id",
        "body",
        "sent_at",
        "content_type",
        "causation_id",
        "partition_key",
        "headers",
        "deliver_by",
        "execution_time",
    )


def test_an_envelope_does_not_change() -> None:
    with pytest.raises(AttributeError):
        make().body = b"other"  # type: ignore[misc]


def test_two_envelopes_do_not_share_their_headers() -> None:
    assert make().headers is not make().headers


def test_headers_and_body_count_in_the_weight_of_an_envelope() -> None:
    bare = make().weight_bytes
    assert make(body=b"x" * 100).weight_bytes == bare + 98
    assert make(headers={"name": "value"}).weight_bytes == bare + 9


def test_the_key_of_a_lease_names_one_ownership_of_one_row() -> None:
    given = make()
    lease = LeasedEnvelope(given, epoch=3, endpoint="billing")
    assert lease.key == (given.id, "billing", 3)
    assert lease.weight_bytes == given.weight_bytes
