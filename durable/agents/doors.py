"""Doors: the listeners of a process, which may outlive a node.

A process whose database is away is no node. What it offers can still be called at its tcp:// and unix:// addresses, so
these stay open until the next node takes them over; meanwhile messages are told to come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from durable.envelope import Envelope
from durable.errors import StorageUnavailable
from durable.outcomes import BUSY, Outcome
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.crew import Stuck, contained, end, wait
from durable.telemetry import log
from durable.transports.base import Listener, Receiver

_CALLED: Final = ("tcp://", "unix://")


class Relay:
    """A `durable.transports.base.Receiver`: that of the node of the moment."""

    def __init__(self) -> None:
        self._receiver: Receiver | None = None

    def lead_to(self, receiver: Receiver | None) -> None:
        """Hand on to this receiver from now on; None: store nothing."""
        self._receiver = receiver

    async def receive(self, endpoint: str, batch: Sequence[Envelope]) -> list[Outcome]:
        receiver = self._receiver
        return [BUSY] * len(batch) if receiver is None else await receiver.receive(endpoint, batch)

    async def reject(self, endpoint: str, raw: bytes, reason: str, headers: Mapping[str, str] | None = None) -> None:
        if self._receiver is None:
            raise StorageUnavailable("messages cannot be stored: the process is no node now")
        await self._receiver.reject(endpoint, raw, reason, headers)

    async def ready(self) -> bool:
        return self._receiver is not None and await self._receiver.ready()

    def credit(self) -> int:
        return 0 if self._receiver is None else self._receiver.credit()


class Doors:
    """Listeners that were kept, by the addresses that they were declared with."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Listener, Relay]] = {}

    def take(self, uri: str) -> tuple[Listener, Relay] | None:
        """Return the listener that was kept for this address."""
        return self._kept.pop(uri, None)

    def keep(self, uri: str, listener: Listener, relay: Relay) -> bool:
        """Keep a listener open for the next node. False when nothing can be called there."""
        if not uri.startswith(_CALLED):
            return False
        relay.lead_to(None)
        self._kept[uri] = listener, relay
        return True

    async def close(self, *, patience: float, ending_seconds: float) -> None:
        """Close those that no node has taken over."""
        kept, self._kept = self._kept, {}
        listeners = [listener for listener, _ in kept.values()]
        for task in await close_together(listeners, patience=patience, ending_seconds=ending_seconds):
            log.warning("listener did not close in time: %s", task.get_name())


async def close_together(
    listeners: Sequence[Listener], *, patience: float, ending_seconds: float
) -> Sequence[asyncio.Task[Any]]:
    """Close these listeners at the same time, also after a failure of one. Return the tasks that do not end.

    Batches under way have `patience` seconds to be answered.
    """
    closing = [
        asyncio.create_task(contained(close(listener)), name=f"close {listener.address}") for listener in listeners
    ]
    await wait(closing, within=patience + ending_seconds)
    left = list(await end(closing, within=ending_seconds))
    for task in closing:
        if task.done() and not task.cancelled() and isinstance(stuck := task.exception(), Stuck):
            left += stuck.tasks
    return left


async def close(listener: Listener) -> None:
    """Close a listener; unacknowledged deliveries are delivered again. Raises only Stuck."""
    try:
        await listener.close()
    except Stuck:
        raise
    except BaseException as error:
        raise_if_cancelled(error)
        log.exception("internal error while closing listener %s", listener.address)
