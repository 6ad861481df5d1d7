"""How deep a message lies in its conversation."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from durable.console.tracing import _depths
from durable.storage.receipts import Step

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def step(number: int, cause: int | None) -> Step:
    causation_id = None if cause is None else UUID(int=cause)
    return Step(UUID(int=number), causation_id, None, "a", "shop", NOW, "incoming", "shop", "handled", 1, NOW)


def test_message_lies_one_below_its_cause() -> None:
    steps = [step(3, 2), step(1, None), step(2, 1), step(4, 99), step(5, 4), step(2, 1)]
    assert {each.int: depth for each, depth in _depths(steps).items()} == {1: 0, 2: 1, 3: 2, 4: 0, 5: 1}


@given(st.dictionaries(st.integers(0, 20), st.none() | st.integers(0, 20)))
def test_circle_of_causes_has_an_end(causes: dict[int, int | None]) -> None:
    depths = _depths(step(number, cause) for number, cause in causes.items())
    assert depths.keys() == {UUID(int=number) for number in causes}
    assert all(0 <= depth < 21 for depth in depths.values())
