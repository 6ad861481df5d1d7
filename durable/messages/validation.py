"""Validation of envelopes before they can spoil the batch that they are in.

The same rule serves send(), where a find_error is the caller's error, and the receiver, where it is quarantined.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from durable.duration import LATEST as LATEST
from durable.envelope import Envelope, unix_ms
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.messages.sealed import is_sealed, message_bytes, parted

MAX_HEADERS = 100
MAX_HEADER_BYTES = 8_192
MAX_TEXT_BYTES = 1_000
"""Of a name, an address or a key, in UTF-8. An index of Postgres takes 2,704 bytes for all of its columns, and two of
them stand together in some of ours."""
EARLIEST = datetime.min.replace(tzinfo=UTC) + timedelta(days=1)

NO_IDS = (0, (1 << 128) - 1)
"""The nil and the max UUID (RFC 9562): stand-ins for an id, which any number of messages may have."""

_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def check_service(subject: str, service: str) -> None:
    """Raise InvalidSetting unless this text can be the name of a service."""
    if not _SERVICE.fullmatch(service):
        raise InvalidSetting(
            f"{subject}: service={service!r} is no name; give letters, digits, '.', '-' and '_', such as 'orders'"
        )


def find_error(
    envelope: Envelope,
    *,
    max_message_bytes: int,
    max_headers: int = MAX_HEADERS,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> str | None:
    """Return the reason why this envelope cannot be stored, or None."""
    if envelope.id.int in NO_IDS:
        return f"{envelope.id} is no id of a message"
    if len(envelope.body) > max_message_bytes and (size := message_bytes(envelope.body)) > max_message_bytes:
        return f"the body has {size} bytes, more than max_message_bytes ({max_message_bytes})"
    for name, value in (
        ("message_type", envelope.message_type),
        ("source", envelope.source),
        ("destination", envelope.destination),
        ("content_type", envelope.content_type),
    ):
        if not value:
            return f"{name} is empty"
        if reason := text_fault(value):
            return f"{name} {reason}"
    if envelope.partition_key is not None and (reason := text_fault(envelope.partition_key)):
        return f"partition_key {reason}"
    if envelope.headers and (reason := _headers_flaw(envelope.headers, max_headers, max_header_bytes)):
        return reason
    for name, moment in (
        ("sent_at", envelope.sent_at),
        ("deliver_by", envelope.deliver_by),
        ("execution_time", envelope.execution_time),
    ):
        if moment is not None and moment.tzinfo is None:
            return f"{name} has no time zone"
        if moment is not None and not EARLIEST <= moment <= LATEST:
            return f"{name} lies outside the calendar"
    return None


def is_whole(
    envelope: Envelope,
    *,
    max_message_bytes: int,
    max_headers: int = MAX_HEADERS,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> bool:
    """Tell whether an envelope is sound but for its age, or the size of its body; then it can be replayed."""
    size = max(max_message_bytes, len(envelope.body))
    own = {"max_message_bytes": size, "max_headers": max_headers, "max_header_bytes": max_header_bytes}
    return find_error(envelope, **own) is None


def find_misplaced(envelope: Envelope) -> str | None:
    """Return the reason why an encrypted body does not belong to this envelope, as far as it tells without its key."""
    if not is_sealed(envelope.body):
        return None
    sealed = parted(envelope.body)
    if sealed is None:
        return "the encrypted body is broken off"
    if sealed.destination != envelope.destination:
        return "the encrypted body was sealed for another destination than its envelope names"
    return None


def never_due(envelope: Envelope) -> bool:
    """True for an envelope that expires before it is due."""
    due, deliver_by = envelope.execution_time, envelope.deliver_by
    return due is not None and deliver_by is not None and due >= deliver_by


def find_misdating(envelope: Envelope, now: datetime, *, dedupe_window: timedelta, clock_lead: timedelta) -> str | None:
    """Return the reason why duplicates of an arriving envelope could not be told by its times, or None."""
    if too_old(envelope, now, dedupe_window):
        return "it is older than duplicates are remembered (dedupe_window); nobody can tell whether it was handled"
    if reason := from_the_future(envelope, now, clock_lead):
        return reason
    if envelope.execution_time is not None and envelope.execution_time - now >= dedupe_window:
        return f"it is put off for longer than duplicates are remembered (dedupe_window, {dedupe_window})"
    return None


def from_the_future(envelope: Envelope, now: datetime, clock_lead: timedelta) -> str | None:
    """Return the reason why an envelope was not made yet, or None. Its id would be forgotten by a day to come."""
    latest = now + clock_lead
    made_ms = unix_ms(envelope.id)
    if made_ms is not None and made_ms / 1000 > latest.timestamp():
        return f"the time in its id is more than clock_lead ({clock_lead}) ahead; set the clock of its sender"
    if envelope.sent_at > latest:
        return f"its sent_at is more than clock_lead ({clock_lead}) ahead; set the clock of its sender"
    return None


def too_old(envelope: Envelope, now: datetime, dedupe_window: timedelta) -> bool:
    """True for an envelope older than the dedupe window: then none can tell whether it was handled."""
    made_ms = unix_ms(envelope.id)
    oldest = now - dedupe_window
    return envelope.sent_at < oldest if made_ms is None else made_ms / 1000 < oldest.timestamp()


def _headers_flaw(headers: dict[str, str], max_headers: int, max_header_bytes: int) -> str | None:
    if len(headers) > max_headers:
        return f"{several(len(headers), 'headers')}, more than max_headers ({max_headers})"
    for name, value in headers.items():
        if name == "":
            return "a header has no name"
        if not isinstance(name, str) or not isinstance(value, str):
            return f"header {name!r} is not text"
        if _UNSAFE.search(name) or _UNSAFE.search(value):
            return f"header {name!r} has a control character or a lone surrogate"
    if sum(utf8_bytes(name) + utf8_bytes(value) for name, value in headers.items()) > max_header_bytes:
        return f"the headers have more than max_header_bytes ({max_header_bytes})"
    return None


def text_fault(text: str) -> str | None:
    """Return the reason why a text can be no name, address or key, or None."""
    if _UNSAFE.search(text):
        return "has a control character or a lone surrogate"
    if utf8_bytes(text) > MAX_TEXT_BYTES:
        return f"is longer than {MAX_TEXT_BYTES} bytes in UTF-8"
    return None


def utf8_bytes(text: str) -> int:
    """The length of a text as it is stored."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
