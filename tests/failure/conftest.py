"""Fixtures of the failure tests: a pair of services on databases of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.failure.services import Pair, pair_of_services


@pytest.fixture
def pair(make_database: Callable[[str], str], tmp_path: Path) -> Iterator[Pair]:
    """Two services, not started yet."""
    with pair_of_services(make_database("orders"), make_database("billing"), tmp_path) as services:
        yield services
