"""The row that the database refuses never takes its batch along: every statement over many rows, one poison in each.

A trigger refuses what `poison` names: an operation on a table, for one id. The neighbours must proceed, and the poison
must be reported: as a dead letter, by a mark where it cannot become one, and in the log where nothing can be changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import make_url

from durable.embedded import Embedded
from durable.envelope import Leased, NodeId
from durable.retry import Pause
from durable.settings import load_settings
from durable.settling import pause_and_release
from durable.storage import dead_letters, delayed, housekeeping, inbox, leases, letter_statements, maintenance, outbox
from durable.storage.database import Database
from durable.storage.dead_letters import Selection, Stretch
from durable.storage.inbox import Arrival
from durable.storage.outbox import Sent
from durable.storage.recovery_statements import INCOMING, OUTGOING, REFUSED_OWNER, Recovery
from durable.storage.rows import Letter
from tests.failure.leftovers import MESSAGE_TYPE, envelope
from tests.support.tables import Tables, shared_tables

REFUSE = """
CREATE TABLE poison (id uuid, operation text);
CREATE FUNCTION refuse_poison() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE row_id uuid := CASE TG_OP WHEN 'INSERT' THEN NEW.id ELSE OLD.id END;
BEGIN
    IF EXISTS (SELECT FROM public.poison WHERE id = row_id AND operation = TG_ARGV[0] || ' ' || TG_OP) THEN
        RAISE EXCEPTION 'poison' USING ERRCODE = 'program_limit_exceeded', DETAIL = 'business data';
    END IF;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END $$;
"""
TABLES = (
    "outgoing_envelopes", "incoming_envelopes", "dead_letters", "envelope_history", "failed_attempts", "undated_ids",
)  # fmt: skip
NODE = NodeId(7)
PEER = "tcp://127.0.0.1:2301"
COUNT = 7
LETTER = Letter.because("a test", "test")
SIDES = ("outgoing", "incoming")
ROWS = {"outgoing": OUTGOING, "incoming": INCOMING}


@pytest.fixture(scope="module")
def poisoned(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        tables.execute(REFUSE)
        for table in TABLES:
            tables.execute(
                f"CREATE TRIGGER refuse_poison BEFORE INSERT OR UPDATE OR DELETE ON durable.{table} FOR EACH ROW "
                f"EXECUTE FUNCTION refuse_poison('{table}')"
            )
        yield tables


@pytest.fixture
def tables(poisoned: Tables) -> Tables:
    poisoned.execute("DELETE FROM poison")
    poisoned.clear()
    return poisoned


@pytest.fixture(params=["asyncpg", "psycopg"])
async def database(tables: Tables, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    through = make_url(tables.url).set(drivername=f"postgresql+{request.param}")
    database = Database(load_settings(database_url=through.render_as_string(hide_password=False)))
    yield database
    await database.close()


def plant(tables: Tables, poison: UUID, *operations: str) -> None:
    for operation in operations:
        tables.execute("INSERT INTO poison VALUES (%s, %s)", poison, operation)


async def given(database: Database, side: str, owner: NodeId = NODE) -> list[Leased]:
    """Rows of this side, owned by this node, as leases."""
    made = [msgspec.structs.replace(envelope(n, destination=PEER), body=b"{}") for n in range(COUNT)]
    if side == "outgoing":
        await database.transaction(outbox.store, [Sent(each, None, owner) for each in made])
        return [Leased(each, endpoint=PEER) for each in made]
    await database.transaction(inbox.store, [Arrival("billing", each, owner) for each in made])
    return [Leased(each, endpoint="billing") for each in made]


class Batch(NamedTuple):
    """A statement over rows of one side: their state before it, what it does to them, and how it is run."""

    side: str
    state: str
    operation: str
    run: Callable[[Database, Sequence[Leased]], Any]


def keys(owned: Sequence[Leased]) -> list[Any]:
    return [lease.key for lease in owned]


def each(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Database, Sequence[Leased]], Any]:
    """A statement over one message, for one after another, as an agent settles them."""

    async def run(database: Database, owned: Sequence[Leased]) -> None:
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


BATCHES: dict[str, Batch] = {
    "claim outgoing": Batch(
        "outgoing", UNOWNED, "UPDATE",
        lambda db, _: db.transaction(outbox.claim, destination=PEER, batch_size=100, node=NODE),
    ),
    "claim incoming": Batch(
        "incoming", UNOWNED, "UPDATE",
        lambda db, _: db.transaction(inbox.claim, message_type=MESSAGE_TYPE, batch_size=100, node=NODE),
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


async def each_paused(database: Database, owned: Sequence[Leased]) -> None:
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
    side, state, operation, run = BATCHES[name]
    if refused == "the history" and operation != "DELETE":
        return  # it writes none
    owned = await given(database, side)
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


async def test_uncounted_attempt_to_send_keeps_nothing_from_being_sent(database: Database, tables: Tables) -> None:
    owned = await given(database, "outgoing")
    plant(tables, owned[3].envelope.id, "outgoing_envelopes UPDATE")

    await database.transaction(outbox.count_failed_attempt, NODE, owned)

    assert sorted(tables.rows("SELECT attempts FROM durable.outgoing_envelopes")) == [0, *[1] * (COUNT - 1)]
    assert tables.count("dead_letters") == 0


async def test_marked_row_belongs_to_nobody_until_an_operator_frees_it(database: Database, tables: Tables) -> None:
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

ALL, WHOLE = Selection(), Stretch(0, 2**62, 100)
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
async def test_letter_that_the_database_refuses_is_left_and_the_others_are_resolved(
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
async def test_delayed_message_that_the_database_refuses_is_left_and_the_others_are_changed(
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
async def test_row_that_cannot_be_purged_keeps_no_other_one(
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
