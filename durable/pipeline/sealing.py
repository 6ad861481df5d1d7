"""Encrypted bodies in the pipeline: archives keep them as they are, and what is published is encrypted in the tasks.

    archive, report, audit, purge     need no key: a body is bytes to them
    publish                           encrypts readable bodies, in the tasks, before they are staged
    replay                            under other ids, or to another address, bodies are opened and sealed anew

What is published is compared with what was published before by digests under all keys that are given: so a rotation
makes no other rows of the same ones.

A body that is sealed anew keeps its key: so the same replay makes the same bytes, and adds nothing the second time,
also after a rotation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from uuid import UUID

import msgspec

from durable.encryption.keys import Keys
from durable.encryption.ring import KeyRing
from durable.envelope import Envelope
from durable.errors import Forged, InvalidMessage, InvalidSetting, MissingKey
from durable.grammar import several
from durable.messages.digest import bytes_digest
from durable.messages.registry import encrypted_types
from durable.messages.sealed import DIGEST_BYTES, MAGIC, is_sealed
from durable.pipeline.publishable import DIGESTS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

OLD_ID: Final = "sealed_for_id"
"""Column with the id that an encrypted body was sealed for, where that is another than the row's."""

_TO_OPEN: Final = ["id", "message_type", "destination", "headers", "body", OLD_ID]
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
_headers = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Sealing:
    """Keys as tasks are given them, and the types whose bodies are encrypted."""

    keys: Keys = field(repr=False)
    types: Collection[str] = ()
    everything: bool = False

    @classmethod
    def of(cls, ring: KeyRing) -> Self | None:
        """Return the sealing by this ring; None where there are no keys. Raises InvalidSetting where there must be."""
        if not ring.is_configured:
            if ring.everything:
                raise InvalidSetting("encryption_keys: no key is given, and encrypt_all is on; give one")
            return None
        return cls(ring.keys, tuple(encrypted_types()), ring.everything)

    @property
    def ring(self) -> KeyRing:
        """Make a ring of these keys, for the rows of one task."""
        return KeyRing(lambda: self.keys)

    def must_seal(self, message_type: str) -> bool:
        return self.everything or message_type in self.types


def seal_batch(batch: pa.RecordBatch, sealing: Sealing, ring: KeyRing) -> pa.RecordBatch:
    """Encrypt the bodies of whole rows that are readable and should not be. DIGESTS has those of what was read."""
    import pyarrow as pa

    rows: list[dict[str, Any]] = batch.select(_columns(batch, OLD_ID, DIGESTS)).to_pylist()
    bodies = [_sealed(row, sealing, ring) for row in rows]
    digests = [_digests(row, ring) for row in rows]
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns |= {"body": pa.array(bodies, pa.binary()), DIGESTS: pa.array(digests, pa.binary())}
    return pa.RecordBatch.from_pydict(columns)


