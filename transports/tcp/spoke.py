"""The connecting end of TCP: one connection to the directory of another service, from HELLO to its end.

It tells what the own process offers, after each change, and keeps its lease. Resets come from the event loop: a process
whose loop stands still sends none, and is forgotten by the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from durable.errors import ConnectionFailed, InvalidMessage
from durable.grammar import several
from durable.settings import Settings
from durable.tasks.crew import in_turn
from durable.telemetry import log
from durable.transports.announcements import announced, learned
from durable.transports.base import Spoke
from durable.transports.frames import Listing, Offers, without_loads
from durable.transports.tcp.address import SCHEMES, Address, parse_destination
from durable.transports.tcp.client_side import ClientState
from durable.transports.tcp.connecting import ConnectingSide, Denied, Learned, Offered
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.dialer import open_stream
from durable.transports.tcp.entrance import Entrance
from durable.transports.tcp.stream import FrameStream, translated
from durable.transports.watchdog import Keeping
from durable.transports.wire import encode

ANNOUNCE_SECONDS: Final = 0.25  # in which changes of the own offers gather
_POLL_SECONDS: Final = 5.0  # between two questions to a peer without a directory


class TcpSpoke:
    """Connections to the directory at one address, one at a time."""

    def __init__(
        self, address: Address, entrance: Entrance, settings: Settings, service: str, node: Callable[[], int]
    ) -> None:
        self._address = address
        self._entrance = entrance
        self._settings = settings
        self._service = service
        self._node = node

    async def run(self, spoke: Spoke) -> NoReturn:
        """Connect, and be connected until an error ends it: TransportError. Leaves in order when it is cancelled."""
        settings = self._settings
        with translated(f"connecting to {self._address}"):
            async with asyncio.timeout(settings.connect_timeout.total_seconds()):
                stream = await open_stream(self._address, self._entrance, settings)
                try:
                    side = ConnectingSide(
                        self._service,
                        self._node(),
                        settings.max_frame_bytes,
                        self._entrance.proof_of_sender(stream),
                        most_bytes=settings.buffer_bytes,
                    )
                    connection = _Connection(stream, side, settings, spoke, str(self._address))
                    await connection.greet()
                except BaseException:
                    stream.abort()
                    raise
        await connection.run()


class _Connection:
    """Connection of a spoke."""

    def __init__(self, stream: FrameStream, side: ConnectingSide, settings: Settings, spoke: Spoke, peer: str) -> None:
        self._stream = stream
        self._side = side
        self._spoke = spoke
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._quiet_seconds = settings.idle_timeout.total_seconds() / 3
        self._changed = asyncio.Event()
        self._denied = ""
        self._is_denied = self._is_due = False

    async def greet(self) -> None:
        await self._stream.say(self._side.greet())
        while self._side.state is ClientState.GREETING:
            await self._hear_more()

    async def run(self) -> NoReturn:
        """Keep the connection up to its end. Raises TransportError then."""
        unwatch = self._spoke.watch(self._tell_of_change)
        tasks: list[asyncio.Task[NoReturn]] = []

        def begin(job: Coroutine[Any, Any, NoReturn], name: str) -> None:
            tasks.append(asyncio.create_task(job, name=f"{name} of {self._peer}"))

        try:
            if self._side.bounds is None:
                begin(self._ask(), "questions")
            else:
                lease = self._side.bounds.nearest(self._spoke.lease)
                keeping = Keeping(lease, self._loop.time())
                await self._stream.say(self._side.connect(self._spoke.name))
                await self._stream.say(self._side.reset(lease))
                begin(self._keep(keeping), "lease")
                begin(self._announce(), "announcements")
            begin(self._beat(), "heartbeat")
            begin(self._read(), "reading")
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            raise ConnectionFailed(f"{self._peer}: the connection has ended")
        finally:
            unwatch()
            for task in tasks:
                task.cancel()
            await in_turn(_ended(tasks), self._leave())

    async def _leave(self) -> None:
        self._stream.post(encode(self._side.goodbye()))
        await self._stream.close()

    def _tell_of_change(self) -> None:
        """Called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _read(self) -> NoReturn:
        while self._side.state is ClientState.OPEN:
            await self._hear_more()
        raise ConnectionFailed(f"{self._peer}: the peer is stopping")

    async def _hear_more(self) -> None:
        received = await self._stream.read()
        if not received:
            raise ConnectionFailed(f"{self._peer}: the peer closed the connection")
        for item in received:
            match self._side.listen(item):
                case Learned(listings, left_out):
                    if left_out:
                        log.warning(
                            "directory of %s is incomplete: %s left out",
                            self._peer,
                            several(left_out, "listings", "are"),
                        )
                    self._spoke.learn(self._usable(listings))
                case Offered(offers):
                    self._spoke.learn(self._listed(offers))
                case Denied(reason):
                    self._deny(reason)
                case Reply(frame):
                    await self._stream.say(frame)
                case _:
                    pass

    def _usable(self, listings: Sequence[Listing]) -> list[Listing]:
        """Return the listings that can be called from here."""
        found = [learned(each, self._stream.peer_host, _check) for each in listings]
        return [each for each in found if each.addresses]

    def _listed(self, offers: Offers) -> list[Listing]:
        """Return the offers of a peer without a directory as listings."""
        name, now = self._side.server, datetime.now(UTC)
        return [Listing(offer, *name, [self._peer], now) for offer in offers.offers]

    def _deny(self, reason: str) -> None:
        if reason != self._denied:
            log.warning("announcement at %s failed: %s", self._peer, reason)
        self._denied = reason
        self._is_denied = True

    async def _ask(self) -> NoReturn:
        while True:
            await self._stream.say(self._side.lookup())
            await asyncio.sleep(_POLL_SECONDS)

    async def _announce(self) -> NoReturn:
        """Say what is offered here, after each change; with a reset also another load, and what was refused.

        Raises ConnectionFailed when this process is another node now.
        """
        said: list[Listing] = []
        while True:
            self._changed.clear()
            own = [announced(each, self._stream.own_host) for each in self._spoke.listings()]
            listings = [each for each in own if each.addresses]
            if any(each.node != self._side.node for each in listings):
                raise ConnectionFailed(f"{self._peer}: the node number of this process has changed; connecting again")
            if without_loads(listings) != without_loads(said) or (
                self._is_due and (listings != said or self._is_denied)
            ):
                self._is_denied = False
                said = listings
                try:
                    await self._stream.write(self._side.announce(listings))
                except InvalidMessage as error:
                    self._deny(str(error))
            self._is_due = False
            await asyncio.sleep(ANNOUNCE_SECONDS)
            await self._changed.wait()

    async def _keep(self, keeping: Keeping) -> NoReturn:
        """Reset the lease in time. Raises ConnectionFailed when this process stood still for longer than it."""
        while True:
            await asyncio.sleep(keeping.pause(self._loop.time()))
            if keeping.has_lapsed(self._loop.time()):
                raise ConnectionFailed(
                    f"{self._peer}: the event loop stood still for longer than the lease of {keeping.lease:g} s"
                )
            await self._stream.say(self._side.reset(keeping.lease))
            keeping.reset(self._loop.time())
            self._is_due = True
            self._changed.set()

    async def _beat(self) -> NoReturn:
        while True:
            quiet = self._loop.time() - self._stream.written_at
            if quiet < self._quiet_seconds:
                await asyncio.sleep(self._quiet_seconds - quiet)
                continue
            await self._stream.say(self._side.ping())


async def _ended(tasks: Sequence[asyncio.Task[NoReturn]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _check(address: str) -> None:
    """Raise InvalidSetting for an address that this transport could not call; others have their own rules."""
    if address.partition(":")[0] in SCHEMES:
        parse_destination(address)
