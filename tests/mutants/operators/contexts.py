"""A plugin of pytest under `coverage run`: the lines that a test executes are recorded under its name."""

from __future__ import annotations

from collections.abc import Iterator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if (running := coverage.Coverage.current()) is not None:
        running.switch_context(item.nodeid)
    return (yield)
