"""Calls: durable beside grpc.aio, and beside plain asyncio streams with msgspec; and over HTTP beside TCP.

    one at a time    an integer there and another back, the next call after the answer
    saturated        the same, many at once from one client
    10 MB            bytes there and back

Each provider is a process of its own; the callers take turns in this one. The clock's time is reported, and the time
that this process computes, which holds on a busy machine.
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import grpc
import grpc.aio
import msgspec

from durable.calls import service
from durable.calls.caller import RemoteService
from durable.calls.contract import contract_of
from durable.calls.links import Links
from durable.calls.places import Elsewhere
from durable.calls.provider import CallProvider
from durable.settings import Settings, load_settings
from durable.testing.transports import MemoryReceiver
from durable.transports.http.transport import HttpTransport
from durable.transports.tcp.transport import TcpTransport
from tests.benchmarks.rows import Speed

ONE_BY_ONE: Final = 2_000
SATURATED: Final = 10_000
AT_ONCE: Final = 64
LARGE: Final = bytes(10_000_000)
LARGE_ONES: Final = 5
_FRAME_BYTES: Final = 64 << 20
_HEAD: Final = struct.Struct("!II")
_ROOT: Final = Path(__file__).parents[2]

_encode = msgspec.msgpack.encode
_decode_int = msgspec.msgpack.Decoder(int).decode


@service("numbers", version="1.0")
class Numbers(Protocol):
    async def next(self, number: int) -> int: ...

    async def echo(self, data: bytes) -> bytes: ...


class Counting:
    async def next(self, number: int) -> int:
        return number + 1

    async def echo(self, data: bytes) -> bytes:
        return data


class Callee(NamedTuple):
    """What is called: both functions of one way to call."""

    next: Callable[[int], Awaitable[int]]
    echo: Callable[[bytes], Awaitable[bytes]]


# durable -----------------------------------------------------------------------------------------------------------


def _transport(address: str, settings: Settings, service: str, provider: CallProvider | None = None) -> Any:
    if address.startswith("http://"):
        return HttpTransport(settings, service=service, messages=dict, provider=provider)
    return TcpTransport(settings, service, 1, provider)


async def provide_durable(address: str) -> None:
    settings = load_settings(max_frame_bytes=_FRAME_BYTES)
    provider = CallProvider(lambda: settings)
    provider.offer(contract_of(Numbers), Counting())
    listener = _transport(address, settings, "numbers", provider).listener(address, "numbers")
    await listener.serve(MemoryReceiver())
    print(listener.address, flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def call_durable(address: str) -> AsyncIterator[Callee]:
    settings = load_settings(max_frame_bytes=_FRAME_BYTES)
    links = Links(lambda at: _transport(at, settings, "caller"))
    place = Elsewhere(address, lambda: links)
    numbers: Any = RemoteService(contract_of(Numbers), place, timeout=60, options={}, on_error=None).stub()
    yield Callee(numbers.next, numbers.echo)
    await links.close()


# grpc.aio ------------------------------------------------------------------------------------------------------------

_LENGTHS: Final = [("grpc.max_send_message_length", _FRAME_BYTES), ("grpc.max_receive_message_length", _FRAME_BYTES)]


async def provide_grpc(address: str) -> None:
    counting = Counting()

    async def following(number: int, _: object) -> int:
        return await counting.next(number)

    async def echo(data: bytes, _: object) -> bytes:
        return await counting.echo(data)

    handlers = {
        "next": grpc.unary_unary_rpc_method_handler(following, _decode_int, _encode),
        "echo": grpc.unary_unary_rpc_method_handler(echo, None, None),
    }
    server = grpc.aio.server(options=_LENGTHS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("numbers", handlers),))
    if address.startswith("unix://"):
        server.add_insecure_port(f"unix:{address.removeprefix('unix://')}")
    else:
        address = f"tcp://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(address, flush=True)
    await server.wait_for_termination()


@asynccontextmanager
async def call_grpc(address: str) -> AsyncIterator[Callee]:
    target = address.replace("unix://", "unix:").replace("tcp://", "")
    async with grpc.aio.insecure_channel(target, options=_LENGTHS) as channel:
        following = channel.unary_unary("/numbers/next", request_serializer=_encode, response_deserializer=_decode_int)
        echo = channel.unary_unary("/numbers/echo")
        yield Callee(lambda number: following(number, timeout=60), lambda data: echo(data, timeout=60))


# plain streams -------------------------------------------------------------------------------------------------------


async def provide_streams(address: str) -> None:
    counting = Counting()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                length, number = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                method, argument = msgspec.msgpack.decode(await reader.readexactly(length))
                body = _encode(await getattr(counting, method)(argument))
                writer.write(_HEAD.pack(len(body), number) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    if address.startswith("unix://"):
        await asyncio.start_unix_server(serve, address.removeprefix("unix://"), limit=1 << 20)
    else:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    print(address, flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def call_streams(address: str) -> AsyncIterator[Callee]:
    if address.startswith("unix://"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix://"), limit=1 << 20)
    else:
        host, _, port = address.removeprefix("tcp://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    waiting: dict[int, asyncio.Future[Any]] = {}
    last = 0

    async def read() -> None:
        while True:
            length, number = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            waiting.pop(number).set_result(msgspec.msgpack.decode(await reader.readexactly(length)))

    async def call(method: str, argument: object) -> Any:
        nonlocal last
        last += 1
        answer = waiting[last] = asyncio.get_running_loop().create_future()
        body = _encode((method, argument))
        writer.write(_HEAD.pack(len(body), last) + body)
        await writer.drain()
        async with asyncio.timeout(60):
            return await answer

    reading = asyncio.create_task(read(), name="read")
    yield Callee(lambda number: call("next", number), lambda data: call("echo", data))
    reading.cancel()
    writer.close()


# The contest ---------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A way to call."""

    provide: Callable[[str], Awaitable[None]]
    call: Callable[[str], Any]


