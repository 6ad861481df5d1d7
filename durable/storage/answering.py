"""Connections of each driver that end when the server does not answer in time.

Keepalives notice a network that is gone; a server or a pooler that is alive and says nothing, or a firewall between
that forgot the connection, only a limit notices. `answer_within` bounds each wait for an answer, also for BEGIN, COMMIT
and ROLLBACK. A connection that waited in vain is closed: what its server does is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final

import asyncpg

from durable.errors import InvalidSetting, text_of
from durable.telemetry import log

try:
    import psycopg
except ImportError as error:  # psycopg's own error advises packages by other names than durable's
    raise InvalidSetting(
        f"psycopg cannot be loaded: {text_of(error).splitlines()[0]}; run: pip install 'durable-bus[binary]', "
        "or install the system's libpq (Debian and Ubuntu: apt-get install libpq5)"
    ) from error

_is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)

CLIENT_KEEPALIVES: Final = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}


class _Psycopg:
    """Base of the connections of psycopg."""

    pgconn: Any
    is_pooled = False
    """Was it opened as one through a pooler?"""

    @property
    def is_at_rest(self) -> bool:
        """True of an open connection, as far as its client knows, in no transaction."""
        return bool(self.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE)


class PsycopgConnection(_Psycopg, psycopg.Connection[Any]):
    """Psycopg connection of sync engines."""

    answer_within: float | None = None

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        with _quiet():
            if options.get("timeout") is not None:  # for notifications: that none comes is no silence
                return super().wait(gen, *args, **options)
            return super().wait(_bounded(self, gen, self.answer_within), *args, **options)


class AsyncPsycopgConnection(_Psycopg, psycopg.AsyncConnection[Any]):
    """Psycopg connection of async engines."""

    answer_within: float | None = None

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        with _quiet():
            return await super().wait(_bounded(self, gen, self.answer_within), *args, **options)


_OWN_TYPES: Final = range(10_000)
"""The ids of Postgres' own types, which are the same on every server."""
_described: Final[dict[frozenset[int], Sequence[Any]]] = {}
_NOT_ASKED: Final = SimpleNamespace(name="the unnamed statement is still the one that was prepared")


class AsyncpgConnection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """Asyncpg connection of async engines. A wait that is too long raises TimeoutError."""

    _config: Any
    is_pooled = False
    at_begin = ""
    """Statements sent together with each BEGIN, without a round trip of their own."""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:  # noqa: ASYNC109
        if self.at_begin and query.startswith("BEGIN"):
            query = f"{query} {self.at_begin}"
        said: str = await super().execute(query, *args, timeout=timeout)
        return said

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> tuple[Sequence[Any], Any]:  # noqa: ASYNC109
        """Ask what uuid[] is once in a process, and not on each connection: that takes longer than most statements."""
        wanted = frozenset(typeoids)
        if wanted in _described:
            return _described[wanted], _NOT_ASKED
        found, statement = await super()._introspect_types(typeoids, timeout)
        if all(each in _OWN_TYPES for each in wanted):
            _described[wanted] = found
        return found, statement

    @property
    def answer_within(self) -> float | None:
        limit: float | None = self._config.command_timeout
        return limit

    @answer_within.setter
    def answer_within(self, seconds: float | None) -> None:
        self._config = self._config._replace(command_timeout=seconds)

    @property
    def is_at_rest(self) -> bool:
        return not self.is_closed() and not self.is_in_transaction()  # of a closed one asyncpg cannot tell the second

    def keep_alive(self, tcp_user_timeout: float) -> None:
        """asyncpg has no options for this, and its socket may belong to another loop than asyncio's."""
        found = self._transport.get_extra_info("socket")
        if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.closing(socket.socket(fileno=os.dup(found.fileno()))) as own:
                _keep_alive(own, tcp_user_timeout)


Answering = PsycopgConnection | AsyncPsycopgConnection | AsyncpgConnection

_unwanted: Final[set[asyncio.Task[AsyncpgConnection]]] = set()


async def open_asyncpg(*args: Any, timeout: float, **options: Any) -> AsyncpgConnection:  # noqa: ASYNC109
    """Open a connection. Raises TimeoutError, which says of what.

    When its opener is cancelled, a connection is opened all the same, within `timeout`, and closed at once: asyncpg,
    cancelled between two of its steps, leaves a future behind whose error nobody asks for.
    """
    opening = asyncio.create_task(_open_asyncpg(*args, timeout=timeout, **options), name="open a connection")
    try:
        await asyncio.wait([opening])
    except asyncio.CancelledError:
        _unwanted.add(opening)
        opening.add_done_callback(_close_unwanted)
        raise
    return opening.result()


async def _open_asyncpg(*args: Any, timeout: float, **options: Any) -> AsyncpgConnection:  # noqa: ASYNC109
    try:
        found: AsyncpgConnection = await asyncpg.connect(
            *args,
            timeout=timeout,  # pyright: ignore[reportArgumentType]  # a float will do
            connection_class=AsyncpgConnection,
            **options,
        )
    except TimeoutError as error:
        if str(error):  # the system's own, such as ETIMEDOUT
            raise
        raise TimeoutError(f"no connection within {timeout:g} s") from None
    return found


def _close_unwanted(opening: asyncio.Task[AsyncpgConnection]) -> None:
    _unwanted.discard(opening)
    if not opening.cancelled() and opening.exception() is None:
        opening.result().terminate()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lower psycopg's warnings in this block to debug: durable logs outages itself."""
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def _passes(record: logging.LogRecord) -> bool:
    if not _is_ours.get():
        return True
    log.debug("driver warning: %s: %s", record.name, record.getMessage())
    return False


logging.getLogger("psycopg").addFilter(_passes)


def _bounded(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], gen: Any, seconds: float | None
) -> Generator[Any, Any, Any]:
    """The same steps as `gen`, until the time is over. The driver takes a step several times a second, ready or not.

    Past the time it looks once more: while the process stood still, the answer may have come.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    is_late = False
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            was_late, is_late = is_late, not ready and deadline is not None and time.monotonic() > deadline
            if was_late and is_late:
                connection.pgconn.finish()
                raise psycopg.OperationalError(f"no answer within {seconds:g} s; the connection is given up")
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value


def _keep_alive(own: socket.socket, tcp_user_timeout: float) -> None:
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = [
        ("TCP_KEEPIDLE", CLIENT_KEEPALIVES["keepalives_idle"]),
        ("TCP_KEEPINTVL", CLIENT_KEEPALIVES["keepalives_interval"]),
        ("TCP_KEEPCNT", CLIENT_KEEPALIVES["keepalives_count"]),
        ("TCP_USER_TIMEOUT", int(tcp_user_timeout * 1_000)),
    ]
    for name, value in options:
        if hasattr(socket, name):  # not all systems have all of them
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
