"""The nodes of a service as the database knows them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.envelope import NodeId
from durable.storage.locks import nodes_class
from durable.storage.sql import housekeeping


class Node(NamedTuple):
    """Node: a process of a service, alive while its own connection holds its advisory lock."""

    node_id: NodeId
    service: str
    description: str
    version: str
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_age: timedelta
    capabilities: str

    @property
    def handlers(self) -> Mapping[str, str]:
        """The types that the node has said it handles, each with that of its handler: it takes older versions, too."""
        said = json.loads(self.capabilities)
        types: list[str] = said.get("message_types", [])
        return dict(zip(types, said.get("handlers", types), strict=False))

    @property
    def message_types(self) -> Sequence[str]:
        """The types that the node has said it handles."""
        return list(self.handlers)


def handlers(conn: Connection, schema: str) -> dict[str, str]:
    """Return the handler of each type, as the nodes have said; the newest knows best."""
    return _newest(read(conn, schema))


def handlers_of(of: Sequence[Node], alive: Collection[NodeId]) -> dict[str, list[str]]:
    """Return the handlers that each type has at the living nodes, whose releases may differ; the newest node's first.

    Of a type that no living node handles, the newest node of all knows best.
    """
    found = {name: [handler] for name, handler in _newest(of).items()}
    living = sorted((node for node in of if node.node_id in alive), key=_start, reverse=True)
    for name in {name for node in living for name in node.message_types}:
        found[name] = list(dict.fromkeys(node.handlers[name] for node in living if name in node.handlers))
    return found


def _newest(of: Sequence[Node]) -> dict[str, str]:
    return {name: handler for node in sorted(of, key=_start) for name, handler in node.handlers.items()}


def _start(node: Node) -> datetime:
    return node.started_at


def capabilities(handlers: Mapping[str, str]) -> str:
    """Write what a node says of itself when it joins: see Node.handlers."""
    return json.dumps({"message_types": list(handlers), "handlers": list(handlers.values())})


def read(conn: Connection, schema: str) -> list[Node]:
    return [Node(*row) for row in conn.execute(housekeeping.READ_NODES.within(schema))]


def services(conn: Connection, schema: str) -> list[str]:
    """Return the services whose nodes work on these tables, sorted; more than one take each other's messages."""
    return sorted({node.service for node in read(conn, schema)})


def locked(conn: Connection, schema: str) -> set[NodeId]:
    """The nodes whose lock is held now."""
    rows = conn.execute(housekeeping.READ_LOCKED_NODES.within(schema), {"class_id": nodes_class(schema)})
    return {NodeId(row.node_id) for row in rows}


def remove(conn: Connection, schema: str, node: NodeId) -> None:
    """Strike the node off: if it still runs, its next heartbeat tells it so."""
    conn.execute(housekeeping.REMOVE_NODE.within(schema), {"node": node})


class ServerTimes(NamedTuple):
    """Times of the database's server, by its own clock: its start, which no step of the clock changes, and now."""

    started_at: datetime
    now: datetime


def server_times(conn: Connection, schema: str) -> ServerTimes:
    return ServerTimes(*conn.execute(housekeeping.READ_SERVER_TIMES.within(schema)).one())
