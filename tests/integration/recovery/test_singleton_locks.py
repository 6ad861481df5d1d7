"""The lock of a singleton on real sessions: who is sure of it, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, pool, text

from durable.calls.singletons import Holding, Singletons, now
from durable.envelope import NodeId
from durable.errors import LeaseLost
from durable.recovery.singleton_locks import SingletonLocks
from durable.settings import load_settings
from tests.failure.workbench import QUICK


class Session:
    """A node's own session, with the locks on it."""

    def __init__(self, conn: Connection, node: int, url: str, **options: Any) -> None:
        self.conn = conn
        self.node = NodeId(node)
        self.singletons = Singletons()
        self.singletons.want({"who": "1.0"})
        self.locks = SingletonLocks(
            self.singletons, load_settings(database_url=url, **{**QUICK, "heartbeat_stale": 60, **options})
        )

    def look(self) -> int:
        """Look now; returns the epoch that is known."""
        self.locks.hasten()
        self.locks.look(self.conn, self.node)
        return self.singletons.known_epoch("who")

    def rows(self, sql: str) -> list[Any]:
        return [tuple(row) for row in self.conn.execute(text(sql))]


@contextmanager
def session(url: str, node: int, **options: Any) -> Iterator[Session]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=pool.NullPool)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        yield Session(conn, node, url, **options)


def take_over(session: Session) -> Holding:
    """Look until the server has noticed the end of the last holder's session."""
    while not session.look():
        time.sleep(0.01)
    return session.locks._held["who"]


def test_first_holder_is_sure_at_once_and_another_one_waits(database_url: str) -> None:
    with session(database_url, 1) as first, session(database_url, 2) as second:
        assert (first.look(), second.look()) == (1, 0)
        assert first.singletons.epoch_of("who") == 1
        assert second.rows("SELECT epoch, holder FROM durable.services") == [(1, 1)]


def test_holder_waits_for_the_lease_of_a_vanished_one(database_url: str) -> None:
    with session(database_url, 2) as second:
        with session(database_url, 1) as first:
            assert (first.look(), second.look()) == (1, 0)
        ended = now()
        holding = take_over(second)
        assert holding.epoch == 2
        assert holding.sure_from >= ended + second.locks.lease


@pytest.mark.parametrize("intervals", [(1, 0.1), (0.1, 1), (1, 0.1, 0.2), (0.2, 1, 0.1), (1, 0.2, 0.1, 0.3)], ids=str)
def test_holders_of_any_intervals_are_never_sure_together(database_url: str, intervals: tuple[float, ...]) -> None:
    sure_until = 0.0
    for node, interval in enumerate(intervals, start=1):
        with session(database_url, node, heartbeat_interval=interval) as holder:
            holding = take_over(holder)
            assert holding.sure_from >= sure_until
            sure_until = max(sure_until, holding.sure_until)


def test_holder_waits_for_the_lease_of_the_last_one_and_no_longer(database_url: str) -> None:
    with session(database_url, 1, heartbeat_interval=0.1) as first:
        assert first.look() == 1
    with session(database_url, 2, heartbeat_interval=1) as second:
        holding = take_over(second)
        assert holding.sure_from <= now() + first.locks.lease


def test_holder_gives_nothing_up_when_its_time_has_not_begun(database_url: str) -> None:
    with session(database_url, 1, heartbeat_interval=1) as vanished:
        assert vanished.look() == 1
        sure_until = vanished.locks._held["who"].sure_until
    with session(database_url, 2) as waiting, session(database_url, 3) as third:
        take_over(waiting)
        waiting.singletons.want({})
        assert (waiting.look(), third.look()) == (0, 3)
        assert third.locks._held["who"].sure_from >= sure_until


def test_holder_is_sure_at_once_when_the_last_one_gave_up(database_url: str) -> None:
    with session(database_url, 1) as first, session(database_url, 2) as second:
        assert (first.look(), second.look()) == (1, 0)
        first.singletons.want({})
        assert (first.look(), second.look()) == (0, 2)
        assert second.singletons.epoch_of("who") == 2


def test_holder_gives_nothing_up_when_its_calls_go_on(database_url: str) -> None:
    with session(database_url, 1) as first, session(database_url, 2) as second:
        assert first.look() == 1
        first.singletons.close()
        assert first.look() == 0
        first.locks.leave(first.conn)
        assert second.look() == 0
        first.singletons.is_idle = True
        first.locks.leave(first.conn)
        assert second.look() == 2
        assert second.singletons.epoch_of("who") == 2


@pytest.mark.parametrize(
    "loss", ["SELECT pg_advisory_unlock_all()", "UPDATE durable.services SET epoch = 9", "DELETE FROM durable.services"]
)
def test_holder_is_lost_when_its_lock_is_not_seen(database_url: str, loss: str) -> None:
    with session(database_url, 1) as first:
        assert first.look() == 1
        first.conn.execute(text(loss))
        with pytest.raises(LeaseLost, match="the lock of who is lost"):
            first.look()
