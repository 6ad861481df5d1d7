"""Exceptions that are no Exception, at every call into code of the application: the node lives and handles the others.

SystemExit and GeneratorExit, the panic of an extension, and a CancelledError without a cancellation. KeyboardInterrupt
is the user's wish to end the process, and is obeyed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
import psycopg
import pytest

from durable import Bus, Depends, Incoming, Middleware, Retry, message, register_codec, upcaster
from durable.application.middleware import HandleNext
from durable.envelope import ANY_NODE, Envelope
from durable.messages import codec
from durable.outbox.envelope_factory import Outgoing, Send
from durable.outcomes import STORED, Outcome
from durable.transports.memory import MemoryTransport
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

PECULIAR = "application/vnd.durable.peculiar"
ONCE_MORE = Retry(immediate=1, delays=())


class Panic(BaseException):
    """As extensions written in Rust raise it."""


class Villain:
    """Raises its error whenever the code of one place runs."""

    def __init__(self) -> None:
        self.place = ""
        self.error: type[BaseException] = Panic
        self.count = 0

    def at(self, place: str) -> None:
        if place == self.place:
            self.count += 1
            raise self.error("broken off")


villain = Villain()


@message("broken.ordinary")
class Ordinary(msgspec.Struct):
    number: int


@message("broken.asked")
class Asked(msgspec.Struct):
    number: int


@message("broken.asked-sync")
class AskedSync(msgspec.Struct):
    number: int


@message("broken.old")
class Old(msgspec.Struct):
    number: int


@message("broken.new")
class New(msgspec.Struct):
    number: int


@message("broken.peculiar", content_type=PECULIAR)
class Peculiar(msgspec.Struct):
    number: int


@message("broken.sent")
class Sent(msgspec.Struct):
    number: int


@message("broken.arriving")
class Arriving(msgspec.Struct):
    number: int


@upcaster(Old, to=New)
def newer(old: Old) -> New:
    villain.at("upcaster")
    return New(old.number)


class PeculiarCodec:
    content_type = PECULIAR

    def encode(self, message: object, envelope: Envelope) -> bytes:
        return msgspec.json.encode(message)

    def decode(self, body: bytes, cls: type[Any]) -> Any:
        villain.at("codec")
        return msgspec.json.decode(body, type=cls)


@pytest.fixture(autouse=True)
def peculiar_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known to these tests alone."""
    monkeypatch.setattr(codec, "_codecs", dict(codec._codecs))
    register_codec(PeculiarCodec())


class Meddling(Middleware):
    def send(self, outgoing: Outgoing, call_next: Send) -> UUID | None:
        if isinstance(outgoing.message, Sent):
            villain.at("middleware of sending")
        return call_next(outgoing)

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        if isinstance(incoming.message, Asked):
            villain.at("middleware of handling")
        return await call_next(incoming)


class Spans:
    def sending(self, destination: str, batch: Sequence[Envelope]) -> AbstractContextManager[object]:
        return self._span("span of sending")

    def receiving(self, endpoint: str, batch: Sequence[Envelope]) -> AbstractContextManager[object]:
        return self._span("span of receiving")

    @contextmanager
    def _span(self, place: str) -> Iterator[None]:
        villain.at(place)
        yield
        villain.at(f"end of the {place}")


class EvilTransport:
    """An application's own transport."""

    schemes: tuple[str, ...] = ("evil",)

    def check(self, uri: str) -> None: ...

    def resolve(self, uri: str, message_type: str) -> str:
        return uri

    def listener(self, uri: str, endpoint: str) -> Any:
        raise NotImplementedError

    def sender(self, destination: str) -> EvilSender:
        villain.at("making of a sender")
        return EvilSender()


class EvilSender:
    async def __aenter__(self) -> EvilSender:
        villain.at("opening of a sender")
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def ping(self) -> None:
        villain.at("send")  # or it would be unlatched at once

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        villain.at("send")
        return [STORED] * len(batch)


def dependency() -> int:
    villain.at("dependency")
    return 1


def factory(at: datetime) -> Ordinary:
    villain.at("factory of a schedule")
    return Ordinary(0)


