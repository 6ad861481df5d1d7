"""Rows that somebody put straight into the tables: the odd one ends alone, and twenty behind it go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest

from durable import Bus, Retry, message
from durable.embedded import Embedded
from durable.messages.sealed import MAGIC
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.failure.workbench import QUICK
from tests.support.command import Agent
from tests.support.receivers import MemoryReceiver
from tests.support.tables import Tables, shared_tables

HERE = "memory://shop"
PEER = "memory://billing"
GOOD = 20
SIDES = ("incoming", "outgoing")
PLACES = {"free": {}, "of one key": {"ordering_key": "k"}, "of one tenant": {"fair_key": "blue"}}

TIMES = ("infinity", "-infinity", "4713-01-01 BC", "0001-01-01 00:00+00", "10000-01-01", "20000-01-01")
REFUSED = [(column, time) for column in ("sent_at", "deliver_by", "execution_time") for time in TIMES]
"""Times that no reader can hold, which the tables refuse."""
UNCLAIMABLE = [
    *(("seq", seq) for seq in (-(2**63), -5, -1, 0, 2**63 - 1)),
    *(("owner_id", owner) for owner in (-(2**31), -77, -3)),
    ("ordering_key", ""),
]
"""Values by which no claim would find a row, which the tables refuse."""
UNREADABLE = {
    "array": "[1]", "number": '{"a": 1}', "nested": '{"a": {"b": ' + "[" * 150 + "]" * 150 + "}}", "null": "null",
    "text": '"x"', "null inside": '{"a": null}', "deep": "[" * 3_000 + "]" * 3_000, "true": '{"a": true}',
    "deep inside": '{"a": ' + "[" * 3_000 + "]" * 3_000 + "}",
}  # fmt: skip
ODD: dict[str, dict[str, Any]] = {
    **{f"headers: {name}": {"headers": headers} for name, headers in UNREADABLE.items()},
    "nil id": {"id": UUID(int=0)},
    "sent in the first year": {"sent_at": "0001-01-02 00:00+00"},
    "sent in the last year": {"sent_at": "9999-12-31 08:00+00"},
    "expires in the first year": {"deliver_by": "0001-01-02 00:00+00"},
    "expires in the last year": {"deliver_by": "9999-12-31 08:00+00"},
    "due in the first year": {"execution_time": "0001-01-02 00:00+00"},
    "source with an escape": {"source": "a\n\x1b[31mFORGED"},
    "content type with a newline": {"content_type": "x\ny"},
    "no content type": {"content_type": ""},
    "no body": {"body": b""},
    "cut body": {"body": MAGIC},
    "body that only looks encrypted": {"body": MAGIC + b"0" * 100},
    "deep body": {"body": b"[" * 100_000},
    "no text": {"body": b"\xff"},
    "key with an escape": {"partition_key": "a\n\x1b"},
    "attempts at the limit": {"attempts": 2**31 - 1},
    "attempts below 0": {"attempts": -5},
    "interruptions at the limit": {"interruptions": 2**31 - 1},
    "interruptions below 0": {"interruptions": -5},
    "epoch at the limit": {"epoch": 2**31 - 1},
    "due header": {"headers": '{"durable-due": "99999-01-01"}'},
    "trace": {"headers": '{"traceparent": "x\\n", "": ""}'},
    "many headers": {"headers": json.dumps({str(number): "x" * 100 for number in range(1_000)})},
}


@message("odd.item")
class Item(msgspec.Struct):
    number: int = 0


@pytest.fixture(scope="module")
def shared(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    return shared


def insert(tables: Tables, side: str, **changes: Any) -> UUID:
    address = "endpoint" if side == "incoming" else "destination"
    row: dict[str, Any] = {
        "id": uuid4(), address: "shop" if side == "incoming" else PEER, "message_type": "odd.item", "source": "s",
        "correlation_id": uuid4(), "body": b'{"number":0}', "sent_at": "now", "content_type": "application/json",
        "owner_id": 0, **changes,
    }  # fmt: skip
    columns, values = ", ".join(row), ", ".join(["%s"] * len(row))
    into = f"INSERT INTO durable.{side}_envelopes ({columns}) OVERRIDING SYSTEM VALUE"
    tables.execute(f"{into} VALUES ({values})", *row.values())
    made: UUID = row["id"]
    return made


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("column", "time"), REFUSED)
def test_time_outside_the_calendar_is_refused_by_the_table(tables: Tables, side: str, column: str, time: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        insert(tables, side, **{column: time})


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("column", "value"), UNCLAIMABLE)
def test_row_beyond_every_claim_is_refused_by_the_table(
    tables: Tables, side: str, column: str, value: object, place: dict[str, str]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match=f"{side}_envelopes_{column}_check"):
        insert(tables, side, **{**place, column: value})


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("side", SIDES)
async def test_odd_row_ends_alone_when_good_rows_lie_behind(
    tables: Tables, side: str, place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    odd = {name: insert(tables, side, **{**place, **changes}) for name, changes in ODD.items()}
    good = {number: insert(tables, side, body=b'{"number":%d}' % number, **place) for number in range(1, GOOD + 1)}
    seen: list[int] = []
    bus = Bus("shop", tables.url, check_pending=0, **QUICK)
    transport = MemoryTransport(bus.settings)
    bus.application.transports.append(transport)
    bus.listen(HERE)

    @bus.handles(Item, retry=Retry(immediate=0, delays=[]))
    async def handle(item: Item) -> None:
        seen.append(item.number)

    receiver = MemoryReceiver()
    await transport.listener(PEER, PEER).serve(receiver)

    def is_done() -> bool:
        arrived = {each.id for each in receiver.envelopes}
        goods = set(good) <= set(seen) if side == "incoming" else set(good.values()) <= arrived
        waiting = set(tables.rows(f"SELECT id FROM durable.{side}_envelopes"))
        return goods and not waiting - {odd["body that only looks encrypted"]}

    async with bus:
        await eventually(is_done, within=60, what="the end of every row")
    letters = dict(tables.rows("SELECT id, reason FROM durable.dead_letters"))
    for name, row in odd.items():
        if name.startswith("headers: "):
            assert "the row cannot be read: headers are no object of strings" in letters[row], name
    assert not set(good.values()) & set(letters)
    shown = tables.one("SELECT letter_id FROM durable.dead_letters WHERE id = %s", odd["headers: array"])
    agent = Agent(tmp_path, monkeypatch, capsys)
    for command in (
        ["dead-letters", "show", str(shown)],
        ["dead-letters", "list"],
        ["dead-letters", "groups"],
        ["status"],
        ["scheduled", "list"],
    ):
        ended = await asyncio.to_thread(agent, *command, "--database", tables.url, "--json")
        document = json.loads(ended.out)
        assert not isinstance(document, dict) or "error" not in document, (command, ended)
        if "show" in command:
            assert "headers that cannot be read" in ended.out
