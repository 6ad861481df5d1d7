"""Claims of rows that come in an order, and of rows that are shared out. The argument is in durable.messages.ordering.

A lane is what is looked through for keys: the rows of one message type in the inbox, or of one destination in the
outbox. A key has one order whatever the types of its messages, so a key of the inbox may be found in several lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import Connection

from durable.envelope import LeasedEnvelope, LeaseKey, NodeId
from durable.storage.database import channel
from durable.storage.isolation import Refused, batch, isolated, quarantining, readable
from durable.storage.locks import keys_class
from durable.storage.sql import ordering as statements
from durable.storage.sql import recovery as recovery_statements
from durable.storage.sql.ordering import INCOMING, OUTGOING
from durable.storage.sql.recovery import Recovery


class Lane(NamedTuple):
    """A message type of the inbox, or a destination of the outbox."""

    destination: str | None = None
    message_type: str | None = None


class Waiting(NamedTuple):
    """A key that has unowned rows, and the type of the first when it may be claimed now: the key is neither held
    nor parked."""

    key: str
    message_type: str | None


class Turns(NamedTuple):
    """Keys whose first rows are to be claimed: of a destination, or of the inbox, where their turn is at one of these
    types."""

    keys: Sequence[str]
    destination: str | None = None
    handlers: Mapping[str, str] = MappingProxyType({})
    """The type of the handler, which may be a newer version, by message type."""
    is_trial: bool = False
    """True if messages of a stopped handler are claimed, to try the handler."""

    @property
    def scope(self) -> dict[str, Any]:
        if self.destination is not None:
            return {"destination": self.destination}
        types = {"message_types": list(self.handlers), "handlers": list(self.handlers.values())}
        return types | {"is_trial": self.is_trial}


class Share(NamedTuple):
    """Turn of tenants: whose rows are claimed by turns (of a message type, or of a destination), from which tenant on,
    how many of each, and how many in all.
    """

    lane: str
    start: str
    weights: Mapping[str, int]
    batch_size: int


class Claimed(NamedTuple):
    """Claimed rows, and the keys that must be asked for again: another node is claiming them now, or their head was put
    aside.
    """

    leases: list[LeasedEnvelope]
    contested: list[str]


def scan(conn: Connection, schema: str, lane: Lane, *, after: str, count: int) -> list[Waiting]:
    """The next keys after this one that have unowned rows of this lane, at most `count`, in their order."""
    conn.execute(statements.ALONG_THE_INDEX.within(schema))
    scope = {"lane": lane.message_type} if lane.destination is None else {"destination": lane.destination}
    rows = conn.execute(_of(lane.destination).scan.within(schema), scope | {"after": after, "count": count})
    return [Waiting(*row) for row in rows]


def lanes(conn: Connection, schema: str) -> list[Lane]:
    """Read the lanes that have unowned rows with an ordering key."""
    conn.execute(statements.ALONG_THE_INDEX.within(schema))
    types = conn.execute(statements.ORDERED_TYPES.within(schema)).scalars()
    found = [Lane(message_type=name) for name in types]
    return found + [Lane(name) for name in conn.execute(statements.ORDERED_DESTINATIONS.within(schema)).scalars()]


def claim(
    conn: Connection,
    schema: str,
    turns: Turns,
    *,
    batch_size: int,
    node: NodeId,
    tell_others: Collection[str] | None = None,
) -> Claimed:
    """Take the first rows of those of these keys that nobody has: of each a run of one type, which is to be handled in
    order.

    With `tell_others`, the types that have a handler here, other nodes are woken for keys whose turn is at another.
    """
    destination, table = turns.destination, _of(turns.destination)
    found = conn.execute(
        table.lock.within(schema),
        {"keys": list(turns.keys), "class_id": keys_class(schema), "scope": destination or ""},
    )
    locked = list(found.scalars())
    contested = [key for key in turns.keys if key not in set(locked)]
    if not locked:
        return Claimed([], contested)
    longest = max(1, batch_size // len(locked))
    run = _Run(conn, schema, table, turns.scope | {"node": node}, longest=longest, room=batch_size)
    leases = run.claim(locked)
    contested += run.beheaded
    left = set(locked) - {lease.ordering_key for lease in leases}
    if left and tell_others is not None and destination is None:
        tell(conn, schema, left, except_types=tell_others)
    return Claimed(leases, contested)


class _Run:
    """Claim of runs. A row that the database refuses is found by halving the keys, and is the head of its own."""

    def __init__(
        self,
        conn: Connection,
        schema: str,
        table: statements.Ordered,
        params: dict[str, Any],
        *,
        longest: int,
        room: int,
    ) -> None:
        self._conn = conn
        self._schema = schema
        self._table = table
        self._params = params
        self._longest = longest
        self._room = room
        self.beheaded: list[str] = []
        """The keys whose head was put aside: messages behind may be claimed."""

    def claim(self, keys: Sequence[str]) -> list[LeasedEnvelope]:
        parts: list[list[LeasedEnvelope]] = []
        parts += isolated(self._conn, keys, self._claim_runs, lambda key, _: parts.extend(self._claim_head(key)))
        return [lease for part in parts for lease in part]

    def _claim_runs(self, keys: Sequence[str], longest: int | None = None) -> list[LeasedEnvelope]:
        """Claim runs of these keys, together no more than there is room for."""
        found = self._conn.execute(
            self._table.claim.within(self._schema),
            self._params | {"keys": list(keys), "longest_run": longest or self._longest, "batch_size": self._room},
        )
        leases = readable(self._conn, self._schema, self._recovery, self._params["node"], found)
        self._room -= len(leases)
        return leases

    def _claim_head(self, key: str) -> list[list[LeasedEnvelope]]:
        """The first row alone, of a key whose run was refused; if that is what is refused, it is put aside."""
        before = self._head(key)
        return isolated(self._conn, [key], lambda keys: self._claim_runs(keys, 1), partial(self._put_aside, before))

    def _put_aside(self, before: LeaseKey | None, key: str, reason: str) -> None:
        """Put the head of a key aside, unless another row has come before it meanwhile."""
        if before is None or self._head(key) != before:
            return
        aside = quarantining(self._conn, self._schema, self._recovery, self._params["node"], "claim")
        aside(before, reason)
        if self._head(key) != before:
            self.beheaded.append(key)

    def _head(self, key: str) -> LeaseKey | None:
        """Claim the first row of a key."""
        row = self._conn.execute(self._table.heads.within(self._schema), self._params | {"keys": [key]}).first()
        return None if row is None else (row[1], row[2], row[3])

    @property
    def _recovery(self) -> Recovery:
        return recovery_statements.INCOMING if self._table is INCOMING else recovery_statements.OUTGOING


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
    conn: Connection, schema: str, share: Share, *, node: NodeId, handler: str | None = None, is_trial: bool = False
) -> tuple[list[LeasedEnvelope], str]:
    """Take rows of this message type, by weight from each tenant in turn. With them comes the tenant whose turn is
    next."""
    params = {"handler": handler or share.lane, "is_trial": is_trial, "node": node}
    refused = quarantining(conn, schema, recovery_statements.INCOMING, node, "claim")
    return _claim_share(conn, schema, statements.SHARED_INCOMING, share, params, refused)


def claim_outgoing_shares(
    conn: Connection, schema: str, share: Share, *, node: NodeId
) -> tuple[list[LeasedEnvelope], str]:
    """The same of what waits for this destination."""
    refused = quarantining(conn, schema, recovery_statements.OUTGOING, node, "claim")
    return _claim_share(conn, schema, statements.SHARED_OUTGOING, share, {"node": node}, refused)


def _claim_share(
    conn: Connection,
    schema: str,
    table: statements.Shared,
    share: Share,
    params: dict[str, Any],
    refused: Refused[Any],
) -> tuple[list[LeasedEnvelope], str]:
    params |= {"lane": share.lane, "batch_size": share.batch_size}
    tenants = conn.execute(
        table.next.within(schema), {"lane": share.lane, "start": share.start, "count": share.batch_size + 1}
    ).scalars()
    quotas, after = share_out(list(tenants), share.weights, share.batch_size)
    if not quotas:
        return [], after
    params |= {"keys": list(quotas), "quotas": list(quotas.values())}
    recovery = recovery_statements.INCOMING if table is statements.SHARED_INCOMING else recovery_statements.OUTGOING
    claimed = batch(conn, schema, table.claim, params, refused)
    return readable(conn, schema, recovery, params["node"], claimed), after


def share_out(tenants: Sequence[str], weights: Mapping[str, int], batch_size: int) -> tuple[dict[str, int], str]:
    """Share a batch among tenants: rows for each, and the tenant that comes next; '' is the first."""
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
