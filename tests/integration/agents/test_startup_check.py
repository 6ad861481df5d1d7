"""Before a node starts: what is in flight must decode with its code, or it does not start, or a type of it waits."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, text

from durable import Bus, UndecodableMessages, message, upcaster
from durable.messages import upcasting
from durable.messages.codecs.msgpack import MSGPACK
from durable.messages.upcasting import Upcaster
from durable.settings import load_settings
from durable.storage import in_flight
from durable.storage.database import Database
from durable.storage.in_flight import InFlight, Page
from durable.storage.sql import in_flight as statements
from durable.storage.sql.statement import Statement
from tests.failure.waiting import eventually
from tests.failure.workbench import QUICK
from tests.support.command import Agent
from tests.support.tables import Tables
from tests.support.waiting_messages import put

LATER = datetime(2999, 1, 1, tzinfo=UTC)
PAST = datetime(2020, 1, 1, tzinfo=UTC)
GOOD, BAD = b'{"number":1}', b'{"count":1}'
READ_CIRCUITS = "SELECT key, actor, until FROM durable.circuits ORDER BY key"


@message("flight.placed")
class Placed(msgspec.Struct):
    number: int


@message("flight.shipped", content_type=MSGPACK)
class Shipped(msgspec.Struct):
    number: int


@message("flight.paid")
class PaidV1(msgspec.Struct):
    amount: str


@message("flight.paid", version=2)
class Paid(msgspec.Struct):
    cents: int


decoded_in: set[int] = set()


@upcaster(PaidV1, to=Paid)
def to_cents(old: PaidV1) -> Paid:
    decoded_in.add(threading.get_ident())
    return Paid(int(old.amount))


class Shop:
    """A service that handles all of them."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.handled: list[object] = []
        self.bus = Bus("shop", url, **{**QUICK, **settings})
        for cls in (Placed, Shipped, Paid):
            self.bus.handles(cls)(self._handler(cls))

    def _handler(self, cls: type) -> Callable[..., Any]:
        async def handle(arrived: Any) -> None:
            self.handled.append(arrived)

        handle.__annotations__["arrived"] = cls
        return handle


@pytest.fixture
def tables(shared: Tables) -> Tables:
    shared.clear()
    decoded_in.clear()
    return shared


async def refusal(tables: Tables, **settings: Any) -> list[str]:
    """The lines with which the node refuses to start; it must have left nothing behind."""
    shop = Shop(tables.url, **settings)
    with pytest.raises(UndecodableMessages) as refused:
        async with shop.bus:
            pass
    assert (tables.count("nodes"), tables.count("circuits"), shop.handled) == (0, 0, [])
    return str(refused.value).splitlines()


