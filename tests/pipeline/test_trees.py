"""Conversations as trees, from rows in any order and of any kind."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest

from durable.pipeline.trees import Row, children, conversation, conversations, depths


def row(number: int, cause: int | None, sent_at: int, ended_at: int, conversation: int = 1) -> Row:
    def name(value: int) -> bytes:
        return value.to_bytes(16)

    return Row(
        name(conversation),
        name(number),
        None if cause is None else name(cause),
        f"type-{number}",
        "shop",
        "billing",
        "incoming",
        "handled",
        "main",
        sent_at,
        ended_at,
    )


def numbers(ids: list[bytes]) -> list[int]:
    return [int.from_bytes(each) for each in ids]


def test_critical_path_leads_to_the_message_ended_last() -> None:
    #   1 ──> 2 ──> 4
    #    └──> 3
    found = conversation([row(1, None, 0, 10), row(2, 1, 5, 20), row(3, 1, 6, 90), row(4, 2, 15, 40)])
    assert (found.depth, found.began_at, found.ended_at) == (3, 0, 90)
    assert numbers([message.id for message in found.path]) == [1, 3]


def test_message_with_several_rows_is_one_node() -> None:
    found = conversation([row(1, None, 0, 5), row(1, None, 0, 30), row(2, 1, 9, 20)])
    assert len(found.messages) == 2
    first = found.messages[(1).to_bytes(16)]
    assert (len(first.rows), first.ended_at) == (2, 30)


def test_order_of_rows_is_irrelevant() -> None:
    rows = [row(3, 2, 20, 30), row(1, None, 0, 10), row(2, 1, 10, 20)]
    for given in (rows, rows[::-1]):
        found = conversation(given)
        assert numbers([message.id for message in found.path]) == [1, 2, 3]
        assert sorted(depths(found.messages).values()) == [1, 2, 3]


def test_message_with_an_unknown_cause_is_a_root() -> None:
    found = conversation([row(5, 4, 0, 10), row(6, 5, 3, 20)])
    assert (found.depth, numbers([message.id for message in found.path])) == (2, [5, 6])


def test_rows_causing_each_other_are_cut_and_none_is_missing() -> None:
    found = conversation([row(1, 3, 0, 10), row(2, 1, 5, 20), row(3, 2, 9, 30), row(4, 4, 10, 40)])
    below = children(found.messages)
    assert sorted(numbers([each.id for messages in below.values() for each in messages])) == [1, 2, 3, 4]
    assert found.depth == 3


def test_a_chain_of_any_length_is_followed() -> None:
    found = conversation([row(n, n - 1 or None, n, n + 1) for n in range(1, 20_001)])
    assert (found.depth, len(found.path)) == (20_000, 20_000)


def test_rows_are_read_conversation_by_conversation() -> None:
    rows = [row(1, None, 0, 10, conversation=1), row(2, 1, 3, 20, conversation=1), row(3, None, 5, 6, conversation=2)]
    assert [(len(found.messages), found.ended_at) for found in conversations(rows)] == [(2, 20), (1, 6)]
    assert list(conversations([])) == []


DAY = 86_400_000_000  # microseconds
KEY = UUID("6fa459ea-ee8a-5ca4-894e-db77e160355e").bytes
DATED = UUID("01890a5d-ac96-774b-bcce-b302099a8057").bytes


@pytest.mark.parametrize(
    ("root", "days", "window", "lasting"),
    [
        (KEY, [0, 28], 7, [40, 40]),
        (KEY, [0, 7, 14], 7, [40, 40, 40]),
        (KEY, [0, 6, 28], 7, [6 * DAY + 40, 40]),
        (KEY, [0, 28], 30, [28 * DAY + 40]),
        (DATED, [0, 28], 7, [28 * DAY + 40]),
    ],
    ids=["freed", "at the edge", "sent again", "within a longer window", "dated"],
)
def test_each_use_of_a_key_begins_a_conversation(root: bytes, days: list[int], window: int, lasting: list[int]) -> None:
    """The receiver has the time with less precision."""
    rows = [
        each
        for day in days
        for each in (
            row(1, None, day * DAY + 5, day * DAY + 9)._replace(id=root, correlation_id=root),
            row(1, None, day * DAY, day * DAY + 20)._replace(id=root, correlation_id=root),
            row(day + 2, None, day * DAY + 10, day * DAY + 40)._replace(causation_id=root, correlation_id=root),
        )
    ]
    found = [*conversations(rows, timedelta(days=window))]
    assert [each.ended_at - each.began_at for each in found] == lasting
    assert sum(len(each.messages) for each in found) == len(found) + len(days)


def test_late_message_of_a_key_is_of_the_use_begun_before() -> None:
    rows = [row(1, None, day * DAY, day * DAY + 20)._replace(id=KEY, correlation_id=KEY) for day in (0, 28)]
    late = row(7, None, 20 * DAY, 29 * DAY)._replace(causation_id=KEY, correlation_id=KEY)
    assert [each.ended_at // DAY for each in conversations([*rows, late])] == [29, 28]
