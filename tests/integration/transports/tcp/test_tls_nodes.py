"""Two services on two addresses, each with a certificate of its own: a question, its answer, and strangers; and all
certificates replaced, to those of another authority, while both run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from durable import Bus, Context, message
from durable.embedded.ports import free_port
from durable.errors import TransportError
from durable.settings import load_settings
from durable.testing import eventually
from durable.testing.transports import ChaosProxy, envelopes
from durable.transports.tcp.transport import TcpTransport
from tests.failure.workbench import QUICK
from tests.support.tls import Authority, Pem


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


async def test_certificates_and_their_authority_are_replaced_while_two_nodes_run(
    make_database: Any, database_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    former, new = (Authority(tmp_path_factory.mktemp(name)) for name in ("former", "new"))
    trusted = tmp_path / "authorities.pem"
    addresses = {"oracle": "127.0.0.2", "asker": "127.0.0.3"}
    files = {name: Pem(trusted, tmp_path / f"{name}.pem", tmp_path / f"{name}-key.pem") for name in addresses}

    def renew(authority: Authority) -> None:
        for name, address in addresses.items():
            pem = authority.issue(address, "127.0.0.1", f"{name}.internal", into=name)  # 127.0.0.1: of the proxy
            files[name].key.write_bytes(pem.key.read_bytes())
            files[name].certificate.write_bytes(pem.certificate.read_bytes())

    def trust(*authorities: Authority) -> None:
        trusted.write_bytes(b"".join(each.pem.read_bytes() for each in authorities))

    trust(former)
    renew(former)
    peers = {name: {"certificates": [f"{name}.internal"]} for name in addresses}
    async with AsyncExitStack() as proxies:
        ways = {}
        for name, address in addresses.items():
            here = f"tcp://{address}:{free_port()}"
            ways[name] = here, await proxies.enter_async_context(ChaosProxy(here))
        to_oracle, to_asker = ways["oracle"][1].uri, ways["asker"][1].uri
        settings: dict[str, Any] = {**QUICK, "peers": peers}
        oracle = Bus("oracle", database_url, **settings, **files["oracle"].settings, answer_to=(f"{to_asker}?tls=1",))
        oracle.listen(ways["oracle"][0])
        asker = Bus("asker", make_database("asker"), **settings, **files["asker"].settings)
        asker.listen(ways["asker"][0])
        asker.route(Question, to=f"{to_oracle}?tls=1")
        answered: list[int] = []

        @oracle.handles(Question)
        async def answer(question: Question, ctx: Context) -> None:
            ctx.reply(Answer(question.number))

        @asker.handles(Answer)
        async def handle(answer: Answer) -> None:
            answered.append(answer.number)

        async def is_refused(authority: Authority, name: str) -> None:
            """Also with a certificate of the right authority, which is no peer's."""
            own = authority.issue("127.0.0.4", name, into="third").settings | {"tls_ca": trusted}
            async with TcpTransport(load_settings(**own), "asker", 1).sender(ways["oracle"][0]) as sender:
                with pytest.raises(TransportError):
                    await sender.send(envelopes(1))

        async with oracle, asker:
            steps: list[Callable[[], None]] = [
                lambda: None,
                lambda: trust(former, new),
                lambda: renew(new),
                lambda: trust(new),
            ]
            for number, step in enumerate(steps):
                step()
                for _, proxy in ways.values():  # connections that are open stay: new ones are wanted
                    proxy.cut()
                    proxy.restore()
                async with asker.unit_of_work():
                    asker.send(Question(number), reply_to=f"{to_asker}?tls=1")
                await eventually(lambda: len(answered) > number, within=30, what="an answer")  # noqa: B023
            assert answered == [0, 1, 2, 3]
            await is_refused(new, "mallory.internal")
            await is_refused(former, "asker.internal")
            assert oracle.statistics().listeners[ways["oracle"][0]]["envelopes"] == len(steps)
