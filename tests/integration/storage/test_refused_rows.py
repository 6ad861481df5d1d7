"""The row that the database refuses never takes its batch along: every statement over many rows, one poison in each.

A trigger refuses what `poison` names: an operation on a table, for one id. The neighbours must proceed, and the poison
must be reported: as a dead letter, by a mark where it cannot become one, and in the log where nothing can be changed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import psycopg
import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from durable.agents.settling import pause_and_release
from durable.application.retry import Pause
from durable.embedded import Embedded
from durable.envelope import ANY_NODE, LeasedEnvelope, NodeId
from durable.errors import StorageUnavailable
from durable.messages.ordering import FREE, QueueKeys
from durable.settings import load_settings
from durable.storage import (
    circuits,
    dead_letters,
    delayed,
    expiry,
    inbox,
    isolation,
    leases,
    maintenance,
    ordering,
    outbox,
    trials,
)
from durable.storage.circuits import CircuitKind
from durable.storage.database import Database
from durable.storage.dead_letters import LetterRange, Selection
from durable.storage.inbox import Arrival, Lateness
from durable.storage.leases import Burials
from durable.storage.ordering import Share, Turn, Turns
from durable.storage.outbox import Sent
from durable.storage.rows import Letter
from durable.storage.sql import dead_letters as letter_statements
from durable.storage.sql import housekeeping
from durable.storage.sql.recovery import INCOMING, OUTGOING, REFUSED_OWNER, Recovery
from tests.failure.leftovers import MESSAGE_TYPE, envelope
from tests.support.tables import Tables, refusing_statements, shared_tables

REFUSE = """
CREATE TABLE poison (id uuid, operation text, code text NOT NULL DEFAULT '54000');
CREATE FUNCTION refuse_poison() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    row_id uuid := CASE TG_OP WHEN 'INSERT' THEN NEW.id ELSE OLD.id END;
    chosen text := (
        SELECT min(code) FROM public.poison WHERE id = row_id AND operation = TG_ARGV[0] || ' ' || TG_OP);
BEGIN
    IF chosen IS NOT NULL THEN
        RAISE EXCEPTION 'poison' USING ERRCODE = chosen, DETAIL = 'business data';
    END IF;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$;