class TestRefusing:
    async def test_refusal_has_a_line_for_each_type_and_ends_with_advice(self, tables: Tables) -> None:
        ids = put(tables, "flight.placed", GOOD, *[BAD] * 5)
        [paid] = put(tables, "flight.paid", b'{"amount":"a lot"}')
        put(tables, "flight.shipped", b"\x81\xa6number\x01", content_type=MSGPACK)

        lines = await refusal(tables)
        assert (
            lines
            == [
                f"flight.paid: 1 of 1 in flight does not decode: upcaster {__name__}.to_cents failed: ValueError: "
                f"invalid literal for int() with base 10: 'a lot' ({paid})",
                "flight.placed: 5 of 6 in flight do not decode: the body is no Placed: Object missing required field "
                f"`number` ({ids[1]}, {ids[2]}, {ids[3]})",
                lines[-1],
            ]
            or lines == []
        )
        for advice in ("upcaster", "--pause-undecodable", "--check-pending 0"):
            assert advice in lines[-1]

    @pytest.mark.parametrize(
        ("how", "content_type"),
        [
            pytest.param({"due": LATER}, MSGPACK, id="scheduled"),
            pytest.param({"owner": 99}, MSGPACK, id="with another node"),
            pytest.param({"deliver_by": LATER}, MSGPACK, id="to be handled by a time"),
            pytest.param({}, "application/x-unknown", id="of an unknown content type"),
        ],
    )
    async def test_refusal_covers_waiting_messages_of_every_state(
        self, tables: Tables, how: dict[str, Any], content_type: str
    ) -> None:
        put(tables, "flight.shipped", BAD, content_type=content_type, **how)
        [line, _] = await refusal(tables)
        assert line.startswith("flight.shipped: 1 of 1 in flight does not decode: ")

    async def test_refusal_covers_the_oldest_and_newest_of_many_messages(self, tables: Tables) -> None:
        [first, *_, newest] = put(tables, "flight.placed", BAD, *[GOOD] * 20, BAD)
        [line, _] = await refusal(tables, check_pending=4, batch_size=1)
        assert line.startswith(
            "flight.placed: 2 of the 4 in flight that were looked at, the oldest and the newest, do not decode: "
        )
        assert line.endswith(f"({first}, {newest})")

    async def test_undecodable_message_between_the_samples_becomes_a_dead_letter(self, tables: Tables) -> None:
        put(tables, "flight.placed", *[GOOD] * 10, BAD, *[GOOD] * 10)
        shop = Shop(tables.url, check_pending=6)
        async with shop.bus:
            await eventually(lambda: len(shop.handled) == 20)
            await eventually(lambda: tables.count("dead_letters") == 1)

    async def test_decoding_is_done_off_the_event_loop(self, tables: Tables) -> None:
        put(tables, "flight.paid", b'{"amount":"a lot"}')
        await refusal(tables)
        assert decoded_in
        assert threading.get_ident() not in decoded_in


class TestStarting:
    async def test_decodable_and_upcast_messages_are_handled(self, tables: Tables) -> None:
        put(tables, "flight.placed", GOOD)
        put(tables, "flight.paid", b'{"amount":"7"}')
        put(tables, "flight.paid.v2", b'{"cents":8}')
        put(tables, "flight.shipped", b"\x81\xa6number\x09", content_type=MSGPACK)
        put(tables, "flight.shipped", GOOD)  # as it was encoded before
        shop = Shop(tables.url)
        async with shop.bus:
            await eventually(lambda: len(shop.handled) == 5)
        assert sorted(map(repr, shop.handled)) == sorted(
            map(repr, [Placed(1), Paid(7), Paid(8), Shipped(9), Shipped(1)])
        )

    async def test_types_handled_elsewhere_are_not_checked(self, tables: Tables) -> None:
        put(tables, "flight.placed.v2", BAD, owner=99)
        put(tables, "elsewhere.sold", BAD, due=LATER)
        async with Shop(tables.url).bus:
            pass

    async def test_expired_messages_are_not_checked(self, tables: Tables) -> None:
        put(tables, "flight.placed", BAD, deliver_by=PAST)
        async with Shop(tables.url).bus:
            pass

    async def test_send_only_process_does_not_check(self, tables: Tables) -> None:
        put(tables, "flight.placed", BAD)
        async with Bus("shop", tables.url, mode="send-only"):
            pass

    async def test_undecodable_messages_become_dead_letters_without_the_check(self, tables: Tables) -> None:
        put(tables, "flight.placed", BAD, GOOD)
        shop = Shop(tables.url, check_pending=0)
        async with shop.bus:
            await eventually(lambda: tables.count("dead_letters") == 1)
            await eventually(lambda: shop.handled == [Placed(1)])

    async def test_types_paused_without_an_end_are_not_checked(self, tables: Tables) -> None:
        put(tables, "flight.placed", BAD)
        await tables.change(
            "INSERT INTO durable.circuits (kind, key, reason, actor) VALUES ('handler', 'flight.placed', '', '')"
        )
        async with Shop(tables.url).bus:
            pass
        assert tables.count("incoming_envelopes") == 1

    async def test_types_paused_for_a_while_are_checked(self, tables: Tables) -> None:
        put(tables, "flight.placed", BAD)
        await tables.change(
            "INSERT INTO durable.circuits (kind, key, reason, actor, until)"
            " VALUES ('handler', 'flight.placed', '', '', now() + interval '1 hour')"
        )
        with pytest.raises(UndecodableMessages, match=r"flight\.placed"):
            async with Shop(tables.url).bus:
                pass


