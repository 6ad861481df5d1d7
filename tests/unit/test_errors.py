"""Errors of durable: they cross processes whole, and each of many callers may be told one of its own."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest

from durable import errors
from durable.errors import DurableError, again

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "MissingKey": ("k1",),
    "RemoteError": ("LookupError", "no A-1 here", "tcp://stock:2310"),
    "PauseListener": (timedelta(seconds=5), "tired"),
    "RetryLater": (timedelta(seconds=5), "tired"),
}
"""Arguments of those that are not made of a text."""

KINDS = sorted(
    (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, DurableError)),
    key=lambda kind: kind.__name__,
)


def made(kind: type[DurableError]) -> DurableError:
    return kind(*ARGUMENTS.get(kind.__name__, ("what went wrong",)))


@pytest.mark.parametrize("way", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, again])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_the_same_in_another_process(kind: type[DurableError], way: Any) -> None:
    error = made(kind)
    other = way(error)
    assert other is not error
    assert (type(other), str(other), vars(other)) == (kind, str(error), vars(error))
    assert str(error)


def test_another_error_has_the_same_cause_and_its_own_traceback() -> None:
    with pytest.raises(DurableError) as raised:
        raise DurableError("first") from ValueError("cause")
    other = again(raised.value)
    assert other.__cause__ is raised.value.__cause__
    assert other.__traceback__ is None


def test_error_of_another_library_is_told_unchanged() -> None:
    error = ValueError("theirs")
    assert again(error) is error


def test_every_public_error_is_listed() -> None:
    assert {kind.__name__ for kind in KINDS} == {
        name for name in errors.__all__ if isinstance(getattr(errors, name), type)
    }