"""
TABLES = (
    "outgoing_envelopes", "incoming_envelopes", "dead_letters", "envelope_history", "failed_attempts", "undated_ids",
    "received_ids",
)  # fmt: skip
NODE = NodeId(7)
PEER = "tcp://127.0.0.1:2301"
COUNT = 7
LETTER = Letter.because("a test", "test")
SIDES = ("outgoing", "incoming")
ROWS = {"outgoing": OUTGOING, "incoming": INCOMING}


class Way(NamedTuple):
    """When the trigger refuses, and the driver of the agents."""

    at: str
    driver: str


WAYS = [Way("at once", "asyncpg"), Way("at once", "psycopg"), Way("at COMMIT", "asyncpg")]


@pytest.fixture(scope="module", params=WAYS, ids=[" ".join(way) for way in WAYS])
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture(scope="module")
def poisoned(servers: Callable[[int], Embedded], way: Way) -> Iterator[Tables]:
    at_once = way.at == "at once"
    kind, when = ("TRIGGER", "BEFORE") if at_once else ("CONSTRAINT TRIGGER", "AFTER")
    with shared_tables(servers(18)) as tables:
        tables.execute(REFUSE)
        for table in TABLES:
            tables.execute(
                f"CREATE {kind} refuse_poison {when} INSERT OR UPDATE OR DELETE ON durable.{table} "
                f"{'' if at_once else 'DEFERRABLE INITIALLY DEFERRED'} FOR EACH ROW "
                f"EXECUTE FUNCTION refuse_poison('{table}')"
            )
        yield tables


@pytest.fixture
def tables(poisoned: Tables) -> Tables:
    poisoned.execute("DELETE FROM poison")
    poisoned.clear()
    return poisoned


@pytest.fixture
async def database(tables: Tables, way: Way) -> AsyncIterator[Database]:
    through = make_url(tables.url).set(drivername=f"postgresql+{way.driver}")
    database = Database(load_settings(database_url=through.render_as_string(hide_password=False)))
    yield database
    await database.close()


def plant(tables: Tables, poison: UUID, *operations: str) -> None:
    for operation in operations:
        tables.execute("INSERT INTO poison VALUES (%s, %s)", poison, operation)


def free(number: int) -> QueueKeys:
    return FREE


def key_of_its_own(number: int) -> QueueKeys:
    return QueueKeys(f"key {number}")


def one_key(number: int) -> QueueKeys:
    return QueueKeys("key")


def tenant_of_its_own(number: int) -> QueueKeys:
    return QueueKeys(None, f"tenant {number}")


async def given(
    database: Database, side: str, owner: NodeId = NODE, place: Callable[[int], QueueKeys] = free
) -> list[LeasedEnvelope]:
    """Rows of this side, owned by this node, as leases."""
    made = [msgspec.structs.replace(envelope(n, destination=PEER), body=b"{}") for n in range(COUNT)]
    if side == "outgoing":
        await database.transaction(outbox.store, [Sent(each, None, owner, place(n)) for n, each in enumerate(made)])
        return [LeasedEnvelope(each, endpoint=PEER) for each in made]
    await database.transaction(inbox.store, [Arrival("billing", each, owner, place(n)) for n, each in enumerate(made)])
    return [LeasedEnvelope(each, endpoint="billing") for each in made]


class Batch(NamedTuple):
    """A statement over rows of one side: their state before it, what it does to them, and how it is run."""

    side: str
    state: str
    operation: str
    run: Callable[[Database, Sequence[LeasedEnvelope]], Any]
    place: Callable[[int], QueueKeys] = free


def keys(owned: Sequence[LeasedEnvelope]) -> list[Any]:
    return [lease.key for lease in owned]


def each(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[[Database, Sequence[LeasedEnvelope]], Any]:
    """A statement over one message, for one after another, as an agent settles them."""

    async def run(database: Database, owned: Sequence[LeasedEnvelope]) -> None:
        for lease in owned:
            await database.transaction(function, NODE, lease, *args, **kwargs)

    return run


OWNED, UNOWNED, DUE, LATE = (
    "owner_id = 7",
    "owner_id = 0",
    "owner_id = 0, execution_time = now() - interval '1 hour'",
    "owner_id = 0, deliver_by = now() - interval '1 hour'",
)
LATE_OWNED = "owner_id = 7, deliver_by = now() - interval '1 hour'"
PAUSE = Pause(timedelta(minutes=1), "a test", listener=False)


def of_recovery(side: str, table: Recovery) -> dict[str, Batch]:
    return {
        "promote": Batch(side, DUE, "UPDATE", lambda db, _: db.transaction(leases.promote_due, table, 100)),
        "expire": Batch(side, LATE, "DELETE", lambda db, _: db.transaction(leases.expire, table, NODE, 100)),
        "release a dead node's": Batch(
            side, OWNED, "UPDATE", lambda db, _: db.transaction(leases.release_dormant, table, NODE, 100)
        ),
        "release all": Batch(side, OWNED, "UPDATE", lambda db, _: db.transaction(leases.release_all, table, NODE)),
        "hand back": Batch(
            side, OWNED, "UPDATE", lambda db, owned: db.transaction(leases.release, table, NODE, keys(owned))
        ),
    }


KEYS = [f"key {number}" for number in range(COUNT)]


def claim_keys(database: Database, side: str, keys: Sequence[str]) -> Any:
    types = {} if side == "outgoing" else {MESSAGE_TYPE: MESSAGE_TYPE}
    turns = Turns([Turn(key, PEER if side == "outgoing" else None) for key in keys], types)
    return database.transaction(ordering.claim, turns, batch_size=100, node=NODE)


def share(lane: str) -> Share:
    return Share(lane, "", {}, 100)


BATCHES: dict[str, Batch] = {
    "claim keys to send": Batch(
        "outgoing", UNOWNED, "UPDATE", lambda db, _: claim_keys(db, "outgoing", KEYS), key_of_its_own
    ),
    "claim keys to handle": Batch(
        "incoming", UNOWNED, "UPDATE", lambda db, _: claim_keys(db, "incoming", KEYS), key_of_its_own
    ),
    "claim shares to send": Batch(
        "outgoing", UNOWNED, "UPDATE",
        lambda db, _: db.transaction(ordering.claim_outgoing_shares, share(PEER), node=NODE), tenant_of_its_own,
    ),
    "claim shares to handle": Batch(
        "incoming", UNOWNED, "UPDATE",
        lambda db, _: db.transaction(ordering.claim_shares, share(MESSAGE_TYPE), node=NODE), tenant_of_its_own,
    ),
    "claim outgoing": Batch(
        "outgoing", UNOWNED, "UPDATE",
        lambda db, _: db.transaction(outbox.claim, {PEER: 100}, node=NODE),
    ),
    "claim outgoing by a statement": Batch(
        "outgoing", UNOWNED, "UPDATE",
        lambda db, _: db.statement(outbox.claim_alone, {PEER: 100}, node=NODE),
    ),
    "claim incoming": Batch(
        "incoming", UNOWNED, "UPDATE",
        lambda db, _: db.transaction(inbox.claim, message_type=MESSAGE_TYPE, batch_size=100, node=NODE),
    ),
    "claim incoming by a statement": Batch(
        "incoming", UNOWNED, "UPDATE",
        lambda db, _: db.statement(inbox.claim_alone, message_type=MESSAGE_TYPE, batch_size=100, node=NODE),
    ),
    "delete what was sent": Batch(
        "outgoing", OWNED, "DELETE", lambda db, owned: db.transaction(outbox.delete_sent, NODE, owned)
    ),
    "expire before it is sent": Batch(
        "outgoing", LATE_OWNED, "DELETE", lambda db, owned: db.transaction(outbox.expire, NODE, owned)
    ),
    "dead-letter what the peer rejects": Batch(
        "outgoing", OWNED, "DELETE",
        lambda db, owned: db.transaction(outbox.dead_letter, NODE, [(lease, LETTER) for lease in owned]),
    ),
    "put off": Batch("incoming", OWNED, "UPDATE", each(inbox.retry_later, delay=timedelta(hours=1))),
    "dead-letter": Batch("incoming", OWNED, "DELETE", each(inbox.dead_letter, LETTER)),
    "expire before it is handled": Batch("incoming", LATE_OWNED, "DELETE", each(inbox.expire)),
    "count a suspect attempt": Batch("incoming", OWNED, "UPDATE", each(inbox.begin_suspect_attempt)),
    "pause and release": Batch(
        "incoming", OWNED, "UPDATE",
        lambda db, owned: each_paused(db, owned),
    ),
    **{f"{name} {side}": batch for side in SIDES for name, batch in of_recovery(side, ROWS[side]).items()},
}  # fmt: skip


async def each_paused(database: Database, owned: Sequence[LeasedEnvelope]) -> None:
    for lease in owned:
        await database.transaction(pause_and_release, NODE, MESSAGE_TYPE, lease, PAUSE)


def found(tables: Tables, side: str) -> dict[UUID, Any]:
    rows = tables.rows(f"SELECT id, owner_id, epoch, attempts, execution_time FROM durable.{side}_envelopes")
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("refused", ["the change", "the history", "everything"])
@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("name", BATCHES)
async def test_refused_row_is_put_aside_and_its_neighbours_proceed(
    database: Database,
    tables: Tables,
    caplog: pytest.LogCaptureFixture,
    name: str,
    position: int,
    refused: str,
) -> None:
    side, state, operation, run, place = BATCHES[name]
    if refused == "the history" and operation != "DELETE":
        return  # it writes none
    owned = await given(database, side, place=place)
    await tables.change(f"UPDATE durable.{side}_envelopes SET {state}")
    poison = owned[position].envelope.id
    table = f"{side}_envelopes"
    plant(
        tables,
        poison,
        *{
            "the change": [f"{table} {operation}"],
            "the history": ["envelope_history INSERT"],
            "everything": [f"{table} UPDATE", f"{table} DELETE", "dead_letters INSERT"],
        }[refused],
    )
    before = found(tables, side)

    await run(database, owned)

    after = found(tables, side)
    stuck = [number for number, lease in enumerate(owned) if after.get(lease.envelope.id) == before[lease.envelope.id]]
    assert stuck == ([position] if refused == "everything" else []), "a neighbour did not proceed"
    letters = tables.rows("SELECT id FROM durable.dead_letters WHERE exception_type = 'refused by the database'")
    marked = poison in after and after[poison][0] == REFUSED_OWNER
    assert (letters == [poison]) + marked == (0 if refused == "everything" else 1), "it is put aside, once"
    assert "the database refuses to" in caplog.text
    assert str(poison) in caplog.text
    assert "business data" not in caplog.text


@pytest.mark.parametrize("name", ["claim outgoing", "claim incoming"])
async def test_many_refused_rows_are_put_aside_by_several_transactions_when_each_takes_long(
    database: Database, tables: Tables, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(isolation, "_SINGLING_OUT", -1.0)
    side, state, operation, run, place = BATCHES[name]
    owned = await given(database, side, place=place)
    await tables.change(f"UPDATE durable.{side}_envelopes SET {state}")
    for lease in owned:
        plant(tables, lease.envelope.id, f"{side}_envelopes {operation}")

    await run(database, owned)
    assert 0 < tables.count("dead_letters") < COUNT
    for _ in range(COUNT):
        await run(database, owned)

    assert tables.count("dead_letters") == COUNT


BURIALS = {
    "unowned": Batch(
        "incoming", LATE, "UPDATE", lambda db, _: db.transaction(expiry.bury, INCOMING, NODE, 100, Burials(others=True))
    ),
    "owned": Batch("incoming", LATE_OWNED, "UPDATE", each(expiry.bury_incoming, lateness=Lateness(timedelta(hours=1)))),
}


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("name", BURIALS)
async def test_late_message_is_a_dead_letter_when_its_id_refuses_the_deadline(
    database: Database, tables: Tables, caplog: pytest.LogCaptureFixture, name: str, position: int
) -> None:
    side, state, operation, run, place = BURIALS[name]
    owned = await given(database, side, place=place)
    await tables.change(f"UPDATE durable.incoming_envelopes SET {state}")
    late = datetime.now(UTC) - timedelta(hours=1)
    poison = owned[position].envelope.id
    plant(tables, poison, f"received_ids {operation}")

    await run(
        database,
        [
            msgspec.structs.replace(lease, envelope=msgspec.structs.replace(lease.envelope, deliver_by=late))
            for lease in owned
        ],
    )

    assert tables.count("incoming_envelopes") == 0
    assert tables.rows("SELECT exception_type FROM durable.dead_letters") == ["expired"] * COUNT
    assert tables.rows("SELECT id FROM durable.received_ids WHERE expired IS NULL") == [poison]
    assert caplog.text.count("the database refuses to") == 1
    assert str(poison) in caplog.text
    assert "business data" not in caplog.text


@pytest.mark.parametrize("refused", ["the change", "the change and the letter", "everything"])
@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("side", SIDES)
async def test_refused_row_of_one_order_is_put_aside_and_those_behind_are_claimed_in_turn(
    database: Database, tables: Tables, side: str, position: int, refused: str
) -> None:
    owned = await given(database, side, ANY_NODE, one_key)
    ids = [lease.envelope.id for lease in owned]
    table = f"{side}_envelopes"
    operations = {
        "the change": [f"{table} UPDATE"],
        "the change and the letter": [f"{table} UPDATE", "dead_letters INSERT"],
        "everything": [f"{table} UPDATE", f"{table} DELETE"],
    }[refused]
    plant(tables, ids[position], *operations)
    claimed: list[UUID] = []
    finish: Callable[..., Any] = inbox.finish_handled if side == "incoming" else outbox.delete_sent
    for _ in range(2 * COUNT):
        leases_now = (await claim_keys(database, side, ["key"])).leases
        claimed += [lease.envelope.id for lease in leases_now]
        if leases_now:
            await database.transaction(finish, NODE, leases_now)

    is_stuck = refused != "the change"
    assert claimed == ids[:position] + ([] if is_stuck else ids[position + 1 :])
    assert tables.rows("SELECT id FROM durable.dead_letters") == ([] if is_stuck else [ids[position]])


@pytest.mark.parametrize("place", [free, key_of_its_own, tenant_of_its_own, one_key])
@pytest.mark.parametrize("position", [0, 3])
async def test_refused_row_keeps_no_trial_from_the_others(
    database: Database, tables: Tables, position: int, place: Callable[[int], QueueKeys]
) -> None:
    owned = await given(database, "incoming", ANY_NODE, place)
    poison = owned[position].envelope.id
    plant(tables, poison, "incoming_envelopes UPDATE")
    looked, tried = trials.Looked(), []
    for _ in range(2 * COUNT):
        await database.transaction(
            circuits.open_circuit, CircuitKind.HANDLER, MESSAGE_TYPE, reason="down", actor="a", duration=timedelta(0)
        )
        trial = await database.transaction(
            trials.claim_trial, handler=MESSAGE_TYPE, message_type=MESSAGE_TYPE, node=NODE, lease=timedelta(0),
            looked=looked,
        )  # fmt: skip
        looked = trial.looked
        if trial.lease is not None:
            tried.append(trial.lease.envelope.id)
            await database.transaction(inbox.finish_handled, NODE, [trial.lease])

    assert sorted(tried) == sorted(lease.envelope.id for lease in owned if lease.envelope.id != poison)
    assert tables.rows("SELECT id FROM durable.dead_letters") == [poison]


# ---------------------------------------------------------------- codes

PASSING = ("08", "25", "26000", "28", "3D", "40", "42P05", "53", "55006", "55P", "57", "58")
MISSING = ("42P01", "42703", "42883")
STANDARD = {str(getattr(kind, "sqlstate", "")) for kind in vars(psycopg.errors).values() if isinstance(kind, type)}
NO_ERRORS = ("00", "01", "02")
"""Classes of success and warnings: asyncpg's exceptions for them cannot pass a context manager."""
CODES = sorted(
    {code for code in STANDARD if re.fullmatch("[0-9A-Z]{5}", code) and not code.startswith(NO_ERRORS)}
    | {"45000", "AC001", "99999", "ZZZZZ"}
)