WAYS: Final = {
    "durable": Way(provide_durable, call_durable),
    "grpc.aio": Way(provide_grpc, call_grpc),
    "asyncio streams and msgspec": Way(provide_streams, call_streams),
}


async def one_by_one(callee: Callee) -> int:
    for number in range(ONE_BY_ONE):
        assert await callee.next(number) == number + 1
    return ONE_BY_ONE


async def saturated(callee: Callee, count: int = SATURATED) -> int:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            assert await callee.next(number) == number + 1

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return count


async def large(callee: Callee) -> int:
    for _ in range(LARGE_ONES):
        assert len(await callee.echo(LARGE)) == len(LARGE)
    return LARGE_ONES


MEASURED: Final = (
    ("one at a time, Unix socket", "unix", one_by_one),
    ("one at a time, TCP", "tcp", one_by_one),
    (f"{AT_ONCE} at once, Unix socket", "unix", saturated),
    (f"{AT_ONCE} at once, TCP", "tcp", saturated),
    ("10 MB there and back, Unix socket", "unix", large),
    ("one at a time, HTTP", "http", one_by_one),
    (f"{AT_ONCE} at once, HTTP", "http", partial(saturated, count=ONE_BY_ONE)),
)


def sides(kind: str) -> dict[str, tuple[str, str]]:
    """Return who is measured, each as a way to call and a kind of address."""
    if kind == "http":
        return {"durable": ("durable", "http"), "durable over TCP": ("durable", "tcp")}
    return {name: (name, kind) for name in WAYS}


@dataclass
class Contest:
    """Provider processes of all ways, and the speeds beside each other."""

    folder: Path

    def __post_init__(self) -> None:
        self.rows = [Speed(title, other) for title, kind, _ in MEASURED for other in sides(kind) if other != "durable"]

    async def run(self, rounds: int) -> None:
        async with AsyncExitStack() as stack:
            callees = {
                (name, kind): await stack.enter_async_context(WAYS[name].call(self._provider(stack, name, kind)))
                for name, kind in {side for _, kind, _ in MEASURED for side in sides(kind).values()}
            }
            for callee in callees.values():
                await saturated(callee, ONE_BY_ONE)  # warms up
            for _ in range(rounds):
                for title, kind, measure in MEASURED:
                    for name, side in sides(kind).items():
                        self._note(title, name, *await _timed(measure, callees[side]))

    def _provider(self, stack: AsyncExitStack, name: str, kind: str) -> str:
        """Start a provider, and return its address."""
        wanted = f"unix://{self.folder}/{list(WAYS).index(name)}" if kind == "unix" else f"{kind}://127.0.0.1:0"
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.calls", name, wanted],
                stdout=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def _note(self, title: str, name: str, seconds: float, computed: float) -> None:
        for row in self.rows:
            if row.name == title and name == "durable":
                row.ours, row.ours_computed = min(row.ours, seconds), min(row.ours_computed, computed)
            elif row.name == title and row.floor_name == name:
                row.floor, row.floor_computed = min(row.floor, seconds), min(row.floor_computed, computed)


async def _timed(measure: Callable[[Callee], Awaitable[int]], callee: Callee) -> tuple[float, float]:
    """Return the seconds of each call: of the clock, and of this process."""
    began, computed = time.perf_counter(), time.process_time()
    count = await measure(callee)
    return (time.perf_counter() - began) / count, (time.process_time() - computed) / count


def run(folder: Path, rounds: int) -> list[Speed]:
    """Return the speeds, of the best of the rounds."""
    contest = Contest(folder)
    asyncio.run(contest.run(rounds))
    return contest.rows


if __name__ == "__main__":
    asyncio.run(WAYS[sys.argv[1]].provide(sys.argv[2]))  # type: ignore[arg-type]
