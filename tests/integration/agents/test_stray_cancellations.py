"""Cancellations that the application leaves behind in the tasks of agents: timers of a handler or of a transport."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import msgspec
import psycopg
import pytest

from durable import Bus, Retry, message
from durable.agents import handling
from durable.envelope import Envelope
from durable.errors import ConnectionFailed
from durable.outcomes import STORED, Outcome
from durable.transports.base import Listener
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

_BREATH = 0.1
_STRAYS = ((0.0,), (0.05,), (0.05, 0.05 + _BREATH / 2), (0.0, 0.05, 0.1, 0.15, 0.2, 0.3))
_SECONDS_LOCKED = 0.3


@message("cancelled.placed")
class Placed(msgspec.Struct):
    number: int


def leave_timers(delays: Sequence[float]) -> None:
    """Cancel the current task after each of these delays."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for delay in delays:
        loop.call_later(delay, task.cancel)


def outgoing(database_url: str) -> list[Any]:
    with psycopg.connect(database_url) as connection:
        return connection.execute("SELECT owner_id FROM durable.outgoing_envelopes").fetchall()


@contextmanager
def rows_are_locked(database_url: str) -> Iterator[None]:
    """Let whatever settles a message wait for a while."""
    is_locked = threading.Event()

    def lock() -> None:
        with psycopg.connect(database_url) as connection:
            connection.execute("SELECT 1 FROM durable.incoming_envelopes FOR UPDATE")
            is_locked.set()
            time.sleep(_SECONDS_LOCKED)

    locking = threading.Thread(target=lock)
    locking.start()
    is_locked.wait()
    yield
    locking.join()


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("strays", _STRAYS)
async def test_cancellations_left_behind_by_a_handler_cost_no_message_no_order_and_no_node(
    strays: Sequence[float],
    fails: bool,
    key: str | None,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handling, "BREATH", _BREATH)
    bus = Bus("shop", database_url, **dict[str, Any](QUICK, forgotten_after=timedelta(seconds=1)))
    handled = list[int]()
    is_first = True

    @bus.handles(Placed, concurrency=1, retry=Retry(immediate=0, delays=[0.01] * 5))
    async def handle(placed: Placed) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            await asyncio.to_thread(locked.enter_context, rows_are_locked(database_url))
            leave_timers(strays)
            if fails:
                raise ValueError("the first attempt fails")
        handled.append(placed.number)

    async with bus.unit_of_work():
        for number in range(3):
            bus.send(Placed(number), key=key)
    with ExitStack() as locked:
        async with bus:
            node = bus.runtime.node
            await eventually(lambda: set(handled) == {0, 1, 2})
            async with bus.unit_of_work():
                bus.send(Placed(3), key=key)
            await eventually(lambda: 3 in handled)
            assert node is not None
            assert bus.runtime.node is node  # it has not ended and joined again
            await eventually(lambda: not node.agents.handlers["cancelled.placed"].held())
    if key is not None:
        firsts = sorted(set(handled), key=handled.index)
        assert firsts == [0, 1, 2, 3]


class Odd:
    """A transport whose sender fails once in this step, and leaves timers behind there."""

    schemes: tuple[str, ...] = ("odd",)
    keeps_order = True

    def __init__(self, step: str, strays: Sequence[float]) -> None:
        self.sent: list[Envelope] = []
        self._strays = {step: strays}
        self._fails = {"send", step}

    def check(self, uri: str) -> None: ...

    def resolve(self, uri: str, message_type: str) -> str:
        return uri

    def sender(self, destination: str) -> Self:
        return self

    def listener(self, uri: str, endpoint: str) -> Listener:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def send(self, batch: Sequence[Envelope]) -> list[Outcome]:
        self._trip("send")
        self.sent += batch
        return [STORED] * len(batch)

    async def ping(self) -> None:
        self._trip("ping")

    def _trip(self, step: str) -> None:
        leave_timers(self._strays.pop(step, ()))
        if step in self._fails:
            self._fails.remove(step)
            raise ConnectionFailed("odd://peer: away")


@pytest.mark.parametrize("step", ["send", "ping"])
@pytest.mark.parametrize("strays", _STRAYS)
async def test_cancellations_left_behind_by_a_transport_cost_no_message(
    strays: Sequence[float], step: str, database_url: str
) -> None:
    transport = Odd(step, strays)
    bus = Bus("shop", database_url, transports=[transport], **dict[str, Any](QUICK, failures_to_latch=1))
    bus.route(Placed, to="odd://peer")
    async with bus:
        for number in range(4):
            async with bus.unit_of_work():
                bus.send(Placed(number))
            await asyncio.sleep(_BREATH)
        await eventually(lambda: len({envelope.id for envelope in transport.sent}) == 4)
        await eventually(lambda: outgoing(database_url) == [])