@pytest.mark.parametrize("code", CODES)
async def test_row_is_blamed_for_any_code_except_passing_and_missing_object_codes(
    database: Database, tables: Tables, code: str
) -> None:
    owned = await given(database, "incoming", ANY_NODE)
    poison = owned[3].envelope.id
    tables.execute("INSERT INTO poison VALUES (%s, 'incoming_envelopes UPDATE', %s)", poison, code)
    claim = database.transaction(inbox.claim, message_type=MESSAGE_TYPE, batch_size=100, node=NODE)

    if code.startswith((*PASSING, *MISSING)):
        with pytest.raises(DBAPIError if code in MISSING else StorageUnavailable):
            await claim
        assert tables.count("dead_letters") == 0
        return
    assert len(await claim) == COUNT - 1
    assert tables.rows("SELECT id FROM durable.dead_letters") == [poison]


@pytest.mark.parametrize("place", [free, key_of_its_own, tenant_of_its_own])
@pytest.mark.parametrize("code", ["42501", "0A000", "42601", "3F000"])
async def test_code_met_by_every_row_puts_none_aside(
    database: Database, tables: Tables, code: str, place: Callable[[int], QueueKeys]
) -> None:
    for lease in await given(database, "incoming", ANY_NODE, place):
        tables.execute("INSERT INTO poison VALUES (%s, 'incoming_envelopes UPDATE', %s)", lease.envelope.id, code)
    claims: dict[Callable[[int], QueueKeys], Callable[[], Awaitable[object]]] = {
        free: lambda: database.transaction(inbox.claim, message_type=MESSAGE_TYPE, batch_size=100, node=NODE),
        key_of_its_own: lambda: claim_keys(database, "incoming", KEYS),
        tenant_of_its_own: lambda: database.transaction(ordering.claim_shares, share(MESSAGE_TYPE), node=NODE),
    }

    with pytest.raises(DBAPIError):
        await claims[place]()

    assert tables.count("dead_letters") == 0
    assert tables.count("incoming_envelopes") == COUNT


