"""The longest names and keys that are accepted fit into every index, in every alphabet, whatever becomes of the row."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from durable.agents.context import AgentContext
from durable.agents.intake import LeftToOthers
from durable.agents.receiving import ReceivingAgent
from durable.envelope import ANY_NODE, Envelope, NodeId, new_id
from durable.messages.ordering import OrderingRules
from durable.messages.validation import MAX_HEADER_BYTES, MAX_TEXT_BYTES, find_error
from durable.outcomes import STORED
from durable.settings import load_settings
from durable.storage import circuits, inbox, leases, outbox
from durable.storage.circuits import CircuitKind
from durable.storage.database import Database
from durable.storage.outbox import Sent
from durable.storage.sql.recovery import INCOMING, OUTGOING, REFUSED_OWNER
from tests.support.tables import Tables

NODE = NodeId(7)
# One, two, three and four bytes in UTF-8; random letters, because an index compresses what repeats.
ALPHABETS = {"latin": (0x21, 0x7E), "cyrillic": (0x400, 0x4FF), "cjk": (0x4E00, 0x9FFF), "emoji": (0x1F300, 0x1F5FF)}


def text(alphabet: str, size: int = MAX_TEXT_BYTES, seed: int = 1) -> str:
    """The longest text of this alphabet."""
    low, high = ALPHABETS[alphabet]
    made, rng = "", random.Random(seed)
    while len((longer := made + chr(rng.randint(low, high))).encode()) <= size:
        made = longer
    return made


def longest(alphabet: str, **changes: object) -> Envelope:
    """Every name, address and key as long as it may be."""
    made = Envelope(
        id=new_id(),
        message_type=text(alphabet, seed=2),
        destination=text(alphabet, seed=3),
        source=text(alphabet, seed=4),
        correlation_id=new_id(),
        body=b"{}",
        sent_at=datetime.now(UTC),
        partition_key=text(alphabet, seed=5),
        headers={"tenant": text(alphabet, MAX_HEADER_BYTES - len("tenant"), seed=6)},
    )
    made = msgspec.structs.replace(made, **changes)
    assert find_error(made, max_message_bytes=100) is None
    return made


@pytest.fixture
async def database(tables: Tables) -> AsyncIterator[Database]:
    database = Database(load_settings(database_url=tables.url))
    yield database
    await database.close()


@pytest.mark.parametrize("way", ["keyed", "shared", "keyed and shared", "ordered as a whole"])
@pytest.mark.parametrize("alphabet", ALPHABETS)
async def test_longest_row_passes_through_every_state(
    database: Database, tables: Tables, alphabet: str, way: str
) -> None:
    given = longest(alphabet, **({"partition_key": None} if way == "shared" else {}))
    places = OrderingRules()
    if "shared" in way:
        places.shared[given.message_type] = "tenant"
    if way == "ordered as a whole":
        places.ordered_types.add(given.message_type)
        places.ordered_destinations.add(given.destination)
    outgoing = Sent(given, None, ANY_NODE, places.outgoing(given))
    delayed = msgspec.structs.replace(given, execution_time=datetime.now(UTC) - timedelta(seconds=1))
    incoming = inbox.Arrival(text(alphabet, seed=7), delayed, ANY_NODE, places.incoming(given))

    await database.transaction(outbox.store, [outgoing])
    await database.transaction(inbox.store, [incoming])
    for table, name in ((OUTGOING, "outgoing"), (INCOMING, "incoming")):
        await database.transaction(leases.promote_due, table, 10)
        for owner in (NODE, ANY_NODE, NODE):  # owned, released, and owned again
            tables.execute(f"UPDATE durable.{name}_envelopes SET owner_id = %s", owner)
        assert await database.transaction(leases.release_all, table, NODE) == 1
        tables.execute(
            f"UPDATE durable.{name}_envelopes SET attempts = 1, execution_time = now() + interval '1 h', "
            "deliver_by = now()"
        )
        assert tables.one(f"SELECT owner_id FROM durable.{name}_envelopes") not in (REFUSED_OWNER, NODE)
        assert await database.transaction(leases.expire, table, NODE, 10) == 1
    assert tables.count("dead_letters") == 0
    for kind, key in ((CircuitKind.KEY, given.partition_key or ""), (CircuitKind.HANDLER, given.message_type)):
        await database.transaction(circuits.pause, kind, key, reason="a test", actor="ada", duration=None)


@pytest.mark.parametrize("alphabet", ALPHABETS)
async def test_key_over_the_limit_is_quarantined_on_arrival_and_its_neighbours_are_promoted(
    database: Database, tables: Tables, alphabet: str
) -> None:
    """Whoever sends it: a foreign client of HTTP or AMQP comes this way, too."""
    due = datetime.now(UTC) - timedelta(seconds=1)
    sound = [longest(alphabet, execution_time=due) for _ in range(3)]
    long = msgspec.structs.replace(sound[0], id=new_id(), partition_key=text(alphabet, MAX_TEXT_BYTES + 4, seed=9))
    agent = ReceivingAgent(AgentContext(database, NODE, load_settings(database_url=tables.url)), LeftToOthers())
    running = asyncio.create_task(agent.run())
    assert await agent.receive("shop", [sound[0], long, *sound[1:]]) == [STORED] * 4
    agent.stop()
    await running

    assert await database.transaction(leases.promote_due, INCOMING, 10) == 3
    assert "longer than 1000 bytes" in tables.one("SELECT reason FROM durable.dead_letters")
