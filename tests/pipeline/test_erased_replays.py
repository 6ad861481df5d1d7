"""Replays beside erasures: what was erased comes back by no replay, whichever of the two began first."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from durable.errors import ArchiveConflict, DurableError
from durable.pipeline import erasing, replay
from durable.pipeline.copying import opened
from durable.pipeline.origin import alone
from durable.pipeline.publish import publish
from durable.pipeline.undisturbed import Undisturbed, publishing
from durable.settings import Settings, load_settings
from tests.pipeline.test_erasing import ANNA, BY_KEY, MIDNIGHT, add, erase
from tests.support.archiving import Archiver
from tests.support.command import Agent, Ended

pytestmark = pytest.mark.timeout(600)  # to be cut off amid a call leaves the session of all tests unusable
CHUNK = 5
SENT_AT = MIDNIGHT - timedelta(seconds=3)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Agent:
    return Agent(tmp_path, monkeypatch, capsys)


@pytest.fixture
def filled(archiver: Archiver, conn: psycopg.Connection[Any]) -> Archiver:
    """Twenty handled messages, of which number 5, 10, 15 and 20 are Anna's; all archived."""
    add(conn, 20)
    archiver.run(local_rows=1_000)
    return archiver


def replayed(agent: Agent, archiver: Archiver, url: str | None = None) -> Ended:
    place = ("--lake", archiver.lake.url, "--database", url or archiver.origin.url)
    return agent("pipeline", "replay", "--name", "May", *place, "--all", "--chunk", str(CHUNK))


def of_anna(url: str) -> list[int]:
    """The numbers of her messages that wait in the inbox, by the digits of their old ids."""
    names = {replay.new_id_of(UUID(int=number), name="May", sent_at=SENT_AT): number for number in range(1, 21)}
    with psycopg.connect(url) as conn:
        found = conn.execute("SELECT id FROM durable.incoming_envelopes WHERE partition_key = %s", (ANNA,))
        return sorted(names[row[0]] for row in found)


def after_a_chunk(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do this when the first chunk has been published."""
    published = list[int]()

    def watched(*given: Any, **named: Any) -> Any:
        done = publish(*given, **named)
        published.append(1)
        if len(published) == 1:
            do()
        return done

    monkeypatch.setattr(replay, "publish", watched)


def settings_of(archiver: Archiver) -> Settings:
    return load_settings(database_url=archiver.origin.url)


def test_erasure_is_refused_while_a_replay_is_at_work(
    agent: Agent, filled: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def try_to_erase() -> None:
        with pytest.raises(ArchiveConflict) as error:
            erase(filled)
        refused.append(str(error.value))
        raise DurableError("the replay is stopped")

    after_a_chunk(monkeypatch, try_to_erase)
    stopped = replayed(agent, filled)
    monkeypatch.undo()
    assert (stopped.code, "the replay is stopped" in stopped.err) == (1, True), stopped
    assert "a replay is at work on this database" in refused[0]
    assert "continue it after the erasure by the same command" in refused[0]
    before = of_anna(filled.origin.url)
    assert before == [5]

    assert erase(filled).lake_history_rows == 4
    continued = replayed(agent, filled)
    assert continued.code == 0, continued.err
    assert of_anna(filled.origin.url) == before, "the others are erased, and come by no replay"


def test_replay_is_refused_while_an_erasure_is_at_work(agent: Agent, filled: Archiver) -> None:
    with opened(filled.origin.url) as engine, engine.connect() as conn, alone(conn, "durable", "wait"):
        ended = replayed(agent, filled)
    assert (ended.code, "an erasure is at work on this database" in ended.err) == (1, True), ended
    assert of_anna(filled.origin.url) == []
    assert replayed(agent, filled).code == 0


def test_replays_share_their_lock(filled: Archiver) -> None:
    with publishing(settings_of(filled), filled.lake) as one, publishing(settings_of(filled), filled.lake) as other:
        one.check()
        other.check()


def test_replay_into_another_database_ends_when_its_lake_was_erased_from(
    agent: Agent, filled: Archiver, make_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_database("other")
    after_a_chunk(monkeypatch, lambda: erase(filled))
    ended = replayed(agent, filled, other)
    monkeypatch.undo()
    assert ended.code == 1, ended
    assert f"messages were erased from lake {filled.lake.url} meanwhile" in ended.err
    assert of_anna(other) == [5], "published before the erasure"
    assert replayed(agent, filled, other).code == 0
    assert of_anna(other) == [5]


def test_replay_ends_when_its_lock_is_lost(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    def lose(undisturbed: Undisturbed) -> None:
        held = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
        assert conn.execute(held).fetchall() == [(True,)]
        undisturbed.check()

    with (
        pytest.raises(ArchiveConflict, match="the connection that kept erasures away is lost"),
        publishing(settings_of(filled), filled.lake) as undisturbed,
    ):
        lose(undisturbed)


def test_replay_is_refused_while_the_lake_has_content_of_an_erasure(
    agent: Agent, filled: Archiver, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The erasure died after it had emptied the database."""

    def die(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(erasing, "failpoint", die)
    with pytest.raises(KeyboardInterrupt):
        erase(filled)
    monkeypatch.undo()
    ended = replayed(agent, filled)
    assert (ended.code, "content is there still, or again, of erasure" in ended.err) == (2, True), ended
    assert of_anna(filled.origin.url) == []
    erasing.erase(filled.origin, filled.lake, BY_KEY, actor="a test", reason="request 4711")
    assert replayed(agent, filled).code == 0
    assert of_anna(filled.origin.url) == []
