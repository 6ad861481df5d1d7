"""The bytes of the TCP protocol, without a socket: bytes in, frames out; a frame in, bytes out.

A connection carries two streams, one each way. Each begins with eight bytes with which nothing else begins, so that
an HTTP request or a TLS hello is known by its first byte; then it is frames to the end:

    stream = MAGIC frame*
    frame  = length:u32  kind:u8  channel:u32  crc:u32  payload          integers are big-endian

`length` counts all that follows it, and is compared with the limit before anything is kept for the frame. `crc` is
the CRC-32 of kind, channel and payload. The payload is one msgpack array, the fields of the kind in order. `channel`
numbers a batch or a ping, so that several can be under way; what concerns the whole connection is on channel 0.

What arrives can be wrong in three ways, by how much of it can still be trusted:

    the stream    wrong magic, an impossible length, a kind that   ProtocolViolation: drop the connection,
                  is unknown, a payload that is not one value      nothing that follows can be trusted
    one frame     a wrong CRC, a BATCH that has not its shape      Damaged: refuse that channel
    one envelope  no envelope, or a time without a time zone       PartlyReadable: reject it; its neighbours go on

A decoder is in one of three states:

    AWAITING_MAGIC --8 bytes--> READING_FRAMES --violation--> BROKEN
           '---------------another byte-------------------------^
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from durable.envelope import Envelope, Moment
from durable.errors import InvalidMessage, ProtocolViolation
from durable.outcomes import Rejected
from durable.transports.frames import (
    KINDS,
    MAX_ENVELOPES,
    TYPES,
    Batch,
    Count,
    Damaged,
    Frame,
    FrameKind,
    PartlyReadable,
    Received,
)

MAGIC: Final = b"\x89durab\r\n"  # no text begins with it, and whatever rewrites line ends breaks it

_TLS_RECORDS: Final = (b"\x15", b"\x16")  # an alert and a handshake; no text begins with them

_LENGTH: Final = struct.Struct("!I")
_HEAD: Final = struct.Struct("!IBII")
_KIND_AND_CHANNEL: Final = struct.Struct("!BI")
_SHORTEST: Final = _HEAD.size - _LENGTH.size
_LONGEST: Final = 2**32 - 1


class _RawBatch(Struct, array_like=True):
    count: Count
    envelopes: Annotated[list[msgspec.Raw], Meta(max_length=MAX_ENVELOPES)]
    clock: Moment | None = None


_encoder: Final = msgspec.msgpack.Encoder(uuid_format="bytes")
_decoders: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(content) for kind, content in TYPES.items()
}
_batch_decoder: Final = msgspec.msgpack.Decoder(Batch)
_raw_batch_decoder: Final = msgspec.msgpack.Decoder(_RawBatch)
_envelope_decoder: Final = msgspec.msgpack.Decoder(Envelope)

# What msgspec raises for bytes that it cannot take; DecodeError and UnicodeDecodeError are ValueErrors.
UNREADABLE: Final = (ValueError, OverflowError, RecursionError)
UNWRITABLE: Final = (ValueError, TypeError, OverflowError, RecursionError)


def encode(frame: Frame, max_frame_bytes: int = _LONGEST) -> bytes:
    """The frame as it travels.

    Raises InvalidMessage when it holds what msgpack cannot, or takes more than `max_frame_bytes`: a batch of several
    envelopes may then pass in parts, a single envelope never will.
    """
    kind = KINDS[type(frame.content)]
    try:
        payload = _encoder.encode(frame.content)
    except UNWRITABLE as error:
        raise InvalidMessage(f"a {kind.name} frame cannot be encoded: {error}") from error
    length = _SHORTEST + len(payload)
    if length > max_frame_bytes:
        raise InvalidMessage(f"a {kind.name} frame of {length:,} bytes; the peer takes {max_frame_bytes:,}")
    crc = zlib.crc32(payload, zlib.crc32(_KIND_AND_CHANNEL.pack(kind, frame.channel)))
    return _HEAD.pack(length, kind, frame.channel, crc) + payload


class DecoderState(Enum):
    AWAITING_MAGIC = "awaiting magic"
    READING_FRAMES = "reading frames"
    BROKEN = "broken"


class Decoder:
    """Makes frames of the bytes of one stream, however they were cut on the way.

    It holds at most one unfinished frame and what was fed last, and reserves nothing ahead of what has arrived.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.state = DecoderState.AWAITING_MAGIC
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._violation: ProtocolViolation | None = None

    @property
    def pending(self) -> bool:
        """True while a frame has arrived in part."""
        return bool(self._buffer)

    @property
    def announced_bytes(self) -> int:
        """Size of the unfinished frame; 0 while its length is unknown."""
        if self.state is not DecoderState.READING_FRAMES or len(self._buffer) < _LENGTH.size:
            return 0
        return _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0])

    def feed(self, data: bytes) -> list[Received]:
        """The frames that are whole now.

        Raises ProtocolViolation, at every call from the first that has nothing to return before the violation.
        """
        if self._violation is not None:
            raise self._violation
        self._buffer += data
        received: list[Received] = []
        try:
            while (item := self._next()) is not None:
                received.append(item)
        except ProtocolViolation as violation:
            self.state, self._violation = DecoderState.BROKEN, violation
            self._buffer.clear()
            if not received:
                raise
        return received

    def _next(self) -> Received | None:
        if self.state is DecoderState.AWAITING_MAGIC and not self._magic_is_whole():
            return None
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if not _SHORTEST <= length <= self.max_frame_bytes:
            raise ProtocolViolation(
                f"a frame announces {length:,} bytes; {_SHORTEST} to {self.max_frame_bytes:,} are allowed"
            )
        end = _LENGTH.size + length
        if len(buffer) < end:
            return None
        if len(buffer) == end:  # most large frames, which are not copied then
            self._buffer = bytearray()
            return _decode(buffer)
        with memoryview(buffer) as view:  # a slice of the buffer itself would be copied twice
            frame = bytes(view[:end])
        del buffer[:end]
        return _decode(frame)

    def _magic_is_whole(self) -> bool:
        arrived = bytes(self._buffer[: len(MAGIC)])
        if arrived[:1] in _TLS_RECORDS:
            raise ProtocolViolation("the peer speaks TLS, and this connection is not encrypted; use TLS on both ends")
        if not MAGIC.startswith(arrived):
            raise ProtocolViolation("the peer does not speak this protocol: the first bytes are others")
        if len(arrived) < len(MAGIC):
            return False
        del self._buffer[: len(MAGIC)]
        self.state = DecoderState.READING_FRAMES
        return True


