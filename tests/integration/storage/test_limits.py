"""Limits of a sender against those of its receiver, in pairs: whatever they are, everything arrives."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from durable import Bus, InvalidSetting, message
from durable.envelope import Envelope, new_id
from durable.messages.validation import MAX_HEADER_BYTES, MAX_HEADERS, MAX_TEXT_BYTES, find_error
from durable.settings import ENVELOPE_BYTES, load_settings
from durable.telemetry import Event
from durable.testing import eventually
from durable.transports.frames import Frame, Welcome
from durable.transports.http.wire import encode_batch
from durable.transports.memory import MemoryTransport
from durable.transports.tcp.client_side import ClientSide, Sendable
from tests.failure.workbench import QUICK

LARGEST = 20_000
"""Bytes of the largest body that is sent; the others are a tenth of it."""
COUNT = 40
LATER = datetime(2050, 1, 1, tzinfo=UTC)
WIDEST_HEADER = "\N{GRINNING FACE}" * ((MAX_HEADER_BYTES // MAX_HEADERS - 2) // 4)
WIDEST_TEXT = "\N{GRINNING FACE}" * (MAX_TEXT_BYTES // 4)
SMALLEST_FRAME = LARGEST + 100 + ENVELOPE_BYTES

SENDER: dict[str, list[Any]] = {
    "batch_size": [1, 3, 100, 1_000],
    "batch_bytes": [1, 5_000, 1 << 20],
    "batches_in_flight": [1, 4],
    "buffer_size": [1, 5, 2_000],
    "buffer_bytes": [1, 5_000, 32 << 20],
    "max_frame_bytes": [SMALLEST_FRAME, 4 << 20],
}
RECEIVER: dict[str, list[Any]] = {
    "buffer_size": [1, 5, 2_000],
    "buffer_bytes": [1, 5_000, 32 << 20],
    "max_frame_bytes": [SMALLEST_FRAME, 4 << 20],
}
COMMON: dict[str, Any] = QUICK | {"max_message_bytes": LARGEST + 100, "send_timeout": timedelta(seconds=5)}


@message("limits.placed")
class Placed(msgspec.Struct):
    number: int
    body: str


def chosen(limits: dict[str, list[Any]], rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in limits.items()}


def cases() -> list[Any]:
    """Some of the pairs, the same in each run; and those in which each value of the receiver meets a usual sender."""
    rng = random.Random(9)
    drawn = [(chosen(SENDER, rng), chosen(RECEIVER, rng)) for _ in range(6)]
    single: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {name: RECEIVER[name][0]}) for name in RECEIVER]
    single += [({name: SENDER[name][0]}, {}) for name in SENDER]
    return [pytest.param(sender, receiver, id=f"{number}") for number, (sender, receiver) in enumerate(drawn + single)]


@pytest.mark.parametrize("scheme", ["memory", "tcp", "http"])
@pytest.mark.parametrize(("sending", "receiving"), cases())
async def test_every_message_arrives_under_any_pair_of_limits(
    make_database: Callable[[str], str], scheme: str, sending: dict[str, Any], receiving: dict[str, Any]
) -> None:
    memory = MemoryTransport(load_settings())
    frame: dict[str, Any] = {"max_frame_bytes": 4 << 20}
    receiver = Bus("billing", make_database("billing"), transports=[memory], **(COMMON | frame | receiving))
    sender = Bus("orders", make_database("orders"), transports=[memory], **(COMMON | frame | sending))
    handled: list[int] = []

    @receiver.handles(Placed)
    async def handle(placed: Placed) -> None:
        handled.append(placed.number)

    receiver.listen({"memory": "memory://billing", "tcp": "tcp://127.0.0.1:0", "http": "http://127.0.0.1:0"}[scheme])
    async with AsyncExitStack() as running:
        await running.enter_async_context(receiver)
        await running.enter_async_context(sender)
        node = receiver.runtime.node
        assert node is not None
        address = node.listeners[0].address
        async with sender.unit_of_work() as uow:
            for number in range(COUNT):
                size = LARGEST if number % 10 == 5 else LARGEST // 10
                uow.send(Placed(number, "x" * (size - 50)), to=address)
        await eventually(lambda: sorted(handled) == list(range(COUNT)), within=40)
        assert sender.runtime.counters[Event.REJECTED] == 0
        assert receiver.runtime.counters[Event.QUARANTINED] == 0


# ---------------------------------------------------------------- what cannot work together


def widest(max_message_bytes: int) -> Envelope:
    """An envelope that takes as many bytes as one may."""
    made = Envelope(
        id=new_id(),
        message_type=WIDEST_TEXT,
        destination=WIDEST_TEXT,
        source=WIDEST_TEXT,
        correlation_id=new_id(),
        causation_id=new_id(),
        body=b"x" * max_message_bytes,
        partition_key=WIDEST_TEXT,
        content_type=WIDEST_TEXT,
        headers={
            f"{number:02}": "\N{GRINNING FACE}" * ((MAX_HEADER_BYTES // MAX_HEADERS - 2) // 4) for number in range(100)
        },
        sent_at=LATER,
        deliver_by=LATER,
        execution_time=LATER,
    )
    assert find_error(made, max_message_bytes=max_message_bytes) is None
    return made


def test_widest_envelope_fits_into_the_smallest_allowed_frame() -> None:
    largest = 1_000
    side = ClientSide("orders", 1, largest + ENVELOPE_BYTES)
    side.hear(Frame(Welcome(1, "billing", 2, largest + ENVELOPE_BYTES, 1_000, 100)))
    assert isinstance(side.offer([widest(largest)], LATER), Sendable)
    assert len(encode_batch([widest(largest)], LATER)) <= largest + ENVELOPE_BYTES


def test_message_limit_above_the_frame_limit_is_refused_with_both_names() -> None:
    with pytest.raises(InvalidSetting, match=r"max_message_bytes.*max_frame_bytes"):
        load_settings(max_message_bytes=100_000, max_frame_bytes=100_000)
    load_settings(max_message_bytes=100_000, max_frame_bytes=100_000 + ENVELOPE_BYTES)
