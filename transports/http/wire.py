"""A batch and its outcomes as the bodies of HTTP requests and responses.

    batch      [version, count, [envelope, ...], clock]     application/vnd.durable.batch+msgpack
    outcomes   [outcome, ...]                               application/vnd.durable.outcomes+msgpack
    arguments  [argument, ...]                              application/vnd.durable.arguments+msgpack
    result     a value                                      application/vnd.durable.result+msgpack
    offers     [[offer, ...]]                               application/vnd.durable.offers+msgpack
    directory  [[listing, ...]]                             application/vnd.durable.directory+msgpack

All are msgpack; envelopes and outcomes are encoded as on TCP connections. Later versions of durable add fields at the
end, which earlier ones skip; a batch that an earlier one must not read has a higher version.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from durable.envelope import Envelope, Moment
from durable.errors import InvalidMessage, ProtocolViolation
from durable.grammar import several
from durable.outcomes import Outcome, printable, tidy
from durable.transports.deadlines import departure
from durable.transports.frames import MAX_ENVELOPES, Count, Directory, Listing, Offers, PartlyReadable
from durable.transports.wire import UNREADABLE, UNWRITABLE, read_envelopes

VERSION: Final = 1
BATCH: Final = "application/vnd.durable.batch+msgpack"
OUTCOMES: Final = "application/vnd.durable.outcomes+msgpack"
ARGUMENTS: Final = "application/vnd.durable.arguments+msgpack"
RESULT: Final = "application/vnd.durable.result+msgpack"
OFFERS: Final = "application/vnd.durable.offers+msgpack"
DIRECTORY: Final = "application/vnd.durable.directory+msgpack"


class _Batch(Struct, array_like=True):
    version: Count
    count: Count
    envelopes: Annotated[list[Envelope], Meta(min_length=1, max_length=MAX_ENVELOPES)]
    clock: Moment | None = None


class _RawBatch(Struct, array_like=True):
    version: Count
    count: Count
    envelopes: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_ENVELOPES)]
    clock: Moment | None = None


class _Versioned(Struct, array_like=True):
    version: Count


_encoder: Final = msgspec.msgpack.Encoder(uuid_format="bytes")
_batch_decoder: Final = msgspec.msgpack.Decoder(_Batch)
_raw_batch_decoder: Final = msgspec.msgpack.Decoder(_RawBatch)
_version_decoder: Final = msgspec.msgpack.Decoder(_Versioned)
_offers_decoder: Final = msgspec.msgpack.Decoder(Offers)
_directory_decoder: Final = msgspec.msgpack.Decoder(Directory)
_outcomes_decoder: Final = msgspec.msgpack.Decoder(Annotated[list[Outcome], Meta(max_length=MAX_ENVELOPES)])


def encode_batch(envelopes: Sequence[Envelope], now: datetime | None = None) -> bytes:
    """`now` is told to the peer with what has a deadline. Raises InvalidMessage when an envelope holds what msgpack
    cannot."""
    try:
        return _encoder.encode(_Batch(VERSION, len(envelopes), list(envelopes), departure(envelopes, now)))
    except UNWRITABLE as error:
        raise InvalidMessage(f"the batch cannot be encoded: {error}") from error


def decode_batch(body: bytes) -> PartlyReadable:
    """Return the envelopes of a batch, or why one is none; at least one. Raises ProtocolViolation."""
    try:
        version = _version_decoder.decode(body).version
        if version != VERSION:
            raise ProtocolViolation(f"the batch is of version {version}; this service speaks version {VERSION}")
        content = _read(body)
    except UNREADABLE as error:
        raise ProtocolViolation(f"the body is no batch: {printable(str(error))}") from error
    held = len(content.envelopes) + len(content.rejected)
    if content.count != held:
        raise ProtocolViolation(f"malformed batch: the count says {content.count} envelopes, and {held} are there")
    return content


def _read(body: bytes) -> PartlyReadable:
    try:
        batch = _batch_decoder.decode(body)
    except UNREADABLE:  # one by one, because one bad envelope must not harm its neighbours
        raw_batch = _raw_batch_decoder.decode(body)
        return PartlyReadable(raw_batch.count, *read_envelopes(raw_batch.envelopes), raw_batch.clock)
    return PartlyReadable(batch.count, batch.envelopes, {}, batch.clock)


def encode_offers(offers: Offers) -> bytes:
    return _encoder.encode(offers)


def decode_offers(body: bytes) -> Offers:
    """Read the offers of a peer. Raises ProtocolViolation."""
    try:
        return _offers_decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolViolation(f"the offers cannot be read: {printable(str(error))}") from error


def encode_directory(listings: list[Listing]) -> bytes:
    return _encoder.encode(Directory(listings))


def decode_directory(body: bytes) -> list[Listing]:
    """Read the directory of a peer. Raises ProtocolViolation."""
    try:
        return _directory_decoder.decode(body).listings
    except UNREADABLE as error:
        raise ProtocolViolation(f"the directory cannot be read: {printable(str(error))}") from error


def encode_outcomes(outcomes: list[Outcome]) -> bytes:
    return _encoder.encode(tidy(outcomes))


def decode_outcomes(body: bytes, count: int) -> list[Outcome]:
    """Return one outcome for each envelope that was sent; raises ProtocolViolation."""
    try:
        outcomes = _outcomes_decoder.decode(body)
    except UNREADABLE as error:
        raise ProtocolViolation(f"the outcomes cannot be read: {printable(str(error))}") from error
    if len(outcomes) != count:
        raise ProtocolViolation(
            f"malformed answer: {several(len(outcomes), 'outcomes')} for {several(count, 'envelopes')}"
        )
    return tidy(outcomes)
