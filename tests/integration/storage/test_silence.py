"""What is silence of the database, and what only looks like it."""

from collections.abc import Generator

import psycopg
import pytest

from durable.storage.answering import PsycopgConnection, _bounded

READY = 1
NOT_READY = 0


def an_answer() -> Generator[int, int, str]:
    while not (yield READY):
        pass
    return "an answer"


@pytest.fixture
def connection(database_url: str) -> Generator[PsycopgConnection]:
    with PsycopgConnection.connect(database_url, autocommit=True) as connection:
        yield connection


def test_wait_for_notifications_is_no_silence(connection: PsycopgConnection) -> None:
    connection.answer_within = 0.1
    connection.execute("LISTEN nothing")
    assert list(connection.notifies(timeout=0.5)) == []
    assert connection.execute("SELECT 17").fetchone() == (17,)


def test_statement_without_an_answer_is_given_up(connection: PsycopgConnection) -> None:
    connection.answer_within = 0.1
    with pytest.raises(psycopg.OperationalError, match=r"no answer within 0.1 s; the connection is given up"):
        connection.execute("SELECT pg_sleep(10)")
    assert connection.closed


def test_answer_received_during_a_standstill_of_the_process_is_taken(connection: PsycopgConnection) -> None:
    wait = _bounded(connection, an_answer(), 0)
    next(wait)
    wait.send(NOT_READY)  # the time is over, and nobody has looked since
    with pytest.raises(StopIteration) as ended:
        wait.send(READY)
    assert ended.value.value == "an answer"
    assert not connection.closed


def test_second_unanswered_look_is_the_last(connection: PsycopgConnection) -> None:
    wait = _bounded(connection, an_answer(), 0)
    next(wait)
    wait.send(NOT_READY)
    with pytest.raises(psycopg.OperationalError, match="no answer within 0 s"):
        wait.send(NOT_READY)
    assert connection.closed
