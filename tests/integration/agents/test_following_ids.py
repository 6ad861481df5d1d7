"""What handlers send when several messages come under one id: of two peers, and under a business key at two times."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec
import pytest
from msgspec.structs import replace

from durable import Bus, message
from durable.envelope import ANY_NODE, Envelope, new_id
from durable.storage import inbox
from durable.storage.inbox import Arrival
from durable.testing import eventually
from tests.failure import leftovers
from tests.failure.workbench import QUICK
from tests.support.letters import SCHEMA, envelope
from tests.support.tables import Tables

DAYS = timedelta(days=9)


@message("following.placed")
class Placed(msgspec.Struct):
    number: int


@message("following.reminder")
class Reminder(msgspec.Struct):
    number: int


async def handled(tables: Tables, arrivals: list[tuple[str, Envelope]]) -> None:
    """Let a handler remind of each of these, which come one after the other."""
    bus = Bus("shop", tables.url, **QUICK)

    @bus.handles(Placed)
    async def remind(placed: Placed) -> None:
        bus.send(Reminder(placed.number), delay=timedelta(days=30))

    @bus.handles(Reminder)
    async def ignore(reminder: Reminder) -> None: ...

    async with bus:
        for number, (endpoint, each) in enumerate(arrivals, start=1):
            with leftovers.transaction(tables.url) as conn:
                inbox.store(conn, SCHEMA, [Arrival(endpoint, each, ANY_NODE)])
            done = "SELECT count(*) FROM durable.envelope_history WHERE message_type = 'following.placed'"
            await eventually(partial(_is, tables, done, number))
            tables.execute("DELETE FROM durable.undated_ids")  # as after dedupe_window


def _is(tables: Tables, query: str, number: int) -> bool:
    return bool(tables.one(query) == number)


def reminders(tables: Tables) -> int:
    return tables.count("incoming_envelopes")


@pytest.mark.parametrize("id_", [new_id(), uuid5(NAMESPACE_URL, "order-17")], ids=["UUIDv7", "business key"])
async def test_effects_of_two_peers_under_one_id_are_two(tables: Tables, id_: UUID) -> None:
    placed = replace(envelope(1, message_type="following.placed"), id=id_)

    await handled(tables, [("shop<-mallory", placed), ("shop<-alice", placed)])

    assert reminders(tables) == 2


async def test_effects_of_two_uses_of_a_business_key_are_two(tables: Tables) -> None:
    first = replace(envelope(1, message_type="following.placed"), id=uuid5(NAMESPACE_URL, "order-17"))

    await handled(tables, [("shop", first), ("shop", replace(first, sent_at=first.sent_at + DAYS))])

    assert reminders(tables) == 2
