"""Calls that came in on one connection of a listener, and what its peer is told of the offered services.

Nothing here waits for the peer. No call is run for a peer that has `buffer_bytes` of results unread: it costs so much,
and the results of the calls that ran already.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from durable.settings import Settings
from durable.transports import peers
from durable.transports.base import Answer, Provider
from durable.transports.frames import Call, Fault, FaultKind, Frame, Offers
from durable.transports.tcp.server_side import Begin, ServerSide
from durable.transports.tcp.stream import FrameStream
from durable.transports.wire import encode

_TELL_SECONDS: Final = 0.05  # in which changes of the offers gather


class Calls:
    """Calls of one connection. `answered` is set after each."""

    def __init__(
        self,
        provider: Provider | None,
        stream: FrameStream,
        side: ServerSide,
        settings: Settings,
        counts: Counter[str],
        answered: asyncio.Event,
    ) -> None:
        self._provider = provider
        self._stream = stream
        self._side = side
        self._settings = settings
        self._counts = counts
        self._answered = answered
        self._under_way: dict[int, tuple[Call, Callable[[], None]]] = {}  # by channel: the call, what cancels it
        self._unwatch: Callable[[], None] | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._has_told = False
        self._is_miss = False

    def begin(self, begun: Begin) -> bool:
        """Give the call to the provider. What it answers is written, unless the connection has ended. Returns False
        when there is no such method here, for this peer.
        """
        self._is_miss = False
        call, channel, provider = begun.call, begun.channel, self._provider
        self._counts["calls"] += 1
        name = f"{call.service}.{call.method}"
        if provider is None or not peers.may_send(self._settings, self._side.proven, name):
            text = f"{self._side.proven} may not call {name}: see types in peers" if provider else f"no {name} here"
            self._answer(channel, Fault(FaultKind.FORBIDDEN if provider else FaultKind.UNKNOWN, text))
            return False
        self._under_way[channel] = (call, _nothing)
        cancel = provider.begin(call, self._side.proven, lambda answer: self._answer(channel, answer), self._has_room)
        if channel in self._under_way:
            self._under_way[channel] = (call, cancel)
        return not self._is_miss

    def cancel(self, channel: int) -> None:
        _, cancel = self._under_way.pop(channel, (None, _nothing))
        cancel()
        self._answered.set()

    def tell_offers(self) -> None:
        """Say what can be called here, now and after each change."""
        if self._has_told:
            self._tell_soon()  # offers are larger than the question for them
            return
        self._has_told = True
        if (provider := self._provider) is not None:
            self._unwatch = provider.watch(self._tell_soon)
        self._tell()

    def close(self) -> None:
        """Cancel the calls that the peer waits for: it will not hear of them. Others go on."""
        if self._unwatch is not None:
            self._unwatch()
        if self._telling is not None:
            self._telling.cancel()
        under_way, self._under_way = self._under_way, {}
        for channel, (call, cancel) in under_way.items():
            if call.awaited:
                self._side.abandon(channel)
                cancel()
        self._answered.set()

    def _tell_soon(self) -> None:
        """Say it once for all changes of a moment."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(_TELL_SECONDS, self._tell)

    def _tell(self) -> None:
        self._telling = None
        if self._stream.is_backed_up:  # the peer reads slowly: it is told the last state only
            self._tell_soon()
            return
        offers = self._provider.offers() if self._provider is not None else Offers([])
        self._stream.post_soon(encode(Frame(peers.seen_of(self._settings, self._side.proven, offers))))

    def _answer(self, channel: int, answer: Answer) -> None:
        self._under_way.pop(channel, None)
        self._is_miss = isinstance(answer, Fault) and answer.kind is FaultKind.UNKNOWN
        data = self._side.end(channel, answer)
        if data is not None:
            self._stream.post_soon(data)
        self._answered.set()

    def _has_room(self) -> bool:
        return self._stream.unsent_bytes < self._settings.buffer_bytes


def _nothing() -> None:
    pass
