"""The locks of a node's singletons, on the connection of its membership, and in its thread.

    wanted    try the lock --> taken: a new epoch; sure at once if the last holder gave it up, or else after the lease
                               that this one has left in the database
    held      see the lock and the epoch again, three times within a lease
    unwanted  give it up, then give the lock back

A holder that was struck off, because it stands still, keeps its session and its lock: whoever wants the lock ends that
session.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from durable.calls.singletons import Holding, Singletons, now
from durable.envelope import NodeId
from durable.errors import LeaseLost
from durable.settings import Settings
from durable.storage import registry
from durable.storage.locks import nodes_class, singletons_class
from durable.storage.outages import described
from durable.storage.sql import registry as statements
from durable.storage.sql.statement import Statement
from durable.telemetry import log

_LONGEST_INTERVAL: Final = 1.0  # seconds
_LOOKS: Final = 3  # within a lease


class SingletonLocks:
    """Takes, sees and gives up the locks. Each method is called by the thread of the membership."""

    def __init__(self, singletons: Singletons, settings: Settings) -> None:
        self._singletons = singletons
        self._schema = settings.db_schema
        self._interval = min(_LONGEST_INTERVAL, settings.heartbeat_interval.total_seconds())
        self.lease = _LOOKS * self._interval
        self._numbers: dict[str, int] = {}
        self._held: dict[str, Holding] = {}
        self._due = 0.0
        self._wanted: Mapping[str, str] = {}
        self._has_warned = False

    def hasten(self) -> None:
        """Look at the next opportunity: something has changed."""
        self._due = 0.0

    def look(self, conn: Connection, node: NodeId) -> None:
        """Take what is wanted, and see what is held, if it is time. Raises LeaseLost when a lock is lost."""
        wanted, at = self._singletons.wanted, now()
        if not self._singletons.is_open or (at < self._due and wanted is self._wanted):
            return
        self._due, self._wanted = at + self._interval, wanted
        if self._held:
            self._see(conn, node, at)
        for service in self._held.keys() - wanted.keys():
            self._give_up(conn, service)
        for service in sorted(wanted.keys() - self._held.keys()):
            self._try(conn, node, service, wanted[service])

    def leave(self, conn: Connection) -> None:
        """Give up all, unless a call of one still runs: then the next holder waits."""
        if self._singletons.is_idle:
            for service in list(self._held):
                self._give_up(conn, service)

    def _see(self, conn: Connection, node: NodeId, at: float) -> None:
        numbers = {self._numbers[service]: service for service in self._held}
        params = {
            "class_id": singletons_class(self._schema),
            "node": node,
            "numbers": list(numbers),
            "epochs": [self._held[service].epoch for service in numbers.values()],
        }
        seen = set(conn.execute(self._sql(statements.READ_HELD), params).scalars())
        for number, service in numbers.items():
            if number not in seen:
                raise LeaseLost(f"node {node}: the lock of {service} is lost")
            self._singletons.confirm(service, at + self.lease)

    def _try(self, conn: Connection, node: NodeId, service: str, version: str) -> None:
        if service not in self._numbers:
            declared = conn.execute(self._sql(statements.DECLARE_SINGLETON), {"name": service, "version": version})
            self._numbers[service] = declared.scalar_one()
        number = self._numbers[service]
        key = {"class_id": singletons_class(self._schema), "number": number}
        at = now()
        if not conn.execute(self._sql(statements.LOCK_SINGLETON), key).scalar_one():
            self._end_struck_off(conn, number, service)
            return
        taking = {"number": number, "node": node, "lease": timedelta(seconds=self.lease)}
        row = conn.execute(self._sql(statements.TAKE_SINGLETON), taking).one()
        begins = at if row.former_lease is None else now() + row.former_lease.total_seconds()
        self._held[service] = Holding(row.epoch, begins, at + self.lease)
        self._singletons.hold(service, self._held[service])
        log.info("node %d holds the singleton %s, in epoch %d", node, service, row.epoch)

    def _end_struck_off(self, conn: Connection, number: int, service: str) -> None:
        key = {"class_id": singletons_class(self._schema), "nodes_class_id": nodes_class(self._schema)}
        try:
            ended = conn.execute(self._sql(statements.END_STRUCK_OFF_HOLDER), {**key, "number": number}).all()
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            if not self._has_warned:
                self._has_warned, said = True, described(error)
                log.warning("session of a node that was struck off cannot be ended, and keeps %s: %s", service, said)
            return
        if ended:
            log.warning("session of a node that was struck off is ended: it kept the lock of %s", service)
            self.hasten()

    def _give_up(self, conn: Connection, service: str) -> None:
        """Be sure no longer, then say so, then give the lock back: the next holder need not wait.

        A holder that has not begun leaves the lease of the last one, for which the next must wait, too.
        """
        self._singletons.drop(service)
        holding = self._held.pop(service)
        number = self._numbers[service]
        if holding.sure_from <= now():
            conn.execute(self._sql(statements.GIVE_UP_SINGLETON), {"number": number, "epoch": holding.epoch})
        key = {"class_id": singletons_class(self._schema), "number": number}
        conn.execute(self._sql(statements.UNLOCK_SINGLETON), key)
        registry.tell(conn, self._schema)
        log.info("singleton given up: %s, in epoch %d", service, holding.epoch)

    def _sql(self, statement: Statement) -> Any:
        return statement.within(self._schema)