@pytest.mark.parametrize("is_general", [True, False])
async def test_single_row_is_blamed_when_the_statement_works_over_no_rows(
    database: Database, tables: Tables, is_general: bool
) -> None:
    first, *others = await given(database, "incoming", ANY_NODE)
    await database.transaction(inbox.finish_handled, ANY_NODE, others)
    level = "STATEMENT" if is_general else "ROW"
    tables.execute(
        "CREATE OR REPLACE FUNCTION forbid() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no right' USING ERRCODE = '42501'; END $$"
    )
    tables.execute(
        f"CREATE TRIGGER forbid BEFORE UPDATE ON durable.incoming_envelopes FOR EACH {level} EXECUTE FUNCTION forbid()"
    )
    try:
        claim = database.transaction(inbox.claim, message_type=MESSAGE_TYPE, batch_size=100, node=NODE)
        if is_general:
            with pytest.raises(DBAPIError):
                await claim
        else:
            assert await claim == []
    finally:
        tables.execute("DROP TRIGGER forbid ON durable.incoming_envelopes")
    assert tables.rows("SELECT id FROM durable.dead_letters") == ([] if is_general else [first.envelope.id])


@pytest.mark.parametrize("code", ["42501", "0A000"])
@pytest.mark.parametrize(
    "later", [range(3, 3 + count) for count in range(6)] + [range(4, 5 + count) for count in range(12)], ids=str
)
@pytest.mark.parametrize("name", ["claim outgoing", "claim incoming by a statement", "delete what was sent"])
async def test_right_coming_back_between_statements_puts_no_row_aside(
    database: Database, tables: Tables, name: str, later: range, code: str
) -> None:
    """The first two refusals lead to tries of halves, and the third statement is the one over no rows."""
    side, state, operation, run, _ = BATCHES[name]
    owned = await given(database, side)
    await tables.change(f"UPDATE durable.{side}_envelopes SET {state}")
    with refusing_statements(tables, f"{operation} ON durable.{side}_envelopes", [1, 2, *later], code):
        for _ in range(2 + len(later)):
            with suppress(DBAPIError):
                await run(database, owned)
                break
    assert tables.count("dead_letters") == 0
    rows = found(tables, side).values()
    assert {row[0] for row in rows} == (set() if operation == "DELETE" else {NODE})


