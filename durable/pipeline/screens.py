"""The rules of send(), for whole Arrow batches.

Rules for an envelope are in `messages.validation`. To ask them of each of a million rows would take longer than to
store them; so a few comparisons over columns find the rows that it might refuse, and only these are asked about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.compute

from durable.envelope import Envelope
from durable.errors import InvalidSetting
from durable.messages import validation as screening
from durable.pipeline.publishable import IDS, NEVER_NULL, TEXTS, TIMES
from durable.transports.addresses import canonical

pc: Any = pyarrow.compute  # its functions are made at run time, and no type checker knows them

_UNSAFE: Final = "[\\x00-\\x1f\\x7f]"  # the texts are UTF-8 by then, and so without lone surrogates
_PLAIN_HEADERS: Final = "{}"
_headers = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of messages that the service accepts, by its settings."""

    max_message_bytes: int
    dedupe_window: timedelta
    clock_lead: timedelta


def misencoded(batch: pa.RecordBatch, names: Sequence[str] = (*TEXTS, "body")) -> str | None:
    """Return the reason why the first text that is not UTF-8 cannot be published, of a batch as Spark gives it: texts
    of Spark's may have any bytes, and neither Arrow nor Python reads such ones. None when all are UTF-8.
    """
    for name in names:
        index = batch.schema.get_field_index(name)
        if index >= 0 and not _is_utf8(column := batch.column(index)):
            row = next(row for row in range(len(column)) if not _is_utf8(column.slice(row, 1)))
            return f"column {name}: text is not UTF-8{_of_row(batch, row)}"
    return None


