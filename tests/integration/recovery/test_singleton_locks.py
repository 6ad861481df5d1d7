"""The lock of a singleton on real sessions: who is sure of it, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, pool, text

from durable.calls.singletons import Singletons, now
from durable.envelope import NodeId
from durable.errors import LeaseLost
from durable.recovery.singleton_locks import SingletonLocks
from durable.settings import load_settings
from tests.failure.workbench import QUICK


class Session:
    """A node's own session, with the locks on it."""

    def __init__(self, conn: Connection, node: int, url: str) -> None:
        self.conn = conn
        self.node = NodeId(node)
        self.singletons = Singletons()
        self.singletons.want({"who": "1.0"})
        self.locks = SingletonLocks(self.singletons, load_settings(database_url=url, **QUICK))

    def look(self) -> int:
        """Look now; returns the epoch that is known."""
        self.locks.hasten()
        self.locks.look(self.conn, self.node)
        return self.singletons.known_epoch("who")

    def rows(self, sql: str) -> list[Any]:
        return [tuple(row) for row in self.conn.execute(text(sql))]


@contextmanager
def session(url: str, node: int) -> Iterator[Session]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=pool.NullPool)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        yield Session(conn, node, url)


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
        while not second.look():  # until the server has noticed the end of the session
            time.sleep(0.01)
        holding = second.locks._held["who"]
        assert holding.epoch == 2
        assert holding.sure_from >= ended + second.locks.lease


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