async def test_uncountable_attempt_does_not_prevent_the_sending(database: Database, tables: Tables) -> None:
    owned = await given(database, "outgoing")
    plant(tables, owned[3].envelope.id, "outgoing_envelopes UPDATE")

    await database.transaction(outbox.count_failed_attempt, NODE, owned)

    assert sorted(tables.rows("SELECT attempts FROM durable.outgoing_envelopes")) == [0, *[1] * (COUNT - 1)]
    assert tables.count("dead_letters") == 0


async def test_marked_row_has_no_owner_until_an_operator_frees_the_row(database: Database, tables: Tables) -> None:
    owned = await given(database, "incoming")
    poison = owned[0].envelope.id
    plant(tables, poison, "incoming_envelopes DELETE")
    await database.transaction(inbox.dead_letter, NODE, owned[0], LETTER)

    assert await database.transaction(leases.owners, INCOMING) == {NODE}, "it has no owner to be found dead"
    assert poison not in {lease[0] for lease in await database.transaction(leases.owned_by, INCOMING, NODE)}
    tables.execute("DELETE FROM poison")
    tables.execute("UPDATE durable.incoming_envelopes SET owner_id = 0 WHERE owner_id = %s", REFUSED_OWNER)
    claimed = await database.transaction(inbox.claim, message_type=MESSAGE_TYPE, batch_size=9, node=NODE)
    assert [lease.envelope.id for lease in claimed] == [poison]


