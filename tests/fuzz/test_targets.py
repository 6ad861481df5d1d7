"""Each target for some seconds. `make fuzz` looks further."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz.catalogue import TARGETS
from tests.fuzz.hunt import Hunt
from tests.fuzz.targets import Target


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_target_keeps_its_promise_for_any_input(target: Target, make_database: Callable[[str], str]) -> None:
    with target.open(make_database) as check:
        for value in target.known:
            check(value)
        hunt = Hunt(target, check)
        hunt.go(target.examples)
    assert hunt.executions >= target.examples // 2
    assert len(hunt.words) > 1, "inputs that all end alike find nothing"