def _is_utf8(column: pa.Array) -> bool:
    """Tell whether all texts of a column are UTF-8; bytes need not be."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def flaw(batch: pa.RecordBatch, limits: Limits, now: datetime) -> str | None:
    """Return the reason why the first invalid row of a whole batch cannot be published; None when all rows can. Its
    texts are UTF-8.
    """
    for name in NEVER_NULL:
        if batch.column(name).null_count:
            return f"column {name}: is NULL{_of_row(batch, _first(pc.is_null(batch.column(name))))}"
    for name in IDS:
        wrong = pc.fill_null(pc.not_equal(pc.binary_length(batch.column(name)), 16), False)
        if pc.any(wrong).as_py():
            return f"column {name}: has not 16 bytes{_of_row(batch, _first(wrong))}"
    for name in TIMES:  # what lies outside is not even a datetime
        outside = _outside_the_calendar(batch.column(name))
        if pc.any(outside).as_py():
            return f"{name} lies outside the calendar{_of_row(batch, _first(outside))}"
    for index in _suspects(batch, limits, now):
        if reason := _flaw_of(batch, index, limits, now):
            return reason
    return _unknown_destination(batch)


def _unknown_destination(batch: pa.RecordBatch) -> str | None:
    """Each different destination is looked at once."""
    destinations = batch.column("destination").filter(pc.is_null(batch.column("endpoint")))
    for text in pc.unique(destinations).to_pylist():
        try:
            canonical(text)
        except InvalidSetting as error:
            index = int(pc.index(batch.column("destination"), text).as_py())
            return f"destination {error}{_of_row(batch, index)}"
    return None


def _suspects(batch: pa.RecordBatch, limits: Limits, now: datetime) -> Iterator[int]:
    """The rows that may have a flaw: all that have one, and some others."""
    found = pc.greater(pc.binary_length(batch.column("body")), limits.max_message_bytes)
    for name in TEXTS:
        found = pc.or_(found, _suspicious_texts(batch.column(name), name))
    put_off = pc.subtract(batch.column("execution_time"), batch.column("sent_at"))
    found = pc.or_(found, pc.fill_null(pc.greater_equal(put_off, pa.scalar(limits.dedupe_window, put_off.type)), False))
    found = pc.or_(found, _possibly_misdated(batch, limits, now))
    return (index.as_py() for index in pc.indices_nonzero(found))


def _outside_the_calendar(times: pa.Array) -> pa.Array:
    outside = pc.or_(pc.less(times, screening.EARLIEST), pc.greater(times, screening.LATEST))
    return pc.fill_null(outside, False)


def _suspicious_texts(column: pa.Array, name: str) -> pa.Array:
    """Each different text is looked at once."""
    encoded = column.dictionary_encode()
    texts = encoded.dictionary
    if name == "headers":
        strange = pc.not_equal(texts, _PLAIN_HEADERS)
    else:
        length = pc.binary_length(texts)
        strange = pc.or_(pc.equal(length, 0), pc.greater(length, screening.MAX_TEXT_BYTES))
        strange = pc.or_(strange, pc.match_substring_regex(texts, _UNSAFE))
    return pc.fill_null(strange.take(encoded.indices), False)


def _possibly_misdated(batch: pa.RecordBatch, limits: Limits, now: datetime) -> pa.Array:
    """Select rows that may be too old, or from the future, by their sent_at, or by the time inside a UUIDv7: its fixed
    bits tell most other ids. The nil and the max UUID are selected, too.
    """
    oldest, latest = now - limits.dedupe_window, now + limits.clock_lead
    ids = batch.column("id")
    version = pc.binary_slice(ids, 6, 7)
    is_v7 = pc.and_(pc.greater_equal(version, b"\x70"), pc.less(version, b"\x80"))
    made, sent = pc.binary_slice(ids, 0, 6), batch.column("sent_at")
    early = pc.less(made, int(oldest.timestamp() * 1_000 + 1).to_bytes(6, "big"))
    late = pc.greater(made, int(latest.timestamp() * 1_000 - 1).to_bytes(6, "big"))
    found = pc.and_(is_v7, pc.or_(early, late))
    for no_id in screening.NO_IDS:
        found = pc.or_(found, pc.equal(ids, no_id.to_bytes(16, "big")))
    return pc.or_(found, pc.or_(pc.less(sent, oldest), pc.greater(sent, latest)))


def _flaw_of(batch: pa.RecordBatch, index: int, limits: Limits, now: datetime) -> str | None:
    row: dict[str, Any] = {name: batch.column(name)[index].as_py() for name in batch.schema.names}
    endpoint = row.pop("endpoint")
    try:
        envelope = _envelope(row)
    except msgspec.DecodeError as error:
        return f"column headers: is no JSON object of texts ({error}){_of_row(batch, index)}"
    reason = screening.find_error(envelope, max_message_bytes=limits.max_message_bytes)
    if reason is None and endpoint is not None:
        received = msgspec.structs.replace(envelope, destination=endpoint)
        reason = screening.find_error(received, max_message_bytes=limits.max_message_bytes)
    if reason is None and screening.too_old(envelope, now, limits.dedupe_window):
        reason = "it is older than duplicates are remembered (dedupe_window); nobody could tell whether it was handled"
    reason = reason or screening.from_the_future(envelope, now, limits.clock_lead)
    if reason is None and _is_distant(envelope, limits, endpoint is not None):
        reason = f"execution_time is not within dedupe_window ({limits.dedupe_window})"
    return reason and f"{reason}{_of_row(batch, index)}"


def _is_distant(envelope: Envelope, limits: Limits, is_local: bool) -> bool:
    """Tell whether a message is due too late, as send() does: its receiver could not tell it from a duplicate."""
    due = envelope.execution_time
    return due is not None and not is_local and due - envelope.sent_at >= limits.dedupe_window


def _envelope(row: dict[str, Any]) -> Envelope:
    ids = {name: UUID(bytes=row[name]) if row[name] is not None else None for name in IDS}
    fields: dict[str, Any] = row | ids | {"headers": _headers.decode(row["headers"])}
    return Envelope(**fields)


def _first(mask: pa.Array) -> int:
    return int(pc.index(mask, True).as_py())


def _of_row(batch: pa.RecordBatch, index: int) -> str:
    identity = batch.column("id")[index].as_py()
    named = UUID(bytes=identity) if identity is not None and len(identity) == 16 else "no id"
    kind = batch.column("message_type")[index].cast(pa.binary()).as_py()
    return f" (row {named}, {kind and kind.decode(errors='backslashreplace')})"
