"""Replays and erasures keep out of each other's way: what is erased while a replay publishes would come back by it.

    replay   publishing(): the lock of replays, shared, before the lake's files are chosen and until the last chunk
    erase    origin.alone(): the same lock, for itself; purge as well, which drops what replays under the same ids ask

The lock is of one database. What others erase from the same lake is seen by the records that lie in it: a replay looks
at them before each chunk, and after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from durable.errors import ArchiveConflict, InvalidSetting
from durable.pipeline import erasures
from durable.pipeline.copying import opened
from durable.pipeline.erasing import listed, noted
from durable.pipeline.erasures import State
from durable.pipeline.lake import Lake
from durable.pipeline.origin import direct_url, patiently
from durable.settings import Settings
from durable.storage import replays
from durable.storage.outages import translated
from durable.storage.readiness import check_ready

_UNDONE: Final = (State.INTERRUPTED, State.LAKE_RESTORED)
"""States of erasures whose content the lake still has, or has again."""


@dataclass(slots=True)
class Undisturbed:
    """A replay whose lake nobody erases from meanwhile."""

    conn: Connection
    schema: str
    lake: Lake | None
    _erased: dict[str, datetime] = field(init=False)

    def __post_init__(self) -> None:
        self._erased = self._records()

    def check(self) -> None:
        """Raise ArchiveConflict when something may have been erased since the replay has begun, and was read before."""
        try:
            is_held = replays.has_lock(self.conn, self.schema)
        except SQLAlchemyError:
            is_held = False
        if not is_held:
            raise ArchiveConflict(
                "replay: the connection that kept erasures away is lost; run the same command again, which continues "
                "it, and repeat erasures that were made meanwhile"
            )
        if self._records() != self._erased:
            raise ArchiveConflict(
                f"replay: messages were erased from lake {self._url} meanwhile, and this replay has read it before; "
                "run the same command again, which continues it without them. If some of them were among its last "
                "chunk, erase them from this database, too"
            )

    @property
    def _url(self) -> str:
        return "" if self.lake is None else self.lake.url

    def _records(self) -> dict[str, datetime]:
        return {} if self.lake is None else erasures.written(self.lake)


@contextmanager
def publishing(settings: Settings, lake: Lake | None) -> Iterator[Undisturbed]:
    """Keep erasures away while messages of this lake are chosen and published into the database of these settings.

    Raises ArchiveConflict while an erasure is at work there; InvalidSetting where one is not done, and the lake still
    has its content.
    """
    schema = settings.db_schema
    with (
        opened(direct_url(settings)) as engine,
        translated(schema),
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn,
    ):
        check_ready(conn, schema)
        if not patiently(replays.try_lock, conn, schema, is_shared=True):
            raise ArchiveConflict(
                "an erasure is at work on this database, or a purge; run the same command again after it"
            )
        try:
            _refuse_undone(conn, schema, lake)
            yield Undisturbed(conn, schema, lake)
        finally:
            with suppress(SQLAlchemyError):  # a connection that is lost has lost its lock
                replays.unlock(conn, schema, is_shared=True)


def _refuse_undone(conn: Connection, schema: str, lake: Lake | None) -> None:
    if lake is None:
        return
    undone = [each.erasure for each in listed(noted(conn, schema), lake) if each.state in _UNDONE]
    if undone:
        raise InvalidSetting(
            f"lake {lake.url}: content is there still, or again, of erasure {undone[0].erasure_id} "
            f"({undone[0].reason}), which a replay would bring back; run durable-agent pipeline erase with the same "
            "--id or --key again, and then the replay"
        )
