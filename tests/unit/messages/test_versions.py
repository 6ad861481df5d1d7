"""Names of versions of a message type, and the ids that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import combinations
from typing import Final
from uuid import UUID

import msgspec
import pytest

from durable.envelope import Envelope, new_id
from durable.messages.registry import message, name_of
from durable.messages.routing import LOCAL, Routes
from durable.messages.versions import unversioned, versioned
from durable.outbox.envelope_factory import NO_ENVELOPE, Cause, EnvelopeFactory, Parent
from durable.pipeline.publish import message_id_of
from durable.settings import load_settings
from durable.testing import ManualClock
from durable.transports.http import headers


@message("versions.moved")
class First(msgspec.Struct):
    number: int = 0


@message("versions.moved", version=2)
class Second(msgspec.Struct):
    number: int = 0
    urgent: bool = False


@message("versions.moved", version=17)
class Seventeenth(msgspec.Struct):
    ordinal: int = 0


@message("versions.moved.vans", version=2)
class Vans(msgspec.Struct):
    number: int = 0


@message("versions.moved-v2")
class Dashed(msgspec.Struct):
    number: int = 0


@message("v2.moved")
class Leading(msgspec.Struct):
    number: int = 0


VERSIONS: Final = (First, Second, Seventeenth)
OTHERS: Final = (Vans, Dashed, Leading)
HANDLED: Final[Envelope] = msgspec.structs.replace(NO_ENVELOPE, id=new_id(), correlation_id=new_id())


def factory() -> EnvelopeFactory:
    routes = Routes()
    for cls in (*VERSIONS, *OTHERS):
        routes.handled_here(name_of(cls))
    return EnvelopeFactory("versions", routes, load_settings(), ManualClock(datetime(2024, 2, 29, tzinfo=UTC)))


def of_a_business_key(cls: type) -> UUID:
    return factory().command(cls(), to=LOCAL, id_from="order-17").id


def of_a_cause(cls: type) -> UUID:
    return Cause(HANDLED, handler="app.bill").next_id("versions", name_of(cls))


def of_a_list(cls: type) -> UUID:
    parents = [Parent(HANDLED.id), Parent(HANDLED.correlation_id)]
    return Cause(None, handler="app.bill", parents=parents).next_id("versions", name_of(cls))


def of_an_idempotency_key(cls: type) -> UUID:
    return headers.id_of("order-17", "orders", name_of(cls))


def of_a_row(cls: type) -> UUID:
    return message_id_of("17", message_type=name_of(cls), source="versions")


IDS: Final = (of_a_business_key, of_a_cause, of_a_list, of_an_idempotency_key, of_a_row)


@pytest.mark.parametrize("made", IDS)
@pytest.mark.parametrize(("one", "other"), list(combinations(VERSIONS, 2)))
def test_versions_of_a_type_share_an_id(made: Callable[[type], UUID], one: type, other: type) -> None:
    assert made(one) == made(other)


@pytest.mark.parametrize("made", IDS)
@pytest.mark.parametrize(("one", "other"), list(combinations((First, *OTHERS), 2)))
def test_types_of_other_names_have_other_ids(made: Callable[[type], UUID], one: type, other: type) -> None:
    assert made(one) != made(other)


@pytest.mark.parametrize("name", ["orders.order-placed", "orders", "v2", "v2.placed", "orders.vat", "orders.placed-v2"])
@pytest.mark.parametrize("version", [1, 2, 10])
def test_version_is_told_from_the_name(name: str, version: int) -> None:
    assert unversioned(name) == name
    assert unversioned(versioned(name, version)) == name
    assert unversioned(versioned(versioned(name, version), 2)) == name
