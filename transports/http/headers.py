"""Headers of a request that describe the message in its body.

    Idempotency-Key           what recognises a repeat: a string of RFC 9651, or bare
    Durable-Correlation-Id    the fields of Options; times as in RFC 3339, with their zone
    Durable-Partition-Key
    Durable-Deliver-By
    Durable-Time-To-Live      in seconds from its arrival, instead of Durable-Deliver-By
    Durable-Execute-At
    Durable-Source
    Durable-Header-NAME       a header of the application's own; its name arrives in lower case
    traceparent, tracestate   W3C trace context, for whoever handles the message

Values are UTF-8. A header that is not known here is refused, for a misspelt one would be ignored without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Annotated, Final
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec

from durable.envelope import Moment
from durable.errors import InvalidMessage
from durable.grammar import suggestion
from durable.messages.versions import unversioned

Headers = Iterable[tuple[bytes, bytes]]

KEY: Final = "idempotency-key"
PREFIX: Final = "durable-"
OWN_PREFIX: Final = "durable-header-"
LONGEST_KEY: Final = 200

TRACING: Final = ("traceparent", "tracestate")
_KEY: Final = re.compile(rf"[\x20-\x7e]{{1,{LONGEST_KEY}}}")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)

_Text = Annotated[str, msgspec.Meta(min_length=1)]


def _header(field: str) -> str:
    return PREFIX + field.replace("_", "-")


class Options(msgspec.Struct, frozen=True, rename=_header):
    """The headers with a meaning of their own."""

    correlation_id: UUID | None = None
    partition_key: _Text | None = None
    deliver_by: Moment | None = None
    time_to_live: _Text | None = None
    execute_at: Moment | None = None
    source: _Text = "http"

    def deadline(self, now: datetime) -> datetime | None:
        """Return when a message that arrives now expires; raises InvalidMessage."""
        if self.time_to_live is None:
            return self.deliver_by
        if self.deliver_by is not None:
            raise InvalidMessage("Durable-Time-To-Live and Durable-Deliver-By exclude each other; give one of them")
        if not _SECONDS.fullmatch(self.time_to_live):
            raise InvalidMessage(f"Durable-Time-To-Live: {self.time_to_live[:100]!r} is no time; write seconds, as 30")
        return now + timedelta(seconds=float(self.time_to_live))


OPTIONS: Final = Options.__struct_encode_fields__
"""Their names."""


def read_options(headers: Headers) -> Options:
    """Read the options of a message. Raises InvalidMessage."""
    given = {name: value for name, value in _ours(headers).items() if not name.startswith(OWN_PREFIX)}
    _refuse_unknown(given, OPTIONS)
    try:
        return msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"a header is not as it should be: {error}") from None


def refuse_unknown(headers: Headers, known: Collection[str]) -> None:
    """Raise InvalidMessage for a header of durable that comes twice, or is none of these, which are in lower case."""
    _refuse_unknown(_ours(headers), known)


def _refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise InvalidMessage(f"unknown header: {name!r}{suggestion(name, known)}")


def own_headers(headers: Headers) -> dict[str, str]:
    """The application's own, by the names that it gave them; raises InvalidMessage."""
    given = _ours(headers).items()
    return {name.removeprefix(OWN_PREFIX): value for name, value in given if name.startswith(OWN_PREFIX)}


def trace_context(headers: Headers) -> dict[str, str]:
    """Return the trace context; a malformed one is ignored, as the standard demands."""
    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    return {
        name: value
        for name, value in found.items()
        if name in TRACING and value and value.isascii() and value.isprintable()
    }


def is_key(text: str) -> bool:
    """Tell whether a text may be the key of a message."""
    return _KEY.fullmatch(text) is not None


def read_key(headers: Headers) -> str | None:
    """The Idempotency-Key; raises InvalidMessage."""
    keys = [value.decode("latin-1").strip() for name, value in headers if name.lower() == KEY.encode()]
    if not keys:
        return None
    quoted = _QUOTED.fullmatch(keys[0])
    key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else keys[0]
    if len(keys) > 1 or not _KEY.fullmatch(key) or (key.startswith('"') and not quoted):
        raise InvalidMessage(
            f"Idempotency-Key must be one text: 1 to {LONGEST_KEY} printable ASCII characters, quoted or bare"
        )
    return key


def id_of(key: str, endpoint: str, message_type: str) -> UUID:
    """Return the id of the envelope: a key that is a UUID itself, or a UUID made from any other key."""
    if _UUID.fullmatch(key):
        return UUID(key)
    return uuid5(uuid5(uuid5(NAMESPACE_URL, f"durable:{endpoint}"), unversioned(message_type)), key)


def _ours(headers: Headers) -> dict[str, str]:
    """Return the headers of durable, by their names in lower case."""
    found: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1").lower()
        if not name.startswith(PREFIX):
            continue
        if name in found:
            raise InvalidMessage(f"the header {name!r} comes twice; send it once")
        try:
            found[name] = raw_value.decode()
        except UnicodeDecodeError:
            raise InvalidMessage(f"the header {name!r} is not in UTF-8; encode its value") from None
    return found
