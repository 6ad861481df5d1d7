"""Envelopes and messages that are broken: refused at send; on receive kept as dead letters, with their bytes.

A bad envelope travels between two good ones. Both are handled, and so is one that comes afterwards.
"""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from durable import Bus, InvalidMessage, UnknownMessageType, message
from durable.embedded import Embedded
from durable.envelope import Envelope, new_id
from durable.outcomes import OTHER_BODY, STORED
from durable.telemetry import Event
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.support.tables import Tables, shared_tables

HERE = "memory://shop"
THERE = "tcp://127.0.0.1:2302"


@message("bad.placed")
class Placed(msgspec.Struct):
    number: int
    note: Any = None


@message("bad.modelled")
class Modelled(BaseModel):
    number: float
    note: Any = None


ENDLESS: list[Any] = [math.inf, -math.inf, math.nan, 1e18, 10**400, 1e12, timedelta.max, "1e18", "999999999999w"]
"""Lengths of time that end on no day of the calendar."""


class Unregistered(msgspec.Struct):
    pass


class Shop:
    """A bus that runs, and everything that its handlers have seen."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.seen: list[Any] = []
        self.bus = Bus("shop", tables.url, poll_interval=timedelta(milliseconds=30))
        self._transport = MemoryTransport(self.bus.settings)
        self.bus.application.transports.append(self._transport)
        self.bus.listen(HERE)

        @self.bus.handles(Placed)
        async def place(order: Placed) -> None:
            self.seen.append(order)

        @self.bus.handles(Modelled)
        async def model(order: Modelled) -> None:
            self.seen.append(order)

    async def receive(self, *batch: Envelope) -> list[Any]:
        """Let these arrive in one batch, and wait until they are done with."""
        outcomes = await self._transport.sender(HERE).send(batch)
        await eventually(lambda: self.tables.count("incoming_envelopes") == 0, within=30)
        return list(outcomes)

    async def receive_between_good_ones(self, bad: Envelope) -> None:
        """It costs nobody else anything."""
        assert await self.receive(good(1), bad, good(2)) == [STORED] * 3
        assert await self.receive(good(3)) == [STORED]
        assert sorted(order.number for order in self.seen) == [1, 2, 3]

    def letter(self) -> Any:
        """id, exception_type, reason and body of the only dead letter."""
        return self.tables.one("SELECT id, exception_type, reason, body FROM durable.dead_letters")


def good(number: int, **changes: Any) -> Envelope:
    made = Envelope(
        id=new_id(),
        message_type="bad.placed",
        destination=HERE,
        source="elsewhere",
        correlation_id=new_id(),
        body=msgspec.json.encode({"number": number}),
        sent_at=datetime.now(UTC),
    )
    return msgspec.structs.replace(made, **changes)


def aged(envelope: Envelope, age: timedelta) -> Envelope:
    """The same with an id that was made so long ago."""
    made_ms = int((datetime.now(UTC) - age).timestamp() * 1000)
    return msgspec.structs.replace(envelope, id=uuid.UUID(int=(made_ms << 80) | envelope.id.int & (1 << 80) - 1))


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
async def shop(database: Tables) -> AsyncIterator[Shop]:
    database.clear()
    shop = Shop(database)
    async with shop.bus:
        yield shop


class TestAtSend:
    @pytest.mark.parametrize(
        ("given", "options"),
        [
            pytest.param(Placed(1), {"headers": {"a": "b\0"}}, id="NUL in a header"),
            pytest.param(Placed(1), {"headers": {"a\0": "b"}}, id="NUL in the name of a header"),
            pytest.param(Placed(1), {"headers": {"a": "\ud800"}}, id="lone surrogate in a header"),
            pytest.param(Placed(1, "\udfff"), {}, id="lone surrogate in the body"),
            pytest.param(Placed(1), {"headers": {"a": math.nan}}, id="NaN in a header"),
            pytest.param(Placed(1, math.nan), {}, id="NaN in the body"),
            pytest.param(Modelled(number=math.inf), {}, id="infinity in a model"),
            pytest.param(Placed(10**5_000), {}, id="5,000 digits"),
            pytest.param(Placed(1), {"headers": {str(n): "" for n in range(1_000)}}, id="1,000 headers"),
            pytest.param(Placed(1), {"headers": {"a": "b\r\nc: d"}}, id="CRLF in a header"),
            pytest.param(Placed(1), {"key": "\0"}, id="NUL in the key"),
            pytest.param(Placed(1), {"deliver_by": datetime(2050, 1, 1)}, id="deliver_by without a zone"),
            pytest.param(Placed(1), {"at": datetime(2050, 1, 1)}, id="at without a zone"),
            pytest.param(Placed(1, "x" * (1 << 20)), {}, id="a body over the limit"),
            *(
                pytest.param(Placed(1), {option: value}, id=f"{option}={value!r:.20}")
                for option in ("delay", "deliver_by")
                for value in ENDLESS
            ),
        ],
    )
    async def test_invalid_message_raises_and_the_unit_of_work_proceeds(
        self, database: Tables, given: object, options: Any
    ) -> None:
        database.clear()
        bus = Bus("shop", database.url)
        async with bus.unit_of_work():
            bus.send(Placed(1), to=THERE)
            with pytest.raises(InvalidMessage):
                bus.send(given, to=THERE, **options)
            bus.send(Placed(2), to=THERE)
        await bus.runtime.stop()
        assert database.count("outgoing_envelopes") == 2

    async def test_too_deeply_nested_body_raises(self, database: Tables) -> None:
        nested: Any = []
        for _ in range(100_000):
            nested = [nested]
        bus = Bus("shop", database.url)
        async with bus.unit_of_work():
            with pytest.raises(InvalidMessage):
                bus.send(Placed(1, nested), to=THERE)
        await bus.runtime.stop()

    async def test_a_class_without_a_name_raises(self, database: Tables) -> None:
        bus = Bus("shop", database.url)
        async with bus.unit_of_work():
            with pytest.raises(UnknownMessageType):
                bus.send(Unregistered(), to=THERE)
        await bus.runtime.stop()

    async def test_message_late_at_send_expires_in_the_history(self, shop: Shop) -> None:
        async with shop.bus.unit_of_work():
            sent = shop.bus.send(Placed(1), deliver_by=datetime.now(UTC) - timedelta(days=1))
        await eventually(lambda: shop.tables.count("incoming_envelopes") == 0)
        assert shop.seen == []
        assert shop.tables.rows("SELECT id, outcome FROM durable.envelope_history") == [(sent, "expired")]


class TestEnvelopesOnReceive:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            pytest.param({"headers": {"a": "\0"}}, "control character", id="NUL in a header"),
            pytest.param({"headers": {"a": "\ud800"}}, "lone surrogate", id="lone surrogate in a header"),
            pytest.param({"headers": {"\ud800": "a"}}, "lone surrogate", id="lone surrogate in a header's name"),
            pytest.param({"headers": {str(n): "" for n in range(1_000)}}, "1,000 headers", id="1,000 headers"),
            pytest.param({"headers": {"a": "b\r\nc"}}, "control character", id="CRLF in a header"),
            pytest.param({"headers": {"a": "x" * 200_000}}, "max_header_bytes (8192)", id="a header of 200 kB"),
            pytest.param({"partition_key": "\0"}, "partition_key", id="NUL in the key"),
            pytest.param({"deliver_by": datetime(2050, 1, 1)}, "no time zone", id="deliver_by without a zone"),
            pytest.param({"body": b"x" * ((1 << 20) + 1)}, "max_message_bytes", id="a body over the limit"),
        ],
    )
    async def test_envelope_with_a_flaw_beside_the_body_keeps_body_and_id_as_a_dead_letter(
        self, shop: Shop, changes: dict[str, Any], reason: str
    ) -> None:
        bad = good(17, **changes)
        await shop.receive_between_good_ones(bad)
        letter = shop.letter()
        assert (letter[0], letter[1], letter[3]) == (bad.id, "quarantined on arrival", bad.body)
        assert reason in letter[2]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            pytest.param({"message_type": "bad.\0placed"}, "message_type", id="NUL in the type"),
            pytest.param({"message_type": "\ud800"}, "message_type", id="lone surrogate in the type"),
            pytest.param({"message_type": ""}, "message_type is empty", id="no type"),
            pytest.param({"message_type": "x" * 100_000}, "longer than", id="an endless type"),
            pytest.param({"source": "\0"}, "source", id="NUL in the source"),
            pytest.param({"content_type": "a\r\nb"}, "content_type", id="CRLF in the content type"),
            pytest.param({"sent_at": datetime(2024, 1, 1)}, "sent_at has no time zone", id="sent_at without a zone"),
        ],
    )
    async def test_envelope_with_a_flaw_in_its_identity_is_kept_whole_as_a_dead_letter(
        self, shop: Shop, changes: dict[str, Any], reason: str
    ) -> None:
        bad = good(17, **changes)
        await shop.receive_between_good_ones(bad)
        letter = shop.letter()
        assert letter[:2] == (None, "quarantined on arrival")
        assert reason in letter[2]
        assert b'{"number":17}' in letter[3]

    @pytest.mark.parametrize(
        "moment",
        [
            datetime.min.replace(tzinfo=UTC),
            datetime.max.replace(tzinfo=UTC),
            datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),  # a year before the first
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
        ],
        ids=["year 1", "year 9999", "before year 1", "after year 9999"],
    )
    @pytest.mark.parametrize("name", ["sent_at", "deliver_by"])
    async def test_time_outside_the_calendar_is_quarantined_alone(
        self, shop: Shop, name: str, moment: datetime
    ) -> None:
        await shop.receive_between_good_ones(good(17, **{name: moment}))
        letter = shop.letter()
        assert letter[1:3] == ("quarantined on arrival", f"{name} lies outside the calendar")
        assert b'{"number":17}' in letter[3] or b"number" in letter[3]

    async def test_envelope_older_than_the_dedupe_window_is_quarantined_on_each_arrival(self, shop: Shop) -> None:
        old = aged(good(17), timedelta(days=7, minutes=1))
        await shop.receive_between_good_ones(old)
        letter = shop.letter()
        assert (letter[0], letter[3]) == (old.id, old.body)
        assert "older than duplicates are remembered" in letter[2]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            pytest.param({"age": timedelta(days=-365 * 74)}, "the time in its id", id="an id of 2100"),
            pytest.param({"age": timedelta(days=-1, minutes=-1)}, "the time in its id", id="an id of tomorrow"),
            pytest.param({"sent_at": datetime(2100, 1, 1, tzinfo=UTC)}, "its sent_at", id="sent in 2100"),
            pytest.param({"execution_time": datetime(9998, 1, 1, tzinfo=UTC)}, "put off for longer", id="due in 9998"),
        ],
    )
    async def test_envelope_from_the_future_is_kept_as_a_dead_letter(
        self, shop: Shop, changes: dict[str, Any], reason: str
    ) -> None:
        age = changes.get("age", timedelta(0))
        early = aged(good(17, **{name: value for name, value in changes.items() if name != "age"}), age)
        await shop.receive_between_good_ones(early)
        letter = shop.letter()
        assert (letter[0], letter[1], letter[3]) == (early.id, "quarantined on arrival", early.body)
        assert reason in letter[2]

    async def test_envelope_of_a_clock_a_little_ahead_is_handled(self, shop: Shop) -> None:
        ahead = timedelta(hours=23)
        await shop.receive(aged(good(17, sent_at=datetime.now(UTC) + ahead), -ahead))
        assert [order.number for order in shop.seen] == [17]

    @pytest.mark.parametrize("number", [0, 2**128 - 1], ids=["nil", "max"])
    async def test_stand_in_for_an_id_is_refused_each_time(self, shop: Shop, number: int) -> None:
        bad = good(17, id=uuid.UUID(int=number))
        await shop.receive(good(1), bad, good(2))
        await shop.receive(bad)
        letters = shop.tables.rows("SELECT id, reason FROM durable.dead_letters")
        assert letters == [(None, f"{bad.id} is no id of a message")] * 2
        assert sorted(order.number for order in shop.seen) == [1, 2]

    async def test_envelope_almost_too_old_is_handled(self, shop: Shop) -> None:
        await shop.receive(aged(good(17), timedelta(days=6, hours=23)))
        assert [order.number for order in shop.seen] == [17]

    @pytest.mark.parametrize(
        ("message_type", "body"),
        [
            pytest.param("bad.placed", b'{"number":17,"number":18}', id="twice"),
            pytest.param("bad.modelled", b'{"number":17,"number":18}', id="twice, of a model"),
            pytest.param("bad.placed", b'{"number":17,"n\\u0075mber":18}', id="the second one escaped"),
            pytest.param("bad.placed", b'{"number":17,"note":[{"a":1,"b":{"c":1,"c":2}}]}', id="deep within"),
        ],
    )
    async def test_repeated_json_key_makes_a_dead_letter(self, shop: Shop, message_type: str, body: bytes) -> None:
        bad = good(17, message_type=message_type, body=body)
        await shop.receive_between_good_ones(bad)
        letter = shop.letter()
        assert (letter[0], letter[3]) == (bad.id, body)
        assert "stands twice in one object" in letter[2]

    async def test_another_message_under_the_same_id_is_kept_and_counted(self, shop: Shop) -> None:
        first = good(1)
        other = msgspec.structs.replace(first, body=b'{"number":17}')
        assert await shop.receive(first) == [STORED]
        assert await shop.receive(good(2), other, good(3)) == [STORED, OTHER_BODY, STORED]
        assert sorted(order.number for order in shop.seen) == [1, 2, 3]
        letter = shop.letter()
        assert (letter[0], letter[3]) == (first.id, other.body)
        assert shop.bus.runtime.counters[Event.QUARANTINED] == 1

    async def test_late_message_expires_and_is_counted(self, shop: Shop) -> None:
        late = good(17, deliver_by=datetime.now(UTC) - timedelta(seconds=1))
        await shop.receive_between_good_ones(late)
        expired = shop.tables.rows("SELECT id FROM durable.envelope_history WHERE outcome = 'expired'")
        assert expired == [late.id]
        assert shop.tables.count("dead_letters") == 0

    def test_header_other_than_text_is_refused_by_the_wire_format(self) -> None:
        sent = msgspec.msgpack.encode(good(17, headers={"a": math.nan}))
        with pytest.raises(msgspec.ValidationError, match="Expected `str`, got `float`"):
            msgspec.msgpack.decode(sent, type=Envelope)

    def test_sender_cannot_set_the_attempts_of_an_envelope(self) -> None:
        assert not {"attempts", "interruptions", "epoch", "owner_id"} & set(Envelope.__struct_fields__)


class TestMessagesOnReceive:
    @pytest.mark.parametrize("message_type", ["bad.placed", "bad.modelled"])
    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b'{"number":NaN}', id="NaN"),
            pytest.param(b'{"number":17,"note":Infinity}', id="infinity"),
            pytest.param(b'{"number":17,"note":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="100k nesting"),
            pytest.param(b'{"number":' + b"9" * 5_000 + b"}", id="5,000 digits"),
            pytest.param(b'{"number":17,"note":"\xff\xfe"}', id="invalid UTF-8"),
            pytest.param(b'{"number":17,"note":"\\ud800"}', id="lone surrogate"),
            pytest.param(b"\0\xff", id="no JSON"),
            pytest.param(b"", id="nothing"),
            pytest.param(b"\x80\x04\x95", id="a pickle"),
        ],
    )
    async def test_undecodable_body_is_a_dead_letter_with_its_bytes(
        self, shop: Shop, message_type: str, body: bytes
    ) -> None:
        bad = good(17, body=body, message_type=message_type)
        await shop.receive_between_good_ones(bad)
        letter = shop.letter()
        assert (letter[0], letter[1], letter[3]) == (bad.id, "durable.errors.InvalidMessage", body)

    async def test_text_with_a_nul_in_the_body_is_ordinary_data(self, shop: Shop) -> None:
        await shop.receive(good(17, body=b'{"number":17,"note":"a\\u0000b"}'))
        assert shop.seen == [Placed(17, "a\0b")]

    async def test_another_content_type_is_a_dead_letter(self, shop: Shop) -> None:
        await shop.receive_between_good_ones(good(17, content_type="application/x-python-pickle"))
        assert "is not understood" in shop.letter()[2]

    @pytest.mark.parametrize(
        "name", ["nobody.knows-this", "os.system", "antigravity", "builtins.eval", "bad.placed.v2"]
    )
    async def test_unknown_type_is_a_dead_letter_and_imports_nothing(self, shop: Shop, name: str) -> None:
        bad = good(17, message_type=name)
        before = set(sys.modules)
        await shop.receive_between_good_ones(bad)
        assert set(sys.modules) - before == set()
        letter = shop.letter()
        assert (letter[0], letter[1], letter[3]) == (bad.id, "unknown message type", bad.body)
