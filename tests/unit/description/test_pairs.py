"""All pairs of some 150 types: what the rule says fits is decoded, as calls encode it."""

from __future__ import annotations

from itertools import product

from durable.calls.payload import Payload
from durable.description.compatibility import misfits
from durable.errors import InvalidMessage
from durable.messages.schemas import schema_of
from tests.support.travelling import KINDS


def test_values_are_read_when_their_type_fits() -> None:
    written = [(kind, schema_of(kind, written=True), _bodies(kind, values)) for kind, values in KINDS]
    read = [(kind, schema_of(kind), Payload(kind)) for kind, _ in KINDS]
    fitting, refused = 0, []
    for (old, sent, bodies), (new, known, payload) in product(written, read):
        if misfits(sent, known):
            continue
        fitting += 1
        for body in bodies:
            try:
                payload.read(body)
            except InvalidMessage as error:
                refused.append(f"{old} -> {new}: {body!r}: {error}")
    assert not refused
    assert fitting > 3 * len(KINDS)  # each fits itself, and Any


def test_type_fits_itself() -> None:
    assert [kind for kind, _ in KINDS if misfits(schema_of(kind, written=True), schema_of(kind))] == []


def _bodies(kind: object, values: object) -> list[bytes]:
    payload = Payload(kind)
    bodies = [payload.write(value) for value in values]  # type: ignore[attr-defined]
    for body in bodies:
        payload.read(body)
    return bodies