class TestPausing:
    async def test_undecodable_types_are_paused_and_the_others_run(self, tables: Tables) -> None:
        put(tables, "flight.placed", BAD, GOOD)
        put(tables, "flight.shipped", GOOD)
        shop = Shop(tables.url, pause_undecodable=True)
        async with shop.bus:
            await eventually(lambda: shop.handled == [Shipped(1)])
            assert tables.rows(READ_CIRCUITS) == [("flight.placed", "shop, before its start", None)]
            reason = tables.one("SELECT reason FROM durable.circuits")
            assert reason.startswith("flight.placed: 1 of 2 in flight does not decode: the body is no Placed")

            assert await shop.bus.resume(Placed)
            await eventually(lambda: shop.handled == [Shipped(1), Placed(1)])
            await eventually(lambda: tables.count("dead_letters") == 1)

    async def test_old_version_alone_is_paused_when_undecodable(self, tables: Tables) -> None:
        put(tables, "flight.paid", b'{"amount":"a lot"}', b'{"amount":"7"}')
        shop = Shop(tables.url, pause_undecodable=True)
        async with shop.bus:
            node = shop.bus.runtime.node
            assert node is not None
            await eventually(lambda: node.agents.handlers["flight.paid.v2"].is_paused("flight.paid"))
            async with shop.bus.unit_of_work() as uow:
                uow.send(Paid(8))
                uow.send(PaidV1("9"))
            await eventually(lambda: shop.handled == [Paid(8)])
            waiting = [("flight.paid", 0)] * 3
            await eventually(
                lambda: tables.rows("SELECT message_type, owner_id FROM durable.incoming_envelopes") == waiting
            )
            await tables.change("DELETE FROM durable.circuits")
            await eventually(lambda: sorted(each.cents for each in shop.handled if isinstance(each, Paid)) == [7, 8, 9])
            await eventually(lambda: tables.count("dead_letters") == 1)

    async def test_second_start_finds_the_types_paused(self, tables: Tables) -> None:
        put(tables, "flight.placed", BAD)
        async with Shop(tables.url, pause_undecodable=True).bus:
            pass
        async with Shop(tables.url).bus:
            pass
        assert tables.count("incoming_envelopes") == 1

    async def test_paused_type_is_handled_after_a_deploy_of_code_able_to_decode(
        self, tables: Tables, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tables, "flight.paid", b'{"amount":"a lot"}')
        async with Shop(tables.url, pause_undecodable=True).bus:
            pass
        monkeypatch.setitem(upcasting._steps, "flight.paid", Upcaster(PaidV1, Paid, lambda old: Paid(0)))
        deployed = Shop(tables.url)
        async with deployed.bus:
            assert await deployed.bus.resume(PaidV1)
            await eventually(lambda: deployed.handled == [Paid(0)])
        assert tables.count("dead_letters") == 0


