"""Errors of handlers that run several tasks at once, which come as a group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from durable import Reject, Retry, RetryLater
from durable.application.retry import DeadLetter, Policy, RunAgain, RunLater
from durable.errors import InvalidMessage, PutBack, StorageUnavailable, WiringError, leaves_of, said, text_of, told_by
from durable.storage.outages import is_conflict, is_outage, is_outage_itself, is_shortage, met_lock
from durable.storage.rows import Letter


class Refused(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


def of_the_database(sqlstate: str) -> OperationalError:
    return OperationalError("SELECT secret", None, Refused(sqlstate))


def caused_by(cause: BaseException) -> Exception:
    error = RuntimeError("in other words")
    error.__cause__ = cause
    return error


PLAIN = st.sampled_from([ValueError, KeyError, RuntimeError, OSError]).map(lambda cls: cls("plain"))
SIGNALS = st.sampled_from(
    [Reject("no"), RetryLater(7), PutBack(), InvalidMessage("no message"), WiringError("no route")],
)


@st.composite
def grouped(draw: st.DrawFn, leaves: Sequence[Exception]) -> Exception:
    """These errors in one group, in their order, some of them in groups of their own."""
    parts = list(leaves)
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(parts) - 1))
        end = draw(st.integers(begin + 1, len(parts)))
        parts[begin:end] = [ExceptionGroup("inner", parts[begin:end])]
    return ExceptionGroup("unhandled errors in a TaskGroup", parts)


@given(st.data(), st.lists(PLAIN, min_size=1, max_size=5))
def test_group_tells_the_only_error_or_names_them_all(data: st.DataObject, errors: list[Exception]) -> None:
    group = data.draw(grouped(errors))
    assert leaves_of(group) == errors
    assert told_by(group) is (errors[0] if len(errors) == 1 else group)
    for text in (said(group), text_of(group), Letter.from_error(group).reason):
        assert text.endswith("; ".join(map(said, errors)))


@given(st.data(), st.lists(PLAIN, max_size=4), SIGNALS)
def test_signal_of_durable_wins_among_others(data: st.DataObject, errors: list[Exception], signal: Exception) -> None:
    place = data.draw(st.integers(0, len(errors)))
    group = data.draw(grouped([*errors[:place], signal, *errors[place:]]))
    assert told_by(group) is signal


@given(st.data(), st.permutations([ValueError("a"), KeyError("b"), OSError("c"), TypeError("d")]))
def test_policy_is_asked_for_each_error_in_order(data: st.DataObject, errors: list[Exception]) -> None:
    rules = {LookupError: Retry.never(), OSError: Retry(immediate=0, delays=[5], jitter=0)}
    first = next(error for error in errors if isinstance(error, LookupError | OSError))
    expected = RunLater(timedelta(seconds=5)) if isinstance(first, OSError) else DeadLetter()
    assert Policy(by_error=rules).decide(data.draw(grouped(errors)), 1) == expected
    assert Policy(by_error={TimeoutError: Retry.never()}).decide(data.draw(grouped(errors)), 1) == RunAgain()


@pytest.mark.parametrize(
    ("tells", "error"),
    [
        (is_outage, of_the_database("08006")),
        (is_outage, StorageUnavailable("away")),
        (is_shortage, of_the_database("53100")),
    ],
)
@given(data=st.data(), others=st.lists(PLAIN, max_size=4))
def test_fault_of_the_database_is_found_anywhere_in_a_group(
    data: st.DataObject, others: list[Exception], tells: object, error: Exception
) -> None:
    assert callable(tells)
    met = data.draw(st.sampled_from([error, caused_by(error)]))
    place = data.draw(st.integers(0, len(others)))
    group = data.draw(grouped([*others[:place], met, *others[place:]]))
    assert tells(group)
    assert tells(caused_by(group))
    if others:
        assert not tells(data.draw(grouped(others)))


@pytest.mark.parametrize(
    ("tells", "state"),
    [
        (is_conflict, "40001"),
        (is_conflict, "40P01"),
        (met_lock, "40P01"),
        (met_lock, "55P03"),
        (is_outage_itself, "08006"),
    ],
)
@given(data=st.data(), others=st.lists(PLAIN, max_size=4))
def test_fault_of_this_attempt_is_found_anywhere_in_a_group_and_not_among_causes(
    data: st.DataObject, others: list[Exception], tells: object, state: str
) -> None:
    """An object that the application raises for ever keeps the cause that it has been given once."""
    assert callable(tells)
    place, error = data.draw(st.integers(0, len(others))), of_the_database(state)
    assert tells(data.draw(grouped([*others[:place], error, *others[place:]])))
    assert not tells(data.draw(grouped([*others[:place], caused_by(error), *others[place:]])))


def test_mistake_in_a_statement_hides_no_outage_of_its_group() -> None:
    mistake, outage = of_the_database("23505"), of_the_database("57P01")
    assert is_outage(ExceptionGroup("both", [mistake, outage]))
    assert not is_outage(ExceptionGroup("one", [mistake]))


def test_circular_group_is_followed_to_an_end() -> None:
    leaf = ValueError("leaf")
    group = ExceptionGroup("circle", [leaf])
    leaf.__cause__ = group
    assert not is_outage(group)
    assert not is_conflict(leaf)
