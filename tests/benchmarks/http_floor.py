"""Plain HTTP: httpx posts batches to a bare Starlette endpoint under uvicorn, which reads each and answers 200.

ALONE     the bodies are encoded before, and nobody looks into them
STORED    with the database at both ends: claimed, encoded and deleted here, decoded and stored there
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from durable.envelope import Envelope
from durable.outcomes import STORED as OUTCOME
from durable.transports.http.wire import BATCH, OUTCOMES, decode_batch, encode_batch, encode_outcomes
from tests.benchmarks import floor
from tests.benchmarks.racing import Arrived, Contender, Race, Ship, Start, until
from tests.benchmarks.rows import Counts

ANSWER = encode_outcomes([OUTCOME] * floor.BATCH)


@asynccontextmanager
async def _send_alone(race: Race) -> AsyncIterator[Ship]:
    async with httpx.AsyncClient(trust_env=False) as client:

        async def ship(count: int, start: Start) -> Counts:
            bodies = iter([encode_batch(batch) for batch in floor.batches(floor.envelopes(count))])

            async def post_each() -> None:
                for body in bodies:
                    await _post(client, race.destination, body)

            start()
            await asyncio.gather(*(post_each() for _ in range(floor.IN_FLIGHT)))
            return Counts()

        yield ship


@asynccontextmanager
async def _send_stored(race: Race) -> AsyncIterator[Ship]:
    async with httpx.AsyncClient(trust_env=False) as client, floor.open_pool(race.sender_url) as pool:

        async def send(envelopes: Sequence[Envelope]) -> None:
            await _post(client, race.destination, encode_batch(envelopes))

        async def ship(count: int, start: Start) -> Counts:
            await floor.fill_outbox(pool, floor.envelopes(count, race.destination))
            start()
            await floor.ship_by(send, pool, race.destination)
            return Counts()

        yield ship


async def _post(client: httpx.AsyncClient, url: str, body: bytes) -> None:
    response = await client.post(url, content=body, headers={"Content-Type": BATCH})
    response.raise_for_status()


@asynccontextmanager
async def _take_alone(race: Race) -> AsyncIterator[Arrived]:
    arrived = 0

    async def take(body: bytes) -> None:
        nonlocal arrived
        arrived += floor.BATCH

    async with _serving(race, take):
        yield lambda: arrived


@asynccontextmanager
async def _store(race: Race) -> AsyncIterator[Arrived]:
    arrived = 0

    async def take(body: bytes) -> None:
        nonlocal arrived
        envelopes = decode_batch(body).envelopes
        await floor.receive(pool, envelopes)
        arrived += len(envelopes)

    async with floor.open_pool(race.receiver_url) as pool, _serving(race, take):
        yield lambda: arrived


@asynccontextmanager
async def _serving(race: Race, take: Callable[[bytes], Awaitable[None]]) -> AsyncIterator[None]:
    """A server that gives each body to `take`, and answers when it has returned."""

    async def answer(request: Request) -> Response:
        await take(await request.body())
        return Response(ANSWER, media_type=OUTCOMES)

    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    url = urlsplit(race.destination)
    config = uvicorn.Config(app, url.hostname or "", url.port or 0, log_config=None, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(), name="serve")
    await until(lambda: server.started)
    yield
    server.should_exit = True
    await serving


ALONE = Contender(_send_alone, _take_alone)
STORED = Contender(_send_stored, _store)
