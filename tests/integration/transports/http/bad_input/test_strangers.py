"""Strangers get 401 before their body is read, and give way to known clients."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping

import pytest

from durable.outcomes import STORED
from durable.transports.http.wire import BATCH, decode_outcomes, encode_batch
from tests.integration.transports.http.bad_input.houses import (
    GOOD,
    SECRET,
    SETTINGS,
    House,
    ask,
    open_house,
    post,
    signed,
)
from tests.support.raw_http import request
from tests.support.receivers import envelopes

# Functions, because a signature is good for five minutes only.
STRANGERS: Mapping[str, Callable[[], str]] = {
    "no credentials": lambda: "",
    "credentials of another kind": lambda: "Basic dXNlcjpwYXNz",
    "another token": lambda: "Bearer wrong horse battery",
    "no token": lambda: "Bearer ",
    "the beginning of the secret": lambda: f"Bearer {SECRET[:-1]}",
    "a signature with another secret": lambda: signed(GOOD, secret="wrong horse battery"),
    "a signature of another body": lambda: signed(GOOD + b"x"),
    "a signature of another length": lambda: signed(GOOD[:-1]),
    "a signature for another path": lambda: signed(GOOD, "/batches"),
    "a signature that is too old": lambda: signed(GOOD, age=310),
    "a signature from the future": lambda: signed(GOOD, age=-310),
    "a signature that is cut short": lambda: signed(GOOD)[:-1],
}


@pytest.mark.parametrize("credentials", STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_stranger_gets_401(house: House, credentials: Callable[[], str]) -> None:
    refusal = await ask(house, post(GOOD, authorization=credentials()))
    assert refusal.status == 401
    assert refusal.problem["title"] == "Unauthorized"
    assert refusal.headers["www-authenticate"].startswith("Durable-HMAC-SHA256")
    assert SECRET not in refusal.body.decode()
    await house.is_unharmed(refused=1)


async def test_a_stranger_cannot_ping(house: House) -> None:
    refusal = await ask(house, request("/in/ping"))
    assert refusal.problem["status"] == 401
    await house.is_unharmed(refused=1)


@pytest.mark.parametrize(
    "credentials",
    ["", "Bearer wrong horse battery", signed(b"", age=310)],
    ids=["none", "another token", "a signature that is too old"],
)
async def test_a_stranger_is_refused_before_the_body_is_read(house: House, credentials: str) -> None:
    refusal = await ask(house, request("/in/batches", length=1_000, content_type=BATCH, authorization=credentials))
    assert refusal.status == 401
    await house.is_unharmed(refused=1)


async def test_bearer_token_equal_to_the_secret_is_accepted(house: House) -> None:
    answer = await ask(house, post(GOOD, authorization=f"Bearer {SECRET}"))
    assert decode_outcomes(answer.body, 2) == [STORED] * 2


BODIES_OF_STRANGERS = {
    "a length": request("/in/batches", length=1 << 40, content_type=BATCH),
    "chunks": request("/in/batches", length="", transfer_encoding="chunked", content_type=BATCH),
    "another endpoint": request("/in/nowhere", length=1 << 40),
    "the health": request("/in/health/live", method="GET", length=1 << 40),
    "another method": request("/in/batches", method="PUT", length=1 << 40),
    "a wrong secret": request("/in/batches", length=1 << 40, content_type=BATCH, authorization="Bearer wrong"),
}


@pytest.mark.parametrize("begun", BODIES_OF_STRANGERS.values(), ids=BODIES_OF_STRANGERS.keys())
async def test_body_of_a_refused_request_is_not_swallowed(house: House, begun: bytes) -> None:
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    async with house.mallory() as mallory:
        mallory.say(begun)
        answered = asyncio.ensure_future(mallory.hear())
        taken = 0
        while await mallory.still_listens():
            mallory.say(chunk)
            taken += len(chunk)
            assert taken < 16 << 20  # socket buffers take some of it
        assert (await answered).headers["connection"] == "close"
    await house.greet_neighbour()


async def test_stranger_leaving_at_the_answer_logs_no_traceback(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system knows that he has reset the connection before the event loop does."""
    ended: list[int] = []

    def has_gone(_: object) -> None:
        ended.append(1)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", has_gone)
    async with house.mallory() as mallory:
        mallory.say(request("/in/batches", b"x" * 50_000, length=100_000, content_type=BATCH))
        assert (await mallory.hear()).status == 401
        mallory.reset_when_closed()
    await house.greet_neighbour()
    assert ended
    assert not [record for record in caplog.records if record.exc_info]


async def test_oldest_stranger_gives_way_when_there_are_too_many() -> None:
    async for house in open_house(SETTINGS.model_copy(update={"stranger_connections": 1})):
        async with house.mallory() as first, house.mallory() as second:
            assert await first.cut() == b""
            assert (await second.ask(request("/in/health/live", method="GET"))).status == 204
        await house.is_unharmed(dropped=1)


async def test_idle_connection_of_a_known_client_gives_way_to_another_client() -> None:
    async for house in open_house(SETTINGS.model_copy(update={"http_connections": 2})):  # the neighbour has one
        async with house.mallory() as first, house.mallory() as second:
            assert (await first.ask(post(GOOD))).status == 200
            assert (await second.ask(post(encode_batch(envelopes(1))))).status == 200
            await house.has_dropped(1)
            assert (await second.ask(post(encode_batch(envelopes(1))))).status == 200


async def test_known_clients_beyond_the_room_are_served_as_strangers() -> None:
    async for house in open_house(SETTINGS.model_copy(update={"http_connections": 1})):
        house.receiver.hold()
        async with house.mallory() as first, house.mallory() as second:
            first.say(post(GOOD))
            second.say(post(encode_batch(envelopes(1))))
            await house.receiver.arrived(3)  # the neighbour's was the first
            house.receiver.release()
            assert (await first.hear()).status == 200
            assert (await second.hear()).status == 200
