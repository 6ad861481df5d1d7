"""One message for a handler whose circuit is to be tried: wherever it waits, in its turn, and for one node alone."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection

from durable.envelope import Leased, NodeId
from durable.storage import circuits, inbox, ordering

_KEYS_AT_ONCE = 100
_LOOKS = 20  # as many keys may be held, or have their turn at other types, before the one that is looked for


def claim_trial(
    conn: Connection, schema: str, *, handler: str, message_type: str, node: NodeId, lease: timedelta
) -> Leased | None:
    """The one message with which this node may try a handler, if its circuit is due and nobody tries it already.

    The message is of this type, the handler's own or an older version. Nobody else is given one before `lease` is over.
    """
    if not circuits.begin_trial(conn, schema, handler, lease=lease):
        return None
    claimed = (
        inbox.claim(conn, schema, message_type=message_type, batch_size=1, node=node, is_trial=True)
        or _claim_share(conn, schema, message_type, node)
        or _claim_in_order(conn, schema, message_type, node)
    )
    if not claimed:
        circuits.try_again(conn, schema, handler)  # it is still due: nothing waited that it could be tried with
    return claimed[0] if claimed else None


def _claim_share(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[Leased]:
    return ordering.claim_shares(
        conn, schema, message_type=message_type, start="", weights={}, batch_size=1, node=node, is_trial=True
    )[0]


def _claim_in_order(conn: Connection, schema: str, message_type: str, node: NodeId) -> list[Leased]:
    after = ""
    for _ in range(_LOOKS):
        lane = ordering.Lane(message_type=message_type)
        found = ordering.look(conn, schema, lane, after=after, count=_KEYS_AT_ONCE)
        keys = [waiting.key for waiting in found if waiting.message_type == message_type]
        types = [message_type]
        if claimed := ordering.claim(
            conn, schema, destination=None, keys=keys, message_types=types, batch_size=1, node=node, is_trial=True
        ).leases:
            return claimed
        if len(found) < _KEYS_AT_ONCE:
            break
        after = found[-1].key
    return []
