"""Links of a test module: factories of the two ends of a transport, and of the ways between them.

sender --> way --> listener --> receiver                           direct
sender --> way --> broker --> listener_way --> listener --> receiver     brokered
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import pytest

from durable.errors import TransportError
from durable.settings import Settings, load_settings
from durable.testing.transports.proxy import DOWN, ChaosProxy
from durable.testing.transports.receivers import MemoryReceiver
from durable.transports.base import Listener, Receiver, Sender, Transport

PATIENT = load_settings(
    connect_timeout=timedelta(seconds=2),
    send_timeout=timedelta(seconds=5),
    idle_timeout=timedelta(seconds=5),
    frame_timeout=timedelta(seconds=2),
    drain_timeout=timedelta(seconds=5),
)
"""Settings that outlast every delay of these tests."""

HASTY = PATIENT.model_copy(update={"send_timeout": timedelta(seconds=0.5)})
"""Settings of senders that are to run into their timeout."""

LATE_SECONDS = 3.0
"""Time by which a hasty sender must have timed out, also on a loaded machine."""


@dataclass(frozen=True)
class Way:
    """A stretch of network, on which a test can interfere until it restores it.

    cut         breaks every connection, and each new one
    silence     lets vanish what comes back, the connections stay up
    restore     all is well again
    """

    cut: Callable[[], object]
    silence: Callable[[], object]
    restore: Callable[[], object]

    @classmethod
    def through(cls, proxy: ChaosProxy) -> Self:
        """Return the way of a transport that goes through this proxy."""
        return cls(proxy.refuse, lambda: proxy.swallow(DOWN), proxy.restore)


class Link:
    """Async context manager of a listener that serves `receiver`, and of the way between it and a sender.

    `transport` makes a transport with these settings; each sender and each listener gets one of its own. `listening`
    makes those of listeners, when it is another, as behind a broker. `settings` are those of the first listener.

    `send_to` is the address for senders, unless it is the listener's own. Without a `way` the tests that interfere are
    skipped; `listener_way` is for transports with a broker in the middle.
    """

    def __init__(
        self,
        transport: Callable[[Settings], Transport],
        uri: str,
        settings: Settings = PATIENT,
        *,
        listening: Callable[[Settings], Transport] | None = None,
    ) -> None:
        self.transport = transport
        self.receiver = MemoryReceiver()
        self.send_to: str | None = None
        self.way: Way | None = None
        self.listener_way: Way | None = None
        self.listener: Listener
        self._uri = uri
        self._settings = settings
        self._listening = listening or transport
        self._listeners: list[Listener] = []

    async def __aenter__(self) -> Self:
        self.listener = await self.listen(self.receiver, self._settings)
        self._uri = self.listener.address
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.receiver.release()
        for listener in self._listeners:
            await listener.close()

    @property
    def destination(self) -> str:
        return self.send_to or self.listener.address

    def sender(self, settings: Settings = PATIENT) -> Sender:
        """A sender to the listener, not entered yet."""
        return self.transport(settings).sender(self.destination)

    async def listen(self, receiver: Receiver, settings: Settings = PATIENT) -> Listener:
        """Another listener at the same address; it is closed with the link."""
        listener = self._listening(settings).listener(self._uri, "billing-in")
        await listener.serve(receiver)
        self._listeners.append(listener)
        return listener

    async def replace_listener(self, receiver: MemoryReceiver | None = None, settings: Settings = PATIENT) -> None:
        """Close the listener and put a successor into its place, by default with the same receiver."""
        await self.listener.close()
        self.receiver = receiver or self.receiver
        self.listener = await self.listen(self.receiver, settings)


def needed(way: Way | None) -> Way:
    """Return a way, which the test cannot do without."""
    if way is None:
        pytest.skip("the link of this transport has no way to interfere with")
    return way


async def error_of(doing: Coroutine[Any, Any, object]) -> TransportError | None:
    """Return the error of a send or a ping; None when it succeeded."""
    try:
        await doing
    except TransportError as error:
        return error
    return None
