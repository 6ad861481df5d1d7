"""Conversations over lakes: the same trees whichever service a message's rows are in, on Spark and without it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidSetting
from durable.pipeline import conversations, few_conversations
from durable.pipeline.lake import Lake
from tests.support.lakes import at, fill, handled, message_id, sent, table

ROOT = message_id(1)
KEY = UUID("6fa459ea-ee8a-5ca4-894e-db77e160355e")


@pytest.fixture(params=["on Spark", "here"])
def find(request: pytest.FixtureRequest, spark: SparkSession) -> Callable[..., Any]:
    return partial(conversations.find, spark) if request.param == "on Spark" else few_conversations.find


@pytest.fixture(params=["on Spark", "here"])
def overview(request: pytest.FixtureRequest, spark: SparkSession) -> Callable[..., Any]:
    return partial(conversations.overview, spark) if request.param == "on Spark" else few_conversations.overview


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


def test_conversations_are_followed_over_services(overview: Callable[..., Any], lakes: list[Lake]) -> None:
    seen = overview(lakes)
    assert (seen.conversations, seen.messages, seen.deepest) == (2, 3, 2)
    slowest, other = seen.chosen
    assert (slowest["correlation_id"], slowest["messages"], slowest["seconds"]) == (str(ROOT), 2, 11.0)
    assert slowest["path"] == [
        {"id": str(ROOT), "message_type": "orders.placed", "milliseconds": 1_000.0},
        {"id": str(message_id(2)), "message_type": "mail.receipt", "milliseconds": 10_000.0},
    ]
    assert (other["depth"], other["seconds"]) == (1, 0.025)


def test_conversation_is_found_by_its_id_and_by_the_id_of_each_message(
    find: Callable[..., Any], lakes: list[Lake]
) -> None:
    for wanted in (ROOT, message_id(2)):
        (found,) = find(lakes, wanted)
        assert (UUID(bytes=found.correlation_id), found.depth, len(found.messages)) == (ROOT, 2, 2)
    with pytest.raises(InvalidSetting, match="no message and no conversation"):
        find(lakes, message_id(77))


def test_overview_lists_the_largest_conversation_first_when_asked(
    overview: Callable[..., Any], lakes: list[Lake]
) -> None:
    (largest,) = overview(lakes[:2], order="largest", count=1).chosen
    assert (largest["correlation_id"], largest["messages"]) == (str(ROOT), 2)


def test_lakes_without_history_are_read_with_the_others(
    overview: Callable[..., Any], find: Callable[..., Any], lakes: list[Lake], tmp_path: Path
) -> None:
    empty, created = Lake(str(tmp_path / "nothing")), Lake(str(tmp_path / "created"))
    created.create("history")
    assert overview([empty, *lakes, created]).conversations == 2
    assert [each.depth for each in find([empty, *lakes, created], ROOT)] == [2]


def test_each_use_of_a_key_is_a_conversation(
    overview: Callable[..., Any], find: Callable[..., Any], tmp_path: Path
) -> None:
    """A report of each month, under one key, and what it leads to."""
    days, rows = [0, 28], []
    for number, day in enumerate(days, 2):
        moment = at(day * 86_400)
        times = {"sent_at": moment, "received_at": moment, "finished_at": moment + timedelta(milliseconds=40)}
        of_key, led_to = {"correlation_id": KEY, **times}, message_id(number)
        rows += [sent(1, id=KEY, **of_key), handled(1, id=KEY, **of_key)]
        rows += [sent(number, id=led_to, causation_id=KEY, **of_key)]
    lakes = [fill(Lake(str(tmp_path)), table(rows))]
    seen = overview(lakes)
    assert (seen.conversations, seen.messages, seen.p95_seconds) == (2, 4, 0.04)
    assert overview(lakes, dedupe_window=timedelta(days=29)).conversations == 1
    assert [each.began_at for each in find(lakes, KEY)] == [
        int(at(day * 86_400).timestamp() * 1_000_000) for day in days
    ]
    (later,) = find(lakes, message_id(3))
    assert later.began_at == int(at(28 * 86_400).timestamp() * 1_000_000)


def test_lakes_without_history_are_refused(overview: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="there is no history"):
        overview([Lake(str(tmp_path))])


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 40])
def test_small_lakes_give_the_same_figures_without_spark(spark: SparkSession, tmp_path: Path, count: int) -> None:
    """Chains of different lengths and durations, some of which took equally long, over two days."""
    rows = []
    for number in range(count):
        for link in range(number % 4 + 1):
            id_, cause = message_id(number * 10 + link + 1), message_id(number * 10 + link) if link else None
            moment = at(80_000 + number * 600 + link)
            times = {"sent_at": moment, "finished_at": moment + timedelta(milliseconds=50 + number % 7)}
            common = {"id": id_, "correlation_id": message_id(number * 10 + 1), "causation_id": cause, **times}
            rows += [sent(number, **common), handled(number, **common, received_at=moment)]
    lake = fill(Lake(str(tmp_path)), table(rows))
    for order in conversations.ORDERS:
        for day in (None, at(0).date() + timedelta(days=1)):
            if lake.files("history", day):
                of_spark = conversations.overview(spark, [lake], since=day, order=order, count=7)
                assert few_conversations.overview([lake, lake], since=day, order=order, count=7) == of_spark
    for row in rows:
        assert all(each.path for each in few_conversations.find([lake], row["id"]))
    assert few_conversations.find([lake], rows[-1]["id"]) == conversations.find(spark, [lake], rows[-1]["id"])
