"""Claims of rows that come in an order, and of rows that are shared out. The argument is in durable.messages.ordering.

A lane is what is looked through for keys: the rows of one message type in the inbox, or of one destination in the
outbox. A key has one order whatever the types of its messages, so a key of the inbox may be found in several lanes.

There may be as many lanes as a service has customers: a look and a claim each are for many lanes at once, all of the
inbox or all of the outbox.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row

from durable.envelope import LeasedEnvelope, LeaseKey, NodeId
from durable.storage.database import channel
from durable.storage.isolation import Refused, batch, isolated, quarantining, readable
from durable.storage.leases import release
from durable.storage.locks import keys_class
from durable.storage.sql import ordering as statements
from durable.storage.sql import recovery as recovery_statements
from durable.storage.sql.ordering import INCOMING, OUTGOING
from durable.storage.sql.recovery import Recovery
from durable.storage.sql.work import ALONG_THE_INDEX


class Lane(NamedTuple):
    """A message type of the inbox, or a destination of the outbox."""

    destination: str | None = None
    message_type: str | None = None


class Waiting(NamedTuple):
    """A key that has unowned rows, and the type of the first when it may be claimed now: the key is neither held
    nor parked."""

    key: str
    message_type: str | None


class Turn(NamedTuple):
    """A key of the inbox, or of a destination of the outbox."""

    key: str
    destination: str | None = None


class Turns(NamedTuple):
    """Keys whose first rows are to be claimed: of the outbox, or of the inbox, where their turn is at one of these
    types.
    """

    turns: Sequence[Turn]
    handlers: Mapping[str, str] = MappingProxyType({})
    """The type of the handler, which may be a newer version, by message type."""
    is_trial: bool = False
    """True if messages of a stopped handler are claimed, to try the handler."""

    @property
    def params(self) -> dict[str, Any]:
        if _is_outgoing(self.turns):
            return {}
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
    contested: list[Turn]


def scan(conn: Connection, schema: str, looks: Mapping[Lane, str], *, count: int) -> dict[Lane, list[Waiting]]:
    """The next keys of each lane that have unowned rows of it, at most `count`, in their order.

    With each lane comes the key to go on behind; '' is before the first.
    """
    conn.execute(ALONG_THE_INDEX.within(schema))
    lanes = {lane.destination or lane.message_type: lane for lane in looks}
    params = {"lanes": list(lanes), "afters": list(looks.values()), "count": count}
    found: dict[Lane, list[Waiting]] = {lane: [] for lane in looks}
    for name, key, message_type in conn.execute(_of(looks).scan.within(schema), params):
        found[lanes[name]].append(Waiting(key, message_type))
    return found


def lanes(conn: Connection, schema: str, *, after: str, count: int) -> list[Lane]:
    """Read the lanes that have unowned rows with an ordering key: all message types, and the next destinations, at most
    `count` behind this one.
    """
    conn.execute(ALONG_THE_INDEX.within(schema))
    types = conn.execute(statements.ORDERED_TYPES.within(schema)).scalars()
    found = [Lane(message_type=name) for name in types]
    destinations = conn.execute(statements.ORDERED_DESTINATIONS.within(schema), {"after": after, "count": count})
    return found + [Lane(name) for name in destinations.scalars()]


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
    if not turns.turns:
        return Claimed([], [])
    table = _of(turns.turns)
    found = conn.execute(table.lock.within(schema), _named(turns.turns) | {"class_id": keys_class(schema)})
    locked = [Turn(key, scope or None) for scope, key in found]
    ours = set(locked)
    contested = [turn for turn in turns.turns if turn not in ours]
    if not locked:
        return Claimed([], contested)
    longest = max(1, batch_size // len(locked))
    run = _Run(conn, schema, table, turns.params | {"node": node}, longest=longest, room=batch_size)
    leases = run.claim(locked)
    contested += run.beheaded
    if tell_others is not None and table is INCOMING:
        left = {turn.key for turn in locked} - {lease.ordering_key for lease in leases}
        if left:
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
        self.beheaded: list[Turn] = []
        """The keys of rows that were put aside: messages behind may be claimed."""

    def claim(self, turns: Sequence[Turn]) -> list[LeasedEnvelope]:
        parts: list[list[LeasedEnvelope]] = []
        parts += isolated(self._conn, turns, self._claim_runs, lambda turn, _: parts.extend(self._claim_head(turn)))
        return [lease for part in parts for lease in part]

    def _claim_runs(self, turns: Sequence[Turn], longest: int | None = None) -> list[LeasedEnvelope]:
        """Claim runs of these keys, together no more than there is room for."""
        limits = {"longest_run": longest or self._longest, "batch_size": self._room}
        found = self._conn.execute(self._table.claim.within(self._schema), self._params | _named(turns) | limits).all()
        leases = readable(self._conn, self._schema, self._recovery, self._params["node"], found)
        if self._table is INCOMING and len(leases) < len(found):
            leases = self._before_letters(leases, found)
        self._room -= len(leases)
        return leases

    def _before_letters(self, taken: Sequence[LeasedEnvelope], found: Sequence[Row[Any]]) -> list[LeasedEnvelope]:
        """Release those of a key behind a row that became a dead letter, which may have parked the key."""
        read = {lease.seq for lease in taken}
        ends: dict[str | None, int] = {}
        for row in found:
            if row.seq not in read:
                ends.setdefault(row.ordering_key, row.seq)
        behind = [lease for lease in taken if lease.seq > ends.get(lease.ordering_key, lease.seq)]
        release(self._conn, self._schema, self._recovery, self._params["node"], [lease.key for lease in behind])
        self.beheaded += [Turn(key) for key in {lease.ordering_key for lease in behind} if key is not None]
        return [lease for lease in taken if lease not in behind]

    def _claim_head(self, turn: Turn) -> list[list[LeasedEnvelope]]:
        """The first row alone, of a key whose run was refused; if that is what is refused, it is put aside."""
        before = self._head(turn)
        return isolated(self._conn, [turn], lambda turns: self._claim_runs(turns, 1), partial(self._put_aside, before))

    def _put_aside(self, before: LeaseKey | None, turn: Turn, reason: str) -> None:
        """Put the head of a key aside, unless another row has come before it meanwhile."""
        if before is None or self._head(turn) != before:
            return
        aside = quarantining(self._conn, self._schema, self._recovery, self._params["node"], "claim")
        aside(before, reason)
        if self._head(turn) != before:
            self.beheaded.append(turn)

    def _head(self, turn: Turn) -> LeaseKey | None:
        """Read the key of the first row of a key."""
        row = self._conn.execute(self._table.heads.within(self._schema), self._params | _named([turn])).first()
        return None if row is None else (row[1], row[2], row[3])

    @property
    def _recovery(self) -> Recovery:
        return recovery_statements.INCOMING if self._table is INCOMING else recovery_statements.OUTGOING


def tell(conn: Connection, schema: str, keys: Collection[str], *, except_types: Collection[str] = ()) -> None:
    """Wake the other nodes if one of these keys of the inbox is free, and its turn is at another type than these."""
    told = {"keys": list(keys), "message_types": list(except_types), "channel": channel(schema)}
    conn.execute(INCOMING.tell.within(schema), told)


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


def _is_outgoing(where: Iterable[Lane | Turn]) -> bool:
    return next(iter(where)).destination is not None


def _of(where: Iterable[Lane | Turn]) -> statements.Ordered:
    return OUTGOING if _is_outgoing(where) else INCOMING


def _named(turns: Sequence[Turn]) -> dict[str, list[str]]:
    return {"scopes": [turn.destination or "" for turn in turns], "keys": [turn.key for turn in turns]}
