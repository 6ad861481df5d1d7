"""Open savepoints, where the database alone knows which one is meant."""

from __future__ import annotations

import pytest

from durable.outbox.savepoints import Savepoints


@pytest.mark.parametrize("name", ["gone", None])
def test_rollback_to_an_unknown_savepoint_is_lost(name: str | None) -> None:
    savepoints = Savepoints[int]()
    savepoints.meet("savepoint", "a", 1)
    assert savepoints.meet("rollback", name, 2) is None
    assert savepoints.is_lost


def test_rollback_to_a_savepoint_from_before_is_known() -> None:
    savepoints = Savepoints[int]()
    savepoints.follow_late(0)
    savepoints.meet("savepoint", "a", 1)
    older = savepoints.meet("rollback", "older", 2)
    assert older is not None
    assert (older.mark, savepoints.is_lost) == (0, False)


def test_lost_rollback_is_known_again_after_one_to_an_older_savepoint() -> None:
    savepoints = Savepoints[int]()
    savepoints.meet("savepoint", "a", 1)
    savepoints.meet("rollback", None, 2)
    savepoints.meet("savepoint", "b", 3)
    savepoints.meet("rollback", "b", 4)
    assert savepoints.is_lost
    savepoints.meet("rollback", "a", 5)
    assert not savepoints.is_lost


def test_release_of_an_unknown_savepoint_leaves_none_of_two_by_one_name_known() -> None:
    savepoints = Savepoints[int]()
    for mark, name in enumerate(["a", None, "a"]):
        savepoints.meet("savepoint", name, mark)
    savepoints.meet("release", None, 3)
    assert not savepoints.is_lost
    assert savepoints.meet("rollback", "a", 4) is None
