"""Answers, and the agents of the addresses that they go to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest

from durable import Bus, Context, Retry, message
from durable.embedded.ports import free_port
from durable.recovery.idle_addresses import IdleAddresses
from durable.telemetry import Subject
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

SOON: dict[str, Any] = {**QUICK, "address_idle": timedelta(seconds=0.4)}


@message("answers.question")
class Question(msgspec.Struct):
    number: int


@message("answers.answer")
class Answer(msgspec.Struct):
    number: int


def rows(database: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(database) as conn:
        return conn.execute(query.encode()).fetchall()


def oracle(database: str, address: str, **settings: Any) -> Bus:
    """Answers every question, to where its sender has asked for it."""
    bus = Bus("oracle", database, **QUICK, **settings)
    bus.listen(address)

    @bus.handles(Question, retry=Retry(immediate=0, delays=[0.05] * 100))
    async def answer(question: Question, ctx: Context) -> None:
        ctx.reply(Answer(question.number))

    return bus


@pytest.mark.parametrize("how", ["stranger", "allowed", "declared"])
async def test_answer_goes_only_to_declared_or_allowed_addresses(
    make_database: Any, database_url: str, how: str
) -> None:
    here, there = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    bus = oracle(database_url, here, answer_to=(there,) if how == "allowed" else ())
    if how == "declared":
        bus.route(Answer, to=there)
    asker, answered = Bus("asker", make_database("asker"), **QUICK), list[int]()
    asker.listen(there)
    asker.route(Question, to=here)

    @asker.handles(Answer)
    async def handle(answer: Answer) -> None:
        answered.append(answer.number)

    async with bus, asker:
        async with asker.unit_of_work():
            asker.send(Question(1), reply_to=there)
        if how != "stranger":
            await eventually(lambda: answered == [1], within=20)
            return
        letters = "SELECT exception_type, reason, attempts FROM durable.dead_letters"
        [(kind, reason, attempts)] = await eventually(lambda: rows(database_url, letters), within=20)
        assert (kind, attempts) == ("durable.errors.InvalidMessage", 1)
        assert reason == (
            f"reply-to '{there}' is neither a declared destination nor allowed; declare a route to it, or add it to "
            "the setting answer_to"
        )
        assert bus.runtime.node is not None
        assert there not in bus.runtime.node.agents.senders
        assert rows(database_url, "SELECT destination FROM durable.outgoing_envelopes") == []


async def test_answer_to_an_invalid_address_is_a_dead_letter_at_once(make_database: Any, database_url: str) -> None:
    here = f"tcp://127.0.0.1:{free_port()}"
    bus, asker = oracle(database_url, here), Bus("asker", make_database("asker"), **QUICK)
    asker.route(Question, to=here)
    async with bus, asker:
        async with asker.unit_of_work():
            asker.send(Question(1), reply_to="gopher://nowhere")
        letters = "SELECT exception_type, attempts FROM durable.dead_letters"
        assert await eventually(lambda: rows(database_url, letters), within=20) == [
            ("durable.errors.InvalidMessage", 1)
        ]


class TestIdleAddresses:
    async def test_address_used_once_is_forgotten_and_can_be_used_again(
        self, make_database: Any, database_url: str
    ) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        peer, received = Bus("peer", make_database("peer"), **QUICK), list[int]()
        peer.listen(address)

        @peer.handles(Answer)
        async def handle(answer: Answer) -> None:
            received.append(answer.number)

        bus = Bus("sender", database_url, **SOON)
        declared = f"tcp://127.0.0.1:{free_port()}"
        bus.route(Question, to=declared)
        async with peer, bus:
            node = bus.runtime.node
            assert node is not None
            for number in (1, 2):
                async with bus.unit_of_work():
                    bus.send(Answer(number), to=address)
                await eventually(lambda: received == list(range(1, number + 1)), within=20)  # noqa: B023
                await eventually(lambda: address not in node.agents.senders, within=20)
                assert address not in bus.statistics().tallies[Subject.DESTINATION]
            assert list(node.agents.senders) == [declared]
            await eventually(lambda: len(node.agents.sending) == 1, within=20)
            assert bus.runtime.counters.snapshot()["sent"] == 2, "the sum keeps what was counted"

    async def test_latched_address_is_pinged_while_messages_wait_and_forgotten_afterwards(
        self, database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nobody = f"tcp://127.0.0.1:{free_port()}"
        bus = Bus("sender", database_url, failures_to_latch=1, **SOON)
        latched = "SELECT key FROM durable.circuits WHERE kind = 'destination'"
        async with bus:
            node = bus.runtime.node
            assert node is not None
            async with bus.unit_of_work():
                bus.send(Answer(1), to=nobody)
            await eventually(lambda: rows(database_url, latched) == [(nobody,)], within=20)
            idle = node.agents.senders[nobody]
            await eventually(lambda: idle.circuit.latched and not idle.held(), within=20)
            looks = 0
            look = IdleAddresses.poll

            async def counted(idle_addresses: IdleAddresses) -> None:
                nonlocal looks
                await look(idle_addresses)
                looks += 1

            monkeypatch.setattr(IdleAddresses, "poll", counted)
            await eventually(lambda: looks > 8, within=20)
            assert node.agents.senders.get(nobody) is idle
            with psycopg.connect(database_url) as conn:
                conn.execute("DELETE FROM durable.outgoing_envelopes")
            await eventually(lambda: nobody not in node.agents.senders, within=20)
            await eventually(lambda: rows(database_url, latched) == [], within=20)
