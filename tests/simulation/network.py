"""The network between the processes: `sim://service`, a name that leads to any node of a service.

A batch and its answer travel apart, and each may be dropped, delayed, or come twice; a link may be silent in one
direction. The nodes of a service share its address, as behind a balancer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, PeerTimeout, TransportError
from durable.outcomes import BUSY, Outcome
from durable.transports.base import Receiver
from durable.transports.gate import Gate
from tests.simulation.loop import CURRENT, State, VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.process import Process

_SEND_SECONDS: Final = 10.0  # as the setting send_timeout


class Weather(NamedTuple):
    """What becomes of packets on their way; shares of them."""

    drops: float = 0.0
    doubles: float = 0.0
    delays: float = 0.0
    longest_delay: float = 0.0


FAIR: Final = Weather()


class Network:
    """The links between services, and who listens."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop = loop
        self.rng = rng
        self.listeners: dict[str, list[SimulatedListener]] = {}
        self.weather: dict[tuple[str, str], Weather] = {}
        """By the services from and to which packets travel."""
        self.silent: set[tuple[str, str]] = set()
        self.batches = 0

    def carry(self, origin: str, target: str, process: Process, arrive: Any, *args: Any) -> None:
        """Carry a packet; it may arrive once, twice or never."""
        if (origin, target) in self.silent:
            return
        weather, rng = self.weather.get((origin, target), FAIR), self.rng
        if rng.random() < weather.drops:
            return
        delay = rng.uniform(0.0005, 0.005)
        if rng.random() < weather.delays:
            delay += rng.uniform(0, weather.longest_delay)
        self.loop.call_later(delay, arrive, *args, context=process.outside)
        if rng.random() < weather.doubles:
            later = delay + rng.choice((0.001, 1.0, 15.0, 60.0)) * rng.random()
            self.loop.call_later(later, arrive, *args, context=process.outside)

    def listener(self, address: str) -> SimulatedListener | None:
        """One of the listeners of this address whose process is there; a frozen one answers nothing."""
        found = [each for each in self.listeners.get(address, ()) if each.process.state is not State.DEAD]
        return self.rng.choice(found) if found else None


class SimulatedTransport:
    """A durable.transports.base.Transport of one process."""

    schemes: tuple[str, ...] = ("sim",)

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def check(self, uri: str) -> None:
        pass

    def resolve(self, uri: str, message_type: str) -> str:
        return uri

    def sender(self, destination: str) -> SimulatedSender:
        return SimulatedSender(self._network, self._process, destination)

    def listener(self, uri: str, endpoint: str) -> SimulatedListener:
        return SimulatedListener(self._network, self._process, uri, endpoint)


class SimulatedSender:
    """A durable.transports.base.Sender."""

    keeps_order = True

    def __init__(self, network: Network, process: Process, destination: str) -> None:
        self._network = network
        self._process = process
        self._destination = destination
        self._target = destination.removeprefix("sim://").partition("/")[0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        self._network.batches += 1
        self._process.at("send a batch")
        outcomes: list[Outcome] = await self._ask(list(batch))
        self._process.at("a batch is answered")
        return outcomes

    async def ping(self) -> None:
        self._process.at("ping")
        if not await self._ask(None):
            raise TransportError(f"{self._destination}: the peer cannot store anything now")

    async def _ask(self, batch: list[Envelope] | None) -> Any:
        answered: asyncio.Future[Any] = self._network.loop.create_future()
        self._network.carry(self._process.service, self._target, self._process, self._arrive, batch, answered)
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                return await answered
        except TimeoutError:
            raise PeerTimeout(f"{self._destination}: no answer within {_SEND_SECONDS:g} seconds") from None

    def _arrive(self, batch: list[Envelope] | None, answered: asyncio.Future[Any]) -> None:
        """The packet is at the other end: its listener works on it in its own process."""
        listener = self._network.listener(self._destination)
        if listener is None:
            self._back(answered, ConnectionFailed(f"{self._destination}: no listener at this address"))
            return
        work = listener.take(batch, lambda answer: self._back(answered, answer))
        self._network.loop.start(work, listener.process.context.copy(), f"receive at {self._destination}")

    def _back(self, answered: asyncio.Future[Any], answer: Any) -> None:
        self._network.carry(self._target, self._process.service, self._process, _answer, answered, answer)


def _answer(answered: asyncio.Future[Any], answer: Any) -> None:
    if answered.done():
        return
    if isinstance(answer, BaseException):
        answered.set_exception(answer)
    else:
        answered.set_result(answer)


class SimulatedListener:
    """A durable.transports.base.Listener."""

    def __init__(self, network: Network, process: Process, uri: str, endpoint: str) -> None:
        self.process = process
        self._network = network
        self._uri = uri
        self._endpoint = endpoint
        self._gate: Gate | None = None
        self._receiver: Receiver | None = None
        self._under_way = 0
        self._idle = asyncio.Event()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def address(self) -> str:
        return self._uri

    def statistics(self) -> Mapping[str, int]:
        return {}

    async def serve(self, receiver: Receiver) -> None:
        assert CURRENT.get() is self.process
        self._receiver = receiver
        self._gate = Gate(receiver, self._endpoint, self.process.service, self.process.settings)
        self._network.listeners.setdefault(self._uri, []).append(self)

    async def close(self) -> None:
        listeners = self._network.listeners.get(self._uri, [])
        if self in listeners:
            listeners.remove(self)
        while self._under_way:
            self._idle.clear()
            await self._idle.wait()

    async def take(self, batch: list[Envelope] | None, answer: Any) -> None:
        """Answer a batch, or a ping, as the listeners of real transports do."""
        assert self._receiver is not None
        assert self._gate is not None
        if batch is None:
            answer(await self._receiver.ready())
            return
        self.process.at("a batch arrives")
        self._under_way += 1
        try:
            taken = batch[: max(0, self._receiver.credit())]
            outcomes = await self._gate.receive(taken, None) if taken else []
        finally:
            self._under_way -= 1
            self._idle.set()
        answer([*outcomes, *[BUSY] * (len(batch) - len(taken))])
