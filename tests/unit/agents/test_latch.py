"""The latch: only failures in a row latch, and only a ping unlatches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.agents.latch import Latch, State


def latched(failures_to_latch: int = 3) -> Latch:
    circuit = Latch(failures_to_latch)
    for _ in range(failures_to_latch):
        circuit.batch_failed()
    return circuit


def test_last_of_the_given_number_of_failures_in_a_row_latches() -> None:
    circuit = Latch(failures_to_latch=3)
    assert [circuit.batch_failed() for _ in range(3)] == [False, False, True]
    assert circuit.state is State.LATCHED


def test_a_success_starts_the_count_again() -> None:
    circuit = Latch(failures_to_latch=2)
    for _ in range(5):
        assert not circuit.batch_failed()
        circuit.batch_succeeded()
    assert not circuit.latched


def test_batches_failing_together_count_once() -> None:
    circuit = Latch(failures_to_latch=2)
    together = [circuit.ticket for _ in range(5)]
    assert [circuit.batch_failed(ticket) for ticket in together] == [False] * 5
    assert circuit.failures_in_a_row == 1
    assert circuit.batch_failed(circuit.ticket)


def test_failures_after_the_latch_do_not_latch_again() -> None:
    circuit = latched()
    assert [circuit.batch_failed() for _ in range(5)] == [False] * 5
    assert circuit.latched


def test_a_late_success_of_a_batch_does_not_unlatch() -> None:
    circuit = latched()
    circuit.batch_succeeded()
    assert circuit.latched


def test_a_ping_unlatches_once_and_the_count_starts_again() -> None:
    circuit = latched()
    assert [circuit.ping_succeeded(), circuit.ping_succeeded()] == [True, False]
    assert [circuit.batch_failed() for _ in range(3)] == [False, False, True]


def test_another_node_may_latch_and_unlatch() -> None:
    circuit = Latch(failures_to_latch=3)
    circuit.latch()
    assert circuit.latched
    assert not circuit.batch_failed()
    circuit.unlatch()
    assert (circuit.state, circuit.failures_in_a_row) == (State.CLOSED, 0)


@pytest.mark.parametrize("failures_to_latch", [1, 2, 5])
@given(outcomes=st.lists(st.booleans(), max_size=30))
def test_first_long_enough_run_of_failures_latches(failures_to_latch: int, outcomes: list[bool]) -> None:
    circuit, in_a_row, expected = Latch(failures_to_latch), 0, False
    for succeeded in outcomes:
        in_a_row = 0 if succeeded else in_a_row + 1
        latches = not expected and in_a_row >= failures_to_latch
        expected = expected or latches
        if succeeded:
            circuit.batch_succeeded()
        else:
            assert circuit.batch_failed() is latches
        assert circuit.latched is expected
