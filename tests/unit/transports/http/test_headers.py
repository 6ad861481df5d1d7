"""What headers say of a message, and that nothing in them is guessed or ignored without a word."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.errors import InvalidMessage
from durable.transports.http.headers import Options, id_of, own_headers, read_key, read_options, trace_context

ID = "019b76da-a800-7cc1-8a2f-2b1c0d9a3e41"


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"order-17", "order-17"),
        (b'"order-17"', "order-17"),
        (rb'"a \"word\" and a \\"', 'a "word" and a \\'),
        (b"  order 17 ", "order 17"),
        (b"k" * 200, "k" * 200),
        (b'say "it"', 'say "it"'),
        (ID.encode(), ID),
    ],
)
def test_a_key_is_quoted_or_bare(sent: bytes, meant: str) -> None:
    assert read_key([(b"Idempotency-Key", sent)]) == meant


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b'""',
        b"k" * 201,
        b'"' + b"k" * 201 + b'"',
        b'"order',
        b'"a"b',
        b'"a";x=1',
        b"\xc3\xa9",
        b"a\x00b",
        b"a\r\nb",
    ],
)
def test_invalid_key_is_refused(sent: bytes) -> None:
    with pytest.raises(InvalidMessage, match="one text: 1 to 200 printable ASCII characters, quoted or bare"):
        read_key([(b"Idempotency-Key", sent)])


def test_two_keys_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="must be one text"):
        read_key([(b"idempotency-key", b"a"), (b"idempotency-key", b"a")])


def test_missing_key_is_none() -> None:
    assert read_key([(b"x-idempotency-key", b"a")]) is None


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=200))
def test_any_printable_text_can_be_quoted(key: str) -> None:
    quoted = key.replace("\\", "\\\\").replace('"', '\\"')

    assert read_key([(b"idempotency-key", f'"{quoted}"'.encode())]) == key


def test_key_holding_a_uuid_is_the_id() -> None:
    assert id_of(ID, "orders", "orders.order-placed") == id_of(ID.upper(), "shop", "shop.sold") == UUID(ID)


@pytest.mark.parametrize("key", ["order-17", f"{{{ID}}}", f"urn:uuid:{ID}", ID.replace("-", "")])
def test_textual_key_is_scoped_by_endpoint_and_type(key: str) -> None:
    made = {
        id_of(key, endpoint, message_type) for endpoint in ("orders", "shop") for message_type in ("a.sold", "a.lost")
    }

    assert len(made) == 4
    assert {envelope_id.version for envelope_id in made} == {5}
    assert id_of(key, "orders", "a.sold") == id_of(key, "orders", "a.sold")


def test_endpoint_type_and_key_are_kept_apart() -> None:
    assert len({id_of("c", "a", "b"), id_of("bc", "a", ""), id_of("c", "ab", "")}) == 3


def test_options_are_read_from_headers() -> None:
    correlation_id = uuid4()
    read = read_options(
        [
            (b"Durable-Correlation-Id", str(correlation_id).encode()),
            (b"durable-partition-key", "öffnen".encode()),
            (b"durable-deliver-by", b"2030-01-31T12:00:00+01:00"),
            (b"durable-execute-at", b"2030-01-01T00:00:00Z"),
            (b"durable-source", b"shop"),
            (b"durable-header-tenant", b"7"),
            (b"content-type", b"application/json"),
        ]
    )

    assert read == Options(
        correlation_id=correlation_id,
        partition_key="öffnen",
        deliver_by=datetime(2030, 1, 31, 11, tzinfo=UTC),
        execute_at=datetime(2030, 1, 1, tzinfo=UTC),
        source="shop",
    )


def test_source_is_http_by_default() -> None:
    assert read_options([]) == Options(source="http")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (b"durable-deliver-by", b"2030-01-31T12:00:00", r"with a timezone component - at `\$\.durable-deliver-by`"),
        (b"durable-execute-at", b"tomorrow", "durable-execute-at"),
        (b"durable-correlation-id", b"17", "durable-correlation-id"),
        (b"durable-source", b"", "durable-source"),
        (b"durable-partition-key", b"", "durable-partition-key"),
        (b"durable-partition-key", b"\xff", "'durable-partition-key' is not in UTF-8"),
        (
            b"durable-delivery-by",
            b"2030-01-31T12:00:00Z",
            "unknown header: 'durable-delivery-by'; did you mean 'durable-deliver-by'",
        ),
        (b"Durable-Source", b"again", "'durable-source' comes twice"),
    ],
)
def test_invalid_option_is_refused(name: bytes, value: bytes, reason: str) -> None:
    headers = [(name, value)] if name != b"Durable-Source" else [(b"durable-source", b"shop"), (name, value)]

    with pytest.raises(InvalidMessage, match=reason):
        read_options(headers)


def test_own_headers_keep_their_names_in_lower_case() -> None:
    assert own_headers([(b"Durable-Header-Tenant-Id", "Größe".encode()), (b"tenant", b"7")]) == {"tenant-id": "Größe"}


def test_repeated_own_header_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="'durable-header-tenant' comes twice"):
        own_headers([(b"durable-header-tenant", b"7"), (b"Durable-Header-Tenant", b"8")])


def test_trace_context_is_kept_without_malformed_headers() -> None:
    context = [(b"TraceParent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), (b"tracestate", b"a=1")]

    assert trace_context(context) == {"traceparent": context[0][1].decode(), "tracestate": "a=1"}
    assert trace_context([(b"traceparent", b"\xff"), (b"tracestate", b"")]) == {}
