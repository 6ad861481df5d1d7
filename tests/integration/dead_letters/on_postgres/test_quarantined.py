"""What was quarantined unread is replayed through the door by which it came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import pytest

from durable import Bus
from durable.agents.receiving import ReceivingAgent
from durable.dead_letters.bulk import Resolution
from durable.outcomes import STORED
from durable.storage import dead_letters
from durable.storage.database import Database
from durable.storage.dead_letters import Resolved
from durable.testing import ManualClock, eventually
from tests.integration.dead_letters.on_postgres.storing import (
    ALL,
    QUICK,
    WHOLE,
    Placed,
    claim_key,
    receiving_agent,
    replay_by_ada,
)
from tests.support.letters import ENDPOINT, envelope
from tests.support.tables import Tables

LATER = envelope(1).sent_at + timedelta(seconds=1)
discard_by_ada: Resolution = partial(dead_letters.discard, actor="ada", reason="sent again")


class TestQuarantined:
    @pytest.fixture
    async def agent(self, database: Database) -> AsyncIterator[ReceivingAgent]:
        agent = receiving_agent(database, ManualClock(datetime.now(UTC) + timedelta(days=8)))
        running = asyncio.create_task(agent.run())
        yield agent
        agent.stop()
        await running

    async def test_late_or_too_large_envelope_can_be_replayed_whole(
        self, agent: ReceivingAgent, tables: Tables, database: Database
    ) -> None:
        old = msgspec.structs.replace(
            envelope(1),
            headers={"a": "b"},
            partition_key="k",
            causation_id=envelope(0).id,
            deliver_by=datetime(9_000, 1, 1, tzinfo=UTC),
        )
        large = msgspec.structs.replace(old, id=envelope(2).id, body=b"x" * (agent._settings.max_message_bytes + 1))
        assert await agent.receive(ENDPOINT, [old, large]) == [STORED, STORED]
        assert (tables.count("incoming_envelopes"), tables.count("dead_letters")) == (0, 2)

        assert len((await database.transaction(replay_by_ada, ALL, WHOLE)).done) == 2

        claimed = claim_key(tables, "k")
        replayed = {lease.envelope.id: lease.envelope for lease in claimed}
        assert replayed == {each.id: msgspec.structs.replace(each, destination=ENDPOINT) for each in (old, large)}

    async def test_letters_of_an_ordered_handler_are_replayed_one_behind_the_other(
        self, tables: Tables, database: Database
    ) -> None:
        """And those of a fair one to the shares of their tenants: as if they had come in time."""
        late = ManualClock(datetime.now(UTC) + timedelta(days=8))
        ordered = Bus(ENDPOINT, tables.url, **QUICK)
        begun: list[int] = []
        inside: set[int] = set()
        together: list[set[int]] = []

        @ordered.handles(Placed, ordered=True, concurrency=4)
        async def handle(placed: Placed) -> None:
            inside.add(placed.number)
            begun.append(placed.number)
            together.append(set(inside))
            await asyncio.sleep(0.02)
            inside.discard(placed.number)

        agent = receiving_agent(database, late, ordered.application.routes.places)
        running = asyncio.create_task(agent.run())
        assert await agent.receive(ENDPOINT, [envelope(number) for number in range(4)]) == [STORED] * 4
        agent.stop()
        await running
        assert len((await database.transaction(replay_by_ada, ALL, WHOLE)).done) == 4
        async with ordered:
            await eventually(lambda: begun == [0, 1, 2, 3], within=20)
        assert all(len(group) == 1 for group in together)

    async def test_incomplete_envelope_cannot_be_replayed(
        self, agent: ReceivingAgent, tables: Tables, database: Database
    ) -> None:
        unheaded = msgspec.structs.replace(envelope(1), headers={"a": "\0"})
        nameless = msgspec.structs.replace(envelope(2), message_type="")
        assert await agent.receive(ENDPOINT, [unheaded, nameless]) == [STORED, STORED]
        await agent.reject(ENDPOINT, b"\xff\xff", "no envelope at all")

        survey = await database.transaction(dead_letters.survey, ALL)
        assert (survey.total, survey.replayable) == (3, 0)
        assert await database.transaction(replay_by_ada, ALL, WHOLE) == Resolved([], [])
        assert tables.one("SELECT count(*) FROM durable.dead_letters WHERE resolved_at IS NULL") == 3

    @pytest.mark.parametrize(
        ("resolved", "change", "kept"),
        [
            (None, {}, 1),
            (None, {"sent_at": LATER}, 1),
            (None, {"message_type": "orders.placed.v2"}, 2),
            (None, {"partition_key": "other"}, 2),
            (None, {"body": b"y"}, 2),
            (discard_by_ada, {}, 1),
            (discard_by_ada, {"sent_at": LATER}, 2),
            (replay_by_ada, {}, 1),
            (replay_by_ada, {"sent_at": LATER}, 2),
        ],
        ids=[
            "repeat",
            "sent anew",
            "another type",
            "another key",
            "another body",
            "repeat of a discarded one",
            "sent anew after a discard",
            "repeat of a replayed one",
            "sent anew after a replay",
        ],
    )
    async def test_only_a_repeat_of_a_letter_makes_no_other(
        self,
        agent: ReceivingAgent,
        tables: Tables,
        database: Database,
        resolved: Resolution | None,
        change: dict[str, Any],
        kept: int,
    ) -> None:
        """Of a letter that is resolved already, what was sent at another time was sent anew."""
        large = agent._settings.max_message_bytes + 1
        first = msgspec.structs.replace(envelope(1), body=b"x" * large)
        second = msgspec.structs.replace(first, **{**change, "body": change.get("body", b"x") * large})
        assert await agent.receive(ENDPOINT, [first]) == [STORED]
        if resolved is not None:
            assert len((await database.transaction(resolved, ALL, WHOLE)).done) == 1

        assert await agent.receive(ENDPOINT, [second]) == [STORED]

        assert tables.count("dead_letters") == kept

    async def test_another_message_under_a_known_id_cannot_be_replayed(
        self, tables: Tables, database: Database
    ) -> None:
        """What its handler sends would have the ids of what the first message's handler has sent."""
        agent = receiving_agent(database)
        running = asyncio.create_task(agent.run())
        first = envelope(1)
        await agent.receive(ENDPOINT, [first])
        await agent.receive(ENDPOINT, [msgspec.structs.replace(first, body=b'{"number": 2}')])
        agent.stop()
        await running

        assert await database.transaction(replay_by_ada, ALL, WHOLE) == Resolved([], [])
        assert tables.rows("SELECT id, replayable FROM durable.dead_letters") == [(first.id, False)]
