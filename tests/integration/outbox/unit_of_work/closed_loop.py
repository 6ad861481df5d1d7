"""A process that closes the event loop of its node without leaving the bus, and goes on. Prints what becomes of it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time

import msgspec
import psycopg
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

from durable import Bus, message
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK

URL, DRIVER = sys.argv[1:3]


@message("loops.kept")
class Kept(msgspec.Struct):
    number: int


handled: list[int] = []


def make() -> Bus:
    bus = Bus("shop", URL.replace("postgresql:", f"postgresql+{DRIVER}:"), **QUICK)

    @bus.handles(Kept)
    async def keep(kept: Kept) -> None:
        handled.append(kept.number)

    return bus


def count(rows: str) -> int:
    with psycopg.connect(URL) as conn:
        found = conn.execute(f"SELECT count(*) FROM {rows}".encode()).fetchone()
    assert found is not None
    return int(found[0])


async def until_handled(*numbers: int) -> None:
    await eventually(lambda: set(numbers) <= set(handled))


async def begin(bus: Bus) -> None:
    await bus.__aenter__()
    async with bus.unit_of_work():
        first = bus.send(Kept(1))
    await bus.wait_for(first)


async def go_on(bus: Bus) -> None:
    async with bus.unit_of_work():
        bus.send(Kept(3))
    async with bus:
        await until_handled(2, 3, 4)


def main() -> None:
    bus = make()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin(bus))
    engine = create_engine(URL.replace("postgresql:", "postgresql+psycopg:"))
    event.listen(engine, "commit", lambda _: loop.close())
    with Session(engine) as session, bus.enlist(session):
        bus.send(Kept(2))  # stored as the node's own, whose loop is closed before the COMMIT
        session.commit()
        bus.send(Kept(4))
        session.commit()
    while any(thread.name == "durable node" for thread in threading.enumerate()):
        time.sleep(0.05)
    asyncio.run(go_on(bus))
    print(json.dumps({"handled": sorted(handled), "nodes": count("durable.nodes")}))


if __name__ == "__main__":
    main()
