"""Ids that somebody took first, on a running node: by claimed times, and by bodies that only look encrypted."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from msgspec.structs import replace

from durable import Bus, Keys, message
from durable.embedded import Embedded
from durable.envelope import Envelope
from durable.messages.sealed import NONCE_BYTES, Sealed, joined
from durable.outcomes import DUPLICATE, OTHER_BODY, STORED
from durable.telemetry import Event, Subject
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.failure.workbench import QUICK
from tests.support import receivers
from tests.support.raw_http import RawHttpClient, request
from tests.support.tables import Tables, shared_tables

HERE = "memory://shop"
LIFE = timedelta(seconds=600)
HOUR = timedelta(hours=1)
KEYS = {name: bytes([number]) * 32 for number, name in enumerate("ab")}


@message("taken.paid")
class Paid(msgspec.Struct):
    number: int


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    return shared


class Shop:
    """A bus that runs, and what its handler has seen."""

    def __init__(self, url: str, held: str = "") -> None:
        self.seen: list[int] = []
        self.bus = Bus("shop", url, **QUICK)
        if held:
            self.bus.keys_from(lambda: Keys({name: KEYS[name] for name in held}))
        self.transport = MemoryTransport(self.bus.settings)
        self.bus.application.transports.append(self.transport)
        self.bus.listen(HERE)

        @self.bus.handles(Paid)
        async def handle(paid: Paid) -> None:
            self.seen.append(paid.number)

    async def arrive(self, *envelopes: Envelope) -> Any:
        return await self.transport.sender(HERE).send(list(envelopes))

    async def arrive_in_turn(self, *envelopes: Envelope, together: bool) -> list[Any]:
        if together:
            return list(await self.arrive(*envelopes))
        return [(await self.arrive(each))[0] for each in envelopes]


def real(**changes: Any) -> Envelope:
    now = datetime.now(UTC)
    made = receivers.envelope("taken.paid", b'{"number":17}')
    return replace(made, destination=HERE, sent_at=now, deliver_by=now + LIFE, **changes)


def expired(envelope: Envelope) -> Envelope:
    return replace(envelope, sent_at=envelope.sent_at - HOUR, deliver_by=envelope.sent_at - HOUR + LIFE)


def put_off(envelope: Envelope) -> Envelope:
    later = envelope.sent_at + 23 * HOUR
    return replace(envelope, sent_at=later, deliver_by=later + LIFE, execution_time=later)


@pytest.mark.parametrize("together", [True, False], ids=["one batch", "in turn"])
@pytest.mark.parametrize("squat", [expired, put_off])
async def test_real_message_is_an_alarm_when_its_id_was_taken_by_claimed_times(
    tables: Tables, squat: Callable[[Envelope], Envelope], together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shop, wanted = Shop(tables.url), real()
    with caplog.at_level(logging.ERROR):
        async with shop.bus:
            assert await shop.arrive_in_turn(squat(wanted), wanted, together=together) == [STORED, OTHER_BODY]
            if squat is expired:
                await eventually(lambda: tables.count("incoming_envelopes") == 0, within=30)
            assert await shop.arrive(wanted) == [OTHER_BODY]
            counted = shop.bus.runtime.counters.of(Subject.ENDPOINT, "shop")[Event.QUARANTINED]
    assert shop.seen == []
    assert counted >= 2
    assert "another message was received under the same id before" in caplog.text
    [(reason, body)] = tables.rows("SELECT reason, body FROM durable.dead_letters")
    assert (reason, bytes(body)) == ("another message was received under the same id before", wanted.body)


async def test_waiting_message_lives_on_with_its_duplicate_in_one_batch(tables: Tables) -> None:
    shop, wanted = Shop(tables.url), real()
    soon = wanted.sent_at + timedelta(seconds=60)
    shorter = replace(wanted, sent_at=soon - LIFE, deliver_by=soon)
    async with shop.bus:
        await shop.bus.pause(Paid)
        assert await shop.arrive(shorter, wanted) == [STORED, DUPLICATE]
        assert tables.one("SELECT deliver_by FROM durable.incoming_envelopes") == wanted.deliver_by


FORMS = ("readable", "a", "b", "fake", "fake of a")


def formed(form: str, envelope: Envelope) -> Envelope:
    """The message as it travels: readable, encrypted with one of the keys, or bytes that only look so."""
    if form == "readable":
        return envelope
    if form in KEYS:
        bus = Bus("peer")
        bus.keys_from(lambda: Keys({form: KEYS[form]}))
        return bus.application.ring.sealed([envelope])[0]
    key_id = "no-such-key" if form == "fake" else "a"
    fake = Sealed(secrets.token_bytes(7) + b"\1", secrets.token_bytes(NONCE_BYTES), key_id, HERE, b"x" * 40)
    return replace(envelope, body=joined(fake))


@pytest.mark.parametrize("held", ["", "a", "ab"])
async def test_only_an_opened_body_and_the_same_bytes_make_a_duplicate(tables: Tables, held: str) -> None:
    """Each pair of forms under one id, of a node with these keys."""
    shop = Shop(tables.url, held)
    async with shop.bus:
        for first, second, together in product(FORMS, FORMS, (True, False)):
            wanted = real()
            one = formed(first, wanted)
            two = one if first == second else formed(second, wanted)
            opened = {"readable", *held}
            expected = DUPLICATE if first == second or {first, second} <= opened else OTHER_BODY
            answers = await shop.arrive_in_turn(one, two, together=together)
            assert answers == [STORED, expected], (first, second, together)


def looking_encrypted(envelope: Envelope) -> Envelope:
    return formed("fake", envelope)


@pytest.mark.parametrize("squat", [expired, put_off, looking_encrypted])
async def test_message_at_the_http_door_is_an_alarm_when_its_id_was_taken(
    tables: Tables, squat: Callable[[Envelope], Envelope]
) -> None:
    shop, taken = Shop(tables.url), real(id=uuid4())
    shop.bus.listen("http://127.0.0.1:0")
    async with shop.bus:
        assert shop.bus.runtime.node is not None
        [url] = [each.address for each in shop.bus.runtime.node.listeners if each.address.startswith("http:")]
        assert await shop.arrive(squat(taken)) == [STORED]
        async with RawHttpClient(url) as client:
            headers = {
                "content_type": "application/json",
                "idempotency_key": str(taken.id),
                "durable_time_to_live": "600",
            }
            if squat is looking_encrypted:
                headers["durable_time_to_live"] = ""
            refusal = await client.ask(request("/messages/taken.paid", taken.body, **headers))
    assert refusal.status == 422
    [body] = tables.rows("SELECT body FROM durable.dead_letters")
    assert bytes(body) == taken.body