def sealed(messages: DataFrame, sealing: Sealing | None, *, with_digests: bool = False) -> DataFrame:
    """Encrypt what is to be encrypted of messages that are to be published, and seal anew what was for other ids.

    `with_digests`: add DIGESTS, for the writer, which need not have the keys.

    Tasks raise InvalidMessage for a text that is not UTF-8: the writer, to which a sealed body is bytes, cannot tell.
    """
    from pyspark.sql import types as T

    if sealing is None:
        return _refuse_sealed(messages)
    kinds = [
        T.StructField("body", T.BinaryType()) if each.name == "body" else each
        for each in messages.schema.fields
        if each.name not in (OLD_ID, DIGESTS)
    ]
    if with_digests:
        kinds.append(T.StructField(DIGESTS, T.BinaryType()))
    wanted = [each.name for each in kinds]

    def seal(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from durable.pipeline.screens import misencoded

        ring = sealing.ring
        for batch in batches:
            if reason := misencoded(batch):
                raise InvalidMessage(reason)
            yield seal_batch(batch, sealing, ring).select(wanted)

    return messages.mapInArrow(seal, T.StructType(kinds))


class Unopened(NamedTuple):
    """Messages whose encrypted bodies do not open: how many need each key that is not here, and how many have bodies
    that are forged or broken off, with the fault of one of them.
    """

    missing: Mapping[str, int]
    forged: int = 0
    fault: str = ""

    def __bool__(self) -> bool:
        return bool(self.missing or self.forged)

    def __str__(self) -> str:
        told = [f"no key {key_id}, which {count:,} of these messages need" for key_id, count in self.missing.items()]
        if self.forged:
            told.append(f"{several(self.forged, 'bodies')} that no key opens, such as: {self.fault}")
        return ", and ".join(told)


def unopened(messages: DataFrame, sealing: Sealing | None) -> Unopened:
    """Find the messages that are to be opened, and do not open: one pass over the bodies. Without keys none opens."""
    from pyspark.sql import functions as F

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        missing, forged = Counter[str](), list[str]()
        for fault in _faults(batches, KeyRing() if sealing is None else sealing.ring):
            if isinstance(fault, MissingKey):
                missing[fault.key_id] += 1
            elif fault is not None:
                forged.append(str(fault))
        rows = [{"key_id": key_id, "count": count, "fault": None} for key_id, count in missing.items()]
        rows += [{"key_id": None, "count": len(forged), "fault": forged[0]}] if forged else []
        if rows:
            yield pa.RecordBatch.from_pylist(
                rows, pa.schema({"key_id": pa.string(), "count": pa.int64(), "fault": pa.string()})
            )

    needed = messages.where(is_sealed_column() & F.col(OLD_ID).isNotNull()).select(*_TO_OPEN)
    found = needed.mapInArrow(find, "key_id string, count bigint, fault string").collect()
    missing = Counter[str]()
    for row in found:
        if row.key_id is not None:
            missing[row.key_id] += row["count"]
    faults = [row for row in found if row.key_id is None]
    return Unopened(
        dict(sorted(missing.items())),
        sum(row["count"] for row in faults),
        min((row.fault for row in faults), default=""),
    )


def opening(messages: DataFrame, sealing: Sealing | None) -> DataFrame:
    """Leave out the messages that are to be opened, and do not open."""
    from pyspark.sql import functions as F

    if sealing is None:
        return messages.where(~(is_sealed_column() & F.col(OLD_ID).isNotNull()))

    def keep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        ring = sealing.ring
        for batch in batches:
            yield batch.filter(pa.array([fault is None for fault in _faults([batch.select(_TO_OPEN)], ring)]))

    return messages.mapInArrow(keep, messages.schema)


def _faults(batches: Iterable[pa.RecordBatch], ring: KeyRing) -> Iterator[MissingKey | Forged | None]:
    """Tell of each row why its body does not open; None for one that opens, or that nobody is to open. Raises
    InvalidMessage for a text that is not UTF-8.
    """
    from durable.pipeline.screens import misencoded

    for batch in batches:
        if reason := misencoded(batch):
            raise InvalidMessage(reason)
        for row in batch.to_pylist():
            yield _fault(row, ring)


def _fault(row: Mapping[str, Any], ring: KeyRing) -> MissingKey | Forged | None:
    if row[OLD_ID] is None or _is_refused(row) or not is_sealed(message := _bytes(row["body"])):
        return None
    before = _before(row, message)
    try:
        ring.open(before, ring.parts(before))
    except (MissingKey, Forged) as fault:
        return fault
    return None


def _refuse_sealed(messages: DataFrame) -> DataFrame:
    """Let a task fail that meets an encrypted body which would have to be opened: it came after they were counted."""
    from pyspark.sql import functions as F

    if OLD_ID not in messages.columns:
        return messages
    refusal = F.raise_error(
        F.lit(
            "messages are encrypted, and no key is given: give encryption_keys or encryption_key_file, or --same-ids, "
            "or leave them out with --leave-unopened"
        )
    )
    must_open = is_sealed_column() & F.col(OLD_ID).isNotNull()
    return messages.withColumn("body", F.when(must_open, refusal).otherwise(F.col("body"))).drop(OLD_ID)


def is_sealed_column() -> Column:
    """Tell encrypted bodies."""
    from pyspark.sql import functions as F

    return F.substring("body", 1, len(MAGIC)) == F.lit(bytearray(MAGIC))


def _columns(batch: pa.RecordBatch, *more: str) -> list[str]:
    wanted = ("id", "message_type", "destination", "endpoint", "headers", "body", *more)
    return [name for name in wanted if name in batch.schema.names]


def _sealed(row: Mapping[str, Any], sealing: Sealing, ring: KeyRing) -> bytes | None:
    body = row["body"]
    if _is_refused(row):
        return None if body is None else _bytes(body)
    message = _bytes(body)
    envelope = _envelope(row, message)
    if not is_sealed(message):
        return ring.seal(envelope, message, row["destination"]) if sealing.must_seal(row["message_type"]) else message
    if row.get(OLD_ID) is None:
        return message
    before = _before(row, message)
    parts = ring.parts(before)
    # What came in is sealed for the address that its sender named.
    to = parts.destination if row.get("endpoint") is not None else row["destination"]
    return ring.seal(envelope, ring.open(before, parts), to, digest=parts.digest, key_id=parts.key_id)


def _is_refused(row: Mapping[str, Any]) -> bool:
    """Tell of a row that is no message; the writer refuses it, and says why."""
    return any(row[name] is None for name in ("id", "message_type", "destination", "body"))


def _before(row: Mapping[str, Any], body: bytes) -> Envelope:
    """Make the envelope that a body was sealed for."""
    return msgspec.structs.replace(_envelope(row, body), id=_id(row, OLD_ID))


def _digests(row: Mapping[str, Any], ring: KeyRing) -> bytes | None:
    """The digests of a body that is read: of its bytes, and under each key; of others what they came with."""
    if row["body"] is None or row["message_type"] is None or is_sealed(message := _bytes(row["body"])):
        return row.get(DIGESTS)
    kind = row["message_type"]
    plain = bytes_digest(kind, message).to_bytes(DIGEST_BYTES, "big", signed=True)
    return b"".join([plain, *ring.digests(kind, message)])


def _bytes(body: bytes | str) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)


def _envelope(row: Mapping[str, Any], body: bytes) -> Envelope:
    """Make an envelope with the parts that a body is sealed with. Raises InvalidMessage, in the words of a writer."""
    made = _id(row, "id")
    try:
        headers = _headers.decode(row.get("headers") or "{}")
    except msgspec.DecodeError as error:
        raise InvalidMessage(
            f"column headers: is no JSON object of texts ({error}) (row {made}, {row['message_type']})"
        ) from error
    return Envelope(
        id=made,
        message_type=row["message_type"],
        destination=row["destination"],
        source="",
        correlation_id=made,
        body=body,
        sent_at=_ANY_TIME,
        headers=headers,
    )


def _id(row: Mapping[str, Any], column: str) -> UUID:
    try:
        return UUID(bytes=bytes(row[column]))
    except ValueError as error:
        raise InvalidMessage(f"column id: has not 16 bytes (row no id, {row['message_type']})") from error
