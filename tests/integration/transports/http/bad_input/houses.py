"""A house with a good neighbour, and what strangers send to it.

After each bad input: nothing of it is stored, the listener serves on, and the neighbour never noticed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec

from durable.envelope import Envelope
from durable.outcomes import STORED
from durable.settings import Settings, load_settings
from durable.testing import eventually
from durable.transports.base import Listener, Sender
from durable.transports.http.auth import sign, unsigned
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import BATCH, encode_batch
from tests.support.raw_http import RawHttpClient, RawResponse, request
from tests.support.receivers import MemoryReceiver, envelopes

LIMIT = 1 << 17
SECRET = "correct horse battery"
LETTER = b"the body of a message, which belongs in no log"
SETTINGS = load_settings(
    connect_timeout=timedelta(seconds=2),
    send_timeout=timedelta(seconds=5),
    frame_timeout=timedelta(seconds=5),
    drain_timeout=timedelta(seconds=2),
    max_frame_bytes=LIMIT,
    max_message_bytes=LIMIT // 2,
)
HASTY = SETTINGS.model_copy(update={"frame_timeout": timedelta(seconds=0.3)})


def batch(*items: object, version: int = 1, count: int | None = None) -> bytes:
    """A batch that holds these, envelopes or not."""
    held = [version, len(items) if count is None else count, list(items)]
    return msgspec.msgpack.Encoder(uuid_format="bytes").encode(held)


def transport(settings: Settings, secret: str | None = SECRET) -> HttpTransport:
    known = load_settings(shared_secret=secret).shared_secret
    return HttpTransport(settings.model_copy(update={"shared_secret": known}), service="billing", messages=dict)


@dataclass
class House:
    """A listener that knows a secret, a good neighbour who sends to it, and what was received."""

    listener: Listener
    receiver: MemoryReceiver
    neighbour: Sender
    from_neighbour: list[Envelope] = field(default_factory=list)

    def mallory(self) -> RawHttpClient:
        return RawHttpClient(self.listener.address)

    async def greet_neighbour(self) -> None:
        sent = envelopes(3)
        assert await self.neighbour.send(sent) == [STORED] * 3
        self.from_neighbour += sent

    async def is_unharmed(self, *, refused: int = 0, dropped: int = 0) -> None:
        """Nothing but the neighbour's envelopes is stored, and his connection is the same as before."""
        await eventually(lambda: self._counts("refused", "dropped") == (refused, dropped), what="the counts")
        await self.greet_neighbour()
        assert list(self.receiver.stored.values()) == self.from_neighbour

    async def has_dropped(self, count: int) -> None:
        await eventually(lambda: self._counts("dropped") == (count,), what="the drops")

    def _counts(self, *names: str) -> tuple[int, ...]:
        return tuple(self.listener.statistics()[name] for name in names)


async def open_house(settings: Settings) -> AsyncIterator[House]:
    there = transport(settings)
    listener = there.listener("http://127.0.0.1:0/in", "billing-in")
    receiver = MemoryReceiver()
    await listener.serve(receiver)
    async with there.sender(listener.address) as neighbour:
        house = House(listener, receiver, neighbour)
        await house.greet_neighbour()
        yield house
    await listener.close()


def signed(body: bytes, target: str = "/in/batches", secret: str = SECRET, age: int = 0) -> str:
    timestamp = int(time.time()) - age
    said = unsigned(body, to="billing", at="https://billing", timestamp=timestamp, nonce=secrets.token_hex(8))
    return str(sign(secret, said, "POST", target.encode(), len(body)))


def post(body: bytes, target: str = "/in/batches", **headers: str) -> bytes:
    """A request that is good, but for what is given."""
    good = {"content_type": BATCH, "authorization": signed(body, target)}
    return request(target, body, **{**good, **headers})


TOKEN = f"Bearer {SECRET}"


async def ask(house: House, data: bytes) -> RawResponse:
    async with house.mallory() as mallory:
        return await mallory.ask(data)


GOOD = encode_batch(envelopes(2))
