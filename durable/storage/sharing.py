"""The pools whose connections serve one unit of work at a time.

    QueuePool, AsyncAdaptedQueuePool, NullPool, subclasses    each connection has one user until it is given back
    StaticPool, SingletonThreadPool, AssertionPool, others    refused: two users, or threads, may have one at once
    in a forked process                                       made anew: the sockets are the parent's, too

Of two units of work in one transaction of the database, the first that ends commits, or rolls back, what both did.
"""

from __future__ import annotations

import os
from typing import Final
from weakref import WeakSet

from sqlalchemy import Engine
from sqlalchemy.pool import NullPool, Pool, QueuePool

from durable.errors import WiringError

_given: Final[WeakSet[Engine]] = WeakSet()
_of_the_parent: Final[list[Pool]] = []
"""Pools that a forked process keeps: at their end they would close the parent's connections."""


def refuse_shared(pool: Pool) -> None:
    """Raise WiringError for the pool of an engine that may give one connection to two units of work."""
    if not isinstance(pool, QueuePool | NullPool):
        raise WiringError(
            f"the engine has a {type(pool).__name__}, which may give one connection to two units of work at once: the "
            "first that ends would commit, or roll back, what the other did; make the engine without poolclass=, or "
            "with poolclass=NullPool"
        )


def renew_in_children(engine: Engine) -> None:
    """Give this engine another pool in each forked process, for as long as it is referenced."""
    _given.add(engine)


def _begin_anew() -> None:
    for engine in list(_given):
        _of_the_parent.append(engine.pool)
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_begin_anew)
