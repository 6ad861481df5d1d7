"""What each kind of fault does, as a context: begun at its entry, ended at its exit.

A fault that cannot be begun is ended again, and raises NotBegun: a busy machine may keep its tools away. One that
cannot be ended is an error of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial

import psycopg

from durable.embedded.rabbitmq import Broker
from durable.errors import InvalidSetting, WiringError
from durable.testing.transports.proxy import DOWN, UP
from tests.chaos.plan import Fault
from tests.chaos.stage import Stage
from tests.chaos.wires import Wire

DELAY_SECONDS = 0.15
PIECE_BYTES = 64
INSIST_SECONDS = 180.0


class NotBegun(Exception):
    """A fault could not be begun in time."""


Befall = Callable[[Stage, Fault], AbstractAsyncContextManager[None]]


# ---------------------------------------------------------------- nodes


@asynccontextmanager
async def kill(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    member = stage.fleet.members[fault.place]
    stage.fleet.kill(member)
    try:
        yield
    finally:
        stage.fleet.start(member.service, member.slot)


@asynccontextmanager
async def pause(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    member = stage.fleet.members[fault.place]
    stage.fleet.pause(member)
    try:
        yield
    finally:
        stage.fleet.resume(member)


# ---------------------------------------------------------------- Postgres


@asynccontextmanager
async def terminate(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    for service in stage.services_of(fault.place):
        await asyncio.to_thread(stage.servers[fault.place].terminate_backends, service)
    yield


@asynccontextmanager
async def stopped(mode: str, stage: Stage, fault: Fault) -> AsyncIterator[None]:
    server = stage.servers[fault.place]
    await asyncio.to_thread(server.stop, mode)
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)


@asynccontextmanager
async def switched(name: str, stage: Stage, fault: Fault) -> AsyncIterator[None]:
    for service in stage.services_of(fault.place):
        await asyncio.to_thread(stage.server_of(service).switch, service, name, True)
    try:
        yield
    finally:
        for service in stage.services_of(fault.place):
            await asyncio.to_thread(stage.server_of(service).switch, service, name, False)


@asynccontextmanager
async def storm(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    """The handler of charges fails; the switch is asked for again when its server was away."""
    set_storm = partial(stage.server_of(fault.place).switch, fault.place, "storm")
    try:
        await _begin(partial(set_storm, True))
        yield
    finally:
        await _insist(partial(set_storm, False))


@asynccontextmanager
async def read_only(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    server = stage.servers[fault.place]
    await asyncio.to_thread(server.set_read_only, True)
    try:
        yield
    finally:
        await asyncio.to_thread(server.set_read_only, False)


@asynccontextmanager
async def connections(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    used_up = stage.servers[fault.place].used_up(stage.services_of(fault.place)[0])
    await asyncio.to_thread(used_up.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(used_up.__exit__, None, None, None)


@asynccontextmanager
async def snapshot(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    """Held for as long as its server lets it: other faults may end it."""
    held = ExitStack()
    try:
        await _begin(lambda: held.enter_context(stage.server_of(fault.place).snapshot(fault.place)))
        yield
    finally:
        await asyncio.to_thread(held.close)


@asynccontextmanager
async def fail_over(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    """The time of the fault lies between the crash and the promotion."""
    loop = asyncio.get_running_loop()

    def away() -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(fault.seconds), loop).result()

    await asyncio.to_thread(stage.servers[fault.place].fail_over, away)
    stage.lead_wires_to(fault.place)
    yield


async def _begin(work: Callable[[], object]) -> None:
    try:
        await _insist(work)
    except TimeoutError as error:
        raise NotBegun from error


async def _insist(work: Callable[[], object]) -> None:
    """Again and again, while another fault keeps a server away, or a busy machine its tools."""
    async with asyncio.timeout(INSIST_SECONDS):
        while True:
            try:
                await asyncio.to_thread(work)
            except (psycopg.OperationalError, InvalidSetting, WiringError):
                await asyncio.sleep(0.3)
            else:
                return


@asynccontextmanager
async def kill_pooler(stage: Stage, fault: Fault) -> AsyncIterator[None]:
    pooler = stage.poolers[fault.place]
    pooler.expected_away = True
    pooler.kill()
    try:
        yield
    finally:
        pooler.expected_away = False
        pooler.start()


# ---------------------------------------------------------------- wires


def wire(begin: Callable[[Wire], None]) -> Befall:
    @asynccontextmanager
    async def befall(stage: Stage, fault: Fault) -> AsyncIterator[None]:
        broken = stage.wires[fault.place]
        begin(broken)
        try:
            yield
        finally:
            broken.restore()

    return befall


def _delay(broken: Wire) -> None:
    broken.delay(UP, DELAY_SECONDS)
    broken.delay(DOWN, DELAY_SECONDS)


# ---------------------------------------------------------------- the broker


def broker(begin: Callable[[Broker], None]) -> Befall:
    @asynccontextmanager
    async def befall(stage: Stage, fault: Fault) -> AsyncIterator[None]:
        broken = stage.road.broker
        assert broken is not None
        # Queues that are younger than two seconds would be forgotten by a kill; all have been there since the start.
        try:
            await _begin(partial(begin, broken))
            yield
        finally:
            await _insist(broken.recover)

    return befall


FAULTS: dict[str, Befall] = {
    "kill": kill,
    "pause": pause,
    "terminate": terminate,
    "restart": partial(stopped, "fast"),
    "crash": partial(stopped, "immediate"),
    "away": partial(stopped, "fast"),
    "disk full": partial(switched, "disk full"),
    "read-only": read_only,
    "connections": connections,
    "fail over": fail_over,
    "snapshot": snapshot,
    "storm": storm,
    "pooler kill": kill_pooler,
    "cut": wire(Wire.cut),
    "hole up": wire(lambda broken: broken.swallow(UP)),
    "hole down": wire(lambda broken: broken.swallow(DOWN)),
    "delay": wire(_delay),
    "slice": wire(lambda broken: broken.slice(PIECE_BYTES)),
    "lost answer": wire(lambda broken: broken.lose_answers(1.0)),
    "broker kill": broker(Broker.kill),
    "broker stop": broker(Broker.stop),
    "broker pause": broker(Broker.pause),
    "broker alarm": broker(lambda broken: broken.memory_alarm(True)),
}
