"""Forks: a child process that was made by os.fork(), as multiprocessing and some web servers do, has copies of the
parent's objects and its very sockets, which only one of the two may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_alive: Final[WeakKeyDictionary[Any, Callable[[Any], object]]] = WeakKeyDictionary()
_of_the_parent: Final[list[object]] = []


def in_each_child(owner: T, begin_anew: Callable[[T], object]) -> None:
    """Call this with `owner`, for as long as it is referenced, in each child process: it lets go of what is the
    parent's, and returns it. That is kept: at its end it would close the parent's connections.
    """
    _alive[owner] = begin_anew


def _begin_anew() -> None:
    for owner, begin_anew in list(_alive.items()):
        _of_the_parent.append(begin_anew(owner))


os.register_at_fork(after_in_child=_begin_anew)