class TestReading:
    @pytest.fixture
    async def database(self, tables: Tables) -> AsyncIterator[Database]:
        database = Database(load_settings(database_url=tables.url))
        yield database
        await database.close()

    async def test_a_page_ends_before_its_bodies_are_too_many_bytes_but_never_before_its_first(
        self, tables: Tables, database: Database
    ) -> None:
        ids = put(tables, "flight.placed", *[b"x" * 1_000] * 5)
        put(tables, "flight.placed", b"x" * 1_000, deliver_by=PAST)
        page = Page(batch_size=10, batch_bytes=2_000)
        read: list[InFlight] = []
        while rows := await database.transaction(
            in_flight.oldest, "flight.placed", page, after=read[-1].seq if read else 0
        ):
            assert len(rows) == min(2, 5 - len(read))
            read += rows
        assert [row.id for row in read] == ids
        tiny = Page(batch_size=10, batch_bytes=1)
        newest = await database.transaction(in_flight.newest, "flight.placed", tiny, after=0)
        assert [row.id for row in newest] == [ids[-1]]

    async def test_waiting_messages_of_all_states_are_merged_in_order(self, tables: Tables, database: Database) -> None:
        ways: list[dict[str, Any]] = [{"owner": 5}, {}, {"due": LATER}, {}, {"owner": 5}, {"due": LATER}]
        ids = [put(tables, "flight.placed", GOOD, **way)[0] for way in ways]
        put(tables, "flight.shipped", GOOD)
        page = Page(batch_size=4, batch_bytes=1 << 20)
        oldest = await database.transaction(in_flight.oldest, "flight.placed", page)
        assert [row.id for row in oldest] == ids[:4]
        assert [row.is_scheduled for row in oldest] == [False, False, True, False]
        newest = await database.transaction(in_flight.newest, "flight.placed", page, after=oldest[-1].seq)
        assert [row.id for row in newest] == [ids[5], ids[4]]

    async def test_large_inbox_is_read_along_its_indexes(self, tables: Tables, database: Database) -> None:
        await tables.change(
            """INSERT INTO durable.incoming_envelopes (endpoint, id, message_type, source, correlation_id,
                content_type, body, sent_at, execution_time, owner_id)
            SELECT 'shop', gen_random_uuid(), 'flight.' || (ARRAY['placed', 'shipped', 'other'])[1 + n %% 3], 'e',
                gen_random_uuid(), 'application/json', '{"number":1}', now(),
                CASE WHEN n %% 2 = 0 THEN now() + interval '1 day' END, 0
            FROM generate_series(1, 20000) AS n"""
        )
        await tables.change("ANALYZE durable.incoming_envelopes")  # as autovacuum does after 5,000 rows
        for statement in (statements.READ_OLDEST, statements.READ_NEWEST):
            plan = await database.transaction(explained, statement)
            assert "incoming_unowned" in plan
            assert "incoming_scheduled" in plan
            assert "Seq Scan on incoming_envelopes" not in plan


def explained(conn: Connection, schema: str, statement: Statement) -> str:
    params = {"message_type": "flight.placed", "after": 0, "before": 10**9, "batch_size": 100, "batch_bytes": 10**6}
    plan = text(f"EXPLAIN {statement.within(schema).text}")
    return "\n".join(conn.execute(plan, {name: params[name] for name in plan.compile().params}).scalars())


@pytest.fixture
def agent(tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    monkeypatch.setenv("DURABLE_DATABASE_URL", tables.url)
    return Agent(tmp_path, monkeypatch, capsys)


HANDLES = """
@bus.handles(OrderPlaced)
async def place(order: OrderPlaced) -> None: ...
"""


class TestCommand:
    def test_run_ends_with_2_and_a_line_for_each_type(self, agent: Agent, tables: Tables) -> None:
        module = agent.application(HANDLES)
        [bad] = put(tables, f"{module}.order-placed", BAD)
        ended = agent("run", f"{module}:bus")
        assert ended.code == 2
        [first, last] = ended.err.splitlines()
        assert first.startswith(f"error: {module}.order-placed: 1 of 1 in flight does not decode: ")
        assert first.endswith(f"({bad})")
        assert last.startswith("error: deploy code or an upcaster")

    async def test_run_with_pause_undecodable_starts(self, agent: Agent, tables: Tables) -> None:
        module = agent.application(HANDLES)
        put(tables, f"{module}.order-placed", BAD)
        with agent.process("run", f"{module}:bus", "--pause-undecodable") as process:
            await eventually(lambda: tables.count("nodes") == 1)
            assert tables.one("SELECT key FROM durable.circuits") == f"{module}.order-placed"
            process.terminate()
            assert process.wait(10) == 0

    def test_check_pending_refuses_a_negative_number(self, agent: Agent) -> None:
        module = agent.application()
        ended = agent("run", f"{module}:bus", "--check-pending", "-1")
        assert (ended.code, "check_pending" in ended.err) == (2, True)


def test_check_and_refusal_are_the_defaults() -> None:
    settings = load_settings()
    assert (settings.check_pending, settings.pause_undecodable) == (1_000, False)
