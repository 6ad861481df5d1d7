"""Conversations over lakes: the same trees whichever service a message's rows are in."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidSetting
from durable.pipeline.conversations import find, overview
from durable.pipeline.lake import Lake
from tests.support.lakes import at, fill, handled, message_id, sent, table

ROOT = message_id(1)


@pytest.fixture
def lakes(tmp_path: Path) -> list[Lake]:
    """The shop sends 1, billing's handler of it sends 2, whose handler at the mailer takes long; 9 stands alone."""
    first = {"correlation_id": ROOT}
    second = {"correlation_id": ROOT, "causation_id": ROOT, "message_type": "mail.receipt", "source": "billing"}
    return [
        fill(Lake(str(tmp_path / "shop")), table([sent(1, **first), sent(9)])),
        fill(
            Lake(str(tmp_path / "billing")),
            table([handled(1, **first), handled(9), sent(2, service="billing", **second)]),
        ),
        fill(Lake(str(tmp_path / "mail")), table([handled(2, service="mail", finished_at=at(12), **second)])),
    ]


def test_conversations_are_followed_over_services(spark: SparkSession, lakes: list[Lake]) -> None:
    seen = overview(spark, lakes)
    assert (seen.conversations, seen.messages, seen.deepest) == (2, 3, 2)
    slowest, other = seen.chosen
    assert (slowest["correlation_id"], slowest["messages"], slowest["seconds"]) == (str(ROOT), 2, 11.0)
    assert slowest["path"] == [
        {"id": str(ROOT), "message_type": "orders.placed", "milliseconds": 1_000.0},
        {"id": str(message_id(2)), "message_type": "mail.receipt", "milliseconds": 10_000.0},
    ]
    assert (other["depth"], other["seconds"]) == (1, 0.025)


def test_one_is_found_by_its_id_and_by_that_of_each_message(spark: SparkSession, lakes: list[Lake]) -> None:
    for wanted in (ROOT, message_id(2)):
        found = find(spark, lakes, wanted)
        assert (UUID(bytes=found.correlation_id), found.depth, len(found.messages)) == (ROOT, 2, 2)
    with pytest.raises(InvalidSetting, match="no message and no conversation"):
        find(spark, lakes, message_id(77))


def test_the_order_is_that_which_was_asked_for(spark: SparkSession, lakes: list[Lake]) -> None:
    (largest,) = overview(spark, lakes[:2], order="largest", count=1).chosen
    assert (largest["correlation_id"], largest["messages"]) == (str(ROOT), 2)


def test_lakes_without_history_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="there is no history"):
        overview(spark, [Lake(str(tmp_path))])
