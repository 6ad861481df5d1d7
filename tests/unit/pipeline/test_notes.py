"""Notes of the libraries below Spark: on a terminal with --debug only."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from durable.cli.pipeline.options import _show_notes


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    logger = logging.getLogger("py4j")
    before = logger.propagate
    yield
    logger.propagate = before


@pytest.mark.parametrize("is_debug", [True, False])
def test_note_of_an_ended_call_is_shown_with_debug_only(is_debug: bool) -> None:
    _show_notes(is_debug)
    assert logging.getLogger("py4j").propagate is is_debug
