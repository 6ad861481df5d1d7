"""Messages of a service whose tables another one uses: its mistake makes no dead letters of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from durable import Bus, message
from durable.envelope import ANY_NODE
from durable.messages.ordering import QueueKeys
from durable.messages.scope import scoped
from durable.storage import inbox
from durable.storage.inbox import Arrival
from durable.testing import eventually
from tests.failure.leftovers import envelope
from tests.support.tables import Tables


@message("neighbours.work")
class Work(msgspec.Struct):
    number: int


def shop(url: str, *, ordered: bool = False, fair_by: str | None = None) -> tuple[Bus, list[int]]:
    bus, handled = Bus("shop", url), list[int]()

    @bus.handles(Work, ordered=ordered, fair_by=fair_by)
    async def work(each: Work) -> None:
        handled.append(each.number)

    return bus, handled


def guest(url: str) -> Bus:
    """Another service, which has the database of the shop by mistake."""
    return Bus("guest", url, poll_interval=timedelta(milliseconds=50))


@pytest.mark.parametrize(
    ("options", "sent"),
    [({}, {}), ({"ordered": True}, {}), ({}, {"key": "a"}), ({"fair_by": "tenant"}, {"tenant": "a"})],
    ids=["plain", "ordered handler", "key", "tenant"],
)
async def test_waiting_messages_are_handled_later_when_another_service_has_run_on_their_tables(
    tables: Tables, caplog: pytest.LogCaptureFixture, options: Any, sent: Any
) -> None:
    bus, handled = shop(tables.url, **options)
    async with bus.unit_of_work():
        for number in range(3):
            bus.send(Work(number), **sent)
    with caplog.at_level(logging.ERROR):
        async with guest(tables.url):
            await eventually(lambda: "wait here for another service" in caplog.text)
            await asyncio.sleep(1)  # some twenty looks, of which one claims them
    assert caplog.text.count("wait here for another service") == 1
    assert "they are of the service shop" in caplog.text
    assert set(tables.rows("SELECT epoch FROM durable.incoming_envelopes")) <= {0, 1, 2}
    assert tables.count("dead_letters") == 0

    async with bus:
        await eventually(lambda: sorted(handled) == [0, 1, 2])


@pytest.mark.parametrize(
    ("endpoint", "listens", "letters"),
    [
        ("shop", None, 0),
        ("guest", None, 1),
        ("counter", "counter", 1),
        (scoped("shop", "orders"), None, 0),
        (scoped("guest", "orders"), None, 1),
        (scoped("counter", "orders"), "counter", 1),
    ],
    ids=[
        "of another service", "of this service", "of a named listener",
        "a peer's of another service", "a peer's of this service", "a peer's of a named listener",
    ],
)  # fmt: skip
async def test_arrived_message_without_a_handler_is_a_dead_letter_of_its_own_service(
    tables: Tables, caplog: pytest.LogCaptureFixture, endpoint: str, listens: str | None, letters: int
) -> None:
    bus = guest(tables.url)
    if listens is not None:
        bus.listen("tcp://127.0.0.1:0", name=listens)
    arrived = Arrival(endpoint, envelope(1), ANY_NODE, QueueKeys())
    told: Callable[[], bool] = lambda: "no node has a handler" in caplog.text or "wait here for" in caplog.text  # noqa: E731
    async with bus:
        await bus.runtime.database.transaction(inbox.store, [arrived])
        await eventually(told)
    assert tables.count("dead_letters") == letters
    assert tables.count("incoming_envelopes") == 1 - letters
