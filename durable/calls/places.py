"""Places that are called: an address, this process itself, or whichever provider is the best choice."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from durable.calls.choice import HERE
from durable.calls.links import Links
from durable.calls.provider import CallProvider
from durable.errors import CallFailed, InvalidMessage, NoProvider, WiringError
from durable.transports.base import Answer, Caller
from durable.transports.frames import Call, Fault, FaultKind, Offers, Result

_EVERYWHERE: Final = ("tcp://0.0.0.0:", "tcp://[::]:")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Target:
    """One provider to call: its address, the epoch of a singleton, and what sends the calls."""

    name: str
    caller: Callable[[], Awaitable[Caller]]
    epoch: int = 0
    provider: tuple[str, int] | None = None


class Pinned:
    """A place with one target, which is called whatever becomes of it."""

    is_choice = False
    is_singleton = False
    is_learning = False
    looks: int | None = None

    def __init__(self, target: Target) -> None:
        self.name = target.name
        self._target = target

    def check(self) -> None:
        pass

    def choose(self, tried: Collection[str]) -> Target:
        return self._target

    def left(self, tried: Collection[str]) -> int:
        return 1

    def nobody(self) -> CallFailed:
        return NoProvider(f"service: no answer at {self.name}")

    def begun(self, target: Target) -> None:
        pass

    def ended(self, target: Target) -> None:
        pass

    def failed(self, target: Target) -> None:
        pass

    def look_again(self) -> None:
        pass


class Elsewhere(Pinned):
    """An address. `links` returns the connections of the running bus, or None."""

    def __init__(self, at: str, links: Callable[[], Links | None], epoch: int = 0) -> None:
        super().__init__(elsewhere(at, links, epoch))
        self._links = links

    def check(self) -> None:
        require_running(self._links, self.name)


class Here(Pinned):
    """Offers of this process: a call has the same checks, limits and encoding as from elsewhere, and no connection.

    `links` returns the connections of the running bus, or None.
    """

    def __init__(self, provider: Callable[[], CallProvider], links: Callable[[], Links | None], epoch: int = 0) -> None:
        super().__init__(here(provider, links, epoch))
        self._links = links

    def check(self) -> None:
        require_running(self._links, self.name)


def elsewhere(
    at: str, links: Callable[[], Links | None], epoch: int = 0, provider: tuple[str, int] | None = None
) -> Target:
    """Return the target at an address."""

    async def caller() -> Caller:
        return await require_running(links, at).to(at)

    return Target(at, caller, epoch, provider)


def require_running(links: Callable[[], Links | None], at: str) -> Links:
    """Return the connections of the bus. Raises WiringError while it does not run."""
    if (found := links()) is None:
        raise WiringError(f"the bus does not run: call {at} within `async with bus`")
    return found


def here(provider: Callable[[], CallProvider], links: Callable[[], Links | None], epoch: int = 0) -> Target:
    """Return the target in this process, which has its links while the bus runs."""

    async def caller() -> Caller:
        require_running(links, HERE)
        return LocalCaller(provider())

    return Target(HERE, caller, epoch)


@cache
def this_machine() -> str:
    """Return a name of this machine, or container, since its start: Unix addresses of others with this name work."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text()
    return hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).hexdigest()[:16]


def reachable(address: str, host: str | None = None) -> str:
    """Return the address of a listener as others call it: one that listens everywhere is called by the name of this
    host, which is `host` or what the machine says.
    """
    for everywhere in _EVERYWHERE:
        if address.startswith(everywhere):
            return f"tcp://{host or socket.gethostname()}:{address.removeprefix(everywhere)}"
    return address


class LocalCaller:
    """A `durable.transports.base.Caller` of this process."""

    def __init__(self, provider: CallProvider) -> None:
        self._provider = provider

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def offers(self) -> Offers:
        return self._provider.offers()

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        """Run the call. One that nobody waits for goes on when its caller is cancelled. Raises InvalidMessage when the
        arguments are larger than a frame may be.
        """
        most_bytes = self._provider.most_bytes
        if len(call.body) > most_bytes:
            raise InvalidMessage(f"a call of {len(call.body):,} bytes; max_frame_bytes allows {most_bytes:,}")
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        sent()
        cancel = self._provider.begin(call, None, lambda answer: _set(answered, answer))
        try:
            answer = await answered
        except asyncio.CancelledError:
            if call.awaited:
                cancel()
            raise
        if isinstance(answer, Result) and len(answer.body) > most_bytes:
            too_large = f"the result of {len(answer.body):,} bytes is larger than max_frame_bytes"
            return Fault(FaultKind.INVALID, too_large)
        return answer


def _set(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)
