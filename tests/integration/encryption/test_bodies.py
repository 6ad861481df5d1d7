"""Bodies on a running bus: readable nowhere but in a handler, and handled as if they were readable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from yarl import URL

from durable import Bus, Context, Keys, PutBack, Retry, message, upcaster
from durable.embedded.ports import free_port
from durable.envelope import Envelope, new_id
from durable.errors import InvalidSetting
from durable.messages.sealed import is_sealed, parted
from durable.outcomes import STORED, Duplicate
from durable.testing import eventually
from durable.transports.memory import MemoryTransport
from tests.failure.workbench import QUICK
from tests.support import canary, receivers
from tests.support.canary import CANARY
from tests.support.recording import recording
from tests.support.servers import AnyBroker
from tests.support.tables import Tables

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
HERE = "memory://shop"
NOWHERE = "tcp://127.0.0.1:1"
NEVER = Retry(immediate=0, delays=[])


@message("bodies.paid", encrypted=True)
class Paid(msgspec.Struct):
    number: int
    card: str = CANARY


@message("bodies.noted")
class Noted(msgspec.Struct):
    number: int
    note: str = "readable-kx7q"


@message("bodies.refunded", encrypted=True)
class Refunded(msgspec.Struct):
    number: int
    card: str = CANARY


@message("bodies.moved", encrypted=True)
class MovedV1(msgspec.Struct):
    number: str
    card: str = CANARY


@message("bodies.moved", version=2, encrypted=True)
class Moved(msgspec.Struct):
    number: int
    card: str = ""


@upcaster(MovedV1, to=Moved)
def to_number(old: MovedV1) -> Moved:
    return Moved(int(old.number), old.card)


def plain(message_type: str, message: Any, **changes: Any) -> Envelope:
    """An envelope with a readable body, of a peer."""
    body = message if isinstance(message, bytes) else msgspec.json.encode(message)
    made = receivers.envelope(message_type, body)
    return msgspec.structs.replace(made, **{"destination": HERE, **changes})


class Shop:
    """A bus with handlers of all of them, and what they have seen."""

    def __init__(self, url: str, keys: Keys | Callable[[], Keys] = Keys({"a": A}), **settings: Any) -> None:  # noqa: B008
        self.seen: list[Any] = []
        self.fails: dict[int, Exception] = {}
        self.bus = Bus("shop", url, **dict[str, Any]({**QUICK, "history_bodies": True, **settings}))
        self.bus.keys_from(keys if callable(keys) else lambda: keys)
        self.transport = MemoryTransport(self.bus.settings)
        self.bus.application.transports.append(self.transport)
        self.bus.listen(HERE)
        for cls in (Paid, Noted, Moved):
            self.bus.handles(cls, retry=NEVER)(self._handler(cls))

    def _handler(self, cls: type) -> Callable[..., Any]:
        async def handle(arrived: Any) -> None:
            if (error := self.fails.get(arrived.number)) is not None:
                raise error
            self.seen.append(arrived)

        handle.__annotations__["arrived"] = cls
        return handle

    async def send(self, *messages: Any, **options: Any) -> None:
        async with self.bus.unit_of_work():
            for each in messages:
                self.bus.send(each, **options)

    async def handled(self, *numbers: int) -> None:
        await eventually(lambda: len(self.seen) >= len(numbers), within=30, what=f"handling of {numbers}")
        assert sorted(each.number for each in self.seen) == sorted(numbers)

    async def arrive(self, *envelopes: Envelope) -> Any:
        return await self.transport.sender(HERE).send(list(envelopes))

    def sealed(self, number: int = 1, **changes: Any) -> Envelope:
        """An envelope as a peer with the same keys sends it."""
        return self.bus.application.ring.sealed([plain("bodies.paid", Paid(number), **changes)])[0]


@pytest.fixture
def log_text(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.DEBUG)
    return caplog


async def test_message_is_readable_in_its_handler_alone(tables: Tables, log_text: Any) -> None:
    shop = Shop(tables.url)
    shop.bus.route(Refunded, to=NOWHERE)
    shop.fails[3] = LookupError("no such payment")
    shop.bus.every("0 0 1 1 *", Paid(4), name="yearly")
    async with shop.bus:
        await shop.send(Paid(1))
        await shop.send(Paid(2), delay=0.2, key="order-1")
        await shop.send(Paid(3))
        await shop.send(Refunded(5))
        await shop.send(Paid(6), delay=3_600)
        await shop.bus.run_schedule("yearly")
        await eventually(lambda: tables.count("dead_letters") == 1)
        await eventually(lambda: len(shop.seen) >= 3)
        assert {each.card for each in shop.seen} == {CANARY}
    assert tables.count("outgoing_envelopes") == tables.count("incoming_envelopes") == 1
    assert tables.one("SELECT count(*) FROM durable.envelope_history WHERE body IS NOT NULL") >= 3
    assert canary.found(tables) == []
    assert canary.in_text(log_text.text) == []


async def test_scan_finds_readable_bodies(tables: Tables) -> None:
    """The scan of the tables sees a body that is not encrypted, in every place of a body."""
    shop = Shop(tables.url)
    shop.fails[2] = LookupError("no such note")
    shop.bus.route(Refunded, to=NOWHERE)
    async with shop.bus:
        await shop.send(Noted(1), Noted(2), Noted(3), delay=None)
        await eventually(lambda: len(shop.seen) == 2 and tables.count("dead_letters") == 1)
        await shop.send(Noted(4), delay=3_600)
        await shop.send(Noted(5), to=NOWHERE)
    places = ["dead_letters", "envelope_history", "incoming_envelopes", "outgoing_envelopes"]
    assert [each for each in canary.found(tables, "readable-kx7q") if each in places] == places


async def test_other_classes_stay_readable_unless_all_are_encrypted(tables: Tables) -> None:
    for everything, is_encrypted in ((False, False), (True, True)):
        tables.clear()
        shop = Shop(tables.url, encrypt_all=everything)
        async with shop.bus:
            await shop.send(Noted(1), delay=3_600)
        assert is_sealed(tables.one("SELECT body FROM durable.incoming_envelopes")) == is_encrypted


@pytest.mark.parametrize("transport", ["tcp", "http", "rabbitmq"])
async def test_body_is_readable_on_no_wire(
    tables: Tables, make_database: Callable[[str], str], request: pytest.FixtureRequest, transport: str
) -> None:
    settings: dict[str, Any] = {"history_bodies": True, **QUICK}
    async with AsyncExitStack() as stack:
        if transport == "rabbitmq":
            broker: AnyBroker = request.getfixturevalue("broker")
            queue = request.getfixturevalue("queue_name")()
            url = URL(broker.url)
            kept = await stack.enter_async_context(recording(url.host or "127.0.0.1", url.port or 5672))
            settings["amqp_url"] = str(url.with_host("127.0.0.1").with_port(kept.port))
            listens = to = f"rabbitmq://default/queue/{queue}"
        else:
            port = free_port()
            kept = await stack.enter_async_context(recording("127.0.0.1", port))
            listens, to = f"{transport}://127.0.0.1:{port}", f"{transport}://127.0.0.1:{kept.port}"
        seen: list[Any] = []
        billing = Bus("billing", tables.url, **settings)
        billing.keys_from(lambda: Keys({"b": B, "a": A}))  # it encrypts with another one
        billing.listen(listens)

        @billing.handles(Paid)
        async def pay(paid: Paid) -> None:
            seen.append(paid)

        @billing.handles(Noted)
        async def note(noted: Noted) -> None:
            seen.append(noted)

        orders = Bus("orders", make_database("orders"), **settings)
        orders.keys_from(lambda: Keys({"a": A}))
        orders.route(Paid, to=to)
        orders.route(Noted, to=to)
        async with billing, orders:
            async with orders.unit_of_work():
                orders.send(Paid(1), tenant="acme")
                orders.send(Paid(2), key="order-1")
                orders.send(Noted(3))
            await eventually(lambda: len(seen) == 3, within=60, what="handling")
        assert sorted(each.number for each in seen) == [1, 2, 3]
        assert [each.card for each in seen if isinstance(each, Paid)] == [CANARY] * 2
        assert tables.count("dead_letters") == 0
        assert b"readable-kx7q" in kept.bytes  # what is readable was recorded
        assert canary.in_text(bytes(kept.bytes)) == []
        assert canary.found(tables) == []


async def test_tenants_have_keys_of_their_own(tables: Tables) -> None:
    keys = Keys({"main": A, "acme-1": B, "globex-1": C}, tenants={"acme": "acme-1", "globex": "globex-1"})
    shop = Shop(tables.url, keys)
    async with shop.bus:
        for number, tenant in enumerate(("acme", "globex", "initech", None)):
            await shop.send(Paid(number), delay=3_600, tenant=tenant)
    rows = tables.rows("SELECT headers->>'tenant', body FROM durable.incoming_envelopes ORDER BY seq")
    used = {tenant: parts.key_id for tenant, body in rows if (parts := parted(body)) is not None}
    assert used == {"acme": "acme-1", "globex": "globex-1", "initech": "main", None: "main"}
    async with shop.bus:
        await tables.pass_time(timedelta(hours=2))
        await shop.handled(0, 1, 2, 3)


async def test_node_without_keys_refuses_to_start(tables: Tables) -> None:
    bus = Bus("shop", tables.url, **QUICK)
    bus.route(Paid, to=NOWHERE)
    with pytest.raises(InvalidSetting, match=r"no key is given, and bodies\.paid is declared with encrypted=True"):
        async with bus:
            pass
    everything = Bus("shop", tables.url, encrypt_all=True, **QUICK)
    with pytest.raises(InvalidSetting, match="no key is given, and encrypt_all is on"):
        async with everything:
            pass
    with pytest.raises(InvalidSetting, match="no key, and a message is to be encrypted"):
        async with everything.unit_of_work():
            everything.send(Paid(1), to=NOWHERE)
    assert tables.count("outgoing_envelopes") == 0


# ---------------------------------------------------------------- arrivals


async def test_readable_arrival_of_an_encrypted_class_is_stored_encrypted(tables: Tables) -> None:
    shop = Shop(tables.url)
    shop.fails[2] = LookupError("no")
    async with shop.bus:
        arrivals = [plain("bodies.paid", Paid(number)) for number in (1, 2)]
        assert await shop.arrive(*arrivals) == [STORED, STORED]
        await eventually(lambda: tables.count("dead_letters") == 1)
        await shop.handled(1)
        assert [type(each) for each in await shop.arrive(*arrivals)] == [Duplicate, Duplicate]
    assert canary.found(tables) == []


async def test_readable_arrival_without_a_key_holds_up_no_other(tables: Tables) -> None:
    """A class may be known to the process, and not handled by it; or the source of keys has none by now."""
    seen: list[int] = []
    bus = Bus("shop", tables.url, **QUICK)
    transport = MemoryTransport(bus.settings)
    bus.application.transports.append(transport)
    bus.listen(HERE)

    @bus.handles(Noted)
    async def note(noted: Noted) -> None:
        seen.append(noted.number)

    async with bus:
        batch = [plain("bodies.refunded", Refunded(1)), plain("bodies.noted", Noted(2))]
        assert await transport.sender(HERE).send(batch) == [STORED, STORED]
        await eventually(lambda: seen == [2])
    shop = Shop(tables.url, Keys())
    async with shop.bus:
        assert await shop.arrive(plain("bodies.paid", Paid(3))) == [STORED]
        await shop.handled(3)


async def test_repeat_under_a_new_key_is_a_duplicate_and_another_body_an_alarm(tables: Tables) -> None:
    shop = Shop(tables.url, Keys({"a": A, "b": B}))
    async with shop.bus:
        first = shop.sealed(1)
        assert await shop.arrive(first) == [STORED]
        again = msgspec.structs.replace(first, body=msgspec.json.encode(Paid(1)))
        newer = Shop(tables.url, Keys({"b": B, "a": A}))
        [repeat] = newer.bus.application.ring.sealed([again])
        assert repeat.body != first.body
        other = shop.sealed(17, id=first.id)
        outcomes = await shop.arrive(first, repeat, other)
        assert [(type(each), getattr(each, "other_body", None)) for each in outcomes] == [
            (Duplicate, False),
            (Duplicate, False),
            (Duplicate, True),
        ]
        await shop.handled(1)
    [reason] = tables.rows("SELECT reason FROM durable.dead_letters")
    assert reason == "another message was received under the same id before"


@pytest.mark.parametrize("to", [None, HERE], ids=["local", "remote"])
async def test_business_key_sent_again_after_a_rotation_is_one_message(tables: Tables, to: str | None) -> None:
    current = [Keys({"a": A})]
    shop = Shop(tables.url, lambda: current[0])
    async with shop.bus:
        await shop.send(Paid(1), id_from="invoice-1", to=to)
        await shop.handled(1)
        current[0] = Keys({"b": B, "a": A})
        shop.bus.application.ring.refresh()
        await shop.send(Paid(1), id_from="invoice-1", to=to)
        await shop.send(Paid(2), to=to)
        await shop.handled(1, 2)
        await eventually(lambda: tables.count("outgoing_envelopes") == 0)
    assert len(shop.seen) == 2
    assert tables.count("dead_letters") == 0


@pytest.mark.parametrize("size", [-1, 0, 1])
async def test_limit_counts_the_message_before_encryption(tables: Tables, size: int) -> None:
    limit = 1_000
    shop = Shop(tables.url, max_message_bytes=limit)
    body = msgspec.json.encode(Paid(1, "x" * (limit + size - len(msgspec.json.encode(Paid(1, ""))))))
    assert len(body) == limit + size
    async with shop.bus:
        sealed = shop.sealed(body=body)
        assert len(sealed.body) > limit
        await shop.arrive(sealed)
        if size <= 0:
            await shop.handled(1)
        else:
            await eventually(lambda: tables.count("dead_letters") == 1)
            assert "the body has 1001 bytes, more than max_message_bytes" in tables.dead_letters()[0][2]


# ---------------------------------------------------------------- forgeries


async def test_forged_body_is_a_dead_letter_with_its_cause(tables: Tables) -> None:
    shop = Shop(tables.url)
    shop.bus.route(Refunded, to=NOWHERE)
    async with shop.bus:
        good, other = shop.sealed(1), shop.sealed(2)
        third = shop.sealed(3)
        broken = bytearray(third.body)
        broken[-1] ^= 1
        acme = shop.sealed(5, headers={"tenant": "acme"})
        await shop.arrive(
            good,
            msgspec.structs.replace(other, id=new_id()),
            msgspec.structs.replace(third, body=bytes(broken)),
            msgspec.structs.replace(acme, headers={"tenant": "globex"}),
            msgspec.structs.replace(acme, id=new_id(), headers={}),
        )
        await eventually(lambda: tables.count("dead_letters") == 4)
        await shop.handled(1)
    letters = tables.dead_letters()
    assert {letter[1] for letter in letters} == {"durable.errors.Forged"}
    assert all("was changed on the way, or in the table" in letter[2] for letter in letters)


async def test_body_for_another_destination_is_refused_at_the_door(tables: Tables) -> None:
    shop = Shop(tables.url)
    async with shop.bus:
        elsewhere = shop.sealed(1, destination="tcp://billing:2301")
        await shop.arrive(msgspec.structs.replace(elsewhere, destination=HERE))
        await eventually(lambda: tables.count("dead_letters") == 1)
    [letter] = tables.dead_letters()
    assert letter[2] == "the encrypted body was sealed for another destination than its envelope names"


async def test_body_moved_between_rows_does_not_open(tables: Tables) -> None:
    shop = Shop(tables.url)
    async with shop.bus:
        await shop.send(Paid(1), delay=3_600)
        await shop.send(Paid(2), delay=3_600)
    await tables.change(
        "UPDATE durable.incoming_envelopes SET body = "
        "(SELECT body FROM durable.incoming_envelopes ORDER BY seq LIMIT 1)"
    )
    async with shop.bus:
        await tables.pass_time(timedelta(hours=2))
        await shop.handled(1)
        await eventually(lambda: tables.count("dead_letters") == 1)


async def test_reason_of_an_undecodable_body_quotes_nothing(tables: Tables, log_text: Any) -> None:
    shop = Shop(tables.url)
    async with shop.bus:
        await shop.arrive(shop.sealed(body=b'{"number": "canary-kx7q-0815"}'))
        await eventually(lambda: tables.count("dead_letters") == 1)
    assert "the encrypted body is no Paid" in tables.dead_letters()[0][2]
    assert canary.found(tables) == []
    assert canary.in_text(log_text.text) == []


# ---------------------------------------------------------------- with other features


async def test_older_version_is_upcast(tables: Tables) -> None:
    shop = Shop(tables.url)
    async with shop.bus:
        older = plain("bodies.moved", MovedV1("17"))
        await shop.arrive(shop.bus.application.ring.sealed([older])[0])
        await shop.handled(17)
    assert shop.seen == [Moved(17, CANARY)]


async def test_messages_of_a_key_stay_in_order(tables: Tables) -> None:
    shop = Shop(tables.url)
    async with shop.bus:
        for number in range(20):
            await shop.send(Paid(number), key="order-1")
        await shop.handled(*range(20))
    assert [each.number for each in shop.seen] == list(range(20))


async def test_group_holds_encrypted_and_readable_messages(tables: Tables) -> None:
    groups: list[list[int]] = []
    bus = Bus("shop", tables.url, **QUICK)
    bus.keys_from(lambda: Keys({"a": A}))
    transport = MemoryTransport(bus.settings)
    bus.application.transports.append(transport)
    bus.listen(HERE)

    @bus.handles(Noted, max_batch=10, concurrency=1)
    async def handle(notes: list[Noted]) -> None:
        groups.append([note.number for note in notes])

    async with bus:
        notes = [plain("bodies.noted", Noted(number)) for number in range(6)]
        mixed = [each if n % 2 else bus.application.ring.sealed([each])[0] for n, each in enumerate(notes)]
        await transport.sender(HERE).send(mixed)
        await eventually(lambda: sum(map(len, groups)) == 6)
    assert sorted(number for group in groups for number in group) == list(range(6))


async def test_put_back_message_is_sealed_for_its_new_tenant(tables: Tables) -> None:
    seen: list[Any] = []
    bus = Bus("shop", tables.url, **QUICK)
    bus.keys_from(lambda: Keys({"a": A, "b": B}, tenants={"globex": "b"}))

    @bus.handles(Paid)
    async def handle(paid: Paid, ctx: Context) -> None:
        if ctx.headers["tenant"] == "acme":
            raise PutBack(headers={"tenant": "globex"})
        seen.append(paid)

    async with bus:
        async with bus.unit_of_work():
            bus.send(Paid(1), tenant="acme")
        await eventually(lambda: seen == [Paid(1)])
    assert tables.count("dead_letters") == 0


async def test_expired_message_needs_no_key(tables: Tables) -> None:
    shop = Shop(tables.url)
    async with shop.bus:
        await shop.send(Paid(1), delay=3_600, deliver_by=timedelta(hours=1, seconds=30))
    other = Shop(tables.url, Keys({"b": B}))
    async with other.bus:
        await tables.pass_time(timedelta(hours=2))
        await eventually(lambda: tables.count("incoming_envelopes") == 0)
    assert tables.rows("SELECT outcome FROM durable.envelope_history") == ["expired"]
