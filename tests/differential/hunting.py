"""Each workload in memory and in another world, and the report of a difference: the smallest workload that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from durable.embedded import Embedded
from durable.recovery import membership
from tests.differential.running import Record, difference, run
from tests.differential.shrinking import shrink
from tests.differential.workload import Where, Workload
from tests.differential.worlds import InMemory, OnPostgres, Way, World
from tests.support.servers import EMBEDDED
from tests.support.tables import Tables, shared_tables

FOLDER: Final = Path("build/differential")
MakeWorld = Callable[[], World]

WAYS: Final[Mapping[str, Way]] = {
    "memory links": Way(),
    "tcp": Way("tcp"),
    "http": Way("http"),
    "rabbitmq": Way("rabbitmq"),
    "psycopg": Way(driver="psycopg"),
    "sync sessions": Way(driver="sync"),
}


class Worlds:
    """Makes worlds on servers that are started when they are first asked for; `amqp_url` is asked for once."""

    def __init__(self, servers: Callable[[int], Embedded], amqp_url: Callable[[], str]) -> None:
        self._servers = servers
        self._amqp_url = amqp_url
        self._tables: dict[int, dict[Where, Tables]] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()

    def maker(self, name: str) -> MakeWorld:
        """Return a function that makes this world: the name of a way, or `postgres N`."""
        version = int(name.removeprefix("postgres ")) if name.startswith("postgres ") else EMBEDDED
        way = WAYS.get(name, WAYS["memory links"])
        if way.transport == "rabbitmq":
            way = Way("rabbitmq", amqp_url=self._amqp_url())
        return lambda: OnPostgres(name, self._tables_of(version), way)

    def _tables_of(self, version: int) -> dict[Where, Tables]:
        if version not in self._tables:
            enter, server = self._stack.enter_context, self._servers(version)
            self._tables[version] = {
                "here": enter(shared_tables(server)),
                "there": enter(shared_tables(server)),
            }
        return self._tables[version]


async def compare(workload: Workload, make: MakeWorld) -> list[str]:
    """Return the lines in which this world differs from the one in memory."""
    return difference(await _record(workload, InMemory), await _record(workload, make))


async def _record(workload: Workload, make: MakeWorld) -> Record:
    """Run it; a run that breaks off is a record too."""
    world = make()
    try:
        return await run(workload, world)
    except (AssertionError, ExceptionGroup) as error:
        return [f"{world.name} broke off: {type(error).__name__}: {error}"]


async def report(workload: Workload, make: MakeWorld, lines: list[str]) -> str:
    """Shrink a workload that differs, keep it as a file, and return the text about it."""

    async def fails(smaller: Workload) -> bool:
        return bool(await compare(smaller, make))

    smallest = await shrink(workload, fails)
    last = await compare(smallest, make) or lines
    world = make().name
    text = msgspec.json.format(msgspec.json.encode(smallest), indent=2).decode()
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{world.replace(' ', '-')}-{workload.seed}.json"
    file.write_text(text)
    return "\n".join(
        (
            f"seed {workload.seed}: {world} (+) differs from memory (-):",
            *(f"  {line}" for line in last[:20]),
            text,
            f"run it again: .venv/bin/python -m tests.differential --world '{world}' --again {file}",
        )
    )


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let a node's thread see soon that it is to leave: it listens for 0.2 s otherwise."""
    before, membership._LISTEN_SECONDS = membership._LISTEN_SECONDS, 0.02
    try:
        yield
    finally:
        membership._LISTEN_SECONDS = before
