"""Files for this process alone, such as locks and the ends of pipes: a forked child closes its copies at once.

The child may outlive this process, whose death would go unnoticed: a lock stays, and a pipe has no end, while any
process holds a copy.
"""

from __future__ import annotations

import os
from typing import IO, Any, Final

_held_here: Final = set[IO[Any]]()


def hold(file: IO[Any]) -> None:
    _held_here.add(file)


def let_go(file: IO[Any]) -> None:
    _held_here.discard(file)


def _close_in_child() -> None:
    for file in list(_held_here):
        file.close()
    _held_here.clear()


os.register_at_fork(after_in_child=_close_in_child)