# ---------------------------------------------------------------- what operators do

ALL, WHOLE = Selection(), LetterRange(0, 2**62, 100)
OPERATIONS: dict[str, tuple[str, Callable[[Database], Any]]] = {
    "replay": ("incoming_envelopes INSERT", lambda db: db.transaction(dead_letters.replay, ALL, WHOLE, actor="ada")),
    "discard": (
        "dead_letters UPDATE",
        lambda db: db.transaction(dead_letters.discard, ALL, WHOLE, actor="ada", reason="a test"),
    ),
}
WAITING: dict[str, tuple[str, Callable[[Database], Any]]] = {
    "cancel": (
        "DELETE",
        lambda db: db.transaction(
            delayed.cancel, delayed.Selection(), WHOLE, side="incoming", actor="ada", reason="a test"
        ),
    ),
    "run now": (
        "UPDATE", lambda db: db.transaction(delayed.run_now, delayed.Selection(), WHOLE, side="incoming"),
    ),
    "reschedule": (
        "UPDATE",
        lambda db: db.transaction(
            delayed.reschedule, delayed.Selection(), WHOLE, side="incoming",
            at=datetime.now(UTC) + timedelta(hours=2), dedupe_window=timedelta(days=7),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
async def test_letter_refused_by_the_database_is_left_and_the_others_are_resolved(
    database: Database, tables: Tables, name: str
) -> None:
    operation, run = OPERATIONS[name]
    owned = await given(database, "incoming")
    for lease in owned:
        await database.transaction(inbox.dead_letter, NODE, lease, LETTER)
    poison = owned[3].envelope.id
    plant(tables, poison, operation)

    resolved = await run(database)

    assert (len(resolved.done), len(resolved.left)) == (COUNT - 1, 1)
    assert tables.one("SELECT id FROM durable.dead_letters WHERE resolved_at IS NULL") == poison


@pytest.mark.parametrize("name", WAITING)
async def test_delayed_message_refused_by_the_database_is_left_and_the_others_are_changed(
    database: Database, tables: Tables, name: str
) -> None:
    operation, run = WAITING[name]
    owned = await given(database, "incoming")
    await tables.change(
        "UPDATE durable.incoming_envelopes SET owner_id = 0, execution_time = now() + interval '1 hour'"
    )
    plant(tables, owned[3].envelope.id, f"incoming_envelopes {operation}")
    before = found(tables, "incoming")

    resolved = await run(database)

    assert (len(resolved.done), len(resolved.left)) == (COUNT - 1, 1)
    after = found(tables, "incoming")
    assert [
        number for number, lease in enumerate(owned) if after.get(lease.envelope.id) == before[lease.envelope.id]
    ] == [3]


# ---------------------------------------------------------------- purges

OLD = "now() - interval '400 days'"
FILL = {
    "dead_letters": "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = " + OLD,
    "failed_attempts": "INSERT INTO durable.failed_attempts (id, endpoint, number, failed_at, node_id, exception_type, "
    f"reason, traceback) SELECT id, address, 1, {OLD}, 7, 'a', 'b', 'c' FROM durable.dead_letters",
    "undated_ids": "INSERT INTO durable.undated_ids (id, endpoint, message_digest, received_at, sent_at) "
    f"SELECT id, address, 0, {OLD}, now() FROM durable.dead_letters",
    "envelope_history": f"UPDATE durable.envelope_history SET finished_at = {OLD}",
}
PURGES = {
    "dead_letters": letter_statements.PURGE_LETTERS,
    "failed_attempts": letter_statements.PURGE_ATTEMPTS,
    "undated_ids": housekeeping.PURGE_UNDATED_IDS,
    "envelope_history": housekeeping.PURGE_DEFAULT_HISTORY,
}


@pytest.mark.parametrize("table", PURGES)
async def test_row_refusing_its_purge_keeps_no_other(
    database: Database, tables: Tables, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    owned = await given(database, "incoming")
    for lease in owned:
        await database.transaction(inbox.dead_letter, NODE, lease, LETTER)
    await tables.change(FILL[table])
    poison = owned[0].envelope.id
    plant(tables, poison, f"{table} DELETE")

    await database.transaction(maintenance.purge, PURGES[table], keep=timedelta(days=30))

    assert tables.rows(f"SELECT id FROM durable.{table}") == [poison]
    assert "the database refuses to purge" in caplog.text
