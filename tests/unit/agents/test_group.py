"""Messages that share a transaction, while those that have not begun leave it."""

from __future__ import annotations

from typing import Any

from durable.agents.attempts import Group


def group(count: int) -> Any:
    """Return a group of as many messages, each of which is its number."""
    tasks: Any = list(range(count))
    return Group(tasks, budget=0.02)


def test_group_keeps_its_first_message_when_none_has_begun() -> None:
    waiting = group(3)
    assert list(waiting.cut()) == [1, 2]
    assert waiting.begin()
    assert not waiting.begin()


def test_group_keeps_begun_messages_when_cut() -> None:
    running = group(4)
    assert running.begin()
    assert running.begin()
    assert list(running.cut()) == [2, 3]
    assert list(running.cut()) == []
    assert list(running.tasks) == [0, 1]