def _decode(frame: bytes | bytearray) -> Received:
    _, kind, channel, crc = _HEAD.unpack_from(frame)
    payload = memoryview(frame)[_HEAD.size :]
    if crc != zlib.crc32(payload, zlib.crc32(frame[_LENGTH.size : _LENGTH.size + _KIND_AND_CHANNEL.size])):
        return Damaged(channel, "the CRC of the frame is wrong")
    if kind == FrameKind.BATCH:
        return _decode_batch(payload, channel, len(frame))
    if kind not in _decoders:
        raise ProtocolViolation(f"unknown frame: kind {kind}")
    try:
        return Frame(_decoders[kind].decode(payload), channel, len(frame))
    except UNREADABLE as error:
        raise ProtocolViolation(f"a {FrameKind(kind).name} frame cannot be read: {error}") from error


def _decode_batch(payload: memoryview, channel: int, size_bytes: int) -> Received:
    try:
        return Frame(_batch_decoder.decode(payload), channel, size_bytes)
    except UNREADABLE:
        return _salvage_batch(payload, channel, size_bytes)


def _salvage_batch(payload: memoryview, channel: int, size_bytes: int) -> Received:
    """Decode envelopes one by one: a bad one must not harm its neighbours."""
    try:
        batch = _raw_batch_decoder.decode(payload)
    except msgspec.ValidationError as error:
        return Damaged(channel, f"this is no batch: {error}")
    except UNREADABLE as error:
        raise ProtocolViolation(f"a BATCH frame cannot be read: {error}") from error
    return Frame(PartlyReadable(batch.count, *read_envelopes(batch.envelopes), batch.clock), channel, size_bytes)


def read_envelopes(raws: Iterable[msgspec.Raw]) -> tuple[list[Envelope], dict[int, Rejected]]:
    """Return the readable envelopes, and the outcomes of the others by their positions."""
    envelopes: list[Envelope] = []
    rejected: dict[int, Rejected] = {}
    for position, raw in enumerate(raws):
        match _decode_envelope(raw):
            case Envelope() as envelope:
                envelopes.append(envelope)
            case Rejected() as verdict:
                rejected[position] = verdict
    return envelopes, rejected


def _decode_envelope(raw: msgspec.Raw) -> Envelope | Rejected:
    try:
        return _envelope_decoder.decode(raw)
    except UNREADABLE as error:
        return Rejected(f"this is no envelope: {error}")
