"""A node in a process of its own that offers `Who`: `python -m tests.support.providing URL NAME ADDRESS [OPTION...]`.

Options are `singleton`, and settings such as `heartbeat_stale=60`. It prints its address when it runs, and ends in good
order when its standard input ends.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from durable import Bus
from durable.calls import service
from tests.failure.workbench import QUICK
from tests.support.root import ROOT


@service("who", version="1.0")
class Who(Protocol):
    async def name(self) -> str: ...

    async def wait(self) -> str: ...


class Named:
    """Provider that tells its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.began = 0
        self.go = asyncio.Event()

    async def name(self) -> str:
        return self._name

    async def wait(self) -> str:
        self.began += 1
        await self.go.wait()
        return self._name


@dataclass
class Providing:
    """The process, and the address at which it answers."""

    process: subprocess.Popen[str]
    address: str

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def providing(database_url: str, name: str, *options: str) -> Iterator[Providing]:
    """Run such a process."""
    command = [sys.executable, "-m", "tests.support.providing", database_url, name, "tcp://127.0.0.1:0", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, "the process has ended"
            yield Providing(process, address)
        finally:
            process.kill()


@asynccontextmanager
async def providing_beside(database_url: str, name: str, *options: str) -> AsyncIterator[Providing]:
    """providing(), while this event loop goes on, with the heartbeats of the buses in it."""
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, providing(database_url, name, *options))


async def _provide(url: str, name: str, address: str, options: list[str]) -> None:
    settings: dict[str, Any] = dict(option.split("=") for option in options if "=" in option)
    bus = Bus("shop", url, **{**QUICK, **settings})
    bus.listen(address)
    bus.offer(Who, Named(name), singleton="singleton" in options)
    async with bus:
        assert bus.runtime.node is not None
        print(bus.runtime.node.listeners[0].address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_provide(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
