"""The bytes of the TCP protocol: what is said arrives, however it is cut; what is broken harms as little as it can."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from durable.envelope import Envelope
from durable.errors import InvalidMessage, ProtocolViolation
from durable.outcomes import BUSY, DUPLICATE, STORED, Failed, Rejected
from durable.transports import frames
from durable.transports.frames import (
    MAX_ENVELOPES,
    Batch,
    Challenge,
    Credit,
    Damaged,
    Frame,
    FrameKind,
    Goodbye,
    Hello,
    Outcomes,
    PartlyReadable,
    Ping,
    Pong,
    Proof,
    Received,
    Refused,
    Welcome,
)
from durable.transports.wire import MAGIC, Decoder, encode
from tests.support.frames import batch_of, raw_frame
from tests.support.receivers import envelope, envelopes

LIMIT = 1 << 16

texts = st.text(st.characters(codec="utf-8"), max_size=20)
times = st.datetimes(timezones=st.just(UTC))
counts = st.integers(0, 2**63 - 1)
any_envelope = st.builds(
    Envelope,
    id=st.uuids(),
    message_type=texts,
    destination=texts,
    source=texts,
    correlation_id=st.uuids(),
    body=st.binary(max_size=200),
    sent_at=times,
    content_type=texts,
    causation_id=st.none() | st.uuids(),
    partition_key=st.none() | texts,
    headers=st.dictionaries(texts, texts, max_size=3),
    deliver_by=st.none() | times,
    execution_time=st.none() | times,
)
any_outcome = st.sampled_from([STORED, DUPLICATE, BUSY]) | st.builds(Rejected, texts) | st.builds(Failed, texts)
versions = st.lists(st.integers(0, 2**31), max_size=5)
any_content = st.one_of(
    st.builds(Hello, versions, texts, counts, counts, st.binary(max_size=64), texts),
    st.builds(Challenge, texts, counts, st.binary(max_size=64), st.binary(max_size=64)),
    st.builds(Proof, st.binary(max_size=64)),
    st.builds(Welcome, st.integers(0, 9), texts, counts, counts, counts, counts),
    st.builds(Refused, texts, versions),
    st.lists(any_envelope, max_size=4).map(lambda some: Batch(len(some), some)),
    st.builds(Outcomes, st.lists(any_outcome, max_size=5), counts),
    st.builds(Credit, counts),
    st.just(Ping()),
    st.builds(Pong, st.booleans()),
    st.just(Goodbye()),
)
any_frame = st.builds(Frame, any_content, st.integers(0, 2**32 - 1))


@pytest.mark.parametrize(
    "content",
    [each for each in vars(frames).values() if isinstance(each, msgspec.StructMeta) and each is not PartlyReadable],
    ids=lambda content: content.__name__,
)
def test_content_of_a_frame_is_an_array(content: msgspec.StructMeta) -> None:
    """Peers of other versions read the values by their places."""
    assert content.__struct_config__.array_like or content is msgspec.Struct


def listen(pieces: Iterable[bytes], limit: int = LIMIT) -> tuple[list[Received], bool]:
    """What a decoder makes of these pieces, and whether it found a violation."""
    decoder = Decoder(limit)
    received: list[Received] = []
    try:
        for piece in pieces:
            received += decoder.feed(piece)
        received += decoder.feed(b"")
    except ProtocolViolation:
        return received, True
    return received, False


def only(frame: bytes) -> Received:
    received, violated = listen([MAGIC + frame])
    assert not violated
    (item,) = received
    return item


@given(any_frame)
def test_frame_arrives_unchanged(frame: Frame) -> None:
    received, violated = listen([MAGIC, encode(frame)])
    assert (received, violated) == ([frame], False)


@given(st.lists(any_frame, max_size=4), st.binary(max_size=40), st.data())
def test_stream_cut_anywhere_gives_the_same_frames_up_to_the_same_violation(
    frames: list[Frame], tail: bytes, data: st.DataObject
) -> None:
    stream = MAGIC + b"".join(map(encode, frames)) + tail
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole = listen([stream])
    assert whole[0][: len(frames)] == frames
    assert listen(pieces) == whole


@given(any_frame)
def test_stream_arriving_byte_by_byte_gives_the_same_frames(frame: Frame) -> None:
    stream = MAGIC + encode(frame)
    assert listen(bytes([byte]) for byte in stream) == ([frame], False)


@given(st.binary(max_size=300), st.booleans())
def test_garbage_raises_nothing_but_a_protocol_violation(garbage: bytes, after_magic: bool) -> None:
    listen([MAGIC + garbage if after_magic else garbage])


@given(st.integers(0, 255), st.binary(max_size=200))
@example(FrameKind.BATCH, b"\x92\x01" + b"\x91" * 100_000)
@example(FrameKind.BATCH, b"\x93\x00\x90" + b"\x91" * 100_000 + b"\xc0")
@example(FrameKind.HELLO, b"\x91" * 100_000)
def test_garbage_in_a_frame_raises_only_a_protocol_violation(kind: int, payload: bytes) -> None:
    listen([MAGIC + raw_frame(kind, payload)], limit=1 << 20)


@given(any_frame, st.data())
def test_flipped_byte_is_detected(frame: Frame, data: st.DataObject) -> None:
    stream = bytearray(encode(frame))
    position = data.draw(st.integers(0, len(stream) - 1))
    stream[position] ^= data.draw(st.integers(1, 255))
    received, _ = listen([MAGIC, bytes(stream)])
    assert not any(isinstance(item, Frame) for item in received)


@given(
    st.lists(
        any_envelope | st.binary(max_size=30) | st.lists(st.integers(-(2**63), 2**64 - 1) | texts, max_size=13),
        max_size=6,
    )
)
def test_invalid_envelope_is_rejected_and_its_neighbours_are_read(items: list[Any]) -> None:
    readable = [item for item in items if isinstance(item, Envelope)]
    match only(batch_of(*items)):
        case Frame(Batch(count, found)):
            assert (count, found) == (len(items), readable)
            assert len(readable) == len(items)
        case Frame(PartlyReadable(count, found, rejected)):
            assert (count, found) == (len(items), readable)
            assert list(rejected) == [n for n, item in enumerate(items) if not isinstance(item, Envelope)]
        case other:
            pytest.fail(f"unexpected: {other}")


def test_tls_is_recognised_by_the_first_byte_of_a_handshake_or_an_alert() -> None:
    for first_byte in (b"\x16", b"\x15"):
        with pytest.raises(ProtocolViolation, match="the peer speaks TLS"):
            Decoder(LIMIT).feed(first_byte)


@pytest.mark.parametrize(
    "first_bytes",
    [
        pytest.param(b"G", id="HTTP GET"),
        pytest.param(MAGIC[:-1] + b"\r", id="line ends rewritten"),
        pytest.param(b"\x00\x00\x00\x00", id="a frame without magic"),
    ],
)
def test_another_protocol_is_recognised_by_its_first_bytes(first_bytes: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="does not speak this protocol"):
        Decoder(LIMIT).feed(first_bytes)


@pytest.mark.parametrize("length", [0, 8, LIMIT + 1, 2**31, 2**32 - 1])
def test_impossible_length_is_a_violation_at_once(length: int) -> None:
    decoder = Decoder(LIMIT)
    decoder.feed(MAGIC)
    with pytest.raises(ProtocolViolation, match="announces"):
        decoder.feed(struct.pack("!I", length))


def test_frame_of_the_limit_is_read_and_a_larger_one_refused() -> None:
    frame = encode(Frame(Batch(1, [envelope(body=b"x" * 5_000)])))
    limit = len(frame) - 4
    assert len(listen([MAGIC, frame], limit)[0]) == 1
    assert listen([MAGIC, frame], limit - 1) == ([], True)


def test_decoder_reserves_at_most_the_bytes_received_and_one_frame() -> None:
    claims = [
        raw_frame(FrameKind.BATCH, b"", length=LIMIT),  # announces the limit, brings nothing
        raw_frame(FrameKind.BATCH, b"", length=2**32 - 1),
        raw_frame(FrameKind.BATCH, b"\x92\x01\xdd\xff\xff\xff\xff"),  # a batch of 4,294,967,295 envelopes
        raw_frame(FrameKind.BATCH, b"\x92\x01\x91\xdd\xff\xff\xff\xff"),  # an envelope of as many fields
        raw_frame(FrameKind.BATCH, b"\x92\x01\x91\xc6\xff\xff\xff\xff"),  # of 4 GiB
        raw_frame(FrameKind.HELLO, b"\x94\xdd\xff\xff\xff\xff"),
        raw_frame(FrameKind.OUTCOMES, b"\x92\xdd\xff\xff\xff\xff"),
        raw_frame(FrameKind.REFUSED, b"\x92\xdb\xff\xff\xff\xff"),
    ]
    tracemalloc.start()
    for claim in claims:
        listen([MAGIC, claim])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < LIMIT


def test_decoder_keeps_nothing_of_returned_frames() -> None:
    decoder = Decoder(LIMIT)
    stream = MAGIC + b"".join(encode(Frame(Batch(1, [envelope(body=b"x" * 50_000)]))) for _ in range(50))
    tracemalloc.start()
    for start in range(0, len(stream), 1_000):
        decoder.feed(stream[start : start + 1_000])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * LIMIT


def test_a_wrong_crc_damages_one_frame_and_the_next_is_read() -> None:
    damaged = raw_frame(FrameKind.BATCH, b"\x92\x00\x90", channel=3, crc=1)
    received, violated = listen([MAGIC + damaged + encode(Frame(Ping(), 4))])
    assert received == [Damaged(3, "the CRC of the frame is wrong"), Frame(Ping(), 4)]
    assert not violated


def test_a_batch_of_more_envelopes_than_allowed_is_damaged() -> None:
    match only(batch_of(*[0] * (MAX_ENVELOPES + 1))):
        case Damaged(7, reason):
            assert "length <= 1000" in reason
        case other:
            pytest.fail(f"unexpected: {other}")


def test_bytes_after_the_payload_are_a_violation() -> None:
    payload = msgspec.msgpack.encode([0, []])
    assert listen([MAGIC + raw_frame(FrameKind.BATCH, payload + b"\x00")]) == ([], True)


def test_unknown_kind_is_a_violation() -> None:
    assert listen([MAGIC + raw_frame(99, b"\x90")]) == ([], True)


def test_frames_before_a_violation_are_returned_and_the_violation_follows() -> None:
    decoder = Decoder(LIMIT)
    assert decoder.feed(MAGIC + encode(Frame(Ping(), 1)) + b"\x00" * 4) == [Frame(Ping(), 1)]
    for _ in range(2):
        with pytest.raises(ProtocolViolation):
            decoder.feed(b"")


def test_fields_added_by_a_later_version_are_skipped() -> None:
    welcome = Welcome(1, "billing", 2, LIMIT, 1_000, 500)
    later = [*msgspec.structs.astuple(welcome), "a new field", {"and": ["another"]}]
    assert only(raw_frame(FrameKind.WELCOME, msgspec.msgpack.encode(later))) == Frame(welcome, 7)
    ours = envelope()
    assert only(batch_of([*msgspec.structs.astuple(ours), "a new field"])) == Frame(Batch(1, [ours]), 7)


@pytest.mark.parametrize("field", ["sent_at", "deliver_by", "execution_time"])
def test_an_envelope_with_a_time_without_time_zone_is_rejected_alone(field: str) -> None:
    before, after = envelopes(2)
    naive = msgspec.structs.replace(envelope(), **{field: datetime(2030, 1, 1)})
    match only(batch_of(before, naive, after)):
        case Frame(PartlyReadable(3, found, rejected)):
            assert found == [before, after]
            assert list(rejected) == [1]
            assert "timezone" in rejected[1].reason
        case other:
            pytest.fail(f"unexpected: {other}")


def test_an_envelope_with_invalid_utf8_is_rejected_alone() -> None:
    before, after = envelopes(2)
    bad = msgspec.Raw(msgspec.msgpack.encode(envelope(message_type="QQQQ")).replace(b"QQQQ", b"\xff\xfe\xfd\xfc"))
    match only(batch_of(before, bad, after)):
        case Frame(PartlyReadable(3, found, rejected)):
            assert found == [before, after]
            assert list(rejected) == [1]
        case other:
            pytest.fail(f"unexpected: {other}")


def test_a_frame_above_the_limit_of_the_peer_is_not_encoded() -> None:
    with pytest.raises(InvalidMessage, match=r"a BATCH frame of 10,\d+ bytes; the peer takes 10,000"):
        encode(Frame(Batch(1, [envelope(body=b"x" * 10_000)])), max_frame_bytes=10_000)


def test_text_with_a_lone_surrogate_is_not_encoded() -> None:
    with pytest.raises(InvalidMessage, match="cannot be encoded"):
        encode(Frame(Batch(1, [envelope(message_type="\ud800")])))


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 40))
def test_pending_tells_whether_a_frame_has_begun(whole: int, part: int) -> None:
    decoder = Decoder(LIMIT)
    frame = encode(Frame(Batch(1, [envelope()])))
    decoder.feed(MAGIC + frame * whole)
    assert not decoder.pending
    decoder.feed(frame[: min(part, len(frame) - 1)])
    assert decoder.pending
