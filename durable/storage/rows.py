"""Conversion between envelopes and columns: arrays going in, rows coming out."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec
from sqlalchemy import Row

from durable.envelope import ANY_NODE, Envelope, LeasedEnvelope, LeaseKey, NodeId
from durable.errors import InvalidMessage, text_of
from durable.messages.digest import fingerprint
from durable.messages.ordering import QueueKeys
from durable.redaction import redacted

KEPT_ATTEMPTS: Final = 20
"""Failed attempts of one message that are kept, the last ones."""
_LONGEST_REASON: Final = 2_000
_LONGEST_TRACEBACK: Final = 20_000

_ADDRESS_AT: Final = 11
_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


def envelope_columns(envelopes: Sequence[Envelope]) -> dict[str, Any]:
    """Return an array for each column that both tables of work share."""
    return {
        "id": [e.id for e in envelopes],
        "message_type": [e.message_type for e in envelopes],
        "source": [e.source for e in envelopes],
        "correlation_id": [e.correlation_id for e in envelopes],
        "causation_id": [e.causation_id for e in envelopes],
        "partition_key": [e.partition_key for e in envelopes],
        "content_type": [e.content_type for e in envelopes],
        "headers": [_encode_headers(e.headers).decode() if e.headers else "{}" for e in envelopes],
        "body": [e.body for e in envelopes],
        "sent_at": [e.sent_at for e in envelopes],
        "deliver_by": [e.deliver_by for e in envelopes],
    }


def queueing_columns(rows: Sequence[tuple[NodeId, QueueKeys]]) -> dict[str, Any]:
    """Return the columns for owner and queue. Ordered rows are never born owned: a claim finds out whether their turn
    has come.
    """
    return {
        "owner_id": [ANY_NODE if place.ordering_key is not None else owner for owner, place in rows],
        "ordering_key": [place.ordering_key for _, place in rows],
        "fair_key": [place.fair_key for _, place in rows],
    }


def decoded_headers(text: str) -> dict[str, str]:
    """The headers of a row. Raises InvalidMessage when they are none, which no constraint of the table prevents."""
    if text == "{}":
        return {}
    try:
        return _decode_headers(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidMessage(f"headers are no object of strings: {error}") from error


def shown_headers(text: str) -> dict[str, str]:
    """The headers of a dead letter; all that stands there under one name, if they cannot be read."""
    try:
        return decoded_headers(text)
    except InvalidMessage:
        return {"headers that cannot be read": text}


def leased(row: Row[Any]) -> LeasedEnvelope:
    """A claimed row of either table. Raises InvalidMessage when it cannot be read."""
    (
        envelope_id, message_type, source, correlation_id, causation_id, partition_key, content_type, headers, body,
        sent_at, deliver_by, address, epoch, attempts, interruptions, ordering_key, seq,
    ) = tuple(row)  # fmt: skip
    return LeasedEnvelope(
        Envelope(
            id=envelope_id,
            message_type=message_type,
            destination=address,
            source=source,
            correlation_id=correlation_id,
            body=body,
            sent_at=sent_at,
            content_type=content_type,
            causation_id=causation_id,
            partition_key=partition_key,
            headers=decoded_headers(headers),
            deliver_by=deliver_by,
        ),
        epoch=epoch,
        endpoint=address,
        attempts=attempts,
        interruptions=interruptions,
        ordering_key=ordering_key,
        seq=seq,
    )


def key_of(row: Row[Any]) -> LeaseKey:
    """The key of a claimed row, also of one that cannot be read."""
    address: str = tuple(row)[_ADDRESS_AT]
    return row.id, address, row.epoch


UNREADABLE: Final = "unreadable row"
QUARANTINED: Final = "quarantined on arrival"
REFUSED: Final = "refused by the database"
"""The kind of a letter whose message was never stored for handling, and so never held its id."""


class Letter(msgspec.Struct, frozen=True):
    """Reason why an envelope became a dead letter."""

    exception_type: str
    reason: str
    traceback: str | None
    fingerprint: str

    @classmethod
    def because(cls, reason: str, kind: str, message_type: str = "") -> Self:
        """A reason that is no exception: `kind` groups letters of the same cause, with the type where it is known."""
        return cls(kind, storable(reason), None, fingerprint(kind, message_type) if message_type else fingerprint(kind))

    @classmethod
    def from_error(cls, error: BaseException, *, inside: str = "durable") -> Self:
        """An exception, grouped by its type and the first frame outside the package `inside`."""
        frames = traceback.extract_tb(error.__traceback__)
        foreign = [frame for frame in frames if f"/{inside}/" not in frame.filename] or frames
        place = f"{foreign[0].filename}:{foreign[0].name}" if foreign else ""
        kind, message, text = error_text(error)
        return cls(kind, storable(message), storable(text), fingerprint(kind, place))

    def parameters(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


class Failure(msgspec.Struct, frozen=True):
    """Failed attempt: its number from 1, its time by its node's clock, and its error."""

    number: int
    failed_at: datetime
    exception_type: str
    reason: str
    traceback: str

    @classmethod
    def from_error(cls, error: BaseException, *, number: int, failed_at: datetime) -> Self:
        kind, message, text = error_text(error)
        reason, short = both_ends(message, _LONGEST_REASON), both_ends(text, _LONGEST_TRACEBACK)
        return cls(number, failed_at, kind, storable(reason), storable(short))


class Tried(NamedTuple):
    """Attempts of a message that its row does not count yet, and those of them that failed."""

    counted: int = 1
    failures: Sequence[Failure] = ()
    kept: int = KEPT_ATTEMPTS
    """The number of failed attempts of one message that are kept, these included."""

    def columns(self) -> dict[str, Any]:
        """Return one array for each column of the kept failures, and the number of earlier ones that stay with them."""
        last = self.failures[-self.kept :]
        return {
            "counted": self.counted,
            "earlier": max(0, self.kept - len(self.failures)),
            "failed_number": [f.number for f in last],
            "failed_at": [f.failed_at for f in last],
            "failed_type": [f.exception_type for f in last],
            "failed_reason": [f.reason for f in last],
            "failed_traceback": [f.traceback for f in last],
        }


ONCE: Final = Tried()
"""One attempt, of which nothing is kept."""
UNCOUNTED: Final = Tried(0)
"""No attempt that its row does not count."""


def both_ends(text: str, limit: int) -> str:
    """A text of about `limit` characters: where it began and what it came to are what matters of a traceback."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def storable(text: str, limit: int = 100_000) -> str:
    """The text as Postgres can hold it: no NUL, no lone surrogate, no more than `limit` characters."""
    return text[:limit].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def error_text(error: BaseException) -> tuple[str, str, str]:
    """Return the type, the text and the traceback of an error, from the application's code on, without secrets."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    said = text_of(error)
    return kind, kind if said == type(error).__qualname__ else redacted(said), redacted(_trace_of(error))


def _trace_of(error: BaseException) -> str:
    trace = _of_application(error.__traceback__)
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:  # it asks the application's objects for what they have
        return "".join(traceback.format_tb(trace))


def _of_application(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of durable before the application's; keep all when there are no others."""
    inner = trace
    while inner is not None and str(inner.tb_frame.f_globals.get("__name__")).startswith("durable."):
        inner = inner.tb_next
    return inner or trace