def make_bus(database: str) -> tuple[Bus, list[int]]:
    # What is sent would be decoded where it is sent, too: here the receiver is to meet what cannot be decoded.
    bus = Bus("shop", database, validate_sent=False, **QUICK)
    bus.application.transports += [MemoryTransport(bus.settings), EvilTransport()]
    bus.application.batch_spans = Spans()
    bus.use(Meddling())
    bus.listen("memory://shop")
    bus.route(Sent, to="evil://peer")
    bus.route(Arriving, to="memory://shop")
    bus.every("0 0 1 1 *", factory, name="yearly")
    handled: list[int] = []

    @bus.handles(Ordinary)
    async def handle_ordinary(ordinary: Ordinary) -> None:
        handled.append(ordinary.number)

    @bus.handles(Arriving)
    async def handle_arriving(arriving: Arriving) -> None: ...

    @bus.handles(Asked, retry=ONCE_MORE)
    async def handle(asked: Asked, one: Annotated[int, Depends(dependency)]) -> Sent:
        villain.at("handler")
        return Sent(asked.number)

    @bus.handles(AskedSync, retry=ONCE_MORE)
    def handle_sync(asked: AskedSync) -> None:
        villain.at("sync handler")

    @bus.handles(New, retry=ONCE_MORE)
    async def handle_new(new: New) -> None: ...

    @bus.handles(Peculiar, retry=ONCE_MORE)
    async def handle_peculiar(peculiar: Peculiar) -> None: ...

    return bus, handled


async def send(bus: Bus, *messages: object, **options: Any) -> None:
    async with bus.unit_of_work() as uow:
        for each in messages:
            uow.send(each, **options)


LETTERS = {
    "handler": Asked(1),
    "sync handler": AskedSync(1),
    "dependency": Asked(1),
    "middleware of handling": Asked(1),
    "middleware of sending": Asked(1),
    "codec": Peculiar(1),
    "upcaster": Old(1),
}
"""Places whose message becomes a dead letter by it."""
OTHERS = {
    "span of sending": Sent(1),
    "end of the span of sending": Sent(1),
    "span of receiving": Arriving(1),
    "end of the span of receiving": Arriving(1),
    "making of a sender": Sent(1),
    "opening of a sender": Sent(1),
    "send": Sent(1),
    "factory of a schedule": None,
}
AT_THE_START = ("making of a sender", "opening of a sender")
ERRORS = [Panic, SystemExit, GeneratorExit, asyncio.CancelledError]


@pytest.fixture
def evil() -> Iterator[Callable[[str, type[BaseException]], None]]:
    def set_up(place: str, error: type[BaseException]) -> None:
        villain.place, villain.error, villain.count = place, error, 0

    yield set_up
    villain.place = ""


def count(database: str, table: str) -> int:
    with psycopg.connect(database) as conn:
        row = conn.execute(f"SELECT count(*) FROM durable.{table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("place", [*LETTERS, *OTHERS])
async def test_node_lives_when_code_of_the_application_is_broken_off(
    database_url: str,
    evil: Callable[[str, type[BaseException]], None],
    caplog: pytest.LogCaptureFixture,
    place: str,
    error: type[BaseException],
) -> None:
    bus, handled = make_bus(database_url)
    if place in AT_THE_START:
        evil(place, error)
    async with bus:
        before = bus.runtime.node_id
        if place not in AT_THE_START:
            evil(place, error)
        if place == "factory of a schedule":
            await eventually(lambda: bus.run_schedule("yearly"))
        else:
            await send(bus, {**LETTERS, **OTHERS}[place])
        await eventually(lambda: villain.count > 0)
        await send(bus, *(Ordinary(number) for number in range(1, 6)))
        await eventually(lambda: set(handled) >= {1, 2, 3, 4, 5})
        if place in LETTERS:
            await eventually(lambda: count(database_url, "dead_letters") == 1)
        villain.place = ""
        await eventually(lambda: count(database_url, "incoming_envelopes") == 0)
        await eventually(lambda: count(database_url, "outgoing_envelopes") == 0)
        assert bus.runtime.node_id == before != ANY_NODE
        await eventually(lambda: any(each.levelno >= logging.WARNING for each in caplog.records))
