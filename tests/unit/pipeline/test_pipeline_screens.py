"""The rules of send() over Arrow batches: what one row's rule refuses, the batch's rule refuses, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.envelope import Envelope
from durable.errors import InvalidSetting
from durable.messages import validation as screening
from durable.pipeline import bodies, contents
from durable.pipeline.publish import message_id_of, uuid8_of
from durable.pipeline.publishable import TEXTS, whole
from durable.pipeline.screens import Limits, flaw, misencoded
from durable.transports.addresses import canonical

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
LIMITS = Limits(max_message_bytes=100, dedupe_window=timedelta(days=7), clock_lead=timedelta(days=1))
ROW: dict[str, Any] = {
    "id": uuid8_of("1").bytes,
    "destination": "tcp://127.0.0.1:2301",
    "message_type": "orders.order-placed",
    "source": "orders",
    "body": b"{}",
}
KINDS = {
    **dict.fromkeys(("id", "body", "correlation_id", "causation_id"), pa.binary()),
    **dict.fromkeys(("sent_at", "deliver_by", "execution_time"), pa.timestamp("us", "UTC")),
}


def uuid7(moment: datetime) -> bytes:
    return UUID(int=(int(moment.timestamp() * 1_000) << 80) | (7 << 76) | (2 << 62) | 5).bytes


def batch(*rows: Mapping[str, Any]) -> pa.RecordBatch:
    names = sorted({name for row in rows for name in row})
    columns = {name: pa.array([row.get(name) for row in rows], KINDS.get(name, pa.string())) for name in names}
    return whole(pa.RecordBatch.from_pydict(columns), NOW)


def found(**changes: Any) -> str | None:
    """What is wrong with the second of three rows, of which the others are sound."""
    return flaw(batch(ROW, ROW | changes, ROW), LIMITS, NOW)


def test_sound_rows_have_no_flaw() -> None:
    assert found(headers='{"tenant": "a"}', partition_key="order-17", deliver_by=NOW, sent_at=NOW) is None
    assert found(destination="local") is None
    assert found(destination="kafka://of-an-application/its-own") is None
    assert found(destination="main", endpoint="main") is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": None}, "column id: is NULL"),
        ({"body": None}, "column body: is NULL"),
        ({"destination": None}, "column destination: is NULL"),
        ({"id": b"short"}, "column id: has not 16 bytes"),
        ({"causation_id": b"x" * 17}, "column causation_id: has not 16 bytes"),
        ({"body": b"x" * 101}, "the body has 101 bytes, more than max_message_bytes"),
        ({"message_type": ""}, "message_type is empty"),
        ({"destination": "a\0b"}, "destination has a control character"),
        ({"endpoint": "a\nb"}, "destination has a control character"),
        ({"destination": "billing"}, "destination 'billing' is no address that a transport understands; write such as"),
        ({"destination": "tpc://h:1"}, "destination 'tpc://h:1' is no address that a transport understands; did you"),
        ({"destination": "tcp://"}, "destination tcp://: write a host and a port and nothing else"),
        ({"destination": "Local"}, "destination 'Local' is no address that a transport understands"),
        ({"source": "x" * 1_001}, "source is longer than 1000 bytes in UTF-8"),
        ({"partition_key": "\x7f"}, "partition_key has a control character"),
        ({"headers": '{"a": 1}'}, "column headers: is no JSON object of texts"),
        ({"headers": "no JSON"}, "column headers: is no JSON object of texts"),
        ({"headers": '{"a": "\\u0000"}'}, "header 'a' has a control character"),
        ({"headers": '{"a": "' + "x" * 9_000 + '"}'}, "the headers have more than"),
        ({"deliver_by": datetime(9999, 12, 31, 12, tzinfo=UTC)}, "deliver_by lies outside the calendar"),
        ({"sent_at": datetime(1, 1, 1, tzinfo=UTC)}, "sent_at lies outside the calendar"),
        ({"execution_time": NOW + timedelta(days=7)}, "execution_time is not within dedupe_window"),
        ({"sent_at": NOW - timedelta(days=7, seconds=1)}, "it is older than duplicates are remembered"),
        ({"id": uuid7(NOW - timedelta(days=7, seconds=1))}, "it is older than duplicates are remembered"),
        ({"id": uuid7(NOW + timedelta(days=1, seconds=1))}, "the time in its id is more than clock_lead"),
        ({"sent_at": NOW + timedelta(days=1, seconds=1)}, "its sent_at is more than clock_lead"),
        ({"id": bytes(16)}, "00000000-0000-0000-0000-000000000000 is no id of a message"),
        ({"id": b"\xff" * 16}, "ffffffff-ffff-ffff-ffff-ffffffffffff is no id of a message"),
    ],
)
def test_a_flaw_is_found_wherever_the_row_is_and_the_row_is_named(changes: dict[str, Any], reason: str) -> None:
    told = found(**changes)
    assert told is not None
    assert told.startswith(reason)
    assert "(row " in told


def test_row_with_a_time_in_its_id_may_have_an_older_sent_at() -> None:
    assert found(id=uuid7(NOW - timedelta(days=6)), sent_at=NOW - timedelta(days=30)) is None
    assert found(execution_time=NOW + timedelta(days=400), destination="local") is None


NOT_UTF8 = [b"M\xfcller", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"cut \xc3"]


def texts(*values: bytes | None) -> pa.Array:
    """Texts as Spark hands them over: Arrow does not look at their bytes."""
    given = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(given), given.buffers())


def batch_of_texts(**columns: pa.Array) -> pa.RecordBatch:
    given = {"id": pa.array([ROW["id"]] * 3, pa.binary()), "message_type": texts(*[b"orders.order-placed"] * 3)}
    return pa.RecordBatch.from_pydict(given | columns)


@pytest.mark.parametrize("name", [*TEXTS, "body"])
@pytest.mark.parametrize("value", NOT_UTF8)
def test_undecodable_text_is_named(name: str, value: bytes) -> None:
    told = misencoded(batch_of_texts(**{name: texts(None, "Müller".encode(), value)}))
    shown = value.decode(errors="backslashreplace") if name == "message_type" else "orders.order-placed"
    assert told == f"column {name}: text is not UTF-8 (row {UUID(bytes=ROW['id'])}, {shown})"


def test_texts_in_utf8_and_bytes_are_not_refused() -> None:
    sound = batch_of_texts(
        partition_key=texts(None, "\U0010ffff\uffff\0".encode(), b""), body=pa.array(NOT_UTF8[:3], pa.binary())
    )
    assert misencoded(sound) is None
    mixed = batch_of_texts(partition_key=texts(b"\xff", b"a", b"b"))
    assert misencoded(mixed.slice(1)) is None
    assert misencoded(mixed) is not None


TEXT = st.text(st.characters(codec="utf-8"), max_size=4) | st.just("x" * 1_001)
MOMENTS = st.datetimes(datetime(2026, 11, 1), datetime(2026, 12, 31), timezones=st.just(UTC))
ROWS = st.fixed_dictionaries(
    {
        "id": st.sampled_from(
            [ROW["id"], uuid7(NOW), uuid7(NOW - timedelta(days=8)), uuid7(NOW + timedelta(days=2)), bytes(16)]
        ),
        "destination": TEXT.map(lambda text: f"tcp://h{text}:1"),
        "message_type": TEXT,
        "source": TEXT,
        "body": st.binary(max_size=8) | st.just(b"x" * 101),
        "partition_key": st.none() | TEXT,
        "content_type": TEXT,
        "sent_at": MOMENTS,
        "deliver_by": st.none() | MOMENTS,
    }
)


def _is_address(text: str) -> bool:
    try:
        canonical(text)
    except InvalidSetting:
        return False
    return True


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_batch_has_a_flaw_exactly_when_one_of_its_envelopes_has(rows: list[dict[str, Any]]) -> None:
    def is_refused(row: dict[str, Any]) -> bool:
        identity = UUID(bytes=row["id"])
        fields: dict[str, Any] = row | {"id": identity, "correlation_id": identity}
        envelope = Envelope(**fields)
        reason = screening.find_error(envelope, max_message_bytes=LIMITS.max_message_bytes)
        misdated = screening.find_misdating(
            envelope, NOW, dedupe_window=LIMITS.dedupe_window, clock_lead=LIMITS.clock_lead
        )
        return reason is not None or misdated is not None or not _is_address(row["destination"])

    assert (flaw(batch(*rows), LIMITS, NOW) is not None) == any(map(is_refused, rows))


# ---------------------------------------------------------------- contents and ids


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.sampled_from("ab")), min_size=1), st.data())
def test_batch_is_the_same_under_any_partitioning(rows: list[tuple[bytes, str]], data: st.DataObject) -> None:
    def name(*parts: list[tuple[bytes, str]]) -> str:
        batches = (batch(*(ROW | {"id": i, "destination": d} for i, d in part)) for part in parts if part)
        words = (contents.words(each, pa.array([False] * each.num_rows), bodies.of(each, None)) for each in batches)
        (only,) = contents.names_of(contents.merged(map(contents.of, words)))
        return only

    shuffled = data.draw(st.permutations(rows))
    middle = data.draw(st.integers(0, len(rows)))
    assert name(rows) == name(shuffled[:middle], shuffled[middle:])
    assert name(rows) != name([*rows, rows[0]])
    assert name(rows) != name([(rows[0][0], "elsewhere"), *rows[1:]])


def test_id_derived_from_a_key_is_a_uuid_of_version_8() -> None:
    made = message_id_of("17", message_type="orders.order-placed", source="orders")
    assert (made.version, made.variant) == (8, "specified in RFC 4122")
    assert made == uuid8_of("orders/orders.order-placed/17") != uuid8_of("orders/orders.order-placed/18")
