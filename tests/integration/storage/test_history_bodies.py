"""The setting history_bodies: what is finished stays whole in the history, to be replayed from an archive of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from durable import Bus, Reject, Retry, message
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, NodeId
from durable.storage import dead_letters, inbox, leases, outbox
from durable.storage.dead_letters import LetterRange, Selection
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from durable.storage.rows import Letter
from durable.storage.sql.recovery import INCOMING, OUTGOING
from durable.testing import eventually
from tests.failure.leftovers import MESSAGE_TYPE, SCHEMA, envelope, transaction
from tests.support.tables import Tables, shared_tables

NODE = NodeId(1)
PEER = "tcp://127.0.0.1:2301"
LETTER = Letter.because("a test", "test")
WHOLE = msgspec.structs.replace(
    envelope(1, destination=PEER), headers={"a": "b"}, content_type="text/plain", body=b"\0"
)
PAST = datetime.now(UTC) - timedelta(seconds=1)


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def tables(database: Tables) -> Tables:
    database.clear()
    return database


def kept(tables: Tables) -> Any:
    return tables.one("SELECT side, outcome, content_type, headers, body FROM durable.envelope_history")


# ---------------------------------------------------------------- each of the ends


def send(conn: Connection, **changes: Any) -> None:
    outbox.store(conn, SCHEMA, [Sent(msgspec.structs.replace(WHOLE, **changes), None, ANY_NODE)])


def receive(conn: Connection, **changes: Any) -> None:
    inbox.store(conn, SCHEMA, [Arrival("billing", msgspec.structs.replace(WHOLE, **changes), ANY_NODE)])


def sent(conn: Connection, keep_body: bool) -> None:
    send(conn)
    outbox.delete_sent(conn, SCHEMA, NODE, outbox.claim(conn, SCHEMA, {PEER: 10}, node=NODE), keep_body=keep_body)


def rejected(conn: Connection, keep_body: bool) -> None:
    send(conn)
    claimed = outbox.claim(conn, SCHEMA, {PEER: 10}, node=NODE)
    outbox.dead_letter(conn, SCHEMA, NODE, [(lease, LETTER) for lease in claimed], keep_body=keep_body)


def handled(conn: Connection, keep_body: bool) -> None:
    receive(conn)
    inbox.finish_handled(conn, SCHEMA, NODE, inbox.claim(conn, SCHEMA, **of_type), keep_body=keep_body)


def failed(conn: Connection, keep_body: bool) -> None:
    receive(conn)
    (lease,) = inbox.claim(conn, SCHEMA, **of_type)
    inbox.dead_letter(conn, SCHEMA, NODE, lease, LETTER, keep_body=keep_body)


def handled_by_hand(conn: Connection, keep_body: bool) -> None:
    failed(conn, False)
    conn.exec_driver_sql("DELETE FROM durable.envelope_history")
    (letter,) = dead_letters.read(conn, SCHEMA, Selection(), LetterRange(0, 1 << 60, 1))
    assert dead_letters.handle(conn, SCHEMA, letter.summary.letter_id, actor="ada", keep_body=keep_body)


def expired(conn: Connection, keep_body: bool) -> None:
    receive(conn)
    (lease,) = inbox.claim(conn, SCHEMA, **of_type)
    conn.exec_driver_sql("UPDATE durable.incoming_envelopes SET deliver_by = now() - interval '1 second'")
    assert inbox.expire(conn, SCHEMA, NODE, lease, keep_body=keep_body)


def expired_unsent(conn: Connection, keep_body: bool) -> None:
    send(conn, deliver_by=PAST)
    assert leases.expire(conn, SCHEMA, OUTGOING, NODE, 10, keep_body=keep_body) == 1


def expired_before_sending(conn: Connection, keep_body: bool) -> None:
    send(conn)
    claimed = outbox.claim(conn, SCHEMA, {PEER: 10}, node=NODE)
    conn.exec_driver_sql("UPDATE durable.outgoing_envelopes SET deliver_by = now() - interval '1 second'")
    assert outbox.expire(conn, SCHEMA, NODE, claimed, keep_body=keep_body).expired == {WHOLE.id}


def expired_unclaimed(conn: Connection, keep_body: bool) -> None:
    receive(conn, deliver_by=PAST)
    assert leases.expire(conn, SCHEMA, INCOMING, NODE, 10, keep_body=keep_body) == 1


of_type: dict[str, Any] = {"message_type": MESSAGE_TYPE, "batch_size": 10, "node": NODE}
ENDS: dict[Callable[[Connection, bool], None], tuple[str, str]] = {
    sent: ("outgoing", "sent"),
    rejected: ("outgoing", "dead-lettered"),
    expired_unsent: ("outgoing", "expired"),
    expired_before_sending: ("outgoing", "expired"),
    handled: ("incoming", "handled"),
    handled_by_hand: ("incoming", "handled"),
    failed: ("incoming", "dead-lettered"),
    expired: ("incoming", "expired"),
    expired_unclaimed: ("incoming", "expired"),
}


@pytest.mark.parametrize("keep_body", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_history_keeps_the_body_only_when_configured(
    tables: Tables, end: Callable[[Connection, bool], None], keep_body: bool
) -> None:
    with transaction(tables.url) as conn:
        end(conn, keep_body)

    whole = (WHOLE.content_type, WHOLE.headers, WHOLE.body) if keep_body else (None, None, None)
    assert kept(tables) == (*ENDS[end], *whole)


# ---------------------------------------------------------------- as the setting says


@message("history.counted")
class Counted(msgspec.Struct):
    number: int


@pytest.mark.parametrize("setting", [{"history_bodies": True}, {}], ids=["on", "by default off"])
async def test_a_node_keeps_bodies_as_its_setting_says(tables: Tables, setting: dict[str, Any]) -> None:
    bus = Bus("counting", database=tables.url, **setting)

    @bus.handles(Counted, retry=Retry.never())
    async def count(counted: Counted) -> None:
        if counted.number == 2:
            raise Reject("two is none of ours")

    async with bus:
        async with bus.unit_of_work():
            for number in (1, 2):
                bus.send(Counted(number), headers={"number": str(number)})
        await eventually(lambda: tables.count("envelope_history") == 2)

    bodies = tables.rows("SELECT outcome, content_type, headers, body FROM durable.envelope_history ORDER BY outcome")
    if setting:
        assert bodies == [
            ("dead-lettered", "application/json", {"number": "2"}, b'{"number":2}'),
            ("handled", "application/json", {"number": "1"}, b'{"number":1}'),
        ]
    else:
        assert [row[1:] for row in bodies] == [(None, None, None)] * 2
