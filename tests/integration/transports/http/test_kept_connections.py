"""How long a connection is kept between two requests: a server tells it, and a client goes before."""

from __future__ import annotations

from datetime import timedelta

import pytest

from durable.outcomes import STORED
from durable.settings import load_settings
from durable.transports.http.transport import HttpTransport
from durable.transports.http.wire import OUTCOMES, encode_outcomes
from tests.support.raw_http import FakeHttpServer, RawHttpClient, request, response, saying
from tests.support.receivers import MemoryReceiver, envelope

SECRET = "correct horse battery"
SETTINGS = load_settings(shared_secret=SECRET, idle_timeout=timedelta(seconds=17), connect_timeout=timedelta(seconds=3))


@pytest.mark.parametrize(
    ("told", "connections"),
    [("timeout=0", 3), ("max=100, timeout=0", 3), ("Timeout = 3600", 1), ("max=100", 1), ("timeout=soon", 1), ("", 1)],
)
async def test_connection_is_used_again_within_the_time_of_the_server(told: str, connections: int) -> None:
    answer = response("200 OK", encode_outcomes([STORED]), content_type=OUTCOMES, keep_alive=told)
    async with FakeHttpServer(saying(answer)) as server:
        transport = HttpTransport(load_settings(), service="shop", messages=dict)
        async with transport.sender(server.uri) as sender:
            for _ in range(3):
                assert await sender.send([envelope()]) == [STORED]
        assert server.connections == connections


@pytest.mark.parametrize(("secret", "status", "seconds"), [(SECRET, 204, 17), ("a wrong one", 401, 3)])
async def test_listener_tells_the_time_between_two_requests(secret: str, status: int, seconds: int) -> None:
    listener = HttpTransport(SETTINGS, service="billing", messages=dict).listener("http://127.0.0.1:0/in", "billing")
    await listener.serve(MemoryReceiver())
    try:
        async with RawHttpClient(listener.address) as client:
            answer = await client.ask(request("/in/ping", authorization=f"Bearer {secret}"))
        assert (answer.status, answer.headers["keep-alive"]) == (status, f"timeout={seconds}")
    finally:
        await listener.close()
