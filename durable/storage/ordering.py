"""Claims of rows that come in an order, and of rows that are shared out. The argument is in durable.ordering.

A lane is what is looked through for keys: the rows of one message type in the inbox, or of one destination in the
outbox. A key has one order whatever the types of its messages, so a key of the inbox may be found in several lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection

from durable.envelope import Leased, NodeId
from durable.storage import ordering_statements as statements
from durable.storage.database import channel
from durable.storage.locks import keys_class
from durable.storage.ordering_statements import INCOMING, OUTGOING
from durable.storage.rows import leased


class Lane(NamedTuple):
    """A message type of the inbox, or a destination of the outbox."""

    destination: str | None = None
    message_type: str | None = None


class Waiting(NamedTuple):
    """A key that has unowned rows, and the type of the first when it may be claimed now."""

    key: str
    message_type: str | None


class Claimed(NamedTuple):
    """What was claimed, and the keys of which another node is claiming at this moment."""

    leases: list[Leased]
    contested: list[str]


def look(conn: Connection, schema: str, lane: Lane, *, after: str, count: int) -> list[Waiting]:
    """The next keys after this one that have unowned rows of this lane, at most `count`, in their order."""
    conn.execute(statements.ALONG_THE_INDEX.within(schema))
    scope = {"lane": lane.message_type} if lane.destination is None else {"destination": lane.destination}
    rows = conn.execute(_of(lane.destination).look.within(schema), scope | {"after": after, "count": count})
    return [Waiting(*row) for row in rows]


def lanes(conn: Connection, schema: str) -> list[Lane]:
    """Those that have unowned rows with an ordering key."""
    conn.execute(statements.ALONG_THE_INDEX.within(schema))
    types = conn.execute(statements.ORDERED_TYPES.within(schema)).scalars()
    found = [Lane(message_type=name) for name in types]
    return found + [Lane(name) for name in conn.execute(statements.ORDERED_DESTINATIONS.within(schema)).scalars()]


def claim(
    conn: Connection,
    schema: str,
    *,
    destination: str | None,
    keys: Sequence[str],
    message_types: Collection[str] = (),
    handlers: Mapping[str, str] | None = None,
    batch_size: int,
    node: NodeId,
    tell_others: Collection[str] | None = None,
    is_trial: bool = False,
) -> Claimed:
    """Take the first rows of those of these keys that nobody has: of each a run of one type, which is to be handled in
    order. From the inbox (`destination` is None) only what begins with one of `message_types`; of a stopped handler
    only for a trial. `handlers` names the handler of a type where that is a newer version.

    With `tell_others`, the types that have a handler here, other nodes are woken for keys whose turn is at another.
    """
    table, scope = _of(destination), _scope(destination)
    found = conn.execute(
        table.lock.within(schema),
        {"keys": list(keys), "class_id": keys_class(schema), "scope": destination or ""},
    )
    locked = list(found.scalars())
    contested = [key for key in keys if key not in set(locked)]
    if not locked:
        return Claimed([], contested)
    rows = conn.execute(
        table.claim.within(schema),
        scope
        | (_handled(message_types, handlers or {}, is_trial) if destination is None else {})
        | {"keys": locked, "longest_run": max(1, batch_size // len(locked)), "batch_size": batch_size, "node": node},
    )
    leases = [leased(row) for row in rows]
    left = set(locked) - {lease.ordering_key for lease in leases}
    if left and tell_others is not None and destination is None:
        tell(conn, schema, left, except_types=tell_others)
    return Claimed(leases, contested)


def tell(conn: Connection, schema: str, keys: Collection[str], *, except_types: Collection[str] = ()) -> None:
    """Wake the other nodes if one of these keys of the inbox is free, and its turn is at another type than these."""
    told = {"keys": list(keys), "message_types": list(except_types), "channel": channel(schema)}
    conn.execute(INCOMING.tell.within(schema), told)


def shared_types(conn: Connection, schema: str) -> list[str]:
    """The message types that have unowned rows in shares."""
    return list(conn.execute(statements.SHARED_INCOMING.lanes.within(schema)).scalars())


def shared_destinations(conn: Connection, schema: str) -> list[str]:
    """The destinations that have unowned rows in shares."""
    return list(conn.execute(statements.SHARED_OUTGOING.lanes.within(schema)).scalars())


def claim_shares(
    conn: Connection,
    schema: str,
    *,
    message_type: str,
    handler: str | None = None,
    start: str,
    weights: Mapping[str, int],
    batch_size: int,
    node: NodeId,
    is_trial: bool = False,
) -> tuple[list[Leased], str]:
    """Take up to `batch_size` rows of this type, by weight from each tenant in turn, from `start` on. With it comes the
    tenant whose turn is next."""
    stopped_by = {"handler": handler or message_type, "is_trial": is_trial}
    turn = _Turn(statements.SHARED_INCOMING, message_type, start, weights, batch_size)
    return _claim_turn(conn, schema, turn, stopped_by | {"node": node})


def claim_outgoing_shares(
    conn: Connection,
    schema: str,
    *,
    destination: str,
    start: str,
    weights: Mapping[str, int],
    batch_size: int,
    node: NodeId,
) -> tuple[list[Leased], str]:
    """The same of what waits for this destination."""
    turn = _Turn(statements.SHARED_OUTGOING, destination, start, weights, batch_size)
    return _claim_turn(conn, schema, turn, {"node": node})


class _Turn(NamedTuple):
    """Whose shares are claimed, from which tenant on, and how many rows."""

    table: statements.Shared
    lane: str
    start: str
    weights: Mapping[str, int]
    batch_size: int


def _claim_turn(conn: Connection, schema: str, turn: _Turn, params: dict[str, Any]) -> tuple[list[Leased], str]:
    lane = {"lane": turn.lane}
    tenants = conn.execute(
        turn.table.next.within(schema), lane | {"start": turn.start, "count": turn.batch_size + 1}
    ).scalars()
    quotas, after = share_out(list(tenants), turn.weights, turn.batch_size)
    if not quotas:
        return [], after
    shares = {"keys": list(quotas), "quotas": list(quotas.values()), "batch_size": turn.batch_size}
    rows = conn.execute(turn.table.claim.within(schema), lane | shares | params)
    return [leased(row) for row in rows], after


def share_out(tenants: Sequence[str], weights: Mapping[str, int], batch_size: int) -> tuple[dict[str, int], str]:
    """How many rows each tenant may have of a batch, and who comes next: '' is the first of all."""
    quotas: dict[str, int] = {}
    used = 0
    for tenant in tenants:
        quota = min(weights.get(tenant, 1), batch_size)
        if used + quota > batch_size:
            return quotas, tenant
        quotas[tenant] = quota
        used += quota
    rounds = batch_size // used if used else 0
    return {tenant: quota * rounds for tenant, quota in quotas.items()}, ""


def _of(destination: str | None) -> statements.Ordered:
    return INCOMING if destination is None else OUTGOING


def _handled(message_types: Collection[str], handlers: Mapping[str, str], is_trial: bool) -> dict[str, Any]:
    names = list(message_types)
    return {"message_types": names, "handlers": [handlers.get(name, name) for name in names], "is_trial": is_trial}


def _scope(destination: str | None) -> dict[str, Any]:
    return {} if destination is None else {"destination": destination}
