"""Telemetry of calls has bounds: of methods that are counted for themselves, and of the time that is recent."""

from __future__ import annotations

import pytest

from durable.calls import telemetry
from durable.calls.telemetry import CallTelemetry
from durable.statistics import CallSide


def test_methods_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_MOST_METHODS", 3)
    counted = CallTelemetry()
    for number in range(10):
        counted.ended(counted.of(CallSide.CLIENT, "stock", f"m{number}"), 0.0, "ok")
    found = {(each.service, each.method): each.outcomes["ok"] for each in counted.statistics()}
    assert found == {("stock", "m0"): 1, ("stock", "m1"): 1, ("stock", "m2"): 1, ("other", "other"): 7}
