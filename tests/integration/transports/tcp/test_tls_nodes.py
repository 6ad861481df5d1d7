"""Two services on two addresses, each with a certificate of its own: a question, its answer, and a stranger."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from durable import Bus, Context, message
from durable.errors import TransportError
from durable.settings import load_settings
from durable.testing import eventually
from durable.testing.transports import envelopes
from durable.transports.tcp.transport import TcpTransport
from tests.failure.services import free_port
from tests.failure.workbench import QUICK
from tests.support.tls import Authority


@message("tls.question")
class Question(msgspec.Struct):
    number: int


@message("tls.answer")
class Answer(msgspec.Struct):
    number: int


async def test_two_nodes_on_two_addresses_talk_over_mutual_tls_alone(
    make_database: Any, database_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ours, theirs = Authority(tmp_path_factory.mktemp("ours")), Authority(tmp_path_factory.mktemp("theirs"))
    here, there = f"tcp://127.0.0.2:{free_port()}", f"tcp://127.0.0.3:{free_port()}"
    oracle = Bus("oracle", database_url, **QUICK, **ours.issue("127.0.0.2").settings, answer_to=(there,))
    oracle.listen(here)
    asker = Bus("asker", make_database("asker"), **QUICK, **ours.issue("127.0.0.3").settings)
    asker.listen(there)
    asker.route(Question, to=here)
    answered: list[int] = []

    @oracle.handles(Question)
    async def answer(question: Question, ctx: Context) -> None:
        ctx.reply(Answer(question.number))

    @asker.handles(Answer)
    async def handle(answer: Answer) -> None:
        answered.append(answer.number)

    async with oracle, asker:
        async with asker.unit_of_work():
            for number in range(20):
                asker.send(Question(number), reply_to=there)
        await eventually(lambda: sorted(answered) == list(range(20)))
        mallory = theirs.issue("127.0.0.3").settings | {"tls_ca": ours.pem}
        for settings in (mallory, {}):
            async with TcpTransport(load_settings(**settings), "mallory", 1).sender(here) as sender:
                with pytest.raises(TransportError):
                    await sender.send(envelopes(1))
        statistics = oracle.statistics().listeners[here]
        assert (statistics["envelopes"], statistics["dropped"]) == (20, 2)
