"""The record of what operators do, on a real Postgres."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine

from durable.embedded import Embedded
from durable.storage import actions, circuits, dead_letters
from durable.storage.actions import Action
from durable.storage.circuits import CircuitKind
from durable.storage.dead_letters import LetterRange, Selection
from tests.support import letters
from tests.support.tables import Tables, shared_tables

SCHEMA = "durable"
HANDLER = [(CircuitKind.HANDLER, "orders.Placed")]
PAUSE: dict[str, Any] = {"reason": "new prices", "actor": "ada", "duration": None}


@pytest.fixture(scope="module")
def database(servers: Callable[[int], Embedded]) -> Iterator[Tables]:
    with shared_tables(servers(18)) as tables:
        yield tables


@pytest.fixture
def engine(database: Tables) -> Iterator[Engine]:
    database.clear()
    engine = create_engine(database.url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


def page(engine: Engine, *, limit: int = 10, before: int | None = None, **filters: Any) -> list[actions.Recorded]:
    with engine.begin() as conn:
        return actions.page(conn, SCHEMA, actions.Selection(**filters), limit=limit, before=before)


def test_batches_of_a_run_are_one_action(engine: Engine) -> None:
    with engine.begin() as conn:
        letters.incoming(conn, [letters.envelope(number) for number in range(25)])
    action = Action(actor="ada", verb="replay", target="dead letters: all", reason="mended")

    def replaying(conn: Connection, schema: str, selection: Selection, stretch: LetterRange) -> dead_letters.Resolved:
        return dead_letters.replay(conn, schema, selection, stretch, actor="ada", reason="mended")

    change, after = actions.recorded(replaying, action), 0
    while True:
        with engine.begin() as conn:
            resolved = change(conn, SCHEMA, Selection(), LetterRange(after, 2**40, 10))
        if not resolved.done:
            break
        after = max(resolved.done)
    (told,) = page(engine)
    assert (told.id, told.actor, told.verb, told.changed, told.reason) == (action.id, "ada", "replay", 25, "mended")
    assert told.ended_at > told.began_at


def test_action_is_rolled_back_with_its_change(engine: Engine) -> None:
    with engine.connect() as conn:
        actions.pause(conn, SCHEMA, HANDLER, **PAUSE)
        conn.rollback()
    assert page(engine) == []


def test_pause_keeps_the_circuit_from_before_and_after(engine: Engine) -> None:
    with engine.begin() as conn:
        circuits.open_circuit(conn, SCHEMA, *HANDLER[0], reason="card 4111", actor="node 7")
    with engine.begin() as conn:
        actions.pause(conn, SCHEMA, HANDLER, reason="new prices", actor="ada", duration=timedelta(hours=2))
    (told,) = page(engine)
    before, after = told.before["handler orders.Placed"], told.after["handler orders.Placed"]
    assert (before["actor"], before["by_failures"]) == ("node 7", True)
    assert (after["actor"], after["by_failures"]) == ("ada", False)
    assert datetime.fromisoformat(after["until"]) > datetime.now(UTC) + timedelta(minutes=110)
    assert "card" not in str(told)  # reasons that code gave may quote messages


def test_resume_of_nothing_is_no_action(engine: Engine) -> None:
    with engine.begin() as conn:
        assert not actions.resume(conn, SCHEMA, HANDLER, actor="ada").was_open
    assert page(engine) == []


def test_resume_of_several_is_one_action(engine: Engine) -> None:
    named = [(CircuitKind.DESTINATION, f"tcp://peer-{number}:2302") for number in range(30)]
    with engine.begin() as conn:
        circuits.pause_each(conn, SCHEMA, named, **PAUSE)
        assert actions.resume(conn, SCHEMA, named, actor="bob").was_open
    (told,) = page(engine)
    assert (told.verb, told.changed, told.target.endswith("and 10 more")) == ("resume", 30, True)


@pytest.mark.parametrize(
    ("filters", "targets"),
    [
        ({}, ["c", "b", "a"]),
        ({"actor": "ada"}, ["c", "a"]),
        ({"verb": "pause"}, ["b", "a"]),
        ({"target": "b"}, ["b"]),
        ({"actor": "ada", "verb": "pause"}, ["a"]),
        ({"since": datetime(2126, 1, 1, tzinfo=UTC)}, []),
        ({"until": datetime(2026, 1, 1, tzinfo=UTC)}, []),
        ({"limit": 2}, ["c", "b"]),
    ],
)
def test_page_obeys_its_filters(engine: Engine, filters: dict[str, Any], targets: list[str]) -> None:
    with engine.begin() as conn:
        for actor, verb, target in (("ada", "pause", "a"), ("bob", "pause", "b"), ("ada", "resume", "c")):
            actions.record(conn, SCHEMA, Action(actor=actor, verb=verb, target=target))
    assert [each.target for each in page(engine, **filters)] == targets


def test_pages_follow_each_other(engine: Engine) -> None:
    with engine.begin() as conn:
        for number in range(7):
            actions.record(conn, SCHEMA, Action(actor="ada", verb="pause", target=str(number)))
    seen: list[str] = []
    before: int | None = None
    while found := page(engine, limit=3, before=before):
        seen += [each.target for each in found]
        before = found[-1].number
    assert seen == [str(number) for number in reversed(range(7))]


def test_purge_deletes_the_actions_past_their_retention(engine: Engine, database: Tables) -> None:
    with engine.begin() as conn:
        for target in ("old", "young"):
            actions.record(conn, SCHEMA, Action(actor="ada", verb="pause", target=target))
    database.execute("UPDATE durable.actions SET began_at = now() - interval '400 d' WHERE target = 'old'")
    with engine.begin() as conn:
        assert actions.purge(conn, SCHEMA, keep=timedelta(days=365)) == 1
    assert [each.target for each in page(engine)] == ["young"]
