"""The pools whose connections serve one unit of work at a time.

    QueuePool, AsyncAdaptedQueuePool, NullPool, subclasses    each connection has one user until it is given back
    StaticPool, SingletonThreadPool, AssertionPool, others    refused: two users, or threads, may have one at once

Of two units of work in one transaction of the database, the first that ends commits, or rolls back, what both did.
"""

from __future__ import annotations

from sqlalchemy.pool import NullPool, Pool, QueuePool

from durable.errors import WiringError


def refuse_shared(pool: Pool) -> None:
    """Raise WiringError for the pool of an engine that may give one connection to two units of work."""
    if not isinstance(pool, QueuePool | NullPool):
        raise WiringError(
            f"the engine has a {type(pool).__name__}, which may give one connection to two units of work at once: the "
            "first that ends would commit, or roll back, what the other did; make the engine without poolclass=, or "
            "with poolclass=NullPool"
        )
