"""Deadlines from end to end: between services whose clocks differ, and of messages of other people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from types import ModuleType

import msgspec
import pytest

from durable import Bus, Context, message
from durable.embedded import Embedded
from durable.envelope import Envelope, LeasedEnvelope, NodeId, new_id
from durable.outcomes import STORED
from durable.storage import dead_letters, expiry, outbox
from durable.storage.dead_letters import LetterRange, Selection
from durable.testing import eventually
from durable.transports.http import sender as http_sender
from durable.transports.tcp import sender as tcp_sender
from tests.failure import leftovers
from tests.failure.workbench import QUICK
from tests.support.http_shop import open_shop
from tests.support.tables import Tables, shared_tables

PEER = "tcp://127.0.0.1:1"
SKEWS = [timedelta(hours=-3), timedelta(0), timedelta(hours=3)]


@message("expiry.urgent")
class Urgent(msgspec.Struct):
    number: int


@message("expiry.hurried")
class Hurried(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


def urgent(number: int, deliver_by: datetime) -> Envelope:
    return Envelope(
        id=new_id(),
        message_type="expiry.urgent",
        destination="billing",
        source="orders",
        correlation_id=new_id(),
        body=b'{"number":%d}' % number,
        sent_at=datetime.now(UTC),
        deliver_by=deliver_by,
    )


class SkewedClock:
    """In place of the class `datetime`, where somebody asks it for the time."""

    def __init__(self, by: timedelta) -> None:
        self._by = by

    def now(self, tz: tzinfo) -> datetime:
        return datetime.now(tz) + self._by


@pytest.mark.parametrize("skew", SKEWS, ids=["slow", "right", "fast"])
@pytest.mark.parametrize(("scheme", "sending"), [("tcp", tcp_sender), ("http", http_sender)], ids=["tcp", "http"])
async def test_rest_of_a_deadline_is_independent_of_the_clock_of_the_sender(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, scheme: str, sending: ModuleType, skew: timedelta
) -> None:
    seen: dict[int, datetime | None] = {}
    bus = Bus("billing", tables.url, **QUICK)
    bus.listen(f"{scheme}://127.0.0.1:0")

    @bus.handles(Urgent)
    async def handle(message: Urgent, ctx: Context) -> None:
        seen[message.number] = ctx.deliver_by

    monkeypatch.setattr(sending, "datetime", SkewedClock(skew))
    theirs = datetime.now(UTC) + skew
    async with bus:
        node = bus.runtime.node
        assert node is not None
        address = node.listeners[0].address
        batch = [urgent(1, theirs + timedelta(hours=1)), urgent(2, theirs - timedelta(minutes=1))]
        async with bus.runtime.transports.of(address).sender(address) as sender:
            assert await sender.send(batch) == [STORED, STORED]
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert list(seen) == [1]
    assert seen[1] is not None
    assert timedelta(0) <= seen[1] - (theirs - skew + timedelta(hours=1)) < timedelta(minutes=2)
    assert tables.rows("SELECT id FROM durable.envelope_history WHERE outcome = 'expired'") == [batch[1].id]


async def test_web_client_sets_a_deadline_for_its_message(tables: Tables) -> None:
    async with open_shop(tables) as shop:
        began = datetime.now(UTC)
        assert (await shop.sell(1, durable_time_to_live="3600")).status_code == 202
        assert (await shop.sell(2, durable_time_to_live="0")).status_code == 202
        [handled] = await shop.handled(1)
        assert handled.context.deliver_by is not None
        assert timedelta(hours=1) <= handled.context.deliver_by - began < timedelta(hours=1, minutes=1)
        assert tables.rows("SELECT outcome FROM durable.envelope_history ORDER BY 1") == ["expired", "handled"]

        later = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
        refused = await shop.sell(3, durable_time_to_live="3600", durable_execute_at=later)
        assert refused.status_code == 422
        assert "it would expire before it is due" in refused.json()["detail"]


async def test_message_late_at_send_expires_here_and_is_counted(tables: Tables) -> None:
    bus = Bus("orders", tables.url, **QUICK)
    bus.route(Urgent, to="tcp://127.0.0.1:1")
    async with bus:
        async with bus.unit_of_work():
            bus.send(Urgent(1), deliver_by=timedelta(seconds=-1))
        await eventually(lambda: tables.count("outgoing_envelopes") == 0)
    assert tables.rows("SELECT side, outcome FROM durable.envelope_history") == [("outgoing", "expired")]


async def test_message_late_at_its_turn_is_a_dead_letter_and_can_be_replayed(tables: Tables) -> None:
    bus = Bus("orders", tables.url, on_expiry="dead-letter", **QUICK)
    begun, late = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    @bus.handles(Urgent, concurrency=1)
    async def handle(message: Urgent) -> None:
        handled.append(message.number)
        begun.set()
        await late.wait()

    async with bus:
        async with bus.unit_of_work():
            bus.send(Urgent(1))
            bus.send(Urgent(2), deliver_by=timedelta(seconds=0.3))
        await begun.wait()
        await asyncio.sleep(0.4)
        late.set()
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
        assert handled == [1]
        assert tables.dead_letters() == [("expiry.urgent", "expired", "expired before it was handled", b'{"number":2}')]
        with leftovers.transaction(tables.url) as conn:
            dead_letters.replay(conn, "durable", Selection(), LetterRange(0, 2**40, 10), actor="ada")
        await eventually(lambda: handled == [1, 2])


def passed(lease: LeasedEnvelope) -> LeasedEnvelope:
    """The same, a moment after its time."""
    deliver_by = datetime.now(UTC) - timedelta(seconds=1)
    return msgspec.structs.replace(lease, envelope=msgspec.structs.replace(lease.envelope, deliver_by=deliver_by))


async def test_sending_agent_dead_letters_late_rows_by_the_clock_of_the_database(tables: Tables) -> None:
    bus = Bus("orders", tables.url, **QUICK)
    async with bus.unit_of_work():
        late = bus.send(Urgent(1), to=PEER, deliver_by=timedelta(minutes=1))
        timely = bus.send(Urgent(2), to=PEER, deliver_by=timedelta(hours=1))
    await bus.runtime.sessions.close()
    node = NodeId(5)
    with leftovers.transaction(tables.url) as conn:
        claimed = outbox.claim(conn, "durable", {PEER: 10}, node=node)
    tables.execute("UPDATE durable.outgoing_envelopes SET deliver_by = now() - interval '1 ms' WHERE id = %s", late)
    with leftovers.transaction(tables.url) as conn:
        found = expiry.bury_outgoing(conn, "durable", node, [passed(each) for each in claimed])
    assert found == ({late}, {timely})
    assert [letter[1:3] for letter in tables.dead_letters()] == [("expired", "expired before it was sent")]
    assert tables.rows("SELECT id FROM durable.outgoing_envelopes") == [timely]


async def test_row_expiring_meanwhile_becomes_no_line_of_history(tables: Tables) -> None:
    """It is buried, as long as it is this node's."""
    bus = Bus("orders", tables.url, **QUICK)
    async with bus.unit_of_work():
        message = bus.send(Urgent(1), to=PEER, deliver_by=timedelta(hours=1))
        foreign = bus.send(Urgent(2), to=PEER, deliver_by=timedelta(hours=1))
    await bus.runtime.sessions.close()
    node = NodeId(5)
    with leftovers.transaction(tables.url) as conn:
        claimed = outbox.claim(conn, "durable", {PEER: 10}, node=node)
    tables.execute("UPDATE durable.outgoing_envelopes SET deliver_by = now() - interval '1 ms'")
    tables.execute("UPDATE durable.outgoing_envelopes SET owner_id = 6 WHERE id = %s", foreign)
    with leftovers.transaction(tables.url) as conn:
        found = expiry.bury_outgoing(conn, "durable", node, claimed)
    assert found == ({message}, set())
    assert len(tables.dead_letters()) == 1
    assert tables.count("envelope_history") == 1


async def test_late_rows_of_two_types_have_two_fingerprints(tables: Tables) -> None:
    bus = Bus("orders", tables.url, **QUICK)
    async with bus.unit_of_work():
        for number, cls in enumerate([Urgent, Urgent, Hurried]):
            bus.send(cls(number), to=PEER, deliver_by=timedelta(hours=1))
    await bus.runtime.sessions.close()
    node = NodeId(5)
    with leftovers.transaction(tables.url) as conn:
        claimed = outbox.claim(conn, "durable", {PEER: 10}, node=node)
    tables.execute("UPDATE durable.outgoing_envelopes SET deliver_by = now() - interval '1 ms'")
    with leftovers.transaction(tables.url) as conn:
        expiry.bury_outgoing(conn, "durable", node, claimed)
    found = tables.rows(
        "SELECT count(DISTINCT fingerprint), count(*) FROM durable.dead_letters GROUP BY message_type ORDER BY 2"
    )
    assert found == [(1, 1), (1, 2)]
    assert tables.one("SELECT count(DISTINCT fingerprint) FROM durable.dead_letters") == 2
